"""Launches of sparse attention with specialised warps: 64 heads of 512, a program a multiprocessor.

The list of a query is cut into blocks of 64 rows (near and far apart, each filled up with nothing), and the blocks go
in pairs. Where there are fewer queries than multiprocessors, a query's pairs are divided among several programs, and
`combine` puts their results together. What is not of this shape is for `attend`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from openv41.errors import OpsError
from openv41.ops.hopper.attend import PROCESSORS, combine
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.hopper.lists import Lists, checked_lists, checked_sink
from openv41.ops.kernels import attend_hopper, attend_hopper_packed, attend_hopper_ring, bits

HEADS, WIDTH, KEYS = attend_hopper.HEADS.value, attend_hopper.WIDTH.value, attend_hopper.KEYS.value

REGISTERS = {"GROUP_REGISTERS": 216, "LOADER_REGISTERS": 80}
"""Of a thread of group 1, and of the loader; group 0 has what is left of a multiprocessor's file, 208."""

KERNELS = {
    "rows": attend_hopper.attend_bf16,
    "ring": attend_hopper_ring.attend_ring,
    "records": attend_hopper_packed.attend_records,
}
"""By what the tables hold; of bf16 rows there are two: keys in four halves, or in a ring of nine smaller units."""


@dataclass(frozen=True)
class Launch:
    """A kernel, in how many programs, and its arguments by name. Of several pieces "out", "maxima" and "sums" are what
    `combine` puts together; of one, "out" is the result."""

    kernel: Any
    programs: int
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    pieces: int


def attend_gluon(
    q: Tensor,
    near: Tensor,
    near_rows: Tensor,
    far: Tensor | None,
    far_rows: Tensor | None,
    sink: Tensor,
    scale: float,
    pieces: int | None = None,
    ring: bool = False,
) -> Tensor:
    """Softmax attention [n, h, 512] over the rows named and a sink, h at most 64; bf16 rows or records, bf16 queries.

    `pieces`: of a query's list, by default chosen by the number of queries. `ring`: keys come in smaller units (bf16
    rows only). Raises `OpsError` for other shapes and types, and where there is no Hopper GPU.
    """
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        raise OpsError(f"attend_gluon is made for Hopper GPUs (compute capability 9.0), got {q.device}: use attend")
    q, sink = q.contiguous(), checked_sink("attend_gluon", q, sink)
    out = torch.empty_like(q)
    launch = prepare(q, near, near_rows, far, far_rows, sink, scale, out, pieces, ring)
    if q.numel() == 0:
        return out
    launch.kernel[(launch.programs,)](**launch.arguments, **launch.constants, num_warps=4)
    if launch.pieces > 1:
        given = launch.arguments
        combine(given["out"], given["maxima"], given["sums"], sink, out)
    return out


def prepare(
    q: Tensor, near: Tensor, near_rows: Tensor, far: Tensor | None, far_rows: Tensor | None, sink: Tensor, scale: float,
    out: Tensor, pieces: int | None = None, ring: bool = False,
) -> Launch:  # fmt: skip
    """What `attend_gluon` launches, on any device. `q`, `sink` contiguous, `out` like q."""
    n, h, d = q.shape
    if q.dtype != torch.bfloat16 or d != WIDTH or not 1 <= h <= HEADS:
        raise OpsError(
            f"attend_gluon takes bf16 queries of 1 to {HEADS} heads of {WIDTH}, got {q.dtype} {list(q.shape)}: "
            "use attend"
        )
    lists = checked_lists("attend_gluon", q, near, near_rows, far, far_rows)
    kernel = KERNELS[_kind(lists, far is not None, ring)]
    pairs = max(triton.cdiv(lists.blocks(KEYS), 2), 1)  # a list of nothing has one, of nothing
    pieces = choose_pieces(n, pairs) if pieces is None else pieces
    if not 1 <= pieces <= pairs:
        raise OpsError(f"attend_gluon: pieces must be 1 to {pairs} for lists of {lists.listed} rows, got {pieces}")
    partial = out if pieces == 1 else q.new_empty(pieces, n, h, d)
    maxima, sums = q.new_empty(2, pieces if pieces > 1 else 0, n, h, dtype=torch.float32)
    wide = lists.near_rows.dtype == torch.int64
    arguments = {
        "q": q, "near": _words(lists.near), "far": _words(lists.far), "near_rows": lists.near_rows.view(torch.int32),
        "far_rows": lists.far_rows.view(torch.int32), "sink": sink, "out": partial,
        "maxima": maxima, "sums": sums, "heads": h, "near_count": lists.listed[0], "far_count": lists.listed[1],
        "queries": n, "pieces": pieces, "pairs": pairs, "c": scale * attend_hopper.LOG2_E.value,
    }  # fmt: skip
    constants = {"STEP": 2 if wide else 1, "PARTIAL": pieces > 1, **REGISTERS}
    return Launch(kernel, min(n * pieces, PROCESSORS), arguments, constants, pieces)


def choose_pieces(n: int, pairs: int, processors: int = PROCESSORS) -> int:
    """As many as there are multiprocessors for, none of less than a pair of blocks."""
    return min(max(processors // max(n, 1), 1), pairs)


def _kind(lists: Lists, has_far: bool, ring: bool) -> str:
    """The kernel for these tables, in `KERNELS`."""
    near, far = (form != bits.NONE.value for form in lists.forms)
    if has_far and near != far:
        raise OpsError(
            "attend_gluon: both tables hold bf16 rows or both hold records, got "
            f"{lists.near.dtype} and {lists.far.dtype}: decode the records first"
        )
    for name, table in (("near", lists.near), ("far", lists.far)):
        if table.data_ptr() % 16:
            raise OpsError(f"attend_gluon: {name} must begin at a multiple of 16 bytes, got {table.data_ptr():#x}")
    if near and ring:
        raise OpsError("attend_gluon: the ring takes tables of bf16 rows, got records: leave ring out")
    return "records" if near else "ring" if ring else "rows"


def _words(table: Tensor) -> Tensor:
    """Records as 32-bit words; bf16 rows as they are."""
    return table.view(torch.int32) if table.dtype == torch.uint8 else table


# What is launched on an H200


def specimen(name: str, kind: str, partial: bool) -> Specimen:
    table = "*i32" if kind == "records" else "*bf16"
    signature = {
        "q": "*bf16", "near": table, "far": table, "near_rows": "*i32", "far_rows": "*i32", "sink": "*fp32",
        "out": "*bf16", "maxima": "*fp32", "sums": "*fp32", "heads": "i32", "near_count": "i32", "far_count": "i32",
        "queries": "i32", "pieces": "i32", "pairs": "i32", "c": "fp32",
    }  # fmt: skip
    constants = {"STEP": 2, "PARTIAL": partial, **REGISTERS}
    return Specimen(name, KERNELS[kind], signature, constants, 4, 3, gluon=True)


SPECIMENS = [
    specimen("attend gluon prefill", "rows", False),
    specimen("attend gluon decode, pieces", "rows", True),
    specimen("attend gluon prefill, ring", "ring", False),
    specimen("attend gluon decode, ring, pieces", "ring", True),
    specimen("attend gluon prefill, records", "records", False),
    specimen("attend gluon decode, records, pieces", "records", True),
]
