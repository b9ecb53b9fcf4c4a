"""Launches of sparse attention's backward, for training: tables of wide rows, everything added in a fixed order.

A table's row is listed by many queries. What it gets from each is written once, sorted by row, and added up in that
order: with b bytes a value, the queries' shares are written and read once, 2 n (w + k) d b bytes. `MEMORY` bounds how
many queries' shares are there at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from openv41.errors import OpsError
from openv41.ops.hopper.attend import MINI, RELEASED, Precision, attend_with_log_sum
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.hopper.lists import WIDE, Lists, checked_lists, checked_sink
from openv41.ops.kernels import backward as kernels

MEMORY = 2**30
"""Bytes of shares at a time."""

Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""Of q and the tables, in their dtypes, and of the sink in float32; None without a far table."""


@dataclass(frozen=True)
class Tiling:
    """How the launches divide the work. `heads` of a tile; `keys` of a tile and `part` of the width, for shares."""

    heads: int
    keys: int
    part: int


def attend_backward(
    q: Tensor,
    near: Tensor,
    near_rows: Tensor,
    far: Tensor | None,
    far_rows: Tensor | None,
    sink: Tensor,
    scale: float,
    out: Tensor,
    log_sum: Tensor,
    grad: Tensor,
    precision: Precision = "tf32",
    tiling: Tiling | None = None,
    memory: int = MEMORY,
) -> Gradients:
    """The gradient of `attend_with_log_sum`, which gave `out` and `log_sum`, from the result's, `grad` [n, h, d].

    Raises `OpsError` for records of bytes, which carry no gradient, and for what the forward does not support.
    """
    op = "sparse_attention's backward"
    sink = checked_sink(op, q, sink)
    lists = checked_lists(op, q, near, near_rows, far, far_rows)
    if lists.forms != WIDE:
        raise OpsError(f"{op}: records of bytes carry no gradient: train with a cache of store='wide'")
    if not q.dtype == out.dtype == grad.dtype or not q.shape == out.shape == grad.shape:
        raise OpsError(
            f"{op}: out and grad must be {q.dtype} {list(q.shape)} as q is, got {out.dtype} {list(out.shape)} and "
            f"{grad.dtype} {list(grad.shape)}"
        )
    if log_sum.dtype != torch.float32 or log_sum.shape != q.shape[:2]:
        raise OpsError(
            f"{op}: log_sum must be float32 {list(q.shape[:2])}, as attend_with_log_sum gives it, got "
            f"{log_sum.dtype} {list(log_sum.shape)}"
        )
    run = _Run(q, lists, scale, out, log_sum, grad, precision, tiling, memory)
    run.all()
    of_near, of_far = run.of_rows.split((near.shape[0], lists.far.shape[0]))
    of_sink = -((sink - log_sum).clamp_max(0).exp() * run.agreement).sum(0)
    return run.of_queries, of_near.to(near.dtype), None if far is None else of_far.to(far.dtype), of_sink


def attention_gradients(
    inputs: list[Any], wanted: Sequence[bool], results: Sequence[Tensor], precision: Precision = "tf32"
) -> list[Tensor | None]:
    """The gradients of `attend`'s inputs (q, near, near_rows, far, far_rows, sink, scale) as `ops.training` asks for
    them, which has kept the inputs alone: the forward is run once more, for what it leaves."""
    q, near, near_rows, far, far_rows, sink, scale = inputs
    given = (q, near, near_rows, far, far_rows, sink)
    out, log_sum = attend_with_log_sum(*given, scale, precision)
    grad = results[0].to(out.dtype)
    of_q, of_near, of_far, of_sink = attend_backward(*given, scale, out, log_sum, grad, precision)
    every = (of_q, of_near, None, of_far, None, of_sink, None)
    return [one if want else None for one, want in zip(every, wanted, strict=True)]


def choose_tiling(h: int, d: int) -> Tiling:
    """By shapes alone: few heads have few products, and then tiles as long as a short list waste less."""
    heads = min(max(triton.next_power_of_2(h), 16), 64)
    return Tiling(heads, 128 if heads == 64 else 64, min(d, 64))


