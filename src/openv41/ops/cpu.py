"""CpuOps: the same operations, fast on a CPU. Gather first, then large matrix products; weights dequantised once.

Where an operation here differs from `ReferenceOps` it is in the order of float32 sums and in the last bit of
elementary functions. Rounding to bf16, fp8 and fp4 happens in the same places, so results are equal but where such a
last bit meets a rounding border. Rows are *not* promised to be stable: a matrix library picks its kernel by the shape.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from openv41.errors import OpsError
from openv41.formats import LATENT, WINDOW, BlockFormat
from openv41.ops.reference import LIST_BLOCK, NO_SCORE, Activation, Numerics, ReferenceOps, ascending, wide

Weights = Literal["stored", "cached", "bf16", "fp32"]

DECODED = 8192
"""Records that are decoded at a time."""

QUERIES = 16
"""Queries that attention gathers rows for at a time: 21 MB of float32 rows in the released model."""


def native_bf16() -> bool:
    """Whether the CPU multiplies bf16 matrices itself; elsewhere that is emulated, and slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class CpuOps(ReferenceOps):
    """`weights`: "stored" dequantises a weight at every use (frugal, slow); "cached" keeps dequantised weights, in bf16
    where the CPU has bf16 products and in float32 elsewhere; "bf16" or "fp32" say which."""

    name = "cpu"

    def __init__(
        self, numerics: Numerics = "published", dtype: torch.dtype | None = None, weights: Weights = "stored"
    ) -> None:
        super().__init__(numerics, dtype)
        if weights not in ("stored", "cached", "bf16", "fp32"):
            raise OpsError(f"weights must be stored, cached, bf16 or fp32, got {weights!r}")
        self.bf16_products = native_bf16() if weights in ("stored", "cached") else weights == "bf16"
        self.caches = weights != "stored"
        self.held = WeakIdKeyDictionary()

    # Sums and elementary functions: the library's

    def matmul(self, x: Float[Tensor, "*batch n k"], w: Float[Tensor, "*batch o k"]) -> Float[Tensor, "*batch n o"]:
        return wide(x) @ w.to(wide(x).dtype).mT

    def sum(self, x: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows"]:
        return x.sum(-1)

    def exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def softplus(self, x: Tensor) -> Tensor:
        return F.softplus(x)

    def activate(self, x: Float[Tensor, "*n k"], function: Activation) -> Float[Tensor, "*n k"]:
        """The library's silu widens and rounds element by element: no wide copy of the whole. Its gelu has an error
        function of its own, which is off by more than the last bit for large negative values."""
        return F.silu(x) if function == "silu" else super().activate(x, function)

    def erf(self, x: Tensor) -> Tensor:
        return x.erf()

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
        turned[..., x.shape[-1] - width :] = super().rotate(x[..., x.shape[-1] - width :], cos, sin, inverse)
        return turned

    def read(self, rows: Tensor, form: BlockFormat) -> Float[Tensor, "*n k"]:
        """Records of a large table are decoded some at a time: that takes several times the memory of its result."""
        if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[0] <= DECODED:
            return super().read(rows, form)
        return torch.cat([super(CpuOps, self).read(some, form) for some in rows.split(DECODED)])

    # Linear maps: activation and weight rounded to their grids, then one product

    def linear(
        self, x: Float[Tensor, "n inputs"], weight: Tensor, scale: Tensor | None
    ) -> Float[Tensor, "n outputs"]:
        if scale is not None and not self.plain:
            x = round_activation(x)
        return self._product(x, self.values(weight, scale)).to(x.dtype)

    def linear_wide(self, x: Float[Tensor, "n inputs"], weight: Tensor) -> Float[Tensor, "n outputs"]:
        return F.linear(wide(x), self.values(weight, None, wide=True))

    def linear_bias(self, x: Float[Tensor, "n inputs"], weight: Tensor, bias: Tensor) -> Float[Tensor, "n outputs"]:
        values = self.values(weight, None)
        return F.linear(x.to(values.dtype), values, bias.to(values.dtype)).to(x.dtype)

    def grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Tensor | None
    ) -> Float[Tensor, "n g outputs"]:
        groups = self.values(weight, scale).unflatten(0, (x.shape[1], -1))  # [g, outputs, inputs]
        return torch.stack([self._product(x[:, i], groups[i]) for i in range(x.shape[1])], 1).to(x.dtype)

    def _product(self, x: Tensor, values: Tensor) -> Tensor:
        x = x.to(values.dtype)
        if x.shape[0] == 1:  # memory is all: a matrix-vector product reads the weights faster
            return torch.mv(values, x.squeeze(0)).unsqueeze(0)
        return F.linear(x, values)

    def values(self, weight: Tensor, scale: Tensor | None, wide: bool = False) -> Tensor:
        """The weight's values in the dtype that products are taken in: kept if this set caches, else made anew."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        if self.bf16_products and self.dtype == torch.bfloat16 and not wide:
            dtype = torch.bfloat16
        if scale is None and weight.dtype == dtype:
            return weight
        if not self.caches or (weight.requires_grad and torch.is_grad_enabled()):
            return self._dequantise(weight, scale, dtype)
        held = self.held.get(weight)
        state = (_version(weight), _version(scale), dtype)
        if held is None or held[0] != state:
            held = (state, self._dequantise(weight, scale, dtype).detach())
            self.held[weight] = held
        return held[1]

    def _dequantise(self, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self.dense(weight, scale).to(dtype)

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
            return super().experts(x, routing, chosen, w1, w2, w3, limit)
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

    def _expert(self, stacked: tuple[Tensor, Tensor | None], expert: int) -> Tensor:
        weight, scale = stacked
        if self.caches:
            return self.values(weight, scale)[expert]
        return self.values(weight[expert], None if scale is None else scale[expert])

    # Index

    def index_scores(
        self, q: Float[Tensor, "n i c"], weights: Float[Tensor, "n i"], keys: Float[Tensor, "p c"]
    ) -> Float[Tensor, "n p"]:
        """One product for all heads. Operands lie on the fp4 grid: each sum is exact, its rounding the published."""
        if self.plain:
            return super().index_scores(q, weights, keys)
        flat = q.flatten(0, 1)
        products = flat @ keys.mT if self.bf16_products else (flat.float() @ keys.float().mT).to(q.dtype)
        shares = products.relu_().unflatten(0, q.shape[:2]).mul_(weights.unsqueeze(-1))  # [n, i, p]
        return shares.sum(1, dtype=torch.float32).to(q.dtype)

    def pick(self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], k: int) -> Int[Tensor, "n k"]:
        """A partial selection instead of a sort, over integers that order as (score, lower position first) do."""
        if scores.dtype != torch.bfloat16 or scores.shape[1] <= k:
            return super().pick(scores, visible, k)
        position = torch.arange(scores.shape[1])
        order = _ranks(scores, position).masked_fill_(position >= visible.unsqueeze(1), torch.iinfo(torch.int64).min)
        return ascending(order.topk(k, sorted=False).indices, visible, k)

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
        """Gather the rows of some queries, then two products. The maximum at each block of 64 is found for all blocks
        at once, and what a later, higher maximum would have faded is faded at the end."""
        if self.plain:
            return super().sparse_attention(q, near, near_rows, far, far_rows, sink, scale)
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

    def full_attention(
        self,
        q: Float[Tensor, "n h d"],
        k: Float[Tensor, "n h d"],
        v: Float[Tensor, "n h d"],
        lengths: Sequence[int],
        scale: float,
    ) -> Float[Tensor, "n h d"]:
        """The library's attention, once for each run of groups of equal length: no row is padded."""
        runs = [(length, len(list(same))) for length, same in groupby(lengths)]
        sizes = [length * count for length, count in runs]
        pieces = [q[:0]]
        for (length, _), *rows in zip(runs, *(x.split(sizes) for x in (q, k, v)), strict=True):
            # [count, h, length, d], wide: in bf16 the library rounds the probabilities
            queries, keys, values = (wide(x).unflatten(0, (-1, length)).transpose(1, 2) for x in rows)
            out = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
            pieces.append(out.transpose(1, 2).flatten(0, 1).to(q.dtype))
        return torch.cat(pieces)

    def _attend(self, q: Tensor, rows: Tensor, listed: Tensor, sink: Tensor, scale: float) -> Tensor:
        t = rows.shape[1]
        scores = torch.bmm(q.float(), rows.mT).mul_(scale).masked_fill_(~listed.unsqueeze(1), -torch.inf)
        if t == 0 or t % LIST_BLOCK:
            scores = F.pad(scores, (0, max(LIST_BLOCK - t, -t % LIST_BLOCK)), value=-torch.inf)
        blocks = scores.unflatten(2, (-1, LIST_BLOCK))  # [n, h, b, 64]
        best = blocks.amax(-1).cummax(-1).values.clamp_min_(NO_SCORE)  # [n, h, b]
        last = best[..., -1:]
        fade = (best - last).exp_()
        p = blocks.sub_(best.unsqueeze(-1)).exp_()
        total = (p.sum(-1) * fade).sum(-1) + (sink - last.squeeze(-1)).exp()  # [n, h]
        weights = p.to(q.dtype).mul(fade.unsqueeze(-1)).flatten(2)[..., :t]  # the product is float32
        return (torch.bmm(weights, rows) / total.unsqueeze(-1)).to(q.dtype)


def _columns_used(listed: Tensor) -> int:
    """Columns of a list up to the last one that any query uses: the rest names no rows."""
    used = listed.any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


def _version(tensor: Tensor | None) -> int:
    """Counts the changes in place. Tensors of inference mode do not count: they are taken to stay as they are."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def round_activation(x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """x rounded to fp8 in blocks of 32 with power-of-two scales: the same values as `formats.WINDOW.round`."""
    return WINDOW.round(x)


def _ranks(scores: Tensor, position: Int[Tensor, "p"]) -> Int[Tensor, "n p"]:
    """int64 that order as bf16 scores do (+0 and -0 being equal), and within equal scores by lower position."""
    bits = (scores + 0.0).view(torch.int16).long()
    ordered = bits ^ ((bits >> 15) & 0x7FFF)
    return (ordered << 32) | ((1 << 31) - 1 - position)
