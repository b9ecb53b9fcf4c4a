"""TrainingOps: any set of operations, made differentiable. Forward as that set computes it, backward straight through.

    forward    the operation of the set within, to the bit; of it only the inputs are kept
    backward   the gradient of the operation's differentiable twin at those inputs, worked out when it is needed

A set of few steps (`ops.fast`) is taken as it is where nothing is rounded but results: PyTorch keeps the graph of its
steps, which takes memory, and spares running them once more.

The twin is the plain specification in float32 (float64 for float64). Where the published model rounds an activation or
a weight to fp8 or fp4, the twin meets the rounded values, and the rounding's derivative is one. So it is for values
that saturate: a block's scale follows its largest value, and a value cut off from its gradient could not come back. The
roundings to bf16 on the way, of derivative one as well, are left out.

Numbers have no gradient: what `pick`, `pick_blocks` and `route` choose; `route`'s bias, which does nothing else, has
none. Nor have records of bytes: one trains with a cache of wide rows, the default.

A weight may be a float *master*, with the format that it is to be rounded to, a `WeightFormat`, in place of its scale.
The set within then gets codes and scales as they would be stored, made once for as long as the master stays as it is,
and the gradient goes to the master. An Engram table's gradient is a sparse tensor of the rows looked up.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from openv41.errors import OpsError
from openv41.formats import LATENT, WINDOW, BlockFormat, WeightFormat
from openv41.ops.compound import Compound
from openv41.ops.fast import FastOps, by_expert, bytes_of_query, one_table, round_activation, takes_all, version
from openv41.ops.pieces import launch_bound, rows_at_once
from openv41.ops.reference import Activation, ReferenceOps, wide

Scale = Tensor | WeightFormat | None
"""Beside a weight: the scales of stored codes; the format that a float master is rounded to; nothing."""

WIDE = FastOps("plain", torch.float32)
"""Operations of few steps without any rounding."""

Gradients = Callable[[list[Any], Sequence[bool], Sequence[Tensor]], list[Tensor | None]]
"""From an operation's inputs, which of them want a gradient, and the results' gradients: the inputs' gradients."""

QUERIES = 64
"""Queries whose rows attention's backward gathers at a time on a CPU."""


