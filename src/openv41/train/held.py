"""What this process's optimizers hold of a parameter: its rows, and of stacked experts each as a matrix of its own.

    parameter, this process the only one   the parameter itself
    parameter, of several processes        its rows
    stack of experts [e, outputs, inputs]  e matrices, or as many of them as are this process's, for an optimizer that
                                           knows matrices only

All of them are views: what is done to them is done to the parameter.

What an optimizer remembers is written and read as if there were one process: `whole_state`, `own_state`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openv41.train.parallel import Processes

State = dict[Any, Any]


class Held:
    """The parts that an optimizer holds of `parameter`; `stacked`: which is a stack of matrices."""

    def __init__(self, parameter: nn.Parameter, processes: Processes, stacked: bool) -> None:
        self.parameter, self.processes, self.stacked = parameter, processes, stacked
        own = processes.own(parameter)
        self.itself = own is parameter and not stacked
        if stacked:
            self.parts = [nn.Parameter(matrix) for matrix in own.detach().unbind(0)]
        else:
            self.parts = [parameter if self.itself else nn.Parameter(own)]

    def __len__(self) -> int:
        """How many parts all processes hold together: matrices of a stack, or one of anything else."""
        return len(self.parameter) if self.stacked else 1

    def hand_out(self) -> None:
        """Give each part its gradient."""
        if self.itself:
            return
        gradient = self.parameter.grad
        own = None if gradient is None else self.processes.own(gradient)
        for place, part in enumerate(self.parts):
            part.grad = own if own is None or not self.stacked else own[place]

    @torch.no_grad()
    def move_whole(self, muon: torch.optim.Muon) -> None:
        """Where a process has rows of a matrix: move the whole matrix, as `muon` would, and keep the rows."""
        if self.itself or self.stacked or self.parameter.grad is None:
            return
        own = self.parts[0]
        assert own.grad is not None
        matrix = nn.Parameter(self._whole(own))
        matrix.grad, own.grad = self._whole(own.grad), None
        alone = type(muon)([matrix], **{key: of for key, of in muon.param_groups[0].items() if key != "params"})
        if muon.state[own]:
            alone.state[matrix]["momentum_buffer"] = self._whole(muon.state[own]["momentum_buffer"])
        alone.step()
        rows = self.processes.rows(self.parameter)
        own.copy_(matrix[rows])
        muon.state[own]["momentum_buffer"] = alone.state[matrix]["momentum_buffer"][rows].clone()

    def whole(self, own: Sequence[State | None]) -> list[State | None]:
        """From what is remembered of this process's parts: of all parts, whole, on the CPU; in the first process."""
        if self.stacked:
            rows = [one["momentum_buffer"] for one in own if one is not None]
            if not int(self.processes.add(torch.tensor(len(rows)))):  # in no process, it has never moved
                return [None] * len(self)
            nothing = self.processes.own(self.parameter).detach()[:0]
            together = self._whole(torch.stack(rows) if rows else nothing).cpu()
            found: list[State | None] = [{"momentum_buffer": one} for one in together.unbind(0)]
        else:
            found = [self._map(one, lambda value: self._whole(value).cpu()) for one in own]
        return found if self.processes.number == 0 else [None] * len(self)

    def own(self, whole: Sequence[State | None]) -> list[State | None]:
        """The other way round."""
        rows = self.processes.rows(self.parameter)
        return (
            list(whole[rows]) if self.stacked else [self._map(one, lambda value: value[rows].clone()) for one in whole]
        )

    def _whole(self, own: Tensor) -> Tensor:
        return self.processes.whole(self.parameter, own.detach())

    def _map(self, state: State | None, change: Any) -> State | None:
        """Change what has the shape of the parameter, and not the count of steps."""
        if state is None:
            return None
        return {key: change(of) if isinstance(of, Tensor) and of.dim() else of for key, of in state.items()}


def parts_of(held: Iterable[Held]) -> list[nn.Parameter]:
    return [part for one in held for part in one.parts]


def whole_state(state: State, held: Sequence[Held]) -> State:
    """An optimizer's `state_dict`, of whole parameters, from that of this process's parts."""
    return _changed(state, held, [len(one.parts) for one in held], Held.whole, [len(one) for one in held])


def own_state(state: State, held: Sequence[Held]) -> State:
    """The other way round."""
    return _changed(state, held, [len(one) for one in held], Held.own, [len(one.parts) for one in held])


def _changed(
    state: State, held: Sequence[Held], before: list[int], change: Callable[..., list[State | None]], after: list[int]
) -> State:
    """`state` with that of each one's parts, of which there are so many before, changed to that of so many after."""
    found: State = {}
    at = place = 0
    for one, count, more in zip(held, before, after, strict=True):
        parts = change(one, [state["state"].get(at + part) for part in range(count)])
        found |= {place + part: of for part, of in enumerate(parts) if of is not None}
        at, place = at + count, place + more
    groups = state["param_groups"]
    if len(groups) == 1:  # of several groups no part has another number
        groups = [{**groups[0], "params": list(range(place))}]
    return {"state": found, "param_groups": groups}
