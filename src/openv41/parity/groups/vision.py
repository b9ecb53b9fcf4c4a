"""vision: the tower and the aligner, an image to patches, and how many tokens an image of any size takes."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from openv41.config import Config
from openv41.errors import InputError
from openv41.inputs.image import make_picture, plan_image
from openv41.model.vision import Aligner, VisionTower
from openv41.ops import Ops
from openv41.parity.compare import EXACT, Bounds, Sheet, bounds
from openv41.parity.fill import fill, model_config, weights_of
from openv41.parity.folder import BadCase, Case, Skip
from openv41.state.picture import span_types

ANGLES, FEATURES, ALIGNED = Bounds(atol=1e-6), Bounds(atol=0.04, rtol=0.02), Bounds(atol=0.03, rtol=0.03)
PATCHES = Bounds(atol=0.02)
"""With another version of Pillow. One step of an 8-bit colour is 0.0078."""

SIDE = 4096
"""Patches in a row or column beyond which a number is taken for a mistake."""


class Parts(nn.Module):
    """The two modules under their published names, with the weights of the case or of the one that lends them."""

    def __init__(self, case: Case, ops: Ops) -> None:
        super().__init__()
        lender = next((one for one in (case, *case.folder.groups[case.group]) if one.matching("w.vision.")), None)
        if lender is None:
            raise BadCase(f"no case of {case.group} has weights of a tower (w.vision.*)")
        config = model_config(lender)
        self.vision, self.aligner = VisionTower(config, ops), Aligner(config, ops)
        fill(self, weights_of(lender))


def run(case: Case, ops: Ops, sheet: Sheet) -> None:
    if "features" in case:
        return _tower(case, ops, sheet)
    if "rgb" in case:
        return _photo(case, sheet)
    if case.matching("w.vision."):
        parameters = dict(Parts(case, ops).named_parameters())
        weights = weights_of(case)
        return sheet.compare_all({name: (parameters[name], value) for name, value in weights.items()}, EXACT)
    if isinstance(_notes(case).get("rows"), list) or case.matching("types_"):
        return _sizes(case, sheet)
    raise Skip("unknown kind of vision case: it has no weights, features, rgb or rows")


def _tower(case: Case, ops: Ops, sheet: Sheet) -> None:
    grid = case.whole("n_vit_h", least=1, most=SIDE), case.whole("n_vit_w", least=1, most=SIDE)
    patches, parts = case["patches"], Parts(case, ops)
    if len(patches) != grid[0] * grid[1]:
        raise BadCase(f"patches must be {grid[0]} x {grid[1]}, has {len(patches)}")
    cos, sin = parts.vision.angles([grid])
    for what, ours in (("cos", cos), ("sin", sin)):
        if what in case:
            sheet.compare(what, ours, case[what].squeeze(1), bounds({}, otherwise=ANGLES))
    features = parts.vision(patches, [grid])
    sheet.compare("features", features, case["features"], bounds(case.tolerance, "features", otherwise=FEATURES))
    aligned = parts.aligner(features, [grid])
    sheet.compare("aligned", aligned, case["aligned"], bounds(case.tolerance, "aligned", otherwise=ALIGNED))


def _photo(case: Case, sheet: Sheet) -> None:
    try:
        from PIL import Image
    except ImportError:
        raise Skip("needs Pillow (the extra vision)") from None
    rgb = case["rgb"]
    if rgb.dtype != torch.uint8 or rgb.dim() != 3 or rgb.shape[2] != 3:
        raise BadCase(f"rgb must be bytes [height, width, 3], is {rgb.dtype} {list(rgb.shape)}")
    config = model_config(case)
    picture = make_picture(Image.fromarray(rgb.numpy()), config)
    _require_plan(sheet, case.name, rgb.shape[1], rgb.shape[0], config, case.settings)
    sheet.compare("patches", picture.patches, case["patches"], bounds(case.tolerance, "patches", otherwise=PATCHES))


def _sizes(case: Case, sheet: Sheet) -> None:
    config = model_config(case)
    for row in _notes(case).get("rows", []):
        if not isinstance(row, dict) or not {type(row.get("width")), type(row.get("height"))} <= {int}:
            raise BadCase(f"a row of sizes must have a width and a height, got {row!r}")
        named = config.replace(vision_max_wh_ratio=row.get("max_wh_ratio"))
        _require_plan(sheet, f"{row['width']} x {row['height']}", row["width"], row["height"], named, row)
    for key in case.matching("types_"):
        rows, _, columns = key.removeprefix("types_").partition("x")
        if not (rows.isdecimal() and columns.isdecimal()) or max(int(rows), int(columns)) > SIDE:
            raise BadCase(f"{key}: a name like types_2x3 was expected")
        sheet.compare(key, span_types(int(rows), int(columns)), case[key], EXACT)


def _require_plan(sheet: Sheet, what: str, width: int, height: int, config: Config, wanted: Mapping[str, Any]) -> None:
    """Everything that the case says about the plan of an image of that size."""
    try:
        plan = plan_image(width, height, config)
    except InputError as error:
        return sheet.fail(what, str(error))
    ours = {
        "best_height": plan.height, "best_width": plan.width, "n_vit_h": plan.rows, "n_vit_w": plan.columns,
        "n_llm_h": plan.cell_rows, "n_llm_w": plan.cell_columns, "tokens": plan.tokens,
    }  # fmt: skip
    told = {key: wanted[key] for key in ours if key in wanted}
    got = {key: ours[key] for key in told}
    sheet.require(what, got == told, f"{got}, wanted {told}")


def _notes(case: Case) -> Mapping[str, Any]:
    """The notes, where they are an object."""
    try:
        notes = json.loads(case.notes)
    except (ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}
