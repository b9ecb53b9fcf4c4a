"""A scene: the real model without memory, standing anywhere, and one recorded call of it.

The modules are built on the meta device, so the released model takes no time and no room. A cache on the same device
has row numbers and page tables, and no rows. Then the model runs, layer after layer, with operations that count.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from openv41.config import Config
from openv41.errors import InputError
from openv41.explain.counting import CountingOps
from openv41.explain.recorder import Recorder, Span
from openv41.model.indexer import Indexer
from openv41.model.transformer import Prefill, Transformer
from openv41.plan import plan_layers
from openv41.state import Cache

Mode = Literal["prefill", "decode"]
MOST_TOKENS = 1 << 18
"""Tokens of one recorded call: their row numbers are real, and take memory."""

MOST_SEQUENCES = 1 << 13
"""In one recorded call: their tables of pages are real, 128 KB each in the released context."""


@dataclass(frozen=True)
class Scene:
    """`batch` sequences that hold `position` tokens each and are given `tokens` more. `slack`: of the cache, in tokens.

    Raises `InputError` where that does not fit the context.
    """

    config: Config
    mode: Mode = "decode"
    position: int = 0
    tokens: int = 1
    batch: int = 1
    slack: int = 0

    def __post_init__(self) -> None:
        context = self.config.context
        for name, value, least in (
            ("position", self.position, 0), ("tokens", self.tokens, 1),
            ("batch", self.batch, 1), ("slack", self.slack, 0),
        ):  # fmt: skip
            if value < least:
                raise InputError(f"{name} must be {least} or more, got {value}")
        if self.slack > context:
            raise InputError(f"slack must be at most the context of {context} tokens, got {self.slack}")
        if self.batch > MOST_SEQUENCES or self.batch * self.slack > MOST_TOKENS * 64:
            raise InputError(
                f"a recorded call takes up to {MOST_SEQUENCES} sequences and {MOST_TOKENS * 64} rows of slack, got "
                f"{self.batch} sequences with {self.slack}; lower batch or slack"
            )
        if self.position + self.tokens > context:
            raise InputError(
                f"position {self.position} and {self.tokens} tokens must fit the context of {context} tokens; "
                f"take a position up to {context - min(self.tokens, context)}"
            )
        if self.batch * self.tokens > MOST_TOKENS:
            raise InputError(
                f"a recorded call takes up to {MOST_TOKENS} tokens, got {self.batch} x {self.tokens}; "
                "lower batch or tokens (costs of one call are added up for a longer prompt: see model)"
            )

    def cache(self) -> Cache:
        """Slots that hold `position` tokens, none of them computed."""
        tokens = self.batch * (self.position + self.tokens)
        draft = self.config.n_mtp_layers > 0
        cache = Cache(
            self.config, self.batch, tokens, self.slack, device="meta", store="packed", draft=draft,
        )  # fmt: skip
        for _ in range(self.batch):
            slot = cache.open()
            cache.pages.reserve([(slot, 0, self.position)])
            cache.lengths[slot] = cache.highest[slot] = self.position
        return cache

    def record(self, prefill: Prefill = "full", prompt: int = 0) -> Span:
        """The spans of one call. `prefill`: see `Transformer.forward`; `prompt`: where the prompt ends that this is a
        piece of."""
        return _recorded(self, prefill, prompt)

    def record_draft(self) -> Span:
        """The spans of drafting one block a sequence, after `position` tokens, and of remembering one main token."""
        return _recorded_draft(self)


@lru_cache(maxsize=32)
@torch.no_grad()
def _recorded(scene: Scene, prefill: Prefill, prompt: int) -> Span:
    model, ops = counted_model(scene.config)
    cache, recorder = scene.cache(), Recorder(plan_layers(scene.config), scene.batch, scene.tokens)
    ids = torch.zeros(scene.tokens, dtype=torch.int64)
    step = cache.step(
        [(slot, ids) for slot in range(scene.batch)],
        prompts={slot: prompt for slot in range(scene.batch)} if prompt else None,
    )
    with recorder.on(model, cache, ops):
        model(step, cache, prefill)
    return recorder.root


@lru_cache(maxsize=8)
@torch.no_grad()
def _recorded_draft(scene: Scene) -> Span:
    model, ops = counted_model(scene.config)
    assert model.mtp is not None
    block = scene.config.dspark_block_size
    recorder = Recorder(plan_layers(scene.config), scene.batch, block)
    cache = scene.cache()
    width = len(scene.config.dspark_target_layer_ids) * scene.config.dim
    with recorder.on(model, cache, ops):
        slots = list(range(scene.batch))
        drafting = model.mtp.begin(torch.zeros(scene.batch, dtype=torch.int64), slots, cache)
        recorder.stand_at(drafting, "next", "mtp")
        for _ in range(block):
            drafting.next(torch.zeros(scene.batch, dtype=torch.int64))
        recorder.tokens = 1
        step = cache.step([(slot, torch.zeros(1, dtype=torch.int64)) for slot in slots])
        model.mtp.remember(torch.empty(scene.batch, width, dtype=ops.dtype, device="meta"), step, cache)
    return recorder.root


@torch.no_grad()
def record_picture(config: Config, rows: int, columns: int, count: int = 1) -> Span:
    """The spans of tower and aligner for pictures of so many patches each, all in one call."""
    model, ops = counted_model(config)
    if model.vision is None or model.aligner is None:
        raise InputError("this configuration has no vision tower (vision_n_layers is 0)")
    if count * rows * columns > MOST_TOKENS:
        raise InputError(
            f"a recorded call takes up to {MOST_TOKENS} patches, got {count} pictures of {rows} x {columns}; "
            "lower the batch"
        )
    cache = Cache(config, 1, 1, device="meta")
    recorder = Recorder(plan_layers(config), 1, rows * columns)
    size = config.vision_patch_size
    patches = torch.empty(count * rows * columns, 3, size, size, dtype=ops.dtype, device="meta")
    grids = [(rows, columns)] * count
    with recorder.on(model, cache, ops):
        model.aligner(model.vision(patches, grids), grids)
    return recorder.root


@lru_cache(maxsize=4)
def counted_model(config: Config) -> tuple[Transformer, CountingOps]:
    """The model of a configuration on the meta device."""
    ops = CountingOps()
    with torch.device("meta"):
        model = Transformer(config, ops)
    for module in model.modules():
        if isinstance(module, Indexer):  # scores take no memory here: the fewest pieces
            module.score_bytes = 1 << 62
    if model.lookback is not None:  # ids are numbers, and stay real
        model.lookback.token_map = torch.zeros(config.vocab_size, dtype=torch.int64)
    if model.vision is not None:
        angles = model.vision.angles
        model.vision.__dict__["angles"] = lambda grids, device=None: angles(grids)
    return model, ops
