"""Indexer: which compressed positions a token attends to.

Every visible position j of token t gets a score, sum over heads of relu(q_t . key_j) * weight_t, from queries and keys
small enough to go through the whole past; the `index_topk` best are picked, in order of position. Ties go to the lower
position. The candidate source also keeps the best blocks of neighbouring positions, and re-scorers below it pick
inside those: far from the start they score the candidates alone, so their cost stops growing with the past.

A position's key is made of its latent, so only layers that make latents make keys; re-scorers score the same keys with
queries of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from openv41.config import Config
from openv41.formats import INDEX
from openv41.model.layers import Linear, RMSNorm, Rotary, stored_in
from openv41.ops import Ops, launch_bound, rows_at_once, selecting
from openv41.plan import LayerPlan
from openv41.state import Paged, Run, Step
from openv41.state.step import on_device

IndexKeys = Literal["own_keys", "as_written"]

SCORE_BYTES = 256 << 20
"""Default byte budget of the scores, and what they are made of, that exist at a time."""

SIZES = 1024
"""Positions are scored up to a multiple of this; those that a token does not see are not picked."""

GATHER = 2
"""Candidates are gathered where a token sees at least so many times as many positions as it has candidates. Below that,
scoring everything in one product and hiding the rest costs less than gathering."""

TOGETHER = 16
"""On a GPU the runs of a step are scored together if they have so many tokens on average: the scores of tokens by
other sequences' positions are worked out too, and hidden."""


def bytes_of_score(heads: int) -> int:
    """Bytes that one token's score of one position takes while it is made, at most: a product a head, its share, and
    the sum, in up to 8 bytes each."""
    return (2 * heads + 2) * 8


@dataclass(frozen=True)
class Picks:
    """`positions` [n, k]: picked compressed positions, ascending, -1 behind. `blocks` [n, blocks]: the candidates, if
    this layer chooses them."""

    positions: Int[Tensor, "n k"]
    blocks: Bool[Tensor, "n blocks"] | None


@dataclass(frozen=True)
class Keys:
    """A sequence's index keys as one run sees them, `count` positions: in one tensor [p, c], or in a slot of the cache,
    which is read when it is asked. Values, ready to be scored."""

    count: int
    held: Tensor | Paged
    slot: int = 0
    ops: Ops | None = None

    @classmethod
    def of(cls, values: Float[Tensor, "p c"]) -> "Keys":
        """Keys that lie in one tensor."""
        return cls(values.shape[0], values)

    @classmethod
    def of_slot(cls, table: Paged, slot: int, count: int, ops: Ops) -> "Keys":
        """The first `count` keys of a slot of the cache."""
        return cls(count, table, slot, ops)

    def upto(self, count: int) -> Float[Tensor, "p c"]:
        """The first `count` positions."""
        if isinstance(self.held, Tensor):
            return self.held[:count]
        return self._read(self.held.first(self.slot, count))

    def at(self, positions: Int[Tensor, "some"]) -> Float[Tensor, "some c"]:
        """Any positions."""
        if isinstance(self.held, Tensor):
            return self.held[positions]
        rows = self.held.rows(positions.new_full((1,), self.slot), positions.unsqueeze(0)).squeeze(0)
        return self._read(self.held.table[rows])

    def _read(self, rows: Tensor) -> Float[Tensor, "some c"]:
        assert self.ops is not None
        return self.ops.read(rows, INDEX)


def _one_table(keys: Sequence[Keys]) -> Paged | None:
    """The table of the cache that all runs' keys lie in, if there is one."""
    held = keys[0].held
    return held if isinstance(held, Paged) and all(known.held is held for known in keys) else None


