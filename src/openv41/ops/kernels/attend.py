"""Sparse attention: softmax over listed rows and a sink, in blocks of the list, with the published roundings.

A program takes the heads of one query and one *piece* of its list, which is near_rows followed by far_rows. Where there
is one piece, it writes the result. Where there are several, each leaves what a second kernel puts together:

    partial  [pieces, n, h, d]  bf16 or float32: the rows weighed by p = 2^(score - best); not divided by anything
    best     [pieces, n, h]     float32: the maximum of the piece's scores, in units of log 2; NOTHING without a row
    total    [pieces, n, h]     float32: the sum of p, without the sink; 0 without a row

A score is q . row * scale * log2(e). Everything is added in a fixed order: the same bits in every run.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from openv41.ops.kernels.bits import NONE
from openv41.ops.kernels.interpreted import bound, product, rounded
from openv41.ops.kernels.tables import taken

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)
"""The maximum before the first row: finite, so that an empty block changes nothing."""


@triton.jit
def with_sink(best, total, sink):
    """The factor that turns rows weighed against `best` into the result, and the log of the whole sum.

    `sink` of any size, infinities too; `best`, `total` as of all pieces. 0 and 0 where there is nothing.
    """
    sink = tl.minimum(sink * LOG2_E, -NOTHING)
    top = tl.maximum(best, sink)
    whole = total * tl.exp2(best - top) + tl.exp2(sink - top)
    something = whole > 0
    whole = tl.where(something, whole, 1.0)
    factor = tl.where(something, tl.exp2(best - top) / whole, 0.0)
    return factor, tl.where(something, (top + tl.log2(whole)) / LOG2_E, 0.0)


@triton.jit
def combine(
    partial,
    best,
    total,
    sink,
    out,
    log_sum,
    PIECES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LOG_SUM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Pieces put together, and the sink. Grid: queries, heads. Layouts: see the file's head. All is asked for at once:
    between two steps of a chain of short kernels nothing but the way to memory and back counts. `OVERLAPS`: it is
    launched while pieces are being written, and waits for them itself."""
    query, n = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    head = tl.program_id(1)
    COUNT: tl.constexpr = triton.next_power_of_2(PIECES)
    piece, column = tl.arange(0, COUNT), tl.arange(0, WIDTH)
    there = piece < PIECES
    place = query * HEADS + head  # of this query and head in one piece; the next piece is n * HEADS further
    places = piece * n * HEADS + place

    if OVERLAPS:
        gdc_wait()
    highs = tl.load(best + places, mask=there, other=NOTHING)
    sums = tl.load(total + places, mask=there, other=0.0)
    weighed = tl.load(partial + places[:, None] * WIDTH + column[None, :], mask=there[:, None], other=0.0)
    of_sink = tl.load(sink + head)
    highest = tl.max(highs, 0)
    shares = tl.exp2(highs - highest)
    factor, log = with_sink(highest, tl.sum(shares * sums, 0), of_sink)
    result = tl.sum(weighed.to(tl.float32) * shares[:, None], 0) * factor
    tl.store(out + place * WIDTH + column, rounded(result, out.dtype.element_ty))
    if LOG_SUM:
        tl.store(log_sum + place, log)


@triton.jit
def block_of_lists(block, near_rows, far_rows, NEAR_LISTED: tl.constexpr, FAR_LISTED: tl.constexpr, KEYS: tl.constexpr):
    """Of a query's lists in blocks of `KEYS` places, the far list from a new block on: whether a block is of the near
    list, its row numbers, and which of them name a row. One loop over both lists: two want too many registers."""
    near_blocks: tl.constexpr = (NEAR_LISTED + KEYS - 1) // KEYS
    in_near = block < near_blocks
    place = tl.where(in_near, block, block - near_blocks) * KEYS + tl.arange(0, KEYS)
    numbers = tl.where(in_near, near_rows, far_rows)
    row = tl.load(numbers + place, mask=place < tl.where(in_near, NEAR_LISTED, FAR_LISTED), other=-1).to(tl.int64)
    return in_near, row, row >= 0


@triton.jit
def joined(scores, known, best, total):
    """A block of scores [heads, keys], in units of log 2, joins the online softmax: p, the new maximum and sum, and the
    factor by which what was weighed against the old maximum fades."""
    scores = tl.where(known[None, :], scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    p = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(best - higher)
    return p, higher, total * fade + tl.sum(p, 1), fade[:, None]


@triton.jit
def attend(
    q,
    near,
    near_rows,
    far,
    far_rows,
    sink,
    out,
    best_of,
    total_of,
    log_sum,
    scale,
    blocks_a_piece,
    NEAR_LISTED: tl.constexpr,
    FAR_LISTED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    PARTIAL: tl.constexpr,
    LOG_SUM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tables of wide rows. Grid: queries, pieces, tiles of `TILE` heads. A piece is `blocks_a_piece` blocks of `KEYS`
    places of the list. `out` is the result, or `partial` with `PARTIAL`."""
    query, n = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    head = tl.program_id(2) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    own = head < HEADS
    place = query * HEADS + head
    queries = tl.load(q + place[:, None] * WIDTH + column[None, :], mask=own[:, None], other=0.0)
    unit = scale * LOG2_E

    best = tl.full([TILE], NOTHING, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    result = tl.zeros([TILE, WIDTH], tl.float32)
    near_blocks: tl.constexpr = (NEAR_LISTED + KEYS - 1) // KEYS
    blocks: tl.constexpr = near_blocks + (FAR_LISTED + KEYS - 1) // KEYS
    first = tl.program_id(1) * blocks_a_piece
    last = tl.minimum(first + blocks_a_piece, blocks)
    near_rows += query * NEAR_LISTED
    far_rows += query * FAR_LISTED
    for block in tl.range(bound(first), bound(last)):
        in_near, row, known = block_of_lists(block, near_rows, far_rows, NEAR_LISTED, FAR_LISTED, KEYS)
        rows = taken(tl.where(in_near, near, far), row, known, NONE, KEYS, WIDTH, 0, WIDTH)
        scores = product(queries, rows.T, tl.zeros([TILE, KEYS], tl.float32), PRECISION) * unit
        p, best, total, fade = joined(scores, known, best, total)
        result = product(rounded(p, rows.dtype), rows, result * fade, PRECISION)  # rounded here, not in the sum

    if PARTIAL:
        place += tl.program_id(1) * n * HEADS
        tl.store(best_of + place, best, mask=own)
        tl.store(total_of + place, total, mask=own)
    else:
        factor, log = with_sink(best, total, tl.load(sink + head, mask=own, other=0.0))
        result = result * factor[:, None]
        if LOG_SUM:
            tl.store(log_sum + place, log, mask=own)
    result = rounded(result, out.dtype.element_ty)
    tl.store(out + place[:, None] * WIDTH + column[None, :], result, mask=own[:, None])
