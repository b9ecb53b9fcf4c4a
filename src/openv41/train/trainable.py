"""The model as it is trained, and the way from there to the published formats and back.

`build` makes the module tree of `model/` with float masters in place of codes and scales; `published` gives the tensors
of a checkpoint: rounded to bf16, packed to fp8 and fp4, as the configuration says.
"""

import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.config import Config
from openv41.formats import FP4_ROWS, FP8_ROWS, FP8_TILES
from openv41.model.masters import make_masters
from openv41.model.streams import HyperConnection
from openv41.model.transformer import Transformer
from openv41.ops import Ops
from openv41.weights.load import Checkpoint, load_into
from openv41.weights.names import Spec, place
from openv41.weights.write import Source


def build(config: Config, ops: Ops, seed: int, start: str | Path | None = None) -> Transformer:
    """The model of a configuration with float32 masters: of the model folder `start`, or random ones.

    One stream (`hc_mult` 1) is a plain residual network: there is nothing to mix, so every sublayer is added to the one
    stream, which it reads as it is, and its hyper-connections are no parameters that a run would move.

    The token map is left for the caller. Raises `CheckpointError` when the folder is not of this configuration.
    """
    model = Transformer(config, ops)
    if start is not None:
        load_into(model, Checkpoint.open(start))
    make_masters(model, ops)
    if start is None:
        initialise(model, seed)
    model.requires_grad_()
    for part in model.modules():
        if isinstance(part, HyperConnection) and config.hc_mult == 1:
            part.requires_grad_(False)
    return model


# Weights to start from


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Random weights that keep activations near 1. A parameter's values depend on the seed and its name alone.

    The run starts as a plain residual network: every sublayer reads the mean of the streams and adds to all of them
    alike, n-gram memory and Markov head add nothing yet, and all tokens are about equally likely.
    """
    config = model.config
    depth = (2 * config.n_layers) ** -0.5
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if leaf == "fn" and config.hc_mult == 1:
            value = torch.zeros_like(noise)
        elif leaf == "base":
            value = _even_mix(config.hc_mult)
        elif leaf == "scale":
            value = torch.full_like(noise, 0.1)
        elif name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "q_weight", "k_weight")):
            value = torch.ones_like(noise)
        elif name.endswith(("bias", "bias_vl", "attn_sink", "markov_head.head.weight", "confidence_head.proj.weight")):
            value = torch.zeros_like(noise)
        elif name.endswith("embed.weight") or parameter.dim() == 1:  # embeddings, tables, image delimiters
            value = noise
        elif name == "head.weight":
            value = noise / parameter.shape[-1]
        else:
            value = noise * parameter.shape[-1] ** -0.5
        if name.endswith(("wo_b.weight", "ffn.experts.w2.weight", "shared_experts.w2.weight")):
            value = value * depth
        if name.endswith("engram.wkv.weight"):
            value[config.hc_mult * config.dim :] = 0
        parameter.copy_(value)


def _even_mix(m: int) -> Float[Tensor, "mixes"]:
    """The constant part of a sublayer's mixes: read the mean of the streams, write 1 to each, carry each over."""
    read = torch.full((m,), -math.log(m - 1) if m > 1 else 6.0)
    return torch.cat((read, torch.zeros(m), 6 * torch.eye(m).flatten()))


# The published form


def published(model: Transformer) -> Source:
    """The tensors of a checkpoint, one at a time: the trained weights in the types that each tensor's `Spec` says."""
    return published_of(dict(model.named_parameters(remove_duplicate=False)))


def published_of(parameters: Mapping[str, Tensor]) -> Source:
    """The same, of a model's parameters by name."""
    latest: tuple[str, tuple[Tensor, Tensor]] | None = None

    def value(name: str) -> Tensor:
        where = place(name)
        whole = parameters[where.parameter].detach()
        return (whole if where.index is None else whole[where.index]).float().cpu()

    def packed(name: str, spec: Spec) -> tuple[Tensor, Tensor]:
        if name.endswith("engram.embed.weight"):
            return FP8_ROWS.pack(value(name))
        if spec.dtype == "I8":
            codes, scale = FP4_ROWS.pack(value(name))
            return codes.view(torch.int8), scale
        return FP8_TILES.pack(value(name))

    def tensor(name: str, spec: Spec) -> Tensor:
        nonlocal latest
        if spec.dtype in ("F8_E4M3", "I8"):
            latest = name.removesuffix("weight"), packed(name, spec)
            return latest[1][0]
        if spec.dtype == "F8_E8M0":
            assert latest is not None and latest[0] == name.removesuffix("scale"), "a scale follows its weight"
            return latest[1][1]
        return value(name).to(torch.bfloat16) if spec.dtype == "BF16" else value(name)

    return tensor
