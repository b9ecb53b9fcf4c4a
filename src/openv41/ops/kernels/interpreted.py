"""Where Triton's interpreter goes wrong, done right there: products and rounding of bf16, and bounds of loops.

The interpreter keeps bf16 values as 16-bit integers. It multiplies matrices of these as integers, and rounds to bf16
by cutting off. Compiled, each of these functions is what it says and no more.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b in float32. `PRECISION`, which float32 operands alone heed: "tf32" or "ieee"."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 values in `DTYPE`, bf16 or float32: to nearest, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def bound(x):
    """A bound of a loop. The interpreter's own numbers are arrays of one element, which newer numpy takes for none."""
    if INTERPRETED:
        return x.handle.data.item()
    return x
