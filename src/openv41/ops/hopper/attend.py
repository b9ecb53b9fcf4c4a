"""Launches of sparse attention in portable Triton: what the multiprocessors are given to do, by shapes alone.

The rows of a list are taken `keys` at a time. One program does up to 64 heads of a query; where there are fewer of
these than multiprocessors, the list is cut into pieces, and `combine` puts them together.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from openv41.ops.hopper.compiled import Specimen
from openv41.ops.hopper.lists import WIDE, Lists, checked_lists, checked_sink
from openv41.ops.kernels import attend as kernels
from openv41.ops.kernels import bits
from openv41.ops.kernels.attend_records import attend_records

PROCESSORS = 132
"""Multiprocessors of an H200."""

Precision = Literal["tf32", "ieee"]
"""Of products of float32; those of bf16 are exact in float32 either way."""


@dataclass(frozen=True)
class Tiling:
    """How a launch divides the work. `heads`, `keys`: of a program's tile; `pieces`: of a query's list."""

    heads: int
    keys: int
    pieces: int
    warps: int
    stages: int


def attend(
    q: Tensor,
    near: Tensor,
    near_rows: Tensor,
    far: Tensor | None,
    far_rows: Tensor | None,
    sink: Tensor,
    scale: float,
    precision: Precision = "tf32",
    tiling: Tiling | None = None,
) -> Tensor:
    """Softmax attention [n, h, d] over the rows named, -1 naming none, and a sink; where there is nothing, 0.

    q bf16, or float32 for training; tables of q's dtype, or, for bf16, of records. Raises `OpsError` for others.
    """
    out, _ = _attend(q, near, near_rows, far, far_rows, sink, scale, precision, tiling, False)
    return out


def attend_with_log_sum(
    q: Tensor,
    near: Tensor,
    near_rows: Tensor,
    far: Tensor | None,
    far_rows: Tensor | None,
    sink: Tensor,
    scale: float,
    precision: Precision = "tf32",
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, and the log of each softmax's sum [n, h] in float32, the sink in it: what the backward needs."""
    return _attend(q, near, near_rows, far, far_rows, sink, scale, precision, tiling, True)


