"""Score and pick for all tokens of a step: a few launches a piece, nothing asked of the device (see `score`, `pick`).

Scores are written out, for as many tokens at a time as a budget of bytes allows. A token that has candidate blocks is
scored inside them alone where that is cheaper; else everything is scored, and the rest is hidden.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import triton
from torch import Tensor

from openv41.errors import OpsError
from openv41.ops.hopper import pick, score
from openv41.ops.hopper.operands import KeyTable, Queries, Ready, check_keys, encode_queries, make_ready
from openv41.ops.hopper.score import Tokens
from openv41.ops.kernels import blocks as kernels

READY_FROM = 16
"""Runs of so many tokens have their slot's keys made ready first: 204 bytes a key are moved once, instead of 68 for
every four tokens."""

GATHER_FROM = {True: 57344, False: 24576}
"""From so many positions on candidates are gathered: by tokens of long runs, which share keys otherwise, and by single
tokens. 128 tokens take 78 us to list and score 16,384 positions each, and 26 us for each million otherwise, which long
runs do in 11."""

LIST_TILES = (512, 2048)
"""Blocks that one program lists, of a few tokens and of many; it counts what lies before them by itself."""

FEW_TOKENS = 16


@dataclass(frozen=True)
class Selection:
    """What is asked of every token. `k` picks among `most` positions at most; `keep` candidate blocks of `block`, or 0;
    `within` [n, blocks]: candidate blocks to pick inside, `kept` of a row's at most (0: unknown, nothing is gathered).
    """

    k: int
    most: int
    block: int
    keep: int
    within: Tensor | None
    kept: int
    budget: int

    @property
    def stride(self) -> int:
        """Entries of a row of scores in memory."""
        return triton.cdiv(self.most, 64) * 64

    def rows(self, bytes_a_row: int) -> int:
        """Rows that the budget has room for."""
        return max(1, self.budget // max(1, bytes_a_row))


@dataclass(frozen=True)
class Stretch:
    """Consecutive runs of equal length: `runs` of `length` tokens, from token `first` on."""

    first: int
    length: int
    runs: int

    def parts(self, runs: int) -> Iterator["Stretch"]:
        """So many runs at a time."""
        for done in range(0, self.runs, runs):
            yield replace(self, first=self.first + done * self.length, runs=min(runs, self.runs - done))

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.runs * self.length)


def select(
    q: Tensor,
    weights: Tensor,
    table: Tensor,
    slot: Tensor,
    pages: Tensor,
    per_page: int,
    visible: Tensor,
    k: int,
    most: int,
    runs: Sequence[int] | None = None,
    block: int = 8,
    keep: int = 0,
    within: Tensor | None = None,
    kept: int = 0,
    budget: int = 256 << 20,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Each token's picks [n, k] (int64), ascending, -1 behind; their rows of a table with these pages, likewise; and
    its candidate blocks [n, blocks] (bool) if `keep`.

    q [n, i, c] and weights [n, i], bf16, q on the fp4 grid. Keys are rows of `table`, bf16 [rows, c] or records
    [rows, bytes]: position p of slot s lies in row `pages[s, p // per_page] * per_page + p % per_page`. Token t is one
    of slot `slot[t]` and sees its first `visible[t]` positions, `most` at most. `runs`: how many consecutive tokens
    have a slot in common, run by run (none: every token by itself). `keep`, `block`, `within`, `kept`: see `Selection`;
    blocks given are as `pick_blocks` chooses them, the newest visible one among them. `budget`: bytes of scores that
    exist at a time, and, apart from these, of keys made ready. Raises `OpsError` for what is not supported.
    """
    lengths = [1] * len(q) if runs is None else list(runs)
    _check(q, table, slot, pages, per_page, visible, k, lengths, within, most, block)
    n, device = q.shape[0], q.device
    scored = bool(n and most and k)  # every token's picks are written then
    positions, rows = torch.empty((2, n, k), dtype=torch.int64, device=device)
    kept_blocks = torch.zeros((n, triton.cdiv(most, block)), dtype=torch.bool, device=device) if keep else None
    if not scored:
        positions.fill_(-1)
        rows.fill_(-1)
    else:
        wanted = Selection(k, most, block, keep, within, kept, budget)
        queries = encode_queries("select", q, weights)
        work = _Work(wanted, queries, KeyTable(table, pages, per_page), slot, visible, positions, rows, kept_blocks)
        for stretch in stretches(lengths):
            work.run(stretch)
    return positions, rows, kept_blocks


