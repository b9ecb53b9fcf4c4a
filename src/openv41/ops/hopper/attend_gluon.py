"""Launches of sparse attention with specialised warps: 64 heads of 512, a program a multiprocessor.

The list of a query is cut into blocks of rows (near and far apart, each filled up with nothing), and the blocks go in
pairs. Queries are dealt out in rounds, one to each multiprocessor. The queries of a last round that would leave
multiprocessors idle are cut: their pairs are divided among several programs, and `combine` puts the results together.
What is not of this shape is for `attend`.
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
from openv41.ops.kernels import (
    attend_hopper,
    attend_hopper_deep,
    attend_hopper_deep_records,
    attend_hopper_packed,
    attend_hopper_ring,
    bits,
)

HEADS, WIDTH = attend_hopper.HEADS.value, attend_hopper.WIDTH.value

GROUP_REGISTERS = 216
LOADER_REGISTERS = {"halves": 80, "ring": 56, "deep": 56, "records": 80, "deep records": 80}
"""Of a thread of group 1, and of the loader; group 0 has what is left of a multiprocessor's file: 504 less these."""

KERNELS = {
    "halves": attend_hopper.attend_bf16,
    "ring": attend_hopper_ring.attend_ring,
    "deep": attend_hopper_deep.attend_deep,
    "records": attend_hopper_packed.attend_records,
    "deep records": attend_hopper_deep_records.attend_deep_records,
}
"""Of bf16 rows there are three: keys in four halves, in a ring of nine smaller units, or in one of smaller blocks, of
which each group scores one ahead."""

KEYS = {"halves": (64, 32), "ring": (64, 32), "deep": (32,), "records": (64, 32), "deep records": (32,)}
"""Of a block, that each takes."""

RECORDS = ("records", "deep records")
"""Those of tables of records."""

CHOSEN = {
    ("rows", "few"): ("ring", 64), ("rows", "some"): ("ring", 64), ("rows", "many"): ("ring", 64),
    ("records", "few"): ("records", 32), ("records", "some"): ("records", 64), ("records", "many"): ("records", 64),
}  # fmt: skip
"""Kernel and keys of a block: for queries so few that pieces of blocks of 32 all have multiprocessors of their own, for
no more queries than multiprocessors, and for many. Measured on an H200, us: bf16 rows, batch 1 / 16 / 64 / 128: ring
13.8 / 17.2 / 29.8 / 35.3, halves 14.9 / 17.7 / 31.3 / 37.9; a prompt of 4,096 queries: ring 690, halves 720. Records,
batch 1 / 16 / 64 / 128: blocks of 64 17.8 / 19.3 / 33.6 / 41.8, of 32 14.8 / 19.7 / 34.3 / 50.0."""


@dataclass(frozen=True)
class Plan:
    """How the work is divided. `kernel`: of `KERNELS`, for bf16 rows or for records; `keys`: of a block, as the kernel
    takes them. `whole`: queries that are done by one program each; `pieces`: of the list of each other query. `turns`:
    every second query of a program goes through its list backwards (bf16 rows). `overlaps`: pieces are put together by
    a kernel that is launched while the last of them are written."""

    kernel: str
    keys: int
    whole: int
    pieces: int
    turns: bool = False
    overlaps: bool = False


@dataclass(frozen=True)
class Launch:
    """A kernel, in how many programs, and its arguments by name. "partial", "maxima" and "sums" of the queries after
    the first `whole` are what `combine` puts together."""

    kernel: Any
    programs: int
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    plan: Plan


def attend_gluon(
    q: Tensor,
    near: Tensor,
    near_rows: Tensor,
    far: Tensor | None,
    far_rows: Tensor | None,
    sink: Tensor,
    scale: float,
    plan: Plan | None = None,
) -> Tensor:
    """Softmax attention [n, h, 512] over the rows named and a sink, h at most 64; bf16 rows or records, bf16 queries.

    `plan`: by default chosen by the shapes. Raises `OpsError` for other shapes and types, and where there is no Hopper
    GPU.
    """
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        raise OpsError(f"attend_gluon is made for Hopper GPUs (compute capability 9.0), got {q.device}: use attend")
    q, sink = q.contiguous(), checked_sink("attend_gluon", q, sink)
    out = torch.empty_like(q)
    launch = prepare(q, near, near_rows, far, far_rows, sink, scale, out, plan)
    if q.numel() == 0:
        return out
    launch.kernel[(launch.programs,)](**launch.arguments, **launch.constants, num_warps=4)
    put_together(launch, sink, out)
    return out


def put_together(launch: Launch, sink: Tensor, out: Tensor) -> None:
    """What the launch has left in pieces, into `out`."""
    if launch.plan.pieces > 1:
        given = launch.arguments
        parts = given["partial"], given["maxima"], given["sums"]
        combine(*parts, sink, out[launch.plan.whole :], overlaps=launch.plan.overlaps and out.is_cuda)


