"""Launches of picks: the best positions and the best blocks of each row of scores (see `kernels.select`)."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from openv41.errors import OpsError
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.kernels import select as kernels

PICKS_MOST = 4096
"""Picks of a row, at most: `FAN` times as many entries are counted in 16 bits, and held in registers."""

FAN: int = kernels.FAN.value
FEW_ROWS = 132
"""Rows that an H200 takes one by one on each of its multiprocessors."""

LEVELS_MOST = 3
BLOCKS_LEAST = 32
"""Blocks that a program looks into, at least: a warp's threads have eight entries each. Where they had two, LLVM made
one operation on pairs of `lane & 31` and `row << 3`, and let one into the other by a multiplication in 64 bits: some
entries were read from elsewhere."""

TILE = 512
"""Blocks that one program makes entries of: a power of `FAN`."""


@dataclass(frozen=True)
class Division:
    """How a row is picked from: `direct` entries, at most, without coarser ones; so many `warps` a row."""

    direct: int
    warps: int


@dataclass(frozen=True)
class Paged:
    """Where the positions of rows' slots lie in a table of pages, and where the picks' rows of it go [n, k] (int64)."""

    slots: Tensor
    pages: Tensor
    per_page: int
    rows: Tensor


def pick(scores: Tensor, visible: Tensor, k: int, division: Division | None = None) -> Tensor:
    """Positions [n, k] (int64) of the k best scores [n, p] (bf16) among the first `visible` [n] of each row, ascending,
    -1 behind. Of equal scores the lower position comes first. Raises `OpsError` for what is not supported."""
    check_scores("pick", scores, visible, k)
    out = torch.empty((scores.shape[0], k), dtype=torch.int64, device=scores.device)
    pick_into(out, scores, visible, k, division=division)
    return out


def pick_blocks(scores: Tensor, visible: Tensor, block: int, k: int) -> Tensor:
    """Which blocks of `block` positions are kept [n, blocks] (bool): the k best by their best visible score, the newest
    visible one always among them. Of equal blocks the lower comes first; one of minus infinity is never kept."""
    check_scores("pick_blocks", scores, visible, k)
    n, count = scores.shape[0], triton.cdiv(scores.shape[1], block)
    kept = torch.zeros((n, count), dtype=torch.bool, device=scores.device)
    keep_into(kept, scores, visible, block, k)
    return kept


def keep_into(kept: Tensor, scores: Tensor, visible: Tensor, block: int, k: int) -> None:
    """Set the kept blocks [n, at least as many as p has] of a cleared mask (bool)."""
    if block < 1 or block & (block - 1):
        raise OpsError(f"pick_blocks: block must be a power of two, got {block}: use the reference operations")
    n, p = scores.shape
    if n and p:
        bests = torch.empty((n, _padded(triton.cdiv(p, block))), dtype=torch.bfloat16, device=scores.device)
        _coarsen(scores, visible, bests, (0, 0), 1, block, pin=True)
        pick_into(kept.view(torch.uint8), bests[:, : triton.cdiv(p, block)], visible, k, unit=block)


def pick_into(
    out: Tensor, scores: Tensor, visible: Tensor, k: int, unit: int = 1, lists: Tensor | None = None, block: int = 0,
    division: Division | None = None, paged: Paged | None = None,
) -> None:  # fmt: skip
    """Write picks [n, k] (int64); or a one for each into a cleared mask [n, p] (uint8). A row's entries are blocks of
    `unit` visible positions. With `lists` [n, most] entry j stands for a position of the `block` positions listed; with
    `paged` the picks' rows are written too."""
    n, width = scores.shape
    if n == 0 or width == 0:
        for unpicked in (out, *(() if paged is None else (paged.rows,))):
            unpicked.fill_(0 if unpicked.dtype == torch.uint8 else -1)
        return
    division = division or choose_division(n, k)
    widths = coarse_widths(width, k, division.direct)
    starts = [sum(map(_padded, widths[:level])) for level in range(LEVELS_MOST)]
    coarse = torch.empty((n, sum(map(_padded, widths))), dtype=torch.bfloat16, device=scores.device)
    if widths:
        _coarsen(scores, visible, coarse, (starts[1], starts[2]), len(widths), FAN, unit=unit)
    count = max(BLOCKS_LEAST, triton.next_power_of_2(k))
    top = max(BLOCKS_LEAST, triton.next_power_of_2(triton.cdiv([width, *widths][-1], FAN)))
    kernels.pick_rows[(n,)](
        scores.view(torch.int16), coarse.view(torch.int16), visible, lists,
        torch.empty((n, count), dtype=torch.int32, device=scores.device), out,
        *((None, None, None) if paged is None else (paged.slots, paged.pages, paged.rows)),
        scores.stride(0), width, coarse.stride(0), starts[1], starts[2], k, out.stride(0),
        0 if lists is None else lists.stride(0),
        *((0, 0) if paged is None else (paged.pages.stride(0), paged.rows.stride(0))),
        COUNT=count, TOP=top, LEVELS=len(widths), UNIT=unit, MASK=out.dtype == torch.uint8,
        LISTED=0 if lists is None else block, ALIGNED=_in_multiples(scores, FAN),
        PER_PAGE=0 if paged is None else paged.per_page,
        num_warps=max(1, min(division.warps, max(count, top) * FAN // 256)),
    )  # fmt: skip


def coarse_widths(width: int, k: int, direct: int) -> list[int]:
    """Entries of the coarser and coarser rows over a row, until one has no more than `direct`."""
    widths = [width]
    while widths[-1] > direct:
        widths.append(triton.cdiv(widths[-1], FAN))
    if len(widths) > LEVELS_MOST + 1:
        most = FAN**LEVELS_MOST * direct
        raise OpsError(f"pick: rows of {width} scores are too long for {k} picks, {most} are supported: pick more")
    return widths[1:]


def choose_division(n: int, k: int) -> Division:
    """With many rows 32 entries a thread; of very many, 16, as more threads have fewer registers each. A few rows are
    waited for one by one: there, as many threads as find something to do, each with little code to fetch."""
    direct = FAN * max(BLOCKS_LEAST, triton.next_power_of_2(k))  # the blocks of k picks hold so many
    if direct > 8192:
        return Division(direct, min(32, direct // 512))
    return Division(direct, 16 if n <= FEW_ROWS else max(1, direct // 1024))


def _coarsen(
    scores: Tensor, visible: Tensor, coarse: Tensor, starts: tuple[int, int], levels: int, size: int, unit: int = 1,
    pin: bool = False,
) -> None:  # fmt: skip
    n, width = scores.shape
    kernels.coarsen[(n, triton.cdiv(triton.cdiv(width, size), TILE))](
        scores, visible, coarse, scores.stride(0), width, coarse.stride(0), *starts,
        SIZE=size, LEVELS=levels, UNIT=unit, PIN=pin, TILE=TILE, ALIGNED=_in_multiples(scores, size), num_warps=4,
    )  # fmt: skip


def check_scores(name: str, scores: Tensor, visible: Tensor, k: int) -> None:
    """Scores must be bf16 [n, p] with entries of a row side by side, visible int64 [n], and k at least 1."""
    if scores.dtype != torch.bfloat16 or scores.dim() != 2 or (scores.shape[1] > 1 and scores.stride(1) != 1):
        raise OpsError(f"{name}: scores must be bf16 [n, p], rows without gaps, got {scores.dtype} {scores.shape}")
    if visible.shape != scores.shape[:1] or visible.dtype != torch.int64:
        raise OpsError(f"{name}: visible must be int64 [{scores.shape[0]}], got {visible.dtype} {visible.shape}")
    if not 1 <= k <= PICKS_MOST:
        raise OpsError(f"{name}: k must be 1 to {PICKS_MOST}, got {k}: use the reference operations")


def _padded(count: int) -> int:
    return triton.cdiv(count, 16) * 16


def _in_multiples(scores: Tensor, size: int) -> bool:
    """Whether every row begins at a multiple of `size` entries, so that reading a block of so many stays inside it."""
    return scores.stride(0) % size == 0 and scores.storage_offset() % size == 0


# What an H200 runs at the released sizes: 512 positions of long rows, 2,048 blocks of 8

_TENSORS = {
    "scores": "*i16", "coarse": "*i16", "visible": "*i64", "lists": "*i32", "picks": "*i32", "out": "*i64",
    "slots": "*i64", "pages": "*i64", "rows": "*i64",
}  # fmt: skip


def _specimen(name: str, kernel: Any, warps: int, types: dict[str, str], **given: Any) -> Specimen:
    constants = {arg: value for arg, value in given.items() if arg in kernel.arg_names}
    signature = {arg: (_TENSORS | types).get(arg, "i32") for arg in kernel.arg_names}
    multiples = ("stride", "coarse_stride", "second", "third", "out_stride", "rows_stride")
    return Specimen(name, kernel, signature, constants, warps, multiples=multiples)


_PICKS = dict(COUNT=512, TOP=512, LEVELS=2, UNIT=1, MASK=False, LISTED=0, ALIGNED=True, PER_PAGE=64, lists=None)
_BLOCKS = dict(_PICKS, COUNT=2048, TOP=2048, LEVELS=1, UNIT=8, MASK=True, PER_PAGE=0, slots=None, pages=None, rows=None)
_LISTED = {name: value for name, value in _PICKS.items() if name != "lists"} | {"LISTED": 8, "LEVELS": 1}
_COARSE = dict(SIZE=8, LEVELS=3, UNIT=1, PIN=False, TILE=TILE, ALIGNED=True)
_WIDE = {"scores": "*bf16", "coarse": "*bf16"}

SPECIMENS = [
    _specimen("pick_rows", kernels.pick_rows, 4, {}, **_PICKS),
    _specimen("pick_rows, blocks", kernels.pick_rows, 32, {"out": "*u8"}, **_BLOCKS),
    _specimen("pick_rows, listed", kernels.pick_rows, 16, {}, **_LISTED),
    _specimen("coarsen", kernels.coarsen, 4, _WIDE, **_COARSE),
    _specimen("coarsen, newest pinned", kernels.coarsen, 4, _WIDE, **dict(_COARSE, LEVELS=1, PIN=True)),
]
