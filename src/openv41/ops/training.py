"""TrainingOps: any set of operations, made differentiable. Forward as that set computes it, backward straight through.

    forward    the operation of the set within, to the bit; of it only the inputs are kept
    backward   the gradient of the operation's differentiable twin at those inputs, worked out when it is needed

The twin is the plain specification in float32 (float64 for float64). Where the published model rounds an activation or
a weight to fp8 or fp4, the twin meets the rounded values, and the rounding's derivative is one. So it is for values
that saturate: a block's scale follows its largest value, and a value cut off from its gradient could not come back. The
roundings to bf16 on the way, of derivative one as well, are left out.

Numbers have no gradient: what `pick`, `pick_blocks` and `route` choose; `route`'s bias, which does nothing else, has
none. Nor have records of bytes: one trains with a cache of wide rows, the default.

A weight may be a float *master*, with the format that it is to be rounded to, a `WeightFormat`, in place of its scale.
The set within then gets codes and scales as they would be stored, and the gradient goes to the master. An Engram
table's gradient is a sparse tensor of the rows looked up.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from openv41.errors import OpsError
from openv41.formats import LATENT, WINDOW, BlockFormat, WeightFormat
from openv41.ops.reference import Activation, ReferenceOps, wide

Scale = Tensor | WeightFormat | None
"""Beside a weight: the scales of stored codes; the format that a float master is rounded to; nothing."""

Gradients = Callable[[list[Any], Sequence[bool], Sequence[Tensor]], list[Tensor | None]]
"""From an operation's inputs, which of them want a gradient, and the results' gradients: the inputs' gradients."""

QUERIES = 64
"""Queries whose rows attention's backward gathers at a time."""


