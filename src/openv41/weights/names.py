"""The released checkpoint as one table, derived from a configuration: every tensor's name, shape, type and file.

Published names are the parameter names of our module tree, but for two differences that `place` knows: the routed
experts of a layer are stacked into one parameter, and the mixes of a sublayer's streams have a module of their own.

Source: the headers of the released shards; inference/convert.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from openv41.config import QUANT_BLOCK, Config

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
"""The types a checkpoint holds, by their names in the files, with their sizes. I8 is two fp4 codes a byte."""


class Spec(NamedTuple):
    """What the files say about a tensor: its shape as stored, and its type by the name that the files use."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class Place:
    """Where a published tensor belongs: a parameter's path, and the row of it when the parameter stacks experts."""

    parameter: str
    index: int | None = None


Named = Iterator[tuple[str, Spec]]


def published_tensors(config: Config) -> dict[str, Spec]:
    """Every tensor that a checkpoint of this configuration holds, file by file in the order of the release."""
    return {name: spec for shard in _shards(config) for name, spec in shard}


def shard_of(config: Config) -> dict[str, str]:
    """The file that holds each tensor.

    One file for vision and aligner, one for the embedding and the image delimiters, one a layer, one for head and
    norm, one a draft stage, one an Engram: 48 in the release.
    """
    shards = [[name for name, _ in shard] for shard in _shards(config)]
    return {
        name: f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, names in enumerate(shards, 1)
        for name in names
    }


_EXPERT = re.compile(r"((?:layers|mtp)\.\d+\.ffn\.experts\.)(\d+)\.(w[123]\.(?:weight|scale))")
_STREAMS = re.compile(r"((?:layers|mtp)\.\d+\.hc_(?:attn|ffn))_(fn|base|scale)")


def place(name: str) -> Place:
    """Where the tensor published as `name` belongs in the module tree."""
    if found := _EXPERT.fullmatch(name):
        return Place(found[1] + found[3], int(found[2]))
    if found := _STREAMS.fullmatch(name):
        return Place(f"{found[1]}.{found[2]}")
    return Place(name)


# Files


def _shards(config: Config) -> Iterator[Named]:
    if config.vision_n_layers:
        yield _vision(config)
    yield _entrance(config)
    for layer in range(config.n_layers):
        yield _layer(config, layer)
    yield _exit(config)
    for stage in range(config.n_mtp_layers):
        yield _draft(config, stage)
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=False):
        yield _engram(config, f"layers.{layer}.engram", rows)


def _entrance(config: Config) -> Named:
    yield _bf16("embed.weight", config.vocab_size, config.dim)
    if config.vision_n_layers:
        for delimiter in ("image_start", "image_newline", "image_end"):
            yield _bf16(delimiter, config.dim)


def _exit(config: Config) -> Named:
    yield _bf16("norm.weight", config.dim)
    yield _bf16("head.weight", config.vocab_size, config.dim)


def _layer(config: Config, layer: int) -> Named:
    prefix = f"layers.{layer}"
    yield from _attention(config, f"{prefix}.attn")
    if layer in config.kv_source_layers:
        yield from _compressor(config, f"{prefix}.attn.compressor", config.compress_ratios[layer])
    if layer in config.index_source_layers:
        yield from _indexer(config, f"{prefix}.attn.indexer", keys=layer in config.kv_source_layers)
    yield from _block(config, prefix, config.n_routed_experts)


def _draft(config: Config, stage: int) -> Named:
    prefix = f"mtp.{stage}"
    if stage == 0:
        yield from _linear(config, f"{prefix}.main_proj", config.dim, len(config.dspark_target_layer_ids) * config.dim)
        yield _bf16(f"{prefix}.main_norm.weight", config.dim)
    yield from _attention(config, f"{prefix}.attn")
    yield from _block(config, prefix, config.dspark_n_routed_experts or config.n_routed_experts)
    if stage == config.n_mtp_layers - 1:
        rank = config.dspark_markov_rank
        yield _bf16(f"{prefix}.norm.weight", config.dim)
        yield _bf16(f"{prefix}.markov_head.embed.weight", config.vocab_size, rank)
        yield _bf16(f"{prefix}.markov_head.head.weight", config.vocab_size, rank)
        yield _bf16(f"{prefix}.confidence_head.proj.weight", 1, config.dim + rank)


# Parts of a layer


def _block(config: Config, prefix: str, experts: int) -> Named:
    """What every layer and draft stage has besides its attention."""
    yield _bf16(f"{prefix}.attn_norm.weight", config.dim)
    yield _bf16(f"{prefix}.ffn_norm.weight", config.dim)
    streams = config.hc_mult
    mixes = (2 + streams) * streams
    for sublayer in ("hc_attn", "hc_ffn"):
        yield _f32(f"{prefix}.{sublayer}_fn", mixes, streams * config.dim)
        yield _f32(f"{prefix}.{sublayer}_base", mixes)
        yield _f32(f"{prefix}.{sublayer}_scale", 3)
    yield _bf16(f"{prefix}.ffn.gate.weight", experts, config.dim)
    yield _f32(f"{prefix}.ffn.gate.bias", experts)
    if config.vision_n_layers:
        yield _f32(f"{prefix}.ffn.gate.bias_vl", experts)
    for expert in range(experts):
        yield from _expert(config, f"{prefix}.ffn.experts.{expert}", routed=True)
    if config.n_shared_experts:
        yield from _expert(config, f"{prefix}.ffn.shared_experts", routed=False)


