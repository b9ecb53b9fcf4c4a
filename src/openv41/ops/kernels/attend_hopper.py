"""Sparse attention for Hopper in three partitions of one program: a loader and two groups that compute.

64 heads of 512 dims; a query's list of rows goes in blocks of 64 (or 32) keys, the blocks in pairs. Each block lies in
shared memory as two halves of its dims, [64, 256]: A0 and A1 are the pair's first block, B0 and B1 its second. Group 0
scores block A over all dims and keeps the output's columns 0-255; group 1 scores block B and keeps columns 256-511. A
group takes the exponentials of its own block once and lends them, as bf16 weights, to the other:

    loader          group 0                              group 1
    --------        -------------------------------      -------------------------------
    Q    ==query==> S = Q A0' + Q A1'                    S = Q B0' + Q B1'  <==query== Q
    A0   ==full===> maximum, weights of A
    A1   ==full===> publish them   ==weights 0=========> maximum over A and B
                    O += weights A @ A0                  O += weights A @ A1
    A0   <==empty== (A0 is free)                         (A1 is free)       ==empty==> A1
    B0                                                   weights of B       <==full=== B0
    B1              O += weights B @ B0 <==weights 1==== publish them       <==full=== B1
                                                         O += weights B @ B1
    B0   <==empty== (B0 is free)                         (B1 is free)       ==empty==> B1

Running maxima pass through both groups in the list's order, block by block: weights are rounded to bf16 against the
maximum so far, as published. Sums stay apart, each group's over its own blocks, until the query's end (`totals`).

Who waits for whom (an mbarrier flips its phase each time that all its arrivals are in; a waiter names the phase):

    barrier         arrivals                    waited for by       flips once a
    query_full      the loader's copies         both groups         query
    query_empty     both groups, after the      loader              query
                    query's last scores
    full[A0..B1]    the loader's copies         both groups         pair
    empty[A0], [B0] group 0                     loader              pair
    empty[A1], [B1] group 1                     loader              pair
    weights[0]      group 0                     group 1             pair
    weights[1]      group 1                     group 0             pair
    totals[g]       group g                     the other           query

Full, weights and totals are waited for in the phase of their turn (0, 1, 0, ...); empty ones in the opposite, so that
the first wait passes at once. One barrier often guards more than its own buffer:

- A0 and B1 are read by one group only. A1 is scored by group 0 and weighed by group 1, which waits for weights[0]
  first; its arrival at empty[A1] therefore speaks for both. B0 likewise, by way of weights[1].
- Group 1 does not wait for A1: copies land in their order, and it has waited for B1.
- Weights and maximum of group 0 are overwritten a pair later, after a wait for full[A1], which the loader fills only
  when group 1 has let go of A1, that is, has used those weights. Those of group 1: after a wait for weights[0].
- The last pair's B0 and B1 serve to turn the output's layout (see `finish`) before they are let go of. Halves of 32
  keys have no room for that: there the query's own halves do it, and the groups let go of the query only then.

A program goes through items: whole queries, then pieces of others (see `Work`). What it leaves of a piece is not
divided; `kernels.attend.combine` puts the pieces together.

What the compiler wants, learned by reading what it made:

- Buffers are addressed by a run-time zero (`turn >> 24`). With constant addresses every descriptor of a matrix product
  is computed ahead of the loop, and they spill.
- No accumulator is in flight across a loop's back edge, or the assembler waits after every single product.
- Rows come by `cp.async`, which writes as threads do, while matrix products read as the copy engine does: each group
  fences after its wait. Weights written by ordinary stores are fenced before they are announced.
- The fence also waits for the thread's own loads from memory: the next block's row numbers are asked for after it.
- Every wait and arrival is a barrier of its partition's warps: hence few, large blocks.
- Vectors of the two groups have allocations of their own: stores into one allocation are separated by barriers.
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
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents

HEADS = gl.constexpr(64)
WIDTH = gl.constexpr(512)
HALF = gl.constexpr(256)
THREADS = gl.constexpr(128)
"""Of a partition: four warps."""

A0 = gl.constexpr(0)
A1 = gl.constexpr(1)
B0 = gl.constexpr(2)
B1 = gl.constexpr(3)
"""The four halves of a pair of blocks, as they are numbered in shared memory."""

NO_SCORE = gl.constexpr(-1e30)
"""The running maximum before the first key: finite, so that a block of nothing changes nothing."""
LOG2_E = gl.constexpr(1.4426950408889634)

COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
"""16 bytes of bf16 a thread, half a row a warp."""
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT, 2))
OUTPUT_ROW = gl.constexpr(gl.SliceLayout(1, OUTPUT))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.constexpr_function
def scores_layout(KEYS):
    """Of scores and weights, [64, KEYS]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])


