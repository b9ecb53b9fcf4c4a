"""A checkpoint's tensors put into a module, one at a time.

Nothing here is lenient: a parameter that no tensor fills is as much an error as a tensor that no parameter takes,
because both mean that the numbers would not be those of the model.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from openv41.formats import unpack_weight
from openv41.weights.checkpoint import Checkpoint, refuse
from openv41.weights.names import Place, Spec, place
from openv41.weights.shards import TORCH_DTYPES

__all__ = ["Checkpoint", "Progress", "load_into"]

Progress = Callable[[str, int, int], None]
"""Told after each tensor: its published name, the bytes done so far, the bytes in all."""


def load_into(
    module: nn.Module,
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    without: tuple[str, ...] = (),
) -> None:
    """Fills every parameter of `module` from `checkpoint`, reading one tensor at a time.

    A parameter on the meta device is made on `device`, but for Engram tables: they stay in their file, mapped. Any
    other parameter is filled where it is. A parameter may be wider than its tensor: fp32 takes bf16; uint8 takes the
    bits of any type of one byte; and a bf16 or fp32 weight without a scale beside it takes the dequantised weight.
    Parameters that hold codes or scales want no gradient afterwards; others keep their setting. Buffers stay.

    Tensors whose names begin with one of `without` are left out on purpose: `("mtp.",)` loads no draft, and the module
    must have none (`Transformer(..., draft=False)`).

    Raises `CheckpointError` before anything is read when a parameter gets no tensor, a tensor finds no parameter, or
    shapes or types do not fit.
    """
    targets = _targets(module)
    specs = {name: spec for name, spec in checkpoint.specs.items() if not name.startswith(without)}
    done, total = 0, sum(spec.nbytes for spec in specs.values())
    for move in _plan(targets, specs):
        target = targets[move.destination.parameter]
        if target.is_meta and _is_table(move.name):
            target.become(_with_dtype(checkpoint.tensor(move.name), target.dtype))
        else:
            target.fill(_with_dtype(_value(checkpoint, move), target.dtype), move.destination.index, device)
        for name in filter(None, (move.name, move.scale)):
            done += specs[name].nbytes
            if progress is not None:
                progress(name, done, total)


class _Move(NamedTuple):
    """A tensor on its way: the scale to be multiplied into it first, if any, and where it goes."""

    name: str
    scale: str | None
    destination: Place


class _Target:
    """A parameter to be filled, and every attribute under which the module holds it."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.dtype = parameter.dtype
        self.shape = tuple(parameter.shape)
        self.holders: list[tuple[nn.Module, str]] = []

    @property
    def is_meta(self) -> bool:
        return self.parameter.is_meta

    def become(self, value: Tensor) -> None:
        """Puts `value` itself in the parameter's place."""
        self.parameter = nn.Parameter(value, requires_grad=self.parameter.requires_grad and not _is_stored(self.dtype))
        for module, attribute in self.holders:
            setattr(module, attribute, self.parameter)

    def fill(self, value: Tensor, index: int | None, device: torch.device | str) -> None:
        """Copies `value` into the parameter, or into one row of it."""
        if self.is_meta:
            self.become(torch.empty(self.shape, dtype=self.dtype, device=device))
        if _is_stored(self.dtype):
            self.parameter.requires_grad_(False)
        whole = self.parameter.detach()
        (whole if index is None else whole[index]).copy_(value)


def _targets(module: nn.Module) -> dict[str, _Target]:
    """Parameters by path; one that is shared appears under each of its paths."""
    targets: dict[str, _Target] = {}
    of_parameter: dict[int, _Target] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for attribute, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            target = of_parameter.setdefault(id(parameter), _Target(parameter))
            target.holders.append((part, attribute))
            targets[f"{prefix}.{attribute}" if prefix else attribute] = target
    return targets


def _plan(targets: Mapping[str, _Target], specs: Mapping[str, Spec]) -> list[_Move]:
    """Every move, in the order of the files. Raises unless all tensors and parameters pair up."""
    scales = _scales_to_multiply(targets, specs)
    gone = set(scales.values())
    moves = [_Move(name, scales.get(name), place(name)) for name in specs if name not in gone]
    rows = Counter(move.destination.parameter for move in moves)
    reached = {id(targets[path]) for path in rows if path in targets}
    pairs = [(move, targets[move.destination.parameter]) for move in moves if move.destination.parameter in targets]
    refuse(
        "the checkpoint does not fit the module",
        {
            "parameters without a tensor": [path for path, target in targets.items() if id(target) not in reached],
            "tensors without a parameter": [move.name for move in moves if move.destination.parameter not in targets],
            "of another shape": [
                f"{move.name} {shape} for a parameter {target.shape}"
                for move, target in pairs
                if (shape := _shape(move, specs, rows)) != target.shape
            ],
            "of a type that the parameter cannot take": [
                f"{move.name} {specs[move.name].dtype} for {target.dtype}"
                for move, target in pairs
                if not _takes(target.dtype, specs[move.name].dtype, move.scale)
            ],
        },
    )
    return moves


def _scales_to_multiply(targets: Mapping[str, _Target], specs: Mapping[str, Spec]) -> dict[str, str]:
    """The scale of each quantised weight that goes into a float parameter without a scale beside it."""
    found = {}
    for name in specs:
        scale = name.removesuffix("weight") + "scale"
        target = targets.get(place(name).parameter)
        if not name.endswith(".weight") or scale not in specs or target is None or _is_table(name):
            continue
        if not _is_stored(target.dtype) and place(scale).parameter not in targets:
            found[name] = scale
    return found


def _shape(move: _Move, specs: Mapping[str, Spec], rows: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the parameter that this tensor, with the others of its stack, would fill."""
    spec = specs[move.name]
    shape = spec.shape
    if move.scale and spec.dtype == "I8":  # two codes a byte
        shape = (*shape[:-1], 2 * shape[-1])
    return shape if move.destination.index is None else (rows[move.destination.parameter], *shape)


def _takes(dtype: torch.dtype, stored: str, scale: str | None) -> bool:
    """Whether a parameter of this type can hold what is stored without loss."""
    if scale:
        return dtype in (torch.bfloat16, torch.float32)
    source = TORCH_DTYPES[stored]
    widened = (source, dtype) == (torch.bfloat16, torch.float32)
    return source == dtype or widened or (dtype == torch.uint8 and source.itemsize == 1)


def _value(checkpoint: Checkpoint, move: _Move) -> Tensor:
    value = checkpoint.tensor(move.name, copy=True)
    return unpack_weight(value, checkpoint.tensor(move.scale, copy=True)) if move.scale else value


def _with_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` as the parameter's type: the same bits in uint8, the same numbers in any other."""
    return value.view(dtype) if dtype == torch.uint8 else value.to(dtype)


def _is_stored(dtype: torch.dtype) -> bool:
    """Whether a parameter of this type holds codes or scales, which are not trained."""
    return dtype.itemsize == 1


def _is_table(name: str) -> bool:
    return name.endswith((".engram.embed.weight", ".engram.embed.scale"))
