"""Drafters and models made up for tests: a drafter that knows the text, and a model that is a table."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from openv41.config import Config, engram_primes
from openv41.generate.loop import Generation, Request
from openv41.generate.policy import Always
from openv41.generate.speculate import Speculation
from openv41.model.transformer import Output, Transformer
from openv41.ops import choose
from openv41.state import Cache, Step
from tests.small import small_config

BLOCK = 5
SHALLOW = dict(
    n_layers=3, compress_ratios=(0, 2, 1), kv_source_layers=(1, 2), index_source_layers=(1, 2),
    candidate_source_layer=2, engram_layer_ids=(0,),
    engram_num_embeddings=(sum(map(sum, engram_primes(1, 2, 2, 50)[0])),),
)  # fmt: skip
DRAFTING = SHALLOW | dict(
    n_mtp_layers=2, compress_ratios=(0, 2, 1, 0, 0), dspark_block_size=BLOCK, dspark_noise_token_id=94,
    dspark_target_layer_ids=(1, 2), dspark_markov_rank=8, dspark_n_routed_experts=3, dspark_n_activated_experts=1,
)  # fmt: skip
"""Changes to the small config: three layers (a window, a source of ratio 2, one of ratio 1 with candidates), and with a
draft of two stages."""


def texts_of(generation: Generation) -> list[list[int]]:
    """The new ids of each sequence."""
    ids: list[list[int]] = [[] for _ in generation.requests]
    for event in generation.events():
        ids[event.sequence].append(event.id)
    return ids


class Oracle:
    """Knows each slot's whole text (prompt and continuation) and drafts it: `right(slot, round)` tokens of it, then
    others. Its confidence says which."""

    def __init__(self, texts: Sequence[Sequence[int]], vocabulary: int, right: Callable[[int, int], int]) -> None:
        self.texts, self.vocabulary, self.right = texts, vocabulary, right
        self.rounds: dict[int, int] = {}
        self.remembered = 0

    def remember(self, taps: Tensor | None, step: Step | None, cache: Cache) -> None:
        self.remembered += 1

    def begin(self, ids: Tensor, slots: Sequence[int], cache: Cache, count: int) -> "OracleDrafting":
        rights = []
        for slot, id in zip(slots, ids.tolist(), strict=True):
            length = cache.length(slot)
            assert self.texts[slot][length] == id, "a draft stands behind the latest id"
            self.rounds[slot] = self.rounds.get(slot, -1) + 1
            rights.append(self.right(slot, self.rounds[slot]))
        return OracleDrafting(self, [(slot, cache.length(slot) + 1) for slot in slots], rights, count)


class OracleDrafting:
    def __init__(self, oracle: Oracle, places: list[tuple[int, int]], rights: list[int], count: int) -> None:
        self.oracle, self.places, self.rights, self.count, self.place = oracle, places, rights, count, 0

    def next(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        assert self.place < self.count
        logits = torch.zeros(len(self.places), self.oracle.vocabulary)
        sure = torch.full((len(self.places),), -4.0)
        for row, (slot, first) in enumerate(self.places):
            text, at = self.oracle.texts[slot], first + self.place
            id = text[at] if at < len(text) else 0
            if self.place < self.rights[row]:
                sure[row] = 4.0
            else:
                id = (id + 1) % self.oracle.vocabulary
            logits[row, id] = 20.0
        self.place += 1
        return logits, sure


def drafted_by(oracle: Oracle, length: int = 5) -> Speculation:
    return Speculation(oracle, Always(length))


class Table(Transformer):
    """A model whose next id depends on the latest one alone, and with `turn` on its position: `logits` [vocabulary,
    vocabulary]. It keeps nothing, and takes the cache through all its verbs."""

    def __init__(self, logits: Tensor, turn: int = 0, context: int = 2**20) -> None:
        nn.Module.__init__(self)
        size = len(logits)
        self.config: Config = small_config(
            vocab_size=size, n_layers=1, compress_ratios=(0,), kv_source_layers=(), index_source_layers=(),
            candidate_source_layer=-1, engram_layer_ids=(), engram_num_embeddings=(), image_token_id=0,
            original_seq_len=context, rope_factor=1,
        )  # fmt: skip
        self.ops, self.mtp = choose("cpu", "reference"), None
        self.embed = nn.Embedding(size, 1)
        self.table, self.turn = logits, turn

    def forward(self, step: Step, cache: Cache | None = None, prefill: str = "halo") -> Output:
        assert cache is not None
        cache.admit(step)
        cache.extend(step)
        rows = (step.ids + self.turn * step.position)[step.wanted] % len(self.table)
        return Output(self.table[rows], None, None)


class TableDrafter:
    """Drafts by a table of its own. `confidence` [vocabulary] is that in what follows an id."""

    def __init__(self, logits: Tensor, confidence: Tensor) -> None:
        self.table, self.confidence = logits, confidence

    def remember(self, taps: Tensor | None, step: Step | None, cache: Cache) -> None:
        pass

    def begin(self, ids: Tensor, slots: Sequence[int], cache: Cache, count: int) -> "TableDrafter":
        return self

    def next(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        return self.table[previous], self.confidence[previous]


def continued(model: Transformer, requests: Sequence[Request]) -> list[list[int]]:
    """Prompts with what the loop says to them without drafts."""
    texts = texts_of(Generation(model, requests, eos=None))
    return [[*request.ids, *text] for request, text in zip(requests, texts, strict=True)]
