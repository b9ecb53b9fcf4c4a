"""Launches of `kernels/rounding.py`: rows and masters rounded to a stored form, one launch each."""

from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from openv41.errors import OpsError
from openv41.formats import FP4_ROWS, FP8_ROWS, FP8_TILES, INDEX, LATENT, TILE, WINDOW, BlockFormat, WeightFormat
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.kernels import bits
from openv41.ops.kernels import rounding as kernels

FORMS = {WINDOW.name: bits.WINDOW.value, LATENT.name: bits.LATENT.value, INDEX.name: bits.INDEX.value}
ROWS = {FP4_ROWS.name: INDEX, FP8_ROWS.name: WINDOW}
"""Formats of weights whose rows are rounded as rows of a table are."""

VALUES = 2048
"""That a program of four warps holds: sixteen a thread."""

EXACT: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def round_rows(x: Float[Tensor, "*n k"], form: BlockFormat, dtype: torch.dtype | None = None) -> Float[Tensor, "*n k"]:
    """What comes back after storing `x` in `form`, in `dtype` or its own; as `BlockFormat.round`, to the bit."""
    if form.name not in FORMS or x.shape[-1] % form.block:
        raise OpsError(
            f"round_rows takes {', '.join(FORMS)} and rows of whole blocks, got {form.name} of {form.block} and "
            f"{list(x.shape)}: use the fast ops there"
        )
    if form is LATENT and x.dtype != torch.bfloat16:
        raise OpsError(f"round_rows takes bf16 for {form.name}, got {x.dtype}: use the fast ops there")
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype or x.dtype)
    blocks, each = x.numel() // form.block, VALUES // form.block
    if blocks:
        kernels.round_rows[(triton.cdiv(blocks, each),)](
            x, out, blocks, FORM=FORMS[form.name], SIZE=form.block, BLOCKS=each, **EXACT
        )
    return out


def round_activation(x: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
    """x, bf16 or float32, as a quantised linear map meets it."""
    return round_rows(x, WINDOW)


def round_master(weight: Float[Tensor, "*e o i"], form: WeightFormat, dtype: torch.dtype) -> Float[Tensor, "*e o i"]:
    """A weight as it is after being stored in `form`: the values of `form.unpack(*form.pack(weight))`, in `dtype`."""
    if form.name in ROWS:
        return round_rows(weight, ROWS[form.name], dtype)
    if form is not FP8_TILES:
        raise OpsError(f"round_master takes fp8 tiles, fp4 rows and fp8 rows, got {form.name}: use the fast ops there")
    weight = weight.contiguous()
    out = torch.empty_like(weight, dtype=dtype)
    rows, columns = weight.shape[-2:]
    if weight.numel():
        grid = triton.cdiv(columns, TILE), triton.cdiv(rows, TILE), weight.numel() // (rows * columns)
        kernels.round_tiles[grid](weight, out, rows, columns, SIDE=TILE, **EXACT)
    return out


# What is launched on an H200

_EXACT = {"enable_fp_fusion": False}

SPECIMENS = [
    Specimen(
        f"round rows {form.name}, {x} to {out}", kernels.round_rows, {"x": x, "out": out, "blocks": "i32"},
        {"FORM": FORMS[form.name], "SIZE": form.block, "BLOCKS": VALUES // form.block}, 4, options=_EXACT,
    )
    for form, x, out in ((WINDOW, "*bf16", "*bf16"), (LATENT, "*bf16", "*bf16"), (INDEX, "*fp32", "*bf16"))
] + [
    Specimen(
        "round tiles", kernels.round_tiles, {"x": "*fp32", "out": "*bf16", "rows": "i32", "columns": "i32"},
        {"SIDE": TILE}, 4, options=_EXACT,
    ),
]  # fmt: skip