class _Run:
    """One backward: its inputs, how they are taken, and the gradients found."""

    def __init__(
        self, q: Tensor, lists: Lists, scale: float, out: Tensor, log_sum: Tensor, grad: Tensor, precision: Precision,
        tiling: Tiling | None, memory: int,
    ) -> None:  # fmt: skip
        self.q, self.out, self.log_sum, self.grad = (x.contiguous() for x in (q, out, log_sum, grad))
        self.lists, self.scale, self.precision = lists, scale, precision
        n, h, d = q.shape
        self.tiling = tiling or choose_tiling(h, d)
        self.rows = lists.near.shape[0] + lists.far.shape[0]
        self.places = sum(lists.listed)
        self.some = max(min(memory // max(self.places * d * q.element_size(), 1), n), 1)  # queries at a time
        self.of_queries = torch.zeros_like(self.q)
        self.of_rows = q.new_zeros(self.rows, d, dtype=torch.float32)
        self.agreement = q.new_zeros(n, h, dtype=torch.float32)

    def all(self) -> None:
        """Some queries at a time, a tile of their heads at a time."""
        n, h, d = self.q.shape
        if n * self.places * self.rows == 0:
            return
        slots, starts = self.sorted_by_row()
        share = self.q.new_empty(self.some * self.places, d)
        slope = self.q.new_empty(self.some * self.places, self.tiling.heads)
        heads = min(triton.next_power_of_2(h), 8)
        kernels.agreements[(n, -(-h // heads))](
            self.out, self.grad, self.agreement, HEADS=h, WIDTH=d, TILE=heads, num_warps=4
        )
        for first in range(0, n, self.some):
            for head in range(0, h, self.tiling.heads):
                self.part(first, min(self.some, n - first), head, slots, starts, share, slope)

    def sorted_by_row(self) -> tuple[Tensor, Tensor]:
        """Each place's slot among all shares, sorted by group of `some` queries, row, and query; and where each group's
        rows start. Far rows are numbered on from the near ones; places that name nothing come behind all rows."""
        near, far = self.lists.near_rows, self.lists.far_rows
        n, groups = near.shape[0], -(-near.shape[0] // self.some)
        count = groups * (self.rows + 1)
        dtype = torch.int32 if count < 2**31 else torch.int64  # half the digits to sort by
        numbers = torch.cat((near, torch.where(far < 0, far, far + self.lists.near.shape[0])), 1).to(dtype)
        numbers = torch.where(numbers < 0, self.rows, numbers)  # [n, places]
        group = torch.arange(n, device=near.device, dtype=dtype) // self.some
        in_order, order = (numbers + group.unsqueeze(1) * (self.rows + 1)).flatten().sort(stable=True)
        slots = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=near.device))
        starts = torch.searchsorted(in_order, torch.arange(count, device=near.device, dtype=dtype))
        return slots, starts

    def part(
        self, first: int, count: int, head: int, slots: Tensor, starts: Tensor, share: Tensor, slope: Tensor
    ) -> None:
        """The three kernels for some queries and heads."""
        h, d = self.q.shape[1:]
        tiling, lists = self.tiling, self.lists
        tables = (lists.near, lists.near_rows, lists.far, lists.far_rows)
        sizes = constants((h, d), lists.listed, tiling, self.precision)
        kernels.shares[(count * lists.blocks(tiling.keys),)](
            self.q, *tables, self.grad, self.log_sum, self.agreement, slots, share, slope, self.scale, first, head,
            **sizes, KEYS=tiling.keys, PART=tiling.part, **SHARES[tiling.heads == 64],
        )  # fmt: skip
        kernels.query_gradients[(count,)](
            *tables, slope, self.of_queries, first, head,
            **sizes, KEYS=keys_of_queries(d, self.q.element_size()), **QUERIES[tiling.heads * d > 2**14],
        )  # fmt: skip
        group = first // self.some
        kernels.row_gradients[(self.rows,)](
            share, starts, self.of_rows, group * (self.rows + 1), first * self.places,
            WIDTH=d, TILE=shares_at_once(d), ADD=first > 0 or head > 0, num_warps=1,
        )  # fmt: skip


SHARES = ({"num_warps": 4, "num_stages": 2}, {"num_warps": 8, "num_stages": 3})
"""Of small and of large tiles."""
QUERIES = ({"num_warps": 4, "num_stages": 2}, {"num_warps": 8, "num_stages": 2})


def keys_of_queries(d: int, size: int) -> int:
    """Places of a list at a time for `query_gradients`: two blocks of rows of `size` bytes a value in shared memory."""
    return 64 if d * size <= 1024 else 32


def shares_at_once(d: int) -> int:
    """Shares of a row that `row_gradients` takes at a time: as many values as a warp has registers for."""
    return max(1024 // d, 4)


def constants(
    sizes: tuple[int, int], listed: tuple[int, int], tiling: Tiling, precision: Precision = "tf32"
) -> dict[str, Any]:
    """Of both kernels that go through lists."""
    return {
        "HEADS": sizes[0], "WIDTH": sizes[1], "NEAR_LISTED": listed[0], "FAR_LISTED": listed[1],
        "TILE": tiling.heads, "PRECISION": precision,
    }  # fmt: skip


# What is launched on an H200


def specimens(name: str, sizes: tuple[int, int], listed: tuple[int, int], dtype: str) -> list[Specimen]:
    """The kernels for heads of a size."""
    tiling = choose_tiling(*sizes)
    values = constants(sizes, listed, tiling)
    keys = keys_of_queries(sizes[1], 2 if dtype == "*bf16" else 4)
    tables = {"near": dtype, "near_rows": "*i64", "far": dtype, "far_rows": "*i64", "slope": dtype, "found": dtype}
    tables |= {"first_query": "i32", "first_head": "i32"}
    shares = tables | {
        "q": dtype, "grad": dtype, "log_sum": "*fp32", "agreement": "*fp32", "slots": "*i64", "share": dtype,
        "scale": "fp32",
    }  # fmt: skip
    sums = {"share": dtype, "starts": "*i64", "found": "*fp32", "first_start": "i32", "first_share": "i32"}
    of_shares, of_queries = SHARES[tiling.heads == 64], QUERIES[tiling.heads * sizes[1] > 2**14]
    return [
        Specimen(
            f"backward {name}, shares", kernels.shares, shares, values | {"KEYS": tiling.keys, "PART": tiling.part},
            of_shares["num_warps"], of_shares["num_stages"],
        ),
        Specimen(
            f"backward {name}, queries", kernels.query_gradients, tables, values | {"KEYS": keys},
            of_queries["num_warps"], of_queries["num_stages"],
        ),
        Specimen(
            f"backward {name}, rows", kernels.row_gradients, sums,
            {"WIDTH": sizes[1], "TILE": shares_at_once(sizes[1]), "ADD": True}, 1,
        ),
    ]  # fmt: skip


SPECIMENS = specimens("released", RELEASED, (128, 512), "*bf16") + specimens("mini", MINI, (128, 64), "*fp32")
