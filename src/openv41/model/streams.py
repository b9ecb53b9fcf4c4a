"""Hyper-connections: `m` residual streams instead of one.

A sublayer reads one mix of the streams (collapse) and its result is written to all of them, which are mixed with each
other on the way (expand). The three sets of coefficients are computed from the streams themselves:

    pre  [m]      the mix that is read: of the *next* sublayer, not of this one
    post [m]      how strongly the result goes to each stream
    comb [m, m]   how the streams carry over into each other, rows and columns summing to one (Sinkhorn)

The mix is staggered: a sublayer reads with the `pre` that the sublayer before it computed, and computes one for the
next. `Streams` carries the two together, so a reader need not think of it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from openv41.config import Config
from openv41.ops import Ops


@dataclass(frozen=True)
class Streams:
    """The streams `h` [n, m, dim], and the mix `pre` [n, m] with which the next sublayer reads them."""

    h: Float[Tensor, "n m dim"]
    pre: Float[Tensor, "n m"]

    @classmethod
    def start(cls, x: Float[Tensor, "n dim"], m: int) -> "Streams":
        """m copies of the embedding; the first reader takes the first copy."""
        pre = torch.zeros(x.shape[0], m, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        pre[:, 0].fill_(1)  # a number that is assigned would be sent to the device first
        return cls(x.unsqueeze(1).repeat(1, m, 1), pre)

    def rows_of(self, rows: Int[Tensor, "kept"]) -> "Streams":
        """The same for some of the step's tokens only."""
        return Streams(self.h[rows], self.pre[rows])


class HyperConnection(nn.Module):
    """Reads and writes the streams around a sublayer. Parameters in float32: fn [m (m + 2), m dim], base, scale [3]."""

    def __init__(self, config: Config, ops: Ops) -> None:
        super().__init__()
        m = config.hc_mult
        self.ops, self.rounds = ops, config.hc_sinkhorn_iters
        self.eps, self.norm_eps = config.hc_eps, config.norm_eps
        self.fn = nn.Parameter(torch.empty(m * (m + 2), m * config.dim, dtype=torch.float32))
        self.base = nn.Parameter(torch.zeros(m * (m + 2), dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float32))

    def read(self, streams: Streams) -> Float[Tensor, "n dim"]:
        """What the sublayer works on."""
        return self.ops.collapse(streams.h, streams.pre)

    def write(self, y: Float[Tensor, "n dim"], streams: Streams) -> Streams:
        """The sublayer's result in the streams that it read, and the mix for the next."""
        pre, post, comb = self.coefficients(streams.h)
        return Streams(self.ops.expand(y, streams.h, post, comb), pre)

    def coefficients(
        self, h: Float[Tensor, "n m dim"]
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"], Float[Tensor, "n m m"]]:
        return self.ops.mix(h, self.fn, self.base, self.scale, self.rounds, self.eps, self.norm_eps)