@gluon.constexpr_function
def weights_shared(KEYS):
    """Of weights in shared memory, [64, KEYS] of bf16."""
    return gl.NVMMASharedLayout(2 * KEYS, 16, rank=2)


@gluon.constexpr_function
def staged_in_keys(KEYS):
    """Whether a block of keys has room for the output of 64 heads, or the query has to make it."""
    return KEYS == 64


@aggregate
class Lists:
    """The rows that queries attend to: near ones, then far ones, each padded to whole blocks of `KEYS`. -1 is nothing.

    Row numbers are read as 32-bit words, every `STEP`-th of them (2 where they are stored in 64 bits)."""

    near_rows: gl.tensor
    far_rows: gl.tensor
    near_count: gl.tensor
    far_count: gl.tensor
    STEP: gl.constexpr
    KEYS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, near_rows, far_rows, near_count, far_count, STEP, KEYS):
        self.near_rows = near_rows
        self.far_rows = far_rows
        self.near_count = near_count
        self.far_count = far_count
        self.STEP = gl.constexpr(STEP)
        self.KEYS = gl.constexpr(KEYS)

    @gluon.jit
    def near_blocks(self):
        return (self.near_count + (self.KEYS - 1)) // self.KEYS

    @gluon.jit
    def rows(self, query, block, key):
        """Rows of a query's block, in the layout of `key`, the keys' numbers in the block."""
        far_block = block - self.near_blocks()
        is_near = far_block < 0
        count = gl.where(is_near, self.near_count, self.far_count)
        base = gl.where(is_near, self.near_rows, self.far_rows)
        place = gl.where(is_near, block, far_block) * self.KEYS + key
        start = base + gl.cast(query, gl.int64) * count * self.STEP
        return gl.load(start + place * self.STEP, mask=place < count, other=-1)


