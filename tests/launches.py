"""Counting what a GPU would have to begin, and what would make it wait for the host, while something runs on a CPU."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from openv41.ops import pieces

VIEWS = {
    "_conj", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "expand", "permute",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze",
    "view", "view_as_complex", "view_as_real",
}  # fmt: skip
"""Operations that only look at a tensor in another way."""

NOTHING = {
    "_coalesced_", "_has_same_storage_numel", "_indices", "_nnz", "_record_function_enter_new", "_record_function_exit",
    "_sparse_coo_tensor_with_dims_and_tensors", "_values", "dense_dim", "empty", "empty_like", "empty_strided",
    "indices", "is_coalesced", "is_pinned", "is_same_size", "new_empty", "new_empty_strided", "promote_types",
    "resize_", "set_", "sparse_dim", "values",
}  # fmt: skip
"""Operations that compute nothing."""

SEVERAL = {
    "_coalesce": 8, "_index_put_impl_": 8, "_unique2": 8, "bincount": 3, "cumsum": 2, "index_put": 2, "index_put_": 2,
    "nonzero": 3, "sort": 4, "topk": 3,
}  # fmt: skip
"""About how many kernels an operation is on a GPU; one, if it is not named."""

WAITS = {"_coalesce", "_local_scalar_dense", "_unique2", "bincount", "equal", "lift_fresh", "masked_select", "nonzero"}
"""Operations whose result has a size that the host must know, or that take a number from the device or to it."""


HOST = "train/data.py"
"""What lies on the host before it is brought to the device: ids and targets, each together."""


class Launches(TorchDispatchMode):
    """`count` of kernels, and `waits` by where in the package they were."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.by_operation, self.waits = 0, Counter[str](), Counter[str]()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.paused:
            marks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
                one is not None and one.dtype == torch.bool for one in args[1]
            )
            if (name in WAITS or marks) and not (place := _where()).startswith(HOST):
                self.waits[f"{name} in {place}"] += 1
            if name not in VIEWS | NOTHING | {"lift_fresh", "_local_scalar_dense"}:
                self.note(name, SEVERAL.get(name, 1))
        return func(*args, **(kwargs or {}))

    def note(self, name: str, count: int) -> None:
        self.count += count
        self.by_operation[name] += count


def _where() -> str:
    """The innermost place in the package."""
    frame = sys._getframe(2)
    while frame is not None:
        _, found, place = frame.f_code.co_filename.rpartition("/openv41/")
        if found:
            return f"{place}:{frame.f_lineno}"
        frame = frame.f_back
    return "no place of the package"


COUNTING: list[Launches] = []
"""What counts at the moment."""

COMPOSITE = F.rms_norm


class Fused(torch.autograd.Function):
    """PyTorch's RMS norm as on a GPU: one kernel, and in its gradient one for each input. On a CPU it is many
    operations, which are not counted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, shape: Any, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rest = shape, eps
        with uncounted("rms_norm", 1):
            return COMPOSITE(x, shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs = [one.detach().requires_grad_() for one in ctx.saved_tensors if one is not None]
        with uncounted("rms_norm backward", len(inputs)):
            with torch.enable_grad():
                result = COMPOSITE(inputs[0], ctx.rest[0], *inputs[1:], eps=ctx.rest[1])
            found = torch.autograd.grad(result, inputs, gradient)
        return found[0], found[1] if len(found) > 1 else None, None, None


@contextmanager
def uncounted(name: str, count: int) -> Iterator[None]:
    """What runs in here counts as one operation of so many kernels."""
    launches = COUNTING[-1]
    launches.note(name, count)
    launches.paused = True
    try:
        yield
    finally:
        launches.paused = False


@contextmanager
def counted_as_on_a_gpu() -> Iterator[Launches]:
    """What runs in here takes the pieces that a GPU would take, and is counted."""
    bound = pieces.LAUNCH_BOUND
    COUNTING.append(Launches())
    F.rms_norm = lambda x, shape, weight, eps: Fused.apply(x, weight, shape, eps)
    pieces.LAUNCH_BOUND = ("cuda", "cpu")
    try:
        with COUNTING[-1]:
            yield COUNTING[-1]
    finally:
        COUNTING.pop()
        F.rms_norm, pieces.LAUNCH_BOUND = COMPOSITE, bound
