"""DSpark, the draft: a few small stages that propose the next tokens, for the model to verify all at once.

    taps [n, targets * dim] of main tokens -> main_proj, main_norm -> one vector a stage in the stage's ring
    [token just sampled, noise, noise, ...] -> stages -> one mix -> hidden [b, block, dim]
    hidden -> norm -> the model's head, + Markov bias of the token before -> logits, left to right
    hidden, Markov embedding of the token before -> confidence, a raw score

A *main* token is one that the model has run; a stage keeps the last `window_size` of them, made of what the model's
taps say, and never a drafted one. A drafted token sees these and *all* tokens of its block, those behind it included:
so a block is always run whole, and only the head may stop earlier.

A stage is a layer with a window alone (see `Block`, `Attention`), its experts its own. The list that a drafted token
attends to has `window_size` places for main tokens, oldest first, -1 behind, and then the block. The published code
takes the slots of its ring as they lie, and fewer of them at first. Which 64 entries share a block of the softmax
depends on that, and with it a last bit; here it depends on the positions alone, however the state came to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from openv41.config import Config
from openv41.errors import CacheError, InputError
from openv41.model.block import Block
from openv41.model.layers import Embedding, Linear, RMSNorm, WideLinear, stored_in
from openv41.model.streams import Streams
from openv41.ops import Ops
from openv41.state import Cache, Ring, Step


class MarkovHead(nn.Module):
    """What the token before adds to the logits: its embedding of low rank, and a head [vocab, rank] in float32."""

    def __init__(self, config: Config, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.embed = Embedding(config.vocab_size, config.dspark_markov_rank)
        self.head = WideLinear(config.dspark_markov_rank, config.vocab_size, "fp32", ops)

    def embedding(self, ids: Int[Tensor, "b"]) -> Float[Tensor, "b r"]:
        return self.embed.weight[ids].to(self.ops.dtype)


class ConfidenceHead(nn.Module):
    """How sure the draft is of a token, from its hidden state and the Markov embedding of the token before."""

    def __init__(self, config: Config, ops: Ops) -> None:
        super().__init__()
        self.proj = WideLinear(config.dim + config.dspark_markov_rank, 1, "fp32", ops)

    def forward(self, hidden: Float[Tensor, "b dim"], embedding: Float[Tensor, "b r"]) -> Float[Tensor, "b"]:
        return self.proj(torch.cat((hidden, embedding), 1)).squeeze(1)


class Stage(Block):
    """One layer of the draft. The first also has the way in from the model's taps, the last the heads."""

    def __init__(self, config: Config, stage: int, ops: Ops) -> None:
        super().__init__(config, config.n_layers + stage, ops)
        taps = len(config.dspark_target_layer_ids) * config.dim
        first, last = stage == 0, stage == config.n_mtp_layers - 1
        self.main_proj = Linear(taps, config.dim, stored_in(config), ops) if first else None
        self.main_norm = RMSNorm(config.dim, config.norm_eps, ops) if first else None
        self.norm = RMSNorm(config.dim, config.norm_eps, ops) if last else None
        self.markov_head = MarkovHead(config, ops) if last else None
        self.confidence_head = ConfidenceHead(config, ops) if last else None

    def main(self, taps: Float[Tensor, "n width"]) -> Float[Tensor, "n dim"]:
        """The first stage: what every stage's attention reads of main tokens."""
        assert self.main_proj is not None and self.main_norm is not None
        return self.main_norm(self.main_proj(taps))

    def descend(
        self, streams: Streams, position: Int[Tensor, "n"], history: Shaped[Tensor, "a _"], rows: Int[Tensor, "n t"]
    ) -> Streams:
        """The layer for drafted tokens. It keeps nothing of them."""
        x = self.attn_norm(self.hc_attn.read(streams))
        streams = self.hc_attn.write(self.attend(x, position, history, rows), streams)

        x = self.ffn_norm(self.hc_ffn.read(streams))
        text = torch.zeros_like(position, dtype=torch.bool)  # also behind an image
        return self.hc_ffn.write(self.ffn(x, text), streams)

    def attend(
        self,
        x: Float[Tensor, "n dim"],
        position: Int[Tensor, "n"],
        history: Shaped[Tensor, "a _"],
        rows: Int[Tensor, "n t"],
    ) -> Float[Tensor, "n dim"]:
        """Attention over rows of main tokens' vectors with the drafted tokens' own behind them."""
        attn, packed = self.attn, history.dtype == torch.uint8
        q, _ = attn.query(x, position)
        near = torch.cat((history, attn.stored(x, position, packed)))
        return attn.output(attn.attend(q, near, rows, None, None, position))


