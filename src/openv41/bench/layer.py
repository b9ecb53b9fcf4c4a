"""One attention layer with seeded weights, and steps of it with all that they read; what it holds, what it computes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openv41.config import Config
from openv41.formats import INDEX, LATENT, WINDOW
from openv41.model.attention import Attention
from openv41.model.layers import Linear
from openv41.ops.cpu import CpuOps
from openv41.parity.recipe import make
from openv41.plan import plan_layers
from openv41.state import Cache, Sight, Step

ROOT3 = 3**0.5
"""A number drawn evenly from (-1, 1), times this, has variance 1."""


@dataclass(frozen=True)
class Work:
    """One step of one layer, with all that it reads. It may be run again: it writes the same rows each time."""

    x: Tensor
    step: Step
    sight: Sight
    cache: Cache

    def __call__(self, layer: Attention) -> tuple[Tensor, Sight]:
        return layer(self.x, self.step, self.sight, self.cache)


def work(layer: Attention, config: Config, x: Tensor, start: int) -> Work:
    """The tokens of `x`, from position `start` on, after the layer's source has made everything up to the last one."""
    plan = plan_layers(config)
    source = plan[layer.layer].latents_from
    assert source is not None
    end = start + len(x)
    cache = Cache(config, 1, end, layers=[plan[source], plan[layer.layer]])
    slot = cache.open()
    known = Step.pack([(slot, 0, [0] * end)])
    cache.admit(known)
    state = cache.sources[source]
    visible = end // plan[source].ratio
    state.latents.put(slot, LATENT.round(values("latents", visible, config.head_dim)))
    state.keys.put(slot, INDEX.round(values("keys", visible, config.index_head_dim)))
    if start:
        past = Step.pack([(slot, 0, [0] * start)])
        cache.extend(past)
        first = max(0, start - config.window_size)
        cache.windows[layer.layer].put(slot, start, WINDOW.round(values("window", start, config.head_dim)[first:]))
    step = cache.step([(slot, [0] * len(x))])
    seen = step.visible(plan[source].ratio).unsqueeze(1)
    block = config.candidate_block_size
    candidates = torch.arange(-(-visible // block)) * block < seen  # while there are fewer blocks than are kept
    if candidates.shape[1] > config.candidate_topk_blocks:  # then others would be kept: the newest stand for them
        newest = (seen - 1) // block - config.candidate_topk_blocks
        candidates &= torch.arange(candidates.shape[1]) > newest
    return Work(x, step, Sight(state.latents, state.keys, candidates=candidates), cache)


def continued(layer: Attention, config: Config, x: Tensor, start: int) -> Work:
    """The tokens of a prompt `x` from `start` on, the window before them being what the layer itself makes of them."""
    piece = work(layer, config, x[start:], start)
    first = max(0, start - config.window_size)
    if start:
        before = Step.pack([(0, first, [0] * (start - first))])
        layer.window(x[first:start], before, piece.cache.windows[layer.layer])
    return piece


def values(name: str, rows: int, width: int) -> Tensor:
    """Seeded bf16 rows of variance 1; more rows begin with the same ones."""
    value, _ = make({"name": f"bench.{name}", "kind": "bf16", "shape": [rows, width], "amplitude": ROOT3})
    return value


def fill(layer: Attention) -> None:
    """Seeded weights, of a size that keeps activations near 1."""
    for name, parameter in layer.named_parameters():
        if name.endswith(".scale"):
            continue  # filled with its weight
        value, scale = make({"name": f"layers.{layer.layer}.attn.{name}", **_recipe(parameter)})
        parameter.copy_(value)
        if scale is not None:
            layer.get_parameter(name.removesuffix("weight") + "scale").copy_(scale)


def _recipe(parameter: Tensor) -> dict[str, object]:
    inputs, shape = parameter.shape[-1], list(parameter.shape)
    if parameter.dtype == torch.float8_e4m3fn:
        exponent = round(-torch.tensor(256 / ROOT3 * inputs**0.5).log2().item())
        return {"kind": "fp8", "shape": shape, "exponent": exponent}
    if parameter.dim() == 2:
        return {"kind": "bf16", "shape": shape, "amplitude": ROOT3 * inputs**-0.5}
    if parameter.dtype == torch.bfloat16:  # a norm's
        return {"kind": "bf16", "shape": shape, "amplitude": 0.2, "offset": 1.0}
    return {"kind": "fp32", "shape": shape, "amplitude": 1.0}


def twin(layer: Attention, config: Config, ops: Any) -> Attention:
    """The same layer, sharing its weights, with other operations, or what stands in for some."""
    other = Attention(config, layer.layer, ops)
    other.load_state_dict(layer.state_dict(), assign=True)
    return other


def held_tensors(layer: Attention) -> Iterator[Tensor]:
    """The layer's parameters in the form that its operations keep: dequantised once, or as they are stored."""
    ops = layer.ops
    kept: set[int] = set()
    if isinstance(ops, CpuOps) and ops.caches:
        for module in layer.modules():
            if isinstance(module, Linear):
                kept |= {id(module.weight), id(module.scale)}
                yield ops.values(module.weight, module.scale)
    yield from (parameter for parameter in layer.parameters() if id(parameter) not in kept)


def operations(layer: Attention, step: Step, picks: Tensor, config: Config) -> dict[str, float]:
    """Operations of one step, counted: a multiplication and an addition are two. Elementwise work is left out.

    Projections: every weight of a linear map, for every token. Index: a product a head with the key of every visible
    position. Attention: a product and a weighted sum a head for every row that a token really has, -1 not counted.
    """
    weights = sum(module.weight.numel() for module in layer.modules() if isinstance(module, Linear))
    visible = int(step.visible(layer.plan.ratio).sum())
    rows = int((step.window(layer.window_size) >= 0).sum()) + int((picks >= 0).sum())
    return {
        "projections": 2.0 * weights * len(step),
        "index": 2.0 * config.index_n_heads * config.index_head_dim * visible,
        "attention": 4.0 * config.n_heads * config.head_dim * rows,
    }
