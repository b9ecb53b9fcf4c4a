"""One layer: memory (two layers have one), attention, experts, all on the streams."""

from jaxtyping import Float
from torch import Tensor, nn

from openv41.config import Config
from openv41.model.attention import Attention
from openv41.model.engram import Engram
from openv41.model.experts import Experts
from openv41.model.far import Source
from openv41.model.indexer import IndexKeys
from openv41.model.layers import RMSNorm
from openv41.model.streams import HyperConnection, Streams
from openv41.ops import Ops
from openv41.plan import plan_layers
from openv41.state import Cache, Sight, Step


class Block(nn.Module):
    """streams, sight -> streams, sight."""

    def __init__(self, config: Config, layer: int, ops: Ops, index_keys: IndexKeys = "own_keys") -> None:
        super().__init__()
        row = plan_layers(config)[layer]
        self.layer, self.tapped = layer, row.tapped
        self.engram = Engram(config, layer, ops) if row.engram else None
        self.hc_attn = HyperConnection(config, ops)
        self.attn_norm = RMSNorm(config.dim, config.norm_eps, ops)
        self.attn = Attention(config, layer, ops, index_keys)
        self.hc_ffn = HyperConnection(config, ops)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps, ops)
        self.ffn = Experts(config, row.experts, row.experts_per_token, ops)

    def recall(self, streams: Streams, step: Step, sight: Sight) -> Streams:
        """The memory's part, before the block proper: what the draft taps lies between the two."""
        if self.engram is None:
            return streams
        assert sight.ngrams is not None
        return Streams(self.engram(streams.h, sight.ngrams, step.image), streams.pre)

    def forward(self, streams: Streams, step: Step, sight: Sight, cache: Cache) -> tuple[Streams, Sight]:
        x = self.attn_norm(self.hc_attn.read(streams))
        y, sight = self.attn(x, step, sight, cache)
        streams = self.hc_attn.write(y, streams)

        x = self.ffn_norm(self.hc_ffn.read(streams))
        y = self.ffn(x, step.image)
        return self.hc_ffn.write(y, streams), sight

    def publish(self, streams: Streams, step: Step, sight: Sight, cache: Cache) -> Sight:
        """In a KV source: make latents and index keys of all the step's tokens, before the block runs for some."""
        if not isinstance(self.attn.far, Source):
            return sight
        x = self.attn_norm(self.hc_attn.read(streams))
        return self.attn.far.publish(x, step, sight, cache)

    def tap(self, streams: Streams) -> Float[Tensor, "n dim"]:
        """The mean of the streams that enter the block: what the draft stages read."""
        h = streams.h
        return self.hc_attn.ops.collapse(h, streams.pre.new_full(h.shape[:2], 1 / h.shape[1]))
