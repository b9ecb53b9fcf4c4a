"""Indexer: which compressed positions a token attends to.

Every visible position j of token t gets a score, sum over heads of relu(q_t . key_j) * weight_t, from queries and keys
small enough to go through the whole past; the `index_topk` best are picked, in order of position. Ties go to the lower
position. The candidate source also keeps the best blocks of neighbouring positions, and re-scorers below it pick
inside those: far from the start they score the candidates alone, so their cost stops growing with the past.

How the picks are found, in which pieces and by whom, is in `model/picking.py`.

A position's key is made of its latent, so only layers that make latents make keys; re-scorers score the same keys with
queries of their own.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from openv41.config import Config
from openv41.formats import INDEX
from openv41.model.layers import Linear, RMSNorm, Rotary, stored_in
from openv41.model.picking import GATHER, SCORE_BYTES, Keys, Picks, find_picks
from openv41.ops import Ops, Place, meanwhile
from openv41.plan import LayerPlan
from openv41.state import Paged, Step

IndexKeys = Literal["own_keys", "as_written"]


class Indexer(nn.Module):
    """Scores and picks for one layer. `score_bytes` bounds the memory of the scores; `always_score` works them out even
    where every visible position is picked anyhow (for those who record scores)."""

    def __init__(self, config: Config, plan: LayerPlan, rotary: Rotary, ops: Ops) -> None:
        super().__init__()
        c = config
        self.ops, self.rotary, self.ratio = ops, rotary, plan.ratio
        self.heads, self.width, self.topk = c.index_n_heads, c.index_head_dim, c.index_topk
        self.block = c.candidate_block_size
        self.keeps_blocks = c.candidate_topk_blocks if plan.publishes_candidates else 0
        self.weight_scale = (c.index_head_dim * c.index_n_heads) ** -0.5
        # Up to so many visible positions, all of them are picked and all of their blocks kept: no need to score.
        self.all_picked = min(self.topk, self.keeps_blocks * self.block) if self.keeps_blocks else self.topk
        # From so many visible positions on, a re-scorer gathers its candidates and scores no others.
        self.gathers_from = max(GATHER * c.candidate_topk_blocks * c.candidate_block_size, self.topk + self.block)
        self.most_blocks = c.candidate_topk_blocks
        self.score_bytes, self.always_score = SCORE_BYTES, False
        self.wq_b = Linear(c.q_lora_rank, c.index_n_heads * c.index_head_dim, stored_in(c), ops)
        self.weights_proj = Linear(c.dim, c.index_n_heads, "bf16", ops)
        if plan.latents_from == plan.layer:
            self.wk = Linear(c.head_dim, c.index_head_dim, "bf16", ops)
            self.k_norm = RMSNorm(c.index_head_dim, c.norm_eps, ops)

    def keys(self, latents: Float[Tensor, "g d"], position: Int[Tensor, "g"]) -> Float[Tensor, "g c"]:
        """Index keys of latents (normed, not rotated), each rotated at its group's first token; not yet rounded."""
        return self.ops.rotate(self.k_norm(self.wk(latents)), *self.rotary.at(position), inverse=False)

    def store_keys(self, latents: Float[Tensor, "g d"], position: Int[Tensor, "g"], table: Paged, into: Place) -> None:
        """The same, rounded, into rows of their table."""
        angles = self.rotary.at(position)
        self.ops.rotated_store(self.wk(latents), self.k_norm.stored, angles, INDEX, table.packed, into)

    def queries(
        self, x: Float[Tensor, "n dim"], qr: Float[Tensor, "n r"], position: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n i c"], Float[Tensor, "n i"]]:
        """Rounded queries, and the weight of each head."""
        weights = meanwhile(self.ops, self.head_weights, x)
        q = self.ops.rotated_linear(qr, *self.wq_b.stored, self.width, self.rotary.at(position), INDEX)
        return q, weights()

    def head_weights(self, x: Float[Tensor, "n dim"]) -> Float[Tensor, "n i"]:
        weights = self.weights_proj(x)
        return (weights * self.weight_scale).to(weights.dtype)

    @torch.no_grad()  # picks are numbers: no gradient passes through them
    def forward(
        self,
        x: Float[Tensor, "n dim"],
        qr: Float[Tensor, "n r"],
        step: Step,
        keys: Sequence[Keys],
        within: Bool[Tensor, "n blocks"] | None,
    ) -> Picks:
        """`keys`: for each run of the step, its slot's keys up to the run's end. `within`: candidate blocks, if any."""
        q, weights = self.queries(x, qr, step.position)
        return find_picks(self, q, weights, step, keys, within)

    def scores(
        self,
        q: Float[Tensor, "n i c"],
        weights: Float[Tensor, "n i"],
        keys: Float[Tensor, "p c"],
        within: Bool[Tensor, "n blocks"] | None,
    ) -> Float[Tensor, "n p"]:
        """Scores of every key, -inf outside the candidate blocks."""
        scores = self.ops.index_scores(q, weights, keys)
        if within is None:
            return scores
        inside = within.repeat_interleave(self.block, 1)[:, : keys.shape[0]]
        return scores.masked_fill(~inside.to(scores.device), -torch.inf)
