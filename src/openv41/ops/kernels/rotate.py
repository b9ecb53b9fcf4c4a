"""Rotation of vectors by their token's angles, for training: either way round, values of bf16 or float32."""

import triton
import triton.language as tl

from openv41.ops.kernels.interpreted import rounded


@triton.jit
def rotate(
    x, cos, sin, out,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, INVERSE: tl.constexpr,
    TILE: tl.constexpr, SPACE: tl.constexpr,
):  # fmt: skip
    """Of every vector [WIDTH] the last TURNED adjacent pairs turned by `cos`, `sin` [n, TURNED], what lies before them
    as it is. Grid: tokens, tiles of TILE heads. `SPACE`, a power of two, is WIDTH or more."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, SPACE)
    BORDER: tl.constexpr = WIDTH - 2 * TURNED
    place = (token * HEADS + head)[:, None] * WIDTH + column[None, :]
    wanted = (head < HEADS)[:, None] & (column < WIDTH)[None, :]
    behind = column - BORDER
    turned = (behind >= 0) & (column < WIDTH)
    second = (behind & 1) == 1
    angle = token * TURNED + (behind >> 1)
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    s = tl.where(second == INVERSE, -s, s)  # (a + b i) (c + s i) = (a c - b s) + (b c + a s) i
    own = tl.load(x + place, mask=wanted, other=0.0).to(tl.float32)
    other = tl.load(x + place + tl.where(second, -1, 1)[None, :], mask=wanted & turned[None, :], other=0.0)
    result = own * c[None, :] + other.to(tl.float32) * s[None, :]
    tl.store(out + place, rounded(result, out.dtype.element_ty), mask=wanted)
