"""The far part of attention, by role. The constructor chooses one; the forward asks only whether there is one.

Source    makes latents and index keys from its own input, picks, and hands all of it down
Rescorer  picks anew among what the last source made (inside the candidate blocks, if there are any)
Reader    takes latents and picks as they were handed down
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.formats import LATENT
from openv41.model.compressor import Compressor
from openv41.model.indexer import Indexer, IndexKeys, Keys
from openv41.plan import LayerPlan, last_published
from openv41.state import Cache, Run, Sight, Step


@dataclass(frozen=True)
class Source:
    """Compress, write, score, pick.

    The published decode has a fault. Index keys travel in one shared place, set only when a source has a new latent: on
    a single-token step that completes no group, a ratio-2 source scores against the keys published last, another
    layer's. Prefill never does that. `index_keys="as_written"` reproduces it; with "own_keys" prefill and decode agree.
    """

    compressor: Compressor
    indexer: Indexer
    layers: tuple[LayerPlan, ...]
    plan: LayerPlan
    index_keys: IndexKeys

    def __call__(
        self, x: Float[Tensor, "n dim"], qr: Float[Tensor, "n r"], step: Step, sight: Sight, cache: Cache
    ) -> Sight:
        if not sight.holds(cache.sources[self.plan.layer].latents):  # else a half-depth prefill has, for more tokens
            sight = self.publish(x, step, sight, cache)
        keys = [self._keys(run, cache) for run in step.runs]
        picks = self.indexer(x, qr, step, keys, within=None)
        latents, _ = sight.source()
        made = {"picks": picks.positions, "rows": picks.rows_in(latents, step.slot)}
        if picks.blocks is not None:
            made["candidates"] = picks.blocks
        return sight.having(**made)

    def publish(self, x: Float[Tensor, "n dim"], step: Step, sight: Sight, cache: Cache) -> Sight:
        """Make latents and index keys of the groups that the step completes, write them, and hand them down."""
        state = cache.sources[self.plan.layer]
        groups = step.groups(self.plan.ratio)
        first = groups.first  # a latent stands at the position of its group's first token
        latents = self.compressor(x, step, state.group)
        if step.replay:  # they stand already; at a halo's edge these would be others
            return sight.having(latents=state.latents, keys=state.keys)
        ops = self.indexer.ops
        with torch.no_grad():  # keys only choose
            self.indexer.store_keys(latents, first, state.keys, state.keys.room(groups))
        table, room = state.latents, None if latents.requires_grad else state.latents.room(groups)
        own = ops.rotated_store(latents, None, self.indexer.rotary.at(first), LATENT, table.packed, room)
        return sight.having(latents=table.push(groups, own if room is None else None), keys=state.keys)

    def _keys(self, run: Run, cache: Cache) -> Keys:
        layer, count = self.plan.layer, run.end // self.plan.ratio
        if self.index_keys == "as_written" and run.start > 0 and run.length == 1 and run.end % self.plan.ratio:
            published = last_published(self.layers, layer, run.start)
            layer = layer if published is None else published
        return Keys.of_slot(cache.sources[layer].keys, run.slot, count, self.indexer.ops)


@dataclass(frozen=True)
class Rescorer:
    """Pick anew, with this layer's queries and the last source's keys."""

    indexer: Indexer

    def __call__(
        self, x: Float[Tensor, "n dim"], qr: Float[Tensor, "n r"], step: Step, sight: Sight, cache: Cache
    ) -> Sight:
        latents, keys = sight.source()
        known = [Keys.of_slot(keys, run.slot, run.end // keys.ratio, self.indexer.ops) for run in step.runs]
        picks = self.indexer(x, qr, step, known, sight.candidates)
        return sight.having(picks=picks.positions, rows=picks.rows_in(latents, step.slot))


@dataclass(frozen=True)
class Reader:
    """Everything is handed down already."""

    def __call__(
        self, x: Float[Tensor, "n dim"], qr: Float[Tensor, "n r"], step: Step, sight: Sight, cache: Cache
    ) -> Sight:
        return sight
