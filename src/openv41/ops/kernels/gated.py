"""The gate of a SwiGLU: silu(gate) * up * routing, gate and up clamped, in one pass over the values; and its gradient.

A program does ROWS rows [WIDTH]; `SPACE`, a power of two, is WIDTH or more. A `LIMIT` of 0 clamps nothing.
"""

import triton
import triton.language as tl

from openv41.ops.kernels.interpreted import rounded


@triton.jit
def rows_at(count, WIDTH: tl.constexpr, SPACE: tl.constexpr, ROWS: tl.constexpr):
    """The rows of this program, which of them there are, where their values lie, and which of these there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SPACE)
    own = row < count
    return row, own, row[:, None] * WIDTH + column[None, :], own[:, None] & (column < WIDTH)[None, :]


@triton.jit
def opened(gate, up, LIMIT: tl.constexpr):
    """silu of the clamped gate, its derivative, and the clamped other."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    open = 1.0 / (1.0 + tl.exp(-gate))
    return gate * open, open * (1.0 + gate * (1.0 - open)), up


@triton.jit(do_not_specialize=["count"])
def gate_values(
    gate, up, routing, out, count, LIMIT: tl.constexpr, ROUTED: tl.constexpr,
    WIDTH: tl.constexpr, SPACE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`out` = silu(gate) * up * routing, `routing` a number a row, if there is any."""
    row, own, place, wanted = rows_at(count, WIDTH, SPACE, ROWS)
    a = tl.load(gate + place, mask=wanted, other=0.0).to(tl.float32)
    b = tl.load(up + place, mask=wanted, other=0.0).to(tl.float32)
    silu, _, other = opened(a, b, LIMIT)
    result = silu * other
    if ROUTED:
        result *= tl.load(routing + row, mask=own, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place, rounded(result, out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["count"])
def gate_gradient(
    gate, up, routing, gradient, by_gate, by_up, by_routing, count, LIMIT: tl.constexpr, ROUTED: tl.constexpr,
    WIDTH: tl.constexpr, SPACE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """From the result's gradient those of all three. Nothing flows where something was cut off."""
    row, own, place, wanted = rows_at(count, WIDTH, SPACE, ROWS)
    a = tl.load(gate + place, mask=wanted, other=0.0).to(tl.float32)
    b = tl.load(up + place, mask=wanted, other=0.0).to(tl.float32)
    g = tl.load(gradient + place, mask=wanted, other=0.0).to(tl.float32)
    silu, slope, other = opened(a, b, LIMIT)
    if ROUTED:
        tl.store(by_routing + row, tl.sum(g * silu * other, 1), mask=own)
        g *= tl.load(routing + row, mask=own, other=0.0).to(tl.float32)[:, None]
    of_gate, of_up = g * other * slope, g * silu
    if LIMIT > 0:
        of_gate = tl.where(a < LIMIT, of_gate, 0.0)
        of_up = tl.where((b > -LIMIT) & (b < LIMIT), of_up, 0.0)
    tl.store(by_gate + place, rounded(of_gate, by_gate.dtype.element_ty), mask=wanted)
    tl.store(by_up + place, rounded(of_up, by_up.dtype.element_ty), mask=wanted)
