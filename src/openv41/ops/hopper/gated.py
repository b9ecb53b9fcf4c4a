"""Launches of `kernels/gated.py`: `gated`, differentiable, one launch forward and one back."""

from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from openv41.errors import OpsError
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.kernels import gated as kernels

VALUES = 1024
"""Of a program of four warps: eight a thread, of each tensor."""
WIDTH_MOST = 8192


def gated(
    gate: Float[Tensor, "*n f"], up: Float[Tensor, "*n f"], limit: float, routing: Float[Tensor, "*n 1"] | None
) -> Float[Tensor, "*n f"]:
    """See `ReferenceOps.swiglu`. bf16 or float32. Raises `OpsError` for others."""
    if gate.dtype not in (torch.bfloat16, torch.float32) or gate.shape[-1] > WIDTH_MOST:
        raise OpsError(
            f"swiglu by kernel takes bf16 or float32 and at most {WIDTH_MOST} values a row, got {gate.dtype} "
            f"{list(gate.shape)}: use the fast ops there"
        )
    return Gated.apply(gate, up, limit, routing)


class Gated(torch.autograd.Function):
    """Keeps what it was given."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float, routing: Tensor | None) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        routing = None if routing is None else routing.contiguous()
        ctx.limit = limit
        ctx.save_for_backward(gate, up, routing)
        out = torch.empty_like(gate)
        if out.numel():
            constants = _constants(gate.shape[-1], limit, routing is not None)
            count = gate.numel() // gate.shape[-1]
            grid = (triton.cdiv(count, constants["ROWS"]),)
            kernels.gate_values[grid](gate, up, gate if routing is None else routing, out, count, **constants)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up, routing = ctx.saved_tensors
        by_gate, by_up = torch.empty_like(gate), torch.empty_like(up)
        by_routing = None if routing is None else torch.empty_like(routing, dtype=torch.float32)
        if gate.numel():
            constants = _constants(gate.shape[-1], ctx.limit, routing is not None)
            count = gate.numel() // gate.shape[-1]
            kernels.gate_gradient[(triton.cdiv(count, constants["ROWS"]),)](
                gate, up, gate if routing is None else routing, gradient.contiguous(), by_gate, by_up,
                by_gate if by_routing is None else by_routing, count, **constants,
            )  # fmt: skip
        return by_gate, by_up, None, None if by_routing is None else by_routing.to(routing.dtype)


def _constants(width: int, limit: float, routed: bool) -> dict[str, Any]:
    space = triton.next_power_of_2(width)
    return {
        "LIMIT": float(limit), "ROUTED": routed, "WIDTH": width, "SPACE": space, "ROWS": max(VALUES // space, 1),
        "num_warps": 4,
    }  # fmt: skip


# What is launched on an H200

_MINI = {name: value for name, value in _constants(160, 10.0, True).items() if name != "num_warps"}

SPECIMENS = [
    Specimen(
        f"gate {dtype}", kernels.gate_values,
        {"gate": dtype, "up": dtype, "routing": "*fp32", "out": dtype, "count": "i32"}, _MINI,
    )
    for dtype in ("*fp32", "*bf16")
] + [
    Specimen(
        f"gate gradient {dtype}", kernels.gate_gradient,
        {
            "gate": dtype, "up": dtype, "routing": "*fp32", "gradient": dtype, "by_gate": dtype, "by_up": dtype,
            "by_routing": "*fp32", "count": "i32",
        }, _MINI,
    )
    for dtype in ("*fp32", "*bf16")
]  # fmt: skip