class Proposal(NamedTuple):
    """A whole block: `ids` [b, block + 1], the given token first; `logits` [b, block, vocab], bias added;
    `confidence` [b, block]."""

    ids: Int[Tensor, "b places"]
    logits: Float[Tensor, "b block vocab"]
    confidence: Float[Tensor, "b block"]


@dataclass
class Drafting:
    """A block that the stages have run. Its tokens are chosen by the caller, left to right, with `next`.

    `hidden` [b, block, dim], before the norm; `logits` [b, count, vocab] in float32, without the Markov bias; `place`,
    how many tokens `next` has told of.
    """

    stage: Stage
    hidden: Float[Tensor, "b block dim"]
    logits: Float[Tensor, "b count vocab"]
    place: int = 0

    def next(self, previous: Int[Tensor, "b"]) -> tuple[Float[Tensor, "b vocab"], Float[Tensor, "b"]]:
        """Logits [b, vocab] of the next token of each block and confidence [b] in it, given the token before it.

        The first call is given the ids that the block began with. Raises `InputError` when no place is left.
        """
        if self.place == self.logits.shape[1]:
            raise InputError(f"all {self.place} places of this draft are taken: begin another, or with a higher count")
        place, stage = self.place, self.stage
        assert stage.markov_head is not None and stage.confidence_head is not None
        self.place += 1
        embedding = stage.markov_head.embedding(previous)
        confidence = stage.confidence_head(self.hidden[:, place], embedding)
        return self.logits[:, place] + stage.markov_head.head(embedding), confidence


