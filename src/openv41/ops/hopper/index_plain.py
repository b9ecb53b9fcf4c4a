"""Launches of `kernels/index_plain.py`: index scores of plain numerics, and their order."""

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from openv41.errors import OpsError
from openv41.ops.hopper.attend import Precision
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.kernels import index_plain as kernels

ROWS, COLUMNS = 64, 128
"""Of the scores that a program of eight warps works out."""
RANKED = 1024
"""Scores of a row that a program brings in order."""
WIDTH_MOST = 256


def index_scores(
    q: Float[Tensor, "n i c"], weights: Float[Tensor, "n i"], keys: Float[Tensor, "p c"], precision: Precision
) -> Float[Tensor, "n p"]:
    """See `ReferenceOps.index_scores`. In float32, without gradient. Raises `OpsError` for others."""
    if {q.dtype, weights.dtype, keys.dtype} != {torch.float32} or q.shape[2] > WIDTH_MOST:
        raise OpsError(
            f"index_scores by kernel takes float32 and at most {WIDTH_MOST} values a key, got {q.dtype} "
            f"{list(q.shape)}, {weights.dtype} and {keys.dtype}: use the fast ops there"
        )
    n, heads, width = q.shape
    out = q.new_empty(n, len(keys))
    if out.numel():
        kernels.index_scores[(triton.cdiv(n, ROWS), triton.cdiv(len(keys), COLUMNS))](
            q.contiguous(), weights.contiguous(), keys.contiguous(), out, n, len(keys), HEADS=heads, WIDTH=width,
            SPACE=max(triton.next_power_of_2(width), 16), ROWS=ROWS, COLUMNS=COLUMNS, PRECISION=precision, num_warps=8,
        )  # fmt: skip
    return out


def ranked(scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"]) -> Int[Tensor, "n p"]:
    """int64 in the order of scores of bf16 or float32, the lower position first; what a row does not see comes last."""
    scores = scores.contiguous()
    out = torch.empty_like(scores, dtype=torch.int64)
    if out.numel():
        grid = len(scores), triton.cdiv(scores.shape[1], RANKED)
        kernels.ranked[grid](scores, visible.contiguous(), out, scores.shape[1], COLUMNS=RANKED, num_warps=4)
    return out


# What is launched on an H200

SPECIMENS = [
    Specimen(
        "index scores, plain", kernels.index_scores,
        {"q": "*fp32", "weights": "*fp32", "keys": "*fp32", "out": "*fp32", "n": "i32", "p": "i32"},
        {"HEADS": 4, "WIDTH": 32, "SPACE": 32, "ROWS": ROWS, "COLUMNS": COLUMNS, "PRECISION": "tf32"}, 8,
    ),
    Specimen(
        "ranks of scores", kernels.ranked, {"scores": "*fp32", "visible": "*i64", "out": "*i64", "p": "i32"},
        {"COLUMNS": RANKED},
    ),
]  # fmt: skip
