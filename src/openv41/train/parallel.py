"""One process, or several that train one model together: what the loop asks of them, in the same verbs for both.

A step of several processes is the step of one: the packs of a step are divided over them, gradients are the mean over
all packs, and every process then holds the same numbers. Each keeps its *rows* of every weight: of the weight, of its
gradient, of what the optimizers remember. Row 0 to c - 1 are the first process's, the next c the second's, with c the
rows over the processes, rounded up; the last have fewer. Two kinds of parameters are whole everywhere (*replicas*):
n-gram tables, whose gradients are few rows, and the routers' selection biases, which have none.

`Alone` is the one process: all rows are its own, and no verb does anything. `Ranks` (in `ranks.py`) is one of several.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from openv41.errors import ConfigError

T = TypeVar("T")


@runtime_checkable
class Processes(Protocol):
    """What a run asks of the processes that train it. But for `own`, `rows` and `view` all of them must ask at once."""

    count: int
    number: int
    """This process among them, from 0 on. Process 0 writes the files."""

    def device(self, name: str) -> str:
        """The device of this process, where the settings say `name`."""

    def shard(self, losses: nn.Module) -> None:
        """Leave of the weights of `losses` this process's rows, put together whenever a forward or backward runs."""

    def own(self, tensor: Tensor) -> Tensor:
        """This process's rows of a parameter or of its gradient, as a plain tensor over the same memory."""

    def rows(self, parameter: Tensor) -> slice:
        """Which rows of the whole parameter these are."""

    def counts(self, parameter: Tensor) -> bool:
        """Whether a sum over all processes is to count what this one holds of it: replicas count once."""

    def whole(self, parameter: Tensor, own: Tensor) -> Tensor:
        """All processes' rows together, of the parameter or of anything of its shape; `own` are this process's."""

    def add(self, values: Tensor) -> Tensor:
        """The sum of all processes' values."""

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """The mean of all processes' values by name."""

    def mean_rows(self, gradient: Tensor) -> Tensor:
        """The mean of all processes' sparse gradients of one table, each row once."""

    def agree(self, flag: bool) -> bool:
        """What process 0 says."""

    def together(self, action: Callable[[], T]) -> T:
        """What `action` gives. Where it raises an `OpenV41Error` or `OSError` in any process, it does in all."""

    def wait(self) -> None:
        """Until all are here."""

    def close(self) -> None:
        """Be one of several no longer. Not after an error in one process alone: the others may still wait for it."""


class Alone:
    """The only process."""

    count, number = 1, 0

    def device(self, name: str) -> str:
        return name

    def shard(self, losses: nn.Module) -> None:
        pass

    def own(self, tensor: Tensor) -> Tensor:
        return tensor

    def rows(self, parameter: Tensor) -> slice:
        return slice(0, len(parameter))

    def counts(self, parameter: Tensor) -> bool:
        return True

    def whole(self, parameter: Tensor, own: Tensor) -> Tensor:
        return own

    def add(self, values: Tensor) -> Tensor:
        return values

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        return dict(values)

    def mean_rows(self, gradient: Tensor) -> Tensor:
        return gradient.coalesce()

    def agree(self, flag: bool) -> bool:
        return flag

    def together(self, action: Callable[[], T]) -> T:
        return action()

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


def number_of_process() -> int:
    """This process among those that `torchrun` started; 0 if it did not."""
    return int(os.environ.get("RANK", "0"))


def launched(device: str) -> Processes:
    """The processes that `torchrun` started this one with, by the environment; `Alone` if it did not."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    from openv41.train.ranks import Ranks

    return Ranks(device)


def share(items: Sequence[T], processes: Processes) -> list[T]:
    """The items of this process: each has equally many. Raises `ConfigError` where that cannot be."""
    if len(items) % processes.count:
        raise ConfigError(
            f"data.packs must be a multiple of the number of processes ({processes.count}), got {len(items)}: "
            f"start another number of them, or set data.packs = {-(-len(items) // processes.count) * processes.count}"
        )
    return list(items[processes.number :: processes.count])


def deal(items: Sequence[T], processes: Processes) -> list[T | None]:
    """The items of this process, with None behind them where others have one more."""
    mine: list[T | None] = [*items[processes.number :: processes.count]]
    return mine + [None] * (-(-len(items) // processes.count) - len(mine))