class Draft(nn.ModuleList):
    """The stages, in order: `mtp.0`, `mtp.1`, ... of a checkpoint.

    After every call of the model, `remember` what it tapped; the cache must have been made with `draft=True`. Then
    `begin` with the token that was sampled, and ask the drafting for its tokens; or take `greedy`'s.
    """

    def __init__(self, config: Config, ops: Ops, embed: Embedding, head: WideLinear) -> None:
        super().__init__(Stage(config, stage, ops) for stage in range(config.n_mtp_layers))
        self.config, self.ops = config, ops
        self.shared = embed, head  # the model's: in a tuple, so that they do not become parameters of the draft as well

    def stages(self) -> list[Stage]:
        return [stage for stage in self if isinstance(stage, Stage)]

    # Main tokens

    def remember(self, taps: Float[Tensor, "n width"] | None, step: Step | None, cache: Cache) -> None:
        """Keep what the model tapped of a step's tokens, in the rings of the stages.

        `taps` and `step` are `Output.taps` and `Output.tapped`: None where a piece of a prompt lies too far from its
        end to matter, and then there is nothing to keep. Rejected tokens are taken back by `Cache.rewind`.
        Raises `CacheError` if the cache has no rings for drafts.
        """
        if taps is None or step is None:
            return
        rings = self._rings(cache)
        latest = step.latest(rings[0].size)  # no other row can be read again
        if latest is None:
            return
        step, rows = latest
        for ring, own in zip(rings, self.vectors(taps[rows], step.position, rings[0].packed), strict=True):
            ring.write(step, own)

    def vectors(
        self, taps: Float[Tensor, "n width"], position: Int[Tensor, "n"], packed: bool = False
    ) -> list[Shaped[Tensor, "n _"]]:
        """For each stage the vectors of main tokens, as they are kept: rounded values, or records of bytes."""
        stages = self.stages()
        main = stages[0].main(taps)
        return [stage.attn.stored(main, position, packed) for stage in stages]

    def _rings(self, cache: Cache) -> list[Ring]:
        if not cache.drafts:
            raise CacheError("the cache keeps no rings for drafts: make it with draft=True")
        return [cache.drafts[stage.layer] for stage in self.stages()]

    # Drafted tokens

    def begin(self, ids: Int[Tensor, "b"], slots: Sequence[int], cache: Cache, count: int | None = None) -> Drafting:
        """Run the stages for one block a slot: `ids`, sampled but not run yet, stand where the slots do.

        `count` (by default all `dspark_block_size`): how many tokens to choose at most. It spares the head's work and
        changes no token. Nothing is kept of the block. Raises `InputError` for a count out of range or ids that are not
        one a slot, and `CacheError` for a slot that is not open or a cache without rings for drafts.
        """
        block, noise = self.config.dspark_block_size, self.config.dspark_noise_token_id
        count = block if count is None else count
        if not 1 <= count <= block:
            raise InputError(f"count must be 1 to {block} (dspark_block_size), got {count}")
        if len(ids) != len(slots):
            raise InputError(f"a draft begins with one id a slot, got {len(ids)} ids for {len(slots)} slots")
        blocks = torch.full((len(slots), block), noise, dtype=torch.int64, device=ids.device)
        blocks[:, 0] = ids
        step = cache.step(zip(slots, blocks, strict=True), "none")
        parts = [ring.before(step, self.config.window_size) for ring in self._rings(cache)]
        rows = parts[0][1](step.around(self.config.window_size))
        hidden = self(step.ids, step.position, [history for history, _ in parts], rows)
        hidden = hidden.unflatten(0, (-1, block))  # [b, block, dim]
        logits = self.logits(hidden[:, :count].flatten(0, 1)).unflatten(0, (-1, count))
        return Drafting(self.stages()[-1], hidden, logits)

    def forward(
        self,
        ids: Int[Tensor, "n"],
        position: Int[Tensor, "n"],
        histories: Sequence[Shaped[Tensor, "a _"]],
        rows: Int[Tensor, "n t"],
    ) -> Float[Tensor, "n dim"]:
        """The hidden states [n, dim] of drafted tokens, before the norm.

        `histories`: a table of main tokens' vectors for each stage (see `vectors`). `rows`: which rows each token
        attends to, of that table with the n tokens' own vectors behind it: token i's lies in row a + i. Gradients flow
        to whatever the histories were made of.
        """
        embed, _ = self.shared
        streams = Streams.start(embed.weight[ids].to(self.ops.dtype), self.config.hc_mult)
        for stage, history in zip(self.stages(), histories, strict=True):
            streams = stage.descend(streams, position, history, rows)
        return self.ops.collapse(streams.h, streams.pre)

    def logits(self, hidden: Float[Tensor, "n dim"]) -> Float[Tensor, "n vocab"]:
        """The shared head's logits in float32, without the Markov bias."""
        _, head = self.shared
        norm = self.stages()[-1].norm
        assert norm is not None
        return head(norm(hidden))

    def greedy(self, ids: Int[Tensor, "b"], slots: Sequence[int], cache: Cache) -> Proposal:
        """A whole block, the likeliest token at every place: what the published draft does at temperature 0."""
        drafting = self.begin(ids, slots, cache)
        chosen, logits, confidence = [ids], [], []
        for _ in range(self.config.dspark_block_size):
            row, sure = drafting.next(chosen[-1])
            chosen.append(row.argmax(1))  # of equal maxima the first
            logits.append(row)
            confidence.append(sure)
        return Proposal(torch.stack(chosen, 1), torch.stack(logits, 1), torch.stack(confidence, 1))
