"""Attention: near (a window of the layer's own raw KV) and far (compressed positions handed down), in one softmax.

    x [n, dim] -> query   q [n, h, d], by way of a low-rank qr [n, r]
               -> window  kv [n, d], one vector a position, shared by all heads, key and value at once
               -> far     up to k rows of a source's latents [a, d]      (not in window-only layers)
               -> sparse attention over at most w + k rows, plus a learned sink per head
               -> rotated back, grouped low-rank output -> [n, dim]

What a layer does about the far part is its role: see `model/far.py`.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from openv41.config import Config
from openv41.formats import WINDOW
from openv41.model.compressor import Compressor
from openv41.model.far import Reader, Rescorer, Source
from openv41.model.indexer import Indexer, IndexKeys
from openv41.model.layers import Linear, RMSNorm, Rotary, stored_in
from openv41.ops import Ops
from openv41.plan import LayerPlan, Role, plan_layers
from openv41.state import Cache, Ring, Sight, Step


class Attention(nn.Module):
    """One attention layer, `config` and its row of the plan telling which.

    `index_keys`: "own_keys" (a source always scores against its own index keys) or "as_written" (the published decode:
    see `Source`). Parameters have the published names.
    """

    def __init__(self, config: Config, layer: int, ops: Ops, index_keys: IndexKeys = "own_keys") -> None:
        super().__init__()
        plan = plan_layers(config)
        row = plan[layer]
        c = config
        self.plan, self.layer, self.ops = row, layer, ops
        self.heads, self.window_size, self.groups = c.n_heads, c.window_size, c.o_groups
        self.scale = c.head_dim**-0.5
        self.rotary = Rotary.for_branch(c, compressed=row.ratio > 0)
        stored = stored_in(c)

        self.attn_sink = nn.Parameter(torch.zeros(c.n_heads, dtype=torch.float32))
        self.wq_a = Linear(c.dim, c.q_lora_rank, stored, ops)
        self.q_norm = RMSNorm(c.q_lora_rank, c.norm_eps, ops)
        self.wq_b = Linear(c.q_lora_rank, c.n_heads * c.head_dim, stored, ops)
        self.wkv = Linear(c.dim, c.head_dim, stored, ops)
        self.kv_norm = RMSNorm(c.head_dim, c.norm_eps, ops)
        self.wo_a = Linear(c.n_heads * c.head_dim // c.o_groups, c.o_groups * c.o_lora_rank, stored, ops)
        self.wo_b = Linear(c.o_groups * c.o_lora_rank, c.dim, stored, ops)

        self.compressor = Compressor(c, row.ratio, ops) if row.latents_from == layer else None
        picks_here = row.picks_from == layer
        self.indexer = Indexer(c, row, self.rotary, ops) if picks_here else None
        self.far = self._far_part(row, plan, index_keys)

    def _far_part(
        self, row: LayerPlan, plan: tuple[LayerPlan, ...], index_keys: IndexKeys
    ) -> Source | Rescorer | Reader | None:
        match row.role:
            case Role.WINDOW:
                return None
            case Role.READER:
                return Reader()
            case Role.RESCORER:
                assert self.indexer is not None
                return Rescorer(self.indexer)
            case Role.SOURCE | Role.CANDIDATE_SOURCE:
                assert self.indexer is not None and self.compressor is not None
                return Source(self.compressor, self.indexer, plan, row, index_keys)

    def forward(
        self, x: Float[Tensor, "n dim"], step: Step, sight: Sight, cache: Cache
    ) -> tuple[Float[Tensor, "n dim"], Sight]:
        """The layer's result for the step's tokens, and what it hands down. Writes the layer's part of the cache."""
        q, qr = self.query(x, step.position)
        near, near_rows = self.window(x, step, cache.windows[self.layer])
        if self.far is None:
            far, far_rows = None, None
        else:
            sight = self.far(x, qr, step, sight, cache)
            far, far_rows = sight.far()
        out = self.ops.sparse_attention(q, near, near_rows, far, far_rows, self.attn_sink, self.scale)
        return self.output(out, step.position), sight

    def query(
        self, x: Float[Tensor, "n dim"], position: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n h d"], Float[Tensor, "n r"]]:
        """Heads' queries, their tails rotated; and the low-rank vector they come from, which the indexer uses too."""
        qr = self.q_norm(self.wq_a(x))
        q = self.wq_b(qr).unflatten(-1, (self.heads, -1))  # [n, h, d]
        return self.ops.rotate(q, *self.rotary.at(position), inverse=False), qr

    def key_value(self, x: Float[Tensor, "n dim"], position: Int[Tensor, "n"]) -> Float[Tensor, "n d"]:
        """The vector that a token puts into the window: the rotated tail will be rounded with the rest."""
        return self.ops.rotate(self.kv_norm(self.wkv(x)), *self.rotary.at(position), inverse=False)

    def stored(self, x: Float[Tensor, "n dim"], position: Int[Tensor, "n"], packed: bool) -> Shaped[Tensor, "n _"]:
        """The same as a table holds it: rounded, or (packed) as records of bytes."""
        return self.ops.store(self.key_value(x, position), WINDOW, packed)

    def window(
        self, x: Float[Tensor, "n dim"], step: Step, ring: Ring
    ) -> tuple[Shaped[Tensor, "a _"], Int[Tensor, "n w"]]:
        """Put the step's tokens into the window; the table to read, and each token's rows, oldest first."""
        own = self.stored(x, step.position, ring.packed)
        table, rows = ring.push(step, own, self.window_size - 1)
        return table, rows(step.window(self.window_size))

    def output(self, out: Float[Tensor, "n h d"], position: Int[Tensor, "n"]) -> Float[Tensor, "n dim"]:
        """Values carry the rotation of their key's position: the query's own is turned back. Then groups of heads are
        brought to low rank each, and all of them to the model's width."""
        out = self.ops.rotate(out, *self.rotary.at(position), inverse=True)
        groups = out.flatten(1).unflatten(1, (self.groups, -1))  # [n, g, h * d / g]
        return self.wo_b(self.ops.grouped_linear(groups, self.wo_a.weight, self.wo_a.scale).flatten(1))
