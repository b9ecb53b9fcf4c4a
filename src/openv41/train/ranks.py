"""One of several processes that train one model, through `torch.distributed`: FSDP2, with NCCL on GPUs, gloo on CPUs.

Two kinds of units are sharded. Experts, which are most of a model, are whole only while they run. All other weights are
one unit, whole while the losses of a pack are computed, and again while their gradients are: the losses of indexers
and draft use weights of layers outside the layers' own forwards. FSDP puts a unit together before its forward and its
backward, and leaves each process its rows of the gradients' mean.

Experts are stacked, so a process's rows of them are whole experts, and Muon moves them where they are.
"""

import gc
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from openv41.errors import ConfigError, OpenV41Error
from openv41.model.experts import Experts
from openv41.train.optimizers import REPLICAS, group_of

T = TypeVar("T")


class Ranks:
    """The process that the environment says, connected with the others. Raises `ConfigError` for a GPU too many."""

    def __init__(self, device: str) -> None:
        self.count, self.number = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        self.here = torch.device(self.device(device))
        if self.here.type == "cuda":
            if (many := int(os.environ["LOCAL_WORLD_SIZE"])) > (gpus := torch.cuda.device_count()):
                raise ConfigError(
                    f"each process needs a GPU of its own, got {many} processes on a machine with {gpus}; start {gpus}"
                )
            torch.cuda.set_device(self.here)
        dist.init_process_group("nccl" if self.here.type == "cuda" else "gloo")
        self.mesh = init_device_mesh(self.here.type, (self.count,))

    def device(self, name: str) -> str:
        return f"cuda:{os.environ['LOCAL_RANK']}" if name.partition(":")[0] == "cuda" else name

    # Shards

    def shard(self, losses: nn.Module) -> None:
        replicas = {p for name, p in losses.named_parameters() if group_of(name, p) in REPLICAS}
        for unit in (*(part for part in losses.modules() if isinstance(part, Experts)), losses):
            fully_shard(unit, mesh=self.mesh, reshard_after_forward=True, ignored_params=replicas)
            # A sum, divided by the number of processes afterwards: every backend has it.
            unit.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # fully_shard changed its class
            unit.register_forward_pre_hook(_renew)

    def own(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        with torch.no_grad():
            return tensor.to_local()

    def rows(self, parameter: Tensor) -> slice:
        if not isinstance(parameter, DTensor):
            return slice(0, len(parameter))
        each = -(-len(parameter) // self.count)
        return slice(min(self.number * each, len(parameter)), min((self.number + 1) * each, len(parameter)))

    def counts(self, parameter: Tensor) -> bool:
        return isinstance(parameter, DTensor) or self.number == 0

    def whole(self, parameter: Tensor, own: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return own
        return self._join(own, -(-len(parameter) // self.count))[: len(parameter)]

    # What all have

    def add(self, values: Tensor) -> Tensor:
        total = values.to(self.here, copy=True)
        dist.all_reduce(total)
        return total

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        total = self.add(torch.tensor(list(values.values()), dtype=torch.float64))
        return dict(zip(values, (total / self.count).tolist(), strict=True))

    def mean_rows(self, gradient: Tensor) -> Tensor:
        gradient = gradient.coalesce()
        counts = torch.zeros(self.count, dtype=torch.int64, device=self.here)
        counts[self.number] = gradient.values().shape[0]
        each = self.add(counts).tolist()
        parts = [
            torch.cat([some[:count] for some, count in zip(joined.chunk(self.count), each, strict=True)])
            for joined in (self._join(one, max(1, *each)) for one in (gradient.indices()[0], gradient.values()))
        ]
        rows, values = parts
        # In the order of the processes on all of them, so that the sums are the same bits everywhere.
        shape = gradient.shape
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values / self.count, shape, check_invariants=True).coalesce()

    def agree(self, flag: bool) -> bool:
        return bool(self.add(torch.tensor(int(flag and self.number == 0))))

    def together(self, action: Callable[[], T]) -> T:
        error: OpenV41Error | OSError | None = None
        try:
            result = action()
        except (OpenV41Error, OSError) as raised:
            error = raised
        errors: list[OpenV41Error | OSError | None] = [None] * self.count
        dist.all_gather_object(errors, error)
        for raised_there in errors:
            if raised_there is not None:
                raise raised_there
        return result

    def wait(self) -> None:
        self.add(torch.zeros(1))

    def close(self) -> None:
        dist.destroy_process_group()
        gc.collect()  # models that are gone hold groups: their threads must not outlive the interpreter

    def _join(self, own: Tensor, most: int) -> Tensor:
        """What each process has, one behind the other, each with room for `most` rows."""
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(parts, padded)
        return torch.cat(parts)


def _renew(unit: nn.Module, _: Any) -> None:
    """Weights that were put together are new values in the same memory: told to all who remember versions."""
    increment_version([p for p in unit.parameters() if not isinstance(p, DTensor)])
