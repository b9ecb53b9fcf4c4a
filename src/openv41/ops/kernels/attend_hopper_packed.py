"""Sparse attention for Hopper over records of bytes: the loader decodes them on their way to shared memory.

The two groups that compute, and all barriers, are those of `attend_hopper`, with two differences: a half block is full
at one arrival (the loader's warps meet, then one thread arrives) instead of each thread's copies, and the loader fences
its ordinary stores before it arrives.

A table's row is a record of 32-bit words: near ones 128 words of four e4m3 codes and 16 bytes of e8m0 scales, far ones
64 words of eight e2m1 codes and 32 bytes of e4m3 scales. Two codes at a time go to the halves of a 32-bit register
that holds two bf16 values. The bits of a small float, put where bf16 has its exponent, are the value times a power of
two, subnormals included (2^-120 for e4m3, 2^-126 for e2m1); one product by the scale, itself times a power of two,
makes the row's value times 2^-60, exactly. The groups take 2^60 back, in the scores' factor and in the last division.
So the scale's own factor stays within bf16 for window scales up to 2^67, far above what a normalised row can need.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from openv41.ops.kernels.attend_hopper import (
    Lists,
    Results,
    Work,
    allocate,
    attend_first,
    attend_second,
    load_query,
)

LIFT = gl.constexpr(2.0**60)
"""What rows in shared memory have to be multiplied by."""

PART = gl.constexpr(32)
"""Rows decoded at a time, of one half of the dims: whole half blocks in flight would spill."""

FAR_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16]], [[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]], [[8, 0], [16, 0]], [], [32, 32]
    )
)
"""Words of codes of a part, [32, 32]: a thread reads 16 bytes at a time, all of one row; eight neighbours read as many
rows, so that their 16-byte stores, swizzled by the row, fall into different banks."""
NEAR_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32]], [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]], [[8, 0], [16, 0]], [], [32, 64]
    )
)
"""The same of a near part's, [32, 64]; 32 bytes of a row, which have one scale, lie together."""
FAR_SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8]], [[1, 0], [2, 0], [4, 0], [0, 2], [0, 4]], [[8, 0], [16, 0]], [], [32, 16]
    )
)
"""Scales, [32, 16]: each thread has those of its words, one for two words."""
NEAR_SCALES = gl.constexpr(
    gl.DistributedLinearLayout([[0, 4]], [[1, 0], [2, 0], [4, 0], [0, 1], [0, 2]], [[8, 0], [16, 0]], [], [32, 8])
)
"""The same, [32, 8]: one for eight words."""
WORDS_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
"""The layout of a half block, seen as words of two values."""

NEAR_WORDS = gl.constexpr(132)
FAR_WORDS = gl.constexpr(72)

E4M3_PAIRS = gl.constexpr(
    """{
    .reg .b32 code, size;
    prmt.b32 code, $2, 0, 0x1000;
    shr.b32 size, code, 4;
    and.b32 size, size, 0x07F007F0;
    lop3.b32 code, code, 0x80008000, size, 0xEA;
    mul.rn.bf16x2 $0, code, $3;
    prmt.b32 code, $2, 0, 0x3020;
    shr.b32 size, code, 4;
    and.b32 size, size, 0x07F007F0;
    lop3.b32 code, code, 0x80008000, size, 0xEA;
    mul.rn.bf16x2 $1, code, $3;
    }"""
)
"""A word of four e4m3 codes ($2) and a pair of scales ($3) to two pairs of bf16. lop3 0xEA: (a & b) | c."""

E2M1_PAIRS = gl.constexpr(
    """{
    .reg .b32 later, last, even, odd, size, sign;
    shr.b32 later, $4, 4;
    shr.b32 last, $4, 8;
    lop3.b32 even, $4, later, 0x00F000F0, 0xD8;
    lop3.b32 odd, later, last, 0x00F000F0, 0xD8;
    prmt.b32 even, even, odd, 0x6420;
    shl.b32 size, even, 6;
    shl.b32 sign, even, 12;
    and.b32 size, size, 0x01C001C0;
    lop3.b32 size, sign, 0x80008000, size, 0xEA;
    mul.rn.bf16x2 $0, size, $5;
    shl.b32 size, even, 2;
    shl.b32 sign, even, 8;
    and.b32 size, size, 0x01C001C0;
    lop3.b32 size, sign, 0x80008000, size, 0xEA;
    mul.rn.bf16x2 $1, size, $5;
    shr.b32 size, even, 2;
    shl.b32 sign, even, 4;
    and.b32 size, size, 0x01C001C0;
    lop3.b32 size, sign, 0x80008000, size, 0xEA;
    mul.rn.bf16x2 $2, size, $5;
    shr.b32 size, even, 6;
    and.b32 size, size, 0x01C001C0;
    lop3.b32 size, even, 0x80008000, size, 0xEA;
    mul.rn.bf16x2 $3, size, $5;
    }"""
)
"""A word of eight e2m1 codes ($4) and a pair of scales ($5) to four pairs of bf16.

First the word's nibbles are put in the order 0 2 4 6 1 3 5 7: then neighbours lie 16 bits apart, and each shift and
mask serves both. lop3 0xD8: (a & ~c) | (b & c)."""


