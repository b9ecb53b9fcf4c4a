"""sparse_attn: attention over listed rows of one table, with a sink."""

import torch

from openv41.ops import Ops
from openv41.parity.compare import Bounds, Sheet, bounds
from openv41.parity.folder import Case, Skip

CLOSE = Bounds(atol=4e-3, rtol=4e-3)


def run(case: Case, ops: Ops, sheet: Sheet) -> None:
    if "q" not in case or "kv" not in case:
        raise Skip("unknown kind of sparse_attn case: it has no q and kv")
    q, kv, listed = case["q"], case["kv"], case["idx"].long()  # [b, n, h, d], [b, rows, d], [b, n, t]
    sink, scale = case["sink"], case.number("scale")
    rows = [ops.sparse_attention(q[b], kv[b], listed[b], None, None, sink, scale) for b in range(q.shape[0])]
    sheet.compare("out", torch.stack(rows), case["out"], bounds(case.tolerance, "out", otherwise=CLOSE))
