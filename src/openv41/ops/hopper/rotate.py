"""Launches of `kernels/rotate.py`: `rotated`, differentiable, one launch forward and one back."""

from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from openv41.errors import OpsError
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.kernels import rotate as kernels

VALUES = 2048
"""Of the heads of one token that a program holds together, if one head is no more."""


def rotated(
    x: Float[Tensor, "n *h d"], cos: Float[Tensor, "n half"], sin: Float[Tensor, "n half"], inverse: bool
) -> Float[Tensor, "n *h d"]:
    """See `ReferenceOps.rotate`. x of bf16 or float32, angles of float32. Raises `OpsError` for others."""
    if x.dtype not in (torch.bfloat16, torch.float32) or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise OpsError(
            f"rotate by kernel takes bf16 or float32 and angles of float32, got {x.dtype}, {cos.dtype} and "
            f"{sin.dtype}: use the fast ops there"
        )
    if cos.shape != sin.shape or cos.shape[0] != x.shape[0] or 2 * cos.shape[1] > x.shape[-1]:
        raise OpsError(
            f"rotate: cos and sin must be [{x.shape[0]}, at most {x.shape[-1] // 2}], got {list(cos.shape)} and "
            f"{list(sin.shape)}"
        )
    return Rotated.apply(x, cos.contiguous(), sin.contiguous(), inverse)


class Rotated(torch.autograd.Function):
    """The gradient of a rotation is the gradient, turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.inverse = inverse
        return _rotated(x, cos, sin, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, sin, not ctx.inverse), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        width = x.shape[-1]
        heads = x.numel() // (x.shape[0] * width)
        space = triton.next_power_of_2(width)
        tile = max(min(triton.next_power_of_2(heads), VALUES // space), 1)
        kernels.rotate[(x.shape[0], triton.cdiv(heads, tile))](
            x, cos, sin, out, HEADS=heads, WIDTH=width, TURNED=cos.shape[1], INVERSE=inverse, TILE=tile, SPACE=space,
            num_warps=warps(tile * space),
        )  # fmt: skip
    return out


def warps(values: int) -> int:
    """Of a program that holds so many: eight a thread."""
    return min(max(values // 256, 1), 8)


# What is launched on an H200

SPECIMENS = [
    Specimen(
        f"rotate {dtype}, {heads} heads", kernels.rotate, {"x": dtype, "cos": "*fp32", "sin": "*fp32", "out": dtype},
        {"HEADS": heads, "WIDTH": 64, "TURNED": 16, "INVERSE": False, "TILE": heads, "SPACE": 64}, warps(64 * heads),
    )
    for dtype in ("*fp32", "*bf16")
    for heads in (1, 8)
]  # fmt: skip
