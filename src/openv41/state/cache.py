"""`Cache`: conversations, all that sequences keep between calls."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

import torch
from torch import Tensor

from openv41.config import Config
from openv41.errors import CacheError, CacheFull
from openv41.formats import INDEX, LATENT, WINDOW, BlockFormat
from openv41.plan import LayerPlan, plan_layers
from openv41.state.saving import read_slot, write_slot
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
    longest draft); with 0 a window ring holds exactly `window_size` rows. `store`: "wide" keeps rounded rows in the
    activations' `dtype` (bf16 holds every rounded value; float64 for plain numerics); "packed" keeps records of bytes:
    528 a window row, 288 a latent, 68 an index key in the released model. Reading gives the same bits either way.
    With `draft` it also keeps a ring for each stage of the draft, as `windows` are: see `Draft.remember`.

    Verbs: `open` a slot, `step` to make the next step, `admit` it (makes room; the model calls it), `extend` (the step
    has been run; the model calls it), `view` what is kept, `rewind`, `fork`, `save`, `restore`, `close`.
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
        store: Literal["wide", "packed"] = "wide",
        draft: bool = False,
    ) -> None:
        if slots < 1 or slack < 0 or (tokens is not None and tokens < 1):
            raise CacheError(
                f"a cache needs at least 1 slot, 1 token and slack 0, got slots={slots}, tokens={tokens}, slack={slack}"
            )
        if store not in ("wide", "packed"):
            raise CacheError(f"store must be 'wide' or 'packed', got {store!r}")
        if store == "packed" and dtype != torch.bfloat16:
            raise CacheError(f"packed rows are those of published numerics (bf16), got {dtype}: use store='wide'")
        plan = plan_layers(config)[: config.n_layers] if layers is None else tuple(layers)
        self.config, self.slots, self.slack, self.dtype = config, slots, slack, dtype
        # On the meta device tables have shapes and no memory; row numbers are worked out all the same.
        self.device = torch.device("cpu" if torch.device(device).type == "meta" else device)
        self.store = store
        self.lengths: list[int | None] = [None] * slots
        self.highest = [0] * slots  # the length that a slot's rings were written up to, rejected tokens included
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        ratios = [row.ratio for row in plan if row.ratio] or [1]
        page = lcm(*ratios, 64, *(r * config.candidate_block_size for r in ratios if config.candidate_block_size))
        tokens = slots * 4096 if tokens is None else tokens
        self.pages = Pages(slots + -(-tokens // page), page, slots, self.device, -(-config.context // page))

        def kept(form: BlockFormat, width: int) -> tuple[int, torch.dtype]:
            return (width, dtype) if store == "wide" else (form.record_bytes(width), torch.uint8)

        window, latent = kept(WINDOW, config.head_dim), kept(LATENT, config.head_dim)
        key = kept(INDEX, config.index_head_dim)
        self.windows = {row.layer: Ring(slots, config.window_size + slack, *window, device) for row in plan}
        stages = plan_layers(config)[config.n_layers :] if draft else ()
        self.drafts = {row.layer: Ring(slots, config.window_size + slack, *window, device) for row in stages}
        self.sources = {
            row.layer: SourceState(
                Paged(self.pages, row.ratio, *latent, device),
                Paged(self.pages, row.ratio, *key, device),
                Ring(slots, slack + row.ratio - 1, 2 * config.head_dim, wide, device) if row.ratio > 1 else None,
            )
            for row in plan
            if row.latents_from == row.layer
        }
        self.tail = Ring(slots, max(1, config.engram_max_ngram_size - 1 + slack), 2, torch.int64, self.device)

    # Verbs

    def open(self) -> int:
        """A fresh slot. Raises `CacheFull` when all are in use."""
        for slot, length in enumerate(self.lengths):
            if length is None:
                self.lengths[slot], self.highest[slot] = 0, 0
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
        wanted: Literal["last", "all", "none"] = "last",
        image: Tensor | None = None,
        prompts: Mapping[int, int] | None = None,
        features: Tensor | None = None,
    ) -> Step:
        """The next tokens of some slots, (slot, ids) each, at the positions where the slots stand. See `Step.pack`."""
        placed = [(slot, self.length(slot), ids) for slot, ids in parts]
        return Step.pack(placed, wanted, image, self.device, prompts, features=features)

    def admit(self, step: Step) -> None:
        """Check that the step continues its slots, and make room for it: all or nothing, before anything is written."""
        if step.replay:
            return self._admit_replay(step)
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
        for old, new in self.pages.reserve([(run.slot, run.start, run.end) for run in step.runs]):
            for table in self._paged():
                table.copy_page(old, new)

    def extend(self, step: Step) -> None:
        """The step has been run: its tokens now count."""
        for run in step.runs if not step.replay else ():
            self.lengths[run.slot] = run.end
            self.highest[run.slot] = max(self.highest[run.slot], run.end)

    def _admit_replay(self, step: Step) -> None:
        for run in step.runs:
            if run.end != self.length(run.slot):
                raise CacheError(
                    f"a replay of slot {run.slot} ends at position {run.end}, the slot stands at "
                    f"{self.length(run.slot)}: replay the latest tokens"
                )

    def rewind(self, slot: int, length: int) -> None:
        """Take back tokens, down to `length`. Everything that a later call reads is then as if they had never been.

        Raises `CacheError` beyond `slack` tokens before the furthest that the slot ever reached: the rings no longer
        hold what the earlier positions need.
        """
        now, lowest = self.length(slot), max(0, self.highest[slot] - self.slack)
        if not lowest <= length <= now:
            raise CacheError(
                f"slot {slot} holds {now} tokens and can go back to {lowest} at most, not to {length}: "
                "make the cache with more slack, or start the sequence again"
            )
        self.lengths[slot] = length

    def fork(self, slot: int) -> int:
        """Another slot that stands where this one does. Full pages are shared until one of the two writes to them."""
        length = self.length(slot)
        twin = self.open()
        self.pages.share(slot, twin)
        for ring in self.rings().values():
            ring.table[twin] = ring.table[slot]
        self.lengths[twin], self.highest[twin] = length, self.highest[slot]
        return twin

    def branch(self, slot: int, length: int) -> int:
        """Another slot that holds the first `length` tokens of this one: latents and index keys, in shared pages.

        Its rings are empty. They can be made anew by a replay of the latest tokens: see `openv41.generate.prefix`.
        """
        if not 0 <= length <= self.length(slot):
            raise CacheError(f"slot {slot} holds {self.length(slot)} tokens, a branch of {length} was asked for")
        twin = self.open()
        self.pages.share(slot, twin, -(-length // self.pages.tokens))
        self.lengths[twin] = self.highest[twin] = length
        return twin

    def save(self, slot: int, path: str | os.PathLike[str]) -> None:
        """Write a slot to one file, at any position, an open group included. Nothing is left half-written."""
        write_slot(self, slot, path)

    def restore(self, path: str | os.PathLike[str]) -> int:
        """A fresh slot with what a file holds. Raises `CacheError` for a file that is foreign, truncated or corrupt,
        and for one of another configuration or kind of storage; then nothing has changed."""
        return read_slot(self, path)

    def close(self, slot: int) -> None:
        """Forget the slot's sequence and return its pages."""
        self.length(slot)
        self.lengths[slot] = None
        self.pages.release(slot)

    # Reading

    def view(self, kind: str, layer: int, slot: int) -> Tensor:
        """What a slot keeps of one kind, by position: `window` [min(length, window), d], oldest first, and `draft` of a
        stage likewise; `latents` [length // ratio, d]; `keys` [length // ratio, c]; `group` [length % ratio, 2 d], kv
        then gate."""
        length = self.length(slot)
        rings = {"window": self.windows, "draft": self.drafts}.get(kind, {})
        if layer in rings:
            held = range(max(0, length - self.config.window_size), length)
            return self._values(rings[layer].rows_of(slot, held), WINDOW)
        if kind in ("latents", "keys", "group") and layer in self.sources:
            source = self.sources[layer]
            ratio = source.latents.ratio
            if kind == "latents":
                return self._values(source.latents.first(slot, length // ratio), LATENT)
            if kind == "keys":
                return self._values(source.keys.first(slot, length // ratio), INDEX)
            if source.group is not None:
                return source.group.rows_of(slot, range(length - length % ratio, length))
        raise CacheError(
            f"layer {layer} keeps no {kind!r}: every layer keeps window; KV sources keep latents, keys and group; "
            "a draft's stages keep draft, in a cache made with draft=True"
        )

    def _values(self, rows: Tensor, form: BlockFormat) -> Tensor:
        return form.from_records(rows).to(self.dtype) if self.store == "packed" else rows

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
            "draft": size(ring.table for ring in self.drafts.values()),
            "pages": self.pages.numbers.nbytes,
        }

    def rings(self) -> dict[str, Ring]:
        """Every ring by name."""
        windows = {f"window.{layer}": ring for layer, ring in self.windows.items()}
        groups = {f"group.{layer}": source.group for layer, source in self.sources.items() if source.group is not None}
        drafts = {f"draft.{layer}": ring for layer, ring in self.drafts.items()}
        return {**windows, **groups, "tail": self.tail, **drafts}

    def _paged(self) -> Iterator[Paged]:
        return (table for source in self.sources.values() for table in (source.latents, source.keys))

    def _open(self) -> Iterator[tuple[int, int]]:
        return ((slot, length) for slot, length in enumerate(self.lengths) if length is not None)
