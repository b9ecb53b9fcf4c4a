"""From a case's numbers and tensors to the parts of the model."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from openv41.config import KEYS, Config
from openv41.errors import ConfigError
from openv41.parity.folder import BadCase, Case, Skip
from openv41.weights.names import place

ROUNDS = 1000
"""Sinkhorn rounds beyond which a number is taken for a mistake."""

UNUSED = {"gate_temp": 1.0, "norm_topk_prob": True}
"""Keys of the published code that a config may hold and that the model has one value of."""


def model_config(case: Case, **changes: Any) -> Config:
    """The case's configuration without the keys that describe the case, or that of a related case.

    Keys that are not there are the released model's (a case may state just those that it is about).
    """
    values = case.settings
    if not values:
        values = next((relative.settings for relative in case.relatives() if "dim" in relative.config), {})
    for key, value in UNUSED.items():
        if values.get(key, value) != value:
            raise Skip(f"config.{key} is {values[key]!r}: openv41 knows only {value!r}")
    known = {key: values[key] for key in KEYS if key in values} | changes
    try:
        config = Config.from_dict(Config.released().to_dict() | known)
    except ConfigError as error:
        raise BadCase(f"config: {error}") from error
    if config.hc_sinkhorn_iters > ROUNDS:
        raise BadCase(f"config.hc_sinkhorn_iters must be at most {ROUNDS}, got {config.hc_sinkhorn_iters}")
    return config


def weights_of(case: Case, prefix: str = "w.", sample: str = "") -> dict[str, Tensor]:
    """The tensors named `prefix` + name, by name, of the case that holds `prefix` + `sample` for this one."""
    lender = case
    if not case.matching(prefix + sample):
        holders = (relative for relative in case.relatives() if relative.matching(prefix + sample))
        found = next(holders, None)
        if found is None:
            raise BadCase(f"no weights: neither this case nor a related one has tensors named {prefix}{sample}*")
        lender = found
    return {key.removeprefix(prefix): lender[key] for key in lender.matching(prefix)}


def fill(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    root: str = "",
    elsewhere: tuple[str, ...] = (),
    loose: bool = False,
) -> None:
    """Put tensors into a module's parameters by their published names, `root` being the module's own (`layers.0.`).

    `elsewhere`: beginnings of names that belong to parts which the module does not have. `loose`: the module was built
    for other sizes. Raises `BadCase` when a parameter gets no tensor, a tensor finds none, or shape or type differ.
    """
    given: dict[str, dict[int | None, Tensor]] = defaultdict(dict)
    for name, value in tensors.items():
        if not name.startswith(elsewhere) or not elsewhere:
            spot = place(root + name)
            given[spot.parameter.removeprefix(root)][spot.index] = value
    for path, parameter in list(module.named_parameters()):
        owner = module.get_submodule(path.rpartition(".")[0])
        leaf = path.rpartition(".")[2]
        rows = given.pop(path, None)
        if rows is not None:
            value = _fitting(path, parameter, _joined(path, rows), loose, unscaled=f"{path[:-6]}scale" not in given)
            shared = isinstance(value, nn.Parameter)  # of another module: what is kept for it serves both
            setattr(owner, leaf, value if shared else nn.Parameter(value, requires_grad=False))
        elif leaf == "scale" and getattr(owner, "weight", parameter).dtype in (torch.bfloat16, torch.float32):
            setattr(owner, leaf, None)  # stored quantised, run in bf16: the published code's wo_a
        elif leaf != "bias_vl":  # without images there is none
            raise BadCase(f"no weight is named {root + path}")
    if given:
        raise BadCase(f"the model has no parameter {root + next(iter(given))}")


def _joined(path: str, rows: Mapping[int | None, Tensor]) -> Tensor:
    """One tensor; the experts of a layer are published one by one and stacked here."""
    if None in rows:
        return rows[None]
    if sorted(rows, key=lambda row: row or 0) != list(range(len(rows))):
        raise BadCase(f"{path}: experts must be numbered 0 to {len(rows) - 1}")
    parts = [rows[row] for row in range(len(rows))]
    if len({(part.shape, part.dtype) for part in parts}) > 1:
        raise BadCase(f"{path}: experts differ in shape or type")
    return torch.stack([part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts]).view(
        parts[0].dtype
    )


def _fitting(path: str, parameter: Tensor, value: Tensor, loose: bool, unscaled: bool) -> Tensor:
    if not loose and value.shape != parameter.shape:
        raise BadCase(f"{path}: shape {list(value.shape)}, the configuration asks for {list(parameter.shape)}")
    if value.dtype == parameter.dtype or (unscaled and path.endswith("wo_a.weight") and value.dtype == torch.bfloat16):
        return value
    if (value.dtype, parameter.dtype) == (torch.bfloat16, torch.float32):
        return value.float()
    raise BadCase(f"{path}: {value.dtype}, the configuration asks for {parameter.dtype}")
