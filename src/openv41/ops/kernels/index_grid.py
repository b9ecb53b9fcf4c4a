"""Index queries and keys on grids that tensor cores sum exactly, and the reference's way of adding heads up.

A row on the fp4 grid is a power of two, its lowest bit, times integers of two significant bits. Where these, times a
power of two, fit into e4m3, a row is its codes and its `unit`. A product of two rows is an integer times both lowest
bits. Hopper adds fp8 products in 14 bits: nothing is lost as long as every partial sum is an integer below 2^14. The
product of the rows' lengths bounds them all (Cauchy and Schwarz), so a row's squared length in lowest bits, its `norm`,
tells which products may be taken in fp8.

A group of 32 channels has one scale: its own integers are 12 at most, and a product of two groups always fits. Sums of
these are integers too, which float32 holds below 2^24.
"""

import triton
import triton.language as tl

from openv41.ops.kernels.bits import e2m1_value, e4m3_code, e4m3_value, e8m0_value
from openv41.ops.kernels.interpreted import rounded

ROUND_PAIR = tl.constexpr("""{
    .reg .b32 both, low;
    cvt.rn.relu.bf16x2.f32 both, $3, $2;
    mul.rn.bf16x2 both, both, $4;
    shl.b32 low, both, 16;
    and.b32 both, both, 0xFFFF0000;
    mov.b32 $0, low;
    mov.b32 $1, both;
}""")

ROWS = tl.constexpr(64)
"""Rows of which the largest norm is one entry of `peaks`."""

GROUP_MOST = tl.constexpr(2.0**13)
"""Squared length of a group of 32 in its own lowest bit, at most; 32 integers up to 12 have 4,608."""

TOP = tl.constexpr(8)
"""The exponent of e4m3's largest codes. The smallest is 2^-9: groups of one row may lie 14 octaves apart."""

UNIT_LEAST = tl.constexpr(2.0**-30)
UNIT_MOST = tl.constexpr(2.0**30)


@triton.jit
def row_numbers(index, known, slot, pages, pages_held, PER_PAGE: tl.constexpr):
    """Rows of a table in which compressed positions `index` of a slot lie: the positions themselves if `PER_PAGE` is 0,
    else as the pages that the slot holds say; any numbers where a position is not `known`.

    Of a page's number plus a place in it the compiler takes every sum for as well aligned as the first of a run, once a
    mask has made it forget that the page stays the same: records would be read 16 bytes at a time from where they do
    not begin. Of an absolute value it knows nothing."""
    if PER_PAGE == 0:
        return index.to(tl.int64)
    else:
        page = tl.load(pages + slot * pages_held + index // PER_PAGE, mask=known, other=0)
        return page.to(tl.int64) * PER_PAGE + tl.abs(index % PER_PAGE)


@triton.jit
def group_values(table, row, known, group, RECORDS: tl.constexpr, WIDTH: tl.constexpr):
    """float32 values [rows, 32] of one group of 32 of each row of a table: bf16 rows, or records of e2m1 codes and one
    e8m0 scale a group. Zero unless `known`."""
    if RECORDS:
        start = table + row * (WIDTH // 2 + WIDTH // 32)
        pairs = tl.load(start[:, None] + group * 16 + tl.arange(0, 16)[None, :], mask=known[:, None], other=0)
        scale = e8m0_value(tl.load(start + WIDTH // 2 + group, mask=known, other=127))
        codes = tl.join(pairs & 0xF, pairs >> 4).reshape(row.shape[0], 32)
        return e2m1_value(codes) * scale[:, None]
    else:
        places = row[:, None] * WIDTH + group * 32 + tl.arange(0, 32)[None, :]
        return tl.load(table + places, mask=known[:, None], other=0.0).to(tl.float32)


@triton.jit
def lowest_bit(values):
    """The value of the lowest bit set in float32 magnitudes; infinity for zero."""
    size = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    fraction = size & 0x7FFFFF
    rest = tl.where(fraction == 0, 0, size & (size - 1))  # without that bit
    low = size.to(tl.float32, bitcast=True) - rest.to(tl.float32, bitcast=True)
    return tl.where(size == 0, float("inf"), low)


@triton.jit
def unit_of(low, top):
    """Units of rows whose lowest bit and largest magnitude are given, and how many octaves they lie above the lowest
    bit: none, unless the largest code would be too large."""
    bits = low.to(tl.int32, bitcast=True)
    octaves = tl.maximum(((top.to(tl.int32, bitcast=True) - bits) >> 23) - TOP, 0)
    unit = (bits + (octaves << 23)).to(tl.float32, bitcast=True)
    fits = (low >= UNIT_LEAST) & (unit <= UNIT_MOST)
    return tl.where(fits, unit, 1.0), tl.where(fits, octaves, 0)


@triton.jit
def encode_rows(
    table, slots, pages, codes, units, norms, peaks,
    first, count, pages_held, padded,
    RECORDS: tl.constexpr, PER_PAGE: tl.constexpr, WIDTH: tl.constexpr, PAGED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """e4m3 codes, unit and norm of `COUNT` rows; the norm is infinite where a row, or one of its groups by itself, does
    not fit. `peaks`: the largest norm of the program's rows. Program (i, j) takes rows i * COUNT, ... of the first
    `count` of slot `slots[first * j]`; what lies behind them, up to `padded`, is filled with zero."""
    part, run = tl.program_id(0), tl.program_id(1)
    index = part * COUNT + tl.arange(0, COUNT)
    known = index < count
    slot = 0
    if PAGED:
        slot = tl.load(slots + run * first)
    row = row_numbers(index, known, slot, pages, pages_held, PER_PAGE)
    low = tl.full([COUNT], float("inf"), tl.float32)
    top = tl.zeros([COUNT], tl.float32)
    lows = ()
    for group in tl.static_range(WIDTH // 32):
        values = group_values(table, row, known, group, RECORDS, WIDTH)
        lows = lows + (tl.min(lowest_bit(values), 1),)
        low = tl.minimum(low, lows[group])
        top = tl.maximum(top, tl.max(tl.abs(values), 1))
    unit, octaves = unit_of(low, top)
    inverse = ((254 << 23) - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    norm = tl.zeros([COUNT], tl.float32)
    wrong = tl.zeros([COUNT], tl.int32)
    own = run.to(tl.int64) * padded + index
    for group in tl.static_range(WIDTH // 32):
        scaled = group_values(table, row, known, group, RECORDS, WIDTH) * inverse[:, None]
        code = e4m3_code(scaled)
        wrong += tl.sum((e4m3_value(code) != scaled).to(tl.int32), 1)
        square, smallest = tl.sum(scaled * scaled, 1), lows[group] * inverse
        wrong += (square > smallest * smallest * GROUP_MOST).to(tl.int32)
        norm += square
        places = own[:, None] * WIDTH + group * 32 + tl.arange(0, 32)[None, :]
        tl.store(codes + places, code.to(tl.uint8), mask=(index < padded)[:, None])
    norm *= ((127 + 2 * octaves) << 23).to(tl.float32, bitcast=True)  # from units to lowest bits
    norm = tl.where(wrong == 0, norm, float("inf"))  # an empty row: unit 1, no code is wrong, norm 0
    tl.store(units + own, unit, mask=index < padded)
    tl.store(norms + own, norm, mask=index < padded)
    tl.store(peaks + run * tl.num_programs(0) + part, tl.max(norm, 0))


@triton.jit
def head_of_column(column, HEADS: tl.constexpr):
    """The head whose scores a column holds. A thread of an accumulator holds pairs of neighbouring columns of every
    eight: in this order heads that the sum adds first lie in one thread (see `add_heads`)."""
    column = column % HEADS
    if HEADS < 8:
        return column
    else:
        return (column & -8) | ((column & 1) << 2) | ((column >> 1) & 3)


@triton.jit
def shares_of(products, even, odd, KEYS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, PTX: tl.constexpr):
    """Each head's share, in float32: the product rounded to bf16, relu, times the weight, rounded to bf16 again. Of
    products [KEYS, QUERIES * HEADS], whose even and odd columns have weights `even` and `odd` [QUERIES, HEADS / 2]
    (float32 values of bf16); the shares of even and of odd columns, [KEYS, QUERIES, HEADS / 2] each."""
    low, high = tl.split(products.reshape(KEYS, QUERIES, HEADS // 2, 2))
    if PTX:
        both = (even.to(tl.uint32, bitcast=True) >> 16) | (odd.to(tl.uint32, bitcast=True) & 0xFFFF0000)
        both = tl.broadcast_to(both[None, :, :], low.shape)
        return tl.inline_asm_elementwise(
            ROUND_PAIR, "=f,=f,f,f,r", [low, high, both], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
        )
    else:
        return _share(low, even), _share(high, odd)


@triton.jit
def _share(products, weight):
    positive = tl.maximum(rounded(products, tl.bfloat16).to(tl.float32), 0.0)
    return rounded(positive * weight[None, :, :], tl.bfloat16).to(tl.float32)


@triton.jit
def add_heads(even, odd, KEYS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """Sums [KEYS, QUERIES] of the shares of even and of odd columns in the reference's order: the heads' first half
    plus the second half, until one is left. Columns are as `head_of_column` says: with eight heads or more the lowest
    bit of a column is the third lowest of its head."""
    if HEADS >= 8:
        x = _add_halves(even, KEYS, QUERIES, HEADS // 2, 4) + _add_halves(odd, KEYS, QUERIES, HEADS // 2, 4)
        return _add_halves(x, KEYS, QUERIES, 4, 1).reshape(KEYS, QUERIES)
    else:
        x = _add_halves(even, KEYS, QUERIES, HEADS // 2, 1) + _add_halves(odd, KEYS, QUERIES, HEADS // 2, 1)
        return x.reshape(KEYS, QUERIES)


@triton.jit
def _add_halves(x, KEYS: tl.constexpr, QUERIES: tl.constexpr, COUNT: tl.constexpr, LEFT: tl.constexpr):
    """First half plus second half of the last dimension, which has `COUNT`, until `LEFT` are left."""
    if COUNT > LEFT:
        x = tl.sum(x.reshape(KEYS, QUERIES, 2, COUNT // 2), 2)
        return _add_halves(x, KEYS, QUERIES, COUNT // 2, LEFT)
    else:
        return x
