"""Work beside other work: streams of a set's own, on which what nothing waits for yet is done.

A stream begins a task behind all that has been asked of the GPU so far, and whoever asks for the result waits for it.
So memory of either stream is used up before it is given to others, and all of it can be captured in one graph.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor


class Beside:
    """`lane`: which of the streams we are on; 0 is the caller's own."""

    def __init__(self) -> None:
        self.lane = 0
        self.streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        self.waiting: WeakSet[Task] = WeakSet()

    def put_off(self, task: "Task") -> None:
        """To be begun with `begin_waiting`, or when it is asked for."""
        self.waiting.add(task)

    def begin_waiting(self, lane: int) -> None:
        for task in list(self.waiting):
            self.begin(task, lane)

    def begin(self, task: "Task", lane: int) -> None:
        self.waiting.discard(task)
        if (task.device, lane) not in self.streams:
            self.streams[task.device, lane] = torch.cuda.Stream(task.device)
        stream = self.streams[task.device, lane]
        stream.wait_stream(torch.cuda.current_stream(task.device))
        self.lane = lane
        try:
            with torch.cuda.stream(stream):
                task.run()
                task.done = stream.record_event()
        finally:
            self.lane = 0


class Task:
    """`work(*inputs)`, done once; call it for the result."""

    def __init__(self, device: torch.device, work: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        self.device, self.work, self.inputs = device, work, inputs
        self.result: Tensor | None = None
        self.done: torch.cuda.Event | None = None

    def run(self) -> Tensor:
        if self.result is None:
            self.result = self.work(*self.inputs)
        return self.result

    def __call__(self) -> Tensor:
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)
        return self.run()
