"""Sparse attention for Hopper, each group a block ahead: blocks of 32 keys, more than two pairs of them at hand.

The partitions and their talk are those of `attend_hopper`; see the drawing there. There the groups wait for each other:
while one takes exponentials, the other has often nothing to multiply. Here a group scores its next block before it
weighs the lent one of this pair, so that the tensor cores have work meanwhile. For that the next pair's keys have to be
there: blocks are half as long, and their halves [32, 256] take nine slots in turn, half `t` slot `t % 9`.

    half      0   1   2   3 | 4   5   6   7 | 8   9  10 ...
    slot      0   1   2   3   4   5   6   7   8 | 0   1 ...
              A0  A1  B0  B1| A0  A1  B0  B1| A0  A1  B0 ... of the pair after next

    group 0                                     group 1
    -------------------------------------       -------------------------------------
    maximum, weights of A(n), published  ====>  maximum, weights of B(n), published
    O += weights A(n) @ A0(n)                   O += weights A(n) @ A1(n)
    S = Q A(n + 1)'                             S = Q B(n + 1)'
    O += weights B(n) @ B0(n)           <====   O += weights B(n) @ B1(n)

Group 0's weights have two buffers: it writes those of a pair while group 1 may still read the last ones. When it writes
a buffer again, group 1 has published the weights between, and so has let go of the buffer. Group 1 writes its own when
group 0 has published the next, and so has let go of them: one buffer.
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
    HALF,
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
    load_query,
    scores_layout,
    set_barriers,
    sinks,
    weights_shared,
)
from openv41.ops.kernels.attend_hopper_ring import COPY, OUTPUT, OUTPUT_ROW, UNIT, WEIGHTS

SLOTS = gl.constexpr(9)
"""As many halves of 32 keys as fit beside the query and the weights."""
PAIR = gl.constexpr(4)
"""Halves of a pair of blocks: 0 and 1 of block A, 2 and 3 of block B."""
LENT = gl.constexpr(2)
"""The buffer of group 1's weights; group 0's are 0 and 1."""


@gluon.jit
def load_block(table, rows, unit, shared):
    """The two halves of a block, of which `unit` is the first; zeros for row -1."""
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, COPY))
    source = table + gl.maximum(rows, 0).to(gl.int64)[:, None] * WIDTH + column[None, :]
    for side in range(2 + (unit >> 24)):
        slot = (unit + side) % SLOTS
        mbarrier.wait(shared.empty.index(slot), (((unit + side) // SLOTS) & 1) ^ 1)
        target = shared.keys.index(slot)
        async_copy.async_copy_global_to_shared(target, source + side * HALF, mask=(rows >= 0)[:, None])
        async_copy.mbarrier_arrive(shared.full.index(slot), increment_count=False)


@gluon.jit
def load_ahead(q, near, far, heads, lists, work, shared):
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
            unit += 2
    async_copy.wait_group(0)


@gluon.jit
def score(shared, unit, KEYS: gl.constexpr):
    """q . key of the block whose first half is given, in fp32; still running."""
    scores = gl.zeros([HEADS, KEYS], gl.float32, scores_layout(KEYS))
    for side in gl.static_range(2):
        slot = (unit + side) % SLOTS
        mbarrier.wait(shared.full.index(slot), ((unit + side) // SLOTS) & 1)
        fence_async_shared()
        keys = shared.keys.index(slot).permute((1, 0))
        scores = warpgroup_mma(
            shared.query.index((unit >> 24) + side), keys, scores, use_acc=side > 0, is_async=True
        )  # fmt: skip
    return scores


@gluon.jit
def weigh(weights, shared, unit, left, right, fade):
    """Both accumulators, faded, plus weights @ the half's columns; still running."""
    fade = gl.convert_layout(fade, OUTPUT_ROW)[:, None]
    keys = shared.keys.index(unit % SLOTS)
    left = warpgroup_mma(weights, keys.slice(0, UNIT, dim=1), left * fade, is_async=True)
    right = warpgroup_mma(weights, keys.slice(UNIT, UNIT, dim=1), right * fade, is_async=True)
    return left, right


@gluon.jit
def release(shared, unit):
    mbarrier.arrive(shared.empty.index(unit % SLOTS))


