"""`HopperOps`: which kernel an operation of the seam is sent to."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from openv41.errors import OpsError
from openv41.formats import LATENT, WINDOW, BlockFormat
from openv41.ops.compound import Angles, Place
from openv41.ops.fast import FastOps, version
from openv41.ops.hopper import attend, attend_gluon, pick, products, rows, score, select
from openv41.ops.hopper.beside import Beside, Task
from openv41.ops.hopper.products import After, Tile, Workspace
from openv41.ops.hopper.rows import Into, Norm
from openv41.ops.hopper.sinkhorn import balanced
from openv41.ops.reference import Numerics

DECODE_ONCE = 8
"""A table of records is decoded to bf16 beforehand where its rows are listed so many times over. Attention then reads
bf16 rows, which it does faster; decoding a row takes about as long as reading it eight times."""

OVERLAPS = False
"""Whether products that the next kernels do not wait for run beside these, on streams of their own."""

SHORT, LONG = 1, 2
"""Streams for what is begun at once, and for what was put off."""


class HopperOps(FastOps):
    """Published numerics on a Hopper GPU. Differences from `ReferenceOps`: the order of float32 sums in products and in
    attention. Scores, picks, norms, rotations and whatever is stored are equal to the bit.

    One set serves one stream, and some of its own beside it: products on one stream share counters. Raises `OpsError`
    for other numerics.
    """

    name = "hopper"

    def __init__(self, numerics: Numerics = "published", dtype: torch.dtype | None = None) -> None:
        if numerics != "published":
            raise OpsError(f"the hopper ops compute published numerics, got {numerics!r}: take the fast ops for these")
        super().__init__(numerics, dtype)
        self.work: dict[tuple[torch.device, int], Workspace] = {}
        self.overlaps, self.beside = OVERLAPS, Beside()
        # By activation: the version of it that was rounded, and what it became; None: it is that itself.
        self.rounded = WeakIdKeyDictionary()

    def _work(self, device: torch.device) -> Workspace:
        place = device, self.beside.lane
        if place not in self.work:
            self.work[place] = Workspace.on(device)
        return self.work[place]

    # Beside other work

    def meanwhile(self, run: Callable[..., Tensor], x: Tensor, *inputs: Any) -> Callable[[], Tensor]:
        """Begun at once."""
        task = Task(x.device, run, (x, *inputs))
        if self._leave_room(x):
            self.beside.begin(task, SHORT)
        return task

    def put_off(self, run: Callable[..., Tensor], x: Tensor, *inputs: Any) -> Callable[[], Tensor]:
        """Begun when picks are looked for: that takes many small launches, one after another."""
        task = Task(x.device, run, (x, *inputs))
        if self._leave_room(x):
            self.beside.put_off(task)
        return task

    def _leave_room(self, x: Tensor) -> bool:
        """Many tokens fill the GPU by themselves."""
        return self.overlaps and x.is_cuda and len(x) <= products.DIRECT

    # Activations that have been rounded already, by the launch that made them: maps need not round them again

    def _made_rounded(self, x: Tensor, form: Tensor | None = None) -> Tensor:
        self.rounded[x] = version(x), form
        return x

    def _met(self, x: Tensor) -> tuple[Tensor, bool]:
        """What a map meets of an activation, and whether it is rounded."""
        held = self.rounded.get(x)
        if held is None or held[0] != version(x):
            return x, False
        return (x if held[1] is None else held[1]), True

    # Linear maps

    def linear(self, x: Float[Tensor, "n inputs"], weight: Tensor, scale: Tensor | None) -> Float[Tensor, "n outputs"]:
        met, rounded = (x, False) if scale is None else self._met(x)
        return products.linear(met, weight, scale, self._work(x.device), rounded)

    def rotated_linear(
        self,
        x: Float[Tensor, "n inputs"],
        weight: Tensor,
        scale: Tensor | None,
        width: int,
        angles: Angles,
        form: BlockFormat | None = None,
    ) -> Float[Tensor, "n h width"]:
        met, rounded = (x, False) if scale is None else self._met(x)
        y = products.linear(met, weight, scale, self._work(x.device), rounded, After(width, *angles, form))
        return y.unflatten(1, (-1, width))

    def linear_wide(self, x: Float[Tensor, "n inputs"], weight: Tensor) -> Float[Tensor, "n outputs"]:
        """A bf16 activation; others (the router's, the streams') are the library's."""
        if x.dtype != torch.bfloat16:
            return super().linear_wide(x, weight)
        return products.linear_wide(x, weight, self._work(x.device))

    def grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Tensor | None
    ) -> Float[Tensor, "n g outputs"]:
        return products.grouped_linear(x, weight, scale, self._work(x.device))

    def rounded_grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Tensor | None, form: BlockFormat | None
    ) -> Float[Tensor, "n outputs"]:
        after = None if form is None else After(weight.shape[0] // x.shape[1], form=form)
        y = products.grouped_linear(x, weight, scale, self._work(x.device), after).flatten(1)
        return y if form is None else self._made_rounded(y)

    def query_window(
        self,
        x: Float[Tensor, "n inputs"],
        wq_a: tuple[Tensor, Tensor | None],
        wkv: tuple[Tensor, Tensor | None],
        q_norm: tuple[Tensor, float],
        kv_norm: tuple[Tensor, float],
        angles: Angles,
        packed: bool,
        into: Place | None,
    ) -> tuple[Float[Tensor, "n r"], Shaped[Tensor, "_ _"]]:
        """Two launches, and one that rounds x if it is not yet. A tile of products holds outputs of one map: low ranks
        that are no whole tiles have a product of their own."""
        first, second = wq_a[1], wkv[1]
        if first is None or second is None:
            raise OpsError("query_window: quantised maps only; use linear, rms_norm and rotated_store for others")
        if len(wq_a[0]) % Tile.outputs:
            both = torch.cat((self.linear(x, *wq_a), self.linear(x, *wkv)), 1)
        else:
            met, rounded = self._met(x)
            both = products.linear_pair(met, (wq_a[0], first), (wkv[0], second), self._work(x.device), rounded)
        place = rows.new_rows(len(x), len(kv_norm[0]), WINDOW, packed, x.device) if into is None else Into(*into)
        qr = rows.query_window(both, *angles, Norm(*q_norm), Norm(*kv_norm), place)
        return self._made_rounded(qr), place.table

    # Norm, rotation, storing

    def rms_norm(self, x: Float[Tensor, "*n k"], weight: Tensor, eps: float) -> Float[Tensor, "*n k"]:
        """Rounded beside it, for the quantised maps that read it."""
        flat, norm = x.reshape(-1, x.shape[-1]), Norm(weight, eps)
        if flat.shape[1] % WINDOW.block:
            return rows.rms_norm(flat, norm).view(x.shape)
        normed, rounded = rows.rms_norm_rounded(flat, norm)
        return self._made_rounded(normed.view(x.shape), rounded.view(x.shape))

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

    def rotated_store(
        self,
        x: Float[Tensor, "n d"],
        norm: tuple[Tensor, float] | None,
        angles: Angles,
        form: BlockFormat,
        packed: bool,
        into: Place | None = None,
    ) -> Shaped[Tensor, "_ _"]:
        place = None if into is None else Into(*into)
        return rows.rotate_store(x, *angles, form, packed, place, None if norm is None else Norm(*norm))

    def pooled(
        self,
        kv: Float[Tensor, "a d"],
        gate: Float[Tensor, "a d"],
        members: Int[Tensor, "groups ratio"],
        norm: tuple[Tensor, float],
    ) -> Float[Tensor, "groups d"]:
        """Groups of two by a kernel; of others by the library."""
        if members.shape[1] != 2:
            return super().pooled(kv, gate, members, norm)
        return rows.pool(kv, gate, members, Norm(*norm))

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
    ) -> tuple[Int[Tensor, "n k"], Int[Tensor, "n k"], Bool[Tensor, "n blocks"] | None]:
        self.beside.begin_waiting(LONG)
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

    def rotated_attention(
        self,
        q: Float[Tensor, "n h d"],
        near: Shaped[Tensor, "a _"],
        near_rows: Int[Tensor, "n w"],
        far: Shaped[Tensor, "b _"] | None,
        far_rows: Int[Tensor, "n k"] | None,
        sink: Float[Tensor, "h"],
        scale: float,
        angles: Angles,
    ) -> Float[Tensor, "n h d"]:
        """The tails alone are turned, where they lie."""
        out = self.sparse_attention(q, near, near_rows, far, far_rows, sink, scale)
        return rows.rotate(out, *angles, inverse=True, in_place=True)

    def specialised(self, q: Tensor) -> bool:
        """Whether the kernel of specialised warps takes these queries."""
        fits = q.shape[1] <= attend_gluon.HEADS and q.shape[2] == attend_gluon.WIDTH
        return fits and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
