"""What every token may pick and what it does pick, counted out position by position, for sequences of 1 to 40 tokens.

The three ways in which a step's picks are found (run by run, inside candidates alone, all sequences together as on a
GPU) are held against the same count.
"""

from collections.abc import Callable

import pytest
import torch

from openv41.model.indexer import Indexer, Picks
from openv41.model.transformer import Transformer
from openv41.ops import choose, pieces
from openv41.state import Run, Step
from tests.small import small_config, small_model, tokens

LENGTHS = range(1, 41)


def best_blocks(scores: list[float], block: int, keep: int) -> set[int]:
    """Of some visible positions' scores: the newest position's block, and the best of the others by their largest."""
    highest = [max(scores[first : first + block]) for first in range(0, len(scores), block)]
    newest = len(highest) - 1
    return set(sorted(range(len(highest)), key=lambda b: (b != newest, -highest[b], b))[:keep])


class Counted:
    """Listens to every indexer of a model and compares its picks with the count; `rows` by layer."""

    def __init__(self, model: Transformer) -> None:
        self.rows: dict[int, int] = {}
        self.candidates: dict[int, set[int]] = {}  # by row of the step
        self.dropped = 0  # rows in which a visible position is outside the candidates
        for block in model.blocks():
            if block.attn.indexer is not None:
                block.attn.indexer.register_forward_hook(self.listener(block.layer), with_kwargs=True)

    def listener(self, layer: int) -> Callable[[Indexer, tuple, dict, Picks], None]:
        def listen(indexer: Indexer, given: tuple, named: dict, made: Picks) -> None:
            x, qr, step, keys, within = (*given, *named.values())
            q, weights = indexer.queries(x, qr, step.position)
            self.rows[layer] = 0
            for run, known in zip(step.runs, keys, strict=True):
                every = known.upto(known.count)
                rows = range(run.first, run.first + run.length)
                scores = indexer.ops.index_scores(q[rows], weights[rows], every).tolist()
                for row, own in zip(rows, scores, strict=True):
                    self.compare(indexer, run, row, own, within is not None, made)
                    self.rows[layer] += 1

        return listen

    def compare(self, indexer: Indexer, run: Run, row: int, every: list[float], inside: bool, made: Picks) -> None:
        position = run.start + row - run.first
        legal = [j for j in range(len(every)) if (j + 1) * indexer.ratio - 1 <= position]
        scores = [every[j] for j in legal]
        if indexer.keeps_blocks:
            self.candidates[row] = best_blocks(scores, indexer.block, indexer.keeps_blocks)
            assert made.blocks is not None
            assert set(made.blocks[row].nonzero().flatten().tolist()) == self.candidates[row]
        allowed = [j for j in legal if not inside or j // indexer.block in self.candidates[row]]
        self.dropped += len(allowed) < len(legal)
        best = sorted(allowed, key=lambda j: (-scores[j], j))[: indexer.topk]
        assert made.positions[row].tolist() == sorted(best) + [-1] * (made.positions.shape[1] - len(best))


@pytest.mark.parametrize("way", ["run by run", "inside candidates", "together"])
@torch.no_grad()
def test_picks_are_those_counted_out(way: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 4, of which two are kept, the last of them nearly always in part; each way in pieces."""
    config = small_config(index_topk=4, candidate_block_size=4)
    model = small_model(config, choose("cpu", "fast"), seed)
    for block in model.blocks():
        indexer = block.attn.indexer
        if indexer is not None:
            indexer.gathers_from = indexer.gathers_from if way == "inside candidates" else 10**9
            indexer.score_bytes = 4096
    if way == "together":
        monkeypatch.setattr(pieces, "LAUNCH_BOUND", ("cuda", "cpu"))
        monkeypatch.setattr(pieces, "BYTES", 1 << 20)
    counted = Counted(model)
    parts = [(slot, 0, tokens(config, length, seed + length)) for slot, length in enumerate(LENGTHS)]
    model(Step.pack(parts), prefill="full")
    whole = sum(LENGTHS)
    assert counted.rows == dict.fromkeys(config.index_source_layers, whole)
    assert counted.dropped > whole // 2
