"""Rows taken from tables by number, decoded where the tables hold records of bytes. Exact: bf16 holds every value.

Forms as in `kernels.bits`:

    NONE    rows of bf16 or float32
    WINDOW  WIDTH e4m3 codes, then an e8m0 scale for every 32 of them
    LATENT  WIDTH / 2 bytes of two e2m1 codes each, the even element low, then an e4m3 scale for every 16 values
"""

import triton
import triton.language as tl

from openv41.ops.kernels.bits import LATENT, WINDOW, code_value
from openv41.ops.kernels.interpreted import rounded


@triton.jit
def taken(
    table, row, known, FORM: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, AT: tl.constexpr, PART: tl.constexpr
):
    """Columns AT to AT + PART of rows `row` [KEYS] of a table of rows of WIDTH values, in the table's dtype, or bf16
    from records. Zero, and nothing is read, unless `known`."""
    if FORM == WINDOW:
        return window_rows(table, row, known, KEYS, WIDTH, AT, PART)
    elif FORM == LATENT:
        return latent_rows(table, row, known, KEYS, WIDTH, AT, PART)
    else:
        places = row[:, None] * WIDTH + AT + tl.arange(0, PART)[None, :]
        return tl.load(table + places, mask=known[:, None], other=0.0)


@triton.jit
def window_rows(records, row, known, KEYS: tl.constexpr, WIDTH: tl.constexpr, AT: tl.constexpr, PART: tl.constexpr):
    start = (records + row * (WIDTH + WIDTH // 32))[:, None]
    codes = tl.load(start + AT + tl.arange(0, PART)[None, :], mask=known[:, None], other=0)
    scales = tl.load(start + WIDTH + AT // 32 + tl.arange(0, PART // 32)[None, :], mask=known[:, None], other=0)
    values = code_value(codes.reshape(KEYS, PART // 32, 32), scales[:, :, None], WINDOW)
    return rounded(values.reshape(KEYS, PART), tl.bfloat16)


@triton.jit
def latent_rows(records, row, known, KEYS: tl.constexpr, WIDTH: tl.constexpr, AT: tl.constexpr, PART: tl.constexpr):
    start = (records + row * (WIDTH // 2 + WIDTH // 16))[:, None]
    pairs = tl.load(start + AT // 2 + tl.arange(0, PART // 2)[None, :], mask=known[:, None], other=0)
    scales_at = start + WIDTH // 2 + AT // 16 + tl.arange(0, PART // 16)[None, :]
    scales = tl.load(scales_at, mask=known[:, None], other=0)
    codes = tl.join(pairs & 0xF, pairs >> 4).reshape(KEYS, PART // 16, 16)
    values = code_value(codes, scales[:, :, None], LATENT)
    return rounded(values.reshape(KEYS, PART), tl.bfloat16)