class Indexer(nn.Module):
    """Scores and picks for one layer. `score_bytes` bounds the memory of the scores; `always_score` works them out even
    where every visible position is picked anyhow (for those who record scores)."""

    def __init__(self, config: Config, plan: LayerPlan, rotary: Rotary, ops: Ops) -> None:
        super().__init__()
        c = config
        self.ops, self.rotary, self.ratio = ops, rotary, plan.ratio
        self.heads, self.topk = c.index_n_heads, c.index_topk
        self.block = c.candidate_block_size
        self.keeps_blocks = c.candidate_topk_blocks if plan.publishes_candidates else 0
        self.weight_scale = (c.index_head_dim * c.index_n_heads) ** -0.5
        # Up to so many visible positions, all of them are picked and all of their blocks kept: no need to score.
        self.all_picked = min(self.topk, self.keeps_blocks * self.block) if self.keeps_blocks else self.topk
        # From so many visible positions on, a re-scorer gathers its candidates and scores no others.
        self.gathers_from = max(GATHER * c.candidate_topk_blocks * c.candidate_block_size, self.topk + self.block)
        self.most_blocks = c.candidate_topk_blocks
        self.score_bytes, self.always_score = SCORE_BYTES, False
        self.wq_b = Linear(c.q_lora_rank, c.index_n_heads * c.index_head_dim, stored_in(c), ops)
        self.weights_proj = Linear(c.dim, c.index_n_heads, "bf16", ops)
        if plan.latents_from == plan.layer:
            self.wk = Linear(c.head_dim, c.index_head_dim, "bf16", ops)
            self.k_norm = RMSNorm(c.index_head_dim, c.norm_eps, ops)

    def keys(self, latents: Float[Tensor, "g d"], position: Int[Tensor, "g"]) -> Float[Tensor, "g c"]:
        """Index keys of latents (normed, not rotated), each rotated at its group's first token; not yet rounded."""
        return self.ops.rotate(self.k_norm(self.wk(latents)), *self.rotary.at(position), inverse=False)

    def queries(
        self, x: Float[Tensor, "n dim"], qr: Float[Tensor, "n r"], position: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n i c"], Float[Tensor, "n i"]]:
        """Rounded queries, and the weight of each head."""
        q = self.wq_b(qr).unflatten(-1, (self.heads, -1))  # [n, i, c]
        q = self.ops.rotate(q, *self.rotary.at(position), inverse=False)
        weights = self.weights_proj(x)
        return self.ops.quantise(q, INDEX), (weights * self.weight_scale).to(weights.dtype)

    @torch.no_grad()  # picks are numbers: no gradient passes through them
    def forward(
        self,
        x: Float[Tensor, "n dim"],
        qr: Float[Tensor, "n r"],
        step: Step,
        keys: Sequence[Keys],
        within: Bool[Tensor, "n blocks"] | None,
    ) -> Picks:
        """`keys`: for each run of the step, its slot's keys up to the run's end. `within`: candidate blocks, if any."""
        q, weights = self.queries(x, qr, step.position)
        whole = selecting(self.ops)
        if whole is not None and (table := _one_table(keys)) is not None:
            most = max(known.count for known in keys) + -(-step.ahead // self.ratio)
            most = min(most, table.pages.numbers.shape[1] * table.per_page)
            runs = [run.length for run in step.runs]
            return Picks(
                *whole.select(
                    q, weights, table.table, step.slot, table.pages.numbers, table.per_page, step.visible(self.ratio),
                    min(self.topk, most), most, runs, self.block, self.keeps_blocks, within, self.most_blocks,
                    self.score_bytes,
                )
            )  # fmt: skip
        if launch_bound(step.device) and len(step) >= TOGETHER * len(step.runs):
            return self._together(q, weights, step, keys, within)
        visible = step.visible(self.ratio)
        most = max(known.count for known in keys)
        positions = torch.full((len(step), min(self.topk, most)), -1, dtype=torch.int64, device=step.device)
        blocks = None
        if self.keeps_blocks:
            blocks = torch.zeros((len(step), -(-most // self.block)), dtype=torch.bool, device=step.device)
        for run, known in zip(step.runs, keys, strict=True):
            gathers = within is not None and known.count >= self.gathers_from and not self.always_score
            values = None
            for piece in run.pieces(self._rows_at_once(known.count)):
                count = self._seen(run, piece.stop - 1)
                if count == 0:
                    continue
                if gathers and within is not None and self._seen(run, piece.start) >= self.gathers_from:
                    for row in range(piece.start, piece.stop):  # each token has candidates of its own
                        positions[row] = self._pick_inside(
                            q[row], weights[row], known, within[row], self._seen(run, row), positions.shape[1]
                        )
                    continue
                if values is None:
                    values = known.upto(known.count)
                # To a multiple, so that the pieces' tensors have few sizes: an allocator cannot put ever larger ones
                # where smaller ones were, and the process would grow by all of them.
                scored = min(known.count, -(-count // SIZES) * SIZES)
                scores = None
                if count > self.all_picked or self.always_score:
                    inside = None if within is None else within[piece]
                    scores = self.scores(q[piece], weights[piece], values[:scored], inside)
                positions[piece] = self._pick(scores, visible[piece], positions.shape[1])
                if blocks is not None:
                    kept = self._keep(scores, visible[piece], count)
                    blocks[piece, : kept.shape[1]] = kept
        return Picks(positions, blocks)

    def _seen(self, run: Run, row: int) -> int:
        """How many positions the token in a row of the step sees: known without asking the device."""
        return (run.start + row - run.first + 1) // self.ratio

    def _together(
        self,
        q: Float[Tensor, "n i c"],
        weights: Float[Tensor, "n i"],
        step: Step,
        keys: Sequence[Keys],
        within: Bool[Tensor, "n blocks"] | None,
    ) -> Picks:
        """All runs in a few pieces, however many there are. The keys of all sequences lie behind one another, each from
        a border between blocks on; a token sees a stretch of them, from `low` on."""
        visible, most = step.visible(self.ratio), max(known.count for known in keys)
        k, rooms = min(self.topk, most), [-(-known.count // self.block) * self.block for known in keys]
        lows = step.remember(("lows", self.ratio, self.block), lambda: self._lows(step, rooms))
        values = self._side_by_side(keys, rooms)
        number, block = (torch.arange(size, device=step.device) for size in (k, -(-most // self.block)))
        positions, blocks = [], []
        for piece, first, last in self._stretches(step, rooms):
            seen, low = visible[piece].unsqueeze(1), (lows[piece] - first).unsqueeze(1)
            scores = self.ops.index_scores(q[piece], weights[piece], values[first:last])
            column = torch.arange(last - first, device=step.device)
            hidden = column < low
            if within is not None:  # by columns, what is said by the sequence's own blocks
                place = (column[:: self.block] - low).div(self.block, rounding_mode="floor")
                inside = within[piece].gather(1, place.clamp(0, within.shape[1] - 1))
                hidden = hidden | ~inside.repeat_interleave(self.block, 1)[:, : len(column)]
            scores = scores.masked_fill(hidden, -torch.inf)
            stop = (low + seen).squeeze(1)
            few = torch.where(number < seen, number, -1)  # where all are picked
            positions.append(torch.where(seen <= k, few, self.ops.pick(scores, stop, k) - low))
            if self.keeps_blocks:
                kept = self.ops.pick_blocks(scores, stop, self.block, self.keeps_blocks)
                own = (low // self.block + block).clamp_max(kept.shape[1] - 1)
                blocks.append(kept.gather(1, own) & (block * self.block < seen))
        return Picks(torch.cat(positions), torch.cat(blocks) if blocks else None)

    def _lows(self, step: Step, rooms: Sequence[int]) -> Int[Tensor, "n"]:
        """Where the keys of each token's sequence begin."""
        lows = [sum(rooms[:number]) for number in range(len(rooms))]
        return on_device(
            ([low for low, run in zip(lows, step.runs, strict=True) for _ in range(run.length)],), step.device
        )[0]

    def _side_by_side(self, keys: Sequence[Keys], rooms: Sequence[int]) -> Float[Tensor, "p c"]:
        """The keys of all sequences, each with zeros up to its room's end."""
        parts = []
        for known, room in zip(keys, rooms, strict=True):
            values = known.upto(known.count)
            parts.append(values)
            if room > known.count:
                parts.append(values.new_zeros(1, values.shape[1]).expand(room - known.count, -1))
        return torch.cat(parts)

    def _stretches(self, step: Step, rooms: Sequence[int]) -> Iterator[tuple[slice, int, int]]:
        """Pieces of the step, and the columns from the first that a token of it sees to behind the last.

        A piece of r tokens takes no more than the longest run's columns and r more, so r follows from the bytes that
        scores may take."""
        longest, total = max(rooms), len(step)
        scores = rows_at_once(step.device, bytes_of_score(self.heads), total * (total + longest))
        most = max(1, (isqrt(longest * longest + 4 * scores) - longest) // 2)
        lows = [sum(rooms[:number]) for number in range(len(rooms))]
        for start in range(0, total, most):
            stop = min(start + most, total)
            within = [
                (low, self._seen(run, min(stop, run.first + run.length) - 1))
                for low, run in zip(lows, step.runs, strict=True)
                if run.first < stop and run.first + run.length > start
            ]
            low, seen = within[-1]
            yield slice(start, stop), within[0][0], max(low + seen, within[0][0] + 1)

    def _rows_at_once(self, positions: int) -> int:
        # No more than 256 tokens, since all of a piece's tokens are scored up to the last one's newest position.
        return max(1, min(256, self.score_bytes // max(1, positions * bytes_of_score(self.heads))))

    def scores(
        self,
        q: Float[Tensor, "n i c"],
        weights: Float[Tensor, "n i"],
        keys: Float[Tensor, "p c"],
        within: Bool[Tensor, "n blocks"] | None,
    ) -> Float[Tensor, "n p"]:
        """Scores of every key, -inf outside the candidate blocks."""
        scores = self.ops.index_scores(q, weights, keys)
        if within is None:
            return scores
        inside = within.repeat_interleave(self.block, 1)[:, : keys.shape[0]]
        return scores.masked_fill(~inside.to(scores.device), -torch.inf)

    def _pick(self, scores: Tensor | None, visible: Tensor, k: int) -> Int[Tensor, "n k"]:
        if scores is not None:
            return self.ops.pick(scores, visible, k)
        position = torch.arange(k, device=visible.device).expand(visible.shape[0], k)
        return position.masked_fill(position >= visible.unsqueeze(1), -1)

    def _pick_inside(
        self, q: Tensor, weights: Tensor, keys: Keys, within: Bool[Tensor, "blocks"], visible: int, k: int
    ) -> Int[Tensor, "k"]:
        """One token's picks, from its candidates alone: the same as hiding all others, without scoring them."""
        kept = within.nonzero().squeeze(1)
        inside = (kept.unsqueeze(1) * self.block + torch.arange(self.block, device=kept.device)).flatten()
        inside = inside[inside < visible]
        scores = self.ops.index_scores(q.unsqueeze(0), weights.unsqueeze(0), keys.at(inside))
        chosen = self.ops.pick(scores, inside.new_full((1,), len(inside)), k).squeeze(0)
        return torch.where(chosen < 0, -1, inside[chosen])

    def _keep(self, scores: Tensor | None, visible: Tensor, most: int) -> Bool[Tensor, "n blocks"]:
        if scores is not None:
            return self.ops.pick_blocks(scores, visible, self.block, self.keeps_blocks)
        return torch.arange(-(-most // self.block), device=visible.device) * self.block < visible.unsqueeze(1)
