"""Launches of `kernels/products_direct.py`: products with fp8 weights, whose codes go from memory to registers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from openv41.errors import OpsError
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.hopper.rows import EXACT
from openv41.ops.kernels import products_direct as kernels
from openv41.ops.kernels.products import join_kernel

MULTIPROCESSORS = 132
"""Of an H200. All programs of a launch run at once, or nearly: a second round would be a short one."""

STEP = 128
"""Inputs of a step, in the kernel."""

SHARED = 225 * 1024
"""Bytes of shared memory on a multiprocessor that programs may fill with x."""


@dataclass(frozen=True)
class DirectTile:
    """What one program works on: 16 outputs for each of `warps` in each of `rounds`, `tokens`; how many steps of codes
    a warp is `ahead` of the products; programs `resident` on a multiprocessor; the fewest steps of a piece of K.
    `wide`: products of four warps together. `turns`: tiles of outputs that a program does one after another.
    `burst`: codes of `ahead` steps are asked for at once, not a step's after a step. `apart`: pieces are
    added by a launch of their own, on all multiprocessors, instead of by the last piece of each tile.
    `phases`: parts of x that are waited for one after another."""

    warps: int = 4
    rounds: int = 1
    tokens: int = 8
    ahead: int = 2
    resident: int = 5
    fewest: int = 2
    wide: bool = False
    turns: int = 1
    burst: bool = False
    apart: bool = False
    phases: int = 1

    @property
    def outputs(self) -> int:
        return 16 * self.warps * self.rounds

    def most_steps(self) -> int:
        """Of x resident in shared memory, in whole turns of the loop."""
        steps = SHARED // self.resident // (2 * STEP * self.tokens)
        return max(1, steps // self.ahead) * self.ahead

    def cut(self, outputs: int, inputs: int, n: int) -> tuple[int, int]:
        """Pieces of K and the steps of each, whole turns of the loop: as many pieces as run at once, none empty."""
        steps = triton.cdiv(inputs, STEP)
        tiles = triton.cdiv(outputs, self.outputs * self.turns) * triton.cdiv(n, self.tokens)
        wanted = max(1, min(MULTIPROCESSORS * self.resident // tiles, steps // self.fewest))
        each = min(triton.cdiv(triton.cdiv(steps, wanted), self.ahead) * self.ahead, self.most_steps())
        return triton.cdiv(steps, each), each


NARROW = 12 << 20
"""Codes of a weight below which its pieces are small, and starting and joining them is most of the time."""


def direct_tile_for(n: int, outputs: int, inputs: int) -> DirectTile | None:
    """The configuration for n tokens, the best measured for 1, 16, 64 and 128 tokens, and others as the next of
    these; None where codes had better go through shared memory."""
    narrow = outputs * inputs < NARROW
    if n <= 16:
        tile = DirectTile(tokens=8 if n <= 8 else 16)
        if narrow and (n <= 8 or inputs > 2048):
            return replace(tile, ahead=1, fewest=1)
        return replace(tile, resident=4) if n > 8 and outputs > 16384 else tile
    if n <= 32:
        return DirectTile(warps=8, tokens=32, resident=2)
    if narrow:
        more = n > 64 and inputs > 2048
        return DirectTile(warps=8 if more else 4, tokens=64, resident=2 if more else 3, wide=True)
    if n <= 64:
        return DirectTile(warps=16, tokens=64, resident=1, wide=True)
    return DirectTile(warps=16, tokens=64, resident=1, wide=True, turns=2) if outputs > 16384 else None


def fitting(tile: DirectTile, outputs: int, *borders: int) -> DirectTile:
    """The tile, or one of fewer outputs where a program would cross a border between groups or weights, or turn to a
    tile that is not a whole one."""
    while any(border % tile.outputs for border in borders) and tile.outputs > 64:
        tile = replace(tile, rounds=tile.rounds // 2) if tile.rounds > 1 else replace(tile, warps=tile.warps // 2)
    for border in borders:
        if border % tile.outputs:
            raise OpsError(f"linear: outputs of a group or weight are a multiple of {tile.outputs}, got {border}")
    while any(whole % (tile.outputs * tile.turns) for whole in (outputs, *borders)) and tile.turns > 1:
        tile = replace(tile, turns=tile.turns - 1)
    return tile


JOINED = ("partials", "out", "cos", "sin", "count", "outputs", "out_stride")
"""Arguments of a product that the launch which adds its pieces takes as well."""


@dataclass(frozen=True)
class DirectLaunch:
    """`grid`: parts of the tokens, tiles of outputs, pieces of K."""

    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    constants: dict[str, int]
    options: dict[str, Any]

    def run(self) -> None:
        self.multiply()
        if self.constants["APART"]:
            self.join()

    def multiply(self) -> None:
        kernels.direct_kernel[self.grid](**self.arguments, **self.constants, **self.options)

    def join(self) -> None:
        """Add the pieces, where the product has left them."""
        known = {name: self.constants[name] for name in ("WIDTH", "TURNED", "FORM", "PIECES", "BN")}
        given = {name: self.arguments[name] for name in JOINED}
        rows = 16 * self.constants["WARPS"] * self.constants["ROUNDS"]
        join_kernel[(triton.cdiv(given["outputs"], 32), self.grid[0])](**given, **known, ROWS=rows, BO=32, **EXACT)


def prepare_direct(
    x: Tensor, weight: Tensor, scale: Tensor, out: Tensor, counters: Tensor, angles: tuple[Tensor, Tensor],
    finish: Mapping[str, int], tile: DirectTile, group: int = 0, border: int = 0, steps: tuple[int, int] = (0, 0),
    early: bool = False,
) -> DirectLaunch:  # fmt: skip
    """`finish`: the kernel's constants of what becomes of a result. `group`: outputs of one, `border`: of the first of
    two weights, or 0. `steps`: bytes from a weight and its scale to a second one's. `early`: see `Workspace`."""
    n, outputs, inputs = x.shape[0], out.shape[1], weight.shape[1]
    if x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()  # copied 16 bytes at a time
    tile = fitting(tile, outputs, group, border)
    pieces, each = tile.cut(outputs, inputs, n)
    grid = (triton.cdiv(n, tile.tokens), triton.cdiv(outputs, tile.outputs * tile.turns), pieces)
    tiles = grid[0] * grid[1] * tile.turns
    if tiles > counters.shape[0]:
        raise OpsError(f"a product of {tiles} tiles: the workspace counts {counters.shape[0]}")
    partials = out
    if pieces > 1:
        sums = tiles * pieces * tile.outputs * tile.tokens
        partials = torch.empty(sums, dtype=torch.float32, device=x.device)
    arguments = {
        "x": x, "weight": weight.view(torch.uint8), "scale": scale.view(torch.uint8), "out": out,
        "partials": partials, "counters": counters, "cos": angles[0], "sin": angles[1],
        "count": n, "outputs": outputs, "x_stride": x.stride(0), "x_group": inputs, "out_stride": out.stride(0),
        "weight_step": steps[0], "scale_step": steps[1], "steps": each,
    }  # fmt: skip
    known = {**constants(tile, inputs, pieces, each), "GROUP": group, "SECOND": border, "EARLY": early, **finish}
    return DirectLaunch(grid, arguments, known, {**options(tile), "launch_pdl": early})