@gluon.jit
def finish_both(left, right, factor, results, shared, unit, FIRST: gl.constexpr, work, number):
    """Write both accumulators' columns, one after the other by way of the half given, and let go of it."""
    stage = shared.keys.index(unit % SLOTS)._reinterpret(gl.bfloat16, [HEADS, UNIT], SWIZZLED)
    factor = factor[:, None]
    finish(left * factor, results, stage, FIRST, UNIT, COPY, work, number, unit >> 24)
    finish(right * factor, results, stage, FIRST + UNIT, UNIT, COPY, work, number, unit >> 24)
    release(shared, unit)


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
        scores = warpgroup_mma_wait(0, deps=[score(shared, turn * PAIR, KEYS)])
        for pair in range(first, last):
            phase = turn & 1
            unit = turn * PAIR
            # Block A: its own
            scores = gl.where((rows >= 0)[None, :], scores, float("-inf"))
            higher = gl.maximum(best, gl.max(scores, 1) * c)
            p = gl.exp2(gl.fma(scores, c, -higher[:, None]))
            rounded = p.to(gl.bfloat16)
            shared.weights.index(phase).store(rounded)
            shared.maxima0.store(higher)
            fence_async_shared()
            mbarrier.arrive(shared.weights_full.index(0))
            fade = gl.exp2(best - higher)
            own = gl.convert_layout(rounded, WEIGHTS)
            left_now, right_now = weigh(own, shared, unit, left, right, fade)
            total = total * fade + gl.sum(p, 1)
            rows = lists.rows(query, 2 * work.listed(pair + 1, number, first, last), key)
            if pair < last - 1:
                ahead = score(shared, unit + PAIR, KEYS)
                left, right, own, scores = warpgroup_mma_wait(0, deps=[left_now, right_now, own, ahead])
            else:
                mbarrier.arrive(shared.query_empty)
                left, right, own = warpgroup_mma_wait(0, deps=[left_now, right_now, own])
            release(shared, unit)
            # Block B: the other group's
            mbarrier.wait(shared.weights_full.index(1), phase)
            best = shared.maxima1.load(SCORE_ROW)
            fade = gl.exp2(higher - best)
            total = total * fade
            fence_async_shared()
            lent = shared.weights.index((turn >> 24) + LENT)
            left_now, right_now = weigh(lent, shared, unit + 2, left, right, fade)
            turn += 1
            left, right = warpgroup_mma_wait(0, deps=[left_now, right_now])
            if pair < last - 1:
                release(shared, unit + 2)
        shared.sums0.index(turn >> 24).store(total)
        mbarrier.arrive(shared.totals_full.index(0))
        mbarrier.wait(shared.totals_full.index(1), taken & 1)
        total += shared.sums1.index(turn >> 24).load(SCORE_ROW)
        factor = last_factor(
            best, total, sink, results, work, number, turn >> 24, lift, SCORE_ROW, OUTPUT_ROW, True
        )  # fmt: skip
        finish_both(left, right, factor, results, shared, turn * PAIR - 2, 0, work, number)
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
        scores = warpgroup_mma_wait(0, deps=[score(shared, turn * PAIR + 2, KEYS)])
        for pair in range(first, last):
            phase = turn & 1
            unit = turn * PAIR
            scores = gl.where((rows >= 0)[None, :], scores, float("-inf"))
            highest = gl.max(scores, 1) * c
            # Block B: its own, as soon as the maximum over A is known
            mbarrier.wait(shared.weights_full.index(0), phase)
            higher = shared.maxima0.load(SCORE_ROW)
            highest = gl.maximum(higher, highest)
            p = gl.exp2(gl.fma(scores, c, -highest[:, None]))
            rounded = p.to(gl.bfloat16)
            shared.weights.index((turn >> 24) + LENT).store(rounded)
            shared.maxima1.store(highest)
            fence_async_shared()
            mbarrier.arrive(shared.weights_full.index(1))
            # Block A: the other group's
            lent = shared.weights.index(phase)
            left_now, right_now = weigh(lent, shared, unit + 1, left, right, gl.exp2(best - higher))
            total = total * gl.exp2(best - highest) + gl.sum(p, 1)
            rows = lists.rows(query, 2 * work.listed(pair + 1, number, first, last) + 1, key)
            if pair < last - 1:
                ahead = score(shared, unit + PAIR + 2, KEYS)
                left, right, scores = warpgroup_mma_wait(0, deps=[left_now, right_now, ahead])
            else:
                mbarrier.arrive(shared.query_empty)
                left, right = warpgroup_mma_wait(0, deps=[left_now, right_now])
            release(shared, unit + 1)
            own = gl.convert_layout(rounded, WEIGHTS)
            fade = gl.exp2(higher - highest)
            best = highest
            left_now, right_now = weigh(own, shared, unit + 3, left, right, fade)
            turn += 1
            left, right, own = warpgroup_mma_wait(0, deps=[left_now, right_now, own])
            if pair < last - 1:
                release(shared, unit + 3)
        shared.sums1.index(turn >> 24).store(total)
        mbarrier.arrive(shared.totals_full.index(1))
        mbarrier.wait(shared.totals_full.index(0), taken & 1)
        total += shared.sums0.index(turn >> 24).load(SCORE_ROW)
        factor = last_factor(
            best, total, sink, results, work, number, turn >> 24, lift, SCORE_ROW, OUTPUT_ROW, False
        )  # fmt: skip
        finish_both(left, right, factor, results, shared, turn * PAIR - 1, HALF, work, number)
        taken += 1


@gluon.jit
def allocate(ARRIVALS: gl.constexpr, KEYS: gl.constexpr):
    """Shared memory with its barriers set. ARRIVALS: at a full half block, of the loader's threads."""
    shared = Shared(
        gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, HALF], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, HALF], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [3, HEADS, KEYS], weights_shared(KEYS)),
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
    set_barriers(shared, SLOTS, ARRIVALS)
    return shared


@gluon.jit(do_not_specialize=["heads", "near_count", "far_count", "queries", "whole", "pieces", "pairs"])
def attend_deep(
    q, near, far, near_rows, far_rows, sink, out, partial, maxima, sums, heads, near_count, far_count, queries, whole,
    pieces, pairs, c, STEP: gl.constexpr, KEYS: gl.constexpr, OVERLAPS: gl.constexpr, TURNS: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Sparse attention over tables of bf16 rows. Arguments as of `attend_bf16`; KEYS is 32."""
    lists = Lists(near_rows, far_rows, near_count, far_count, STEP, KEYS)
    work = Work(queries, whole, pieces, pairs, TURNS)
    results = Results(out, partial, maxima, sums, sink, heads, OVERLAPS)
    shared = allocate(THREADS, KEYS)
    gl.warp_specialize(
        [
            (attend_first, (lists, work, results, shared, c, 1.0)),
            (attend_second, (lists, work, results, shared, c, 1.0)),
            (load_ahead, (q, near, far, heads, lists, work, shared)),
        ],
        [4, 4],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )
