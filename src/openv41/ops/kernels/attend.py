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
    TILE: tl.constexpr,
    LOG_SUM: tl.constexpr,
):
    """Pieces put together, and the sink. Grid: queries, tiles of `TILE` heads. Layouts: see the file's head."""
    query, n = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    own = head < HEADS
    place = query * HEADS + head  # of this query and head in one piece; the next piece is n * HEADS further

    highest = tl.full([TILE], NOTHING, tl.float32)
    for piece in tl.static_range(PIECES):
        highest = tl.maximum(highest, tl.load(best + piece * n * HEADS + place, mask=own, other=NOTHING))
    whole = tl.zeros([TILE], tl.float32)
    result = tl.zeros([TILE, WIDTH], tl.float32)
    for piece in tl.static_range(PIECES):
        here = piece * n * HEADS + place
        share = tl.exp2(tl.load(best + here, mask=own, other=NOTHING) - highest)
        whole += share * tl.load(total + here, mask=own, other=0.0)
        weighed = tl.load(partial + here[:, None] * WIDTH + column[None, :], mask=own[:, None], other=0.0)
        result += share[:, None] * weighed.to(tl.float32)

    factor, log = with_sink(highest, whole, tl.load(sink + head, mask=own, other=0.0))
    result = rounded(result * factor[:, None], out.dtype.element_ty)
    tl.store(out + place[:, None] * WIDTH + column[None, :], result, mask=own[:, None])
    if LOG_SUM:
        tl.store(log_sum + place, log, mask=own)


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
