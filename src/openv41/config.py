"""The numbers of one model: 64 fields, two published spellings, every rule that joins them.

`Config.from_json` reads the flat inference file and the nested Hugging Face file; the two published files give equal
objects. Nothing here has a default: a key that is missing is an error, and so is a key that nobody knows.

Reading order: the fields, the ways to make a `Config`, the n-gram primes, types and ranges, the rules that join two
fields (part by part), the two file forms.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import reprlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from openv41.errors import ConfigError

CONTEXT_WITHOUT_YARN = 1_048_576  # tokens; with original_seq_len 0 no length is stated, so the released one holds
QUANT_BLOCK = 32  # inputs that share one scale, in fp8 and in the fp4 of experts and index keys
LARGEST_INT = 2**31 - 1  # rows and ids are 32-bit
LARGEST_FLOAT = 3.4e38  # the model computes in float32


@dataclass(frozen=True)
class Config:
    """The shape of a model, under the names of the published inference file.

    A part is off when its number is 0 (`candidate_source_layer`: -1, `engram_layer_ids`: empty); the rules of a part
    that is off are not checked. Raises `ConfigError` when a value has the wrong type, is out of range or contradicts
    another.
    """

    # Width and depth
    vocab_size: int
    dim: int  # width of one stream
    n_layers: int  # backbone
    norm_eps: float
    # Attention
    n_heads: int
    head_dim: int  # of queries, keys and values; a key is its own value
    rope_head_dim: int  # the rotated tail of a head
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int  # of one group
    window_size: int  # tokens that a layer sees of its own, the present one included
    # The far part
    compress_ratios: tuple[int, ...]  # tokens per latent, one number per layer and draft stage; 0: window alone
    kv_source_layers: tuple[int, ...]  # make latents and index keys
    index_source_layers: tuple[int, ...]  # make picks
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer: int  # -1: no candidate blocks
    candidate_topk_blocks: int
    candidate_block_size: int
    # Rotary positions
    rope_theta: float  # of layers with a window alone
    compress_rope_theta: float  # of layers with a far part
    original_seq_len: int  # 0: no YaRN
    rope_factor: float
    beta_fast: float
    beta_slow: float
    # Experts
    moe_inter_dim: int  # inner width of every expert
    n_routed_experts: int
    n_activated_experts: int
    n_shared_experts: int  # 0 or 1
    score_func: str
    route_scale: float
    swiglu_limit: float  # 0: no clamp
    # Streams (hyper-connections)
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    # N-gram memory (Engram)
    engram_layer_ids: tuple[int, ...]  # empty: no memory
    engram_max_ngram_size: int
    engram_n_heads: int  # hashes per n-gram size
    engram_head_dim: int  # values per row
    engram_vocab_size: int  # the primes of the hash start here
    engram_num_embeddings: tuple[int, ...]  # rows, one number per layer of engram_layer_ids
    engram_compressed_vocab_size: int  # distinct entries of the token map
    engram_pad_id: int
    # Draft (DSpark)
    n_mtp_layers: int  # stages, numbered after the backbone; 0: no draft
    dspark_block_size: int  # tokens proposed at once
    dspark_noise_token_id: int  # fills the places to be proposed
    dspark_target_layer_ids: tuple[int, ...]  # the draft reads the streams that enter these layers
    dspark_markov_rank: int
    dspark_n_routed_experts: int  # 0: as many as in the backbone
    dspark_n_activated_experts: int  # 0: as many as in the backbone
    # Vision
    vision_n_layers: int  # 0: no images
    vision_dim: int
    vision_n_heads: int
    vision_inter_dim: int
    vision_rope_theta: float
    vision_patch_size: int
    vision_downsample_ratio: int
    vision_max_n_token: int
    vision_min_pixels: int
    vision_max_wh_ratio: float | None  # None: any shape
    image_token_id: int
    # Storage
    dtype: str  # of linear weights; "bf16" also means activations that are not quantised
    expert_dtype: str | None  # None: as dtype

    def __post_init__(self) -> None:
        for key, value in _typed_fields(vars(self)).items():
            object.__setattr__(self, key, value)
        for check in CHECKS:
            check(self)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Config:
        """Read a published file in either form: nested (`text_config`, ...) or flat."""
        return _read_file(path)[0]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build from exactly the 64 keys of the flat form."""
        _require_keys(values, KEYS)
        return cls(**_typed_fields(values))

    # fmt: off
    @classmethod
    def released(cls) -> Config:
        """DeepSeek-V4.1-Flash as published."""
        return cls.from_dict(dict(
            vocab_size=129280, dim=5120, moe_inter_dim=2304, n_layers=40, n_mtp_layers=3,
            dspark_block_size=5, dspark_noise_token_id=128799, dspark_target_layer_ids=(37, 38, 39),
            dspark_markov_rank=256, dspark_n_routed_experts=128, dspark_n_activated_experts=3,
            n_heads=64, n_routed_experts=384, n_shared_experts=1, n_activated_experts=6,
            score_func="sqrtsoftplus", route_scale=1.5, swiglu_limit=10.0,
            q_lora_rank=1280, head_dim=512, rope_head_dim=64, norm_eps=1e-20, o_groups=8, o_lora_rank=1024,
            window_size=128, kv_source_layers=(2, 8, 14, 20), index_source_layers=(2, 8, 14, 20, 24, 28, 32, 36),
            original_seq_len=65536, rope_theta=10000, rope_factor=16, beta_fast=32, beta_slow=1,
            index_n_heads=32, index_head_dim=128, index_topk=512,
            candidate_source_layer=20, candidate_topk_blocks=2048, candidate_block_size=8,
            hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
            engram_layer_ids=(1, 14), engram_vocab_size=16_000_000, engram_num_embeddings=(384006168, 384016682),
            engram_max_ngram_size=4, engram_pad_id=2, engram_compressed_vocab_size=99092,
            engram_n_heads=8, engram_head_dim=256,
            dtype="fp8", expert_dtype="fp4",
            compress_rope_theta=160000, compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
            vision_n_layers=32, vision_dim=1024, vision_n_heads=16, vision_inter_dim=2816, vision_patch_size=14,
            vision_downsample_ratio=3, vision_max_n_token=1024, vision_min_pixels=295936, vision_max_wh_ratio=None,
            vision_rope_theta=10000, image_token_id=129264,
        ))

    @classmethod
    def tiny(cls, compressed_vocab: int = 1024) -> Config:
        """The demo model: every part and every role of the released one, small enough for a laptop.

        `compressed_vocab` is the number of distinct entries in the token map of the tokenizer that goes with it.
        """
        return cls.released().replace(
            vocab_size=1024, dim=128, moe_inter_dim=64, n_layers=8, n_mtp_layers=3,
            compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0),
            kv_source_layers=(2, 4), index_source_layers=(2, 4, 6), candidate_source_layer=4,
            n_heads=4, head_dim=64, rope_head_dim=16, q_lora_rank=64, o_groups=2, o_lora_rank=32, window_size=16,
            index_n_heads=4, index_head_dim=32, index_topk=16, candidate_topk_blocks=8, candidate_block_size=4,
            n_routed_experts=8, n_activated_experts=2, original_seq_len=512,
            engram_layer_ids=(1, 2), engram_n_heads=2, engram_head_dim=32, engram_vocab_size=500,
            engram_compressed_vocab_size=compressed_vocab,
            engram_num_embeddings=[sum(map(sum, layer)) for layer in engram_primes(2, 3, 2, 500)],
            vision_n_layers=2, vision_dim=64, vision_n_heads=2, vision_inter_dim=96, image_token_id=1023,
            dspark_target_layer_ids=(5, 6, 7), dspark_markov_rank=32, dspark_noise_token_id=1022,
            dspark_n_routed_experts=4, dspark_n_activated_experts=1,
        )
    # fmt: on

    def replace(self, **changes: Any) -> Config:
        """The same model with some fields changed, checked again as a whole."""
        return Config.from_dict({**self.to_dict(), **changes})

    @property
    def context(self) -> int:
        """Tokens that the rotary positions reach; without YaRN no length is stated and the released one holds."""
        return int(self.original_seq_len * self.rope_factor) if self.original_seq_len else CONTEXT_WITHOUT_YARN

    def to_dict(self) -> dict[str, Any]:
        """The flat form, ready for JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def to_hf(self, special: SpecialIds) -> dict[str, Any]:
        """The nested form, ready for JSON. It can say fp8 only: a bf16 model raises `ConfigError`."""
        _require(self.dtype == "fp8", "dtype", self.dtype, "be 'fp8' in the nested form", "write the flat form instead")
        _check_special(self, special)
        values = {HF_SPELLING[key]: value for key, value in self.to_dict().items()}
        values |= HF_FIXED | HF_WRITTEN | {spelled: getattr(special, name) for name, spelled in HF_SPECIAL.items()}
        values[HF_CONTEXT] = self.context
        nested: dict[str, Any] = {}
        for spelled, value in values.items():
            *sections, key = spelled.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = list(value) if isinstance(value, list) else value
        return nested


@dataclass(frozen=True)
class SpecialIds:
    """The ids that begin, end and fill a text. Only the nested file states them."""

    bos: int
    eos: int
    pad: int

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> SpecialIds:
        """Read them from the nested file, which is checked as a whole."""
        special = _read_file(path)[1]
        if special is None:
            keys = ", ".join(HF_SPECIAL.values())
            raise ConfigError(f"{path}: {keys} must be stated, but the flat form has none; read the nested file")
        return special


KEYS = tuple(field.name for field in fields(Config))


# The n-gram primes ----------------------------------------------------------------------------------------------------


@lru_cache
def engram_primes(layers: int, sizes: int, heads: int, base: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The moduli of the n-gram hash, by layer, n-gram size (2 first) and head.

    Each is the next prime from `base` on that the whole model has not used yet. A layer's table has as many rows as
    its primes add up to.
    """
    primes = _primes_from(base)
    return tuple(tuple(tuple(next(primes) for _ in range(heads)) for _ in range(sizes)) for _ in range(layers))


