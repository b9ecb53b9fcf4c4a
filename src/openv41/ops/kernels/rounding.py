"""Rounding to a stored form and back in one launch: values go in, what comes back after storing them comes out.

Bit for bit what `openv41.formats` gives, of float32 values as of bf16 ones: scales of the forms used here are powers of
two, or the values are bf16 (see `bits.e2m1_code`).
"""

import triton
import triton.language as tl

from openv41.ops.kernels import bits
from openv41.ops.kernels.interpreted import rounded


@triton.jit
def stored_once(x, largest, FORM: tl.constexpr):
    """What comes back of float32 `x` under the scale of `largest`, which is broadcast to it."""
    scale = bits.scale_code(largest, FORM)
    return bits.code_value(bits.value_code(x, scale, FORM), scale, FORM)


@triton.jit
def round_rows(x, out, blocks, FORM: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """Blocks of SIZE neighbours, BLOCKS of them a program."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    place = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    wanted = (block < blocks)[:, None]
    values = tl.load(x + place, mask=wanted, other=0.0).to(tl.float32)
    values = stored_once(values, tl.max(tl.abs(values), 1)[:, None], FORM)
    tl.store(out + place, rounded(values, out.dtype.element_ty), mask=wanted)


@triton.jit
def round_tiles(x, out, rows, columns, SIDE: tl.constexpr):
    """e4m3 with one scale a tile of SIDE x SIDE, partial ones at borders. Grid: columns, rows of tiles, matrices."""
    row = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    place = matrix + row[:, None] * columns + column[None, :]
    wanted = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + place, mask=wanted, other=0.0).to(tl.float32)
    values = stored_once(values, tl.max(tl.max(tl.abs(values), 1), 0), bits.WINDOW)
    tl.store(out + place, rounded(values, out.dtype.element_ty), mask=wanted)
