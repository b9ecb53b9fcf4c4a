"""Products whose codes go from memory to registers, against `ReferenceOps`. Gluon has no interpreter: without a GPU the
kernel's own source runs in `gluon_programs`, its programs in random order."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openv41.errors import OpsError
from openv41.formats import INDEX, WINDOW, BlockFormat, unpack_fp8_weight
from openv41.ops import ReferenceOps
from openv41.ops.hopper.products import After, Workspace, grouped_linear, linear, linear_pair
from openv41.ops.hopper.products_direct import DirectLaunch, DirectTile, direct_tile_for, fitting
from openv41.ops.hopper.rows import rotate, rotate_quantise, round_activation
from openv41.ops.kernels import bits
from openv41.ops.kernels import products_direct as kernels
from tests.ops.hopper.gluon_programs import run_grid
from tests.ops.hopper.test_hopper_products import angles, check, fp8, randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
JUDGE = ReferenceOps()
PATHS = {module.__name__: Path(module.__file__ or "") for module in (bits, kernels)}
SMALL = DirectTile(resident=1)
ROUNDS = DirectTile(rounds=2, ahead=1, resident=1)
WIDE = DirectTile(tokens=16, resident=1, wide=True)


@pytest.fixture
def work() -> Workspace:
    return Workspace.on(DEVICE)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Without a GPU launches go to the machine."""
    if DEVICE == "cpu":
        monkeypatch.setattr(DirectLaunch, "multiply", lambda launch: run_on_machine(launch, seed))


def run_on_machine(launch: DirectLaunch, seed: int) -> None:
    run_grid("direct_kernel", launch.grid, {**launch.arguments, **launch.constants}, PATHS, seed)


@pytest.mark.parametrize("n, outputs, inputs, tile", [
    (1, 64, 32, SMALL), (5, 72, 160, SMALL), (19, 40, 416, replace(SMALL, tokens=16)), (3, 130, 1056, ROUNDS),
    (19, 72, 416, WIDE), (9, 256, 416, replace(WIDE, turns=2)), (9, 384, 1056, replace(ROUNDS, turns=3, fewest=9)),
    (2, 128, 672, replace(SMALL, burst=True, turns=2, fewest=9)), (19, 200, 1056, replace(WIDE, apart=True)),
    (11, 128, 1184, replace(WIDE, turns=2, fewest=10, phases=2)),
])  # fmt: skip
def test_fp8_weights(n: int, outputs: int, inputs: int, tile: DirectTile, rng: torch.Generator, work: Workspace):
    """One piece and more; a last tile that is partial in tokens, in outputs, in scales, or in K."""
    x, (weight, scale) = randn(rng, n, inputs), fp8(rng, outputs, inputs)
    wanted = JUDGE.linear(x, weight, scale)
    check(linear(x, weight, scale, work, tile=tile), wanted, work)
    check(linear(round_activation(x), weight, scale, work, rounded=True, tile=replace(tile, ahead=3)), wanted, work)


def test_two_weights_in_one_launch_are_as_one_each(rng: torch.Generator, work: Workspace):
    x, (codes, scales) = randn(rng, 5, 288), fp8(rng, 128, 288)  # of one storage, as the machine wants them
    first, second = (codes[:64], scales[:2]), (codes[64:104], scales[2:])
    both = linear_pair(x, first, second, work, tile=SMALL)
    assert torch.equal(both[:, :64], linear(x, *first, work, tile=SMALL))
    assert torch.equal(both[:, 64:], linear(x, *second, work, tile=SMALL))


