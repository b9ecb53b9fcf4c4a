"""Muon for many matrices at once: PyTorch's own on a CPU, and the same in few steps on a GPU.

Muon makes each matrix's update orthogonal, by a few matrix products in turn (Newton and Schulz). PyTorch's does that
one matrix after another. A small model has hundreds of matrices, most of them experts of one shape, and each product is
over before the next one has begun. So matrices of one shape are stacked, and a step takes as many products for all of
them as for one.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.ops import launch_bound


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with the same arguments and the same state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        matrices = [matrix for group in self.param_groups for matrix in group["params"]]
        if not any(launch_bound(matrix.device) for matrix in matrices):
            result: float | None = super().step(closure)
            return result
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._move(group, [matrix for matrix in group["params"] if matrix.grad is not None])
        return None if closure is None else loss

    def _move(self, group: dict[str, Any], matrices: list[Tensor]) -> None:
        if not matrices:
            return
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        momenta = [self._momentum(matrix) for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        for places in alike(matrices):
            stacked = torch.stack([updates[place] for place in places])
            moves = orthogonalised(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])
            some = [matrices[place] for place in places]
            rate = group["lr"] * size_of_update(some[0].shape, group["adjust_lr_fn"])
            torch._foreach_add_(some, list(moves.to(some[0].dtype).unbind(0)), alpha=-rate)

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            assert matrix.grad is not None
            state["momentum_buffer"] = torch.zeros_like(matrix.grad, memory_format=torch.preserve_format)
        momentum: Tensor = state["momentum_buffer"]
        return momentum


def orthogonalised(
    updates: Float[Tensor, "b n m"], coefficients: Sequence[float], steps: int, eps: float,
    dtype: torch.dtype = torch.bfloat16,
) -> Float[Tensor, "b n m"]:  # fmt: skip
    """Each matrix with its singular values brought near 1, in `dtype`: with X of norm 1, and G = X X^T, `steps` times

    X <- a X + (b G + c G G) X        (a, b, c) the coefficients
    """
    a, b, c = coefficients
    tall = updates.shape[1] > updates.shape[2]
    x = updates.to(dtype)
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def size_of_update(shape: Sequence[int], rule: str | None) -> float:
    """What an orthogonal update is multiplied by, beside the rate: see `torch.optim.Muon`'s `adjust_lr_fn`."""
    n, m = shape
    return 0.2 * math.sqrt(max(n, m)) if rule == "match_rms_adamw" else math.sqrt(max(1.0, n / m))


def alike(matrices: Iterable[Tensor]) -> list[list[int]]:
    """The places of matrices that can be stacked."""
    places: defaultdict[Any, list[int]] = defaultdict(list)
    for place, matrix in enumerate(matrices):
        places[matrix.device, matrix.dtype, matrix.shape].append(place)
    return list(places.values())
