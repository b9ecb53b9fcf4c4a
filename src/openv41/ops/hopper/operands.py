"""Operands of index scores: queries and keys on their grids, and where keys lie (see `kernels.index_grid`)."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from openv41.errors import OpsError
from openv41.formats import INDEX
from openv41.ops.kernels import index_grid as kernels

WIDTHS = (32, 64, 128, 256)
HEADS = (2, 4, 8, 16, 32, 64)
ROWS: int = kernels.ROWS.value
"""Rows that one program encodes, and of which it notes the largest norm."""

FEW_ROWS = 8
MANY = 8192
"""Up to so many queries' rows, each program encodes only a few: it waits mostly for its own instructions to arrive."""

TILE = 128
"""Keys that a program scores at a time, at most: so many are read even where fewer are left."""


@dataclass(frozen=True)
class Queries:
    """Index queries [n, i, c] (bf16 on the fp4 grid) and weights [n, i] (bf16), and the queries' e4m3 codes, units and
    norms (see `kernels.index_grid`)."""

    q: Tensor
    weights: Tensor
    codes: Tensor
    units: Tensor
    norms: Tensor

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def width(self) -> int:
        return self.q.shape[2]

    def part(self, tokens: slice) -> "Queries":
        rows = slice(tokens.start * self.heads, tokens.stop * self.heads)
        return Queries(self.q[tokens], self.weights[tokens], self.codes[rows], self.units[rows], self.norms[rows])


@dataclass(frozen=True)
class KeyTable:
    """Where keys lie: rows of bf16 [rows, c] or records [rows, bytes]. Position p of slot s lies in row
    `pages[s, p // per_page] * per_page + p % per_page`; with `per_page` 0 in row p, and there is one slot."""

    table: Tensor
    pages: Tensor
    per_page: int

    @property
    def packed(self) -> bool:
        return self.table.dtype == torch.uint8

    @classmethod
    def in_order(cls, table: Tensor) -> "KeyTable":
        """Keys of one slot, in order."""
        return cls(table, torch.empty((1, 1), dtype=torch.int64, device=table.device), 0)  # which nothing reads


@dataclass(frozen=True)
class Ready:
    """Rows of some slots made ready: e4m3 codes [runs, padded, c], units and norms [runs, padded], and the largest norm
    of every 64 rows [runs, padded / 64]. `padded` is a multiple of 128; the rows behind the last are zero."""

    codes: Tensor
    units: Tensor
    norms: Tensor
    peaks: Tensor

    @property
    def padded(self) -> int:
        return self.codes.shape[1]


def check_keys(name: str, q: Tensor, keys: Tensor) -> None:
    """Keys must be bf16 rows as wide as the queries, or records of such rows."""
    if q.dim() != 3:
        raise OpsError(f"{name}: q must be [n, heads, width], got shape {tuple(q.shape)}")
    wide = INDEX.record_bytes(q.shape[2]) if keys.dtype == torch.uint8 else q.shape[2]
    if keys.dtype not in (torch.bfloat16, torch.uint8) or keys.dim() != 2 or keys.shape[1] != wide:
        raise OpsError(
            f"{name}: keys must be bf16 [p, {q.shape[2]}] or uint8 records [p, {INDEX.record_bytes(q.shape[2])}], "
            f"got {keys.dtype} {tuple(keys.shape)}"
        )


def encode_queries(name: str, q: Tensor, weights: Tensor) -> Queries:
    """Check queries and weights, and put the queries on their grids."""
    if q.dim() != 3 or q.shape[1] not in HEADS or q.shape[2] not in WIDTHS:
        raise OpsError(
            f"{name}: q must be [n, heads, width] with heads one of {HEADS} and width one of {WIDTHS}, "
            f"got {tuple(q.shape)}: use the reference operations for others"
        )
    if weights.shape != q.shape[:2] or {q.dtype, weights.dtype} != {torch.bfloat16}:
        raise OpsError(
            f"{name}: q and weights must be bf16, weights [n, heads] = {tuple(q.shape[:2])}, got {q.dtype} and "
            f"{weights.dtype} {tuple(weights.shape)}"
        )
    q, weights = q.contiguous(), weights.contiguous()
    count = q.shape[0] * q.shape[1]
    table, rows = KeyTable.in_order(q.view(-1, q.shape[2])), FEW_ROWS if count <= MANY else ROWS
    ready = make_ready(table, None, 1, 1, count, q.shape[2], rows)
    return Queries(q, weights, ready.codes[0], ready.units[0], ready.norms[0])


def make_ready(
    table: KeyTable, slots: Tensor | None, runs: int, run_length: int, count: int, width: int, rows: int = ROWS
) -> Ready:
    """The first `count` rows of the slots of some runs; `slots` [runs * run_length], None for a table in order. `rows`:
    of a program; there is a peak for each."""
    parts = triton.cdiv(count, TILE) * TILE // rows
    padded, device = parts * rows, table.table.device
    codes = torch.empty((runs, padded, width), dtype=torch.uint8, device=device)
    units, norms = torch.empty((2, runs, padded), dtype=torch.float32, device=device)
    peaks = torch.empty((runs, parts), dtype=torch.float32, device=device)
    if codes.numel():
        kernels.encode_rows[(parts, runs)](
            table.table, slots, table.pages, codes, units, norms, peaks,
            run_length, count, table.pages.stride(0), padded,
            RECORDS=table.packed, PER_PAGE=table.per_page, WIDTH=width, PAGED=table.per_page > 0,
            COUNT=rows,
        )  # fmt: skip
    return Ready(codes.view(torch.float8_e4m3fn), units, norms, peaks)
