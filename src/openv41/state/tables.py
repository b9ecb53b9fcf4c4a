"""Tables read by row number: rings of the latest positions, and pages of all compressed ones. Row -1 is nothing."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from openv41.errors import CacheFull
from openv41.state.step import Groups, Step, on_device


class Ring:
    """The last `size` positions of every slot: position p lies in row p mod size. Rows past a rewind are never read."""

    def __init__(self, slots: int, size: int, width: int, dtype: torch.dtype, device: str | torch.device) -> None:
        self.size = size
        self.table = torch.zeros(slots, size, width, dtype=dtype, device=device)

    @property
    def packed(self) -> bool:
        """Whether rows are records of bytes."""
        return self.table.dtype == torch.uint8

    def takes(self, step: Step, back: int) -> bool:
        """Whether all of the step's rows may be written before any is read: none overwrites one that is needed."""
        return step.longest <= self.size - back

    def room(self, step: Step) -> tuple[Tensor, Int[Tensor, "n"]]:
        """The table of all slots, and where in it each token's row goes: for who writes there at once."""
        return self.table.flatten(0, 1), self.places(step)

    def places(self, step: Step) -> Int[Tensor, "n"]:
        """Where each token's row goes in the table of all slots."""
        return step.remember(("places", self.size), lambda: step.slot * self.size + step.position % self.size)

    def push(
        self, step: Step, own: Tensor | None, back: int
    ) -> tuple[Tensor, Callable[[Int[Tensor, "n w"]], Int[Tensor, "n w"]]]:
        """Take in the step's rows [n, width], or None if they lie in their `room` already; return a table and the
        function from each token's positions to its rows.

        The table holds at least the step's own rows and the `back` positions before each run. Short runs are written
        first and read from the ring itself. A run that would overwrite rows it still needs gets a joined table, the
        history copied before its own rows, and the ring is written behind it: gradients flow through the own rows.
        """
        if own is None or (self.takes(step, back) and not own.requires_grad):
            if own is not None:
                self.write(step, own)
            return self.table.flatten(0, 1), lambda positions: self._rows(step, positions)
        history, rows = self.before(step, back)
        joined = torch.cat((history, own)) if len(history) or history.dtype != own.dtype else own
        self.write(step, own)
        return joined, rows

    def before(self, step: Step, back: int) -> tuple[Tensor, Callable[[Int[Tensor, "n w"]], Int[Tensor, "n w"]]]:
        """The rows of the `back` positions before each run; and the function from positions to rows of a joined table,
        these rows with the step's own behind them. Nothing is taken in."""
        reach = step.reach(back)
        history = self.table[reach.slot, reach.position % self.size] if len(reach.slot) else self.table[:0, 0]
        return history, lambda positions: _joined_rows(step, back, positions)

    def _rows(self, step: Step, positions: Tensor) -> Tensor:
        """All layers ask for the same window's rows: those are worked out once a step."""
        held = step.remember(("rows", self.size), dict)
        if "window" not in held or held["window"][0] is not positions:
            rows = step.slot.unsqueeze(1) * self.size + positions % self.size
            held["window"] = positions, rows.masked_fill(positions < 0, -1)  # told by identity, so kept alive
        return held["window"][1]

    def write(self, step: Step, own: Tensor) -> None:
        """Take in the step's rows [n, width], of a long run the last that there is room for."""
        own, rows = own.detach(), self.places(step)
        if step.longest > self.size:
            kept, rows = step.remember(("kept", self.size), lambda: self._last_of_each_run(step))
            own = own[kept]
        self.table.flatten(0, 1)[rows] = own.to(self.table.dtype)

    def _last_of_each_run(self, step: Step) -> tuple[Int[Tensor, "kept"], Int[Tensor, "kept"]]:
        """Rows of the step, and where they go in the table of all slots."""
        ends = [run.first + run.length for run in step.runs]
        firsts = [max(run.first, end - self.size) for run, end in zip(step.runs, ends, strict=True)]
        (kept,) = on_device(
            (np.concatenate([np.arange(*span) for span in zip(firsts, ends, strict=True)]),), step.device
        )
        return kept, self.places(step)[kept]

    def put(self, slot: int, length: int, rows: Tensor) -> None:
        """The latest rows of a slot that stands at `length`, oldest first."""
        positions = torch.arange(length - rows.shape[0], length, device=self.table.device)
        self.table[slot, positions % self.size] = rows

    def rows_of(self, slot: int, positions: Sequence[int] | range) -> Tensor:
        """The rows of these positions of one slot, as they are."""
        return self.table[slot, torch.tensor(list(positions), dtype=torch.int64) % self.size]


