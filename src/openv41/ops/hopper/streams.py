"""Launches of `kernels/streams.py`: `collapsed` and `expanded`, differentiable: a launch forward, one back."""

from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from openv41.errors import OpsError
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.kernels import streams as kernels

SPACE_MOST = 8192
"""Values of a row that a program holds, at most."""
WIDE = (torch.bfloat16, torch.float32)


def collapsed(streams: Float[Tensor, "n m dim"], pre: Float[Tensor, "n m"]) -> Float[Tensor, "n dim"]:
    """See `ReferenceOps.collapse`. Streams of bf16 or float32, m a power of two. Raises `OpsError` for others."""
    _check("collapse", streams)
    return Collapsed.apply(streams, pre)


def expanded(
    y: Float[Tensor, "n dim"],
    streams: Float[Tensor, "n m dim"],
    post: Float[Tensor, "n m"],
    comb: Float[Tensor, "n m m"],
) -> Float[Tensor, "n m dim"]:
    """See `ReferenceOps.expand`. Streams of bf16 or float32, m a power of two. Raises `OpsError` for others."""
    _check("expand", streams)
    return Expanded.apply(y, streams, post, comb)


def _check(op: str, streams: Tensor) -> None:
    _, m, width = streams.shape
    if streams.dtype not in WIDE or m & (m - 1) or m * triton.next_power_of_2(width) > SPACE_MOST:
        raise OpsError(
            f"{op} by kernel takes bf16 or float32 streams, a power of two of them, {SPACE_MOST} values together, got "
            f"{streams.dtype} {list(streams.shape)}: use the fast ops there"
        )


class Collapsed(torch.autograd.Function):
    """Keeps what it was given."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, pre: Tensor) -> Tensor:
        streams, pre = streams.contiguous(), pre.contiguous()
        ctx.save_for_backward(streams, pre)
        out = streams.new_empty(streams.shape[0], streams.shape[2])
        if out.numel():
            kernels.collapse[(len(out),)](streams, pre, out, **_constants(streams))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        streams, pre = ctx.saved_tensors
        by_streams, by_pre = torch.empty_like(streams), torch.empty_like(pre, dtype=torch.float32)
        if gradient.numel():
            given = streams, pre, gradient.contiguous(), by_streams, by_pre
            kernels.collapse_gradient[(len(gradient),)](*given, **_constants(streams))
        return by_streams, by_pre.to(pre.dtype)


class Expanded(torch.autograd.Function):
    """Keeps what it was given."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        given = tuple(one.contiguous() for one in (y, streams, post, comb))
        ctx.save_for_backward(*given)
        out = torch.empty_like(given[1])
        if out.numel():
            kernels.expand[(len(out),)](*given, out, **_constants(streams))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        y, streams, post, comb = ctx.saved_tensors
        by_y, by_streams = torch.empty_like(y), torch.empty_like(streams)
        by_post, by_comb = (torch.empty_like(one, dtype=torch.float32) for one in (post, comb))
        if gradient.numel():
            given = y, streams, post, comb, gradient.contiguous(), by_y, by_streams, by_post, by_comb
            kernels.expand_gradient[(len(gradient),)](*given, **_constants(streams))
        return by_y, by_streams, by_post.to(post.dtype), by_comb.to(comb.dtype)


def _constants(streams: Tensor) -> dict[str, int]:
    """Of all four kernels, and how many warps: eight values a thread of each of the streams together."""
    m, width = streams.shape[1:]
    space = triton.next_power_of_2(width)
    return {"M": m, "WIDTH": width, "SPACE": space, "num_warps": min(max(m * space // 512, 1), 8)}


# What is launched on an H200

_MINI = {"M": 4, "WIDTH": 256, "SPACE": 256}
_MIXES = {"post": "*fp32", "comb": "*fp32"}

SPECIMENS = [
    Specimen(f"{name}, {dtype}", kernel, {key: dtype for key in rows} | {key: "*fp32" for key in mixes}, _MINI, 2)
    for dtype in ("*fp32", "*bf16")
    for name, kernel, rows, mixes in (
        ("collapse", kernels.collapse, ("streams", "out"), ("pre",)),
        (
            "collapse gradient", kernels.collapse_gradient, ("streams", "gradient", "by_streams"), ("pre", "by_pre"),
        ),
        ("expand", kernels.expand, ("y", "streams", "out"), ("post", "comb")),
        (
            "expand gradient", kernels.expand_gradient, ("y", "streams", "gradient", "by_y", "by_streams"),
            ("post", "comb", "by_post", "by_comb"),
        ),
    )
]  # fmt: skip