def constants(tile: DirectTile, inputs: int, pieces: int, each: int) -> dict[str, int]:
    return {
        "INPUTS": inputs, "PIECES": pieces, "STEPS": each, "AHEAD": tile.ahead, "WARPS": tile.warps,
        "ROUNDS": tile.rounds, "BN": tile.tokens, "WIDE": tile.wide,
        "TURNS": tile.turns, "BURST": tile.burst, "APART": tile.apart and pieces > 1, "PHASES": tile.phases,
    }  # fmt: skip


def options(tile: DirectTile) -> dict[str, Any]:
    """A program gets no more of a multiprocessor's 65,536 registers than its neighbours leave it; products and sums
    are rounded one by one, as by the launches that turn and round."""
    most = min(255, 65536 // (32 * tile.warps * tile.resident) // 8 * 8)
    return {"maxnreg": most, "num_warps": tile.warps, "enable_fp_fusion": False}


# What an H200 is asked for at the released sizes

_SIGNATURE = {
    "x": "*bf16", "weight": "*u8", "scale": "*u8", "out": "*bf16", "partials": "*fp32", "counters": "*i32",
    "cos": "*fp32", "sin": "*fp32", "count": "i32", "outputs": "i32", "x_stride": "i32", "x_group": "i32",
    "out_stride": "i32", "weight_step": "i64", "scale_step": "i64", "steps": "i32",
}  # fmt: skip


def _specimen(name: str, n: int, inputs: int, outputs: int, group: int = 0, border: int = 0, **more: int) -> Specimen:
    tile = fitting(direct_tile_for(n, outputs, inputs) or DirectTile(), outputs, group, border)
    pieces, each = tile.cut(outputs, inputs, n)
    known = {
        **constants(tile, inputs, pieces, each), "GROUP": group, "SECOND": border, "EARLY": False,
        "WIDTH": 2, "TURNED": 0, "FORM": 0, **more,
    }  # fmt: skip
    limits = {name: value for name, value in options(tile).items() if name != "num_warps"}
    multiples = ("outputs", "x_stride", "x_group", "out_stride", "weight_step", "scale_step")
    kernel = kernels.direct_kernel
    return Specimen(f"products_direct {name}", kernel, _SIGNATURE, known, tile.warps, 1, True, limits, multiples)


SPECIMENS = [
    _specimen("wq_b turned, 1 token", 1, 1280, 32768, WIDTH=512, TURNED=32),
    _specimen("wq_a and wkv, 1 token", 1, 5120, 1792, border=1280),
    _specimen("wo_a rounded, 16 tokens", 16, 4096, 8192, group=1024, WIDTH=1024, FORM=1),
    _specimen("index queries, 16 tokens", 16, 1280, 4096, WIDTH=128, TURNED=32, FORM=3),
    _specimen("wo_b, 32 tokens", 32, 8192, 5120),
    _specimen("wo_b, 64 tokens", 64, 8192, 5120),
    _specimen("wq_a and wkv, 128 tokens", 128, 5120, 1792, border=1280),
    _specimen("wq_b turned, 128 tokens", 128, 1280, 32768, WIDTH=512, TURNED=32),
    _specimen("wo_a, pieces added apart, 64 tokens", 64, 4096, 8192, group=1024, APART=True),
    Specimen(
        "products_direct joined, rounded, 64 tokens", join_kernel, _SIGNATURE,
        {"WIDTH": 1024, "TURNED": 0, "FORM": 1, "PIECES": 4, "ROWS": 256, "BO": 32, "BN": 64},
        options=EXACT, multiples=("outputs", "out_stride"),
    ),
]  # fmt: skip