def _joined_rows(step: Step, back: int, positions: Int[Tensor, "n w"]) -> Int[Tensor, "n w"]:
    """All layers ask for the same window's rows: those are worked out once a step."""
    held = step.remember(("joined", back), dict)
    if "window" in held and held["window"][0] is positions:
        return held["window"][1]
    reach = step.reach(back)
    base = torch.where(positions >= step.start.unsqueeze(1), reach.own.unsqueeze(1), reach.old.unsqueeze(1))
    rows = (base + positions).masked_fill(positions < 0, -1)
    held["window"] = positions, rows  # the positions stay alive with it, so they are told by their identity
    return rows


class Pages:
    """Which pages of a pool each slot holds. A page is room for `tokens` tokens in every paged table of the cache.

    Slots may share pages. A shared page is only read: a slot that is about to write to one gets a copy of its own.
    """

    def __init__(self, count: int, tokens: int, slots: int, device: str | torch.device, most: int = 0) -> None:
        """`most`: pages that one slot can hold; 0: all of them."""
        self.count, self.tokens = count, tokens
        self.free = list(range(count - 1, -1, -1))  # the lowest number is handed out first
        self.users = [0] * count
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.numbers = torch.full((slots, min(count, most or count)), -1, dtype=torch.int64, device=device)

    def reserve(self, wanted: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
        """Room of their own for slots to write tokens `start` to `end`: (slot, start, end) each; all of it, or
        `CacheFull` with nothing taken. Returns pages to copy, (from, to), before anything is written."""
        shared = {slot: self._shared(slot, start, end) for slot, start, end in wanted}
        need = sum(self._missing(slot, end) + len(shared[slot]) for slot, _, end in wanted)
        if need > len(self.free):
            raise CacheFull(
                f"the step needs {need} more pages of {self.tokens} tokens, {len(self.free)} of {self.count} are free: "
                "close a slot, or make the cache with more tokens"
            )
        copies = []
        for slot, _, _ in wanted:
            for place in shared[slot]:
                page = self.held[slot][place]
                if self.users[page] > 1:  # two slots of one step may have shared it: the last one keeps it
                    self.users[page] -= 1
                    copies.append((page, self._take(slot, place)))
        self._add([(slot, self._missing(slot, end)) for slot, _, end in wanted])
        return copies

    def _missing(self, slot: int, length: int) -> int:
        return max(0, -(-length // self.tokens) - len(self.held[slot]))

    def _shared(self, slot: int, start: int, end: int) -> list[int]:
        places = range(start // self.tokens, min(-(-end // self.tokens), len(self.held[slot])))
        return [place for place in places if self.users[self.held[slot][place]] > 1]

    def _take(self, slot: int, place: int) -> int:
        page = self.free.pop()
        self.users[page] = 1
        self.held[slot][place : place + 1] = [page]
        self.numbers[slot, place] = page
        return page

    def _add(self, counts: Sequence[tuple[int, int]]) -> None:
        """Free pages behind those that slots hold, (slot, count) each; the table is written once, not page by page."""
        taken = [(slot, len(self.held[slot]) + place) for slot, count in counts for place in range(count)]
        if not taken:
            return
        pages = [self.free.pop() for _ in taken]
        for (slot, _), page in zip(taken, pages, strict=True):
            self.users[page] = 1
            self.held[slot].append(page)
        slots, places, numbers = on_device((*zip(*taken, strict=True), pages), self.numbers.device)
        self.numbers[slots, places] = numbers

    def share(self, slot: int, twin: int, count: int | None = None) -> None:
        """Let `twin`, which holds nothing, hold the first `count` pages of `slot` as well, or all of them."""
        self.held[twin] = self.held[slot][:count]
        self.numbers[twin, : len(self.held[twin])] = self.numbers[slot, : len(self.held[twin])]
        for page in self.held[twin]:
            self.users[page] += 1

    def release(self, slot: int) -> None:
        for page in self.held[slot]:
            self.users[page] -= 1
            if self.users[page] == 0:
                self.free.append(page)
        self.free.sort(reverse=True)
        self.held[slot] = []
        self.numbers[slot] = -1


class Paged:
    """A table of compressed positions, one per `ratio` tokens, in the pages that the slots hold."""

    def __init__(self, pages: Pages, ratio: int, width: int, dtype: torch.dtype, device: str | torch.device) -> None:
        self.pages, self.ratio = pages, ratio
        self.per_page = pages.tokens // ratio
        self.table = torch.zeros(pages.count * self.per_page, width, dtype=dtype, device=device)

    @property
    def packed(self) -> bool:
        """Whether rows are records of bytes."""
        return self.table.dtype == torch.uint8

    def rows(self, slot: Int[Tensor, "n"], index: Int[Tensor, "n k"]) -> Int[Tensor, "n k"]:
        """Row numbers of compressed positions `index` of each token's slot; -1 stays -1."""
        page = self.pages.numbers[slot.unsqueeze(1), (index // self.per_page).clamp_min(0)]
        return (page * self.per_page + index % self.per_page).masked_fill(index < 0, -1)

    @property
    def paged(self) -> "Paged":
        """The table in the cache: this one."""
        return self

    def push(self, groups: Groups, values: Tensor | None) -> "Paged | Joined":
        """Take in what a step made of the groups that it completes [groups, width], or None if it lies in their `room`
        already; return the table to read, which is this one, or, where the values carry gradient, one in which they do
        so."""
        if values is None:
            return self
        self.write(groups, values)
        return Joined(self, groups, values) if values.requires_grad else self

    def write(self, groups: Groups, values: Tensor) -> None:
        if values.shape[0]:
            self.table[self.places(groups)] = values.detach().to(self.table.dtype)

    def room(self, groups: Groups) -> tuple[Tensor, Int[Tensor, "g"]]:
        """The table and the groups' rows of it: for who writes there at once."""
        return self.table, self.places(groups)

    def places(self, groups: Groups) -> Int[Tensor, "g"]:
        """The rows of groups that a step completes: the same in every table of one ratio."""
        if self.pages not in groups.places:
            groups.places[self.pages] = self.rows(groups.slot, groups.index.unsqueeze(1)).squeeze(1)
        return groups.places[self.pages]

    def copy_page(self, old: int, new: int) -> None:
        size = self.per_page
        self.table[new * size : (new + 1) * size] = self.table[old * size : (old + 1) * size]

    def put(self, slot: int, values: Tensor) -> None:
        """The first positions of a slot, as `first` gives them."""
        index = torch.arange(values.shape[0], device=self.table.device).unsqueeze(0)
        self.table[self.rows(torch.tensor([slot], device=self.table.device), index).squeeze(0)] = values

    def first(self, slot: int, count: int) -> Tensor:
        """A slot's first `count` positions [count, width]: a view where its pages lie side by side, else a copy."""
        held = self.pages.held[slot][: -(-count // self.per_page)]
        if not held:
            return self.table[:0]
        if held == list(range(held[0], held[0] + len(held))):
            return self.table[held[0] * self.per_page :][:count]
        index = torch.arange(count, device=self.pages.numbers.device).unsqueeze(0)
        return self.table[self.rows(torch.tensor([slot], device=self.pages.numbers.device), index).squeeze(0)]


class Joined:
    """A paged table as the step reads it that has just written to it: the table's rows, and behind them once more the
    rows that the step made. Gradients flow through the latter; the cache itself holds none. Made by `Paged.push`."""

    def __init__(self, paged: Paged, groups: Groups, own: Tensor) -> None:
        self.paged, self.ratio = paged, paged.ratio
        self.table = torch.cat((paged.table, own.to(paged.table.dtype)))
        none = torch.iinfo(torch.int64).max
        number = torch.arange(paged.table.shape[0], self.table.shape[0], device=groups.slot.device)
        by_slot = groups.slot.new_full((paged.pages.numbers.shape[0],), none)
        self.start = by_slot.scatter_reduce(0, groups.slot, groups.index, "amin")  # the slot's first new position
        self.base = by_slot.scatter_reduce(0, groups.slot, number, "amin")  # and the row in which it lies

    def rows(self, slot: Int[Tensor, "n"], index: Int[Tensor, "n k"]) -> Int[Tensor, "n k"]:
        """Row numbers of compressed positions `index` of each token's slot; -1 stays -1."""
        start, base = self.start[slot].unsqueeze(1), self.base[slot].unsqueeze(1)
        return torch.where(index >= start, base + (index - start), self.paged.rows(slot, index))
