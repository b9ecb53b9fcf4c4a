"""Smooth operations with a gradient of their own: few steps forward, few steps back, and little kept between.

PyTorch could work these gradients out by itself, from a graph of all steps. Where an operation is many steps on small
tensors that graph is what a training step waits for: a GPU takes some microseconds to begin a step, and less to do it.

    rotated    the gradient of a rotation is the gradient, turned back
    balanced   Sinkhorn's rounds: with G the gradient by the logarithm of what goes in, each division by a sum is
               G - y * sum(G), y being what comes out
    gated      the gate of a SwiGLU keeps what it was given, and works the rest out again
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from openv41.ops.reference import wide


class Rotated(torch.autograd.Function):
    """x [n, *h, d], the last `2 * half` entries of it in adjacent pairs, which are complex numbers, times `turn`
    [n, half]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Tensor) -> Tensor:
        ctx.save_for_backward(turn)
        return _rotated(x, turn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (turn,) = ctx.saved_tensors
        return _rotated(gradient, turn.conj()), None


def _rotated(x: Tensor, turn: Tensor) -> Tensor:
    border = x.shape[-1] - 2 * turn.shape[-1]
    turn = turn.view(turn.shape[0], *[1] * (x.dim() - 2), turn.shape[-1])
    if border % 2 == 0 and x.shape[-1] % 2 == 0 and x.dtype in (torch.float32, torch.float64):
        turned = x.clone(memory_format=torch.contiguous_format)  # all of it is pairs, of which the last are turned
        torch.view_as_complex(turned.unflatten(-1, (-1, 2)))[..., border // 2 :].mul_(turn)
        return turned
    tail = torch.view_as_complex(wide(x[..., border:]).contiguous().unflatten(-1, (-1, 2)))
    return torch.cat((x[..., :border], torch.view_as_real(tail * turn).flatten(-2).to(x.dtype)), -1)


class Balanced(torch.autograd.Function):
    """Sinkhorn: softmax of the rows, then columns and rows divided by their sums in turn, `eps` added to each sum."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rounds: int, eps: float) -> Tensor:
        first = logits.softmax(-1)
        made = _balanced(first, rounds, eps)
        # Each division's result, as a logarithm: what `log_softmax`'s own gradient asks for.
        ctx.save_for_backward(first, made[0].clone(), made[1:].log())
        return made[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        first, begun, logs = ctx.saved_tensors
        by_log = gradient * logs[-1].exp()
        for number in range(len(logs) - 1, -1, -1):
            by_log = torch.ops.aten._log_softmax_backward_data(by_log, logs[number], _side(number), by_log.dtype)
        by_first = by_log / begun
        return torch.ops.aten._softmax_backward_data(by_first, first, -1, by_first.dtype), None, None


def _balanced(first: Float[Tensor, "n m m"], rounds: int, eps: float) -> Float[Tensor, "steps n m m"]:
    """What is there at first, and after each division. Every matrix has a row and a column of `eps` beside it, so that
    a sum over them holds it."""
    n, m = first.shape[:2]
    made = first.new_full((2 * rounds, n, m + 1, m + 1), eps)
    torch.add(first, eps, out=made[0, :, :m, :m])
    for number in range(2 * rounds - 1):
        before, after = made[number], made[number + 1]
        over = _side(number)
        summed = before[:, :, :m] if over == 1 else before[:, :m]
        torch.div(before[:, :m, :m], summed.sum(over, keepdim=True), out=after[:, :m, :m])
    return made[:, :, :m, :m]


def _side(number: int) -> int:
    """Whether the division of this number is of columns, whose sum is over rows (1), or of rows (2)."""
    return 1 + number % 2


class Gated(torch.autograd.Function):
    """silu(gate) * up * routing in wide precision, gate and up clamped at `limit` (0: not at all); `routing` may be
    None."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float, routing: Tensor | None) -> Tensor:
        ctx.limit = limit
        ctx.save_for_backward(gate, up, routing)
        product = F.silu(_below(gate, limit)).mul_(_within(up, limit))
        return (product if routing is None else product.mul_(routing)).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up, routing = ctx.saved_tensors
        limit, g, by_routing = ctx.limit, wide(gradient), None
        clamped, other = _below(gate, limit), _within(up, limit)
        open = F.silu(clamped)
        if routing is not None:
            if ctx.needs_input_grad[3]:
                by_routing = (g * open).mul_(other).sum(-1, keepdim=True).to(routing.dtype)
            g = g * routing
        by_up = open.mul_(g)
        by_gate = torch.ops.aten.silu_backward(other * g, clamped)
        if limit > 0:  # nothing flows where something was cut off
            by_up = torch.ops.aten.hardtanh_backward(by_up, wide(up), -limit, limit)
            by_gate = torch.ops.aten.hardtanh_backward(by_gate, wide(gate), -torch.inf, limit)
        return by_gate.to(gate.dtype), by_up.to(up.dtype), None, by_routing


def _below(gate: Tensor, limit: float) -> Tensor:
    return wide(gate).clamp_max(limit) if limit > 0 else wide(gate)


def _within(up: Tensor, limit: float) -> Tensor:
    return wide(up).clamp(-limit, limit) if limit > 0 else wide(up)