class TrainingOps(Compound):
    """`inner`, any set of operations, differentiable in whatever is a float tensor. Same results, same numerics."""

    takes_masters = True

    def __init__(self, inner: Any) -> None:
        self.inner, self.name = inner, f"training ({inner.name})"
        self.numerics, self.dtype = inner.numerics, inner.dtype
        self.few_steps = getattr(inner, "few_steps", False)
        self.published = inner.numerics == "published"
        self.twin = Twin(self.published, torch.float32 if self.published else inner.dtype)
        self.rounds_masters = getattr(inner, "takes_masters", False)
        self.wide = type(inner)("plain", torch.float32) if self.rounds_masters else WIDE
        self.packed = WeakIdKeyDictionary()

    def _through(self, run: Callable[..., Any], gradients: Gradients, *inputs: Any) -> Any:
        wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return _Through.apply(run, gradients, *inputs) if wanted else run(*inputs)

    def _smooth(self, name: str, *inputs: Any) -> Any:
        """An operation that rounds nothing but its results."""
        run = getattr(self.inner, name)
        return run(*inputs) if self.few_steps else self._through(run, again(getattr(self.twin, name)), *inputs)

    # Masters

    def stored(self, weight: Tensor, scale: Scale) -> tuple[Tensor, Any]:
        """A weight as the set within takes it: a master as codes and scales, or, where that set rounds, as it is."""
        if not isinstance(scale, WeightFormat) or self.rounds_masters:
            return weight, scale
        held = self.packed.get(weight)
        if held is None or held[0] != version(weight):
            held = (version(weight), scale.pack(weight.detach()))
            self.packed[weight] = held
        return held[1]

    def forget(self) -> None:
        """Masters have changed in a way that does not count as a change in place: pack them anew."""
        self.packed.clear()
        if self.rounds_masters:
            self.inner.forget()

    def values(self, weight: Tensor, scale: Scale) -> Tensor:
        """What is multiplied with, in wide precision."""
        codes, steps = self.stored(weight, scale)
        if steps is None:
            return wide(weight)
        return wide(self.inner.values(codes, steps) if self.few_steps else self.twin.dense(codes, steps))

    # Linear maps

    def linear(self, x: Float[Tensor, "n inputs"], weight: Tensor, scale: Scale) -> Float[Tensor, "n outputs"]:
        if self.few_steps and not self.published:
            return self.inner.linear(x, weight, scale)
        return self._through(self._linear, self._linear_gradients, x, weight, scale)

    def _linear(self, x: Tensor, weight: Tensor, scale: Scale) -> Tensor:
        return self.inner.linear(x, *self.stored(weight, scale))

    def _linear_gradients(
        self, inputs: list[Any], wanted: Sequence[bool], results: Sequence[Tensor]
    ) -> list[Tensor | None]:
        x, weight, scale = inputs
        g = wide(results[0])
        met = wide(self._rounded(x)) if self.published and scale is not None else wide(x)
        return [
            g @ self.values(weight, scale) if wanted[0] else None,
            g.mT @ met if wanted[1] else None,
            None,
        ]

    def _rounded(self, x: Tensor) -> Tensor:
        """x as a quantised linear map meets it."""
        return self.inner.round_activation(x) if self.few_steps else round_activation(x)

    def _straight(self, x: Tensor) -> Tensor:
        """The same, the gradient passed on."""
        return straight(x, self._rounded(x.detach()))

    def linear_wide(self, x: Float[Tensor, "n inputs"], weight: Tensor) -> Float[Tensor, "n outputs"]:
        return self._smooth("linear_wide", x, weight)

    def linear_bias(self, x: Float[Tensor, "n inputs"], weight: Tensor, bias: Tensor) -> Float[Tensor, "n outputs"]:
        return self._smooth("linear_bias", x, weight, bias)

    def grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Scale
    ) -> Float[Tensor, "n g outputs"]:
        if self.few_steps and not self.published:
            return self.inner.grouped_linear(x, weight, scale)
        return self._through(self._grouped_linear, self._grouped_gradients, x, weight, scale)

    def _grouped_linear(self, x: Tensor, weight: Tensor, scale: Scale) -> Tensor:
        return self.inner.grouped_linear(x, *self.stored(weight, scale))

    def _grouped_gradients(
        self, inputs: list[Any], wanted: Sequence[bool], results: Sequence[Tensor]
    ) -> list[Tensor | None]:
        x, weight, scale = inputs
        g, met = wide(results[0]).transpose(0, 1), wide(x).transpose(0, 1)  # [g, n, _]
        return [
            (g @ self.values(weight, scale).unflatten(0, (x.shape[1], -1))).transpose(0, 1) if wanted[0] else None,
            (g.mT @ met).flatten(0, 1) if wanted[1] else None,
            None,
        ]

    # Norm, rotation, rounding

    def rms_norm(self, x: Float[Tensor, "*n k"], weight: Tensor, eps: float) -> Float[Tensor, "*n k"]:
        return self._smooth("rms_norm", x, weight, eps)

    def rotate(
        self,
        x: Float[Tensor, "n *h d"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        inverse: bool = False,
    ) -> Float[Tensor, "n *h d"]:
        return self._smooth("rotate", x, cos, sin, inverse)

    def quantise(self, x: Float[Tensor, "*n k"], form: BlockFormat) -> Float[Tensor, "*n k"]:
        return straight(x, self.inner.quantise(x.detach(), form))

    def store(self, x: Float[Tensor, "*n k"], form: BlockFormat, packed: bool) -> Tensor:
        if packed and x.requires_grad and torch.is_grad_enabled():
            raise OpsError("records of bytes carry no gradient: train with a cache of store='wide', or under no_grad")
        rows = self.inner.store(x.detach(), form, packed)
        return rows if packed else straight(x, rows)

    def read(self, rows: Tensor, form: BlockFormat) -> Float[Tensor, "*n k"]:
        return rows if rows.dtype != torch.uint8 else self.inner.read(rows, form)

    # Compressed positions

    def pool(
        self, kv: Float[Tensor, "a d"], gate: Float[Tensor, "a d"], rows: Int[Tensor, "groups ratio"]
    ) -> Float[Tensor, "groups d"]:
        return self._smooth("pool", kv, gate, rows)

    def index_scores(
        self, q: Float[Tensor, "n i c"], weights: Float[Tensor, "n i"], keys: Float[Tensor, "p c"]
    ) -> Float[Tensor, "n p"]:
        if self.few_steps and not self.published:
            return self.inner.index_scores(q, weights, keys)
        return self._through(self.inner.index_scores, again(self.twin.index_scores), q, weights, keys)

    def pick(self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], k: int) -> Int[Tensor, "n k"]:
        return self.inner.pick(scores.detach(), visible, k)

    def pick_blocks(
        self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], block: int, k: int
    ) -> Bool[Tensor, "n blocks"]:
        return self.inner.pick_blocks(scores.detach(), visible, block, k)

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
        own = getattr(self.inner, "attention_gradients", None)
        gradients = partial(attention_gradients, self.twin) if own is None else own
        return self._through(self.inner.sparse_attention, gradients, q, near, near_rows, far, far_rows, sink, scale)

    def full_attention(
        self,
        q: Float[Tensor, "n h d"],
        k: Float[Tensor, "n h d"],
        v: Float[Tensor, "n h d"],
        lengths: Sequence[int],
        scale: float,
    ) -> Float[Tensor, "n h d"]:
        return self._through(self.inner.full_attention, full_attention_gradients, q, k, v, lengths, scale)

    # Hyper-connections

    def mix(
        self, streams: Float[Tensor, "n m dim"], fn: Tensor, base: Tensor, scale: Tensor, rounds: int, eps: float,
        norm_eps: float,
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"], Float[Tensor, "n m m"]]:  # fmt: skip
        return self._smooth("mix", streams, fn, base, scale, rounds, eps, norm_eps)

    def collapse(self, streams: Float[Tensor, "n m dim"], pre: Float[Tensor, "n m"]) -> Float[Tensor, "n dim"]:
        return self._smooth("collapse", streams, pre)

    def expand(
        self,
        y: Float[Tensor, "n dim"],
        streams: Float[Tensor, "n m dim"],
        post: Float[Tensor, "n m"],
        comb: Float[Tensor, "n m m"],
    ) -> Float[Tensor, "n m dim"]:
        return self._smooth("expand", y, streams, post, comb)

    # Experts

    def route(
        self, logits: Float[Tensor, "n e"], bias: Float[Tensor, "*n e"], k: int, scale: float, function: str
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        if self.few_steps:
            return self.inner.route(logits, bias.detach(), k, scale, function)
        with torch.no_grad():
            weights, chosen = self.inner.route(logits, bias, k, scale, function)
        weigh = partial(self.twin.weights_of, chosen=chosen, scale=scale, function=function)
        return self._through(partial(given, weights), again(weigh), logits), chosen

    def swiglu(
        self, gate: Float[Tensor, "n f"], up: Float[Tensor, "n f"], limit: float, routing: Tensor | None
    ) -> Float[Tensor, "n f"]:
        return self._smooth("swiglu", gate, up, limit, routing)

    def activate(self, x: Float[Tensor, "*n k"], function: Activation) -> Float[Tensor, "*n k"]:
        return self._smooth("activate", x, function)

    def experts(
        self,
        x: Float[Tensor, "n dim"],
        routing: Float[Tensor, "n k"],
        chosen: Int[Tensor, "n k"],
        w1: tuple[Tensor, Scale],
        w2: tuple[Tensor, Scale],
        w3: tuple[Tensor, Scale],
        limit: float,
    ) -> Float[Tensor, "n dim"]:
        if self.few_steps and not self.published:
            return self.inner.experts(x, routing, chosen, w1, w2, w3, limit)
        dense = self.few_steps and takes_all(w1[0].shape[0], chosen.shape[1])
        gradients = self._all_experts_gradients if dense else partial(experts_gradients, self.twin)
        return self._through(self._experts, gradients, x, routing, chosen, *w1, *w2, *w3, limit)

    def _experts(self, x: Tensor, routing: Tensor, chosen: Tensor, *weights: Any) -> Tensor:
        *flat, limit = weights
        stored = (self.stored(flat[i], flat[i + 1]) for i in (0, 2, 4))
        return self.inner.experts(x, routing, chosen, *stored, limit)

    def _all_experts_gradients(
        self, inputs: list[Any], wanted: Sequence[bool], results: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Of the routed experts, where all tokens go through all of them."""
        x, routing, chosen, *weights, limit = inputs
        rounds = self._straight if self.published and weights[1] is not None else None
        leaves = {0: _leaf(x), 1: _leaf(routing)}
        leaves |= {place + 3: _leaf(self.values(weights[place], weights[place + 1])) for place in (0, 2, 4)}
        with torch.enable_grad():
            met = leaves[0] if rounds is None else rounds(leaves[0])
            out = self.wide.all_experts(met, leaves[1], chosen, leaves[3], leaves[7], leaves[5], limit, rounds)
        places = [place for place in leaves if wanted[place]]
        grads = torch.autograd.grad(out, [leaves[place] for place in places], results[0].to(out.dtype))
        found = dict(zip(places, grads, strict=True))
        return [found.get(place) for place in range(len(inputs))]

    # Engram

    def look_up_rows(self, table: Tensor, scale: Scale, rows: Int[Tensor, "*n"]) -> Float[Tensor, "*n width"]:
        return self._through(self._look_up, table_gradients, table, scale, rows)

    def _look_up(self, table: Tensor, scale: Scale, rows: Tensor) -> Tensor:
        if not isinstance(scale, WeightFormat):
            return self.inner.look_up_rows(table, scale, rows)
        codes, scales = scale.pack(table[rows.flatten()])  # only the rows looked up
        number = torch.arange(rows.numel(), device=rows.device).view(rows.shape)
        return self.inner.look_up_rows(codes, scales, number)

    def engram_gate(
        self,
        streams: Float[Tensor, "n m dim"],
        keys: Float[Tensor, "n m dim"],
        value: Float[Tensor, "n dim"],
        weight: Float[Tensor, "m dim"],
        open: Bool[Tensor, "n"],
        eps: float,
    ) -> Float[Tensor, "n m dim"]:
        return self._smooth("engram_gate", streams, keys, value, weight, open, eps)


class Twin(ReferenceOps):
    """The plain specification; with `rounds`, rounding activations and masters where linear maps do."""

    name = "twin"

    def __init__(self, rounds: bool, dtype: torch.dtype) -> None:
        super().__init__("plain", dtype)
        self.rounds = rounds

    def linear(self, x: Float[Tensor, "n inputs"], weight: Tensor, scale: Scale) -> Float[Tensor, "n outputs"]:
        if self.rounds and scale is not None:
            x = straight(x, WINDOW.round(x.detach()))
        return self.matmul(x, self.dense(weight, scale)).to(x.dtype)

    def grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Scale
    ) -> Float[Tensor, "n g outputs"]:
        return super().grouped_linear(x, self.dense(weight, scale), None)

    def dense(self, weight: Tensor, scale: Scale) -> Tensor:
        if not isinstance(scale, WeightFormat):
            return super().dense(weight, scale)
        return straight(weight, scale.unpack(*scale.pack(weight.detach())))

    def weights_of(
        self, logits: Float[Tensor, "n e"], chosen: Int[Tensor, "n k"], scale: float, function: str
    ) -> Float[Tensor, "n k"]:
        """What `route` gives for these experts."""
        return self.weigh(self.router_scores(logits, function), chosen, scale)

    def expert(
        self,
        x: Float[Tensor, "n dim"],
        routing: Float[Tensor, "n 1"],
        w1: tuple[Tensor, Scale],
        w2: tuple[Tensor, Scale],
        w3: tuple[Tensor, Scale],
        limit: float,
    ) -> Float[Tensor, "n dim"]:
        """One expert's result for its tokens."""
        return self.linear(self.swiglu(self.linear(x, *w1), self.linear(x, *w3), limit, routing), *w2)


def given(result: Tensor, *inputs: Any) -> Tensor:
    """What an operation gave that has been run already."""
    return result


def expert_of(stacked: tuple[Tensor, Scale], expert: int) -> tuple[Tensor, Scale]:
    """One expert's weight, a leaf if it is a float, and what stands beside it."""
    weight, scale = stacked
    floats = weight.is_floating_point() and weight.dtype.itemsize > 1
    one = _leaf(weight[expert]) if floats else weight[expert]
    return one, scale[expert] if isinstance(scale, Tensor) else scale


def straight(x: Tensor, rounded: Tensor) -> Tensor:
    """The values of `rounded`, the gradient of `x`."""
    return _Straight.apply(x, rounded) if x.requires_grad and torch.is_grad_enabled() else rounded


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone() if rounded is x else rounded.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Through(torch.autograd.Function):
    """`run(*inputs)` forwards, keeping the inputs alone; backwards `gradients(inputs, wanted, results' gradients)`."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], gradients: Gradients, *inputs: Any) -> Any:
        ctx.gradients = gradients
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.places = [place for place, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(inputs[place] for place in ctx.places))
        return run(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *results: Tensor) -> Any:
        inputs = list(ctx.others)
        for place, value in zip(ctx.places, ctx.saved_tensors, strict=True):
            inputs[place] = value
        found = ctx.gradients(inputs, ctx.needs_input_grad[2:], results)
        return (
            None,
            None,
            *(None if one is None else one.to(value.dtype) for one, value in zip(found, inputs, strict=True)),
        )


def again(operation: Callable[..., Any]) -> Gradients:
    """Gradients by running a differentiable operation once more, in float32 or float64."""
    return partial(_again, operation)


def _again(
    operation: Callable[..., Any], inputs: list[Any], wanted: Sequence[bool], results: Sequence[Tensor]
) -> list[Tensor | None]:
    values = [_leaf(value) if want else _widened(value) for value, want in zip(inputs, wanted, strict=True)]
    with torch.enable_grad():
        outputs = operation(*values)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = [(one, grad.to(one.dtype)) for one, grad in zip(outputs, results, strict=True) if one.requires_grad]
    leaves = [value for value, want in zip(values, wanted, strict=True) if want]
    found = iter(torch.autograd.grad([one for one, _ in pairs], leaves, [grad for _, grad in pairs],
                                     allow_unused=True))  # fmt: skip
    return [next(found) if want else None for want in wanted]


def _leaf(value: Tensor) -> Tensor:
    return wide(value).detach().requires_grad_()


def _widened(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize > 1
    return wide(value) if floats else value


def attention_gradients(
    twin: Twin, inputs: list[Any], wanted: Sequence[bool], results: Sequence[Tensor]
) -> list[Tensor | None]:
    """Of softmax attention over rows: probabilities are made anew for some queries at a time, so that memory is what
    the inputs and their gradients take. With g the result's gradient, p the probabilities, s' the scores' gradient:

        row += p g + s' q        s' = p (g . row - sum over rows of p g . row), scaled        q' = sum of s' row

    The sink is one more score, of a row of zeros. Row -1 is a row of zeros as well, of probability 0.
    """
    q, near, near_rows, far, far_rows, sink, scale = inputs
    tables, lists = [wide(twin.read(near, WINDOW))], [near_rows]
    if far is not None:
        tables.append(wide(twin.read(far, LATENT)))
        lists.append(far_rows)
    whole, index = one_table(tables, lists)
    found, found_sink = torch.zeros_like(whole), torch.zeros_like(wide(sink))
    by_query = [wide(q)[:0]]
    some = rows_at_once(q.device, bytes_of_query(index.shape[1], q.shape[1], q.shape[2], whole.element_size()), QUERIES)
    for first in range(0, q.shape[0], some):
        rows, queries = index[first : first + some], wide(q[first : first + some])
        values, g = whole[rows], results[0][first : first + some].to(whole.dtype)
        nothing = rows < 0
        scores = (queries @ values.mT).mul_(scale).masked_fill_(nothing.unsqueeze(1), -torch.inf)  # [n, h, t]
        sinks = sink.to(values.dtype).expand(queries.shape[:2]).unsqueeze(-1)
        p = torch.cat((scores, sinks), -1).softmax(-1)
        agreement = F.pad(g @ values.mT, (0, 1))
        slope = torch.ops.aten._softmax_backward_data(agreement, p, -1, p.dtype)
        found_sink += slope[..., -1].sum(0)
        p, slope = p[..., :-1], slope[..., :-1].mul(scale)
        by_query.append(slope @ values)
        by_row = (p.mT @ g).baddbmm_(slope.mT, queries)
        if launch_bound(q.device):  # rows of nothing add zeros: not all to one row, which would be waited for
            elsewhere: Tensor | int = torch.arange(rows.numel(), device=rows.device).view_as(rows) % len(whole)
        else:
            elsewhere = len(whole) - 1
        rows = torch.where(nothing, elsewhere, rows)
        found.index_add_(0, rows.flatten(), by_row.flatten(0, 1))
    of_near, of_far = found[: len(near)], None if far is None else found[len(near) : len(whole) - 1]
    every = (torch.cat(by_query), of_near, None, of_far, None, found_sink, None)
    return [one if want else None for one, want in zip(every, wanted, strict=True)]


def full_attention_gradients(
    inputs: list[Any], wanted: Sequence[bool], results: Sequence[Tensor]
) -> list[Tensor | None]:
    """Of attention within groups: some queries of a group at a time."""
    q, lengths = inputs[0], inputs[3]
    some_queries = rows_at_once(
        q.device, 6 * q.shape[1] * max(lengths, default=1) * wide(q[:0]).element_size(), QUERIES
    )
    *rows, lengths, scale = inputs
    found = [torch.zeros_like(wide(x)) for x in rows]
    first = 0
    for length in lengths:
        for start in range(first, first + length, some_queries):
            some, whole = slice(start, min(start + some_queries, first + length)), slice(first, first + length)
            q, k, v = _leaf(rows[0][some]), _leaf(rows[1][whole]), _leaf(rows[2][whole])
            with torch.enable_grad():
                p = (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(-1)
                out = torch.einsum("hqk,khd->qhd", p, v)
            grads = torch.autograd.grad(out, (q, k, v), results[0][some].to(out.dtype))
            for total, place, grad in zip(found, (some, whole, whole), grads, strict=True):
                total[place] += grad
        first += length
    return [one if want else None for one, want in zip((*found, None, None), wanted, strict=True)]


def experts_gradients(
    twin: Twin, inputs: list[Any], wanted: Sequence[bool], results: Sequence[Tensor]
) -> list[Tensor | None]:
    """Of the routed experts: one expert at a time."""
    x, routing, chosen, *weights, limit = inputs
    w1, w2, w3 = ((weights[i], weights[i + 1]) for i in (0, 2, 4))
    found = [torch.zeros_like(wide(one)) if want else None
             for one, want in zip(inputs, wanted, strict=True)]  # fmt: skip
    for expert, token, place in by_expert(chosen, len(w1[0])):
        inner, weight = _leaf(x[token]), _leaf(routing[token, place].unsqueeze(1))
        gate, down, up = (expert_of(one, expert) for one in (w1, w2, w3))
        with torch.enable_grad():
            out = twin.expert(inner, weight, gate, down, up, limit)
        leaves = {0: inner, 1: weight, 3: gate[0], 5: down[0], 7: up[0]}
        places = [i for i in leaves if wanted[i]]
        grads = torch.autograd.grad(out, [leaves[i] for i in places], results[0][token].to(out.dtype))
        for i, grad in zip(places, grads, strict=True):
            total = found[i]
            assert total is not None
            if i == 0:
                total.index_add_(0, token, grad)
            elif i == 1:
                total[token, place] = grad.squeeze(1)
            else:
                total[expert] = grad
    return found


def table_gradients(inputs: list[Any], wanted: Sequence[bool], results: Sequence[Tensor]) -> list[Tensor | None]:
    """Of a look-up: a sparse tensor that holds the rows looked up, and no others."""
    table, _, rows = inputs
    values = results[0].flatten(0, -2).to(table.dtype)
    # Not checked: rows were looked up, so they exist; and a check would ask the device. What `sparse_coo_tensor` calls
    # itself: that one warns where nothing is checked, from PyTorch 2.11 on even where it is told not to.
    found = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1, values.dim() - 1, table.shape, rows.flatten().unsqueeze(0), values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device,
    )  # fmt: skip
    return [found, None, None]