def _attend(
    q: Tensor, near: Tensor, near_rows: Tensor, far: Tensor | None, far_rows: Tensor | None, sink: Tensor, scale: float,
    precision: Precision, tiling: Tiling | None, wants_log_sum: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sink, q = checked_sink("sparse_attention", q, sink), q.contiguous()
    lists = checked_lists("sparse_attention", q, near, near_rows, far, far_rows)
    n, h, d = q.shape
    log_sum = q.new_empty(n if wants_log_sum else 0, h, dtype=torch.float32)
    out = torch.empty_like(q)
    if n == 0:
        return out, log_sum
    tiling = tiling or choose_tiling(n, h, d, q.element_size(), lists)
    blocks = lists.blocks(tiling.keys)
    each = max(-(-blocks // tiling.pieces), 1)  # blocks of a piece
    pieces = max(-(-blocks // each), 1)
    partial = q.new_empty(pieces, n, h, d) if pieces > 1 else out
    best, total = q.new_empty(2, pieces if pieces > 1 else 0, n, h, dtype=torch.float32)
    kernel = kernels.attend if lists.forms == WIDE else attend_records
    kernel[(n, pieces, -(-h // tiling.heads))](
        q, lists.near, lists.near_rows, lists.far, lists.far_rows, sink, partial, best, total, log_sum, scale, each,
        **constants((h, d), tiling, lists.forms, lists.listed, pieces > 1, wants_log_sum, precision),
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if pieces > 1:
        combine(partial, best, total, sink, out, log_sum if wants_log_sum else None)
    return out, log_sum


def combine(
    partial: Tensor, best: Tensor, total: Tensor, sink: Tensor, out: Tensor, log_sum: Tensor | None = None,
    overlaps: bool = False,
) -> None:  # fmt: skip
    """Pieces put together, with the sink, into `out` [n, h, d], and into `log_sum` [n, h] if it is wanted.

    `partial` [pieces, n, h, d], `best`, `total` [pieces, n, h]: see `kernels.attend`.
    """
    pieces, n, h, d = partial.shape
    kernels.combine[(n, h)](
        partial, best, total, sink, out, best if log_sum is None else log_sum, PIECES=pieces, HEADS=h, WIDTH=d,
        LOG_SUM=log_sum is not None, OVERLAPS=overlaps, num_warps=max(d // 256, 1),
        **({"launch_pdl": True} if overlaps else {}),
    )  # fmt: skip


def choose_tiling(n: int, h: int, d: int, size: int, lists: Lists, processors: int = PROCESSORS) -> Tiling:
    """By shapes alone; `size`: bytes of a value.

    Two blocks of 64 KB of wide rows, beside 64 KB of queries, fill shared memory. Records want registers, and so a
    block of 32; and as their programs wait for bytes rather than for products, two programs a multiprocessor.
    """
    packed = lists.forms != WIDE
    heads = min(max(triton.next_power_of_2(h), 16), 64, 2**16 // (size * d))
    keys = 32 if packed or size * d > 1024 else 64
    programs = n * -(-h // heads)
    pieces = max(processors * (2 if packed else 1) // programs, 1)
    large = heads * d >= 64 * 256
    fits = size * d * (heads + 2 * keys) <= 200 * 1024
    return Tiling(heads, keys, pieces, 8 if large else 4, 2 if fits and not packed else 1)


def constants(
    sizes: tuple[int, int],
    tiling: Tiling,
    forms: tuple[int, int],
    listed: tuple[int, int],
    partial: bool,
    log_sum: bool,
    precision: Precision = "tf32",
) -> dict[str, Any]:
    """Of the kernel `attend`, or of `attend_records`. `sizes`: heads, and values of one."""
    values = {
        "NEAR_LISTED": listed[0], "FAR_LISTED": listed[1], "HEADS": sizes[0], "WIDTH": sizes[1], "TILE": tiling.heads,
        "KEYS": tiling.keys, "PARTIAL": partial, "LOG_SUM": log_sum,
    }  # fmt: skip
    if forms == WIDE:
        return values | {"PRECISION": precision}
    return values | {"NEAR": forms[0], "FAR": forms[1]}


# What is launched on an H200


def specimen(
    name: str, sizes: tuple[int, int], tiling: Tiling, forms: tuple[int, int], listed: tuple[int, int], dtype: str
) -> Specimen:
    """One launch of `_attend`."""
    near, far = (dtype if form == bits.NONE.value else "*u8" for form in forms)
    signature = {
        "q": dtype, "near": near, "near_rows": "*i64", "far": far, "far_rows": "*i64", "sink": "*fp32", "out": dtype,
        "best_of": "*fp32", "total_of": "*fp32", "log_sum": "*fp32", "scale": "fp32", "blocks_a_piece": "i32",
    }  # fmt: skip
    values = constants(sizes, tiling, forms, listed, tiling.pieces > 1, dtype == "*fp32")
    kernel = kernels.attend if forms == WIDE else attend_records
    return Specimen(name, kernel, signature, values, tiling.warps, tiling.stages)


RELEASED, MINI = (64, 512), (8, 64)
PACKED = (bits.WINDOW.value, bits.LATENT.value)

SPECIMENS = [
    specimen("attend prefill", RELEASED, Tiling(64, 64, 1, 8, 2), WIDE, (128, 512), "*bf16"),
    specimen("attend decode", RELEASED, Tiling(64, 64, 10, 8, 2), WIDE, (128, 512), "*bf16"),
    specimen("attend records, prefill", RELEASED, Tiling(64, 32, 1, 8, 1), PACKED, (128, 512), "*bf16"),
    specimen("attend records, decode", RELEASED, Tiling(64, 32, 20, 8, 1), PACKED, (128, 512), "*bf16"),
    specimen("attend mini", MINI, Tiling(16, 64, 1, 4, 2), WIDE, (128, 64), "*fp32"),
    Specimen(
        "attend combine", kernels.combine,
        {"partial": "*bf16", "best": "*fp32", "total": "*fp32", "sink": "*fp32", "out": "*bf16", "log_sum": "*fp32"},
        {"PIECES": 10, "HEADS": 64, "WIDTH": 512, "LOG_SUM": False, "OVERLAPS": True}, 2,
    ),
]  # fmt: skip
