"""rope: tables of cosines and sines (`positions`), and rotation by given angles and back (`x`)."""

import torch

from openv41.model.layers import Rotary
from openv41.ops import Ops
from openv41.parity.compare import Bounds, Sheet, bounds
from openv41.parity.folder import BadCase, Case, Skip

TABLE = Bounds(atol=1e-6)


def run(case: Case, ops: Ops, sheet: Sheet) -> None:
    if "positions" in case:
        _table(case, sheet)
    elif "x" in case:
        _apply(case, ops, sheet)
    else:
        raise Skip("unknown kind of rope case: it has neither positions nor x")


def _table(case: Case, sheet: Sheet) -> None:
    width = case.whole("rope_head_dim", least=2)
    original, factor = case.whole("original_seq_len"), case.number("factor")
    rotary = Rotary(width, case.number("theta"), original, factor, case.number("beta_fast"), case.number("beta_slow"))
    positions = case["positions"]
    if positions.dim() != 1 or positions.numel() and int(positions.min()) < 0:
        raise BadCase("positions must be a row of numbers of at least 0")
    cos, sin = rotary.at(positions.long())
    allowed = bounds(case.tolerance, otherwise=TABLE)
    sheet.compare_all({"cos": (cos, case["cos"]), "sin": (sin, case["sin"])}, allowed)


def _apply(case: Case, ops: Ops, sheet: Sheet) -> None:
    x, cos, sin = case["x"], case["cos"], case["sin"]  # [b, n, *h, d], [n, half] each
    allowed = bounds(case.tolerance)
    for what, inverse in (("forward", False), ("inverse", True)):
        turned = torch.stack([ops.rotate(row, cos, sin, inverse) for row in x.unbind(0)])
        sheet.compare(what, turned, case[what], allowed)
