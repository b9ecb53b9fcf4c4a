"""Launches of `kernels/sinkhorn.py`: `balanced`, differentiable, one launch forward and one back.

It is `FastOps.sinkhorn`, whose rounds are eighty launches forward and forty back.
"""

from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from openv41.errors import OpsError
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.kernels import sinkhorn as kernels

SIDES = (1, 2, 4, 8, 16)
"""Rows of a matrix, and its columns."""
TOKENS = 64
"""Matrices of a program of four warps: of 4 x 4, eight values a thread."""


def balanced(logits: Float[Tensor, "n m m"], rounds: int, eps: float) -> Float[Tensor, "n m m"]:
    """Rows and columns normalised in turn: see `ReferenceOps.sinkhorn`. In float32; m a power of two up to 16."""
    m = logits.shape[-1]
    if logits.dtype != torch.float32 or m not in SIDES:
        raise OpsError(
            f"sinkhorn by kernel takes float32 matrices of 1, 2, 4, 8 or 16 rows, got {logits.dtype} and {m} rows: use "
            "the fast ops there"
        )
    if rounds < 1:
        raise OpsError(f"sinkhorn needs at least 1 round, got {rounds}: raise hc_sinkhorn_iters")
    return Balanced.apply(logits, rounds, eps)


class Balanced(torch.autograd.Function):
    """Keeps the logits alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rounds: int, eps: float) -> Tensor:
        logits = logits.contiguous()
        ctx.save_for_backward(logits)
        ctx.rest = rounds, eps
        out = torch.empty_like(logits)
        if len(logits):
            kernels.balanced[_grid(logits)](logits, out, len(logits), eps, rounds, TOKENS, logits.shape[-1])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        rounds, eps = ctx.rest
        out = torch.empty_like(logits)
        if len(logits):
            made = logits.new_empty(2 * rounds - 1, *logits.shape)
            given = logits, gradient.contiguous(), made, out, len(logits), eps
            kernels.balanced_gradient[_grid(logits)](*given, rounds, TOKENS, logits.shape[-1])
        return out, None, None


def _grid(logits: Tensor) -> tuple[int]:
    return (triton.cdiv(len(logits), TOKENS),)


_CONSTANTS = {"ROUNDS": 20, "TOKENS": TOKENS, "M": 4}
_NUMBERS = {"count": "i32", "eps": "fp32"}

SPECIMENS = [
    Specimen("sinkhorn", kernels.balanced, {"logits": "*fp32", "out": "*fp32", **_NUMBERS}, _CONSTANTS),
    Specimen(
        "sinkhorn gradient",
        kernels.balanced_gradient,
        {"logits": "*fp32", "gradient": "*fp32", "made": "*fp32", "out": "*fp32", **_NUMBERS},
        _CONSTANTS,
    ),
]
