"""Tensors too large to store, made again from their names.

Every tensor has a stream of its own: numpy's Philox generator, its key the first 16 bytes of the name's SHA-256, read
as 16-bit numbers. A number u stands for (u - 32767.5) / 32768, a value inside (-1, 1) that float32 holds exactly. So
the values depend on neither processor nor library.

    kind   value
    fp8    e4m3(unit * 256), with an e8m0 scale 2^(exponent - 1 .. exponent + 1) for each 32 x 32 tile
    bf16   bf16(unit * amplitude + offset)
    fp32   unit * amplitude + offset

A scale has the stream of its weight's name with ".scale" behind it.
"""

import hashlib
from collections.abc import Mapping
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openv41.formats import TILE
from openv41.parity.folder import BadCase

BIAS = 127  # of an e8m0 exponent
LARGEST = 1 << 30  # values in one tensor: beyond any real one, so that a wrong shape does not fill the memory


def make(spec: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The tensor that a spec {name, kind, shape, ...} describes, and its scale if it has one. Raises `BadCase`."""
    name, kind, shape = spec.get("name"), spec.get("kind"), spec.get("shape")
    if not isinstance(name, str) or kind not in ("fp8", "bf16", "fp32"):
        raise BadCase(f"a recipe needs a name and a kind of fp8, bf16 or fp32, got {name!r} and {kind!r}")
    if not isinstance(shape, list) or not all(type(side) is int and side > 0 for side in shape):
        raise BadCase(f"{name}: a shape is a list of whole numbers above 0, got {shape!r}")
    if prod(shape) > LARGEST:
        raise BadCase(f"{name}: {shape} is more than {LARGEST} values")
    if kind == "fp8":
        return _fp8(name, shape, int(_number(spec, name, "exponent")))
    value = _unit(name, shape).mul_(_number(spec, name, "amplitude")).add_(_number(spec, name, "offset", 0.0))
    return value.to(torch.bfloat16 if kind == "bf16" else torch.float32), None


def _fp8(name: str, shape: list[int], exponent: int) -> tuple[Tensor, Tensor]:
    if len(shape) != 2 or not 1 < BIAS + exponent < 254:
        raise BadCase(f"{name}: an fp8 weight has two dimensions and an exponent within +-125, got {shape}, {exponent}")
    tiles = [-(-side // TILE) for side in shape]
    jitter = _stream(f"{name}.scale", prod(tiles)).astype(np.int32) % 3 - 1
    codes = torch.from_numpy((BIAS + exponent + jitter).astype(np.uint8).reshape(tiles))
    return _unit(name, shape).mul_(256.0).to(torch.float8_e4m3fn), codes.view(torch.float8_e8m0fnu)


def _number(spec: Mapping[str, Any], name: str, key: str, default: float | None = None) -> float:
    value = spec.get(key, default)
    if type(value) not in (int, float) or not isfinite(value):
        raise BadCase(f"{name}: {key} must be a finite number, got {value!r}")
    return float(value)


def _unit(name: str, shape: list[int]) -> Tensor:
    values = _stream(name, prod(shape)).astype(np.float32)
    return torch.from_numpy(values).sub_(32767.5).div_(32768.0).view(shape)


def _stream(name: str, count: int) -> np.ndarray:
    """The first `count` 16-bit numbers of the stream, the low half of each 64-bit word first."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    words = np.random.Philox(key=key).random_raw(-(-count // 4)).astype("<u8", copy=False)
    return words.view("<u2")[:count]
