"""What attention's kernels can take: queries, tables of rows or records, and lists of row numbers; checked by shape."""

from dataclasses import dataclass

import torch
from torch import Tensor

from openv41.errors import OpsError
from openv41.formats import LATENT, WINDOW
from openv41.ops.kernels import bits

WIDTHS = (64, 128, 256, 512)
"""Head dims supported."""
HEADS = 128
"""Heads supported, at most."""
NUMBERS = (torch.int32, torch.int64)
ROWS = (torch.bfloat16, torch.float32)

WIDE = (bits.NONE.value, bits.NONE.value)
"""The forms of two tables of plain rows."""


@dataclass(frozen=True)
class Lists:
    """Both tables and lists, checked. `forms`: of the tables, as `kernels.bits` numbers them. Without a far table, its
    list has no places."""

    near: Tensor
    near_rows: Tensor
    far: Tensor
    far_rows: Tensor
    forms: tuple[int, int]

    @property
    def listed(self) -> tuple[int, int]:
        """Places of the near and the far list."""
        return self.near_rows.shape[1], self.far_rows.shape[1]

    def blocks(self, keys: int) -> int:
        """Blocks of `keys` places: each list begins a new one."""
        return sum(-(-count // keys) for count in self.listed)


def checked_sink(op: str, q: Tensor, sink: Tensor) -> Tensor:
    """The sink as the kernels read it. Raises `OpsError` for queries or a sink that they cannot take."""
    if q.dtype not in ROWS:
        raise OpsError(f"{op} takes queries of bf16 or float32 here, got {q.dtype}: use the reference ops for others")
    if q.ndim != 3 or q.shape[2] not in WIDTHS:
        raise OpsError(f"{op} supports queries [n, h, d] with d one of {WIDTHS}, got {list(q.shape)}")
    if not 1 <= q.shape[1] <= HEADS:
        raise OpsError(f"{op} supports 1 to {HEADS} heads, got {q.shape[1]}")
    if list(sink.shape) != [q.shape[1]]:
        raise OpsError(f"{op}: sink must be [{q.shape[1]}], one a head, got {list(sink.shape)}")
    return sink.to(torch.float32).contiguous()


def checked_lists(
    op: str, q: Tensor, near: Tensor, near_rows: Tensor, far: Tensor | None, far_rows: Tensor | None
) -> Lists:
    """Raises `OpsError` for tables or row numbers that the kernels cannot take."""
    if (far is None) != (far_rows is None):
        raise OpsError(f"{op} takes a far table and its rows, or neither: got {_said(far)} and {_said(far_rows)}")
    near_form = _form(op, "near", near, q, bits.WINDOW.value, WINDOW.record_bytes(q.shape[2]))
    near_rows = _numbers(op, "near_rows", near_rows, q)
    if far is None or far_rows is None:
        return Lists(near, near_rows, near[:0], near_rows[:, :0], (near_form, near_form))
    far_form = _form(op, "far", far, q, bits.LATENT.value, LATENT.record_bytes(q.shape[2]))
    far_rows = _numbers(op, "far_rows", far_rows, q).to(near_rows.dtype)
    return Lists(near, near_rows, far, far_rows, (near_form, far_form))


def _form(op: str, name: str, table: Tensor, q: Tensor, packed: int, record: int) -> int:
    """How a table holds its rows."""
    narrow = q.dtype == torch.bfloat16
    if table.ndim == 2 and table.is_contiguous():
        if table.dtype == q.dtype and table.shape[1] == q.shape[2]:
            return int(bits.NONE.value)
        if table.dtype == torch.uint8 and table.shape[1] == record and narrow:
            return packed
    records = f", or uint8 records [rows, {record}]" if narrow else ""
    raise OpsError(
        f"{op}: {name} must be a contiguous table of {q.dtype} [rows, {q.shape[2]}]{records} for these queries, "
        f"got {_said(table)}"
    )


def _numbers(op: str, name: str, rows: Tensor, q: Tensor) -> Tensor:
    if rows.dtype not in NUMBERS or rows.ndim != 2 or rows.shape[0] != q.shape[0]:
        raise OpsError(f"{op}: {name} must be int32 or int64 [{q.shape[0]}, places], got {_said(rows)}")
    return rows.contiguous()


def _said(x: Tensor | None) -> str:
    if x is None:
        return "none"
    return f"{'' if x.is_contiguous() else 'non-contiguous '}{x.dtype} {list(x.shape)}"
