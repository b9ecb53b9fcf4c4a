"""Compressor: `ratio` tokens become one latent of the width of a head.

Ratio 1: a projection and a norm. Ratio 2: two projections in float32, kv and gate; per channel, the softmax over the
group's gates weights the group's kv. A group whose last token has not come yet stays open: its kv and gate wait in the
cache, and no token sees it.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from openv41.config import Config
from openv41.model.layers import Linear, RMSNorm, WideLinear
from openv41.ops import Ops
from openv41.state import Ring, Step


class Compressor(nn.Module):
    """x [n, dim] -> latents [groups, d] of the groups that the step completes: normed, not yet rotated or rounded."""

    def __init__(self, config: Config, ratio: int, ops: Ops) -> None:
        super().__init__()
        self.ratio, self.ops = ratio, ops
        self.norm = RMSNorm(config.head_dim, config.norm_eps, ops)
        if ratio == 1:
            self.wkv: Callable[[Tensor], Tensor] = Linear(config.dim, config.head_dim, "bf16", ops)
        else:
            self.wkv = WideLinear(config.dim, config.head_dim, "fp32", ops)
            self.wgate = WideLinear(config.dim, config.head_dim, "fp32", ops)

    def forward(self, x: Float[Tensor, "n dim"], step: Step, group: Ring | None) -> Float[Tensor, "groups d"]:
        """`group`: the ring of the slots' last kv and gate rows [.., 2 d]; not needed for ratio 1."""
        if group is None:
            return self.norm(self.wkv(x))
        pairs = torch.cat((self.wkv(x), self.wgate(x)), -1)  # [n, 2 d]
        table, rows = group.push(step, pairs, self.ratio - 1)
        kv, gate = table.chunk(2, -1)
        members = self.members(step, rows, pairs.requires_grad)
        return self.ops.pooled(kv, gate, members, self.norm.stored)

    def members(self, step: Step, rows: Callable[[Tensor], Tensor], gradient: bool) -> Int[Tensor, "groups ratio"]:
        """Rows of each group's tokens. All sources of a ratio ask for the same, unless some tables carry gradient."""
        groups = step.groups(self.ratio)
        make = partial(rows_of_tokens, rows, step, groups.token, groups.position)
        return step.remember(("members", self.ratio, gradient), make)


def rows_of_tokens(rows: Callable[[Tensor], Tensor], step: Step, token: Tensor, position: Tensor) -> Tensor:
    """Table rows of `position` [g, j] for the tokens in rows `token` [g] only."""
    everyone = torch.full((len(step), position.shape[1]), -1, device=position.device)
    everyone[token] = position
    return rows(everyone)[token]
