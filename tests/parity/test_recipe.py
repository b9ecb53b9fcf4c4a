"""Streams of values from names."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from openv41.parity.folder import BadCase
from openv41.parity.recipe import make


def test_a_stream_is_philox_from_its_name() -> None:
    value, scale = make({"name": "some/name", "kind": "fp32", "shape": [3, 5], "amplitude": 2.0, "offset": 0.5})
    generator = np.random.Generator(
        np.random.Philox(key=int.from_bytes(hashlib.sha256(b"some/name").digest()[:16], "little"))
    )
    words = generator.bit_generator.random_raw(4)
    numbers = [int(word) >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48)][:15]
    expected = [(number - 32767.5) / 32768 * 2 + 0.5 for number in numbers]
    assert scale is None and value.flatten().tolist() == pytest.approx(expected, abs=2e-7)


def test_fp8_has_a_scale_a_tile() -> None:
    value, scale = make({"name": "w", "kind": "fp8", "shape": [40, 70], "exponent": -9})
    assert value.dtype == torch.float8_e4m3fn and value.shape == (40, 70)
    assert scale is not None and scale.shape == (2, 3)
    assert set(scale.float().log2().flatten().tolist()) <= {-10.0, -9.0, -8.0}
    again, _ = make({"name": "w", "kind": "fp8", "shape": [40, 70], "exponent": -9})
    other, _ = make({"name": "v", "kind": "fp8", "shape": [40, 70], "exponent": -9})
    assert torch.equal(value.float(), again.float()) and not torch.equal(value.float(), other.float())


@pytest.mark.parametrize(
    "changes",
    [
        {"name": None}, {"kind": "fp9"}, {"shape": [0]}, {"shape": [-3, 4]}, {"shape": 7}, {"shape": [2.0]},
        {"shape": [1 << 40]}, {"amplitude": "big"}, {"amplitude": float("nan")}, {"kind": "fp8", "exponent": 400},
        {"kind": "fp8"}, {"kind": "fp8", "exponent": 0, "shape": [3]},
    ],
)  # fmt: skip
def test_a_recipe_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadCase):
        make({"name": "x", "kind": "bf16", "shape": [4], "amplitude": 1.0} | changes)
