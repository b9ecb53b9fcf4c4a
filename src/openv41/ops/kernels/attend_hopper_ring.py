"""Sparse attention for Hopper, keys in finer pieces: nine units [64 keys, 128 dims] in turn instead of four halves.

The partitions and their talk are those of `attend_hopper`; see the drawing there. What differs is how keys come: the
eight units of a pair (four of block A, four of B) take the ring's slots one after the other, unit `t` slot `t % 9`, so
that loading goes on as soon as any unit is let go of, and one unit more than a pair fits. Group 0 keeps the output's
columns 0-255 in two accumulators, by units 0 and 1 of each block, and lets go of these; group 1 those of units 2 and 3.

    unit      0   1   2   3   4   5   6   7 | 8   9  10 ...
    slot      0   1   2   3   4   5   6   7   8 | 0   1 ...
              A0  A1  A2  A3  B0  B1  B2  B3| A0  A1  A2 ... of the next pair

A wait for a slot takes the phase of its round, `t // 9`. Rows alone, no records.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openv41.ops.kernels.attend_hopper import (
    BARRIER,
    FLAT,
    HEADS,
    NO_SCORE,
    SWIZZLED,
    THREADS,
    WIDTH,
    Lists,
    Results,
    Shared,
    Work,
    finish,
    last_factor,
    scores_layout,
    set_barriers,
    sinks,
    staged_in_keys,
    weights_shared,
)

UNIT = gl.constexpr(128)
"""Dims of a unit."""
SLOTS = gl.constexpr(9)
"""As many of 64 keys as fit beside the query and the weights; and no more than a pair and one, for the next pair's unit
in a slot says that group 1 has used the weights that group 0 will overwrite."""
PAIR = gl.constexpr(8)
"""Units of a pair of blocks: 0-3 of block A, 4-7 of block B."""

COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT, 2))
OUTPUT_ROW = gl.constexpr(gl.SliceLayout(1, OUTPUT))


@gluon.jit
def load_query(q, query, heads, shared, taken):
    """As in `attend_hopper`, in four units."""
    column = gl.arange(0, UNIT, layout=gl.SliceLayout(0, COPY))
    head = gl.minimum(gl.arange(0, HEADS, layout=gl.SliceLayout(1, COPY)) + (taken >> 24), heads - 1)
    source = q + gl.cast(query, gl.int64) * heads * WIDTH + head[:, None] * WIDTH + column[None, :]
    mbarrier.wait(shared.query_empty, (taken & 1) ^ 1)
    for quarter in gl.static_range(4):
        async_copy.async_copy_global_to_shared(shared.query.index(quarter), source + quarter * UNIT)
    async_copy.mbarrier_arrive(shared.query_full, increment_count=False)


@gluon.jit
def load_block(table, rows, unit, shared):
    """The four units of a block, of which `unit` is the first; zeros for row -1."""
    column = gl.arange(0, UNIT, layout=gl.SliceLayout(0, COPY))
    source = table + gl.maximum(rows, 0).to(gl.int64)[:, None] * WIDTH + column[None, :]
    for quarter in range(4 + (unit >> 24)):  # a loop, not four copies of it: code that runs once is waited for
        slot = (unit + quarter) % SLOTS
        mbarrier.wait(shared.empty.index(slot), (((unit + quarter) // SLOTS) & 1) ^ 1)
        target = shared.keys.index(slot)
        async_copy.async_copy_global_to_shared(target, source + quarter * UNIT, mask=(rows >= 0)[:, None])
        async_copy.mbarrier_arrive(shared.full.index(slot), increment_count=False)


@gluon.jit
def load_units(q, near, far, heads, lists, work, shared):
    """The loader's partition."""
    key = gl.arange(0, lists.KEYS, layout=gl.SliceLayout(1, COPY))
    unit = 0
    taken = 0
    for number in range(gl.program_id(0), work.items(), gl.num_programs(0)):
        query, first, last = work.item(number)
        block = 2 * work.listed(first, number, first, last)
        rows = lists.rows(query, block, key)
        load_query(q, query, heads, shared, taken)
        taken += 1
        for place in range(2 * first + 1, 2 * last + 1):  # of the block after the one that is copied
            next_block = 2 * work.listed(place // 2, number, first, last) + place % 2
            ahead = lists.rows(query, next_block, key)
            load_block(gl.where(block < lists.near_blocks(), near, far), rows, unit, shared)
            rows = ahead
            block = next_block
            unit += 4
    async_copy.wait_group(0)


@gluon.jit
def score_unit(shared, unit, QUARTER: gl.constexpr, scores):
    """Of the block whose first unit is given: a quarter of q . key is added to scores in fp32; still running."""
    slot = (unit + QUARTER) % SLOTS
    mbarrier.wait(shared.full.index(slot), ((unit + QUARTER) // SLOTS) & 1)
    fence_async_shared()
    keys = shared.keys.index(slot).permute((1, 0))
    query = shared.query.index((unit >> 24) + QUARTER)
    return warpgroup_mma(query, keys, scores, use_acc=QUARTER > 0, is_async=True)


@gluon.jit
def score(shared, unit, KEYS: gl.constexpr):
    """q . key of the block whose first unit is given, in fp32."""
    scores = gl.zeros([HEADS, KEYS], gl.float32, scores_layout(KEYS))
    for quarter in gl.static_range(4):
        scores = score_unit(shared, unit, quarter, scores)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def weigh(weights, shared, unit, left, right, fade):
    """Both accumulators, faded, plus weights @ units `unit` and the next; still running."""
    fade = gl.convert_layout(fade, OUTPUT_ROW)[:, None]
    left = warpgroup_mma(weights, shared.keys.index(unit % SLOTS), left * fade, is_async=True)
    right = warpgroup_mma(weights, shared.keys.index((unit + 1) % SLOTS), right * fade, is_async=True)
    return left, right


@gluon.jit
def release(shared, unit):
    """Two units, from the one given."""
    mbarrier.arrive(shared.empty.index(unit % SLOTS))
    mbarrier.arrive(shared.empty.index((unit + 1) % SLOTS))


@gluon.jit
def finish_both(left, right, factor, results, shared, unit, FIRST: gl.constexpr, work, number, KEYS: gl.constexpr):
    """Write both accumulators' columns, by way of the units given, which are let go of, or of the query's."""
    zero = unit >> 24
    if staged_in_keys(KEYS):
        on_left = shared.keys.index(unit % SLOTS)
        on_right = shared.keys.index((unit + 1) % SLOTS)
    else:
        on_left = shared.query.index(FIRST // UNIT)
        on_right = shared.query.index(FIRST // UNIT + 1)
    factor = factor[:, None]
    finish(left * factor, results, on_left, FIRST, UNIT, COPY, work, number, zero)
    finish(right * factor, results, on_right, FIRST + UNIT, UNIT, COPY, work, number, zero)
    if staged_in_keys(KEYS):
        release(shared, unit)
    else:
        mbarrier.arrive(shared.query_empty)


@gluon.jit
def attend_first(lists, work, results, shared, c, lift):
    """Group 0: scores A, keeps the output's columns 0-255."""
    KEYS: gl.constexpr = lists.KEYS
    SCORES: gl.constexpr = scores_layout(KEYS)
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    sink = sinks(results, SCORE_ROW)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    turn = 0
    taken = 0
    for number in range(gl.program_id(0), work.items(), gl.num_programs(0)):
        query, first, last = work.item(number)
        rows = lists.rows(query, 2 * work.listed(first, number, first, last), key)
        best = gl.full([HEADS], NO_SCORE, gl.float32, SCORE_ROW)
        total = gl.full([HEADS], 0.0, gl.float32, SCORE_ROW)
        left = gl.zeros([HEADS, UNIT], gl.float32, OUTPUT)
        right = gl.zeros([HEADS, UNIT], gl.float32, OUTPUT)
        mbarrier.wait(shared.query_full, taken & 1)
        for pair in range(first, last):
            phase = turn & 1
            unit = turn * PAIR
            listed = rows >= 0
            scores = score(shared, unit, KEYS)
            if pair == last - 1 and staged_in_keys(KEYS):
                mbarrier.arrive(shared.query_empty)
            # Block A: its own
            scores = gl.where(listed[None, :], scores, float("-inf"))
            higher = gl.maximum(best, gl.max(scores, 1) * c)
            p = gl.exp2(gl.fma(scores, c, -higher[:, None]))
            rounded = p.to(gl.bfloat16)
            shared.weights.index(turn >> 24).store(rounded)
            shared.maxima0.store(higher)
            fence_async_shared()
            mbarrier.arrive(shared.weights_full.index(0))
            fade = gl.exp2(best - higher)
            own = gl.convert_layout(rounded, WEIGHTS)
            left_now, right_now = weigh(own, shared, unit, left, right, fade)
            total = total * fade + gl.sum(p, 1)
            rows = lists.rows(query, 2 * work.listed(pair + 1, number, first, last), key)
            left, right, own = warpgroup_mma_wait(0, deps=[left_now, right_now, own])
            release(shared, unit)
            # Block B: the other group's
            mbarrier.wait(shared.weights_full.index(1), phase)
            best = shared.maxima1.load(SCORE_ROW)
            fade = gl.exp2(higher - best)
            total = total * fade
            fence_async_shared()
            lent = shared.weights.index((turn >> 24) + 1)
            left_now, right_now = weigh(lent, shared, unit + 4, left, right, fade)
            turn += 1
            left, right = warpgroup_mma_wait(0, deps=[left_now, right_now])
            if pair < last - 1 or not staged_in_keys(KEYS):
                release(shared, unit + 4)
        shared.sums0.index(turn >> 24).store(total)
        mbarrier.arrive(shared.totals_full.index(0))
        mbarrier.wait(shared.totals_full.index(1), taken & 1)
        total += shared.sums1.index(turn >> 24).load(SCORE_ROW)
        factor = last_factor(
            best, total, sink, results, work, number, turn >> 24, lift, SCORE_ROW, OUTPUT_ROW, True
        )  # fmt: skip
        finish_both(left, right, factor, results, shared, turn * PAIR - 4, 0, work, number, KEYS)
        taken += 1


@gluon.jit
def attend_second(lists, work, results, shared, c, lift):
    """Group 1: scores B, keeps the output's columns 256-511."""
    KEYS: gl.constexpr = lists.KEYS
    SCORES: gl.constexpr = scores_layout(KEYS)
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    sink = sinks(results, SCORE_ROW)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    turn = 0
    taken = 0
    for number in range(gl.program_id(0), work.items(), gl.num_programs(0)):
        query, first, last = work.item(number)
        rows = lists.rows(query, 2 * work.listed(first, number, first, last) + 1, key)
        best = gl.full([HEADS], NO_SCORE, gl.float32, SCORE_ROW)
        total = gl.full([HEADS], 0.0, gl.float32, SCORE_ROW)
        left = gl.zeros([HEADS, UNIT], gl.float32, OUTPUT)
        right = gl.zeros([HEADS, UNIT], gl.float32, OUTPUT)
        mbarrier.wait(shared.query_full, taken & 1)
        for pair in range(first, last):
            phase = turn & 1
            unit = turn * PAIR
            listed = rows >= 0
            scores = score(shared, unit + 4, KEYS)
            if pair == last - 1 and staged_in_keys(KEYS):
                mbarrier.arrive(shared.query_empty)
            scores = gl.where(listed[None, :], scores, float("-inf"))
            highest = gl.max(scores, 1) * c
            # Block A: the other group's
            mbarrier.wait(shared.weights_full.index(0), phase)
            higher = shared.maxima0.load(SCORE_ROW)
            highest = gl.maximum(higher, highest)
            lent = shared.weights.index(turn >> 24)
            left_now, right_now = weigh(lent, shared, unit + 2, left, right, gl.exp2(best - higher))
            # Block B: its own, while those products run
            p = gl.exp2(gl.fma(scores, c, -highest[:, None]))
            rounded = p.to(gl.bfloat16)
            shared.weights.index((turn >> 24) + 1).store(rounded)
            shared.maxima1.store(highest)
            fence_async_shared()
            mbarrier.arrive(shared.weights_full.index(1))
            total = total * gl.exp2(best - highest) + gl.sum(p, 1)
            own = gl.convert_layout(rounded, WEIGHTS)
            fade = gl.exp2(higher - highest)
            best = highest
            left, right = warpgroup_mma_wait(0, deps=[left_now, right_now])
            release(shared, unit + 2)
            left_now, right_now = weigh(own, shared, unit + 6, left, right, fade)
            rows = lists.rows(query, 2 * work.listed(pair + 1, number, first, last) + 1, key)
            turn += 1
            left, right, own = warpgroup_mma_wait(0, deps=[left_now, right_now, own])
            if pair < last - 1 or not staged_in_keys(KEYS):
                release(shared, unit + 6)
        shared.sums1.index(turn >> 24).store(total)
        mbarrier.arrive(shared.totals_full.index(1))
        mbarrier.wait(shared.totals_full.index(0), taken & 1)
        total += shared.sums0.index(turn >> 24).load(SCORE_ROW)
        factor = last_factor(
            best, total, sink, results, work, number, turn >> 24, lift, SCORE_ROW, OUTPUT_ROW, False
        )  # fmt: skip
        finish_both(left, right, factor, results, shared, turn * PAIR - 2, 2 * UNIT, work, number, KEYS)
        taken += 1


@gluon.jit
def allocate(KEYS: gl.constexpr):
    """Shared memory with its barriers set."""
    shared = Shared(
        gl.allocate_shared_memory(gl.bfloat16, [4, HEADS, UNIT], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, UNIT], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, KEYS], weights_shared(KEYS)),
        gl.allocate_shared_memory(gl.float32, [HEADS], FLAT),
        gl.allocate_shared_memory(gl.float32, [HEADS], FLAT),
        gl.allocate_shared_memory(gl.float32, [1, HEADS], FLAT),
        gl.allocate_shared_memory(gl.float32, [1, HEADS], FLAT),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    set_barriers(shared, SLOTS, THREADS)
    return shared


@gluon.jit(do_not_specialize=["heads", "near_count", "far_count", "queries", "whole", "pieces", "pairs"])
def attend_ring(
    q, near, far, near_rows, far_rows, sink, out, partial, maxima, sums, heads, near_count, far_count, queries, whole,
    pieces, pairs, c, STEP: gl.constexpr, KEYS: gl.constexpr, OVERLAPS: gl.constexpr, TURNS: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Sparse attention over tables of bf16 rows. Arguments as of `attend_bf16`."""
    lists = Lists(near_rows, far_rows, near_count, far_count, STEP, KEYS)
    work = Work(queries, whole, pieces, pairs, TURNS)
    results = Results(out, partial, maxima, sums, sink, heads, OVERLAPS)
    shared = allocate(KEYS)
    gl.warp_specialize(
        [
            (attend_first, (lists, work, results, shared, c, 1.0)),
            (attend_second, (lists, work, results, shared, c, 1.0)),
            (load_units, (q, near, far, heads, lists, work, shared)),
        ],
        [4, 4],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )
