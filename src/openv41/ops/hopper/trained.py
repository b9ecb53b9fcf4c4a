"""`TrainedOps`: what a training run on a Hopper GPU computes with.

`FastOps`, with kernels of our own where a step spends its time: attention and its gradient, what is read of the streams
and written back to them, Sinkhorn's rounds, rotation, the gates of experts, index scores and their order, and with
published numerics all rounding, of activations, rows and masters.
`TrainingOps` stands around it, as around any set.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from openv41.errors import OpsError
from openv41.formats import BlockFormat, WeightFormat
from openv41.ops.fast import FastOps, version
from openv41.ops.hopper import attend, backward
from openv41.ops.hopper.gated import gated
from openv41.ops.hopper.index_plain import index_scores, ranked
from openv41.ops.hopper.lists import HEADS, WIDTHS
from openv41.ops.hopper.rotate import rotated
from openv41.ops.hopper.rounding import FORMS, round_activation, round_master, round_rows
from openv41.ops.hopper.sinkhorn import SIDES, balanced
from openv41.ops.hopper.streams import SPACE_MOST, collapsed, expanded
from openv41.ops.reference import Numerics, ascending


class TrainedOps(FastOps):
    """Either numerics, plain ones in float32. Differences from `FastOps`: the order of float32 sums; and with plain
    numerics attention's products are TF32 where the library's are (`torch.set_float32_matmul_precision`).

    A weight may be a float master with its format, a `WeightFormat`, in the place of scales: it is rounded once for as
    long as it does not change. Raises `OpsError` for other types, and for shapes that the kernels do not have.
    """

    name = "hopper"
    takes_masters = True

    def __init__(self, numerics: Numerics = "published", dtype: torch.dtype | None = None) -> None:
        if numerics == "plain" and dtype not in (None, torch.float32):
            raise OpsError(f"the hopper ops train in float32 with plain numerics, got {dtype}: use the fast ops there")
        super().__init__(numerics, torch.float32 if numerics == "plain" else dtype)
        self.masters = WeakIdKeyDictionary()

    @staticmethod
    def fits(heads: int, width: int, streams: int, dim: int) -> bool:
        """Whether the kernels have these shapes: heads, values of one, streams, values of one."""
        whole = streams * (1 << (dim - 1).bit_length()) <= SPACE_MOST
        return heads <= HEADS and width in WIDTHS and streams in SIDES and whole

    # Weights

    def values(self, weight: Tensor, scale: Any, wide: bool = False) -> Tensor:
        if not isinstance(scale, WeightFormat):
            return super().values(weight, scale, wide)
        held = self.masters.get(weight)
        if held is None or held[0] != version(weight):
            held = (version(weight), round_master(weight.detach(), scale, self.dtype))
            self.masters[weight] = held
        values: Tensor = held[1]
        return values

    def forget(self) -> None:
        """Masters have changed in a way that does not count as a change in place: round them anew."""
        self.masters.clear()

    # Rounding

    def round_activation(self, x: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
        return round_activation(x)

    def quantise(self, x: Float[Tensor, "*n k"], form: BlockFormat) -> Float[Tensor, "*n k"]:
        return super().quantise(x, form) if self.plain or form.name not in FORMS else round_rows(x, form)

    def rotate(
        self,
        x: Float[Tensor, "n *h d"],
        cos: Float[Tensor, "n half"],
        sin: Float[Tensor, "n half"],
        inverse: bool = False,
    ) -> Float[Tensor, "n *h d"]:
        return rotated(x, cos, sin, inverse)

    # Index

    def index_scores(
        self, q: Float[Tensor, "n i c"], weights: Float[Tensor, "n i"], keys: Float[Tensor, "p c"]
    ) -> Float[Tensor, "n p"]:
        """By kernel where no gradient is asked for: what an indexer learns from are few scores."""
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in (q, weights, keys))
        if learns or not self.plain:
            return super().index_scores(q, weights, keys)
        return index_scores(q, weights, keys, precision())

    def pick(self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], k: int) -> Int[Tensor, "n k"]:
        if scores.shape[1] <= k:
            return super().pick(scores, visible, k)
        return ascending(ranked(scores, visible).topk(k, sorted=False).indices, visible, k)

    # Streams

    def sinkhorn(self, logits: Float[Tensor, "n m m"], rounds: int, eps: float) -> Float[Tensor, "n m m"]:
        return balanced(logits, rounds, eps)

    def collapse(self, streams: Float[Tensor, "n m dim"], pre: Float[Tensor, "n m"]) -> Float[Tensor, "n dim"]:
        return collapsed(streams, pre)

    def expand(
        self,
        y: Float[Tensor, "n dim"],
        streams: Float[Tensor, "n m dim"],
        post: Float[Tensor, "n m"],
        comb: Float[Tensor, "n m m"],
    ) -> Float[Tensor, "n m dim"]:
        return expanded(y, streams, post, comb)

    # Experts

    def gated(
        self, gate: Float[Tensor, "*n f"], up: Float[Tensor, "*n f"], limit: float, routing: Tensor | None
    ) -> Float[Tensor, "*n f"]:
        return gated(gate, up, limit, routing)

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
        far = None if far is None else far.contiguous()
        return attend.attend(q, near.contiguous(), near_rows, far, far_rows, sink, scale, precision())

    def attention_gradients(
        self, inputs: list[Any], wanted: Sequence[bool], results: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """As `ops.training` asks for them: in float32, from the inputs alone."""
        q, near, near_rows, far, far_rows, sink, scale = inputs
        q, near, far = (None if one is None else one.float().contiguous() for one in (q, near, far))
        return backward.attention_gradients(
            [q, near, near_rows, far, far_rows, sink, scale], wanted, results, precision()
        )


def precision() -> attend.Precision:
    """Of products of float32: as the library takes them in this process."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
