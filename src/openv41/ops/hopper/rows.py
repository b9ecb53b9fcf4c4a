"""Launches of `kernels/rows.py`: what brings rows into the tables and out of them, one launch each.

Everything is bit-equal to `ReferenceOps`, norms and pooling included. No launch waits for the device. Rows are wide
powers of two (64 to 512 in the model); `rms_norm` alone takes any width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from openv41.errors import OpsError
from openv41.formats import INDEX, LATENT, WINDOW, BlockFormat
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.kernels import rows as kernels

CODES: Mapping[str, int] = {WINDOW.name: 1, LATENT.name: 2, INDEX.name: 3}
"""The kernels' numbers of the forms; 0 is none."""

TILE = 1024
"""Values that a program of four warps holds: eight a thread."""

EXACT: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Every product and every sum is rounded, as in the reference: no two of them make one instruction."""


@dataclass(frozen=True)
class Into:
    """Where rows go: `table`, records of bytes or bf16 rows, and its rows [n] (int64), -1 being nowhere."""

    table: Shaped[Tensor, "a _"]
    rows: Int[Tensor, "n"]


@dataclass(frozen=True)
class Norm:
    """The RMS norm in front: weight [d] and eps."""

    weight: Float[Tensor, "d"]
    eps: float


def rotate_store(
    x: Float[Tensor, "n d"],
    cos: Float[Tensor, "n half"],
    sin: Float[Tensor, "n half"],
    form: BlockFormat | None,
    packed: bool = True,
    into: Into | None = None,
    norm: Norm | None = None,
    tile: int = TILE,
) -> Shaped[Tensor, "_ _"]:
    """(Norm,) rotate the tail, quantise to `form` (None: rotated bf16), store: into a table's rows, or into new ones.
    Returns the table written to."""
    _check_rows("rotate_store", x, form)
    table = _fresh(x, form, packed) if into is None else _checked(into, "rotate_store", x, form)
    _launch(x, cos, sin, form, table, None if into is None else into.rows, norm, None, tile)
    return table


def latent_store(
    x: Float[Tensor, "n d"],
    cos: Float[Tensor, "n half"],
    sin: Float[Tensor, "n half"],
    norm: Norm,
    into: Into,
    form: BlockFormat = LATENT,
    tile: int = TILE,
) -> Float[Tensor, "n d"]:
    """For ratio 1: norm, give back the latents as they are then, and store them rotated and quantised."""
    _check_rows("latent_store", x, form)
    table, normed = _checked(into, "latent_store", x, form), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, cos, sin, form, table, into.rows, norm, normed, tile)
    return normed


def rotate_quantise(
    q: Float[Tensor, "n h d"],
    cos: Float[Tensor, "n half"],
    sin: Float[Tensor, "n half"],
    form: BlockFormat = INDEX,
    tile: int = TILE,
) -> Float[Tensor, "n h d"]:
    """Rotate the tail of every head and round to `form`: the indexer's queries."""
    _check_rows("rotate_quantise", q, form)
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(_contiguous("rotate_quantise", q), cos, sin, form, result, None, None, None, tile)
    return result