def _expert(config: Config, prefix: str, routed: bool) -> Named:
    linear = _fp4 if routed and config.expert_dtype == "fp4" else _linear
    yield from linear(config, f"{prefix}.w1", config.moe_inter_dim, config.dim)
    yield from linear(config, f"{prefix}.w2", config.dim, config.moe_inter_dim)
    yield from linear(config, f"{prefix}.w3", config.moe_inter_dim, config.dim)


def _attention(config: Config, prefix: str) -> Named:
    heads = config.n_heads * config.head_dim
    low_rank = config.o_groups * config.o_lora_rank
    yield from _linear(config, f"{prefix}.wq_a", config.q_lora_rank, config.dim)
    yield _bf16(f"{prefix}.q_norm.weight", config.q_lora_rank)
    yield from _linear(config, f"{prefix}.wq_b", heads, config.q_lora_rank)
    yield from _linear(config, f"{prefix}.wkv", config.head_dim, config.dim)
    yield _bf16(f"{prefix}.kv_norm.weight", config.head_dim)
    yield from _linear(config, f"{prefix}.wo_a", low_rank, heads // config.o_groups)
    yield from _linear(config, f"{prefix}.wo_b", config.dim, low_rank)
    yield _f32(f"{prefix}.attn_sink", config.n_heads)


def _compressor(config: Config, prefix: str, ratio: int) -> Named:
    yield _bf16(f"{prefix}.wkv.weight", config.head_dim, config.dim)
    if ratio > 1:
        yield _bf16(f"{prefix}.wgate.weight", config.head_dim, config.dim)
    yield _bf16(f"{prefix}.norm.weight", config.head_dim)


def _indexer(config: Config, prefix: str, keys: bool) -> Named:
    if keys:
        yield _bf16(f"{prefix}.wk.weight", config.index_head_dim, config.head_dim)
        yield _bf16(f"{prefix}.k_norm.weight", config.index_head_dim)
    yield from _linear(config, f"{prefix}.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
    yield _bf16(f"{prefix}.weights_proj.weight", config.index_n_heads, config.dim)


def _engram(config: Config, prefix: str, rows: int) -> Named:
    """The table is fp8 in every configuration, with a scale for 32 channels of a row."""
    width = config.engram_head_dim
    looked_up = (config.engram_max_ngram_size - 1) * config.engram_n_heads * width
    yield f"{prefix}.embed.weight", Spec((rows, width), "F8_E4M3")
    yield f"{prefix}.embed.scale", Spec((rows, width // QUANT_BLOCK), "F8_E8M0")
    yield from _linear(config, f"{prefix}.wkv", (config.hc_mult + 1) * config.dim, looked_up)
    yield _bf16(f"{prefix}.q_weight", config.hc_mult, config.dim)
    yield _bf16(f"{prefix}.k_weight", config.hc_mult, config.dim)


def _vision(config: Config) -> Named:
    width, inner = config.vision_dim, config.vision_inter_dim
    yield _bf16("vision.patch_embed.proj.weight", width, 3 * config.vision_patch_size**2)
    yield _bf16("vision.patch_embed.proj.bias", width)
    for block in range(config.vision_n_layers):
        prefix = f"vision.blocks.{block}"
        yield _bf16(f"{prefix}.norm1.weight", width)
        yield _bf16(f"{prefix}.attn.wqkv.weight", 3 * width, width)
        yield _bf16(f"{prefix}.attn.wqkv.bias", 3 * width)
        yield _bf16(f"{prefix}.attn.wo.weight", width, width)
        yield _bf16(f"{prefix}.attn.wo.bias", width)
        yield _bf16(f"{prefix}.norm2.weight", width)
        yield _bf16(f"{prefix}.mlp.w1.weight", 2 * inner, width)
        yield _bf16(f"{prefix}.mlp.w2.weight", width, inner)
    yield _bf16("vision.norm.weight", width)
    yield _bf16("aligner.w1.weight", config.dim, width * config.vision_downsample_ratio**2)
    yield _bf16("aligner.w1.bias", config.dim)
    yield _bf16("aligner.w2.weight", config.dim, config.dim)
    yield _bf16("aligner.w2.bias", config.dim)


# Formats


def _bf16(name: str, *shape: int) -> tuple[str, Spec]:
    return name, Spec(shape, "BF16")


def _f32(name: str, *shape: int) -> tuple[str, Spec]:
    return name, Spec(shape, "F32")


def _linear(config: Config, prefix: str, outputs: int, inputs: int) -> Named:
    """A weight in the configuration's own storage: fp8 with a scale a tile, or bf16."""
    if config.dtype == "bf16":
        yield _bf16(f"{prefix}.weight", outputs, inputs)
        return
    yield f"{prefix}.weight", Spec((outputs, inputs), "F8_E4M3")
    yield f"{prefix}.scale", Spec((-(-outputs // QUANT_BLOCK), -(-inputs // QUANT_BLOCK)), "F8_E8M0")


def _fp4(config: Config, prefix: str, outputs: int, inputs: int) -> Named:
    """Two codes a byte, and a scale for every 32 inputs of a row."""
    yield f"{prefix}.weight", Spec((outputs, inputs // 2), "I8")
    yield f"{prefix}.scale", Spec((outputs, inputs // QUANT_BLOCK), "F8_E8M0")
