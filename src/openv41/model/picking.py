"""How picks are found: three ways that find the same.

    whole_step   by a set of operations that picks for all tokens at once, through the pages of the cache
    together     on a GPU, for long runs: the keys of all sequences behind one another, in a few large pieces
    by_runs      run by run and piece by piece; far from the start a re-scorer's tokens score their candidates alone

Which one is a matter of the set of operations and of the device: `find_picks` chooses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from openv41.formats import INDEX
from openv41.ops import Ops, Selecting, launch_bound, rows_at_once, selecting
from openv41.state import Joined, Paged, Run, Step
from openv41.state.step import on_device

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
    this layer chooses them. `rows`: the positions' rows in the cache's tables of the layer's ratio, where they are
    known."""

    positions: Int[Tensor, "n k"]
    blocks: Bool[Tensor, "n blocks"] | None
    rows: Int[Tensor, "n k"] | None = None

    def rows_in(self, table: Paged | Joined, slot: Int[Tensor, "n"]) -> Int[Tensor, "n k"]:
        """The picks as row numbers of a table of the layer's ratio."""
        if self.rows is None or isinstance(table, Joined):
            return table.rows(slot, self.positions)
        return self.rows


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


@runtime_checkable
class Rule(Protocol):
    """What a layer's picks follow from: an `Indexer`."""

    ops: Ops
    ratio: int
    heads: int
    topk: int
    block: int
    keeps_blocks: int
    """Candidate blocks that the layer chooses; 0 if it chooses none."""
    most_blocks: int
    """Candidate blocks of a token, at most, where the layer picks inside such."""
    all_picked: int
    gathers_from: int
    score_bytes: int
    always_score: bool

    def scores(
        self,
        q: Float[Tensor, "n i c"],
        weights: Float[Tensor, "n i"],
        keys: Float[Tensor, "p c"],
        within: Bool[Tensor, "n blocks"] | None,
    ) -> Float[Tensor, "n p"]: ...


def find_picks(
    rule: Rule,
    q: Float[Tensor, "n i c"],
    weights: Float[Tensor, "n i"],
    step: Step,
    keys: Sequence[Keys],
    within: Bool[Tensor, "n blocks"] | None,
) -> Picks:
    """The picks of a step's tokens. `keys`: of each run; `within`: candidate blocks, if any."""
    ops, table = selecting(rule.ops), one_table(keys)
    if ops is not None and table is not None:
        return whole_step(rule, ops, q, weights, step, keys, table, within)
    if launch_bound(step.device) and len(step) >= TOGETHER * len(step.runs):
        return together(rule, q, weights, step, keys, within)
    return by_runs(rule, q, weights, step, keys, within)


def one_table(keys: Sequence[Keys]) -> Paged | None:
    """The table of the cache that all runs' keys lie in, if there is one."""
    held = keys[0].held
    return held if isinstance(held, Paged) and all(known.held is held for known in keys) else None


def seen_by(rule: Rule, run: Run, row: int) -> int:
    """How many positions the token in a row of the step sees: known without asking the device."""
    return (run.start + row - run.first + 1) // rule.ratio


# The whole step at once


