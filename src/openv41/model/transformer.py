"""The whole text path: ids -> streams -> blocks -> logits.

    embed [n, dim] -> m copies -> (memory, attention, experts) x layers -> one mix -> norm -> head [j, vocab]

A step is packed: `n` tokens of any mixture of sequences. What sequences remember is in the cache, and nowhere else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from openv41.config import Config
from openv41.model.block import Block
from openv41.model.engram import Lookback
from openv41.model.indexer import IndexKeys
from openv41.model.layers import RMSNorm, WideLinear
from openv41.model.streams import Streams
from openv41.ops import Ops
from openv41.state import Cache, Sight, Step

Prefill = Literal["halo", "full"]


@dataclass(frozen=True)
class Output:
    """`logits` [j, vocab] in float32 of the tokens that wanted them; `taps` [kept, targets * dim], for the draft, of
    the tokens that the last layer ran."""

    logits: Float[Tensor, "j vocab"]
    taps: Float[Tensor, "kept width"] | None


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


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, dim, dtype=torch.bfloat16))


class Transformer(nn.Module):
    """DeepSeek-V4.1's text path. `ops` is the set of operations it runs on, held as `self.ops` by every part."""

    def __init__(self, config: Config, ops: Ops, index_keys: IndexKeys = "own_keys") -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.embed = Embedding(config.vocab_size, config.dim)
        self.lookback = Lookback(config) if config.engram_layer_ids else None
        self.layers = nn.ModuleList(Block(config, layer, ops, index_keys) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps, ops)
        self.head = WideLinear(config.dim, config.vocab_size, "fp32", ops)

    def forward(self, step: Step, cache: Cache | None = None, prefill: Prefill = "halo") -> Output:
        """Run one step. The slots' new tokens are in the cache when it returns; without a cache a fresh one is used.

        `prefill="halo"` runs the layers from the last KV source on only for the tokens whose result can still reach the
        logits that are wanted, or what the cache keeps; "full" runs all layers for all tokens. Logits and cache are the
        same, bit for bit under row-stable ops: see `Halo`.
        """
        cache = self.fresh_cache(step) if cache is None else cache
        cache.admit(step)
        streams, sight = self.begin(step, cache)
        halo = Halo.of(self.config, step, cache.slack)
        taps: list[Tensor] = []
        whole = step
        for block in self.blocks():
            streams = block.recall(streams, step, sight)
            if halo is not None and prefill == "halo" and block.layer >= halo.first:
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
            streams, sight = block(streams, step, sight, cache)
        cache.extend(whole)
        return Output(self.logits(streams, step), torch.cat(taps, 1) if taps else None)

    def blocks(self) -> Iterator[Block]:
        """The layers in order."""
        return (block for block in self.layers if isinstance(block, Block))

    def begin(self, step: Step, cache: Cache) -> tuple[Streams, Sight]:
        """The streams that enter the first layer, and what every layer may know."""
        x = self.embed.weight[step.ids].to(self.ops.dtype)
        ngrams = None if self.lookback is None else self.lookback(step, cache.tail)
        return Streams.start(x, self.config.hc_mult), Sight(ngrams=ngrams)

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
