"""The values that travel with the data, and their lifetimes.

`Step`   one call: `n` tokens of any mixture of sequences. Frozen.
`Sight`  one descent through the layers: what a source hands down to the layers below it. Replaced, never changed.
`Cache`  conversations: all that a sequence keeps between calls. Changed in place, by verbs.

A sequence lives in a *slot* of the cache. Tables are two-dimensional and read by row number; -1 names no row. Slots,
rings and pages are then only a matter of row numbers, and `Ring` and `Paged` are where those are worked out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from openv41.config import Config
from openv41.errors import CacheError, CacheFull, InputError
from openv41.plan import LayerPlan, plan_layers

# One call


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one slot: positions `start` to `start + length - 1`, in rows `first`, ... of the step."""

    slot: int
    start: int
    length: int
    first: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def pieces(self, size: int) -> Iterator[slice]:
        """The run's rows of the step, at most `size` at a time."""
        last = self.first + self.length
        return (slice(first, min(first + size, last)) for first in range(self.first, last, size))


@dataclass(frozen=True)
class Groups:
    """The groups of `ratio` tokens that a step completes: group `index[g]` of `slot[g]`, its tokens' positions."""

    slot: Int[Tensor, "g"]
    index: Int[Tensor, "g"]
    position: Int[Tensor, "g ratio"]
    token: Int[Tensor, "g"]
    """Row of the step whose token completes the group."""


@dataclass(frozen=True)
class Reach:
    """The tokens just before each run of a step, `back` of them at most, and where a joined table holds every token.

    In the table [history rows, then the step's own rows], position q of token t's slot lies in row `own[t] + q` from
    the run's start on, and in row `old[t] + q` before it.
    """

    slot: Int[Tensor, "history"]
    position: Int[Tensor, "history"]
    old: Int[Tensor, "n"]
    own: Int[Tensor, "n"]


@dataclass(frozen=True, eq=False)
class Step:
    """One call: `n` packed tokens. A prompt, a chunk, one decoded token a sequence, a draft, or all at once.

    Fields (int64): ids [n]; slot [n]; position [n]; start [n], the position at which the token's run starts; the runs;
    `wanted` [j], rows whose logits are asked for; `image` [n], true where the token is part of an image.
    Make one with `Step.pack` (or `Cache.step`, which knows the positions).
    """

    ids: Int[Tensor, "n"]
    slot: Int[Tensor, "n"]
    position: Int[Tensor, "n"]
    start: Int[Tensor, "n"]
    runs: tuple[Run, ...]
    wanted: Int[Tensor, "j"]
    image: Bool[Tensor, "n"]
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def pack(
        cls,
        parts: Iterable[tuple[int, int, Sequence[int] | Tensor]],
        wanted: Literal["last", "all"] = "last",
        image: Bool[Tensor, "n"] | None = None,
        device: str | torch.device = "cpu",
    ) -> "Step":
        """A step from (slot, start position, ids) parts, one a slot.

        `wanted`: "last" asks for the logits of each run's last token, "all" for every token's.
        Raises `InputError` for an empty part, a slot named twice, a negative start, or nothing at all.
        """
        runs: list[Run] = []
        ids: list[Tensor] = []
        first = 0
        for slot, start, part in parts:
            piece = torch.as_tensor(part, dtype=torch.int64, device=device)
            if piece.dim() != 1 or piece.numel() == 0:
                raise InputError(f"a part of a step is a row of at least one token, got shape {tuple(piece.shape)}")
            if start < 0:
                raise InputError(f"a part's start position must be 0 or more, got {start}")
            if any(run.slot == slot for run in runs):
                raise InputError(f"slot {slot} has two parts in one step: join them, or take two steps")
            runs.append(Run(slot, start, piece.numel(), first))
            ids.append(piece)
            first += piece.numel()
        if not runs:
            raise InputError("a step needs at least one part")
        lengths = torch.tensor([run.length for run in runs], device=device)
        firsts = torch.tensor([run.first for run in runs], device=device).repeat_interleave(lengths)
        start_of = torch.tensor([run.start for run in runs], device=device).repeat_interleave(lengths)
        rows = torch.arange(first, device=device)
        return cls(
            ids=torch.cat(ids),
            slot=torch.tensor([run.slot for run in runs], device=device).repeat_interleave(lengths),
            position=rows - firsts + start_of,
            start=start_of,
            runs=tuple(runs),
            wanted=lengths.cumsum(0) - 1 if wanted == "last" else rows,
            image=torch.zeros(first, dtype=torch.bool, device=device) if image is None else image,
        )

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.ids.device

    @cached_property
    def longest(self) -> int:
        return max(run.length for run in self.runs)

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, worked out once a step: forty layers ask for the same row numbers."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def reach(self, back: int) -> Reach:
        """Where to find the `back` tokens before each run, and all of the step's own."""
        return self.remember(("reach", back), lambda: self._reach(back))

    def _reach(self, back: int) -> Reach:
        before = [min(run.start, back) for run in self.runs]
        slots: list[int] = []
        positions: list[int] = []
        old: list[int] = []
        own: list[int] = []
        total = sum(before)
        held = 0
        for run, count in zip(self.runs, before, strict=True):
            slots += [run.slot] * count
            positions += range(run.start - count, run.start)
            old += [held - (run.start - count)] * run.length
            own += [total + run.first - run.start] * run.length
            held += count

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        return Reach(tensor(slots), tensor(positions), tensor(old), tensor(own))

    def window(self, width: int) -> Int[Tensor, "n w"]:
        """The positions that each token sees, oldest first: itself and up to `width - 1` before; -1 fills up behind."""
        return self.remember(("window", width), lambda: self._window(width))

    def _window(self, width: int) -> Int[Tensor, "n w"]:
        here = self.position.unsqueeze(1)
        seen = (here - width + 1).clamp_min(0) + torch.arange(width, device=self.device)
        return seen.masked_fill(seen > here, -1)

    def groups(self, ratio: int) -> Groups:
        """The groups of `ratio` tokens whose last token is in this step."""
        return self.remember(("groups", ratio), lambda: self._groups(ratio))

    def _groups(self, ratio: int) -> Groups:
        token = ((self.position + 1) % ratio == 0).nonzero().squeeze(1)
        last = self.position[token].unsqueeze(1)
        member = last - ratio + 1 + torch.arange(ratio, device=self.device)
        return Groups(self.slot[token], (last // ratio).squeeze(1), member, token)

    def visible(self, ratio: int) -> Int[Tensor, "n"]:
        """Compressed positions that each token sees: position j is visible once its whole group is."""
        return self.remember(("visible", ratio), lambda: (self.position + 1) // ratio)


# Conversations


class Ring:
    """The last `size` positions of every slot: position p lies in row p mod size. Rows past a rewind are never read."""

    def __init__(self, slots: int, size: int, width: int, dtype: torch.dtype, device: str | torch.device) -> None:
        self.size = size
        self.table = torch.zeros(slots, size, width, dtype=dtype, device=device)

    def push(
        self, step: Step, own: Tensor, back: int
    ) -> tuple[Tensor, Callable[[Int[Tensor, "n w"]], Int[Tensor, "n w"]]]:
        """Take in the step's rows [n, width]; return a table and the function from each token's positions to its rows.

        The table holds at least the step's own rows and the `back` positions before each run. Short runs are written
        first and read from the ring itself. A run that would overwrite rows it still needs gets a joined table, the
        history copied before its own rows, and the ring is written behind it: gradients flow through the own rows.
        """
        if step.longest <= self.size - back and not own.requires_grad:
            self._write(step, own)
            return self.table.flatten(0, 1), lambda positions: self._rows(step, positions)
        reach = step.reach(back)
        joined = torch.cat((self.table[reach.slot, reach.position % self.size], own))
        self._write(step, own)
        return joined, lambda positions: _joined_rows(step, reach, positions)

    def _rows(self, step: Step, positions: Tensor) -> Tensor:
        rows = step.slot.unsqueeze(1) * self.size + positions % self.size
        return rows.masked_fill(positions < 0, -1)

    def _write(self, step: Step, own: Tensor) -> None:
        def last_of_each_run() -> Tensor:
            return torch.cat([torch.arange(max(run.first, run.first + run.length - self.size), run.first + run.length)
                              for run in step.runs]).to(step.device)  # fmt: skip

        kept = step.remember(("kept", self.size), last_of_each_run)
        self.table[step.slot[kept], step.position[kept] % self.size] = own[kept].detach().to(self.table.dtype)

    def rows_of(self, slot: int, positions: Sequence[int] | range) -> Tensor:
        """The rows of these positions of one slot, as they are."""
        return self.table[slot, torch.tensor(list(positions), dtype=torch.int64) % self.size]


def _joined_rows(step: Step, reach: Reach, positions: Int[Tensor, "n w"]) -> Int[Tensor, "n w"]:
    base = torch.where(positions >= step.start.unsqueeze(1), reach.own.unsqueeze(1), reach.old.unsqueeze(1))
    return (base + positions).masked_fill(positions < 0, -1)


class Pages:
    """Which pages of a pool each slot holds. A page is room for `tokens` tokens in every paged table of the cache."""

    def __init__(self, count: int, tokens: int, slots: int, device: str | torch.device) -> None:
        self.count, self.tokens = count, tokens
        self.free = list(range(count - 1, -1, -1))  # the lowest number is handed out first
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.numbers = torch.full((slots, count), -1, dtype=torch.int64, device=device)

    def missing(self, slot: int, length: int) -> int:
        """Pages that the slot lacks to hold `length` tokens."""
        return max(0, -(-length // self.tokens) - len(self.held[slot]))

    def reserve(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Room for (slot, length) pairs, all of it or `CacheFull` with nothing taken."""
        need = sum(self.missing(slot, length) for slot, length in wanted)
        if need > len(self.free):
            raise CacheFull(
                f"the step needs {need} more pages of {self.tokens} tokens, {len(self.free)} of {self.count} are free: "
                "close a slot, or make the cache with more tokens"
            )
        for slot, length in wanted:
            for _ in range(self.missing(slot, length)):
                page = self.free.pop()
                self.numbers[slot, len(self.held[slot])] = page
                self.held[slot].append(page)

    def release(self, slot: int) -> None:
        self.free += sorted(self.held[slot], reverse=True)
        self.free.sort(reverse=True)
        self.held[slot] = []
        self.numbers[slot] = -1


class Paged:
    """A table of compressed positions, one per `ratio` tokens, in the pages that the slots hold."""

    def __init__(
        self, pages: Pages, ratio: int, width: int, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        self.pages, self.ratio = pages, ratio
        self.per_page = pages.tokens // ratio
        self.table = torch.zeros(pages.count * self.per_page, width, dtype=dtype, device=device)

    def rows(self, slot: Int[Tensor, "n"], index: Int[Tensor, "n k"]) -> Int[Tensor, "n k"]:
        """Row numbers of compressed positions `index` of each token's slot; -1 stays -1."""
        page = self.pages.numbers[slot.unsqueeze(1), (index // self.per_page).clamp_min(0)]
        return (page * self.per_page + index % self.per_page).masked_fill(index < 0, -1)

    def write(self, groups: Groups, values: Tensor) -> None:
        if values.shape[0]:
            self.table[self.rows(groups.slot, groups.index.unsqueeze(1)).squeeze(1)] = values.detach().to(
                self.table.dtype
            )

    def first(self, slot: int, count: int) -> Tensor:
        """A slot's first `count` positions [count, width]: a view where its pages lie side by side, else a copy."""
        held = self.pages.held[slot][: -(-count // self.per_page)]
        if not held:
            return self.table[:0]
        if held == list(range(held[0], held[0] + len(held))):
            return self.table[held[0] * self.per_page :][:count]
        index = torch.arange(count, device=self.table.device).unsqueeze(0)
        return self.table[self.rows(torch.tensor([slot], device=self.table.device), index).squeeze(0)]


@dataclass(frozen=True)
class SourceState:
    """What one KV source keeps: latents, index keys, and (ratio 2) the open group's kv and gate in wide precision."""

    latents: Paged
    keys: Paged
    group: Ring | None


class Cache:
    """All that sequences keep between calls, in slots. Nothing else in the model has state.

    `slots` sequences share room for `tokens` tokens. `slack` is the longest stretch that `rewind` can take back (the
    longest draft); with 0 a window ring holds exactly `window_size` rows. `dtype` is the activations' (bf16; float64
    for plain numerics): what is stored has been rounded to its fp8 or fp4 grid already, which bf16 holds exactly.

    Verbs: `open` a slot, `step` to make the next step, `admit` it (makes room; the model calls it), `extend` (the step
    has been run; the model calls it), `view` what is kept, `rewind`, `close`.
    """

    def __init__(
        self,
        config: Config,
        slots: int = 1,
        tokens: int | None = None,
        slack: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        layers: Sequence[LayerPlan] | None = None,
    ) -> None:
        if slots < 1 or slack < 0 or (tokens is not None and tokens < 1):
            raise CacheError(
                f"a cache needs at least 1 slot, 1 token and slack 0, got slots={slots}, tokens={tokens}, slack={slack}"
            )
        plan = plan_layers(config)[: config.n_layers] if layers is None else tuple(layers)
        self.config, self.slots, self.slack, self.dtype, self.device = config, slots, slack, dtype, device
        self.lengths: list[int | None] = [None] * slots
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        ratios = [row.ratio for row in plan if row.ratio] or [1]
        page = lcm(*ratios, 64, *(r * config.candidate_block_size for r in ratios if config.candidate_block_size))
        tokens = slots * 4096 if tokens is None else tokens
        self.pages = Pages(slots + -(-tokens // page), page, slots, device)
        self.windows = {
            row.layer: Ring(slots, config.window_size + slack, config.head_dim, dtype, device) for row in plan
        }
        self.sources = {
            row.layer: SourceState(
                Paged(self.pages, row.ratio, config.head_dim, dtype, device),
                Paged(self.pages, row.ratio, config.index_head_dim, dtype, device),
                Ring(slots, slack + row.ratio - 1, 2 * config.head_dim, wide, device) if row.ratio > 1 else None,
            )
            for row in plan
            if row.latents_from == row.layer
        }
        self.tail = Ring(slots, max(1, config.engram_max_ngram_size - 1 + slack), 2, torch.int64, device)

    # Verbs

    def open(self) -> int:
        """A fresh slot. Raises `CacheFull` when all are in use."""
        for slot, length in enumerate(self.lengths):
            if length is None:
                self.lengths[slot] = 0
                return slot
        raise CacheFull(f"all {self.slots} slots are in use: close one, or make the cache with more slots")

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        if not 0 <= slot < self.slots or self.lengths[slot] is None:
            raise CacheError(f"slot {slot} is not open: open slots are {[s for s, n in self._open()]}")
        return self.lengths[slot] or 0

    def step(
        self,
        parts: Iterable[tuple[int, Sequence[int] | Tensor]],
        wanted: Literal["last", "all"] = "last",
        image: Tensor | None = None,
    ) -> Step:
        """The next tokens of some slots, (slot, ids) each, at the positions where the slots stand."""
        placed = [(slot, self.length(slot), ids) for slot, ids in parts]
        return Step.pack(placed, wanted, image, self.device)

    def admit(self, step: Step) -> None:
        """Check that the step continues its slots, and make room for it: all or nothing, before anything is written."""
        for run in step.runs:
            if run.start != self.length(run.slot):
                raise CacheError(
                    f"the step continues slot {run.slot} at position {run.start}, which stands at "
                    f"{self.length(run.slot)}: rewind it, or make the step with cache.step"
                )
            if run.end > self.config.context:
                raise CacheError(
                    f"slot {run.slot} would hold {run.end} tokens, the context is {self.config.context}: shorten it"
                )
        self.pages.reserve([(run.slot, run.end) for run in step.runs])

    def extend(self, step: Step) -> None:
        """The step has been run: its tokens now count."""
        for run in step.runs:
            self.lengths[run.slot] = run.end

    def rewind(self, slot: int, length: int) -> None:
        """Take back tokens, down to `length`. Everything that a later call reads is then as if they had never been.

        Raises `CacheError` beyond `slack` tokens: the rings no longer hold what the earlier positions need.
        """
        now = self.length(slot)
        if not max(0, now - self.slack) <= length <= now:
            raise CacheError(
                f"slot {slot} holds {now} tokens and can go back {self.slack} at most, not to {length}: "
                "make the cache with more slack, or start the sequence again"
            )
        self.lengths[slot] = length

    def close(self, slot: int) -> None:
        """Forget the slot's sequence and return its pages."""
        self.length(slot)
        self.lengths[slot] = None
        self.pages.release(slot)

    # Reading

    def view(self, kind: str, layer: int, slot: int) -> Tensor:
        """What a slot keeps of one kind, by position: `window` [min(length, window), d], oldest first; `latents`
        [length // ratio, d]; `keys` [length // ratio, c]; `group` [length % ratio, 2 d], kv then gate."""
        length = self.length(slot)
        if kind == "window" and layer in self.windows:
            return self.windows[layer].rows_of(slot, range(max(0, length - self.config.window_size), length))
        if kind in ("latents", "keys", "group") and layer in self.sources:
            source = self.sources[layer]
            ratio = source.latents.ratio
            if kind == "latents":
                return source.latents.first(slot, length // ratio)
            if kind == "keys":
                return source.keys.first(slot, length // ratio)
            if source.group is not None:
                return source.group.rows_of(slot, range(length - length % ratio, length))
        raise CacheError(
            f"layer {layer} keeps no {kind!r}: every layer keeps window; KV sources keep latents, keys and group"
        )

    def nbytes(self) -> dict[str, int]:
        """Bytes that the cache's tensors take, by kind."""
        def size(tables: Iterable[Tensor]) -> int:
            return sum(table.nbytes for table in tables)

        return {
            "window": size(ring.table for ring in self.windows.values()),
            "latents": size(source.latents.table for source in self.sources.values()),
            "keys": size(source.keys.table for source in self.sources.values()),
            "group": size(source.group.table for source in self.sources.values() if source.group is not None),
            "tail": self.tail.table.nbytes,
            "pages": self.pages.numbers.nbytes,
        }

    def _open(self) -> Iterator[tuple[int, int]]:
        return ((slot, length) for slot, length in enumerate(self.lengths) if length is not None)


# One descent


@dataclass(frozen=True)
class Sight:
    """What the layers above hand down. A source replaces what it makes; readers read.

    `latents` and `keys`: the tables of the latest KV source. `picks` [n, k]: compressed positions that the latest index
    source chose, ascending, -1 for none; `rows`: the same as row numbers of the latents. `candidates` [n, blocks]: the
    blocks within which a re-scorer picks. `ngrams` [n, max n]: each token's compressed id and those before it.
    """

    latents: Paged | None = None
    keys: Paged | None = None
    picks: Int[Tensor, "n k"] | None = None
    rows: Int[Tensor, "n k"] | None = None
    candidates: Bool[Tensor, "n blocks"] | None = None
    ngrams: Int[Tensor, "n order"] | None = None

    def having(self, **changes: Any) -> "Sight":
        return replace(self, **changes)

    def source(self) -> tuple[Paged, Paged]:
        """Latents and index keys of the latest KV source."""
        if self.latents is None or self.keys is None:
            raise CacheError("no layer above has made latents: run the layers in order, from a KV source on")
        return self.latents, self.keys

    def far(self) -> tuple[Tensor, Int[Tensor, "n k"]]:
        """The table of latents and each token's rows of it."""
        if self.latents is None or self.rows is None:
            raise CacheError("no layer above has picked positions: run the layers in order, from an index source on")
        return self.latents.table, self.rows
