"""`Case`: one kernel at one size, told apart from how it is timed: see `bench/kernels.py`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One operation at one size, its inputs made already."""

    op: str
    """The operation: "sparse attention", "index scores" ..."""
    case: str
    """The size, as a reader would say it: "decode, batch 16", "prefill 4,096, P 32,768"."""
    run: Callable[[], Any]
    """The call that is timed, as the replay of a CUDA graph: launches only, no word from the device."""
    error: Callable[[], float]
    """How far the result is from the reference, on what can be compared in a second: asked before anything is timed."""
    most_error: float
    """The largest error with which a figure is printed; 0 where bits must be equal."""
    bytes: float
    """The fewest bytes that must be moved: every input read once, every output written once."""
    bf16_flops: float = 0.0
    fp8_flops: float = 0.0
    aim_us: float | None = None
    """Microseconds that are wanted."""
    peers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Other people's kernels on the same inputs, by name, where they are installed."""