class TrainingOps:
    """`inner`, any set of operations, differentiable in whatever is a float tensor. Same results, same numerics."""

    takes_masters = True

    def __init__(self, inner: Any) -> None:
        self.inner, self.name = inner, f"training ({inner.name})"
        self.numerics, self.dtype = inner.numerics, inner.dtype
        published = inner.numerics == "published"
        self.twin = Twin(published, torch.float32 if published else inner.dtype)

    def _through(self, run: Callable[..., Any], gradients: Gradients, *inputs: Any) -> Any:
        wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return _Through.apply(run, gradients, *inputs) if wanted else run(*inputs)

    # Linear maps

    def linear(self, x: Float[Tensor, "n inputs"], weight: Tensor, scale: Scale) -> Float[Tensor, "n outputs"]:
        run = partial(with_stored, self.inner.linear)
        return self._through(run, again(self.twin.linear), x, weight, scale)

    def linear_wide(self, x: Float[Tensor, "n inputs"], weight: Tensor) -> Float[Tensor, "n outputs"]:
        return self._through(self.inner.linear_wide, again(self.twin.linear_wide), x, weight)

    def linear_bias(self, x: Float[Tensor, "n inputs"], weight: Tensor, bias: Tensor) -> Float[Tensor, "n outputs"]:
        return self._through(self.inner.linear_bias, again(self.twin.linear_bias), x, weight, bias)

    def grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Scale
    ) -> Float[Tensor, "n g outputs"]:
        run = partial(with_stored, self.inner.grouped_linear)
        return self._through(run, again(self.twin.grouped_linear), x, weight, scale)

    # Norm, rotation, rounding

    def rms_norm(self, x: Float[Tensor, "*n k"], weight: Tensor, eps: float) -> Float[Tensor, "*n k"]:
        return self._through(self.inner.rms_norm, again(self.twin.rms_norm), x, weight, eps)

    def rotate(
        self,
        x: Float[Tensor, "n *h d"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        inverse: bool = False,
    ) -> Float[Tensor, "n *h d"]:
        return self._through(self.inner.rotate, again(self.twin.rotate), x, cos, sin, inverse)

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
        return self._through(self.inner.pool, again(self.twin.pool), kv, gate, rows)

    def index_scores(
        self, q: Float[Tensor, "n i c"], weights: Float[Tensor, "n i"], keys: Float[Tensor, "p c"]
    ) -> Float[Tensor, "n p"]:
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
        gradients = partial(attention_gradients, self.twin)
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
        return self._through(self.inner.mix, again(self.twin.mix), streams, fn, base, scale, rounds, eps, norm_eps)

    def collapse(self, streams: Float[Tensor, "n m dim"], pre: Float[Tensor, "n m"]) -> Float[Tensor, "n dim"]:
        return self._through(self.inner.collapse, again(self.twin.collapse), streams, pre)

    def expand(
        self,
        y: Float[Tensor, "n dim"],
        streams: Float[Tensor, "n m dim"],
        post: Float[Tensor, "n m"],
        comb: Float[Tensor, "n m m"],
    ) -> Float[Tensor, "n m dim"]:
        return self._through(self.inner.expand, again(self.twin.expand), y, streams, post, comb)

    # Experts

    def route(
        self, logits: Float[Tensor, "n e"], bias: Float[Tensor, "*n e"], k: int, scale: float, function: str
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        with torch.no_grad():
            weights, chosen = self.inner.route(logits, bias, k, scale, function)
        weigh = partial(self.twin.weights_of, chosen=chosen, scale=scale, function=function)
        return self._through(partial(given, weights), again(weigh), logits), chosen

    def swiglu(
        self, gate: Float[Tensor, "n f"], up: Float[Tensor, "n f"], limit: float, routing: Tensor | None
    ) -> Float[Tensor, "n f"]:
        return self._through(self.inner.swiglu, again(self.twin.swiglu), gate, up, limit, routing)

    def activate(self, x: Float[Tensor, "*n k"], function: Activation) -> Float[Tensor, "*n k"]:
        return self._through(self.inner.activate, again(self.twin.activate), x, function)

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
        gradients = partial(experts_gradients, self.twin)
        return self._through(self._experts, gradients, x, routing, chosen, *w1, *w2, *w3, limit)

    def _experts(self, x: Tensor, routing: Tensor, chosen: Tensor, *weights: Any) -> Tensor:
        *flat, limit = weights
        stored = (as_stored(flat[i], flat[i + 1]) for i in (0, 2, 4))
        return self.inner.experts(x, routing, chosen, *stored, limit)

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
        gradients = again(self.twin.engram_gate)
        return self._through(self.inner.engram_gate, gradients, streams, keys, value, weight, open, eps)


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


def with_stored(operation: Callable[..., Tensor], x: Tensor, weight: Tensor, scale: Scale) -> Tensor:
    """A linear map of another set of operations, which takes no masters."""
    return operation(x, *as_stored(weight, scale))


def given(result: Tensor, *inputs: Any) -> Tensor:
    """What an operation gave that has been run already."""
    return result


def as_stored(weight: Tensor, scale: Scale) -> tuple[Tensor, Tensor | None]:
    """A weight as other sets of operations take it: a master as codes and scales."""
    return scale.pack(weight.detach()) if isinstance(scale, WeightFormat) else (weight, scale)


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

        row += p g + s' q        s' = p (g . row - g . out), scaled        q' = sum of s' row        sink' = -p g . out
    """
    q, near, near_rows, far, far_rows, sink, scale = inputs
    tables = [wide(twin.read(near, WINDOW))]
    if far is not None:
        tables.append(wide(twin.read(far, LATENT)))
    lists = [near_rows] if far is None else [near_rows, far_rows]
    found_q, found_sink = torch.zeros_like(wide(q)), torch.zeros_like(wide(sink))
    found = [torch.zeros_like(table) for table in tables]
    for first in range(0, q.shape[0], QUERIES):
        some = slice(first, first + QUERIES)
        rows = [one[some] for one in lists]
        listed = torch.cat(rows, 1) >= 0
        taken = [table[row.clamp_min(0)] for table, row in zip(tables, rows, strict=True)]
        values = torch.cat(taken, 1).masked_fill(~listed.unsqueeze(-1), 0)  # [n, t, d]
        queries, g = wide(q[some]), results[0][some].to(values.dtype)
        scores = (queries @ values.mT * scale).masked_fill(~listed.unsqueeze(1), -torch.inf)  # [n, h, t]
        sinks = sink.to(values.dtype).expand(queries.shape[:2]).unsqueeze(-1)
        p = torch.cat((scores, sinks), -1).softmax(-1)
        p, p_sink = p[..., :-1], p[..., -1]
        agreement = g @ values.mT  # [n, h, t]
        mean = (p * agreement).sum(-1)  # [n, h]: g . out
        slope = p * (agreement - mean.unsqueeze(-1)) * scale
        found_sink -= (p_sink * mean).sum(0)
        found_q[some] = slope @ values
        by_row = (p.mT @ g + slope.mT @ queries).split([row.shape[1] for row in rows], 1)
        for total, row, share in zip(found, rows, by_row, strict=True):
            known = row >= 0
            total.index_add_(0, row[known], share[known])
    of_near, of_far = found[0], found[1] if far is not None else None
    every = (found_q, of_near, None, of_far, None, found_sink, None)
    return [one if want else None for one, want in zip(every, wanted, strict=True)]


def full_attention_gradients(
    inputs: list[Any], wanted: Sequence[bool], results: Sequence[Tensor]
) -> list[Tensor | None]:
    """Of attention within groups: some queries of a group at a time."""
    *rows, lengths, scale = inputs
    found = [torch.zeros_like(wide(x)) for x in rows]
    first = 0
    for length in lengths:
        for start in range(first, first + length, QUERIES):
            some, whole = slice(start, min(start + QUERIES, first + length)), slice(first, first + length)
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
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
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
    with torch.sparse.check_sparse_tensor_invariants(True):  # older versions of torch warn where nothing is chosen
        found = torch.sparse_coo_tensor(rows.flatten().unsqueeze(0), values, table.shape)
    return [found, None, None]
