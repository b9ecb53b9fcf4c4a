"""Operations made of others. A layer asks for them by one name, so that a machine may do them at one go.

What each means stands here, as a composition; every set of operations has them by that. A set that overrides one gives
the same bits as its own simple operations would.
"""

from typing import Any

from jaxtyping import Float, Int, Shaped
from torch import Tensor

from openv41.formats import BlockFormat

Angles = tuple[Tensor, Tensor]
"""Cosines and sines [n, half] of each token's angles."""

Place = tuple[Tensor, Tensor]
"""A table, and the rows of it [n] that something goes into."""


class Compound:
    """What a set of operations has by having the simple ones."""

    def rotated_linear(
        self: Any,
        x: Float[Tensor, "n inputs"],
        weight: Tensor,
        scale: Any,
        width: int,
        angles: Angles,
        form: BlockFormat | None = None,
    ) -> Float[Tensor, "n h width"]:
        """A linear map to heads of `width`, their tails turned; rounded to `form` if there is one."""
        heads = self.rotate(self.linear(x, weight, scale).unflatten(-1, (-1, width)), *angles, inverse=False)
        return heads if form is None else self.quantise(heads, form)

    def rotated_store(
        self: Any,
        x: Float[Tensor, "n d"],
        norm: tuple[Tensor, float] | None,
        angles: Angles,
        form: BlockFormat,
        packed: bool,
        into: Place | None = None,
    ) -> Shaped[Tensor, "_ _"]:
        """What goes into a table for x, turned; normed before, if there is a norm: its weight and eps. It goes into
        rows of a table, `into` (without gradient), and the table is returned; or into new rows."""
        normed = x if norm is None else self.rms_norm(x, *norm)
        own = self.store(self.rotate(normed, *angles, inverse=False), form, packed)
        if into is None:
            return own
        table, rows = into
        table[rows] = own.detach().to(table.dtype)
        return table

    def pooled(
        self: Any,
        kv: Float[Tensor, "a d"],
        gate: Float[Tensor, "a d"],
        rows: Int[Tensor, "groups ratio"],
        norm: tuple[Tensor, float],
    ) -> Float[Tensor, "groups d"]:
        """`pool`, normed."""
        return self.rms_norm(self.pool(kv, gate, rows), *norm)

    def rotated_attention(
        self: Any,
        q: Float[Tensor, "n h d"],
        near: Shaped[Tensor, "a _"],
        near_rows: Int[Tensor, "n w"],
        far: Shaped[Tensor, "b _"] | None,
        far_rows: Int[Tensor, "n k"] | None,
        sink: Float[Tensor, "h"],
        scale: float,
        angles: Angles,
    ) -> Float[Tensor, "n h d"]:
        """Sparse attention to rows that carry their own position's turn: the result is turned back by the query's."""
        out = self.sparse_attention(q, near, near_rows, far, far_rows, sink, scale)
        return self.rotate(out, *angles, inverse=True)

    def rounded_grouped_linear(
        self: Any, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Any, form: BlockFormat | None
    ) -> Float[Tensor, "n outputs"]:
        """`grouped_linear`, the groups' results side by side, rounded to `form` as the map that reads them would round
        them: to do so again changes nothing."""
        y = self.grouped_linear(x, weight, scale).flatten(1)
        return y if form is None else self.quantise(y, form)