def _primes_from(number: int) -> Iterator[int]:
    number = max(number, 2)
    while True:
        if number == 2 or number % 2 and all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2)):
            yield number
        number += 1


# Types and ranges -----------------------------------------------------------------------------------------------------

KINDS = {
    "int": "a whole number",
    "float": "a finite number",
    "str": "a text",
    "bool": "true or false",
    "tuple[int, ...]": "a list of whole numbers",
}


def _require(holds: bool, key: str, value: object, rule: str, way_out: str) -> None:
    """Every complaint begins with the key, so that a reader of the nested form can be told its spelling there."""
    if not holds:
        raise ConfigError(f"{key} must {rule}, got {reprlib.repr(value)}; {way_out}")


def _typed(key: str, kind: str, value: Any) -> Any:
    """The value in its one spelling: tuples for lists, 10000.0 for 10000 where a fraction may stand. True is none."""
    if value is None and kind.endswith("| None"):
        return None
    kind = kind.removesuffix(" | None")
    if kind in ("int", "str", "bool") and type(value).__name__ == kind:
        return value
    if kind == "float" and type(value) in (int, float) and abs(value) <= LARGEST_FLOAT:  # false for NaN
        return float(value)
    if kind == "tuple[int, ...]" and type(value) in (list, tuple) and all(type(item) is int for item in value):
        return tuple(value)
    raise ConfigError(f"{key} must be {KINDS[kind]}, got {reprlib.repr(value)}; write it as the published file does")


