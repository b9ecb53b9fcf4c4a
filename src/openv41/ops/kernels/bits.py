"""Codes and their values: e4m3, e2m1 and e8m0 read and written by integer operations.

The same rounding as `openv41.formats`, bit for bit. The pattern of a small float, shifted to where float32 keeps its
exponent, is the value times a power of two, subnormals included: one product puts it right. Results are float32, which
holds every value exactly; bf16 holds them too, scaled or not, within its own range.

Contraction of a product and a sum into one instruction must be off (`enable_fp_fusion=False`) where a caller's own
arithmetic is to be rounded step by step. Nothing in this file depends on it.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(0)
WINDOW = tl.constexpr(1)  # e4m3, one e8m0 scale per 32 values
LATENT = tl.constexpr(2)  # e2m1, one e4m3 scale per 16
INDEX = tl.constexpr(3)  # e2m1, one e8m0 scale per 32

# Reading


@triton.jit
def e4m3_value(code):
    """float32 value of e4m3 codes (any integer type). The codes of NaN, which no writer makes, read as +-480."""
    code = code.to(tl.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: 127 - 7, the difference of the biases


@triton.jit
def e2m1_value(code):
    """float32 value of e2m1 codes (0 to 15, any integer type)."""
    code = code.to(tl.int32)
    bits = ((code & 0x8) << 28) | ((code & 0x7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def e8m0_value(code):
    """float32 value 2^(code - 127) of e8m0 codes; 0 is a subnormal of float32, 255 is NaN."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_value(code, FORM: tl.constexpr):
    """float32 value of a stored scale of a form."""
    if FORM == LATENT:
        return e4m3_value(code)
    else:
        return e8m0_value(code)


# Writing


@triton.jit
def e4m3_code(x):
    """int32 e4m3 code nearest to float32 values, ties to even, saturating at +-448."""
    bits = x.to(tl.int32, bitcast=True)
    size_bits = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    size = size_bits.to(tl.float32, bitcast=True)
    # 20 of 23 mantissa bits go: a half less one, plus one where the last kept bit is odd, carries as rounding does.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9: beside 2^14 that is float32's own last place.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(size_bits < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def e2m1_code(x, scale):
    """int32 e2m1 code nearest to x / scale, ties to the even code, saturating at 6 scales; zero keeps its sign.

    Magnitudes are compared with the midpoints times the scale. These are exact, and no quotient of a bf16 value by a
    scale is so near a midpoint that its rounding could tell otherwise.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    code = (size > 0.25 * scale).to(tl.int32)
    code += (size >= 0.75 * scale).to(tl.int32)
    code += (size > 1.25 * scale).to(tl.int32)
    code += (size >= 1.75 * scale).to(tl.int32)
    code += (size > 2.5 * scale).to(tl.int32)
    code += (size >= 3.5 * scale).to(tl.int32)
    code += (size > 5.0 * scale).to(tl.int32)
    return code | ((bits >> 28) & 0x8)


@triton.jit
def ceil_e8m0(x):
    """int32 e8m0 code of the smallest power of two not below positive float32 `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def scale_code(amax, FORM: tl.constexpr):
    """int32 code of the scale of blocks whose largest magnitude is `amax` (float32)."""
    if FORM == WINDOW:
        return ceil_e8m0(tl.maximum(amax, 1e-4) * 0.002232142857142857)  # 1 / 448
    elif FORM == INDEX:
        return ceil_e8m0(tl.maximum(amax, 7.052966104933725e-38) * 0.16666666666666666)  # at least 6 * 2^-126, by 6
    else:
        return e4m3_code(tl.div_rn(tl.maximum(amax, 0.01171875), 6.0))  # at least 6 * 2^-9


@triton.jit
def power_inverse(code):
    """float32 2^(127 - code): what divides by the scale of an e8m0 code from 1 to 253 exactly."""
    return ((254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def value_code(x, code, FORM: tl.constexpr):
    """int32 code of float32 values that were bf16, under the scale whose code is given."""
    if FORM == WINDOW:
        return e4m3_code(x * power_inverse(code))
    else:
        return e2m1_code(x, scale_value(code, FORM))


@triton.jit
def code_value(value, scale, FORM: tl.constexpr):
    """float32 value of a code and its scale's code."""
    if FORM == WINDOW:
        return e4m3_value(value) * e8m0_value(scale)
    else:
        return e2m1_value(value) * scale_value(scale, FORM)
