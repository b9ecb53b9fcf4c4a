"""CpuOps: `FastOps` as a CPU likes it. Pieces that stay in its cache, no product that is not asked for, and bf16
products where it has them.

A step costs little to begin on a CPU, so operations that `FastOps` words in few steps are those of the specification
here, to the bit; and it costs nothing to look at a number, so lists are cut where they end.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from openv41.formats import LATENT, WINDOW
from openv41.ops.fast import QUERIES, FastOps, Weights, round_activation
from openv41.ops.reference import Numerics, ReferenceOps, wide


def native_bf16() -> bool:
    """Whether the CPU multiplies bf16 matrices itself; elsewhere that is emulated, and slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class CpuOps(FastOps):
    """`weights`: "stored" dequantises a weight at every use (frugal, slow); "cached" keeps dequantised weights, in bf16
    where the CPU has bf16 products and in float32 elsewhere; "bf16" or "fp32" say which."""

    name = "cpu"
    few_steps = False

    def __init__(
        self, numerics: Numerics = "published", dtype: torch.dtype | None = None, weights: Weights = "stored"
    ) -> None:
        super().__init__(numerics, dtype, weights)

    def multiplies_bf16(self) -> bool:
        return native_bf16()

    # As the specification has them, but for sums and elementary functions

    rms_norm = ReferenceOps.rms_norm
    inverse_rms = ReferenceOps.inverse_rms
    mix = ReferenceOps.mix
    sinkhorn = ReferenceOps.sinkhorn
    collapse = ReferenceOps.collapse
    expand = ReferenceOps.expand
    swiglu = ReferenceOps.swiglu
    pick_blocks = ReferenceOps.pick_blocks

    def rotate(
        self,
        x: Float[Tensor, "n *h d"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        inverse: bool = False,
    ) -> Float[Tensor, "n *h d"]:
        """Only the tail is worked on; the rest is copied."""
        width = 2 * cos.shape[-1]
        turned = x.clone()
        tail = x[..., x.shape[-1] - width :]
        turned[..., x.shape[-1] - width :] = ReferenceOps.rotate(self, tail, cos, sin, inverse)
        return turned

    def grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Tensor | None
    ) -> Float[Tensor, "n g outputs"]:
        groups = self.values(weight, scale).unflatten(0, (x.shape[1], -1))  # [g, outputs, inputs]
        return torch.stack([self._product(x[:, i], groups[i]) for i in range(x.shape[1])], 1).to(x.dtype)

    def _product(self, x: Tensor, values: Tensor) -> Tensor:
        if x.shape[0] == 1:  # memory is all: a matrix-vector product reads the weights faster
            return torch.mv(values, x.to(values.dtype).squeeze(0)).unsqueeze(0)
        return super()._product(x, values)

    def experts(
        self,
        x: Float[Tensor, "n dim"],
        routing: Float[Tensor, "n k"],
        chosen: Int[Tensor, "n k"],
        w1: tuple[Tensor, Tensor | None],
        w2: tuple[Tensor, Tensor | None],
        w3: tuple[Tensor, Tensor | None],
        limit: float,
    ) -> Float[Tensor, "n dim"]:
        """The activation is rounded once for all experts; each expert's tokens go through it together."""
        if self.plain:
            return ReferenceOps.experts(self, x, routing, chosen, w1, w2, w3, limit)
        quantised = w1[1] is not None
        rounded = round_activation(x) if quantised else x
        result = torch.zeros_like(wide(x))
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            up, gate, down = (self._expert(w, expert) for w in (w3, w1, w2))
            inputs = rounded[token]
            hidden = self.swiglu(
                self._product(inputs, gate).to(x.dtype),
                self._product(inputs, up).to(x.dtype),
                limit,
                routing[token, place].unsqueeze(1),
            )
            hidden = round_activation(hidden) if quantised else hidden
            result.index_add_(0, token, wide(self._product(hidden, down).to(x.dtype)))
        return result

    def index_scores(
        self, q: Float[Tensor, "n i c"], weights: Float[Tensor, "n i"], keys: Float[Tensor, "p c"]
    ) -> Float[Tensor, "n p"]:
        return (ReferenceOps if self.plain else FastOps).index_scores(self, q, weights, keys)

    def pick(self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], k: int) -> Int[Tensor, "n k"]:
        return (FastOps if scores.dtype == torch.bfloat16 else ReferenceOps).pick(self, scores, visible, k)

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
        """Of each few queries' lists only the columns that any of them uses."""
        if self.plain:
            return ReferenceOps.sparse_attention(self, q, near, near_rows, far, far_rows, sink, scale)
        rows, listed = near_rows, near_rows >= 0
        tables = [near]
        if far is not None and far_rows is not None:
            rows = torch.cat((near_rows, far_rows + near.shape[0]), 1)
            listed = torch.cat((listed, far_rows >= 0), 1)
            tables.append(far)
        gather = self._gather_from(tables, rows.where(listed, -1))
        result = torch.empty_like(q)
        for first in range(0, q.shape[0], QUERIES):
            some = slice(first, first + QUERIES)
            used = _columns_used(listed[some])
            result[some] = self._attend(q[some], gather(some, used), listed[some, :used], sink, scale)
        return result

    def _attend_plain(self, q: Tensor, rows: Tensor, listed: Tensor, sink: Tensor, scale: float) -> Tensor:
        return ReferenceOps._attend_plain(self, q, rows, listed, sink, scale)

    def _gather_from(
        self, tables: list[Tensor], rows: Int[Tensor, "n t"]
    ) -> Callable[[slice, int], Float[Tensor, "q t d"]]:
        """A function that gives some queries' rows in float32. Where most rows of the tables are read many times over
        they are decoded once, beforehand; a few rows out of a long cache are decoded as they come."""
        forms = (WINDOW, LATENT)[: len(tables)]
        if rows.numel() > sum(table.shape[0] for table in tables):
            read = [self.read(table, form) for table, form in zip(tables, forms, strict=True)]
            nothing = read[0].new_zeros(1, read[0].shape[1])  # row -1
            whole = torch.cat((*read, nothing)).float()
            index = rows.where(rows >= 0, len(whole) - 1)

            def taken(some: slice, used: int) -> Tensor:
                wanted = index[some, :used]
                return whole.index_select(0, wanted.flatten()).view(*wanted.shape, whole.shape[1])

            return taken
        border = tables[0].shape[0]

        def picked(some: slice, used: int) -> Tensor:
            wanted = rows[some, :used]
            if len(tables) == 1:
                values = self.read(tables[0][wanted.clamp_min(0)], WINDOW)
                return values.masked_fill(wanted.unsqueeze(-1) < 0, 0).float()
            in_near = wanted < border  # row -1 among them
            from_near = wanted[in_near]
            near = self.read(tables[0][from_near.clamp_min(0)], WINDOW)
            near = near.masked_fill(from_near.unsqueeze(-1) < 0, 0)
            values = near.new_empty((*wanted.shape, near.shape[-1]))
            values[in_near] = near
            values[~in_near] = self.read(tables[1][wanted[~in_near] - border], LATENT)
            return values.float()

        return picked


def _columns_used(listed: Tensor) -> int:
    """Columns of a list up to the last one that any query uses: the rest names no rows."""
    used = listed.any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0