NOWHERE = gl.constexpr(2**20)
"""A block past the end of every list, of 64 million rows: all of it is -1."""


@gluon.jit
def words_of(table, rows, SIDE: gl.constexpr, FAR: gl.constexpr):
    """Codes and scales of one half of the dims of some rows; zeros for row -1, whose bytes are not touched."""
    LAYOUT: gl.constexpr = FAR_LAYOUT if FAR else NEAR_LAYOUT
    SCALES: gl.constexpr = FAR_SCALES if FAR else NEAR_SCALES
    WORDS: gl.constexpr = 32 if FAR else 64
    COUNT: gl.constexpr = 16 if FAR else 8
    RECORD: gl.constexpr = FAR_WORDS if FAR else NEAR_WORDS
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LAYOUT)) + SIDE * WORDS
    byte = 8 * WORDS + SIDE * COUNT + gl.arange(0, COUNT, layout=gl.SliceLayout(0, SCALES))  # behind the codes
    start = gl.maximum(rows, 0).to(gl.int64) * RECORD
    words = gl.load(table + start[:, None] + word[None, :], mask=(rows >= 0)[:, None], other=0)
    rows = gl.convert_layout(rows, gl.SliceLayout(1, SCALES))
    start = gl.maximum(rows, 0).to(gl.int64) * (RECORD * 4)
    table = table.to(gl.pointer_type(gl.uint8), bitcast=True)
    scales = gl.load(table + start[:, None] + byte[None, :], mask=(rows >= 0)[:, None], other=0)
    return words, scales


@gluon.jit
def doubled(x, COUNT: gl.constexpr):
    """Each column of x twice, side by side; COUNT columns then."""
    return gl.join(x, x).reshape((PART, COUNT))


@gluon.jit
def decode(words, scales, target, FAR: gl.constexpr):
    """bf16 values times 2^-60 into `target`, [32, 128] words of shared memory."""
    if FAR:
        # e4m3 << 4, as bf16, is the scale times 2^-120; with 2^246 / 2^60 it makes up for the codes' 2^-126.
        scale = ((scales.to(gl.int16) << 4).to(gl.bfloat16, bitcast=True) * 1.7014118346046923e38).to(gl.bfloat16)
        scale = (scale * 5.764607523034235e17).to(gl.bfloat16)  # 2^127 above, 2^59
        twice = scale.to(gl.int16, bitcast=True).to(gl.int32) * 0x10001
        twice = gl.convert_layout(doubled(twice, 32), FAR_LAYOUT)
        a, b, c, d = gl.inline_asm_elementwise(
            E2M1_PAIRS, "=r,=r,=r,=r,r,r", [words, twice], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True,
            pack=1,
        )  # fmt: skip
        target.store(gl.join(gl.join(a, c), gl.join(b, d)).reshape((PART, 128)))
    else:
        # Of 2^(byte - 127) times 2^120 / 2^60, the exponent's field is byte + 60.
        twice = ((scales.to(gl.int32) + 60) << 7) * 0x10001
        twice = gl.convert_layout(doubled(doubled(doubled(twice, 16), 32), 64), NEAR_LAYOUT)
        a, b = gl.inline_asm_elementwise(
            E4M3_PAIRS, "=r,=r,r,r", [words, twice], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        target.store(gl.join(a, b).reshape((PART, 128)))


@gluon.jit
def decode_blocks(table, lists, query, first, last, turn, shared, FAR: gl.constexpr):
    """Blocks `first` to `last` of a query's list, all of one table. `turn`: blocks before them; returns those after.

    While a part is decoded, the next two are on their way from memory."""
    if lists.KEYS == PART:
        return decode_small_blocks(table, lists, query, first, last, turn, shared, FAR)
    else:
        return decode_large_blocks(table, lists, query, first, last, turn, shared, FAR)


@gluon.jit
def decode_small_blocks(table, lists, query, first, last, turn, shared, FAR: gl.constexpr):
    """Of 32 rows, a part a half."""
    LAYOUT: gl.constexpr = FAR_LAYOUT if FAR else NEAR_LAYOUT
    row = gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))
    rows = lists.rows(query, gl.where(first < last, first, NOWHERE), row)
    a, a_scales = words_of(table, rows, 0, FAR)
    b, b_scales = words_of(table, rows, 1, FAR)
    for block in range(first, last):
        place = (turn & 1) * 2
        phase = ((turn >> 1) & 1) ^ 1
        rows = lists.rows(query, gl.where(block + 1 < last, block + 1, NOWHERE), row)
        mbarrier.wait(shared.empty.index(place), phase)
        decode(a, a_scales, words_in(shared, place, PART), FAR)
        a, a_scales = words_of(table, rows, 0, FAR)
        fence_async_shared()
        mbarrier.arrive(shared.full.index(place))
        mbarrier.wait(shared.empty.index(place + 1), phase)
        decode(b, b_scales, words_in(shared, place + 1, PART), FAR)
        b, b_scales = words_of(table, rows, 1, FAR)
        fence_async_shared()
        mbarrier.arrive(shared.full.index(place + 1))
        turn += 1
    return turn