def _typed_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: _typed(field.name, str(field.type), values[field.name]) for field in fields(Config)}


def _check_ranges(config: Config) -> None:
    for key, value in config.to_dict().items():
        lowest = -1 if key == "candidate_source_layer" else 0
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int):
                rule = f"lie in {lowest} to {LARGEST_INT}"
                _require(lowest <= number <= LARGEST_INT, key, value, rule, "correct the number")
    _at_least_one(config, "vocab_size dim moe_inter_dim n_layers n_heads n_routed_experts n_activated_experts")
    _at_least_one(config, "q_lora_rank head_dim rope_head_dim o_groups o_lora_rank window_size")
    _at_least_one(config, "hc_mult hc_sinkhorn_iters")
    for key in ("norm_eps", "hc_eps", "route_scale"):
        _require(getattr(config, key) > 0, key, getattr(config, key), "be above 0", "give a positive number")
    limit = config.swiglu_limit
    _require(limit >= 0, "swiglu_limit", limit, "be at least 0", "give 0 for no clamp")
    one_of = {
        "score_func": ("sqrtsoftplus", "sigmoid", "softmax"),
        "dtype": ("fp8", "bf16"),
        "expert_dtype": ("fp4", None),
    }
    for key, choices in one_of.items():
        value = getattr(config, key)
        _require(value in choices, key, value, f"be one of {choices}", "choose one of these")