@aggregate
class Work:
    """Items of a persistent program: the first `whole` queries, then of each other query the `pieces` of its list. A
    list has `pairs` of blocks."""

    queries: gl.tensor
    whole: gl.tensor
    pieces: gl.tensor
    pairs: gl.tensor
    TURNS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, queries, whole, pieces, pairs, TURNS):
        self.queries = queries
        self.whole = whole
        self.pieces = pieces
        self.pairs = pairs
        self.TURNS = gl.constexpr(TURNS)

    @gluon.jit
    def items(self):
        return self.whole + (self.queries - self.whole) * self.pieces

    @gluon.jit
    def item(self, number):
        """Query, and the first pair of what is done of it and the one after the last. No piece is empty."""
        later = number - self.whole
        piece = later % self.pieces
        query = gl.where(later < 0, number, self.whole + later // self.pieces)
        first = gl.where(later < 0, 0, piece * self.pairs // self.pieces)
        last = gl.where(later < 0, self.pairs, (piece + 1) * self.pairs // self.pieces)
        return query, first, last

    @gluon.jit
    def listed(self, pair, number, first, last):
        """Where the list has the pair that comes in this place: with TURNS, every second item of a program goes from
        the list's end to its beginning, so that the rows last read by all programs are read again while L2 has them."""
        if self.TURNS:
            back = (number // gl.num_programs(0)) & 1
            return gl.where(back > 0, gl.maximum(first + last - 1 - pair, 0), pair)
        else:
            return pair

    @gluon.jit
    def place(self, number):
        """Where its result goes: the place in `out`, or, of a piece, that in `partial`; and whether it is a piece."""
        later = number - self.whole
        piece = (later % self.pieces) * (self.queries - self.whole) + later // self.pieces
        return gl.where(later < 0, number, piece), later >= 0


@aggregate
class Shared:
    """Shared memory: the query's two halves, the pair's four, each group's weights, maxima and sums, barriers."""

    query: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    maxima0: gl.shared_memory_descriptor
    maxima1: gl.shared_memory_descriptor
    sums0: gl.shared_memory_descriptor
    sums1: gl.shared_memory_descriptor
    query_full: gl.shared_memory_descriptor
    query_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    weights_full: gl.shared_memory_descriptor
    totals_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, query, keys, weights, maxima0, maxima1, sums0, sums1, query_full, query_empty, full, empty, weights_full,
        totals_full,
    ):  # fmt: skip
        self.query = query
        self.keys = keys
        self.weights = weights
        self.maxima0 = maxima0
        self.maxima1 = maxima1
        self.sums0 = sums0
        self.sums1 = sums1
        self.query_full = query_full
        self.query_empty = query_empty
        self.full = full
        self.empty = empty
        self.weights_full = weights_full
        self.totals_full = totals_full


@aggregate
class Results:
    """Where results go: `out` [queries, heads, 512]; a piece's to `partial` [pieces, queries - whole, heads, 512]
    (bf16, not divided), with its maximum (of scores in units of log 2) and sum [pieces, queries - whole, heads].
    OVERLAPS: the next kernel may be launched while results are written; it waits for them itself."""

    out: gl.tensor
    partial: gl.tensor
    maxima: gl.tensor
    sums: gl.tensor
    sink: gl.tensor
    heads: gl.tensor
    OVERLAPS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, out, partial, maxima, sums, sink, heads, OVERLAPS):
        self.out = out
        self.partial = partial
        self.maxima = maxima
        self.sums = sums
        self.sink = sink
        self.heads = heads
        self.OVERLAPS = gl.constexpr(OVERLAPS)


@gluon.jit
def load_query(q, query, heads, shared, taken):
    """The query's heads into shared memory, 32 at a time (the addresses of all at once would spill). Where there are
    fewer than 64, the last one again and again, which costs less than masks. `taken`: queries before it."""
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, COPY))
    head = gl.arange(0, HEADS // 2, layout=gl.SliceLayout(1, COPY)) + (taken >> 24)  # not ahead of time: see `finish`
    first = q + gl.cast(query, gl.int64) * heads * WIDTH
    mbarrier.wait(shared.query_empty, (taken & 1) ^ 1)
    for part in gl.static_range(2):
        place = gl.minimum(head + part * (HEADS // 2), heads - 1)
        source = first + place[:, None] * WIDTH + column[None, :]
        for side in gl.static_range(2):
            target = shared.query.index(side).slice(part * (HEADS // 2), HEADS // 2, dim=0)
            async_copy.async_copy_global_to_shared(target, source + side * HALF)
    async_copy.mbarrier_arrive(shared.query_full, increment_count=False)


@gluon.jit
def load_half(table, rows, PLACE: gl.constexpr, shared, phase):
    """Half of a block's rows from a bf16 table, zeros for row -1 (whose bytes are not touched)."""
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, COPY)) + (PLACE % 2) * HALF
    source = table + gl.maximum(rows, 0).to(gl.int64)[:, None] * WIDTH + column[None, :]
    mbarrier.wait(shared.empty.index(PLACE), phase)
    async_copy.async_copy_global_to_shared(shared.keys.index(PLACE), source, mask=(rows >= 0)[:, None])
    async_copy.mbarrier_arrive(shared.full.index(PLACE), increment_count=False)


@gluon.jit
def load_rows(q, near, far, heads, lists, work, shared):
    """The loader's partition, of bf16 tables. Row numbers of a block are asked for a block ahead."""
    key = gl.arange(0, lists.KEYS, layout=gl.SliceLayout(1, COPY))
    turn = 0
    taken = 0
    for number in range(gl.program_id(0), work.items(), gl.num_programs(0)):
        query, first, last = work.item(number)
        rows_a = lists.rows(query, 2 * work.listed(first, number, first, last), key)
        load_query(q, query, heads, shared, taken)
        taken += 1
        for pair in range(first, last):
            phase = (turn & 1) ^ 1
            block = 2 * work.listed(pair, number, first, last)
            rows_b = lists.rows(query, block + 1, key)
            table = gl.where(block < lists.near_blocks(), near, far)
            load_half(table, rows_a, A0, shared, phase)
            load_half(table, rows_a, A1, shared, phase)
            rows_a = lists.rows(query, 2 * work.listed(pair + 1, number, first, last), key)
            table = gl.where(block + 1 < lists.near_blocks(), near, far)
            load_half(table, rows_b, B0, shared, phase)
            load_half(table, rows_b, B1, shared, phase)
            turn += 1
    async_copy.wait_group(0)


@gluon.jit
def score(shared, zero, LEFT: gl.constexpr, phase, KEYS: gl.constexpr):
    """q . key of the block whose left half is LEFT, in fp32."""
    nothing = gl.zeros([HEADS, KEYS], gl.float32, scores_layout(KEYS))
    mbarrier.wait(shared.full.index(LEFT), phase)
    fence_async_shared()
    left = shared.keys.index(zero + LEFT).permute((1, 0))
    scores = warpgroup_mma(shared.query.index(zero), left, nothing, use_acc=False, is_async=True)
    mbarrier.wait(shared.full.index(LEFT + 1), phase)
    fence_async_shared()
    right = shared.keys.index(zero + LEFT + 1).permute((1, 0))
    scores = warpgroup_mma(shared.query.index(zero + 1), right, scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def faded(output, fade):
    """The output so far, for a maximum that has risen: `fade` is a factor per head, in the scores' layout."""
    return output * gl.convert_layout(fade, OUTPUT_ROW)[:, None]


@gluon.jit
def attend_first(lists, work, results, shared, c, lift):
    """Group 0: scores A, keeps the output's columns 0-255. `c`: what makes a score a power of two's exponent."""
    SCORES: gl.constexpr = scores_layout(lists.KEYS)
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    sink = sinks(results, SCORE_ROW)
    key = gl.arange(0, lists.KEYS, layout=gl.SliceLayout(0, SCORES))
    turn = 0
    taken = 0
    for number in range(gl.program_id(0), work.items(), gl.num_programs(0)):
        query, first, last = work.item(number)
        rows = lists.rows(query, 2 * work.listed(first, number, first, last), key)
        best = gl.full([HEADS], NO_SCORE, gl.float32, SCORE_ROW)
        total = gl.full([HEADS], 0.0, gl.float32, SCORE_ROW)
        output = gl.zeros([HEADS, HALF], gl.float32, OUTPUT)
        mbarrier.wait(shared.query_full, taken & 1)
        for pair in range(first, last):
            phase = turn & 1
            zero = turn >> 24
            listed = rows >= 0
            scores = score(shared, zero, A0, phase, lists.KEYS)
            if pair == last - 1 and staged_in_keys(lists.KEYS):
                mbarrier.arrive(shared.query_empty)
            # Block A: its own
            scores = gl.where(listed[None, :], scores, float("-inf"))
            higher = gl.maximum(best, gl.max(scores, 1) * c)
            p = gl.exp2(gl.fma(scores, c, -higher[:, None]))
            rounded = p.to(gl.bfloat16)
            shared.weights.index(zero).store(rounded)
            shared.maxima0.store(higher)
            fence_async_shared()
            mbarrier.arrive(shared.weights_full.index(0))
            fade = gl.exp2(best - higher)
            own = gl.convert_layout(rounded, WEIGHTS)
            running = warpgroup_mma(own, shared.keys.index(zero + A0), faded(output, fade), is_async=True)
            total = total * fade + gl.sum(p, 1)
            rows = lists.rows(query, 2 * work.listed(pair + 1, number, first, last), key)
            output, own = warpgroup_mma_wait(0, deps=[running, own])
            mbarrier.arrive(shared.empty.index(A0))
            # Block B: the other group's
            mbarrier.wait(shared.weights_full.index(1), phase)
            best = shared.maxima1.load(SCORE_ROW)
            fade = gl.exp2(higher - best)
            total = total * fade
            mbarrier.wait(shared.full.index(B0), phase)  # at once: group 1 has waited for it
            fence_async_shared()
            lent = shared.weights.index(zero + 1)
            running = warpgroup_mma(lent, shared.keys.index(zero + B0), faded(output, fade), is_async=True)
            turn += 1
            output = warpgroup_mma_wait(0, deps=[running])
            if pair < last - 1 or not staged_in_keys(lists.KEYS):
                mbarrier.arrive(shared.empty.index(B0))
        shared.sums0.index(turn >> 24).store(total)
        mbarrier.arrive(shared.totals_full.index(0))
        mbarrier.wait(shared.totals_full.index(1), taken & 1)
        total += shared.sums1.index(turn >> 24).load(SCORE_ROW)
        factor = last_factor(
            best, total, sink, results, work, number, turn >> 24, lift, SCORE_ROW, OUTPUT_ROW, True
        )  # fmt: skip
        stage = stage_of(shared, B0, 0, lists.KEYS)
        finish(output * factor[:, None], results, stage, 0, HALF, COPY, work, number, turn >> 24)
        let_go(shared, B0, lists.KEYS)
        taken += 1


@gluon.jit
def attend_second(lists, work, results, shared, c, lift):
    """Group 1: scores B, keeps the output's columns 256-511."""
    SCORES: gl.constexpr = scores_layout(lists.KEYS)
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    sink = sinks(results, SCORE_ROW)
    key = gl.arange(0, lists.KEYS, layout=gl.SliceLayout(0, SCORES))
    turn = 0
    taken = 0
    for number in range(gl.program_id(0), work.items(), gl.num_programs(0)):
        query, first, last = work.item(number)
        rows = lists.rows(query, 2 * work.listed(first, number, first, last) + 1, key)
        best = gl.full([HEADS], NO_SCORE, gl.float32, SCORE_ROW)
        total = gl.full([HEADS], 0.0, gl.float32, SCORE_ROW)
        output = gl.zeros([HEADS, HALF], gl.float32, OUTPUT)
        mbarrier.wait(shared.query_full, taken & 1)
        for pair in range(first, last):
            phase = turn & 1
            zero = turn >> 24
            listed = rows >= 0
            scores = score(shared, zero, B0, phase, lists.KEYS)
            if pair == last - 1 and staged_in_keys(lists.KEYS):
                mbarrier.arrive(shared.query_empty)
            scores = gl.where(listed[None, :], scores, float("-inf"))
            highest = gl.max(scores, 1) * c
            # Block A: the other group's
            mbarrier.wait(shared.weights_full.index(0), phase)
            higher = shared.maxima0.load(SCORE_ROW)
            highest = gl.maximum(higher, highest)
            lent = shared.weights.index(zero)  # A1 is full, and fenced: it was copied before B1
            fade = gl.exp2(best - higher)
            running = warpgroup_mma(lent, shared.keys.index(zero + A1), faded(output, fade), is_async=True)
            # Block B: its own, while that product runs
            p = gl.exp2(gl.fma(scores, c, -highest[:, None]))
            rounded = p.to(gl.bfloat16)
            shared.weights.index(zero + 1).store(rounded)
            shared.maxima1.store(highest)
            fence_async_shared()
            mbarrier.arrive(shared.weights_full.index(1))
            total = total * gl.exp2(best - highest) + gl.sum(p, 1)
            own = gl.convert_layout(rounded, WEIGHTS)
            fade = gl.exp2(higher - highest)
            best = highest
            output = warpgroup_mma_wait(0, deps=[running])
            mbarrier.arrive(shared.empty.index(A1))
            running = warpgroup_mma(own, shared.keys.index(zero + B1), faded(output, fade), is_async=True)
            rows = lists.rows(query, 2 * work.listed(pair + 1, number, first, last) + 1, key)
            turn += 1
            output, own = warpgroup_mma_wait(0, deps=[running, own])
            if pair < last - 1 or not staged_in_keys(lists.KEYS):
                mbarrier.arrive(shared.empty.index(B1))
        shared.sums1.index(turn >> 24).store(total)
        mbarrier.arrive(shared.totals_full.index(1))
        mbarrier.wait(shared.totals_full.index(0), taken & 1)
        total += shared.sums0.index(turn >> 24).load(SCORE_ROW)
        factor = last_factor(
            best, total, sink, results, work, number, turn >> 24, lift, SCORE_ROW, OUTPUT_ROW, False
        )  # fmt: skip
        stage = stage_of(shared, B1, 1, lists.KEYS)
        finish(output * factor[:, None], results, stage, HALF, HALF, COPY, work, number, turn >> 24)
        let_go(shared, B1, lists.KEYS)
        taken += 1


@gluon.jit
def stage_of(shared, BUFFER: gl.constexpr, HALF_OF_QUERY: gl.constexpr, KEYS: gl.constexpr):
    """Free shared memory of [64, 256] in which a group turns its output: half a block of 64 keys, or half the query."""
    if staged_in_keys(KEYS):
        return shared.keys.index(BUFFER)
    else:
        return shared.query.index(HALF_OF_QUERY)


@gluon.jit
def let_go(shared, BUFFER: gl.constexpr, KEYS: gl.constexpr):
    """Of the same."""
    if staged_in_keys(KEYS):
        mbarrier.arrive(shared.empty.index(BUFFER))
    else:
        mbarrier.arrive(shared.query_empty)


@gluon.jit
def sinks(results, ROW: gl.constexpr):
    """Of each head, in units of log 2. Asked for before all else: at the end it would be waited for."""
    head = gl.arange(0, HEADS, layout=ROW)
    return gl.load(results.sink + head, mask=head < results.heads, other=0.0) * LOG2_E


@gluon.jit
def last_factor(
    best, total, sink, results, work, number, zero, lift, ROW: gl.constexpr, OUT: gl.constexpr, STORES: gl.constexpr
):  # fmt: skip
    """What each head's output is multiplied by at last: 1 / (sum + sink), and `lift`; only the latter of a piece, whose
    maximum and sum are kept, by the group that `STORES` them.

    What is computed here and in `finish` hangs on `zero`, so that none of it is computed ahead and kept through the
    loop over keys."""
    head = gl.arange(0, HEADS, layout=ROW) + zero
    place, is_piece = work.place(number + zero)
    if STORES:
        if results.OVERLAPS:
            gdc_launch_dependents()
        own = (head < results.heads) & is_piece
        first = gl.cast(place, gl.int64) * results.heads
        gl.store(results.maxima + first + head, best, mask=own)
        gl.store(results.sums + first + head, total, mask=own)
    # A list of nothing has the maximum -1e30 and no sum: the sink's share is infinite, the result 0. Without a sink
    # either (-inf) nothing is left to divide by, and the result is 0 too.
    whole = total + gl.exp2(sink - best)
    factor = gl.where(whole > 0, lift / whole, 0.0)
    factor = gl.where((head >= 0) & is_piece, lift, factor)
    return gl.convert_layout(factor, OUT)


@gluon.jit
def finish(
    output, results, stage, FIRST: gl.constexpr, COLUMNS: gl.constexpr, COPIED: gl.constexpr, work, number, zero
):  # fmt: skip
    """Write COLUMNS columns of the result, from the FIRST on. The tile goes through `stage`, shared memory that was
    free: straight from the accumulator's layout it would be written 4 bytes at a time, not 16 as by COPIED."""
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, COPIED)) + zero
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COPIED)) + FIRST
    place, is_piece = work.place(number + zero)
    first = gl.where(is_piece, results.partial, results.out) + gl.cast(place, gl.int64) * results.heads * WIDTH
    stage.store(output.to(gl.bfloat16))
    target = first + head[:, None] * WIDTH + column[None, :]
    gl.store(target, stage.load(COPIED), mask=(head < results.heads)[:, None])


