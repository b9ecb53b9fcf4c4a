"""How a figure is taken on a GPU: events around one call, the L2 cache emptied before it, calls taking turns.

Calls are captured in CUDA graphs and replayed: what is timed is the machine, not the time in which Python launches. An
empty graph takes a few microseconds too, and is timed beside.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from openv41.bench.measure import Timing

FLUSH = 128 << 20
"""Bytes written between two calls: twice an H200's L2 cache."""


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reaches at best, as measured here: bytes read and written by a large copy, and matrix products."""

    bytes_per_second: float
    bf16_flops: float
    fp8_flops: float

    def floor(self, size: float, bf16: float = 0.0, fp8: float = 0.0) -> float:
        """Microseconds below which `size` bytes and these operations cannot be done: the larger of the two times."""
        return 1e6 * max(size / self.bytes_per_second, bf16 / self.bf16_flops + fp8 / self.fp8_flops)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as the replay of a graph. Its tensors are made once: it computes from what they hold at the replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is made on the first calls (workspaces, compiled kernels) is made outside
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = call()
    return _Replay(graph, held, call)


@dataclass(frozen=True)
class _Replay:
    graph: Any
    held: Any
    call: Callable[[], Any]
    """Kept for the tensors that it reads: the graph has their addresses, and does not keep them alive."""

    def __call__(self) -> Any:
        self.graph.replay()
        return self.held


def measure_gpu(calls: Mapping[str, Callable[[], Any]], repeats: int = 30, warm_up: int = 5) -> dict[str, Timing]:
    """Each call's milliseconds. They take turns; before each the L2 cache is overwritten."""
    flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for round in range(warm_up + repeats):
        for name, call in calls.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            if round >= warm_up:
                pairs[name].append((begin, end))
    torch.cuda.synchronize()
    taken = {name: sorted(begin.elapsed_time(end) for begin, end in some) for name, some in pairs.items()}
    return {name: Timing(times[len(times) // 2], times[0], times[-1], len(times)) for name, times in taken.items()}


def ceilings() -> Ceilings:
    """Copy 4 GB; multiply matrices of 8,192 squared, of random numbers (zeros would run faster)."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")

    def fp8() -> Any:
        return torch._scaled_mm(a8, b8.mT, one, one, out_dtype=torch.bfloat16)

    times = measure_gpu({"copy": lambda: target.copy_(source), "bf16": lambda: a @ b.mT, "fp8": fp8}, 10)
    product = 2.0 * 8192**3
    return Ceilings(
        2e3 * source.nbytes / times["copy"].median,
        1e3 * product / times["bf16"].median,
        1e3 * product / times["fp8"].median,
    )