def _at_least_one(config: Config, keys: str, part: str = "") -> None:
    way_out = f"raise it, or switch off {part}" if part else "raise it"
    for key in keys.split():
        _require(getattr(config, key) >= 1, key, getattr(config, key), "be at least 1", way_out)


# The rules that join two fields, part by part -------------------------------------------------------------------------


def _check_widths(config: Config) -> None:
    heads, groups = config.n_heads, config.o_groups
    _require(heads % groups == 0, "o_groups", groups, f"divide n_heads ({heads})", "choose a divisor")
    # The window and the latents are quantised in every dtype; 32 also serves the latents' blocks of 16. The input of
    # an output group is whole heads, so it needs no rule of its own.
    widths = {"head_dim": config.head_dim}
    if config.index_source_layers:
        widths["index_head_dim"] = config.index_head_dim
    if config.engram_layer_ids:
        widths["engram_head_dim"] = config.engram_head_dim
    if config.dtype == "fp8" or config.expert_dtype == "fp4":
        widths |= {"dim": config.dim, "moe_inter_dim": config.moe_inter_dim}
    if config.dtype == "fp8":
        widths["q_lora_rank"] = config.q_lora_rank
    for key, width in widths.items():
        rule = f"be a multiple of {QUANT_BLOCK} (inputs that share one scale)"
        _require(width % QUANT_BLOCK == 0, key, width, rule, f"try {-(-width // QUANT_BLOCK) * QUANT_BLOCK}")
    if config.dtype == "fp8":
        width, rule = groups * config.o_lora_rank, f"give a multiple of {QUANT_BLOCK} when multiplied by o_groups"
        _require(width % QUANT_BLOCK == 0, "o_lora_rank", f"{config.o_lora_rank} x {groups}", rule, "raise it")


def _check_rotary(config: Config) -> None:
    tail = config.rope_head_dim
    _require(tail % 2 == 0, "rope_head_dim", tail, "be even: entries turn in pairs", "add or take one")
    heads = {"head_dim": config.head_dim}
    if config.index_source_layers:
        heads["index_head_dim"] = config.index_head_dim
    for key, width in heads.items():
        _require(tail <= width, "rope_head_dim", tail, f"be at most {key} ({width})", f"lower it, or raise {key}")
    thetas = ["rope_theta", "compress_rope_theta"] + ["vision_rope_theta"] * (config.vision_n_layers > 0)
    for key in thetas:
        _require(getattr(config, key) > 1, key, getattr(config, key), "be above 1", "published: 10000 or 160000")
    if config.original_seq_len:
        fast, slow, factor = config.beta_fast, config.beta_slow, config.rope_factor
        _require(factor >= 1, "rope_factor", factor, "be at least 1", "or give original_seq_len 0 for no YaRN")
        rule = f"give a whole number of tokens when multiplied by original_seq_len ({config.original_seq_len})"
        length = config.original_seq_len * factor
        _require(length.is_integer(), "rope_factor", factor, rule, "choose a whole number")
        _require(length <= LARGEST_INT, "rope_factor", factor, f"keep the context within {LARGEST_INT}", "lower it")
        _require(slow > 0, "beta_slow", slow, "be above 0", "published: 1")
        _require(fast > slow, "beta_fast", fast, f"be above beta_slow ({slow})", "published: 32")


