"""The whole path: ids -> streams -> blocks -> logits.

    embed [n, dim] -> m copies -> (memory, attention, experts) x layers -> one mix -> norm -> head [j, vocab]
      pictures -> tower -> aligner -> rows that take the place of the image tokens' embeddings

A step is packed: `n` tokens of any mixture of sequences. What sequences remember is in the cache, and nowhere else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_of

from openv41.config import Config
from openv41.errors import InputError
from openv41.model.block import Block
from openv41.model.draft import Draft
from openv41.model.engram import Lookback
from openv41.model.indexer import IndexKeys
from openv41.model.layers import Embedding, RMSNorm, WideLinear
from openv41.model.masters import make_masters
from openv41.model.streams import Streams
from openv41.model.vision import PATCHES, Aligner, VisionTower, packs
from openv41.ops import Ops
from openv41.state import Cache, Mark, Picture, Sight, Step
from openv41.state.picture import cells

Prefill = Literal["halo", "full"]


@dataclass(frozen=True)
class Output:
    """`logits` [j, vocab] in float32 of the tokens that wanted them; `taps` [kept, targets * dim], for the draft, of
    the tokens that the last layer ran, which are those of the step `tapped`.

    Both are None where the configuration has no draft, and for a piece of a prompt that lies too far from its end.
    """

    logits: Float[Tensor, "j vocab"]
    taps: Float[Tensor, "kept width"] | None
    tapped: Step | None


@dataclass(frozen=True)
class Halo:
    """Which tokens a layer of the upper half must still run in a prefill.

    From the last KV source on, layers see the past through latents made of that source's *input*, and through their own
    windows. A result at some position matters only if it reaches, window by window, a position that is kept: the last
    `kept` ones of the last layer. Each layer below needs `window - 1` more. In the released model that leaves 0.52 of
    the work of a prompt of 32,768 tokens.
    """

    first: int  # the last KV source; the layers before it run for all tokens
    last: int
    kept: int
    window: int

    @classmethod
    def of(cls, config: Config, step: Step, slack: int) -> "Halo | None":
        """None where there is no KV source. A replay, whose latents stand already, has its halo from layer 0 on."""
        if not config.kv_source_layers:
            return None
        wanted = int((step.stop_of_rows()[step.wanted] - step.position[step.wanted]).max()) if len(step.wanted) else 0
        kept = max(config.window_size + slack, wanted + config.window_size - 1)
        first = 0 if step.replay else config.kv_source_layers[-1]
        return cls(first, config.n_layers - 1, kept, config.window_size)

    def reach(self, layer: int) -> int:
        """How many of the latest tokens the layer must run."""
        return self.kept + (self.last - layer) * (self.window - 1)


class Transformer(nn.Module):
    """DeepSeek-V4.1. `ops` is the set of operations it runs on, held as `self.ops` by every part.

    `mtp` is the draft; None where the configuration has none, or with `draft=False`. `vision`, `aligner` and the three
    delimiters are None where it has no tower. With `master`, a float type, weights are parameters of that type, for
    training: see `model/masters.py`.
    """

    image_start: nn.Parameter | None
    image_newline: nn.Parameter | None
    image_end: nn.Parameter | None

    def __init__(
        self,
        config: Config,
        ops: Ops,
        index_keys: IndexKeys = "own_keys",
        draft: bool = True,
        master: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.embed = Embedding(config.vocab_size, config.dim)
        self.lookback = Lookback(config) if config.engram_layer_ids else None
        sees = config.vision_n_layers > 0
        self.vision = VisionTower(config, ops) if sees else None
        self.aligner = Aligner(config, ops) if sees else None
        for delimiter in ("image_start", "image_newline", "image_end"):
            row = nn.Parameter(torch.empty(config.dim, dtype=torch.bfloat16)) if sees else None
            self.register_parameter(delimiter, row)
        self.layers = nn.ModuleList(Block(config, layer, ops, index_keys) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps, ops)
        self.head = WideLinear(config.dim, config.vocab_size, "fp32", ops)
        self.mtp = Draft(config, ops, self.embed, self.head) if draft and config.n_mtp_layers else None
        if master is not None:
            make_masters(self, ops, master)

    def forward(
        self, step: Step, cache: Cache | None = None, prefill: Prefill = "halo", checkpoint: bool = False
    ) -> Output:
        """Run one step. The slots' new tokens are in the cache when it returns; without a cache a fresh one is used.

        `prefill="halo"` runs the layers from the last KV source on only for the tokens whose result can still reach the
        logits that are wanted, or what the cache keeps; "full" runs all layers for all tokens. Logits and cache are the
        same, bit for bit under row-stable ops: see `Halo`.

        This is the training path as well: gradients flow to all that is of this step. `checkpoint` keeps only what
        enters each layer, and runs it again in the backward; it needs a fresh cache, else `InputError`.
        """
        if checkpoint and cache is not None:
            raise InputError("checkpoint=True runs layers twice, and what a cache holds may change between: give none")
        cache = self.fresh_cache(step) if cache is None else cache
        cache.admit(step)
        streams, sight = self.begin(step, cache)
        halo = Halo.of(self.config, step, cache.slack) if prefill == "halo" else None
        taps: list[Tensor] = []
        whole = step
        run = once_more if checkpoint else plainly
        for block in self.blocks():
            streams = run(block.recall, streams, step, sight)
            if halo is not None and block.layer >= halo.first:
                if block.layer == halo.first:
                    sight = block.publish(streams, step, sight, cache)
                latest = step.latest(halo.reach(block.layer))
                if latest is None:  # a piece of a longer prompt, far from its end
                    taps = []
                    break
                step, rows = latest
                streams, sight, taps = streams.rows_of(rows), sight.rows_of(rows), [tap[rows] for tap in taps]
            if block.tapped:
                taps.append(block.tap(streams))
            streams, sight = run(block, streams, step, sight, cache)
        cache.extend(whole)
        logits = self.logits(streams, step)
        return Output(logits, torch.cat(taps, 1), step) if taps else Output(logits, None, None)

    def blocks(self) -> Iterator[Block]:
        """The layers in order."""
        return (block for block in self.layers if isinstance(block, Block))

    def begin(self, step: Step, cache: Cache) -> tuple[Streams, Sight]:
        """The streams that enter the first layer, and what every layer may know."""
        x = self.embed.weight[step.ids].to(self.ops.dtype)
        if step.features is not None:
            x = x.index_put((step.image,), step.features.to(x))
        ngrams = None if self.lookback is None else self.lookback(step, cache.tail)
        return Streams.start(x, self.config.hc_mult), Sight(ngrams=ngrams)

    def see(self, pictures: Sequence[Picture]) -> list[Float[Tensor, "t dim"]]:
        """The rows that stand for each picture's span in a prompt: `features` of a step whose `image` marks its tokens.

        Pictures share the tower's calls, of `PATCHES` patches unless one is larger. Raises `InputError` where the model
        has no vision tower or patches are of another size than it takes.
        """
        if self.vision is None or self.aligner is None:
            raise InputError("the model has no vision tower (vision_n_layers is 0): give it text alone")
        size = self.config.vision_patch_size
        if other := [tuple(picture.patches.shape[2:]) for picture in pictures if picture.patches.shape[2] != size]:
            raise InputError(f"patches must be {size} x {size} pixels, got {other[0][0]} x {other[0][1]}")
        return [
            self._span(rows, picture)
            for some in packs(pictures, PATCHES)
            for picture, rows in zip(some, self._cells(some), strict=True)
        ]

    def _cells(self, pictures: Sequence[Picture]) -> tuple[Float[Tensor, "c dim"], ...]:
        """What tower and aligner make of each picture, by cells in reading order."""
        assert self.vision is not None and self.aligner is not None
        grids = [picture.grid for picture in pictures]
        patches = torch.cat([picture.patches for picture in pictures]).to(self.embed.weight.device)
        rows = self.aligner(self.vision(patches, grids), grids)
        return rows.split([prod(cells(*grid, self.aligner.ratio)) for grid in grids])

    def _span(self, rows: Float[Tensor, "c dim"], picture: Picture) -> Float[Tensor, "t dim"]:
        """The cells of a picture with the learned delimiters around and between them."""
        types = picture.types(self.config.vision_downsample_ratio).to(rows.device)
        span = rows.new_empty(len(types), rows.shape[1])
        span[types == Mark.CELL] = rows
        delimiters = {Mark.START: self.image_start, Mark.NEWLINE: self.image_newline, Mark.END: self.image_end}
        for mark, delimiter in delimiters.items():
            assert delimiter is not None
            span[types == mark] = delimiter.to(rows.dtype)
        return span

    def logits(self, streams: Streams, step: Step) -> Float[Tensor, "j vocab"]:
        """Logits of the tokens that want them, from the streams that leave the last layer."""
        h, pre = streams.h[step.wanted], streams.pre[step.wanted]
        return self.head(self.norm(self.ops.collapse(h, pre)))

    def fresh_cache(self, step: Step) -> Cache:
        """An empty cache that holds just this step, its slots open."""
        slots = 1 + max(run.slot for run in step.runs)
        tokens = sum(run.length for run in step.runs)
        cache = Cache(self.config, slots, tokens, dtype=self.ops.dtype, device=step.device)
        for _ in range(slots):
            cache.open()
        return cache


def plainly(part: Callable[..., Any], *arguments: Any) -> Any:
    """Just run it."""
    return part(*arguments)


def once_more(part: Callable[..., Any], *arguments: Any) -> Any:
    """Run it and keep the arguments only; run it again when its gradient is asked for."""
    return checkpoint_of(part, *arguments, use_reentrant=False, preserve_rng_state=False)
