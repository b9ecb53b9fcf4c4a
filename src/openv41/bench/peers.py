"""Other people's kernels for the same inputs, where they are installed: timed beside ours, never called otherwise.

`sgl-flash-mla` 1.0.0 keeps FlashMLA's kernels for Hopper GPUs; its sparse attention takes one table of bf16 rows.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def of_attention(
    q: Tensor, near: Tensor, near_rows: Tensor, far: Tensor, far_rows: Tensor, sink: Tensor, scale: float
) -> Mapping[str, Callable[[], Any]]:
    """For bf16 rows: both tables as one, both lists as one of 32-bit numbers, made beforehand."""
    if near.dtype != torch.bfloat16 or find_spec("flash_mla") is None:
        return {}
    from flash_mla import flash_mla_sparse_fwd

    table = torch.cat((near, far)).unsqueeze(1)
    rows = torch.cat((near_rows, (far_rows + len(near)).masked_fill(far_rows < 0, -1)), 1).to(torch.int32).unsqueeze(1)
    call = partial(flash_mla_sparse_fwd, q, table, rows, scale, q.shape[2], attn_sink=sink, use_legacy=True)
    return {"FlashMLA (sgl-flash-mla)": call}