def prepare(
    q: Tensor, near: Tensor, near_rows: Tensor, far: Tensor | None, far_rows: Tensor | None, sink: Tensor, scale: float,
    out: Tensor, plan: Plan | None = None,
) -> Launch:  # fmt: skip
    """What `attend_gluon` launches, on any device. `q`, `sink` contiguous, `out` like q."""
    n, h, d = q.shape
    if q.dtype != torch.bfloat16 or d != WIDTH or not 1 <= h <= HEADS:
        raise OpsError(
            f"attend_gluon takes bf16 queries of 1 to {HEADS} heads of {WIDTH}, got {q.dtype} {list(q.shape)}: "
            "use attend"
        )
    if not scale > 0:
        raise OpsError(f"attend_gluon takes a scale above 0, got {scale}: use attend")
    lists = checked_lists("attend_gluon", q, near, near_rows, far, far_rows)
    records = _are_records(lists, far is not None)
    plan = plan or choose_plan(n, lists, records)
    pairs = pairs_of(lists, plan.keys)
    _check(plan, n, pairs, lists, records)
    cut = n - plan.whole
    partial = q.new_empty(plan.pieces, cut, h, d) if plan.pieces > 1 else out
    maxima, sums = q.new_empty(2, plan.pieces, cut, h, dtype=torch.float32)
    arguments = {
        "q": q, "near": _words(lists.near), "far": _words(lists.far), "near_rows": lists.near_rows.view(torch.int32),
        "far_rows": lists.far_rows.view(torch.int32), "sink": sink, "out": out, "partial": partial,
        "maxima": maxima, "sums": sums, "heads": h, "near_count": lists.listed[0], "far_count": lists.listed[1],
        "queries": n, "whole": plan.whole, "pieces": plan.pieces, "pairs": pairs,
        "c": scale * attend_hopper.LOG2_E.value,
    }  # fmt: skip
    programs = min(plan.whole + cut * plan.pieces, PROCESSORS)
    step = 2 if lists.near_rows.dtype == torch.int64 else 1
    return Launch(KERNELS[plan.kernel], programs, arguments, _constants(step, plan), plan)


def pairs_of(lists: Lists, keys: int) -> int:
    """Of blocks; a list of nothing has one, of nothing."""
    return max(triton.cdiv(lists.blocks(keys), 2), 1)


def choose_plan(n: int, lists: Lists, records: bool) -> Plan:
    """By shapes alone."""
    few = max(n, 1) * pairs_of(lists, 32) <= PROCESSORS
    kernel, keys = CHOSEN["records" if records else "rows", "few" if few else "some" if n <= PROCESSORS else "many"]
    pairs, cut = pairs_of(lists, keys), n % PROCESSORS
    pieces = choose_pieces(cut, pairs) if cut else 1
    return Plan(kernel, keys, n - cut if pieces > 1 else n, pieces)


def choose_pieces(n: int, pairs: int, processors: int = PROCESSORS) -> int:
    """As many as there are multiprocessors for, none of less than a pair of blocks."""
    return min(max(processors // max(n, 1), 1), pairs)


def _are_records(lists: Lists, has_far: bool) -> bool:
    """Whether the tables hold records, not bf16 rows."""
    near, far = (form != bits.NONE.value for form in lists.forms)
    if has_far and near != far:
        raise OpsError(
            "attend_gluon: both tables hold bf16 rows or both hold records, got "
            f"{lists.near.dtype} and {lists.far.dtype}: decode the records first"
        )
    for name, table in (("near", lists.near), ("far", lists.far)):
        if table.data_ptr() % 16:
            raise OpsError(f"attend_gluon: {name} must begin at a multiple of 16 bytes, got {table.data_ptr():#x}")
    return near


def _check(plan: Plan, n: int, pairs: int, lists: Lists, records: bool) -> None:
    if plan.keys not in KEYS[plan.kernel]:
        raise OpsError(f"attend_gluon: {plan.kernel} has blocks of {KEYS[plan.kernel]} keys, got {plan.keys}")
    if records != (plan.kernel in RECORDS) or (records and plan.turns):
        held = "records" if records else "bf16 rows"
        raise OpsError(f"attend_gluon: tables of {held} are not for {plan}: leave the plan out")
    if not 1 <= plan.pieces <= pairs:
        raise OpsError(
            f"attend_gluon: pieces must be 1 to {pairs} for lists of {lists.listed} rows in blocks of {plan.keys}, "
            f"got {plan.pieces}"
        )
    if not 0 <= plan.whole <= n or (plan.whole < n and plan.pieces == 1):
        raise OpsError(
            f"attend_gluon: of {n} queries in pieces of {plan.pieces} the first 0 to {n} are whole (all, where there "
            f"is one piece), got {plan.whole}"
        )


def _constants(step: int, plan: Plan) -> dict[str, Any]:
    made = {
        "STEP": step, "KEYS": plan.keys, "OVERLAPS": plan.overlaps, "GROUP_REGISTERS": GROUP_REGISTERS,
        "LOADER_REGISTERS": LOADER_REGISTERS[plan.kernel],
    }  # fmt: skip
    return made if plan.kernel in RECORDS else made | {"TURNS": plan.turns}


def _words(table: Tensor) -> Tensor:
    """Records as 32-bit words; bf16 rows as they are."""
    return table.view(torch.int32) if table.dtype == torch.uint8 else table


# What is launched on an H200


def specimen(kernel: str, keys: int) -> Specimen:
    table = "*i32" if kernel in RECORDS else "*bf16"
    signature = {
        "q": "*bf16", "near": table, "far": table, "near_rows": "*i32", "far_rows": "*i32", "sink": "*fp32",
        "out": "*bf16", "partial": "*bf16", "maxima": "*fp32", "sums": "*fp32", "heads": "i32", "near_count": "i32",
        "far_count": "i32", "queries": "i32", "whole": "i32", "pieces": "i32", "pairs": "i32", "c": "fp32",
    }  # fmt: skip
    constants = _constants(2, Plan(kernel, keys, 0, 1))
    return Specimen(f"attend gluon, {kernel}, {keys} keys", KERNELS[kernel], signature, constants, 4, 3, gluon=True)


SPECIMENS = [specimen(kernel, keys) for kernel, sizes in KEYS.items() for keys in sizes]