@pytest.mark.parametrize("wide", [False, True], ids=["a warp", "a warpgroup"])
def test_every_code_and_scale_reaches_the_product_exactly(wide: bool, work: Workspace):
    """The unit matrix brings out the weight itself: no input is mistaken for another."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = 0  # NaN
    shifted = torch.stack([codes.roll(i) for i in range(128)], 1)  # no two inputs alike
    weight = shifted.contiguous().view(torch.float8_e4m3fn).to(DEVICE)
    scale = (torch.arange(32, dtype=torch.uint8).view(8, 4) + 100).view(torch.float8_e8m0fnu).to(DEVICE)
    unit = torch.eye(128, dtype=torch.bfloat16, device=DEVICE)
    got = linear(unit, weight, scale, work, rounded=True, tile=replace(SMALL, tokens=64, wide=wide))
    assert torch.equal(got.T, unpack_fp8_weight(weight, scale).bfloat16())


@pytest.mark.parametrize("tile", [SMALL, replace(WIDE, apart=True)], ids=["at once", "after the pieces"])
def test_heads_are_turned_and_rounded_as_by_launches_of_their_own(
    tile: DirectTile, rng: torch.Generator, work: Workspace
):
    n, width = 5, 128  # a head is two tiles wide
    x, (weight, scale), (cos, sin) = randn(rng, n, 544), fp8(rng, 128, 544), angles(rng, n, 16)
    plain = linear(x, weight, scale, work, tile=tile)
    heads = plain.unflatten(1, (-1, width))
    turned = linear(x, weight, scale, work, after=After(width, cos, sin), tile=tile)
    assert torch.equal(turned, rotate(heads, cos, sin).flatten(1))
    queries = linear(x, weight, scale, work, after=After(width, cos, sin, INDEX), tile=tile)
    assert torch.equal(queries, rotate_quantise(heads, cos, sin).flatten(1))
    rounded = linear(x, weight, scale, work, after=After(width, form=WINDOW), tile=tile)
    assert torch.equal(rounded, round_activation(plain))


@pytest.mark.parametrize("form", [None, WINDOW], ids=["as it is", "rounded"])
def test_groups(form: BlockFormat | None, rng: torch.Generator, work: Workspace):
    x, (weight, scale) = randn(rng, 3, 2, 288), fp8(rng, 128, 288)
    got = grouped_linear(x, weight, scale, work, form and After(64, form=form), tile=SMALL)
    wanted = JUDGE.grouped_linear(x, weight, scale)
    # A last bit may move a value to the next one of fp8.
    check(got, wanted if form is None else form.round(wanted), work, 2e-3 if form is None else 1e-2)


def test_pieces_of_k_cover_it_and_fit():
    for inputs in (32, 1280, 4096, 5120, 8192):
        for outputs in (64, 1792, 5120, 32768):
            for n in (1, 16, 17, 33, 100, 256):
                tile = direct_tile_for(n, outputs, inputs) or WIDE
                pieces, each = tile.cut(outputs, inputs, n)
                assert (pieces - 1) * each < -(-inputs // 128) <= pieces * each
                assert each % tile.ahead == 0 and each <= tile.most_steps()


def test_what_is_not_supported_is_refused(rng: torch.Generator, work: Workspace):
    assert fitting(DirectTile(warps=8, rounds=2), 2560, 1024, 1280).outputs == 256
    assert fitting(DirectTile(warps=8, rounds=2), 128, 64, 0).outputs == 64
    with pytest.raises(OpsError, match="multiple of 64, got 32"):
        fitting(SMALL, 64, 32)
    with pytest.raises(OpsError, match="for fp8 weights"):
        linear(randn(rng, 2, 64), randn(rng, 64, 64), None, work, tile=SMALL)


@pytest.mark.skipif(sys.platform != "linux", reason="the assembler is a Linux program")
def test_kernels_compile_for_hopper_without_spills_and_without_shared_weights():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    names = ["products_direct wq_b turned, 1 token", "products_direct wo_b, 64"]
    command = [sys.executable, "-m", "openv41.ops.hopper.compiled", *names, "--json"]
    printed = subprocess.run(
        command, env={**environment, "PYTHONPATH": "src"}, capture_output=True, text=True, check=True
    )
    found = {one["name"]: one for one in json.loads(printed.stdout)}
    assert len(found) == len(names)
    assert [name for name, one in found.items() if one["stack"] or one["instructions"].get("LDL", 0)] == []
    # Two steps ahead and two in the loop, four loads of 16 bytes each for 16 outputs: no byte goes by itself.
    turned = found["products_direct wq_b turned, 1 token"]
    assert turned["instructions"]["HMMA"] == 2 * 8 and turned["instructions"]["LDG"] < 4 * 4 + 16
    assert turned["shared"] == 10 * 8 * 128 * 2  # x alone
