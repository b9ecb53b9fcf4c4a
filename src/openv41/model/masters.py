"""Masters: the weights of a model that is trained, as floats.

A stored weight is codes and scales, which nothing can learn. With masters every weight is a float parameter, and the
format in which it would be stored stands in the place of its scales; operations that train round it on the way (see
`openv41.ops.training`). A master that lies on the format's grid gives the bits that the stored weight gives.

With plain numerics nothing is rounded, and there is no format. What is stored in bf16 is not rounded on the way either.
"""

import torch
from torch import nn

from openv41.errors import OpsError
from openv41.formats import FP4_ROWS, FP8_ROWS, FP8_TILES, WeightFormat
from openv41.model.engram import Table
from openv41.ops import Ops


def make_masters(model: nn.Module, ops: Ops, dtype: torch.dtype = torch.float32) -> None:
    """Turn every weight of `model`, which runs on `ops`, into a float parameter of `dtype` with the value it has now.

    Raises `OpsError` for operations that cannot round masters: those with published numerics that do not train.
    """
    published = ops.numerics == "published"
    if published and not getattr(ops, "takes_masters", False):
        raise OpsError(f"the operations {ops.name!r} take stored weights only: use choose(..., training=True)")
    for part in model.modules():
        scale = part._parameters.get("scale")
        if scale is None or scale.dtype != torch.float8_e8m0fnu:
            continue
        form = format_of(part)
        weight = part.get_parameter("weight")
        part.register_parameter("weight", nn.Parameter(form.unpack(weight, scale).detach().to(dtype)))
        delattr(part, "scale")
        setattr(part, "stored_as", form)  # noqa: B010
        setattr(part, "scale", form if published else None)  # noqa: B010  (a parameter until now)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def change_ops(model: nn.Module, ops: Ops) -> None:
    """Let `model`, which has masters, run on other operations from now on, its parameters being the same. With
    published numerics masters are rounded on the way, with plain ones they are not."""
    for part in model.modules():
        if "ops" in vars(part):
            setattr(part, "ops", ops)  # noqa: B010
        if (form := vars(part).get("stored_as")) is not None:
            setattr(part, "scale", form if ops.numerics == "published" else None)  # noqa: B010


def format_of(part: nn.Module) -> WeightFormat:
    """How a quantised weight of this part is stored."""
    if isinstance(part, Table):
        return FP8_ROWS
    return FP8_TILES if part.get_parameter("weight").dtype == torch.float8_e4m3fn else FP4_ROWS