def whole_step(
    rule: Rule,
    ops: Selecting,
    q: Float[Tensor, "n i c"],
    weights: Float[Tensor, "n i"],
    step: Step,
    keys: Sequence[Keys],
    table: Paged,
    within: Bool[Tensor, "n blocks"] | None,
) -> Picks:
    """By one operation. A step that stands may move on by `ahead` positions: there is room for what it sees then."""
    held = table.pages.numbers.shape[1] * table.per_page
    most = min(max(known.count for known in keys) + -(-step.ahead // rule.ratio), held)
    runs = [run.length for run in step.runs]
    positions, rows, blocks = ops.select(
        q, weights, table.table, step.slot, table.pages.numbers, table.per_page, step.visible(rule.ratio),
        min(rule.topk, most), most, runs, rule.block, rule.keeps_blocks, within, rule.most_blocks, rule.score_bytes,
    )  # fmt: skip
    return Picks(positions, blocks, rows if table.ratio == rule.ratio else None)


# All sequences together


def together(
    rule: Rule,
    q: Float[Tensor, "n i c"],
    weights: Float[Tensor, "n i"],
    step: Step,
    keys: Sequence[Keys],
    within: Bool[Tensor, "n blocks"] | None,
) -> Picks:
    """All runs in a few pieces, however many there are. The keys of all sequences lie behind one another, each from
    a border between blocks on; a token sees a stretch of them, from `low` on."""
    visible, most = step.visible(rule.ratio), max(known.count for known in keys)
    k, rooms = min(rule.topk, most), [-(-known.count // rule.block) * rule.block for known in keys]
    lows = step.remember(("lows", rule.ratio, rule.block), lambda: _lows(step, rooms))
    values = _side_by_side(keys, rooms)
    number, block = (torch.arange(size, device=step.device) for size in (k, -(-most // rule.block)))
    positions, blocks = [], []
    for piece, first, last in _stretches(rule, step, rooms):
        seen, low = visible[piece].unsqueeze(1), (lows[piece] - first).unsqueeze(1)
        scores = rule.ops.index_scores(q[piece], weights[piece], values[first:last])
        column = torch.arange(last - first, device=step.device)
        hidden = column < low
        if within is not None:  # by columns, what is said by the sequence's own blocks
            place = (column[:: rule.block] - low).div(rule.block, rounding_mode="floor")
            inside = within[piece].gather(1, place.clamp(0, within.shape[1] - 1))
            hidden = hidden | ~inside.repeat_interleave(rule.block, 1)[:, : len(column)]
        scores = scores.masked_fill(hidden, -torch.inf)
        stop = (low + seen).squeeze(1)
        few = torch.where(number < seen, number, -1)  # where all are picked
        positions.append(torch.where(seen <= k, few, rule.ops.pick(scores, stop, k) - low))
        if rule.keeps_blocks:
            kept = rule.ops.pick_blocks(scores, stop, rule.block, rule.keeps_blocks)
            own = (low // rule.block + block).clamp_max(kept.shape[1] - 1)
            blocks.append(kept.gather(1, own) & (block * rule.block < seen))
    return Picks(torch.cat(positions), torch.cat(blocks) if blocks else None)


def _lows(step: Step, rooms: Sequence[int]) -> Int[Tensor, "n"]:
    """Where the keys of each token's sequence begin."""
    lows = [sum(rooms[:number]) for number in range(len(rooms))]
    return on_device(
        ([low for low, run in zip(lows, step.runs, strict=True) for _ in range(run.length)],), step.device
    )[0]


def _side_by_side(keys: Sequence[Keys], rooms: Sequence[int]) -> Float[Tensor, "p c"]:
    """The keys of all sequences, each with zeros up to its room's end."""
    parts = []
    for known, room in zip(keys, rooms, strict=True):
        values = known.upto(known.count)
        parts.append(values)
        if room > known.count:
            parts.append(values.new_zeros(1, values.shape[1]).expand(room - known.count, -1))
    return torch.cat(parts)


def _stretches(rule: Rule, step: Step, rooms: Sequence[int]) -> Iterator[tuple[slice, int, int]]:
    """Pieces of the step, and the columns from the first that a token of it sees to behind the last.

    A piece of r tokens takes no more than the longest run's columns and r more, so r follows from the bytes that
    scores may take."""
    longest, total = max(rooms), len(step)
    scores = rows_at_once(step.device, bytes_of_score(rule.heads), total * (total + longest))
    most = max(1, (isqrt(longest * longest + 4 * scores) - longest) // 2)
    lows = [sum(rooms[:number]) for number in range(len(rooms))]
    for start in range(0, total, most):
        stop = min(start + most, total)
        within = [
            (low, seen_by(rule, run, min(stop, run.first + run.length) - 1))
            for low, run in zip(lows, step.runs, strict=True)
            if run.first < stop and run.first + run.length > start
        ]
        low, seen = within[-1]
        yield slice(start, stop), within[0][0], max(low + seen, within[0][0] + 1)


# Run by run


def by_runs(
    rule: Rule,
    q: Float[Tensor, "n i c"],
    weights: Float[Tensor, "n i"],
    step: Step,
    keys: Sequence[Keys],
    within: Bool[Tensor, "n blocks"] | None,
) -> Picks:
    """Each run by itself, some of its tokens at a time."""
    visible = step.visible(rule.ratio)
    most = max(known.count for known in keys)
    positions = torch.full((len(step), min(rule.topk, most)), -1, dtype=torch.int64, device=step.device)
    blocks = None
    if rule.keeps_blocks:
        blocks = torch.zeros((len(step), -(-most // rule.block)), dtype=torch.bool, device=step.device)
    for run, known in zip(step.runs, keys, strict=True):
        gathers = within is not None and known.count >= rule.gathers_from and not rule.always_score
        values = None
        for piece in run.pieces(_rows_at_once(rule, known.count)):
            count = seen_by(rule, run, piece.stop - 1)
            if count == 0:
                continue
            if gathers and within is not None and seen_by(rule, run, piece.start) >= rule.gathers_from:
                for row in range(piece.start, piece.stop):  # each token has candidates of its own
                    positions[row] = _pick_inside(
                        rule, q[row], weights[row], known, within[row], seen_by(rule, run, row), positions.shape[1]
                    )
                continue
            if values is None:
                values = known.upto(known.count)
            # To a multiple, so that the pieces' tensors have few sizes: an allocator cannot put ever larger ones
            # where smaller ones were, and the process would grow by all of them.
            scored = min(known.count, -(-count // SIZES) * SIZES)
            scores = None
            if count > rule.all_picked or rule.always_score:
                inside = None if within is None else within[piece]
                scores = rule.scores(q[piece], weights[piece], values[:scored], inside)
            positions[piece] = _pick(rule, scores, visible[piece], positions.shape[1])
            if blocks is not None:
                kept = _keep(rule, scores, visible[piece], count)
                blocks[piece, : kept.shape[1]] = kept
    return Picks(positions, blocks)


def _rows_at_once(rule: Rule, positions: int) -> int:
    # No more than 256 tokens, since all of a piece's tokens are scored up to the last one's newest position.
    return max(1, min(256, rule.score_bytes // max(1, positions * bytes_of_score(rule.heads))))


def _pick(rule: Rule, scores: Tensor | None, visible: Tensor, k: int) -> Int[Tensor, "n k"]:
    if scores is not None:
        return rule.ops.pick(scores, visible, k)
    position = torch.arange(k, device=visible.device).expand(visible.shape[0], k)
    return position.masked_fill(position >= visible.unsqueeze(1), -1)


def _pick_inside(
    rule: Rule, q: Tensor, weights: Tensor, keys: Keys, within: Bool[Tensor, "blocks"], visible: int, k: int
) -> Int[Tensor, "k"]:
    """One token's picks, from its candidates alone: the same as hiding all others, without scoring them."""
    kept = within.nonzero().squeeze(1)
    inside = (kept.unsqueeze(1) * rule.block + torch.arange(rule.block, device=kept.device)).flatten()
    inside = inside[inside < visible]
    scores = rule.ops.index_scores(q.unsqueeze(0), weights.unsqueeze(0), keys.at(inside))
    chosen = rule.ops.pick(scores, inside.new_full((1,), len(inside)), k).squeeze(0)
    return torch.where(chosen < 0, -1, inside[chosen])


def _keep(rule: Rule, scores: Tensor | None, visible: Tensor, most: int) -> Bool[Tensor, "n blocks"]:
    if scores is not None:
        return rule.ops.pick_blocks(scores, visible, rule.block, rule.keeps_blocks)
    return torch.arange(-(-most // rule.block), device=visible.device) * rule.block < visible.unsqueeze(1)