@gluon.jit
def words_in(shared, place, KEYS: gl.constexpr):
    """A half block, seen as words of two values."""
    return shared.keys.index(place)._reinterpret(gl.int32, [KEYS, 128], WORDS_SWIZZLED)


@gluon.jit
def decode_large_blocks(table, lists, query, first, last, turn, shared, FAR: gl.constexpr):
    """Of 64 rows, two parts a half."""
    LAYOUT: gl.constexpr = FAR_LAYOUT if FAR else NEAR_LAYOUT
    row = gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))
    ahead = gl.where(first < last, first, NOWHERE)
    upper = lists.rows(query, ahead, row)
    lower = lists.rows(query, ahead, row + PART)
    a, a_scales = words_of(table, upper, 0, FAR)
    b, b_scales = words_of(table, lower, 0, FAR)
    for block in range(first, last):
        place = (turn & 1) * 2
        phase = ((turn >> 1) & 1) ^ 1
        ahead = gl.where(block + 1 < last, block + 1, NOWHERE)  # the next block may be of the other table
        next_upper = lists.rows(query, ahead, row)
        next_lower = lists.rows(query, ahead, row + PART)
        left = words_in(shared, place, 2 * PART)
        mbarrier.wait(shared.empty.index(place), phase)
        decode(a, a_scales, left.slice(0, PART, dim=0), FAR)
        a, a_scales = words_of(table, upper, 1, FAR)
        decode(b, b_scales, left.slice(PART, PART, dim=0), FAR)
        b, b_scales = words_of(table, lower, 1, FAR)
        fence_async_shared()
        mbarrier.arrive(shared.full.index(place))
        upper = next_upper
        lower = next_lower
        right = words_in(shared, place + 1, 2 * PART)
        mbarrier.wait(shared.empty.index(place + 1), phase)
        decode(a, a_scales, right.slice(0, PART, dim=0), FAR)
        a, a_scales = words_of(table, upper, 0, FAR)
        decode(b, b_scales, right.slice(PART, PART, dim=0), FAR)
        b, b_scales = words_of(table, lower, 0, FAR)
        fence_async_shared()
        mbarrier.arrive(shared.full.index(place + 1))
        turn += 1
    return turn


@gluon.jit
def load_records(q, near, far, heads, lists, work, shared):
    """The loader's partition, of packed tables."""
    turn = 0
    taken = 0
    for number in range(gl.program_id(0), work.items(), gl.num_programs(0)):
        query, first, last = work.item(number)
        load_query(q, query, heads, shared, taken)
        taken += 1
        border = gl.minimum(gl.maximum(lists.near_blocks(), 2 * first), 2 * last)
        turn = decode_blocks(near, lists, query, 2 * first, border, turn, shared, False)
        turn = decode_blocks(far, lists, query, border, 2 * last, turn, shared, True)
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["heads", "near_count", "far_count", "queries", "whole", "pieces", "pairs"])
def attend_records(
    q, near, far, near_rows, far_rows, sink, out, partial, maxima, sums, heads, near_count, far_count, queries, whole,
    pieces, pairs, c, STEP: gl.constexpr, KEYS: gl.constexpr, OVERLAPS: gl.constexpr, GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Sparse attention over tables of records, seen as int32 words. Arguments as of `attend_bf16`."""
    lists = Lists(near_rows, far_rows, near_count, far_count, STEP, KEYS)
    work = Work(queries, whole, pieces, pairs, False)
    results = Results(out, partial, maxima, sums, sink, heads, OVERLAPS)
    shared = allocate(1, KEYS)
    gl.warp_specialize(
        [
            (attend_first, (lists, work, results, shared, c * LIFT, LIFT)),
            (attend_second, (lists, work, results, shared, c * LIFT, LIFT)),
            (load_records, (q, near, far, heads, lists, work, shared)),
        ],
        [4, 4],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )
