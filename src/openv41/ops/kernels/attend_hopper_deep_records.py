"""Sparse attention for Hopper over records of bytes, each group a block ahead.

The groups are those of `attend_hopper_deep`; the loader decodes as that of `attend_hopper_packed`, in blocks of 32
rows, whose two halves take the ring's slots.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from openv41.ops.kernels.attend_hopper import Lists, Results, Work, load_query
from openv41.ops.kernels.attend_hopper_deep import SLOTS, allocate, attend_first, attend_second
from openv41.ops.kernels.attend_hopper_packed import (
    FAR_LAYOUT,
    LIFT,
    NEAR_LAYOUT,
    NOWHERE,
    PART,
    decode,
    words_in,
    words_of,
)


@gluon.jit
def rows_before(lists, query, block, end, row):
    """Rows of a block; none from block `end` on, which may be of the other table."""
    return lists.rows(query, gl.where(block < end, block, NOWHERE), row)


@gluon.jit
def hand_over(words, scales, shared, unit, FAR: gl.constexpr):
    """Decode a half block to its slot, once that is free."""
    slot = unit % SLOTS
    mbarrier.wait(shared.empty.index(slot), ((unit // SLOTS) & 1) ^ 1)
    decode(words, scales, words_in(shared, slot, PART), FAR)
    fence_async_shared()
    mbarrier.arrive(shared.full.index(slot))


@gluon.jit
def decode_ahead(table, lists, query, first, last, unit, shared, FAR: gl.constexpr):
    """Blocks `first` to `last` of a query's list, all of one table. `unit`: halves before them; returns those after.

    While a half is decoded, the next two are on their way from memory, and the row numbers of the two after those."""
    row = gl.arange(0, PART, layout=gl.SliceLayout(1, FAR_LAYOUT if FAR else NEAR_LAYOUT))
    rows = rows_before(lists, query, first, last, row)
    then = rows_before(lists, query, first + 1, last, row)
    left, left_scales = words_of(table, rows, 0, FAR)
    right, right_scales = words_of(table, rows, 1, FAR)
    for block in range(first, last):
        rows = then
        then = rows_before(lists, query, block + 2, last, row)
        hand_over(left, left_scales, shared, unit, FAR)
        left, left_scales = words_of(table, rows, 0, FAR)
        hand_over(right, right_scales, shared, unit + 1, FAR)
        right, right_scales = words_of(table, rows, 1, FAR)
        unit += 2
    return unit


@gluon.jit
def load_ahead(q, near, far, heads, lists, work, shared):
    """The loader's partition, of packed tables."""
    unit = 0
    taken = 0
    for number in range(gl.program_id(0), work.items(), gl.num_programs(0)):
        query, first, last = work.item(number)
        load_query(q, query, heads, shared, taken)
        taken += 1
        border = gl.minimum(gl.maximum(lists.near_blocks(), 2 * first), 2 * last)
        unit = decode_ahead(near, lists, query, 2 * first, border, unit, shared, False)
        unit = decode_ahead(far, lists, query, border, 2 * last, unit, shared, True)
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["heads", "near_count", "far_count", "queries", "whole", "pieces", "pairs"])
def attend_deep_records(
    q, near, far, near_rows, far_rows, sink, out, partial, maxima, sums, heads, near_count, far_count, queries, whole,
    pieces, pairs, c, STEP: gl.constexpr, KEYS: gl.constexpr, OVERLAPS: gl.constexpr, GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Sparse attention over tables of records, seen as int32 words. Arguments as of `attend_bf16`; KEYS is 32."""
    lists = Lists(near_rows, far_rows, near_count, far_count, STEP, KEYS)
    work = Work(queries, whole, pieces, pairs, False)
    results = Results(out, partial, maxima, sums, sink, heads, OVERLAPS)
    shared = allocate(1, KEYS)
    gl.warp_specialize(
        [
            (attend_first, (lists, work, results, shared, c * LIFT, LIFT)),
            (attend_second, (lists, work, results, shared, c * LIFT, LIFT)),
            (load_ahead, (q, near, far, heads, lists, work, shared)),
        ],
        [4, 4],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )
