"""ReferenceOps: the specification. Each method is what a paper would print, with the published roundings.

It is also row-stable, the library's guarantee: a row's bits depend on no other row of the call. Sums are exact or in a
fixed order (`ops.exact`), ties go to the lower position. So a sequence gives the same bits alone, in a batch, cut into
chunks, or verified as a draft, and on every machine.

Precision is written at both ends: `wide` is the accumulator's precision, `.to(x.dtype)` the rounding. With
`numerics="plain"` x is float64 (or float32), wide is the same, every such rounding is none, and sums are ordinary.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from openv41.errors import OpsError
from openv41.formats import LATENT, WINDOW, BlockFormat, e2m1_values, split_nibbles, unpack_weight
from openv41.ops import exact
from openv41.ops.compound import Compound

Numerics = Literal["published", "plain"]
Activation = Literal["silu", "gelu"]

LIST_BLOCK = 64
"""Entries of an attention list between two updates of the running maximum."""

NO_SCORE = -1e30
"""The running maximum before the first entry: finite, so that an empty block changes nothing."""


def wide(x: Tensor) -> Tensor:
    """`x` in the accumulator's precision: float32, or float64 if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


class ReferenceOps(Compound):
    """The judge: slow and plain. `numerics`: "published" or "plain"; `dtype`: the activations', for plain numerics."""

    name: str = "reference"
    few_steps = False
    """Whether operations take few large steps, with gradients of their own: see `ops.fast`."""

    def __init__(self, numerics: Numerics = "published", dtype: torch.dtype | None = None) -> None:
        if numerics not in ("published", "plain"):
            raise OpsError(f"numerics must be 'published' or 'plain', got {numerics!r}")
        if numerics == "published" and dtype not in (None, torch.bfloat16):
            raise OpsError(f"published numerics have bf16 activations, got {dtype}: choose numerics='plain' for others")
        self.numerics: Numerics = numerics
        self.plain = numerics == "plain"
        self.dtype = dtype or (torch.float64 if self.plain else torch.bfloat16)

    # Sums

    def matmul(self, x: Float[Tensor, "*batch n k"], w: Float[Tensor, "*batch o k"]) -> Float[Tensor, "*batch n o"]:
        """x @ w.T in wide precision."""
        if self.plain:
            return wide(x) @ w.to(wide(x).dtype).mT
        return exact.matmul(x, w)

    def sum(self, x: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows"]:
        """The sum over the last dimension."""
        return x.sum(-1) if self.plain else exact.tree_sum(x)

    # Linear maps

    def linear(self, x: Float[Tensor, "n inputs"], weight: Tensor, scale: Tensor | None) -> Float[Tensor, "n outputs"]:
        """A quantised weight meets an activation quantised to fp8 in blocks of 32: each block's product is taken in
        float32, multiplied by both scales, and added in order of K. One rounding at the end."""
        if scale is None or self.plain:
            return self.matmul(x, self.dense(weight, scale)).to(x.dtype)
        codes, steps = WINDOW.pack(x)
        if weight.dtype == torch.float8_e4m3fn:
            values, scales = weight.double(), scale.float().repeat_interleave(32, 0)[: weight.shape[0]]
        else:
            values, scales = e2m1_values(split_nibbles(weight)).double(), scale.float()

        own, others = _with_scales(codes.double(), steps), _with_scales(values, scales)
        return exact.tiled(own, others, _scaled_product).to(x.dtype)

    def linear_wide(self, x: Float[Tensor, "n inputs"], weight: Tensor) -> Float[Tensor, "n outputs"]:
        return self.matmul(x, weight)

    def linear_bias(self, x: Float[Tensor, "n inputs"], weight: Tensor, bias: Tensor) -> Float[Tensor, "n outputs"]:
        return (self.matmul(x, weight) + wide(bias)).to(x.dtype)

    def grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Tensor | None
    ) -> Float[Tensor, "n g outputs"]:
        groups = self.dense(weight, scale).unflatten(0, (x.shape[1], -1))  # [g, outputs, inputs]
        return self.matmul(x.transpose(0, 1), groups).transpose(0, 1).to(x.dtype)

    def dense(self, weight: Tensor, scale: Tensor | None) -> Tensor:
        """A stored weight as values. bf16 holds any fp8 or fp4 weight exactly."""
        return weight if scale is None else unpack_weight(weight, scale).to(self.dtype)

    # Norm, rotation, rounding

    def rms_norm(self, x: Float[Tensor, "*n k"], weight: Tensor, eps: float) -> Float[Tensor, "*n k"]:
        return (wide(x) * self.inverse_rms(x, eps) * wide(weight)).to(x.dtype)

    def inverse_rms(self, x: Float[Tensor, "*n k"], eps: float) -> Float[Tensor, "*n 1"]:
        squares = self.sum(wide(x).square()) / x.shape[-1]
        return (1.0 / self.sqrt(squares + eps)).unsqueeze(-1)

    def rotate(
        self,
        x: Float[Tensor, "n *h d"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        inverse: bool = False,
    ) -> Float[Tensor, "n *h d"]:
        """(a + ib)(cos + i sin) on adjacent pairs of the tail, in wide precision, by plain real products."""
        width = 2 * cos.shape[-1]
        head, tail = x[..., : x.shape[-1] - width], x[..., x.shape[-1] - width :]
        shape = (cos.shape[0], *[1] * (x.dim() - 2), cos.shape[-1])
        c, s = cos.view(shape), (-sin if inverse else sin).view(shape)
        a, b = wide(tail).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
        return torch.cat((head, turned.to(x.dtype)), -1)

    def quantise(self, x: Float[Tensor, "*n k"], form: BlockFormat) -> Float[Tensor, "*n k"]:
        return x if self.plain else form.round(x)

    def store(self, x: Float[Tensor, "*n k"], form: BlockFormat, packed: bool) -> Tensor:
        return form.to_records(x) if packed else self.quantise(x, form)

    def read(self, rows: Tensor, form: BlockFormat) -> Float[Tensor, "*n k"]:
        return form.from_records(rows).to(self.dtype) if rows.dtype == torch.uint8 else rows

    # Compressed positions

    def pool(
        self, kv: Float[Tensor, "a d"], gate: Float[Tensor, "a d"], rows: Int[Tensor, "groups ratio"]
    ) -> Float[Tensor, "groups d"]:
        scores = gate[rows]  # [groups, ratio, d]
        weights = self.exp(scores - scores.amax(1, keepdim=True)).movedim(1, -1)  # [groups, d, ratio]
        values = kv[rows].movedim(1, -1)
        return (self.sum(weights / self.sum(weights).unsqueeze(-1) * values)).to(self.dtype)

    def index_scores(
        self, q: Float[Tensor, "n i c"], weights: Float[Tensor, "n i"], keys: Float[Tensor, "p c"]
    ) -> Float[Tensor, "n p"]:
        """Every product and every head's share is rounded to bf16; the heads are added in float32 and rounded once."""
        products = self.matmul(q.flatten(0, 1), keys).to(q.dtype).unflatten(0, q.shape[:2])  # [n, i, p]
        shares = (products.relu() * weights.unsqueeze(-1)).to(q.dtype)
        return self.sum(wide(shares).transpose(1, 2)).to(q.dtype)

    def pick(self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], k: int) -> Int[Tensor, "n k"]:
        p = scores.shape[1]
        hidden = torch.arange(p, device=scores.device) >= visible.unsqueeze(1)
        order = scores.masked_fill(hidden, -torch.inf).sort(descending=True, stable=True).indices[:, :k]
        return ascending(order, visible, k)

    def pick_blocks(
        self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], block: int, k: int
    ) -> Bool[Tensor, "n blocks"]:
        p = scores.shape[1]
        position = torch.arange(p, device=scores.device)
        best = scores.masked_fill(position >= visible.unsqueeze(1), -torch.inf)
        best = F.pad(best, (0, -p % block), value=-torch.inf).unflatten(1, (-1, block)).amax(2)  # [n, blocks]
        newest = ((visible - 1) // block).unsqueeze(1)
        best = best.masked_fill((torch.arange(best.shape[1], device=best.device) == newest), torch.inf)
        kept = best.sort(descending=True, stable=True).indices[:, :k]
        return torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True) & (best > -torch.inf)

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
        """The list is near_rows, then far_rows. Published numerics take it in blocks of 64 (see `_attend_blocks`)."""
        attend = self._attend_plain if self.plain else self._attend_blocks
        pieces = []
        for i in range(0, q.shape[0], 32):  # 32 queries' rows at a time, to bound the memory
            rows, listed = [self.read(near[near_rows[i : i + 32].clamp_min(0)], WINDOW)], [near_rows[i : i + 32] >= 0]
            if far is not None and far_rows is not None:
                rows.append(self.read(far[far_rows[i : i + 32].clamp_min(0)], LATENT))
                listed.append(far_rows[i : i + 32] >= 0)
            known = torch.cat(listed, 1)
            values = torch.cat(rows, 1).masked_fill(~known.unsqueeze(-1), 0)  # -1 is nothing, whatever row 0 holds
            pieces.append(attend(q[i : i + 32], values, known, sink, scale))
        return torch.cat(pieces) if pieces else q

    def _attend_plain(self, q: Tensor, rows: Tensor, listed: Tensor, sink: Tensor, scale: float) -> Tensor:
        scores = (q @ rows.mT * scale).masked_fill(~listed.unsqueeze(1), -torch.inf)  # [n, h, t]
        with_sink = torch.cat((scores, sink.to(q.dtype).expand(*q.shape[:2]).unsqueeze(-1)), -1)
        return with_sink.softmax(-1)[..., :-1] @ rows

    def _attend_blocks(self, q: Tensor, rows: Tensor, listed: Tensor, sink: Tensor, scale: float) -> Tensor:
        """Online softmax, 64 list entries at a time. Probabilities are rounded to bf16, against the maximum so far,
        before they weigh the rows; the denominator takes them unrounded. The sink joins the denominator once."""
        best = q.new_full(q.shape[:2], NO_SCORE, dtype=torch.float32)  # [n, h]
        total, result = torch.zeros_like(best), q.new_zeros(q.shape, dtype=torch.float32)
        for values, known in zip(rows.split(LIST_BLOCK, 1), listed.split(LIST_BLOCK, 1), strict=True):
            if values.shape[1] == 0:
                continue
            scores = (self.matmul(q, values) * scale).masked_fill(~known.unsqueeze(1), -torch.inf)  # [n, h, 64]
            higher = torch.maximum(best, scores.amax(-1))
            fade, p = self.exp(best - higher), self.exp(scores - higher.unsqueeze(-1))
            total = total * fade + self.sum(p)
            result = result * fade.unsqueeze(-1) + self.matmul(p.to(q.dtype), values.mT)
            best = higher
        return (result / (total + self.exp(sink.float() - best)).unsqueeze(-1)).to(q.dtype)

    def full_attention(
        self,
        q: Float[Tensor, "n h d"],
        k: Float[Tensor, "n h d"],
        v: Float[Tensor, "n h d"],
        lengths: Sequence[int],
        scale: float,
    ) -> Float[Tensor, "n h d"]:
        """All of it in wide precision, probabilities included: one rounding, of the result."""
        pieces = [q[:0]]
        for queries, keys, values in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
            for some in queries.split(32):  # queries at a time, to bound the memory
                scores = self.matmul(some.transpose(0, 1), keys.transpose(0, 1)) * scale  # [h, 32, t]
                p = self.exp(scores - scores.amax(-1, keepdim=True))
                weighed = self.matmul(p, values.permute(1, 2, 0))  # [h, 32, d]
                pieces.append((weighed / self.sum(p).unsqueeze(-1)).to(q.dtype).transpose(0, 1))
        return torch.cat(pieces)

    # Hyper-connections

    def mix(
        self,
        streams: Float[Tensor, "n m dim"],
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        rounds: int,
        eps: float,
        norm_eps: float,
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"], Float[Tensor, "n m m"]]:
        m = streams.shape[1]
        flat = wide(streams.flatten(1))
        logits = self.linear_wide(flat, fn) * self.inverse_rms(flat, norm_eps)  # [n, m + m + m * m]
        pre, post, comb = logits.split((m, m, m * m), 1)
        pre_base, post_base, comb_base = wide(base).split((m, m, m * m))
        pre = self.sigmoid(pre * scale[0] + pre_base) + eps
        post = 2 * self.sigmoid(post * scale[1] + post_base)
        comb = (comb * scale[2] + comb_base).unflatten(1, (m, m))
        return pre, post, self.sinkhorn(comb, rounds, eps)

    def sinkhorn(self, logits: Float[Tensor, "n m m"], rounds: int, eps: float) -> Float[Tensor, "n m m"]:
        """Rows and columns normalised in turn: softmax of the rows, then columns, then rows and columns again."""
        comb = self.exp(logits - logits.amax(-1, keepdim=True))
        comb = comb / self.sum(comb).unsqueeze(-1) + eps
        comb = comb / (self.sum(comb.mT).unsqueeze(-2) + eps)
        for _ in range(rounds - 1):
            comb = comb / (self.sum(comb).unsqueeze(-1) + eps)
            comb = comb / (self.sum(comb.mT).unsqueeze(-2) + eps)
        return comb

    def collapse(self, streams: Float[Tensor, "n m dim"], pre: Float[Tensor, "n m"]) -> Float[Tensor, "n dim"]:
        return _add_streams(pre.unsqueeze(-1) * wide(streams)).to(streams.dtype)

    def expand(
        self,
        y: Float[Tensor, "n dim"],
        streams: Float[Tensor, "n m dim"],
        post: Float[Tensor, "n m"],
        comb: Float[Tensor, "n m m"],
    ) -> Float[Tensor, "n m dim"]:
        """Stream j becomes post_j * y + sum over i of comb[i, j] * stream i."""
        shares = (comb[:, i].unsqueeze(-1) * wide(streams[:, i]).unsqueeze(1) for i in range(streams.shape[1]))
        carried = next(shares)  # [n, j, dim]
        for share in shares:
            carried = carried + share
        return (post.unsqueeze(-1) * wide(y).unsqueeze(1) + carried).to(streams.dtype)

    # Experts

    def route(
        self, logits: Float[Tensor, "n e"], bias: Float[Tensor, "*n e"], k: int, scale: float, function: str
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        scores = self.router_scores(logits, function)
        chosen = (scores + bias).sort(descending=True, stable=True).indices[:, :k]
        return self.weigh(scores, chosen, scale), chosen

    def router_scores(self, logits: Float[Tensor, "n e"], function: str) -> Float[Tensor, "n e"]:
        if function == "softmax":
            shifted = self.exp(logits - logits.amax(-1, keepdim=True))
            return shifted / self.sum(shifted).unsqueeze(-1)
        return self.sigmoid(logits) if function == "sigmoid" else self.sqrt(self.softplus(logits))

    def weigh(self, scores: Float[Tensor, "n e"], chosen: Int[Tensor, "n k"], scale: float) -> Float[Tensor, "n k"]:
        """The weights of the chosen experts."""
        weights = scores.gather(1, chosen)
        if chosen.shape[1] > 1:  # one expert keeps its score: over itself it would always be 1
            weights = weights / (self.sum(weights).unsqueeze(1) + 1e-20)
        return weights * scale

    def swiglu(
        self, gate: Float[Tensor, "n f"], up: Float[Tensor, "n f"], limit: float, routing: Tensor | None
    ) -> Float[Tensor, "n f"]:
        """The gate is clamped from above only. The routing weight passes through w2's quantiser with the product."""
        g, u = wide(gate), wide(up)
        if limit > 0:
            g, u = g.clamp_max(limit), u.clamp(-limit, limit)
        product = g * self.sigmoid(g) * u
        return (product if routing is None else product * routing).to(gate.dtype)

    def activate(self, x: Float[Tensor, "*n k"], function: Activation) -> Float[Tensor, "*n k"]:
        if function == "silu":
            return (wide(x) * self.sigmoid(wide(x))).to(x.dtype)
        return (wide(x) * 0.5 * (1 + self.erf(wide(x) * 2**-0.5))).to(x.dtype)

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
        result = torch.zeros_like(wide(x))
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            hidden = self.swiglu(
                self.linear(x[token], *_row(w1, expert)),
                self.linear(x[token], *_row(w3, expert)),
                limit,
                routing[token, place].unsqueeze(1),
            )
            result = result.index_add(0, token, wide(self.linear(hidden, *_row(w2, expert))))
        return result

    # Engram

    def look_up_rows(self, table: Tensor, scale: Tensor | None, rows: Int[Tensor, "*n"]) -> Float[Tensor, "*n width"]:
        flat = rows.flatten().to(table.device)
        picked = _take(table, flat)
        if scale is not None:
            picked = picked.float() * _take(scale, flat).float().repeat_interleave(32, 1)
        return picked.to(self.dtype).to(rows.device).unflatten(0, rows.shape)

    def engram_gate(
        self,
        streams: Float[Tensor, "n m dim"],
        keys: Float[Tensor, "n m dim"],
        value: Float[Tensor, "n dim"],
        weight: Float[Tensor, "m dim"],
        open: Bool[Tensor, "n"],
        eps: float,
    ) -> Float[Tensor, "n m dim"]:
        h, key = wide(streams), wide(keys)
        agreement = self.sum(h * weight * key).unsqueeze(-1) + 0.0  # [n, m, 1]; no agreement is +0, never -0
        agreement = agreement * self.inverse_rms(h, eps) * self.inverse_rms(key, eps) * h.shape[-1] ** -0.5
        root = self.sqrt(agreement.abs().clamp_min(1e-6))
        gate = self.sigmoid(torch.copysign(root, agreement)) * open[:, None, None]
        return (h + gate * wide(value).unsqueeze(1)).to(streams.dtype)

    # Elementary functions: exactly defined for published numerics, PyTorch's own for plain ones

    def exp(self, x: Tensor) -> Tensor:
        return x.exp() if self.plain else exact.exp(x)

    def sqrt(self, x: Tensor) -> Tensor:
        return x.sqrt() if self.plain else exact.sqrt(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid() if self.plain else exact.sigmoid(x)

    def softplus(self, x: Tensor) -> Tensor:
        return F.softplus(x) if self.plain else exact.softplus(x)

    def erf(self, x: Tensor) -> Tensor:
        return x.erf() if self.plain else exact.erf(x)


def _scaled_product(xs: Tensor, ws: Tensor) -> Tensor:
    """Of blocks of 32 with their scales behind them, in float32, blocks added in order."""
    total = xs.new_zeros((), dtype=torch.float32)
    parts = exact.partial_products(xs[..., :-1], ws[..., :-1])
    for part, a, b in zip(parts, xs[..., -1].float(), ws[..., -1].float(), strict=True):
        total = total + part.float() * (a[:, None] * b[None, :])
    return total


def _with_scales(values: Float[Tensor, "n k"], scales: Tensor) -> Float[Tensor, "b n 33"]:
    """Values in blocks of 32 of K, each block's scale behind it."""
    blocks = values.unflatten(-1, (-1, 32)).transpose(0, 1)
    return torch.cat((blocks, scales.double().mT.unsqueeze(-1)), -1)


def _add_streams(x: Float[Tensor, "n m dim"]) -> Float[Tensor, "n dim"]:
    """The sum over the streams, one after another."""
    total = x[:, 0]
    for stream in x.unbind(1)[1:]:
        total = total + stream
    return total


def _row(stacked: tuple[Tensor, Tensor | None], i: int) -> tuple[Tensor, Tensor | None]:
    weight, scale = stacked
    return weight[i], None if scale is None else scale[i]


def _take(table: Tensor, rows: Int[Tensor, "n"]) -> Tensor:
    """Rows of a table; one-byte formats are taken as bytes, since indexing does not know them."""
    if table.dtype.itemsize > 1:
        return table[rows]
    return table.view(torch.uint8)[rows].view(table.dtype)


def ascending(order: Int[Tensor, "n _"], visible: Int[Tensor, "n"], k: int) -> Int[Tensor, "n k"]:
    """Picks in position order; those beyond `visible` become -1 and stand last, and so do missing columns up to k."""
    beyond = torch.iinfo(order.dtype).max
    order = order.masked_fill(order >= visible.unsqueeze(1), beyond).sort(-1).values
    order = order.masked_fill(order == beyond, -1)
    return F.pad(order, (0, k - order.shape[1]), value=-1)