def _check_sources(config: Config) -> None:
    ratios, layers, total = config.compress_ratios, config.n_layers, config.n_layers + config.n_mtp_layers
    rule = f"have one entry per layer (n_layers {layers} + n_mtp_layers {config.n_mtp_layers} = {total})"
    _require(len(ratios) == total, "compress_ratios", len(ratios), rule, "add or remove entries")
    drafts = ratios[layers:]
    _require(not any(drafts), "compress_ratios", drafts, "be 0 for draft stages", "they see a window alone: write 0")
    for key in ("kv_source_layers", "index_source_layers"):
        _layer_list(config, key)
        for layer in getattr(config, key):
            rule = f"name layers whose ratio is above 0 (compress_ratios[{layer}] is 0)"
            _require(ratios[layer] > 0, key, layer, rule, "remove the layer or give it a ratio")
    for layer in config.kv_source_layers:
        rule = "hold every layer of kv_source_layers: the maker of latents owns the index keys"
        holders = config.index_source_layers
        _require(layer in holders, "index_source_layers", holders, rule, f"add {layer}")
    for layer, ratio in enumerate(ratios):
        if ratio:
            _check_far_layer(config, layer, ratio)


def _check_far_layer(config: Config, layer: int, ratio: int) -> None:
    """A layer with a far part reads the latest latents and the latest picks at or before it, at its own ratio."""
    name = "index source" if layer in config.index_source_layers else "layer"
    makers = [source for source in config.kv_source_layers if source <= layer]
    way_out = f"make layer {layer} a KV source, or give it ratio 0"
    rule = f"hold a layer at or before {name} {layer}, whose ratio is {ratio}"
    _require(bool(makers), "kv_source_layers", config.kv_source_layers, rule, way_out)
    maker, own = makers[-1], config.compress_ratios[makers[-1]]
    rule = f"give {name} {layer} the ratio of the latents that it reads (layer {maker}: {own})"
    _require(ratio == own, f"compress_ratios[{layer}]", ratio, rule, f"write {own}, or make layer {layer} a KV source")


def _check_picks(config: Config) -> None:
    if config.index_source_layers:
        _at_least_one(config, "index_n_heads index_head_dim index_topk", "the far part (every compress_ratio 0)")
    source = config.candidate_source_layer
    if source == -1:
        return
    part = "candidates (candidate_source_layer -1)"
    _at_least_one(config, "candidate_topk_blocks candidate_block_size", part)
    # A later KV source would number its latents anew, and the blocks would mean other positions.
    rule = f"be -1 or the last KV source, of {config.kv_source_layers}: blocks are blocks of its latents"
    _require(config.kv_source_layers[-1:] == (source,), "candidate_source_layer", source, rule, "name the last one")
    blocks, size = config.candidate_topk_blocks, config.candidate_block_size
    rule, most = "index_topk must be at most", blocks * size - (size - 1)
    if config.index_topk > most:
        why = f"{blocks} blocks x {size} minus the pinned block's {size - 1}"
        raise ConfigError(f"{rule} {most} here, got {config.index_topk}: {why}; raise candidate_topk_blocks")


def _check_experts(config: Config) -> None:
    shared = config.n_shared_experts
    _require(shared <= 1, "n_shared_experts", shared, "be 0 or 1", "a layer has one shared expert at most")
    chosen, routed = config.n_activated_experts, config.n_routed_experts
    rule = f"be at most n_routed_experts ({routed})"
    _require(chosen <= routed, "n_activated_experts", chosen, rule, "lower it, or add experts")


