"""`CountingOps`: a set of operations that computes nothing. Results have the right shapes and types and no memory; what
each operation would multiply and read is told to whoever listens.

The model runs on it as on any other set, at any size. Numbers of rows (which positions, which experts) are real where
they follow from positions alone. What would follow from values is chosen by a rule: picks are the oldest visible
positions, candidates the newest blocks; there are as many of them as there would be.

Products are counted, two operations for a multiplication and its addition: sums, norms, softmaxes, and the mixing of
four streams are not, being thousands of times fewer. A product belongs to the format of its operands:

    fp4_fp8   routed experts: fp4 weights, activations rounded to fp8
    fp8       linear maps: fp8 weights, activations rounded to fp8
    bf16      attention and index scores, grouped output, what is stored in bf16
    fp32      what the model keeps in float32: router, mixes, ratio-2 compressor, heads
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from openv41.formats import BlockFormat
from openv41.ops.compound import Compound
from openv41.ops.reference import Activation, Numerics

FORMATS = ("fp4_fp8", "fp8", "bf16", "fp32")

Listener = Callable[[str, Counter[str], Counter[str]], None]
"""Told the name of an operation, its FLOPs by format, and the bytes it reads by kind (`weights`, `table`)."""


class CountingOps(Compound):
    """Shapes of `numerics="published"`, on the meta device."""

    name = "counting"
    numerics: Numerics = "published"
    dtype = torch.bfloat16

    def __init__(self, listener: Listener | None = None) -> None:
        self.listener = listener

    def _tell(self, op: str, flops: dict[str, int] | None = None, **read: int) -> None:
        if self.listener is not None:
            self.listener(op, Counter(flops or {}), Counter({k: v for k, v in read.items() if v}))

    # Linear maps

    def linear(self, x: Float[Tensor, "n inputs"], weight: Tensor, scale: Tensor | None) -> Float[Tensor, "n outputs"]:
        n, inputs = x.shape
        self._tell("linear", {format_of(weight): 2 * n * inputs * weight.shape[0]}, weights=used(x, weight, scale))
        return x.new_empty(n, weight.shape[0])

    def linear_wide(self, x: Float[Tensor, "n inputs"], weight: Tensor) -> Float[Tensor, "n outputs"]:
        self._tell("linear_wide", {"fp32": 2 * x.shape[0] * weight.numel()}, weights=used(x, weight))
        return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)

    def linear_bias(self, x: Float[Tensor, "n inputs"], weight: Tensor, bias: Tensor) -> Float[Tensor, "n outputs"]:
        self._tell("linear_bias", {"bf16": 2 * x.shape[0] * weight.numel()}, weights=used(x, weight, bias))
        return x.new_empty(x.shape[0], weight.shape[0])

    def grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Tensor | None
    ) -> Float[Tensor, "n g outputs"]:
        n, g, inputs = x.shape
        self._tell("grouped_linear", {"bf16": 2 * n * inputs * weight.shape[0]}, weights=used(x, weight, scale))
        return x.new_empty(n, g, weight.shape[0] // g)

    # Norm, rotation, rounding

    def rms_norm(self, x: Float[Tensor, "*n k"], weight: Tensor, eps: float) -> Float[Tensor, "*n k"]:
        self._tell("rms_norm", weights=used(x, weight))
        return torch.empty_like(x)

    def rotate(
        self, x: Float[Tensor, "n *h d"], cos: Float[Tensor, "n half"], sin: Float[Tensor, "n half"], inverse: bool
    ) -> Float[Tensor, "n *h d"]:
        return torch.empty_like(x)

    def quantise(self, x: Float[Tensor, "*n k"], form: BlockFormat) -> Float[Tensor, "*n k"]:
        return torch.empty_like(x)

    def store(self, x: Float[Tensor, "*n k"], form: BlockFormat, packed: bool) -> Tensor:
        if not packed:
            return torch.empty_like(x)
        return x.new_empty(*x.shape[:-1], form.record_bytes(x.shape[-1]), dtype=torch.uint8)

    def read(self, rows: Tensor, form: BlockFormat) -> Float[Tensor, "*n k"]:
        if rows.dtype != torch.uint8:
            return rows
        return rows.new_empty(*rows.shape[:-1], values_in(form, rows.shape[-1]), dtype=self.dtype)

    # Compressed positions

    def pool(
        self, kv: Float[Tensor, "a d"], gate: Float[Tensor, "a d"], rows: Int[Tensor, "groups ratio"]
    ) -> Float[Tensor, "groups d"]:
        return kv.new_empty(rows.shape[0], kv.shape[1], dtype=self.dtype)

    def index_scores(
        self, q: Float[Tensor, "n i c"], weights: Float[Tensor, "n i"], keys: Float[Tensor, "p c"]
    ) -> Float[Tensor, "n p"]:
        n, heads, width = q.shape
        self._tell("index_scores", {"bf16": 2 * n * heads * width * keys.shape[0]})
        return q.new_empty(n, keys.shape[0])

    def pick(self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], k: int) -> Int[Tensor, "n k"]:
        position = torch.arange(k).expand(scores.shape[0], -1)
        return position.masked_fill(position >= visible.clamp_max(scores.shape[1]).unsqueeze(1), -1)

    def pick_blocks(
        self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], block: int, k: int
    ) -> Bool[Tensor, "n blocks"]:
        number = torch.arange(-(-scores.shape[1] // block))
        newest = ((visible - 1) // block).unsqueeze(1)
        return (number <= newest) & (number > newest - k)

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
        listed = int((near_rows >= 0).sum()) + (0 if far_rows is None else int((far_rows >= 0).sum()))
        self._tell("sparse_attention", {"bf16": 4 * q.shape[1] * q.shape[2] * listed}, weights=stored(sink))
        return torch.empty_like(q)

    def full_attention(
        self,
        q: Float[Tensor, "n h d"],
        k: Float[Tensor, "n h d"],
        v: Float[Tensor, "n h d"],
        lengths: Sequence[int],
        scale: float,
    ) -> Float[Tensor, "n h d"]:
        pairs = sum(length**2 for length in lengths)
        self._tell("full_attention", {"bf16": 4 * q.shape[1] * q.shape[2] * pairs})
        return torch.empty_like(q)

    # Hyper-connections

    def mix(
        self, streams: Float[Tensor, "n m dim"], fn: Tensor, base: Tensor, scale: Tensor, rounds: int, eps: float,
        norm_eps: float,
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"], Float[Tensor, "n m m"]]:  # fmt: skip
        n, m, _ = streams.shape
        self._tell("mix", {"fp32": 2 * n * fn.numel()}, weights=stored(fn, base, scale))
        return tuple(streams.new_empty(shape, dtype=torch.float32) for shape in ((n, m), (n, m), (n, m, m)))  # type: ignore[return-value]

    def collapse(self, streams: Float[Tensor, "n m dim"], pre: Float[Tensor, "n m"]) -> Float[Tensor, "n dim"]:
        return streams.new_empty(streams.shape[0], streams.shape[2])

    def expand(
        self,
        y: Float[Tensor, "n dim"],
        streams: Float[Tensor, "n m dim"],
        post: Float[Tensor, "n m"],
        comb: Float[Tensor, "n m m"],
    ) -> Float[Tensor, "n m dim"]:
        return torch.empty_like(streams)

    # Experts

    def route(
        self, logits: Float[Tensor, "n e"], bias: Float[Tensor, "*n e"], k: int, scale: float, function: str
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        self._tell("route", weights=bias.shape[-1] * bias.dtype.itemsize)
        return logits.new_empty(logits.shape[0], k), logits.new_empty(logits.shape[0], k, dtype=torch.int64)

    def swiglu(
        self, gate: Float[Tensor, "n f"], up: Float[Tensor, "n f"], limit: float, routing: Float[Tensor, "n 1"] | None
    ) -> Float[Tensor, "n f"]:
        return torch.empty_like(gate)

    def activate(self, x: Float[Tensor, "*n k"], function: Activation) -> Float[Tensor, "*n k"]:
        return torch.empty_like(x)

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
        tokens, active = chosen.shape
        count = w1[0].shape[0]
        values = sum(values_of(weight) for weight, _ in (w1, w2, w3)) // count  # of one expert
        share = distinct(count, active, tokens) / count
        read = round(share * sum(stored(weight, scale) for weight, scale in (w1, w2, w3)))
        self._tell("experts", {format_of(w1[0]): 2 * tokens * active * values}, weights=read)
        return torch.empty_like(x, dtype=torch.float32)

    # Engram

    def look_up_rows(self, table: Tensor, scale: Tensor | None, rows: Int[Tensor, "*n"]) -> Float[Tensor, "*n width"]:
        self._tell("look_up_rows", table=rows.numel() * stored(table, scale) // table.shape[0])
        return torch.empty(*rows.shape, table.shape[1], dtype=self.dtype, device=table.device)

    def engram_gate(
        self,
        streams: Float[Tensor, "n m dim"],
        keys: Float[Tensor, "n m dim"],
        value: Float[Tensor, "n dim"],
        weight: Float[Tensor, "m dim"],
        open: Bool[Tensor, "n"],
        eps: float,
    ) -> Float[Tensor, "n m dim"]:
        self._tell("engram_gate", weights=2 * 2 * weight.numel())  # made of two weights in bf16
        return torch.empty_like(streams)


def values_of(weight: Tensor) -> int:
    """Values that a stored weight holds: a byte of fp4 codes holds two."""
    return weight.numel() * (2 if weight.dtype == torch.uint8 else 1)


def stored(*parts: Tensor | None) -> int:
    """Bytes of a stored weight with its scale."""
    return sum(part.nbytes for part in parts if part is not None)


def used(x: Tensor, *parts: Tensor | None) -> int:
    """Bytes of a stored weight that a call reads: none where no row goes in."""
    return stored(*parts) if x.numel() else 0


def format_of(weight: Tensor) -> str:
    names = {torch.uint8: "fp4_fp8", torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16"}
    return names.get(weight.dtype, "fp32")


def values_in(form: BlockFormat, record_bytes: int) -> int:
    """Values of one record: `BlockFormat.record_bytes` turned around."""
    per_block = form.block // form.codes_per_byte + form.stored_as[1].itemsize
    return record_bytes // per_block * form.block


def distinct(count: int, active: int, tokens: int) -> float:
    """Experts of `count` that `tokens` tokens use together, `active` each, if all are chosen equally often."""
    return count * (1 - (1 - active / count) ** tokens)