@gluon.jit
def set_barriers(shared, SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """What each barrier waits for, in any of the kernels. SLOTS: places for keys; ARRIVALS: at a full one."""
    mbarrier.init(shared.query_full, count=THREADS)
    mbarrier.init(shared.query_empty, count=2)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(shared.full.index(slot), count=ARRIVALS)
        mbarrier.init(shared.empty.index(slot), count=1)
    for group in gl.static_range(2):
        mbarrier.init(shared.weights_full.index(group), count=1)
        mbarrier.init(shared.totals_full.index(group), count=1)


@gluon.jit
def allocate(ARRIVALS: gl.constexpr, KEYS: gl.constexpr):
    """Shared memory with its barriers set. ARRIVALS: at a full half block, of the loader's threads."""
    shared = Shared(
        gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, HALF], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [4, KEYS, HALF], SWIZZLED),
        gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, KEYS], weights_shared(KEYS)),
        gl.allocate_shared_memory(gl.float32, [HEADS], FLAT),
        gl.allocate_shared_memory(gl.float32, [HEADS], FLAT),
        gl.allocate_shared_memory(gl.float32, [1, HEADS], FLAT),
        gl.allocate_shared_memory(gl.float32, [1, HEADS], FLAT),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    set_barriers(shared, 4, ARRIVALS)
    return shared


@gluon.jit(do_not_specialize=["heads", "near_count", "far_count", "queries", "whole", "pieces", "pairs"])
def attend_bf16(
    q, near, far, near_rows, far_rows, sink, out, partial, maxima, sums, heads, near_count, far_count, queries, whole,
    pieces, pairs, c, STEP: gl.constexpr, KEYS: gl.constexpr, OVERLAPS: gl.constexpr, TURNS: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Sparse attention over tables of bf16 rows [.., 512]. `c` = scale / log 2."""
    lists = Lists(near_rows, far_rows, near_count, far_count, STEP, KEYS)
    work = Work(queries, whole, pieces, pairs, TURNS)
    results = Results(out, partial, maxima, sums, sink, heads, OVERLAPS)
    shared = allocate(THREADS, KEYS)
    gl.warp_specialize(
        [
            (attend_first, (lists, work, results, shared, c, 1.0)),
            (attend_second, (lists, work, results, shared, c, 1.0)),
            (load_rows, (q, near, far, heads, lists, work, shared)),
        ],
        [4, 4],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )
