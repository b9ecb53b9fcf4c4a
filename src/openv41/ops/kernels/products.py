"""Products of a few or many tokens with stored weights: y [n, o] = x [n, k] @ weight [o, k].T, summed in float32.

The weight is the left operand of the tensor cores (64 of its rows at a time), the tokens the right one, so that one
token costs no more than a tile of 16. Weights are read as they are stored and become bf16 in registers.

An e4m3 code, its sign and its seven other bits moved to where bf16 keeps them, is the value times 2^-120; two codes
are moved at a time, and one packed product brings in the scale. To stay in range 2^16 is left out of it, and comes
back, exactly, into the finished sums. Codes reach the registers that the tensor cores read without another trip through
shared memory: the compiler moves loads there past operations on single elements, and only past those.
"""

import triton
import triton.language as tl

from openv41.ops.kernels import bits
from openv41.ops.kernels.interpreted import INTERPRETED, bound, product, rounded

BF16 = tl.constexpr(0)
FP8 = tl.constexpr(1)
FP32 = tl.constexpr(2)

TWO_CODES = tl.constexpr(
    """
    {
    .reg .b32 codes, sizes;
    cvt.u32.u16 codes, $1;
    prmt.b32 codes, codes, 0, 0x1404;
    shr.b32 sizes, codes, 4;
    and.b32 sizes, sizes, 0x07F007F0;
    lop3.b32 codes, codes, 0x80008000, sizes, 0xEA;
    mul.rn.bf16x2 $0, codes, $2;
    }
    """
)
"""Two codes to a register of two bf16: spread, moved, signs put back, scaled."""


@triton.jit
def widened(x):
    """bf16 values in float32, subnormals too (which the interpreter's own conversion gets wrong)."""
    return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def factor_of(code):
    """2^(code - 127 + 120 - 16) as bf16. Scales from 2^-101 to 2^23 keep every weight exact and no
    subnormal of bf16; larger ones, which no weight has, give infinity or NaN and not a wrong number."""
    return (tl.minimum(code.to(tl.int32) + 104, 255) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def weights_of(codes, factor):
    """bf16 weights times 2^-16 of e4m3 codes (bytes) and the factors that belong to them."""
    if INTERPRETED:
        pattern = bits.e4m3_value(codes) * 7.52316384526264e-37  # 2^-120
        return rounded(pattern * widened(factor), tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(TWO_CODES, "=r,h,r", [codes, factor], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def spread_tiles(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """x [ROWS, COLUMNS], each repeated over HIGH rows and WIDE columns."""
    wide = tl.broadcast_to(x[:, None, :, None], (ROWS, HIGH, COLUMNS, WIDE))
    return tl.reshape(wide, (ROWS * HIGH, COLUMNS * WIDE))


@triton.jit
def scales_at(scale, row, k, tile_rows, tiles, BO: tl.constexpr, BK: tl.constexpr):
    """Codes [BO / 32, BK / 32] of the scales of the weight's tiles from row `row` and column k on."""
    high = row // 32 + tl.arange(0, BO // 32)
    wide = k // 32 + tl.arange(0, BK // 32)
    inside = (high < tile_rows)[:, None] & (wide < tiles)[None, :]
    return tl.load(scale + high[:, None] * tiles + wide[None, :], mask=inside, other=0)


@triton.jit
def accumulate(
    x, weight, scale, row, token, first, last, count, outputs, inputs, x_stride,
    STORED: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """weight [row .. row + BO, first .. last] times x [token .. token + BN, first .. last].T: [BO, BN]."""
    rows = row + tl.arange(0, BO)
    tokens = token + tl.arange(0, BN)
    weight_rows = tl.minimum(rows, outputs - 1).to(tl.int64) * inputs
    x_rows = tl.minimum(tokens, count - 1).to(tl.int64) * x_stride  # what lies beyond is worked out and not stored
    total = tl.zeros((BO, BN), tl.float32)
    tile_rows, tiles = (outputs + 31) // 32, inputs // 32
    for k in tl.range(bound(first), bound(last), BK, num_stages=STAGES):
        place = k + tl.arange(0, BK)
        values = tl.load(x + x_rows[None, :] + place[:, None], mask=(place < inputs)[:, None], other=0.0)
        if STORED == FP8:
            codes = tl.load(weight + weight_rows[:, None] + place[None, :], mask=(place < inputs)[None, :], other=0)
            # Not a step ahead: carried over, they would keep codes from going straight to the tensor cores' registers.
            scales = scales_at(scale, row, k, tile_rows, tiles, BO, BK)
            factor = spread_tiles(factor_of(scales), BO // 32, BK // 32, 32, 32)
            total = product(weights_of(codes, factor), values, total, "tf32")
        else:
            stored = tl.load(weight + weight_rows[:, None] + place[None, :], mask=(place < inputs)[None, :], other=0.0)
            if STORED == BF16:
                total = product(stored, values, total, "tf32")
            else:  # three bf16 parts hold a float32 value's 24 bits
                high = rounded(stored, tl.bfloat16)
                stored = stored - high.to(tl.float32)
                middle = rounded(stored, tl.bfloat16)
                low = rounded(stored - middle.to(tl.float32), tl.bfloat16)
                total = product(high, values, total, "tf32")
                total = product(middle, values, total, "tf32")
                total = product(low, values, total, "tf32")
    return total


@triton.jit
def join_pieces(total, partials, counters, tile, piece, PIECES: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr):
    """Leave this piece's sums [BO, BN] in memory. The last program to come adds all pieces, in their order, so that the
    result does not depend on who came last; it gets them and True, the others False. Sets the counter back to 0."""
    size: tl.constexpr = BO * BN
    TOGETHER: tl.constexpr = 8 if BO * BN <= 2048 else 1  # pieces on their way at a time: registers bound them
    place = tl.arange(0, BO)[:, None] * BN + tl.arange(0, BN)[None, :]
    own = partials + (tile * PIECES + piece).to(tl.int64) * size
    tl.store(own + place, total)
    tl.debug_barrier()  # all threads have stored before one of them counts
    before = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
    is_last = before == PIECES - 1
    if is_last:
        total = tl.zeros((BO, BN), tl.float32)
        for each in tl.range(PIECES, loop_unroll_factor=TOGETHER):
            theirs = partials + (tile * PIECES + each).to(tl.int64) * size
            total += tl.load(theirs + place, cache_modifier=".cg")
        tl.atomic_xchg(counters + tile, 0, sem="relaxed", scope="gpu")
    return total, is_last


@triton.jit
def finish(
    y, row, tokens, count, cos, sin,
    WIDTH: tl.constexpr, TURNED: tl.constexpr, FORM: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows of heads WIDTH wide: y [BN, BO], bf16 values in float32, are outputs from `row` on. Their tails of TURNED
    pairs are turned, then blocks of 32 rounded to FORM."""
    half: tl.constexpr = BO // 2
    a, b = tl.split(tl.reshape(y, (BN, half, 2)))
    if TURNED > 0:
        pair = (row // 2 + tl.arange(0, half)) % (WIDTH // 2) - (WIDTH // 2 - TURNED)
        angle = tl.minimum(tokens, count - 1)[:, None] * TURNED + pair[None, :]
        in_tail = (pair >= 0)[None, :]
        c = tl.load(cos + angle, mask=in_tail, other=1.0)
        s = tl.load(sin + angle, mask=in_tail, other=0.0)
        real, imaginary = rounded(a * c - b * s, tl.bfloat16), rounded(a * s + b * c, tl.bfloat16)
        a = tl.where(in_tail, real.to(tl.float32), a)
        b = tl.where(in_tail, imaginary.to(tl.float32), b)
    if FORM != bits.NONE:
        blocks: tl.constexpr = BO // 32
        size = tl.reshape(tl.maximum(tl.abs(a), tl.abs(b)), (BN, blocks, 16))
        scale = bits.scale_code(tl.max(size, 2), FORM)
        each = tl.reshape(tl.broadcast_to(scale[:, :, None], (BN, blocks, 16)), (BN, half))
        a = bits.code_value(bits.value_code(a, each, FORM), each, FORM)
        b = bits.code_value(bits.value_code(b, each, FORM), each, FORM)
    return tl.reshape(tl.join(a, b), (BN, BO))


@triton.jit
def write(
    total, out, row, token, count, outputs, out_stride, cos, sin,
    STORED: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, FORM: tl.constexpr,
    BO: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Finished sums [BO, BN] as results."""
    rows, tokens = row + tl.arange(0, BO), token + tl.arange(0, BN)
    if STORED == FP8:
        total *= 65536.0
    y = tl.trans(total)  # [BN, BO]
    if not WIDE:
        y = rounded(y, tl.bfloat16)
        if TURNED > 0 or FORM != bits.NONE:
            y = finish(y.to(tl.float32), row, tokens, count, cos, sin, WIDTH, TURNED, FORM, BO, BN)
            y = rounded(y, tl.bfloat16)
    place = tokens.to(tl.int64)[:, None] * out_stride + rows[None, :]
    tl.store(out + place, y, mask=(tokens < count)[:, None] & (rows < outputs)[None, :])


@triton.jit(do_not_specialize=["count"])
def join_kernel(
    partials, out, cos, sin, count, outputs, out_stride,
    WIDTH: tl.constexpr, TURNED: tl.constexpr, FORM: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add the pieces of BO outputs of BN tokens, in their order. Pieces lie as [tiles of ROWS outputs, parts of BN
    tokens, PIECES, ROWS, BN]; BO divides ROWS."""
    tile, part = tl.program_id(0), tl.program_id(1)
    row = tile * BO
    number = row // ROWS * tl.num_programs(1) + part
    first = partials + (number * PIECES).to(tl.int64) * (ROWS * BN)
    place = (row % ROWS + tl.arange(0, BO))[:, None] * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros((BO, BN), tl.float32)
    for piece in tl.static_range(PIECES):
        total += tl.load(first + piece * (ROWS * BN) + place)
    write(total, out, row, part * BN, count, outputs, out_stride, cos, sin, FP8, False, WIDTH, TURNED, FORM, BO, BN)


@triton.jit
def product_kernel(
    x, weight, scale, out, partials, counters, cos, sin,
    count, outputs, x_stride, x_group, out_stride, weight_step, scale_step,
    INPUTS: tl.constexpr, STORED: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, SECOND: tl.constexpr,
    WIDTH: tl.constexpr, TURNED: tl.constexpr, FORM: tl.constexpr,
    PIECES: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BO outputs of BN tokens a program, or a piece of their sums. GROUP > 0: each GROUP outputs read columns of x of
    their own, `x_group` apart. WIDE: sums as they are, in float32. SECOND > 0: outputs from there on are those of a
    second weight, which lies `weight_step` bytes behind the first, its scale `scale_step`. The rest: see `finish`."""
    tile, part, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, token = tile * BO, part * BN
    if GROUP > 0:
        x += (row // GROUP) * x_group
    weight_row, weight_rows = row, outputs
    if SECOND > 0:
        second = row >= SECOND
        weight += tl.where(second, weight_step, 0)
        scale += tl.where(second, scale_step, 0)
        weight_row -= tl.where(second, SECOND, 0)
        weight_rows = tl.where(second, outputs - SECOND, SECOND)
    steps = (tl.cdiv(INPUTS, BK) + PIECES - 1) // PIECES
    first = piece * steps * BK
    last = tl.minimum(first + steps * BK, INPUTS)
    total = accumulate(
        x, weight, scale, weight_row, token, first, last, count, weight_rows, INPUTS, x_stride,
        STORED, BO, BN, BK, STAGES,
    )  # fmt: skip
    is_last = True
    if PIECES > 1:
        number = part * tl.num_programs(0) + tile
        total, is_last = join_pieces(total, partials, counters, number, piece, PIECES, BO, BN)
    if is_last:
        write(total, out, row, token, count, outputs, out_stride, cos, sin, STORED, WIDE, WIDTH, TURNED, FORM, BO, BN)


@triton.jit
def decode_weight_kernel(weight, scale, out, outputs, inputs, BO: tl.constexpr, BK: tl.constexpr):
    """A tile of an fp8 weight as bf16."""
    row, k = tl.program_id(0) * BO, tl.program_id(1) * BK
    rows, columns = row + tl.arange(0, BO), k + tl.arange(0, BK)
    inside = (rows < outputs)[:, None] & (columns < inputs)[None, :]
    place = rows.to(tl.int64)[:, None] * inputs + columns[None, :]
    codes = tl.load(weight + place, mask=inside, other=0)
    scales = scales_at(scale, row, k, (outputs + 31) // 32, inputs // 32, BO, BK)
    values = bits.e4m3_value(codes) * bits.e8m0_value(spread_tiles(scales, BO // 32, BK // 32, 32, 32))
    tl.store(out + place, rounded(values, tl.bfloat16), mask=inside)
