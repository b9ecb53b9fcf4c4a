"""`Cache`: conversations, all that sequences keep between calls."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

import torch
from torch import Tensor

from openv41.config import Config
from openv41.errors import CacheError, CacheFull
from openv41.plan import LayerPlan, plan_layers
from openv41.state.step import Step
from openv41.state.tables import Paged, Pages, Ring


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
