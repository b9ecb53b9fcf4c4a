"""Products with stored weights against `ReferenceOps`: sums in float32 against exact ones, so equal but for the last
bit of few bf16 values. Decoding, turning and rounding are bit-equal."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from openv41.errors import OpsError
from openv41.formats import INDEX, LATENT, WINDOW, pack_fp8_weight, unpack_fp8_weight
from openv41.ops import ReferenceOps
from openv41.ops.hopper import products
from openv41.ops.hopper.products import (
    After,
    Tile,
    Workspace,
    decode_weight,
    grouped_linear,
    linear,
    linear_pair,
    linear_wide,
)
from openv41.ops.hopper.rows import rotate, rotate_quantise, round_activation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
JUDGE = ReferenceOps()
SMALL = Tile(outputs=64, tokens=16, k=32, stages=2)
"""Little work a program, so that small inputs have many steps, tiles and pieces."""


def randn(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng).bfloat16().to(DEVICE)


def fp8(rng: torch.Generator, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """A weight whose tiles differ in size."""
    size = torch.exp2(torch.randint(-8, 3, (-(-outputs // 32), inputs // 32), generator=rng).float())
    weight = torch.randn(outputs, inputs, generator=rng)
    spread = size.repeat_interleave(32, 0)[:outputs].repeat_interleave(32, 1)
    codes, scale = pack_fp8_weight(weight * spread)
    return codes.to(DEVICE), scale.to(DEVICE)


def angles(rng: torch.Generator, n: int, half: int) -> tuple[Tensor, Tensor]:
    turned = torch.rand(n, half, generator=rng).to(DEVICE) * 6.28
    return turned.cos(), turned.sin()


@pytest.fixture
def work() -> Workspace:
    return Workspace.on(DEVICE)


def check(got: Tensor, wanted: Tensor, work: Workspace, most: float = 2e-3) -> None:
    """Nearly all bf16 values equal and all of them near; the counters are zero again."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    error = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < most, f"relative error {error:.1e}"
    assert (got == wanted).double().mean() > 0.98
    assert not work.counters.any()


@pytest.mark.parametrize("n, outputs, inputs", [(1, 64, 32), (5, 72, 160), (19, 40, 416)])
def test_fp8_weights(n: int, outputs: int, inputs: int, rng: torch.Generator, work: Workspace):
    """One piece and three; a last tile that is partial in tokens, in outputs, in scales, or in K."""
    x, (weight, scale) = randn(rng, n, inputs), fp8(rng, outputs, inputs)
    wanted = JUDGE.linear(x, weight, scale)
    check(linear(x, weight, scale, work, tile=SMALL), wanted, work)
    check(linear(round_activation(x), weight, scale, work, rounded=True, tile=replace(SMALL, k=64)), wanted, work)


def test_two_weights_in_one_launch_are_as_one_each(rng: torch.Generator, work: Workspace):
    x, first, second = randn(rng, 5, 288), fp8(rng, 64, 288), fp8(rng, 40, 288)
    both = linear_pair(x, first, second, work, tile=SMALL)
    assert torch.equal(both[:, :64], linear(x, *first, work, tile=SMALL))
    assert torch.equal(both[:, 64:], linear(x, *second, work, tile=SMALL))


