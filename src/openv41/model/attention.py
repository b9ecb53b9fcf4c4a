"""Attention: near (a window of the layer's own raw KV) and far (compressed positions handed down), in one softmax.

    x [n, dim] -> query   q [n, h, d], by way of a low-rank qr [n, r]
               -> window  kv [n, d], one vector a position, shared by all heads, key and value at once
               -> far     up to k rows of a source's latents [a, d]      (not in window-only layers)
               -> sparse attention over at most w + k rows, plus a learned sink per head
               -> rotated back, grouped low-rank output -> [n, dim]

What a layer does about the far part is its role: see `model/far.py`.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from openv41.config import Config
from openv41.formats import WINDOW
from openv41.model.compressor import Compressor
from openv41.model.far import Reader, Rescorer, Source
from openv41.model.indexer import Indexer, IndexKeys
from openv41.model.layers import Linear, RMSNorm, Rotary, stored_in
from openv41.ops import Ops, already, opening, put_off
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
        self.width, self.window_size, self.groups = c.head_dim, c.window_size, c.o_groups
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
        q, qr, near, near_rows = self.begin(x, step, cache.windows[self.layer])
        if self.far is None:
            far, far_rows = None, None
        else:
            sight = self.far(x, qr, step, sight, cache)
            far, far_rows = sight.far()
        out = self.attend(q(), near, near_rows, far, far_rows, step.position)
        return self.output(out), sight

    def begin(
        self, x: Float[Tensor, "n dim"], step: Step, ring: Ring
    ) -> tuple[Callable[[], Tensor], Float[Tensor, "n r"], Shaped[Tensor, "a _"], Int[Tensor, "n w"]]:
        """`query` and `window`: at one go, by a set of operations that can, where weights are quantised. What the heads
        ask is given when it is asked for: the far part does not need it."""
        at_once = opening(self.ops)
        if at_once is None or self.wq_a.reads is None:
            q, qr = self.query(x, step.position)
            return already(q), qr, *self.window(x, step, ring)
        back, angles = self.window_size - 1, self.rotary.at(step.position)
        into = ring.room(step) if ring.takes(step, back) else None
        qr, own = at_once.query_window(
            x, self.wq_a.stored, self.wkv.stored, self.q_norm.stored, self.kv_norm.stored, angles, ring.packed, into
        )
        asked = put_off(self.ops, self.heads_of, qr, step.position)
        table, rows = ring.push(step, None if into else own, back)
        return asked, qr, table, rows(step.window(self.window_size))

    def query(
        self, x: Float[Tensor, "n dim"], position: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n h d"], Float[Tensor, "n r"]]:
        """Heads' queries, their tails rotated; and the low-rank vector they come from, which the indexer uses too."""
        qr = self.q_norm(self.wq_a(x))
        return self.heads_of(qr, position), qr

    def heads_of(self, qr: Float[Tensor, "n r"], position: Int[Tensor, "n"]) -> Float[Tensor, "n h d"]:
        """Of low-rank vectors, which come normed: the queries alone."""
        return self.ops.rotated_linear(qr, *self.wq_b.stored, self.width, self.rotary.at(position))

    def stored(self, x: Float[Tensor, "n dim"], position: Int[Tensor, "n"], packed: bool) -> Shaped[Tensor, "n _"]:
        """The vector that a token puts into the window, as a table holds it: its tail rotated, and all of it rounded,
        or (packed) as a record of bytes."""
        return self.ops.rotated_store(self.wkv(x), self.kv_norm.stored, self.rotary.at(position), WINDOW, packed)

    def window(
        self, x: Float[Tensor, "n dim"], step: Step, ring: Ring
    ) -> tuple[Shaped[Tensor, "a _"], Int[Tensor, "n w"]]:
        """Put the step's tokens into the window; the table to read, and each token's rows, oldest first."""
        own = self.stored(x, step.position, ring.packed)
        table, rows = ring.push(step, own, self.window_size - 1)
        return table, rows(step.window(self.window_size))

    def attend(
        self,
        q: Float[Tensor, "n h d"],
        near: Shaped[Tensor, "a _"],
        near_rows: Int[Tensor, "n w"],
        far: Shaped[Tensor, "b _"] | None,
        far_rows: Int[Tensor, "n k"] | None,
        position: Int[Tensor, "n"],
    ) -> Float[Tensor, "n h d"]:
        """Values carry the rotation of their key's position: the query's own is turned back."""
        angles = self.rotary.at(position)
        return self.ops.rotated_attention(q, near, near_rows, far, far_rows, self.attn_sink, self.scale, angles)

    def output(self, out: Float[Tensor, "n h d"]) -> Float[Tensor, "n dim"]:
        """Groups of heads are brought to low rank each, and all of them to the model's width."""
        groups = out.flatten(1).unflatten(1, (self.groups, -1))  # [n, g, h * d / g]
        return self.wo_b(self.ops.rounded_grouped_linear(groups, *self.wo_a.stored, self.wo_b.reads))
