"""What one attention layer is given when it is timed on a GPU: sequences of any length, of random rows, and their next
tokens. What follows from positions alone has been worked out before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from openv41.bench.layer import values
from openv41.config import Config
from openv41.formats import INDEX, LATENT, WINDOW, BlockFormat
from openv41.model.attention import Attention
from openv41.plan import Role, plan_layers
from openv41.state import Cache, Sight, Standing, Step

ROOM = 64
"""Tokens that a sequence may grow by while it is measured."""

FILLING = 1 << 24
"""Rows of a table that are filled at a time."""


@dataclass(frozen=True)
class Given:
    """A layer's work: call it, and it runs the layer once. It may be run again and again: the same rows are written."""

    name: str
    x: Tensor
    step: Step
    sight: Sight
    cache: Cache
    position: int
    batch: int
    decode: bool
    fresh: Callable[[], Step]
    """The same step, of whose positions nothing has been worked out yet."""

    def __call__(self, layer: Attention) -> tuple[Tensor, Sight]:
        return layer(self.x, self.step, self.sight, self.cache)


def once(layer: Attention, step: Step, cache: Cache) -> Step:
    """What all layers like this one ask of a step, worked out: the step keeps it."""
    ring, ratio = cache.windows[layer.layer], layer.plan.ratio
    step.remember(("angles", layer.rotary), partial(layer.rotary.at, step.position))
    if ring.takes(step, layer.window_size - 1):
        ring.room(step)
        ring.push(step, None, layer.window_size - 1)[1](step.window(layer.window_size))
    if ratio:
        step.visible(ratio)
    if layer.compressor is not None:
        groups, open_groups = step.groups(ratio), cache.sources[layer.layer].group
        step.remember(("angles of groups", layer.rotary), partial(layer.rotary.at, groups.first))
        cache.sources[layer.layer].latents.places(groups)
        if open_groups is not None and open_groups.takes(step, ratio - 1):
            open_groups.room(step)
            layer.compressor.members(step, open_groups.push(step, None, ratio - 1)[1], False)
    return step


def given(layer: Attention, config: Config, position: int, batch: int, tokens: int, name: str) -> Given:
    """`batch` sequences of random rows, `position` tokens each, and `tokens` more to come, on the layer's device."""
    plan, device = plan_layers(config), layer.attn_sink.device
    source = layer.plan.latents_from
    kept = sorted({layer.layer} | (set() if source is None else {source}))
    room = batch * (position + tokens + ROOM + config.window_size)
    cache = Cache(config, batch, room, 1, device=device, layers=[plan[one] for one in kept], store="packed")
    for _ in range(batch):
        slot = cache.open()
        cache.pages.reserve([(slot, 0, position + tokens)])
        cache.lengths[slot] = cache.highest[slot] = position
    _randomise(cache.windows[layer.layer].table, WINDOW)
    sight = Sight()
    if source is not None:
        state = cache.sources[source]
        _randomise(state.latents.table, LATENT)
        _randomise(state.keys.table, INDEX)
        if source != layer.layer:  # a source makes its own, and is timed with that
            sight = _handed_down(layer, config, cache, source, position, batch, tokens)
    even = torch.ones(config.dim, dtype=torch.bfloat16, device=device)  # the norm before a layer may round for it, too
    x = layer.ops.rms_norm(values("x", batch * tokens, config.dim).to(device), even, config.norm_eps)
    if tokens == 1:
        standing = Standing(list(range(batch)), [position] * batch, device, ROOM)
        layer.rotary.hold(position + ROOM, standing.position.device)
        fresh = standing.step
    else:
        fresh = partial(cache.step, [(slot, [0] * tokens) for slot in range(batch)])
    what = f"decode, batch {batch}" if tokens == 1 else f"chunk of {tokens:,}"
    step = once(layer, fresh(), cache)
    return Given(f"{name}, {what}", x, step, sight, cache, position, batch, tokens == 1, fresh)


def _randomise(table: Tensor, form: BlockFormat) -> None:
    """Random records: any codes but those of NaN, scales that keep values near 1."""
    generator = torch.Generator(table.device).manual_seed(1)
    flat = table.view(-1, table.shape[-1])
    width = next(w for w in (2**n for n in range(5, 16)) if form.record_bytes(w) == table.shape[-1])
    codes = width // form.codes_per_byte
    scale = {WINDOW.name: 120, LATENT.name: 0x28, INDEX.name: 126}[form.name]
    for part in flat.split(max(1, FILLING)):
        bytes_ = torch.randint(0, 256, (len(part), codes), generator=generator, device=table.device, dtype=torch.uint8)
        if form is WINDOW:
            bytes_ &= 0xB7  # exponents of e4m3 below its largest
        part[:, :codes], part[:, codes:] = bytes_, scale


def _handed_down(
    layer: Attention, config: Config, cache: Cache, source: int, position: int, batch: int, tokens: int
) -> Sight:
    """What the source would have handed down: its tables; for a reader random picks; for a re-scorer random blocks."""
    state, ratio = cache.sources[source], layer.plan.ratio
    sight = Sight(state.latents, state.keys)
    visible, n, device = max(1, position // ratio), batch * tokens, state.latents.table.device
    generator = torch.Generator(device).manual_seed(2)
    if layer.plan.role is Role.READER:
        drawn = torch.randint(0, visible, (n, config.index_topk), generator=generator, device=device).sort(1).values
        slot = torch.arange(batch, device=device).repeat_interleave(tokens)
        sight = sight.having(picks=drawn, rows=state.latents.rows(slot, drawn))
    if layer.plan.within is not None:
        seen = (torch.arange(position, position + tokens, device=device).repeat(batch) + 1) // ratio
        count = -(-(position + tokens + ROOM) // (ratio * config.candidate_block_size)) + 1
        number = torch.arange(count, device=device)
        order = torch.rand(n, count, generator=generator, device=device)
        order = order.masked_fill(number * config.candidate_block_size >= seen.unsqueeze(1), -1.0)
        order = order.scatter(1, ((seen - 1) // config.candidate_block_size).clamp_min(0).unsqueeze(1), 2.0)
        kept = order.topk(min(config.candidate_topk_blocks, count), 1).indices
        sight = sight.having(candidates=torch.zeros_like(order, dtype=torch.bool).scatter(1, kept, True) & (order >= 0))
    return sight