def _check_draft(config: Config) -> None:
    if not config.n_mtp_layers:
        return
    _at_least_one(config, "dspark_block_size dspark_markov_rank", "the draft (n_mtp_layers 0)")
    _below_vocabulary(config, "dspark_noise_token_id")
    _layer_list(config, "dspark_target_layer_ids")
    rule = "name at least one layer"
    targets = config.dspark_target_layer_ids
    _require(bool(targets), "dspark_target_layer_ids", targets, rule, "or switch off the draft (n_mtp_layers 0)")
    chosen = config.dspark_n_activated_experts or config.n_activated_experts
    routed = config.dspark_n_routed_experts or config.n_routed_experts
    rule = f"be at most dspark_n_routed_experts ({routed})"
    _require(chosen <= routed, "dspark_n_activated_experts", chosen, rule, "lower it, or add experts")


def _check_engram(config: Config) -> None:
    if not config.engram_layer_ids:
        return
    _layer_list(config, "engram_layer_ids")
    part = "the memory (engram_layer_ids empty)"
    _at_least_one(config, "engram_n_heads engram_head_dim engram_vocab_size engram_compressed_vocab_size", part)
    size, rows = config.engram_max_ngram_size, config.engram_num_embeddings
    _require(size >= 2, "engram_max_ngram_size", size, "be at least 2", f"raise it, or switch off {part}")
    _below_vocabulary(config, "engram_pad_id")
    entries, rule = config.engram_compressed_vocab_size, f"be at most vocab_size ({config.vocab_size})"
    _require(entries <= config.vocab_size, "engram_compressed_vocab_size", entries, rule, "lower it")
    layers, heads, base = len(config.engram_layer_ids), config.engram_n_heads, config.engram_vocab_size
    rule = f"have one entry per layer of engram_layer_ids ({layers})"
    _require(len(rows) == layers, "engram_num_embeddings", rows, rule, "add or remove entries")
    # Asked first, so that a wrong number of heads is told at once instead of after a search for a million primes.
    hashes = (size - 1) * heads
    least = hashes * base + hashes * (hashes - 1) // 2  # they differ
    rule = f"be at least {least} in every layer ({size - 1} sizes x {heads} heads, from engram_vocab_size {base} on)"
    _require(min(rows) >= least, "engram_num_embeddings", rows, rule, "correct one of these")
    sums = tuple(sum(map(sum, layer)) for layer in engram_primes(layers, size - 1, heads, base))
    rule = f"be the sums of each layer's primes {sums}"
    _require(rows == sums, "engram_num_embeddings", rows, rule, "write these, or correct engram_vocab_size")


