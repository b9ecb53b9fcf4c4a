"""The published inference code's interface over our parts, for those who have code around it.

    ModelArgs              the published fields; `.config()` is our Config
    Attention              attn(x [b, s, dim], start_pos) -> [b, s, dim], with caches of its own
    Shared                 what the layers of one stack hand down to each other
    precompute_freqs_cis   apply_rotary_emb   sparse_attn   act_quant   fp4_act_quant

Everything here is a thin shell: the arithmetic is in `model` and `ops`. Inference only, no gradients. What every
published name has become, and what differs, is told in docs/published.md.
"""

import json
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from openv41.config import KEYS, Config
from openv41.errors import CacheError, CacheFull, ConfigError, InputError
from openv41.formats import FLOAT8, INDEX, LATENT, WINDOW, BlockFormat, unpack_weight
from openv41.model import attention
from openv41.model.far import Source
from openv41.model.indexer import IndexKeys
from openv41.model.layers import Linear, Rotary
from openv41.ops import Ops, choose
from openv41.plan import LayerPlan, Role, last_published
from openv41.state import Cache, Run, Sight, SourceState, Step

Number = int | float
Layers = Sequence[int]

# Arguments


@dataclass
class ModelArgs:
    """The fields of the published dataclass. Those of the model are explained in `Config` and have the released values.

    Each layer's caches have room for `max_batch_size` sequences of `max_seq_len` tokens; these two defaults are ours.
    `temperature` is carried for the caller's sampling. `gate_temp` and `norm_topk_prob` can have no other value.
    """

    max_batch_size: int = 4
    max_seq_len: int = 4096
    temperature: Number = 0.0
    dtype: str = "fp8"
    expert_dtype: str | None = "fp4"
    vocab_size: int = 129280
    dim: int = 5120
    moe_inter_dim: int = 2304
    n_layers: int = 40
    n_mtp_layers: int = 3
    n_heads: int = 64
    norm_eps: Number = 1e-20
    # Experts
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    n_activated_experts: int = 6
    score_func: str = "sqrtsoftplus"
    gate_temp: Number = 1.0
    norm_topk_prob: bool = True
    route_scale: Number = 1.5
    swiglu_limit: Number = 10.0
    # Attention
    q_lora_rank: int = 1280
    head_dim: int = 512
    rope_head_dim: int = 64
    o_groups: int = 8
    o_lora_rank: int = 1024
    window_size: int = 128
    compress_ratios: Layers = (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    kv_source_layers: Layers = (2, 8, 14, 20)
    index_source_layers: Layers = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    # Rotary positions
    rope_theta: Number = 10000.0
    compress_rope_theta: Number = 160000.0
    original_seq_len: int = 65536
    rope_factor: Number = 16.0
    beta_fast: Number = 32.0
    beta_slow: Number = 1.0
    # Hyper-connections
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: Number = 1e-6
    # Engram
    engram_layer_ids: Layers = (1, 14)
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16_000_000
    engram_num_embeddings: Layers = (384006168, 384016682)
    engram_compressed_vocab_size: int = 99092
    engram_pad_id: int = 2
    # DSpark
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: Layers = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_n_activated_experts: int = 3
    # Vision
    vision_n_layers: int = 32
    vision_dim: int = 1024
    vision_n_heads: int = 16
    vision_inter_dim: int = 2816
    vision_rope_theta: Number = 10000.0
    vision_patch_size: int = 14
    vision_downsample_ratio: int = 3
    vision_max_n_token: int = 1024
    vision_min_pixels: int = 295936
    vision_max_wh_ratio: Number | None = None
    image_token_id: int = 129264

    def __post_init__(self) -> None:
        self._stack: weakref.ref[Shared] | None = None  # the stack being built from these arguments

    def __reduce__(self) -> tuple[type["ModelArgs"], tuple[Any, ...]]:
        """A copy has the fields and no stack."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> "ModelArgs":
        """Read a published file, flat or nested. A flat one may hold the five keys beyond `Config`'s as well; they have
        defaults, the others must be there. Raises `ConfigError`."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            values = None  # Config.from_json says what is wrong
        own = {key: values.pop(key) for key in OWN_KEYS if key in values} if isinstance(values, dict) else {}
        return cls(**vars(Config.from_dict(values) if own else Config.from_json(path)), **own)

    def config(self) -> Config:
        """The model's numbers, checked. Raises `ConfigError`, also for sizes below 1 and unknown routing options."""
        for key in ("max_batch_size", "max_seq_len"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1, got {getattr(self, key)}; raise it")
        if self.gate_temp != 1.0:
            raise ConfigError(f"gate_temp must be 1.0, got {self.gate_temp!r}; no released model has another")
        if self.norm_topk_prob is not True:
            raise ConfigError(f"norm_topk_prob must be true, got {self.norm_topk_prob!r}; no released model differs")
        return Config.from_dict({key: getattr(self, key) for key in KEYS})


OWN_KEYS = tuple(field.name for field in fields(ModelArgs) if field.name not in KEYS)

# Functions


def precompute_freqs_cis(
    dim: int,
    seqlen: int,
    original_seq_len: int,
    base: Number,
    factor: Number,
    beta_fast: Number,
    beta_slow: Number,
) -> Complex[Tensor, "seqlen half"]:
    """cos + i sin of every position's rotary angles, complex64. `original_seq_len` 0: no YaRN."""
    rotary = Rotary(dim, float(base), original_seq_len, float(factor), float(beta_fast), float(beta_slow))
    angles = torch.outer(torch.arange(seqlen, dtype=torch.float32, device="cpu"), rotary.frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.get_default_device())


def apply_rotary_emb(
    x: Float[Tensor, "b s *h d"], freqs_cis: Complex[Tensor, "positions half"], inverse: bool = False
) -> Float[Tensor, "b s *h d"]:
    """Turn adjacent pairs of `x` by the angles of its tokens, or back, in place, and return `x`: a slice will do.

    All of x's last dimension is turned: hand in the rotary part of a head. Computed in float32, rounded to x's dtype.
    """
    if x.shape[-1] != 2 * freqs_cis.shape[-1] or x.shape[1] != freqs_cis.shape[0]:
        raise InputError(
            f"x {tuple(x.shape)} must be [b, s, ..., d] for freqs_cis [s, d / 2], got {tuple(freqs_cis.shape)}: "
            "slice both to the rotary part and the step's positions"
        )
    ops = choose(x.device)
    for row in x:
        row.copy_(ops.rotate(row, freqs_cis.real, freqs_cis.imag, inverse))
    return x


def sparse_attn(
    q: Float[Tensor, "b s h d"],
    kv: Float[Tensor, "b n d"],
    attn_sink: Float[Tensor, "h"],
    topk_idxs: Int[Tensor, "b s k"],
    softmax_scale: float,
    ops: Ops | None = None,
) -> Float[Tensor, "b s h d"]:
    """Attention of each query to the rows of its own list, key and value at once, with a sink per head.

    Rows are those of the same sequence's kv. Negative entries are nothing, an entry named twice counts twice.
    """
    ops = ops or choose(q.device)
    rows = topk_idxs.long()
    attend = ops.sparse_attention
    return torch.stack([attend(q[i], kv[i], rows[i], None, None, attn_sink, softmax_scale) for i in range(len(q))])


def act_quant(
    x: Float[Tensor, "*n k"], block_size: int = 32, scale_fmt: str | None = "ue8m0", inplace: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """x in fp8 (e4m3): codes [..., k] and a scale for each `block_size` values [..., k / block_size].

    `scale_fmt` "ue8m0": scales are powers of two, stored as e8m0; None: any float32. With `inplace`, x is overwritten
    with the values that the codes stand for, and returned alone.
    """
    if scale_fmt not in ("ue8m0", None):
        raise InputError(f"scale_fmt must be 'ue8m0' or None, got {scale_fmt!r}")
    return _quantise(x, WINDOW if scale_fmt else FLOAT8, block_size, inplace)


def fp4_act_quant(
    x: Float[Tensor, "*n k"],
    block_size: int = 32,
    scale_dtype: torch.dtype = torch.float8_e8m0fnu,
    inplace: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """x in fp4 (e2m1, two codes a byte, the even element low): codes [..., k / 2] and scales [..., k / block_size].

    `scale_dtype`: float8_e8m0fnu (powers of two; index queries and keys, blocks of 32) or float8_e4m3fn (compressed KV,
    blocks of 16). With `inplace`, x is overwritten with the values that the codes stand for, and returned alone.
    """
    forms = {torch.float8_e8m0fnu: INDEX, torch.float8_e4m3fn: LATENT}
    if scale_dtype not in forms:
        raise InputError(f"scale_dtype must be torch.float8_e8m0fnu or torch.float8_e4m3fn, got {scale_dtype}")
    result = _quantise(x, forms[scale_dtype], block_size, inplace)
    return result if inplace else (result[0].view(torch.float4_e2m1fn_x2), result[1])


def _quantise(x: Tensor, form: BlockFormat, block_size: int, inplace: bool) -> Tensor | tuple[Tensor, Tensor]:
    if block_size < 1 or x.shape[-1] % block_size:
        raise InputError(f"block_size must divide the last dimension of x {tuple(x.shape)}, got {block_size}")
    form = replace(form, block=block_size)
    return x.copy_(form.round(x)) if inplace else form.pack(x)


# Attention


class Shared:
    """What the layers of one stack hand down to each other: each layer of a stack holds the same object.

    Layers that are built from one `ModelArgs` in ascending order share one without being told; building from its first
    layer again begins another stack. Pass a `Shared()` of your own to build them in any order, or two stacks in turn.
    """

    def __init__(self) -> None:
        self.config: Config | None = None
        self.layers: list[int] = []
        self.step: Step | None = None  # the latest one, which the layers of a step use together
        self.handed: dict[int, tuple[Step, Sight]] = {}  # by the layer that made picks, in its latest step
        self.caches: dict[int, Cache] = {}
        self.sources: dict[int, SourceState] = {}

    @classmethod
    def of(cls, args: ModelArgs, layer: int) -> "Shared":
        """The stack being built from `args`, or a new one where `layer` does not come after its first layer."""
        shared = args._stack() if args._stack is not None else None
        if shared is None or layer <= shared.layers[0]:
            shared = cls()
            args._stack = weakref.ref(shared)
        elif layer <= shared.layers[-1]:
            raise InputError(
                f"layer {layer} must come before layer {shared.layers[-1]} when a stack is built from one ModelArgs: "
                "build in ascending order and one stack after the other, or pass every layer of a stack the same Shared"
            )
        return shared

    def join(self, config: Config, layer: int) -> None:
        """Take a layer into the stack."""
        if self.config not in (None, config):
            raise InputError(f"layer {layer} has another configuration than its stack: give it another Shared")
        if layer in self.layers:
            raise InputError(f"layer {layer} is in this stack already: give another stack another Shared")
        self.config = config
        self.layers.append(layer)

    def begin(
        self, row: LayerPlan, runs: tuple[Run, ...], device: torch.device, ran: Step | None
    ) -> tuple[Step, Sight]:
        """The step that a layer is to run, and what it is handed; `ran` is the step that it ran last.

        A layer that reads another takes the step which that one has just run; the others share one where they can.
        """
        above = {Role.READER: row.picks_from, Role.RESCORER: row.latents_from}.get(row.role)
        if above is None:
            if self.step is None or self.step is ran or self.step.runs != runs or self.step.device != device:
                ids = torch.zeros(runs[0].length, dtype=torch.int64)
                self.step = Step.pack([(run.slot, run.start, ids) for run in runs], device=device)
            return self.step, Sight()
        if above not in self.handed:
            built = "has not run" if above in self.layers else f"is not in its stack ({self.layers})"
            raise CacheError(
                f"layer {row.layer} reads what layer {above} hands down, which {built}: build a stack from one "
                "ModelArgs or with one Shared, and run its layers in ascending order"
            )
        step, sight = self.handed[above]
        if step is ran or step.runs != runs:
            raise CacheError(
                f"layer {row.layer} is called with {_words(runs)}, but layer {above}, whose picks it reads, last ran "
                f"{_words(step.runs)}{' before that' if step is ran else ''}: run the layers of a step in ascending "
                "order, all with the same rows and start_pos"
            )
        return step, sight


def _words(runs: tuple[Run, ...]) -> str:
    return f"{len(runs)} rows at positions {runs[0].start} to {runs[0].end - 1}"


class Attention(attention.Attention):
    """One attention layer that keeps its own caches: `max_batch_size` rows, `max_seq_len` positions.

    `attn(x, 0)` takes a whole prompt for each row of x and begins these rows anew; `attn(x, start_pos)` takes the next
    tokens: one in the published code, here any number. All rows of a call stand at the same position. A batch may be
    smaller than `max_batch_size`: it is the first rows, and the others stay as they are.

    Parameters have the published names and types, `wo_a.weight` in bf16 (where a checkpoint has it in fp8 with a
    scale, `load_state_dict` takes that as well). They are created empty. `index_keys`: "own_keys", or "as_written" for
    the published decode with its fault (see `model.far.Source`). `ops` defaults to the best set for torch's default
    device. Caches are made by the first prefill, where x is.
    """

    def __init__(
        self,
        layer_id: int,
        args: ModelArgs,
        shared: Shared | None = None,
        index_keys: IndexKeys = "own_keys",
        ops: Ops | None = None,
    ) -> None:
        config = args.config()
        if not 0 <= layer_id < config.n_layers:
            raise InputError(f"layer_id must lie in 0 to {config.n_layers - 1} (n_layers - 1), got {layer_id}")
        if index_keys not in ("own_keys", "as_written"):
            raise InputError(f"index_keys must be 'own_keys' or 'as_written', got {index_keys!r}")
        super().__init__(config, layer_id, ops or choose(torch.get_default_device()), index_keys)
        outputs, inputs = self.wo_a.weight.shape
        self.wo_a = Linear(inputs, outputs, "bf16", self.ops)
        self.register_load_state_dict_pre_hook(_dequantise_wo_a)
        self.config, self.rows, self.room = config, args.max_batch_size, args.max_seq_len
        self.shared = Shared.of(args, layer_id) if shared is None else shared
        self.shared.join(config, layer_id)
        self.ran: Step | None = None

    @torch.no_grad()
    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "b s dim"], start_pos: int = 0
    ) -> Float[Tensor, "b s dim"]:
        """Raises `InputError` for an x that does not fit, `CacheFull` beyond `max_seq_len`, and `CacheError` for a call
        out of order: a position skipped or repeated, or a layer before the one that it reads."""
        self._check_input(x)
        runs = tuple(Run(row, start_pos, x.shape[1], row * x.shape[1]) for row in range(x.shape[0]))
        self._check_positions(runs)
        step, sight = self.shared.begin(self.plan, runs, x.device, self.ran)
        cache = self._restart(len(runs), x.device) if start_pos == 0 else self.cache
        self.shared.handed.pop(self.layer, None)
        cache.admit(step)
        try:
            y, sight = super().forward(x.flatten(0, 1), step, sight, cache)
        except BaseException:
            self._restart(len(runs), x.device)  # the step is half written: its rows begin anew
            raise
        cache.extend(step)
        self.ran = step
        if self.plan.picks_from == self.layer:
            self.shared.handed[self.layer] = step, sight
        return y.unflatten(0, x.shape[:2])

    @property
    def cache(self) -> Cache:
        """This layer's caches: slot `i` is row `i`. Raises `CacheError` before the first prefill."""
        if self.layer not in self.shared.caches:
            raise CacheError(f"layer {self.layer} keeps nothing yet: the first prefill makes its caches")
        return self.shared.caches[self.layer]

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[1] < 1 or x.shape[2] != self.config.dim:
            raise InputError(f"x must be [rows, tokens, dim {self.config.dim}], got {tuple(x.shape)}")
        if not 1 <= x.shape[0] <= self.rows:
            raise InputError(f"x must have 1 to {self.rows} rows, got {x.shape[0]}: raise max_batch_size")
        if x.dtype != self.ops.dtype:
            raise InputError(f"x must be {self.ops.dtype}, got {x.dtype}: convert it")

    def _check_positions(self, runs: tuple[Run, ...]) -> None:
        start, end = runs[0].start, runs[0].end
        if start < 0:
            raise InputError(f"start_pos must be 0 or more, got {start}")
        if end > self.room:
            raise CacheFull(f"layer {self.layer} would hold {end} positions of {self.room}: raise max_seq_len")
        for run in runs if start else ():
            at = self._stands_at(self.layer, run.slot)
            if at != start:
                raise CacheError(
                    f"layer {self.layer}, row {run.slot}: start_pos is {start}, but the next position is {at}: "
                    "continue there, or begin anew with start_pos 0"
                )
        self._check_published(runs)

    def _check_published(self, runs: tuple[Run, ...]) -> None:
        """As written, a single token may meet the index keys of another layer: that one must stand where it would."""
        start, part = runs[0].start, self.far
        if not (isinstance(part, Source) and part.index_keys == "as_written" and start and runs[0].length == 1):
            return
        published = last_published(part.layers, self.layer, start) if (start + 1) % self.plan.ratio else self.layer
        if published is None or published == self.layer:
            return
        expected = start + (published < self.layer)
        if any(self._stands_at(published, run.slot) != expected for run in runs):
            raise CacheError(
                f"layer {self.layer} at position {start} scores, as written, against the index keys of layer "
                f"{published}, which must stand at {expected} in every row: run all layers of a step, then the next"
            )

    def _stands_at(self, layer: int, row: int) -> int:
        cache = self.shared.caches.get(layer)
        return 0 if cache is None else cache.length(row)

    def _restart(self, rows: int, device: torch.device) -> Cache:
        """The cache with its first `rows` slots empty; each slot has its whole room, as one stretch."""
        cache = self.shared.caches.get(self.layer)
        if cache is None or cache.device != device:
            cache = Cache(
                self.config, self.rows, self.rows * self.room, dtype=self.ops.dtype, device=device, layers=[self.plan]
            )
            self.shared.caches[self.layer] = cache
            self.shared.sources |= cache.sources
            cache.sources = self.shared.sources
            empty = range(self.rows)
        else:
            empty = range(rows)
            for slot in empty:
                cache.close(slot)
        cache.pages.reserve([(cache.open(), 0, self.room) for _ in empty])
        return cache


def _dequantise_wo_a(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """A checkpoint's fp8 `wo_a` as the bf16 values it has at run time, which hold it exactly."""
    scale = state.pop(f"{prefix}wo_a.scale", None)
    if scale is not None:
        weight = f"{prefix}wo_a.weight"
        state[weight] = unpack_weight(state[weight], scale).to(torch.bfloat16)
