"""Sparse attention from records of bytes, decoded as they are taken: `kernels.attend` in two halves of the width.

A decoded block of 32 rows beside a result of 64 heads is more than a program's registers hold. So each half of the rows
is decoded, scored and laid aside before the next; the result is kept in two halves as well.
"""

import triton
import triton.language as tl

from openv41.ops.kernels.attend import LOG2_E, NOTHING, block_of_lists, joined, with_sink
from openv41.ops.kernels.interpreted import bound, product, rounded
from openv41.ops.kernels.tables import taken


@triton.jit
def attend_records(
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
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    NEAR_LISTED: tl.constexpr,
    FAR_LISTED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    PARTIAL: tl.constexpr,
    LOG_SUM: tl.constexpr,
):
    """`NEAR`, `FAR`: the forms of the tables (see `kernels.tables`). Everything else as of `kernels.attend.attend`."""
    query, n = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    head = tl.program_id(2) * TILE + tl.arange(0, TILE)
    HALF: tl.constexpr = WIDTH // 2
    left = tl.arange(0, HALF)[None, :]
    own = head < HEADS
    place = query * HEADS + head
    places = place[:, None] * WIDTH + left
    q_left = tl.load(q + places, mask=own[:, None], other=0.0)
    q_right = tl.load(q + places + HALF, mask=own[:, None], other=0.0)
    unit = scale * LOG2_E

    best = tl.full([TILE], NOTHING, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    on_left = tl.zeros([TILE, HALF], tl.float32)
    on_right = tl.zeros([TILE, HALF], tl.float32)
    blocks: tl.constexpr = (NEAR_LISTED + KEYS - 1) // KEYS + (FAR_LISTED + KEYS - 1) // KEYS
    first = tl.program_id(1) * blocks_a_piece
    last = tl.minimum(first + blocks_a_piece, blocks)
    near_rows += query * NEAR_LISTED
    far_rows += query * FAR_LISTED
    for block in tl.range(bound(first), bound(last)):
        in_near, row, known = block_of_lists(block, near_rows, far_rows, NEAR_LISTED, FAR_LISTED, KEYS)
        scores = tl.zeros([TILE, KEYS], tl.float32)
        if in_near:
            rows_left = taken(near, row, known, NEAR, KEYS, WIDTH, 0, HALF)
        else:
            rows_left = taken(far, row, known, FAR, KEYS, WIDTH, 0, HALF)
        scores = product(q_left, rows_left.T, scores, "tf32")
        if in_near:
            rows_right = taken(near, row, known, NEAR, KEYS, WIDTH, HALF, HALF)
        else:
            rows_right = taken(far, row, known, FAR, KEYS, WIDTH, HALF, HALF)
        scores = product(q_right, rows_right.T, scores, "tf32") * unit
        p, best, total, fade = joined(scores, known, best, total)
        p = rounded(p, tl.bfloat16)
        on_left = product(p, rows_left, on_left * fade, "tf32")
        on_right = product(p, rows_right, on_right * fade, "tf32")

    if PARTIAL:
        piece = tl.program_id(1) * n * HEADS
        tl.store(best_of + piece + place, best, mask=own)
        tl.store(total_of + piece + place, total, mask=own)
        places += piece * WIDTH
    else:
        factor, log = with_sink(best, total, tl.load(sink + head, mask=own, other=0.0))
        on_left, on_right = on_left * factor[:, None], on_right * factor[:, None]
        if LOG_SUM:
            tl.store(log_sum + place, log, mask=own)
    tl.store(out + places, rounded(on_left, out.dtype.element_ty), mask=own[:, None])
    tl.store(out + places + HALF, rounded(on_right, out.dtype.element_ty), mask=own[:, None])