def _check_vision(config: Config) -> None:
    if not config.vision_n_layers:
        return
    part = "vision (vision_n_layers 0)"
    _at_least_one(config, "vision_dim vision_n_heads vision_inter_dim vision_patch_size vision_downsample_ratio", part)
    width, heads = config.vision_dim, config.vision_n_heads
    _require(width % heads == 0, "vision_dim", width, f"be a multiple of vision_n_heads ({heads})", "change either")
    rule = f"give heads whose width is a multiple of 4 (rows and columns in pairs), with {heads} heads"
    _require(width // heads % 4 == 0, "vision_dim", width, rule, f"try a multiple of {4 * heads}")
    most, ratio = config.vision_max_n_token, config.vision_max_wh_ratio
    _require(most >= 4, "vision_max_n_token", most, "be at least 4: start, one patch, line end, end", "raise it")
    if ratio is not None:
        _require(ratio >= 1, "vision_max_wh_ratio", ratio, "be null or at least 1", "give null for any shape")


def _layer_list(config: Config, key: str) -> None:
    layers, count = getattr(config, key), config.n_layers
    _require(list(layers) == sorted(set(layers)), key, layers, "ascend without a repeat", "sort it")
    rule = f"name layers of the backbone (0 to {count - 1})"
    _require(all(layer < count for layer in layers), key, layers, rule, "remove the others, or raise n_layers")


def _below_vocabulary(config: Config, key: str) -> None:
    rule = f"be below vocab_size ({config.vocab_size})"
    _require(getattr(config, key) < config.vocab_size, key, getattr(config, key), rule, "lower it, or raise vocab_size")


CHECKS = (
    _check_ranges,
    _check_sources,
    _check_picks,
    _check_widths,
    _check_rotary,
    _check_experts,
    _check_draft,
    _check_engram,
    _check_vision,
)


# The two file forms ---------------------------------------------------------------------------------------------------

HF_SECTIONS = ("text_config", "text_config.rope_scaling", "vision_config", "quantization_config")

_RENAMED = {
    "dim": "text_config.hidden_size",
    "moe_inter_dim": "text_config.moe_intermediate_size",
    "n_layers": "text_config.num_hidden_layers",
    "n_mtp_layers": "text_config.num_nextn_predict_layers",
    "dspark_target_layer_ids": "text_config.dspark_target_layer_ids",
    "dspark_n_activated_experts": "text_config.dspark_num_experts_per_tok",
    "n_heads": "text_config.num_attention_heads",
    "n_activated_experts": "text_config.num_experts_per_tok",
    "score_func": "text_config.scoring_func",
    "route_scale": "text_config.routed_scaling_factor",
    "rope_head_dim": "text_config.qk_rope_head_dim",
    "norm_eps": "text_config.rms_norm_eps",
    "window_size": "text_config.sliding_window",
    "kv_source_layers": "text_config.kv_source_layer_ids",
    "index_source_layers": "text_config.index_source_layer_ids",
    "original_seq_len": "text_config.rope_scaling.original_max_position_embeddings",
    "rope_factor": "text_config.rope_scaling.factor",
    "beta_fast": "text_config.rope_scaling.beta_fast",
    "beta_slow": "text_config.rope_scaling.beta_slow",
    "candidate_source_layer": "text_config.candidate_source_layer_id",
    "engram_pad_id": "text_config.engram_pad_token_id",
    "dtype": "quantization_config.quant_method",
    "expert_dtype": "quantization_config.expert_dtype",
    "vision_n_layers": "vision_config.num_hidden_layers",
    "vision_dim": "vision_config.hidden_size",
    "vision_n_heads": "vision_config.num_attention_heads",
    "vision_inter_dim": "vision_config.intermediate_size",
    "vision_patch_size": "vision_config.patch_size",
    "vision_downsample_ratio": "vision_config.downsample_ratio",
    "vision_max_n_token": "vision_config.max_image_tokens",
    "vision_min_pixels": "vision_config.min_pixels",
    "vision_max_wh_ratio": "vision_config.max_wh_ratio",
    "vision_rope_theta": "vision_config.rope_theta",
    "image_token_id": "image_token_id",
}
HF_SPELLING = {key: _RENAMED.get(key, f"text_config.{key}") for key in KEYS}

HF_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "pad_token_id"}
HF_CONTEXT = "text_config.max_position_embeddings"

# What the nested file says beyond the 64 fields and this model is built upon: any other value is another model.
HF_FIXED: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",  # of tensors that are not quantised
    "quantization_config.quant_method": "fp8",
    "quantization_config.activation_scheme": "dynamic",
    "quantization_config.weight_block_size": [QUANT_BLOCK, QUANT_BLOCK],
    "quantization_config.scale_fmt": "ue8m0",
    "text_config.model_type": "deepseek_v41_text",
    "text_config.num_key_value_heads": 1,
    "text_config.hidden_act": "silu",
    "text_config.attention_bias": False,
    "text_config.attention_dropout": 0.0,
    "text_config.tie_word_embeddings": False,
    "text_config.rope_scaling.rope_type": "yarn",
    "text_config.topk_method": "noaux_tc",
    "text_config.norm_topk_prob": True,
    "vision_config.model_type": "deepseek_v41_vision",
}
# What it says that nothing here depends on: only the type is checked. The values are those that `to_hf` writes.
HF_WRITTEN: dict[str, Any] = {
    "transformers_version": "5.6.0",
    "text_config.initializer_range": 0.02,
    "text_config.use_cache": True,
}
HF_KEYS = tuple(dict.fromkeys([*HF_SPELLING.values(), *HF_FIXED, *HF_WRITTEN, *HF_SPECIAL.values(), HF_CONTEXT]))


