"""FastOps: the same operations by the library's products, in few large steps, on any device.

Where an operation here differs from `ReferenceOps` it is in the order of float32 sums and in the last bit of
elementary functions. Rounding to bf16, fp8 and fp4 happens in the same places, so results are equal but where such a
last bit meets a rounding border. Rows are *not* promised to be stable: a matrix library picks its kernel by the shape.

Nothing here asks a device for a number, with one exception: `experts`, where there are many of them. What is large is
made in pieces of a given number of bytes (see `ops.pieces`). Where there is nothing to round but the result, operations
are differentiable as they are.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from openv41.errors import OpsError
from openv41.formats import LATENT, WINDOW, BlockFormat
from openv41.ops.pieces import rows_at_once
from openv41.ops.reference import LIST_BLOCK, NO_SCORE, Activation, Numerics, ReferenceOps, ascending, wide
from openv41.ops.smooth import Balanced, Gated, Rotated

Weights = Literal["stored", "cached", "bf16", "fp32"]

FORMS = WINDOW, LATENT
"""What is stored in the two tables that attention reads."""

DECODED = 8192
"""Records that are decoded at a time."""

QUERIES = 16
"""Queries that attention gathers rows for at a time on a CPU: 21 MB of float32 rows in the released model."""

DENSE = 8
"""All experts take all tokens where they are at most so many times as many as a token chooses. That is so many times
the products, in three large ones; a loop over the experts has the fewest products, and has to ask the device first how
many tokens each has. Twelve experts of 160 for 16,384 tokens of width 256, two of them chosen: 24 GFLOP, which an H200
does in a fifth of a millisecond, while a loop begins a hundred operations of five microseconds or more."""


class FastOps(ReferenceOps):
    """`weights`: "stored" dequantises a weight at every use (frugal, slow); "cached" keeps dequantised weights, in
    bf16; "bf16" or "fp32" say in which type products are taken, and keep the weights as well."""

    name = "fast"
    few_steps = True

    def __init__(
        self, numerics: Numerics = "published", dtype: torch.dtype | None = None, weights: Weights = "cached"
    ) -> None:
        super().__init__(numerics, dtype)
        if weights not in ("stored", "cached", "bf16", "fp32"):
            raise OpsError(f"weights must be stored, cached, bf16 or fp32, got {weights!r}")
        self.bf16_products = self.multiplies_bf16() if weights in ("stored", "cached") else weights == "bf16"
        self.caches = weights != "stored"
        self.held = WeakIdKeyDictionary()

    def multiplies_bf16(self) -> bool:
        """Whether products of bf16 matrices are the fastest."""
        return True

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

    def rms_norm(self, x: Float[Tensor, "*n k"], weight: Tensor, eps: float) -> Float[Tensor, "*n k"]:
        values = wide(x)  # the library fuses it where weight and values have one type
        return F.rms_norm(values, (x.shape[-1],), weight.to(values.dtype), eps).to(x.dtype)

    def rotate(
        self,
        x: Float[Tensor, "n *h d"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        inverse: bool = False,
    ) -> Float[Tensor, "n *h d"]:
        return Rotated.apply(x, torch.complex(cos, -sin if inverse else sin))

    def read(self, rows: Tensor, form: BlockFormat) -> Float[Tensor, "*n k"]:
        """Records of a large table are decoded some at a time: that takes several times the memory of its result."""
        if rows.dtype != torch.uint8 or rows.dim() != 2:
            return super().read(rows, form)
        some = rows_at_once(rows.device, 32 * rows.shape[1], DECODED)
        if rows.shape[0] <= some:
            return super().read(rows, form)
        return torch.cat([ReferenceOps.read(self, part, form) for part in rows.split(some)])

    def quantise(self, x: Float[Tensor, "*n k"], form: BlockFormat) -> Float[Tensor, "*n k"]:
        return round_activation(x) if form is WINDOW and not self.plain else super().quantise(x, form)

    def round_activation(self, x: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
        """As a quantised linear map meets it."""
        return round_activation(x)

    # Linear maps: activation and weight rounded to their grids, then one product

    def linear(self, x: Float[Tensor, "n inputs"], weight: Tensor, scale: Any) -> Float[Tensor, "n outputs"]:
        if scale is not None and not self.plain:
            x = self.round_activation(x)
        return self._product(x, self.values(weight, scale)).to(x.dtype)

    def linear_wide(self, x: Float[Tensor, "n inputs"], weight: Tensor) -> Float[Tensor, "n outputs"]:
        return F.linear(wide(x), self.values(weight, None, wide=True))

    def linear_bias(self, x: Float[Tensor, "n inputs"], weight: Tensor, bias: Tensor) -> Float[Tensor, "n outputs"]:
        values = self.values(weight, None)
        return F.linear(x.to(values.dtype), values, bias.to(values.dtype)).to(x.dtype)

    def grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Any
    ) -> Float[Tensor, "n g outputs"]:
        groups = self.values(weight, scale).unflatten(0, (x.shape[1], -1))  # [g, outputs, inputs]
        return (x.to(groups.dtype).transpose(0, 1) @ groups.mT).transpose(0, 1).to(x.dtype)

    def _product(self, x: Tensor, values: Tensor) -> Tensor:
        return F.linear(x.to(values.dtype), values)

    def values(self, weight: Tensor, scale: Any, wide: bool = False) -> Tensor:
        """The weight's values in the dtype that products are taken in: kept if this set caches, else made anew."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        if self.bf16_products and self.dtype == torch.bfloat16 and not wide:
            dtype = torch.bfloat16
        if scale is None and weight.dtype == dtype:
            return weight
        if not self.caches or (weight.requires_grad and torch.is_grad_enabled()):
            return self._dequantise(weight, scale, dtype)
        held = self.held.get(weight)
        state = (version(weight), version(scale), dtype)
        if held is None or held[0] != state:
            held = (state, self._dequantise(weight, scale, dtype).detach())
            self.held[weight] = held
        return held[1]

    def _dequantise(self, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self.dense(weight, scale).to(dtype)

    # Experts

    def swiglu(
        self, gate: Float[Tensor, "n f"], up: Float[Tensor, "n f"], limit: float, routing: Tensor | None
    ) -> Float[Tensor, "n f"]:
        return self.gated(gate, up, limit, routing)

    def gated(
        self, gate: Float[Tensor, "*n f"], up: Float[Tensor, "*n f"], limit: float, routing: Tensor | None
    ) -> Float[Tensor, "*n f"]:
        """`swiglu`, of one expert or of many beside one another."""
        return Gated.apply(gate, up, limit, routing)

    def experts(
        self,
        x: Float[Tensor, "n dim"],
        routing: Float[Tensor, "n k"],
        chosen: Int[Tensor, "n k"],
        w1: tuple[Tensor, Any],
        w2: tuple[Tensor, Any],
        w3: tuple[Tensor, Any],
        limit: float,
    ) -> Float[Tensor, "n dim"]:
        """All tokens through all experts where these are few; else each expert's tokens, told by one sort of all."""
        rounds = self.round_activation if w1[1] is not None and not self.plain else None
        inputs = x if rounds is None else rounds(x)
        if takes_all(w1[0].shape[0], chosen.shape[1]):
            gate, up, down = (self.values(*w) for w in (w1, w3, w2))
            bytes_of_row = 4 * gate.shape[0] * (3 * gate.shape[1] + x.shape[1])
            some = rows_at_once(x.device, bytes_of_row, max(1, len(x)))
            parts = [
                self.all_experts(own, weights, numbers, gate, up, down, limit, rounds)
                for own, weights, numbers in zip(
                    inputs.split(some), routing.split(some), chosen.split(some), strict=True
                )
            ]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        result = torch.zeros_like(wide(x))
        for expert, token, place in by_expert(chosen, w1[0].shape[0]):
            gate, up, down = (self._expert(w, expert) for w in (w1, w3, w2))
            hidden = self.swiglu(
                self._product(inputs[token], gate).to(x.dtype),
                self._product(inputs[token], up).to(x.dtype),
                limit,
                routing[token, place].unsqueeze(1),
            )
            hidden = hidden if rounds is None else rounds(hidden)
            result = result.index_add(0, token, wide(self._product(hidden, down).to(x.dtype)))
        return result

    def all_experts(
        self,
        x: Float[Tensor, "n dim"],
        routing: Float[Tensor, "n k"],
        chosen: Int[Tensor, "n k"],
        gate: Float[Tensor, "e f dim"],
        up: Float[Tensor, "e f dim"],
        down: Float[Tensor, "e dim f"],
        limit: float,
        rounds: Callable[[Tensor], Tensor] | None,
    ) -> Float[Tensor, "n dim"]:
        """Of values and inputs that are rounded already, if they are to be; `rounds`, what rounds the inputs of `down`.
        An expert that a token has not chosen weighs nothing. Published numerics round each expert's result."""
        share = routing.new_zeros(len(x), gate.shape[0]).scatter(1, chosen, routing).unsqueeze(2)  # [n, e, 1]
        opened = self._product(x, gate.flatten(0, 1)).to(x.dtype).unflatten(1, gate.shape[:2])  # [n, e, f]
        raised = self._product(x, up.flatten(0, 1)).to(x.dtype).unflatten(1, up.shape[:2])
        hidden = self.gated(opened, raised, limit, share)
        hidden = hidden if rounds is None else rounds(hidden)
        if self.plain:
            return wide(hidden.flatten(1)) @ down.mT.flatten(0, 1)  # the sum over the experts is the product's own
        results = hidden.to(down.dtype).transpose(0, 1) @ down.mT  # [e, n, dim]
        return wide(results.to(x.dtype)).sum(0)

    def _expert(self, stacked: tuple[Tensor, Any], expert: int) -> Tensor:
        weight, scale = stacked
        if self.caches:
            return self.values(weight, scale)[expert]
        return self.values(weight[expert], None if scale is None else scale[expert])

    # Streams

    def mix(
        self, streams: Float[Tensor, "n m dim"], fn: Tensor, base: Tensor, scale: Tensor, rounds: int, eps: float,
        norm_eps: float,
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"], Float[Tensor, "n m m"]]:  # fmt: skip
        m = streams.shape[1]
        flat = wide(streams.flatten(1))
        logits = F.linear(F.rms_norm(flat, flat.shape[1:], None, norm_eps), fn.to(flat.dtype))
        scales = torch.cat([one.expand(size) for one, size in zip(scale, (m, m, m * m), strict=True)])
        pre, post, comb = torch.addcmul(wide(base), logits, wide(scales)).split((m, m, m * m), 1)
        return pre.sigmoid() + eps, 2 * post.sigmoid(), self.sinkhorn(comb.unflatten(1, (m, m)), rounds, eps)

    def inverse_rms(self, x: Float[Tensor, "*n k"], eps: float) -> Float[Tensor, "*n 1"]:
        return (wide(x).square().mean(-1, keepdim=True) + eps).rsqrt()

    def sinkhorn(self, logits: Float[Tensor, "n m m"], rounds: int, eps: float) -> Float[Tensor, "n m m"]:
        return Balanced.apply(logits, rounds, eps)

    def collapse(self, streams: Float[Tensor, "n m dim"], pre: Float[Tensor, "n m"]) -> Float[Tensor, "n dim"]:
        return (pre.unsqueeze(-1) * wide(streams)).sum(1).to(streams.dtype)

    def expand(
        self,
        y: Float[Tensor, "n dim"],
        streams: Float[Tensor, "n m dim"],
        post: Float[Tensor, "n m"],
        comb: Float[Tensor, "n m m"],
    ) -> Float[Tensor, "n m dim"]:
        """Sums of products, not a matrix product: a GPU would take that of the streams in TF32 where it may."""
        carried = (comb.unsqueeze(-1) * wide(streams).unsqueeze(2)).sum(1)  # [n, j, dim]
        return torch.addcmul(carried, post.unsqueeze(-1), wide(y).unsqueeze(1)).to(streams.dtype)

    # Index

    def index_scores(
        self, q: Float[Tensor, "n i c"], weights: Float[Tensor, "n i"], keys: Float[Tensor, "p c"]
    ) -> Float[Tensor, "n p"]:
        """One product for all heads. Operands lie on the fp4 grid: each sum is exact, its rounding the published."""
        if self.plain:
            products = self.matmul(q.flatten(0, 1), keys).to(q.dtype).unflatten(0, q.shape[:2])  # [n, i, p]
            return (products.relu() * weights.unsqueeze(-1)).sum(1)
        flat = q.flatten(0, 1)
        products = flat @ keys.mT if self.bf16_products else (flat.float() @ keys.float().mT).to(q.dtype)
        shares = products.relu_().unflatten(0, q.shape[:2]).mul_(weights.unsqueeze(-1))  # [n, i, p]
        return shares.sum(1, dtype=torch.float32).to(q.dtype)

    def pick(self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], k: int) -> Int[Tensor, "n k"]:
        """A partial selection instead of a sort, over integers that order as (score, lower position first) do."""
        if scores.dtype not in RANKED or scores.shape[1] <= k:
            return super().pick(scores, visible, k)
        position = torch.arange(scores.shape[1], device=scores.device)
        order = ranks(scores, position).masked_fill_(position >= visible.unsqueeze(1), torch.iinfo(torch.int64).min)
        return ascending(order.topk(k, sorted=False).indices, visible, k)

    def pick_blocks(
        self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], block: int, k: int
    ) -> Bool[Tensor, "n blocks"]:
        """The same selection, of the blocks' maxima."""
        count = -(-scores.shape[1] // block)
        if scores.dtype not in RANKED or count <= k:
            return super().pick_blocks(scores, visible, block, k)
        position, number = (torch.arange(size, device=scores.device) for size in (scores.shape[1], count))
        best = scores.masked_fill(position >= visible.unsqueeze(1), -torch.inf)
        best = F.pad(best, (0, count * block - scores.shape[1]), value=-torch.inf).unflatten(1, (-1, block)).amax(2)
        best = best.masked_fill_(number == ((visible - 1) // block).unsqueeze(1), torch.inf)
        kept = ranks(best, number).topk(k, sorted=False).indices
        return torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True) & (best > -torch.inf)

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
        """Gather the rows of some queries, then two products."""
        width = near_rows.shape[1] + (0 if far_rows is None else far_rows.shape[1])
        some = rows_at_once(
            q.device, bytes_of_query(width, q.shape[1], q.shape[2], wide(q[:0]).element_size()), QUERIES
        )
        tables = [near] if far is None or far_rows is None else [near, far]
        rows = [near_rows] if far is None or far_rows is None else [near_rows, far_rows]
        gather = self._from_one_table if width * len(q) > sum(map(len, tables)) else self._from_each_table
        taken = gather(tables, rows)
        attend = self._attend_plain if self.plain else self._attend
        pieces = [attend(q[first : first + some], *taken(slice(first, first + some)), sink, scale)
                  for first in range(0, q.shape[0], some)]  # fmt: skip
        return pieces[0] if len(pieces) == 1 else torch.cat([q[:0], *pieces])

    def _from_one_table(self, tables: list[Tensor], rows: list[Tensor]) -> Callable[[slice], tuple[Tensor, Tensor]]:
        """A function that gives some queries' rows, and which of them are listed. Where more rows are listed than there
        are: from the tables behind one another, decoded, and nothing at the end."""
        read = [wide(self.read(table, form)) for table, form in zip(tables, FORMS, strict=False)]
        whole, index = one_table(read, rows)
        return lambda part: (whole[index[part]], index[part] >= 0)

    def _from_each_table(self, tables: list[Tensor], rows: list[Tensor]) -> Callable[[slice], tuple[Tensor, Tensor]]:
        """The same for a few rows of long tables: decoded as they come."""
        return partial(self._each, tables, rows)

    def _each(self, tables: list[Tensor], rows: list[Tensor], part: slice) -> tuple[Tensor, Tensor]:
        found = []
        for table, some, form in zip(tables, rows, FORMS, strict=False):
            values = wide(self.read(table[some[part].clamp_min(0)], form))
            found.append(values.masked_fill(some[part].unsqueeze(-1) < 0, 0))
        return torch.cat(found, 1), torch.cat([some[part] for some in rows], 1) >= 0

    def _attend_plain(self, q: Tensor, rows: Tensor, listed: Tensor, sink: Tensor, scale: float) -> Tensor:
        scores = (q @ rows.mT).mul_(scale).masked_fill_(~listed.unsqueeze(1), -torch.inf)  # [n, h, t]
        with_sink = torch.cat((scores, sink.to(q.dtype).expand(*q.shape[:2]).unsqueeze(-1)), -1)
        return with_sink.softmax(-1)[..., :-1] @ rows

    def _attend(self, q: Tensor, rows: Tensor, listed: Tensor, sink: Tensor, scale: float) -> Tensor:
        """The maximum at each block of 64 is found for all blocks at once, and what a later, higher maximum would have
        faded is faded at the end."""
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


def one_table(tables: list[Tensor], rows: list[Tensor]) -> tuple[Float[Tensor, "some d"], Int[Tensor, "n t"]]:
    """Tables of values behind one another, with a row of zeros last; and the lists [n, w] of each as one list into the
    whole. Row -1 stays -1, which is the last one wherever rows are taken."""
    whole = torch.cat((*tables, tables[0].new_zeros(1, tables[0].shape[1])))
    before, lists = len(tables[0]), rows[:1]
    for table, some in zip(tables[1:], rows[1:], strict=True):
        lists.append((some + before).masked_fill_(some < 0, -1))
        before += len(table)
    return whole, torch.cat(lists, 1) if len(lists) > 1 else lists[0]


def bytes_of_query(width: int, heads: int, head_width: int, element: int) -> int:
    """What attention makes for one query, and its gradient: three times the rows of its list, four times its scores."""
    return width * (3 * head_width + 4 * heads) * element


def takes_all(experts: int, chosen: int) -> bool:
    """Whether all experts take all tokens: see `DENSE`."""
    return experts <= DENSE * chosen


def by_expert(chosen: Int[Tensor, "n k"], experts: int) -> list[tuple[int, Int[Tensor, "c"], Int[Tensor, "c"]]]:
    """For each expert that any token chose, ascending: its tokens, and the places among their choices. One question to
    the device, how many each has."""
    order = chosen.flatten().sort(stable=True).indices
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device).scatter_add_(
        0, chosen.flatten(), torch.ones_like(order)
    )
    parts = order.split(counts.tolist())
    k = chosen.shape[1]
    return [(expert, part // k, part % k) for expert, part in enumerate(parts) if len(part)]


def version(tensor: Tensor | None) -> int:
    """Counts the changes in place. Tensors of inference mode do not count: they are taken to stay as they are."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def round_activation(x: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
    """x rounded to fp8 in blocks of 32 with power-of-two scales: the same values as `formats.WINDOW.round`, in fewer
    steps. The scale is never below the largest value / 448, so nothing saturates."""
    blocks = x.float().unflatten(-1, (-1, WINDOW.block))
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min_(1e-4).mul_(1 / 448)
    # The next power of two: whatever stands behind the exponent's bits carries into them, and is wiped out.
    scale = largest.view(torch.int32).add_(0x7FFFFF).bitwise_and_(-0x800000).view(torch.float32)
    return (blocks / scale).to(torch.float8_e4m3fn).float().mul_(scale).flatten(-2).to(x.dtype)


RANKED = {torch.bfloat16: (torch.int16, 0x7FFF), torch.float32: (torch.int32, 0x7FFFFFFF)}
"""Types of scores that `ranks` knows: integers of the same width, and all bits of them but the sign."""


def ranks(scores: Tensor, position: Int[Tensor, "p"]) -> Int[Tensor, "n p"]:
    """int64 that order as scores do (+0 and -0 being equal), and within equal scores by lower position."""
    kind, magnitude = RANKED[scores.dtype]
    bits = (scores + 0.0).view(kind)
    ordered = (bits ^ ((bits >> (8 * kind.itemsize - 1)) & magnitude)).long()
    return (ordered << 32) | ((1 << 31) - 1 - position)
