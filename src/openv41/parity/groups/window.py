"""window: which positions a query lists (`seqlen` or `start_pos`), and a window-only layer with its ring (`x`)."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from openv41.config import Config
from openv41.model.attention import Attention
from openv41.ops import Ops
from openv41.parity.compare import EXACT, Bounds, Sheet, bounds
from openv41.parity.fill import fill, model_config, weights_of
from openv41.parity.folder import BadCase, Case, Skip
from openv41.state import Cache, Sight, Step

RING, Y = Bounds(quantum=0.35, min_equal=0.995), Bounds(atol=0.02, min_within_1ulp=0.9)


def run(case: Case, ops: Ops, sheet: Sheet) -> None:
    if "idx" in case and "seqlen" in case.config:
        _prompt_lists(case, sheet)
    elif "idx" in case and "start_pos" in case.config:
        _step_lists(case, sheet)
    elif "x" in case and "y" in case:
        _ring(case, ops, sheet)
    elif case.matching("w."):
        weights = weights_of(case)
        _layer(model_config(case), weights, ops)
        sheet.reported = True
        sheet.notes.append(f"{len(weights)} weights for other cases, read and fitted")
    else:
        raise Skip("unknown kind of window case: it has neither idx nor x and y nor weights")


def _prompt_lists(case: Case, sheet: Sheet) -> None:
    """The published list has no more columns than the prompt has tokens; ours are then empty."""
    window, length = case.whole("window", least=1), case.whole("seqlen", least=1)
    recorded = case["idx"]
    width = min(window, length)
    if recorded.shape[1:] != (length, width):
        raise BadCase(f"idx must list {width} slots for {length} queries, has shape {list(recorded.shape)}")
    ours = Step.pack([(0, 0, [0] * length)]).window(window)
    sheet.require("idx", bool((ours[:, width:] == -1).all()), f"more than {width} columns are used")
    sheet.compare("idx", ours[:, :width].expand(recorded.shape[0], -1, -1), recorded.long(), EXACT)


def _step_lists(case: Case, sheet: Sheet) -> None:
    """Slots in the order of age. Where the empty entries stand while the ring fills is up to the layout."""
    window, position = case.whole("window", least=1), case.whole("start_pos")
    positions = Step.pack([(0, position, [0])]).window(window).flatten()
    slots = positions[positions >= 0] % window
    recorded = case["idx"].long()
    if recorded.shape[1:] != (1, window):
        raise BadCase(f"idx must list {window} slots for one query, has shape {list(recorded.shape)}")
    for row in recorded.flatten(0, 1):
        sheet.compare("idx", slots, row[row >= 0], EXACT)


def _layer(config: Config, weights: Mapping[str, Tensor], ops: Ops) -> Attention:
    layers = [layer for layer in range(config.n_layers) if not config.compress_ratios[layer]]
    if not layers:
        raise BadCase("config.compress_ratios has no layer with a window alone")
    attention = Attention(config, layers[0], ops)
    fill(attention, weights)
    return attention


def _ring(case: Case, ops: Ops, sheet: Sheet) -> None:
    config, x = model_config(case), case["x"]  # [b, t, dim]
    attention = _layer(config, weights_of(case), ops)
    batch, tokens = x.shape[:2]
    prompt, steps = case.whole("prefill", least=1), case.whole("steps")
    if prompt + steps != tokens:
        raise BadCase(f"x must have prefill {prompt} + steps {steps} tokens, has {tokens}")
    cache = Cache(config, batch, batch * tokens)
    for _ in range(batch):
        cache.open()
    rings, outputs = {}, []
    for taken, (start, end) in enumerate([(0, prompt), *((at, at + 1) for at in range(prompt, tokens))]):
        step = cache.step((slot, [0] * (end - start)) for slot in range(batch))
        cache.admit(step)
        y, _ = attention(x[:, start:end].flatten(0, 1), step, Sight(), cache)
        cache.extend(step)
        outputs.append(y.unflatten(0, (batch, -1)))
        for what in case.matching("ring_"):
            if taken == _steps_before(what, steps):
                rings[what] = recent(cache, attention.layer, batch), in_ring_order(case[what], end, config.window_size)
    sheet.compare("y", torch.cat(outputs, 1), case["y"], bounds(case.tolerance, "y", otherwise=Y))
    sheet.compare_all(rings, bounds(case.tolerance, "ring", otherwise=RING))


def _steps_before(what: str, steps: int) -> int:
    """After how many single steps a ring was recorded: ring_after_prefill, ring_after_step<n>, ring_end."""
    if what in ("ring_after_prefill", "ring_end"):
        return 0 if what == "ring_after_prefill" else steps
    found = re.fullmatch(r"ring_after_step(\d{1,9})", what)
    if not found or int(found[1]) > steps:
        raise BadCase(f"{what}: must be ring_after_prefill, ring_after_step1 to {steps}, or ring_end")
    return int(found[1])


def recent(cache: Cache, layer: int, batch: int) -> Tensor:
    """The window of every slot [b, rows, d], oldest first."""
    return torch.stack([cache.view("window", layer, slot) for slot in range(batch)])


def in_ring_order(ring: Tensor, length: int, window: int) -> Tensor:
    """The last `window` of `length` positions, in order, of a published ring: position p in slot p mod window."""
    if ring.dim() != 3 or ring.shape[1] != window:
        raise BadCase(f"a ring must be [b, {window}, d], got {list(ring.shape)}")
    return ring[:, torch.arange(max(0, length - window), length) % window]