def _read_file(path: str | os.PathLike[str]) -> tuple[Config, SpecialIds | None]:
    try:
        values = _read_object(path)
        nested = any(section in values for section in HF_SECTIONS)
        config, special = _from_hf(values) if nested else (Config.from_dict(values), None)
        # A file describes a whole model, whose prompts may hold images; other dicts may describe one layer alone.
        if config.vision_n_layers:
            _below_vocabulary(config, "image_token_id")
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error
    return config, special


def _read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_number)
    except OSError as error:
        raise ConfigError(f"the file cannot be read ({error.strerror or error}); check the path") from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the file must be JSON in UTF-8, but: {error}; compare it with the published one") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the file must hold one JSON object, got {reprlib.repr(values)}; put the keys in braces")
    return values


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ConfigError(f"{key} must stand once, got it twice; keep one of them")
        values[key] = value
    return values


def _no_number(spelled: str) -> None:
    raise ConfigError(f"every number must be finite, got {spelled}; write a number")


def _from_hf(values: Mapping[str, Any]) -> tuple[Config, SpecialIds]:
    flat = _without_repeats(list(_flatten(values)))
    _require_keys(flat, HF_KEYS)
    for key, fixed in HF_FIXED.items():
        same = flat[key] == fixed and isinstance(flat[key], bool) == isinstance(fixed, bool)
        _require(same, key, flat[key], f"be {fixed!r}", "other values describe a model that this is not")
    for key, example in HF_WRITTEN.items():
        _typed(key, type(example).__name__, flat[key])
    try:
        config = Config.from_dict({key: flat[spelled] for key, spelled in HF_SPELLING.items()})
    except ConfigError as error:
        key = str(error).split()[0].split("[")[0]
        raise ConfigError(f"{error} (in this file {key} is {HF_SPELLING.get(key, key)})") from error
    length, rule = flat[HF_CONTEXT], f"be {config.context}: original length x factor of rope_scaling"
    _require(type(length) is int and length == config.context, HF_CONTEXT, length, rule, "correct either")
    special = SpecialIds(**{name: _typed(spelled, "int", flat[spelled]) for name, spelled in HF_SPECIAL.items()})
    _check_special(config, special)
    return config, special


def _check_special(config: Config, special: SpecialIds) -> None:
    for name, spelled in HF_SPECIAL.items():
        token, rule = getattr(special, name), f"lie in 0 to {config.vocab_size - 1} (below vocab_size)"
        _require(0 <= token < config.vocab_size, spelled, token, rule, "correct it")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with the path to them: text_config.rope_scaling.factor."""
    for key, value in values.items():
        spelled = prefix + key
        if spelled in HF_SECTIONS:
            _require(isinstance(value, dict), spelled, value, "be an object", "put its keys in braces")
            yield from _flatten(value, spelled + ".")
        else:
            yield spelled, value


def _require_keys(values: Mapping[str, Any], known: Collection[str]) -> None:
    missing = [key for key in known if key not in values]
    unknown = [key for key in values if key not in known]
    if missing:
        names = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        stray = f" (unknown, perhaps misspelt: {', '.join(map(reprlib.repr, unknown[:8]))})" if unknown else ""
        raise ConfigError(f"{names} must be stated, got no such key{stray}; add it as in the published file")
    for key in unknown:
        near = difflib.get_close_matches(str(key), known, n=1)
        way_out = f"remove it, or did you mean {near[0]}?" if near else "remove it"
        raise ConfigError(f"{key} must be a key of the published file, but is unknown; {way_out}")
