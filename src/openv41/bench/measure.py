"""How a figure is taken, and two figures of the machine itself: what it reads, and what it multiplies."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

ROW = 1024
"""Values in a row of the matrices that tensors are taken for, to be read by a product."""
SIDE = 2048
"""Of the square float32 matrices whose product says what the machine multiplies."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of `repeats` calls."""

    median: float
    fastest: float
    slowest: float
    repeats: int


def measure(calls: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 1) -> dict[str, Timing]:
    """Each call's timing. They take turns, so that a neighbour on the machine, or what the last call left in the
    caches, meets all of them alike; the first `warm_up` rounds do not count."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for round in range(warm_up + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round >= warm_up:
                taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: Timing(median(times), min(times), max(times), len(times)) for name, times in taken.items()}


def readers(tensors: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """Three ways to read the tensors once, all of their bytes and with all threads: sums of the bytes taken as int64 or
    as float32, and products with a vector. Which is fastest depends on the machine: that one is its time to read."""
    longs, floats = ([_taken_as(tensor, kind) for tensor in tensors] for kind in (torch.int64, torch.float32))
    ones = torch.ones(ROW)
    rows = [view.view(-1, ROW) if view.is_floating_point() and view.numel() % ROW == 0 else view for view in floats]
    return {
        "int64 sums": lambda: [view.sum() for view in longs],
        "float32 sums": lambda: [view.sum() for view in floats],
        "float32 products": lambda: [view @ ones if view.dim() == 2 else view.sum() for view in rows],
    }


def _taken_as(tensor: Tensor, kind: torch.dtype) -> Tensor:
    return tensor.detach().flatten().view(torch.uint8 if tensor.nbytes % kind.itemsize else kind)


def product() -> tuple[Callable[[], Any], float]:
    """A float32 matrix product of large squares, and its operations (a multiplication and an addition count as two)."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIDE, SIDE, generator=generator) for _ in range(2))
    return lambda: a @ b, 2.0 * SIDE**3


def largest_cache() -> str:
    """The size of the processor's largest cache as Linux writes it ("32768K"), or "" where it does not say."""
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    try:
        return levels[-1].read_text().strip() if levels else ""
    except OSError:
        return ""
