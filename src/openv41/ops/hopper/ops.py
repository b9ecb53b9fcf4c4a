"""`HopperOps`: which kernel an operation of the seam is sent to."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from openv41.errors import OpsError
from openv41.formats import LATENT, WINDOW, BlockFormat
from openv41.ops.fast import FastOps
from openv41.ops.hopper import attend, attend_gluon, pick, products, rows, score, select
from openv41.ops.hopper.products import Workspace
from openv41.ops.hopper.sinkhorn import balanced
from openv41.ops.reference import Numerics

DECODE_ONCE = 8
"""A table of records is decoded to bf16 beforehand where its rows are listed so many times over. Attention then reads
bf16 rows, which it does faster; decoding a row takes about as long as reading it eight times."""


class HopperOps(FastOps):
    """Published numerics on a Hopper GPU. Differences from `ReferenceOps`: the order of float32 sums in products and in
    attention. Scores, picks, norms, rotations and whatever is stored are equal to the bit.

    One set serves one stream: its products share counters. Raises `OpsError` for other numerics.
    """

    name = "hopper"

    def __init__(self, numerics: Numerics = "published", dtype: torch.dtype | None = None) -> None:
        if numerics != "published":
            raise OpsError(f"the hopper ops compute published numerics, got {numerics!r}: take the fast ops for these")
        super().__init__(numerics, dtype)
        self.work: dict[torch.device, Workspace] = {}

    def _work(self, device: torch.device) -> Workspace:
        if device not in self.work:
            self.work[device] = Workspace.on(device)
        return self.work[device]

    # Linear maps

    def linear(self, x: Float[Tensor, "n inputs"], weight: Tensor, scale: Tensor | None) -> Float[Tensor, "n outputs"]:
        return products.linear(x, weight, scale, self._work(x.device))

    def linear_wide(self, x: Float[Tensor, "n inputs"], weight: Tensor) -> Float[Tensor, "n outputs"]:
        """A bf16 activation; others (the router's, the streams') are the library's."""
        if x.dtype != torch.bfloat16:
            return super().linear_wide(x, weight)
        return products.linear_wide(x, weight, self._work(x.device))

    def grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Tensor | None
    ) -> Float[Tensor, "n g outputs"]:
        return products.grouped_linear(x, weight, scale, self._work(x.device))

    # Norm, rotation, storing

    def rms_norm(self, x: Float[Tensor, "*n k"], weight: Tensor, eps: float) -> Float[Tensor, "*n k"]:
        flat = rows.rms_norm(x.reshape(-1, x.shape[-1]), rows.Norm(weight, eps))
        return flat.view(x.shape)

    def rotate(
        self,
        x: Float[Tensor, "n *h d"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        inverse: bool = False,
    ) -> Float[Tensor, "n *h d"]:
        return rows.rotate(x, cos, sin, inverse)

    def quantise(self, x: Float[Tensor, "*n k"], form: BlockFormat) -> Float[Tensor, "*n k"]:
        return rows.round_activation(x) if form is WINDOW else self._stored(x, form, packed=False).view(x.shape)

    def store(self, x: Float[Tensor, "*n k"], form: BlockFormat, packed: bool) -> Tensor:
        return self._stored(x, form, packed).unflatten(0, x.shape[:-1])

    def _stored(self, x: Tensor, form: BlockFormat, packed: bool) -> Tensor:
        """Rows of x, turned by nothing."""
        flat = x.reshape(-1, x.shape[-1])
        nothing = torch.empty((flat.shape[0], 0), dtype=torch.float32, device=x.device)
        return rows.rotate_store(flat, nothing, nothing, form, packed)

    def read(self, rows_: Tensor, form: BlockFormat) -> Float[Tensor, "*n k"]:
        if rows_.dtype != torch.uint8:
            return rows_
        flat = rows.decode_table(rows_.reshape(-1, rows_.shape[-1]).contiguous(), form)
        return flat.view(*rows_.shape[:-1], flat.shape[-1])

    # Index

    def index_scores(
        self, q: Float[Tensor, "n i c"], weights: Float[Tensor, "n i"], keys: Float[Tensor, "p c"]
    ) -> Float[Tensor, "n p"]:
        return score.index_scores(q, weights, keys)

    def pick(self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], k: int) -> Int[Tensor, "n k"]:
        return pick.pick(scores, visible, k)

    def pick_blocks(
        self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], block: int, k: int
    ) -> Bool[Tensor, "n blocks"]:
        return pick.pick_blocks(scores, visible, block, k)

    def select(
        self,
        q: Float[Tensor, "n i c"],
        weights: Float[Tensor, "n i"],
        table: Shaped[Tensor, "rows _"],
        slot: Int[Tensor, "n"],
        pages: Int[Tensor, "slots pages"],
        per_page: int,
        visible: Int[Tensor, "n"],
        k: int,
        most: int,
        runs: Sequence[int],
        block: int,
        keep: int,
        within: Bool[Tensor, "n blocks"] | None,
        kept: int,
        budget: int,
    ) -> tuple[Int[Tensor, "n k"], Bool[Tensor, "n blocks"] | None]:
        return select.select(
            q, weights, table, slot, pages, per_page, visible, k, most, runs, block, keep, within, kept, budget
        )

    # Streams

    def sinkhorn(self, logits: Float[Tensor, "n m m"], rounds: int, eps: float) -> Float[Tensor, "n m m"]:
        return balanced(logits, rounds, eps)

    # Attention

    def sparse_attention(
        self,
        q: Float[Tensor, "n h d"],
        near: Shaped[Tensor, "a _"],
        near_rows: Int[Tensor, "n w"],
        far: Shaped[Tensor, "b _"] | None,
        far_rows: Int[Tensor, "n k"] | None,
        sink: Float[Tensor, "h"],
        scale: float,
    ) -> Float[Tensor, "n h d"]:
        """Records are read as they are, or decoded once for all queries; by specialised warps where the shape fits."""
        tables = [(near, near_rows, WINDOW)]
        if far is not None and far_rows is not None:
            tables.append((far, far_rows, LATENT))
        read_often = all(DECODE_ONCE * len(table) <= listed.numel() for table, listed, _ in tables)
        if read_often or len({table.dtype for table, _, _ in tables}) > 1:
            near = self.read(near, WINDOW)
            far = None if far is None else self.read(far, LATENT)
        run = attend_gluon.attend_gluon if self.specialised(q) else attend.attend
        return run(q, near, near_rows, far, far_rows, sink, scale)

    def specialised(self, q: Tensor) -> bool:
        """Whether the kernel of specialised warps takes these queries."""
        fits = q.shape[1] <= attend_gluon.HEADS and q.shape[2] == attend_gluon.WIDTH
        return fits and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