def stretches(lengths: Sequence[int]) -> Iterator[Stretch]:
    """Runs of equal length together."""
    first = 0
    for length, group in groupby(lengths):
        runs = len(list(group))
        yield Stretch(first, length, runs)
        first += runs * length


@dataclass(frozen=True)
class _Work:
    wanted: Selection
    queries: Queries
    table: KeyTable
    slot: Tensor
    visible: Tensor
    positions: Tensor
    rows: Tensor
    blocks: Tensor | None

    def run(self, stretch: Stretch) -> None:
        """Score and pick for the tokens of a stretch, in the cheapest way."""
        wanted = self.wanted
        long = stretch.length >= READY_FROM
        gathers = wanted.within is not None and wanted.kept * wanted.block < wanted.most and not wanted.keep
        if gathers and wanted.kept and self.table.packed and wanted.most >= GATHER_FROM[long]:
            tokens = replace(stretch, length=1, runs=stretch.length * stretch.runs)
            for part in tokens.parts(wanted.rows(2 * wanted.kept * wanted.block)):
                self._gather(part)
        elif long or not self.table.packed:
            self._share(stretch)
        else:
            for part in stretch.parts(max(1, wanted.rows(2 * wanted.stride) // stretch.length)):
                self._score(part, None)

    def _share(self, stretch: Stretch) -> None:
        """Runs whose keys are made ready: as many at a time as the budget has room for; a run that is too long for it
        in pieces."""
        wanted = self.wanted
        rows = wanted.rows(2 * wanted.stride)
        together = min(max(1, rows // stretch.length), wanted.rows(wanted.stride * (self.queries.width + 8)))
        for part in stretch.parts(together):
            slots = self.slot[part.tokens]
            ready = make_ready(self.table, slots, part.runs, part.length, wanted.most, self.queries.width)
            if part.length <= rows:
                self._score(part, ready)
            else:
                for done in range(0, part.length, rows):
                    self._score(Stretch(part.first + done, min(rows, part.length - done), 1), ready)

    def _score(self, stretch: Stretch, ready: Ready | None) -> None:
        wanted, some = self.wanted, stretch.tokens
        within = None if wanted.within is None else wanted.within[some]
        tokens = Tokens(self.slot[some], self.visible[some], stretch.length, wanted.block, within)
        scores = self._room(some, wanted.stride)
        if ready is None:
            score.score_stored(self.queries.part(some), tokens, self.table, wanted.most, scores)
        else:
            score.score_ready(self.queries.part(some), tokens, self.table, ready, wanted.most, scores)
        scores = scores[:, : wanted.most]
        pick.pick_into(self.positions[some], scores, tokens.visible, wanted.k, paged=self._paged(some))
        if self.blocks is not None:
            pick.keep_into(self.blocks[some], scores, tokens.visible, wanted.block, wanted.keep)

    def _gather(self, stretch: Stretch) -> None:
        """Score and pick inside each token's candidate blocks alone."""
        wanted, some = self.wanted, stretch.tokens
        assert wanted.within is not None
        slots = self.slot[some]
        table = self.table if wanted.block == 8 and self.table.per_page % 8 == 0 else None
        lists, listed, starts = list_blocks(
            wanted.within[some], self.visible[some], wanted.block, wanted.kept, table, slots
        )
        tokens = Tokens(slots, listed, 1, wanted.block, lists=lists, starts=starts)
        width = wanted.kept * wanted.block
        scores = self._room(some, triton.cdiv(width, 64) * 64)
        score.score_stored(self.queries.part(some), tokens, self.table, width, scores)
        pick.pick_into(
            self.positions[some], scores[:, :width], listed, wanted.k, lists=lists, block=wanted.block,
            paged=self._paged(some),
        )  # fmt: skip

    def _paged(self, some: slice) -> pick.Paged:
        return pick.Paged(self.slot[some], self.table.pages, self.table.per_page, self.rows[some])

    def _room(self, some: slice, stride: int) -> Tensor:
        return torch.empty((some.stop - some.start, stride), dtype=torch.bfloat16, device=self.slot.device)


def list_blocks(
    within: Tensor, visible: Tensor, block: int, kept: int, table: KeyTable | None = None, slots: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The true blocks [n, blocks] of each row in order, [n, kept] (int32; what is behind them is not set); how many
    visible positions they hold [n] (int64); and, with a table, the rows of their first records, divided by eight."""
    n, count = within.shape
    if within.stride(0) % 4 or within.data_ptr() % 4:
        within = torch.nn.functional.pad(within, (0, -count % 4))  # rows of whole words
    flags = within.view(torch.uint8)
    lists = torch.empty((2, n, kept), dtype=torch.int32, device=within.device)
    listed = torch.empty(n, dtype=torch.int64, device=within.device)
    tile = LIST_TILES[n > FEW_TOKENS]
    kernels.list_kept[(n, triton.cdiv(count, tile))](
        flags, visible, slots, None if table is None else table.pages, lists[0], lists[1], listed,
        flags.stride(0), count, kept, 0 if table is None else table.pages.stride(0),
        TILE=tile, BLOCK=block, PER_PAGE=0 if table is None else table.per_page, num_warps=4,
    )  # fmt: skip
    return lists[0], listed, None if table is None else lists[1]


def _check(
    q: Tensor, table: Tensor, slot: Tensor, pages: Tensor, per_page: int, visible: Tensor, k: int,
    lengths: Sequence[int], within: Tensor | None, most: int, block: int,
) -> None:  # fmt: skip
    check_keys("select", q, table)
    if not table.is_contiguous():
        raise OpsError(f"select: rows of the table must lie side by side, got strides {table.stride()}")
    n = q.shape[0]
    for name, tensor in (("slot", slot), ("visible", visible)):
        if tensor.dtype != torch.int64 or tensor.shape != (n,):
            raise OpsError(f"select: {name} must be int64 [{n}], got {tensor.dtype} {tuple(tensor.shape)}")
    if pages.dtype != torch.int64 or pages.dim() != 2 or (pages.numel() and pages.stride(1) != 1) or per_page < 1:
        raise OpsError(f"select: pages must be int64 [slots, pages], per_page positive, got {pages.dtype}, {per_page}")
    if sum(lengths) != n or min(lengths, default=1) < 1:
        raise OpsError(f"select: runs must be positive and add up to the {n} tokens, got {list(lengths)[:8]} ...")
    if most < 0 or most > pages.shape[1] * per_page or not 0 <= k <= pick.PICKS_MOST:
        raise OpsError(
            f"select: most must lie in 0 to {pages.shape[1] * per_page}, which the pages hold, got {most}; "
            f"k in 0 to {pick.PICKS_MOST}, got {k}"
        )
    if block < 1 or block & (block - 1):
        raise OpsError(f"select: block must be a power of two, got {block}: use the reference operations")
    if within is not None and (
        within.dtype != torch.bool or within.shape[0] != n or within.shape[1] * block < most or within.stride(1) != 1
    ):
        raise OpsError(
            f"select: within must be bool [{n}, at least {triton.cdiv(most, block)}], got {within.dtype} "
            f"{tuple(within.shape)}"
        )