def test_every_code_and_scale_reaches_the_product_exactly(work: Workspace):
    """The unit matrix brings out the weight itself."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = 0  # NaN
    weight = codes.repeat(2, 1).T.repeat_interleave(32, 1)[:, :64].contiguous().view(torch.float8_e4m3fn).to(DEVICE)
    scale = (torch.arange(16, dtype=torch.uint8).view(8, 2) * 3 + 100).view(torch.float8_e8m0fnu).to(DEVICE)
    unit = torch.eye(64, dtype=torch.bfloat16, device=DEVICE)
    wanted = unpack_fp8_weight(weight, scale).bfloat16()
    got = linear(unit, weight, scale, work, rounded=True, tile=SMALL)
    assert torch.equal(got.T, wanted)
    assert torch.equal(decode_weight(weight, scale), wanted)


def test_weights_of_bf16(rng: torch.Generator, work: Workspace):
    x, weight = randn(rng, 6, 160), randn(rng, 40, 160)
    check(linear(x, weight, None, work, tile=SMALL), JUDGE.linear(x, weight, None), work)


def test_heads_are_turned_and_rounded_as_by_launches_of_their_own(rng: torch.Generator, work: Workspace):
    n, width = 5, 128  # a head is two tiles wide
    x, (weight, scale), (cos, sin) = randn(rng, n, 64), fp8(rng, 128, 64), angles(rng, n, 16)
    plain = linear(x, weight, scale, work, tile=SMALL)
    heads = plain.unflatten(1, (-1, width))
    turned = linear(x, weight, scale, work, after=After(width, cos, sin), tile=SMALL)
    assert torch.equal(turned, rotate(heads, cos, sin).flatten(1))
    queries = linear(x, weight, scale, work, after=After(width, cos, sin, INDEX), tile=SMALL)
    assert torch.equal(queries, rotate_quantise(heads, cos, sin).flatten(1))
    rounded = linear(x, weight, scale, work, after=After(width, form=WINDOW), tile=SMALL)
    assert torch.equal(rounded, round_activation(plain))


@pytest.mark.parametrize("after", [None, After(64, form=WINDOW)], ids=["as it is", "rounded"])
def test_groups(after: After | None, rng: torch.Generator, work: Workspace):
    x, (weight, scale) = randn(rng, 3, 2, 288), fp8(rng, 128, 288)
    got = grouped_linear(x, weight, scale, work, after, tile=SMALL)
    wanted = JUDGE.grouped_linear(x, weight, scale)
    most = 2e-3 if after is None else 1e-2  # a last bit may move a value to the next one of fp8
    check(got, wanted if after is None else WINDOW.round(wanted), work, most)
    dense = decode_weight(weight, scale)
    check(grouped_linear(x, dense, None, work, after, tile=SMALL), got, work, most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_products_keep_the_sums(dtype: torch.dtype, rng: torch.Generator, work: Workspace):
    x, weight = randn(rng, 5, 288), torch.randn(40, 288, generator=rng).to(DEVICE, dtype)
    got = linear_wide(x, weight, work, tile=SMALL)
    wanted = x.double() @ weight.double().mT
    assert got.dtype == torch.float32
    assert (got.double() - wanted).norm() / wanted.norm() < 1e-6
    assert not work.counters.any()


def test_many_tokens_go_through_the_library(rng: torch.Generator, work: Workspace, monkeypatch: pytest.MonkeyPatch):
    """The other way to the same results; what is made of them afterwards is the same to the bit."""
    n = 6
    x, (weight, scale), (cos, sin) = randn(rng, n, 96), fp8(rng, 128, 96), angles(rng, n, 16)
    first, second, groups = fp8(rng, 64, 96), fp8(rng, 40, 96), randn(rng, n, 2, 96)
    calls = [
        partial(linear, x, weight, scale, work),
        partial(linear_pair, x, first, second, work),
        partial(grouped_linear, groups, weight, scale, work),
    ]
    few = [call() for call in calls]
    monkeypatch.setattr(products, "DIRECT", 0)
    for call, wanted in zip(calls, few, strict=True):
        check(call(), wanted, work)
    plain = linear(x, weight, scale, work)
    heads = plain.unflatten(1, (-1, 64))
    turned = rotate(heads, cos, sin).flatten(1)
    assert torch.equal(linear(x, weight, scale, work, after=After(64, cos, sin)), turned)
    queries = linear(x, weight, scale, work, after=After(64, cos, sin, INDEX))
    assert torch.equal(queries, rotate_quantise(heads, cos, sin).flatten(1))
    assert torch.equal(linear(x, weight, scale, work, after=After(64, cos, sin, WINDOW)), round_activation(turned))
    assert torch.equal(linear(x, weight, scale, work, after=After(32, form=WINDOW)), round_activation(plain))


def test_pieces_leave_none_without_a_step():
    for inputs in (32, 1280, 4096, 5120, 8192):
        for tiles in (1, 20, 80, 512):
            tile = Tile()
            steps, pieces = -(-inputs // tile.k), products.pieces_for(tiles, inputs, tile)
            assert 1 <= pieces <= max(1, steps // products.STEPS)
            assert (pieces - 1) * -(-steps // pieces) < steps


def test_what_is_not_supported_is_refused(rng: torch.Generator, work: Workspace):
    x, (weight, scale) = randn(rng, 2, 96), fp8(rng, 64, 96)
    with pytest.raises(OpsError, match=r"x is bf16 \[.., 96\]"):
        linear(x.float(), weight, scale, work)
    with pytest.raises(OpsError, match="no kernel for a weight of torch.uint8"):
        linear(x, torch.zeros(64, 48, dtype=torch.uint8, device=DEVICE), scale, work)
    with pytest.raises(OpsError, match="multiple of 32 inputs"):
        linear(x[:, :40], weight[:, :40].contiguous(), scale, work)
    with pytest.raises(OpsError, match="multiple of 64, got 32"):
        grouped_linear(x.view(1, 2, 96), weight, scale, work)
    with pytest.raises(OpsError, match="has others"):
        linear(x, weight, scale, work, after=After(32, form=LATENT))


@pytest.mark.skipif(sys.platform != "linux", reason="the assembler is a Linux program")
def test_kernels_compile_for_hopper_on_the_tensor_cores_without_spills():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    names = ["products wq_b", "products wo_b, 128", "products compressor", "products decode"]
    command = [sys.executable, "-m", "openv41.ops.hopper.compiled", *names, "--json"]
    printed = subprocess.run(
        command, env={**environment, "PYTHONPATH": "src"}, capture_output=True, text=True, check=True
    )
    found = {one["name"]: one for one in json.loads(printed.stdout)}
    assert len(found) == len(names)
    assert [name for name, one in found.items() if one["stack"] or one["instructions"].get("LDL", 0)] == []
    multiply = [name for name in found if name != "products decode weight"]
    assert [name for name in multiply if not found[name]["instructions"].get("HGMMA", 0)] == []
    # Codes go to the tensor cores' registers straight from where the copy engine left them.
    turned = found["products wq_b turned, 16 tokens"]["instructions"]
    assert turned.get("LDSM", 0) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 16, 37, 64, 128, 300])
def test_released_sizes_on_a_gpu(n: int, rng: torch.Generator, work: Workspace):
    """Twice the same bits, from and to poisoned memory; near the product in float32 of the same operands."""
    for outputs, inputs in ((1280, 5120), (32768, 1280), (5120, 8192)):
        x, (weight, scale) = randn(rng, n, inputs), fp8(rng, outputs, inputs)
        poison = torch.full((1 << 26,), torch.nan, device=DEVICE)
        del poison
        first, second = (linear(x, weight, scale, work) for _ in range(2))
        wanted = WINDOW.round(x).double() @ unpack_fp8_weight(weight, scale).double().mT
        assert torch.equal(first, second)
        check(first, wanted.bfloat16(), work)


@pytest.mark.gpu
def test_a_layer_of_products_in_a_graph(rng: torch.Generator, work: Workspace):
    """Captured once, replayed with other inputs: the counters come back to zero in between."""
    x, (weight, scale) = randn(rng, 4, 8192), fp8(rng, 5120, 8192)
    linear(x, weight, scale, work)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weight, scale, work)
    for _ in range(3):
        x.copy_(randn(rng, 4, 8192))
        graph.replay()
        assert torch.equal(out, linear(x, weight, scale, work))