def _launch(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    form: BlockFormat | None,
    table: Tensor,
    rows: Tensor | None,
    norm: Norm | None,
    normed: Tensor | None,
    tile: int,
) -> None:
    width, heads, count = x.shape[-1], (x.shape[1] if x.dim() == 3 else 1), x[..., 0].numel()
    check_angles("rotate_store", cos, sin, x.shape[0], width)
    if count == 0:
        return
    each = max(1, tile // width)
    kernels.rotate_store_kernel[(triton.cdiv(count, each),)](
        x, x if norm is None else norm.weight, cos, sin, x if rows is None else rows, table,
        x if normed is None else normed, count, x.stride(-2), 0.0 if norm is None else norm.eps,
        HEADS=heads, INVERSE=False, NORM=norm is not None, KEEP=normed is not None, LISTED=rows is not None,
        ROWS=each, **_constants(width, cos, form, table), **EXACT,
    )  # fmt: skip


def _constants(width: int, cos: Tensor, form: BlockFormat | None, table: Tensor) -> dict[str, Any]:
    return {
        "HALF": width // 2,
        "TURNED": cos.shape[-1],
        "FORM": 0 if form is None else CODES[form.name],
        "PACKED": table.dtype == torch.uint8,
        "BLOCK": 32 if form is None else form.block,
    }


def pool_store(
    kv: Float[Tensor, "a d"],
    gate: Float[Tensor, "a d"],
    members: Int[Tensor, "groups 2"],
    cos: Float[Tensor, "groups half"],
    sin: Float[Tensor, "groups half"],
    norm: Norm,
    into: Into,
    form: BlockFormat = LATENT,
    tile: int = TILE,
) -> Float[Tensor, "groups d"]:
    """For ratio 2: pool the members' kv by the softmax of their gates, norm, give back the latents as they are then,
    and store them rotated and quantised. kv and gate are float32 and may be columns of one table; a group with a member
    -1 (a graph's spare place) gives zeros, and nothing is stored for it."""
    latents = _latents("pool_store", kv, gate, members, form)
    table = _checked(into, "pool_store", latents, form)
    check_angles("pool_store", cos, sin, *latents.shape)
    if len(latents):
        each = max(1, tile // latents.shape[1])
        kernels.pool_store_kernel[(triton.cdiv(len(latents), each),)](
            kv, gate, members, norm.weight, cos, sin, into.rows, table, latents,
            len(latents), kv.stride(0), gate.stride(0), norm.eps,
            STORE=True, LISTED=True, ROWS=each, **_constants(latents.shape[1], cos, form, table), **EXACT,
        )  # fmt: skip
    return latents


def pool(
    kv: Float[Tensor, "a d"],
    gate: Float[Tensor, "a d"],
    members: Int[Tensor, "groups 2"],
    norm: Norm,
    tile: int = TILE,
) -> Float[Tensor, "groups d"]:
    """The same, giving the latents back and storing nothing."""
    latents = _latents("pool", kv, gate, members, None)
    if len(latents):
        each, none = max(1, tile // latents.shape[1]), kv.new_empty((len(latents), 0))
        kernels.pool_store_kernel[(triton.cdiv(len(latents), each),)](
            kv, gate, members, norm.weight, none, none, members, latents, latents,
            len(latents), kv.stride(0), gate.stride(0), norm.eps,
            STORE=False, LISTED=False, ROWS=each, **_constants(latents.shape[1], none, None, latents), **EXACT,
        )  # fmt: skip
    return latents


def _latents(op: str, kv: Tensor, gate: Tensor, members: Tensor, form: BlockFormat | None) -> Tensor:
    """Room for what the groups become. Raises `OpsError` for others than the kernel takes."""
    if members.shape[1] != 2:
        raise OpsError(f"{op}: groups have 2 members, got {members.shape[1]}: use ReferenceOps.pool for others")
    if kv.dtype != torch.float32 or gate.dtype != torch.float32:
        raise OpsError(f"{op}: kv and gate are float32, got {kv.dtype} and {gate.dtype}")
    latents = torch.empty((members.shape[0], kv.shape[1]), dtype=torch.bfloat16, device=kv.device)
    _check_rows(op, latents, form)
    return latents


def rotate(
    x: Float[Tensor, "n *h d"],
    cos: Float[Tensor, "n half"],
    sin: Float[Tensor, "n half"],
    inverse: bool = False,
    in_place: bool = False,
    tile: int = TILE,
) -> Float[Tensor, "n *h d"]:
    """Turn the tails. `in_place` touches nothing but the tails, an eighth of the bytes; else x is copied first."""
    check_angles("rotate", cos, sin, x.shape[0], x.shape[-1])
    if cos.shape[1] & (cos.shape[1] - 1):
        raise OpsError(f"rotate: the pairs to turn are a power of two, got {cos.shape[1]}")
    result = _contiguous("rotate", x) if in_place else x.clone(memory_format=torch.contiguous_format)
    count, turned = x[..., 0].numel(), cos.shape[-1]
    if count and turned:
        each = max(1, tile // (2 * turned))
        kernels.turn_kernel[(triton.cdiv(count, each),)](
            result, cos, sin, result, count,
            HEADS=count // x.shape[0], WIDTH=x.shape[-1], TURNED=turned, INVERSE=inverse, ROWS=each, **EXACT,
        )  # fmt: skip
    return result


def rms_norm(x: Float[Tensor, "n k"], norm: Norm) -> Float[Tensor, "n k"]:
    """x over its root mean square, times the weight."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, norm, result, None)
    return result


def rms_norm_rounded(x: Float[Tensor, "n k"], norm: Norm) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]:
    """The norm, and beside it the same rounded to fp8 in blocks of 32, as the quantised linear maps that read it
    would round it."""
    _check_blocks("rms_norm_rounded", x.shape[1])
    both = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device)
    _norm(x, norm, both[0], both[1])
    return both[0], both[1]


def _norm(x: Tensor, norm: Norm, result: Tensor, rounded: Tensor | None) -> None:
    if x.dtype != torch.bfloat16 or x.stride(-1) != 1 or x.dim() != 2:
        raise OpsError(f"rms_norm: rows of bf16 with neighbouring entries, got {x.dtype}, strides {x.stride()}")
    if x.shape[0]:
        kernels.rms_norm_kernel[(x.shape[0],)](
            x, norm.weight, result, result if rounded is None else rounded, x.stride(0), norm.eps,
            KEEP=True, ROUND=rounded is not None, **_parts(x.shape[1]), **EXACT,
        )  # fmt: skip


def _parts(width: int) -> dict[str, int]:
    """A width as a power of two times an odd number, and the room that these and its blocks of 32 take."""
    power = width & -width
    space, blocks = triton.next_power_of_2(width // power), triton.next_power_of_2(triton.cdiv(width, 32))
    return {"POWER": power, "ODD": width // power, "SPACE": space, "BLOCKS": blocks}


def query_window(
    y: Float[Tensor, "n _"],
    cos: Float[Tensor, "n half"],
    sin: Float[Tensor, "n half"],
    q_norm: Norm,
    kv_norm: Norm,
    into: Into,
    form: BlockFormat = WINDOW,
) -> Float[Tensor, "n r"]:
    """What follows an attention layer's first two products, whose results y [n, r + d] has side by side, in one launch:
    the low-rank vectors normed and rounded to fp8, which are given back; kv normed, rotated, quantised and stored."""
    low, width = q_norm.weight.shape[0], kv_norm.weight.shape[0]
    if y.shape[1] != low + width or q_norm.eps != kv_norm.eps:
        raise OpsError(f"query_window: rows of {low} + {width} values and one eps, got {y.shape[1]} values")
    _check_blocks("query_window", low)
    check_angles("query_window", cos, sin, y.shape[0], width)
    _check_rows("query_window", y[:, low:], form)
    table, queries = _checked(into, "query_window", y[:, low:], form), y.new_empty((y.shape[0], low))
    if y.shape[0]:
        kernels.query_window_kernel[(y.shape[0], 2)](
            y, q_norm.weight, kv_norm.weight, cos, sin, into.rows, table, queries, y.shape[0], y.stride(0), q_norm.eps,
            LISTED=True, **_parts(low), **_constants(width, cos, form, table), **EXACT,
        )  # fmt: skip
    return queries


def round_activation(x: Float[Tensor, "*n k"], tile: int = 4 * TILE) -> Float[Tensor, "*n k"]:
    """x rounded to fp8 in blocks of 32 with power-of-two scales, as bf16 (which holds the values): what products with
    fp8 weights read. One launch serves all products of one x."""
    if x.dtype != torch.bfloat16:
        raise OpsError(f"round_activation: bf16, got {x.dtype}")
    _check_blocks("round_activation", x.shape[-1])
    x, result = _contiguous("round_activation", x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks, each = x.numel() // 32, tile // 32
    if blocks:
        kernels.round_kernel[(triton.cdiv(blocks, each),)](x, result, blocks, BLOCKS=each, **EXACT)
    return result


def decode_table(
    records: UInt8[Tensor, "a bytes"],
    form: BlockFormat,
    pages: Int[Tensor, "m"] | None = None,
    per_page: int = 0,
    compact: bool = True,
    out: Float[Tensor, "_ d"] | None = None,
    tile: int = 16,
) -> Float[Tensor, "_ d"]:
    """Records as bf16 rows, exact: the whole table, or the rows of `pages` of `per_page` rows each (-1: none).

    `compact`: the pages' rows side by side in the order listed; else each at its own row number, the others left as
    they are in `out`. `tile`: rows a program."""
    width = _width_of(records, form)
    if pages is not None and (per_page < 1 or records.shape[0] % per_page):
        raise OpsError(f"decode_table: {records.shape[0]} rows are no pages of {per_page}")
    if pages is not None and not compact and out is None:
        raise OpsError("decode_table: rows at their own numbers need a table `out` to lie in")
    count = records.shape[0] if pages is None else pages.shape[0] * per_page
    result = torch.empty((count, width), dtype=torch.bfloat16, device=records.device) if out is None else out
    needed = count if pages is None or compact else records.shape[0]
    if result.dtype != torch.bfloat16 or result.shape[0] < needed or result.shape[1] != width:
        raise OpsError(f"decode_table: out is bf16 [{needed} or more, {width}], got {result.dtype} {result.shape}")
    if count:
        kernels.decode_kernel[(triton.cdiv(count, tile),)](
            _contiguous("decode_table", records), records if pages is None else pages, result, count, max(1, per_page),
            FORM=CODES[form.name], WIDTH=width, BLOCK=form.block, RECORD=records.shape[1],
            PAGED=pages is not None, COMPACT=compact, ROWS=tile, num_warps=4,
        )  # fmt: skip
    return result


def new_rows(count: int, width: int, form: BlockFormat, packed: bool, device: torch.device) -> Into:
    """A new table of as many rows, to be written in order."""
    like = torch.empty((count, width), dtype=torch.bfloat16, device=device)
    return Into(_fresh(like, form, True) if packed else like, torch.arange(count, device=device))


# Checks


def _check_rows(op: str, x: Tensor, form: BlockFormat | None) -> None:
    width = x.shape[-1]
    if x.dtype != torch.bfloat16 or x.stride(-1) != 1:
        raise OpsError(f"{op}: rows of bf16 with neighbouring entries, got {x.dtype}, strides {x.stride()}")
    if form is not None and form.name not in CODES:
        raise OpsError(f"{op}: no kernel for {form.name}, there are {', '.join(CODES)}: use ReferenceOps.store")
    if width & (width - 1) or width < (32 if form is None else form.block):
        raise OpsError(f"{op}: a row's width is a power of two and at least a block, got {width}")


def _check_blocks(op: str, width: int) -> None:
    if width % 32:
        raise OpsError(f"{op}: rounding goes by blocks of 32, and a width of {width} is no multiple")


def check_angles(op: str, cos: Tensor, sin: Tensor, n: int, width: int) -> None:
    """Raises `OpsError` unless there are n tokens' angles, for no more pairs than a row of `width` has."""
    for angles in (cos, sin):
        if angles.dtype != torch.float32 or not angles.is_contiguous() or angles.shape != cos.shape:
            raise OpsError(f"{op}: cos and sin are contiguous float32 of one shape, got {angles.dtype} {angles.shape}")
    if cos.shape[0] != n or 2 * cos.shape[1] > width:
        raise OpsError(f"{op}: angles of {n} tokens, {width // 2} pairs or fewer, got {tuple(cos.shape)}")


def _contiguous(op: str, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise OpsError(f"{op}: the tensor must be contiguous, got strides {x.stride()} of {tuple(x.shape)}")
    return x


def _fresh(x: Tensor, form: BlockFormat | None, packed: bool) -> Tensor:
    n, width = x.shape
    if form is None or not packed:
        return torch.empty((n, width), dtype=torch.bfloat16, device=x.device)
    return torch.empty((n, form.record_bytes(width)), dtype=torch.uint8, device=x.device)


def _checked(into: Into, op: str, x: Tensor, form: BlockFormat | None) -> Tensor:
    table, packed = into.table, into.table.dtype == torch.uint8
    width = form.record_bytes(x.shape[-1]) if form is not None and packed else x.shape[-1]
    if table.dtype not in (torch.uint8, torch.bfloat16) or table.shape[-1] != width or (packed and form is None):
        raise OpsError(f"{op}: the table has records of {width} bytes or bf16 rows, got {table.dtype} {table.shape}")
    if into.rows.dtype != torch.int64 or into.rows.shape[0] != x.shape[0]:
        raise OpsError(f"{op}: one int64 row for each of {x.shape[0]}, got {into.rows.dtype} {into.rows.shape}")
    return _contiguous(op, table)


def _width_of(records: Tensor, form: BlockFormat) -> int:
    """Values of a row that is so many bytes long."""
    _check_form(form)
    per_block = form.block // form.codes_per_byte + 1
    width = records.shape[1] // per_block * form.block
    if records.dtype != torch.uint8 or records.shape[1] % per_block or width & (width - 1):
        raise OpsError(f"decode_table: records of {form.name}, got {records.dtype} {tuple(records.shape)}")
    return width


def _check_form(form: BlockFormat) -> None:
    if form.name not in CODES:
        raise OpsError(f"decode_table: no kernel for {form.name}, there are {', '.join(CODES)}")


# What an H200 is asked for at the released sizes

_ANGLES = {"cos": "*fp32", "sin": "*fp32"}
_STORE = {
    "x": "*bf16", "weight": "*bf16", **_ANGLES, "rows": "*i64", "table": "*u8", "normed": "*bf16", "count": "i32",
    "stride": "i32", "eps": "fp32",
}  # fmt: skip
_POOL = {
    "kv": "*fp32", "gate": "*fp32", "members": "*i64", "weight": "*bf16", **_ANGLES, "rows": "*i64", "table": "*u8",
    "latents": "*bf16", "count": "i32", "kv_stride": "i32", "gate_stride": "i32", "eps": "fp32",
}  # fmt: skip
_WIDE: dict[str, Any] = {"HALF": 256, "TURNED": 32, "PACKED": True, "LISTED": True, "ROWS": 2}
_FLAGS: dict[str, Any] = {"HEADS": 1, "INVERSE": False, "NORM": True, "KEEP": False}
_OFF = {"enable_fp_fusion": False}

SPECIMENS = [
    Specimen("rows window store", kernels.rotate_store_kernel, _STORE,
             {**_WIDE, **_FLAGS, "FORM": 1, "BLOCK": 32}, options=_OFF),
    Specimen("rows latent store", kernels.rotate_store_kernel, _STORE,
             {**_WIDE, **_FLAGS, "KEEP": True, "FORM": 2, "BLOCK": 16}, options=_OFF),
    Specimen("rows index store", kernels.rotate_store_kernel, _STORE,
             {**_WIDE, **_FLAGS, "HALF": 64, "FORM": 3, "BLOCK": 32, "ROWS": 8}, options=_OFF),
    Specimen("rows index queries", kernels.rotate_store_kernel, {**_STORE, "table": "*bf16"},
             {**_WIDE, "HALF": 64, "FORM": 3, "BLOCK": 32, "ROWS": 8, "PACKED": False, "LISTED": False, "HEADS": 32,
              "INVERSE": False, "NORM": False, "KEEP": False}, options=_OFF),
    Specimen("rows pool store", kernels.pool_store_kernel, _POOL,
             {**_WIDE, "FORM": 2, "BLOCK": 16, "STORE": True}, options=_OFF),
    Specimen("rows turn", kernels.turn_kernel, {"x": "*bf16", **_ANGLES, "out": "*bf16", "count": "i32"},
             {"HEADS": 64, "WIDTH": 512, "TURNED": 32, "INVERSE": False, "ROWS": 16}, options=_OFF),
    Specimen("rows norm", kernels.rms_norm_kernel,
             {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "rounded_out": "*bf16", "stride": "i32", "eps": "fp32"},
             {**_parts(5120), "KEEP": True, "ROUND": True}, options=_OFF),
    Specimen("rows query and window", kernels.query_window_kernel,
             {"y": "*bf16", "q_weight": "*bf16", "kv_weight": "*bf16", **_ANGLES, "rows": "*i64", "table": "*u8",
              "queries": "*bf16", "count": "i32", "stride": "i32", "eps": "fp32"},
             {**_parts(1280), "HALF": 256, "TURNED": 32, "FORM": 1, "PACKED": True, "BLOCK": 32, "LISTED": True},
             options=_OFF),
    Specimen("rows round", kernels.round_kernel, {"x": "*bf16", "out": "*bf16", "blocks": "i32"}, {"BLOCKS": 128},
             options=_OFF),
    Specimen("rows decode latents", kernels.decode_kernel,
             {"records": "*u8", "pages": "*i64", "out": "*bf16", "count": "i32", "per_page": "i32"},
             {"FORM": 2, "WIDTH": 512, "BLOCK": 16, "RECORD": 288, "PAGED": True, "COMPACT": True, "ROWS": 16}),
]  # fmt: skip
