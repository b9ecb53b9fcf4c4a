"""The gradient of sparse attention. No atomic sums: every value is added in a fixed order.

With g the result's gradient, p the probabilities and s' the scores' gradient, scaled:

    s' = p (g . row - g . out) scale        q' = sum over rows of s' row        row' = sum over queries of p g + s' q

`agreements` is g . out. `shares` makes p anew from the log of the softmax's sum, and leaves s' and, for each place of
each list, what its row gets from this query: its *share*. Shares lie sorted by row. `query_gradients` adds up q',
`row_gradients` each row's run of shares.

Products are taken with the rows in the first place, [keys, heads]: 128 keys are the rows of two groups of warps, while
64 heads would be those of one, and the compiler gives two groups the same work rather than half of it.
"""

import triton
import triton.language as tl

from openv41.ops.kernels.attend import LOG2_E
from openv41.ops.kernels.interpreted import bound, product, rounded


@triton.jit
def agreements(out, grad, agreement, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """`agreement` [n, h] = g . out. Grid: queries, tiles of `TILE` heads."""
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    own = head < HEADS
    of_head = tl.program_id(0).to(tl.int64) * HEADS + head
    places = of_head[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    results = tl.load(out + places, mask=own[:, None], other=0.0).to(tl.float32)
    grads = tl.load(grad + places, mask=own[:, None], other=0.0).to(tl.float32)
    tl.store(agreement + of_head, tl.sum(grads * results, 1), mask=own)


@triton.jit
def block_of_list(
    block,
    query,
    near,
    near_rows,
    far,
    far_rows,
    NEAR_LISTED: tl.constexpr,
    FAR_LISTED: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A block of a query's list, which is near_rows, then far_rows, from a new block on: where its rows lie, which of
    them there are, their places among all those of all queries' lists, and which of these are places at all."""
    near_blocks: tl.constexpr = (NEAR_LISTED + KEYS - 1) // KEYS
    in_near = block < near_blocks
    place = tl.where(in_near, block, block - near_blocks) * KEYS + tl.arange(0, KEYS)
    listed = place < tl.where(in_near, NEAR_LISTED, FAR_LISTED)
    numbers = tl.where(in_near, near_rows + query * NEAR_LISTED, far_rows + query * FAR_LISTED)
    row = tl.load(numbers + place, mask=listed, other=-1).to(tl.int64)
    place += query * (NEAR_LISTED + FAR_LISTED) + tl.where(in_near, 0, NEAR_LISTED)
    return tl.where(in_near, near, far) + row * WIDTH, row >= 0, place, listed


@triton.jit(do_not_specialize=["first_query", "first_head"])
def shares(
    q,
    near,
    near_rows,
    far,
    far_rows,
    grad,
    log_sum,
    agreement,
    slots,
    share,
    slope,
    scale,
    first_query,
    first_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    NEAR_LISTED: tl.constexpr,
    FAR_LISTED: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: blocks of `KEYS` places, of some queries' lists, from `first_query` on; `TILE` heads, from `first_head` on.
    `PART` of the width is worked on at a time.

    slots  [n, places]             where a place's share lies among all
    share  [some * places, WIDTH]  p g + s' q, summed over the heads
    slope  [some * places, TILE]   s'
    """
    BLOCKS: tl.constexpr = (NEAR_LISTED + KEYS - 1) // KEYS + (FAR_LISTED + KEYS - 1) // KEYS
    query = first_query + (tl.program_id(0) // BLOCKS).to(tl.int64)
    before = first_query.to(tl.int64) * (NEAR_LISTED + FAR_LISTED)  # places of queries before these
    rows_at, known, place, listed = block_of_list(
        tl.program_id(0) % BLOCKS, query, near, near_rows, far, far_rows, NEAR_LISTED, FAR_LISTED, WIDTH, KEYS
    )
    in_tile = tl.arange(0, TILE)
    own = first_head + in_tile < HEADS
    of_head = query * HEADS + first_head + in_tile
    part = tl.arange(0, PART)[None, :]
    heads_at = of_head[:, None] * WIDTH + part

    scores = tl.zeros([KEYS, TILE], tl.float32)
    agreed = tl.zeros([KEYS, TILE], tl.float32)
    for at in tl.range(0, WIDTH, PART):
        rows = tl.load(rows_at[:, None] + at + part, mask=known[:, None], other=0.0)
        queries = tl.load(q + heads_at + at, mask=own[:, None], other=0.0)
        grads = tl.load(grad + heads_at + at, mask=own[:, None], other=0.0)
        scores = product(rows, queries.T, scores, PRECISION)
        agreed = product(rows, grads.T, agreed, PRECISION)

    log = tl.load(log_sum + of_head, mask=own, other=0.0) * LOG2_E
    mean = tl.load(agreement + of_head, mask=own, other=0.0)
    p = tl.exp2(scores * (scale * LOG2_E) - log[None, :])
    p = tl.where(known[:, None], p, 0.0)
    slopes = rounded(p * (agreed - mean[None, :]) * scale, q.dtype.element_ty)
    p = rounded(p, q.dtype.element_ty)
    tl.store(slope + (place - before)[:, None] * TILE + in_tile[None, :], slopes, mask=listed[:, None])

    slot = tl.load(slots + place, mask=listed, other=0) - before
    for at in tl.range(0, WIDTH, PART):
        queries = tl.load(q + heads_at + at, mask=own[:, None], other=0.0)
        grads = tl.load(grad + heads_at + at, mask=own[:, None], other=0.0)
        gained = product(p, grads, tl.zeros([KEYS, PART], tl.float32), PRECISION)
        gained = rounded(product(slopes, queries, gained, PRECISION), share.dtype.element_ty)
        tl.store(share + slot[:, None] * WIDTH + at + part, gained, mask=known[:, None])


@triton.jit(do_not_specialize=["first_query", "first_head"])
def query_gradients(
    near,
    near_rows,
    far,
    far_rows,
    slope,
    found,
    first_query,
    first_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    NEAR_LISTED: tl.constexpr,
    FAR_LISTED: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`found` [n, h, d] = sum of s' row. Grid: queries, from `first_query` on. `slope` as of `shares`."""
    query = first_query + tl.program_id(0).to(tl.int64)
    before = first_query.to(tl.int64) * (NEAR_LISTED + FAR_LISTED)
    in_tile = tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros([TILE, WIDTH], tl.float32)
    BLOCKS: tl.constexpr = (NEAR_LISTED + KEYS - 1) // KEYS + (FAR_LISTED + KEYS - 1) // KEYS
    for block in tl.range(BLOCKS):
        rows_at, known, place, listed = block_of_list(
            block, query, near, near_rows, far, far_rows, NEAR_LISTED, FAR_LISTED, WIDTH, KEYS
        )
        rows = tl.load(rows_at[:, None] + column, mask=known[:, None], other=0.0)
        slopes_at = slope + (place - before)[:, None] * TILE + in_tile[None, :]
        slopes = tl.load(slopes_at, mask=listed[:, None], other=0.0)
        total = product(slopes.T, rows, total, PRECISION)
    places = (query * HEADS + first_head + in_tile)[:, None] * WIDTH + column
    own = (first_head + in_tile < HEADS)[:, None]
    tl.store(found + places, rounded(total, found.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["first_start", "first_share"])
def row_gradients(
    share, starts, found, first_start, first_share, WIDTH: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr
):
    """`found` [rows, WIDTH] float32 = each row's shares, from `starts` of the row to that of the next; or += with
    `ADD`. Grid: rows. `first_start`: where the starts of these shares begin; `first_share` is taken off them."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    start = tl.load(starts + first_start + row).to(tl.int64) - first_share
    end = tl.load(starts + first_start + row + 1).to(tl.int64) - first_share
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for at in tl.range(bound(start), bound(end), TILE):
        place = at + tl.arange(0, TILE)
        total += tl.load(share + place[:, None] * WIDTH + column[None, :], mask=(place < end)[:, None], other=0.0).to(
            tl.float32
        )
    result = tl.sum(total, 0)
    if ADD:
        result += tl.load(found + row * WIDTH + column)
    tl.store(found + row * WIDTH + column, result)
