"""Launches of `kernels/products.py`: linear maps with weights as they are stored.

Few tokens: one launch reads the weight once, as fp8, whatever the memory gives; it may also turn and round the result.
Many tokens: the weight is written out as bf16 (3 bytes a value, of 2 to 8 per cent of the product's time) and the
library multiplies. Sums are float32 in an order that the shape alone decides: results repeat to the bit, and differ
from the reference's exact sums in the last bit of few bf16 values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from openv41.errors import OpsError
from openv41.formats import INDEX, WINDOW, BlockFormat
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.hopper.products_direct import DirectTile, direct_tile_for, prepare_direct
from openv41.ops.hopper.rows import CODES, EXACT, check_angles, rotate, rotate_quantise, round_activation
from openv41.ops.kernels import products as kernels

DIRECT = 256
"""Up to so many tokens the weight is dequantised inside the product: beyond it, writing it out costs less. Estimated
from bytes and matrix rates, not measured."""

TO_REGISTERS = not triton.knobs.runtime.interpret
"""Whether fp8 weights go from memory to registers where no tile is given and `products_direct` has one for them. Under
Triton's interpreter they never do: it has no Gluon."""

MULTIPROCESSORS = 132
"""Of an H200. A launch is cut into pieces as far as all of them run at once: a second round would be a short one."""

STEPS = 4
"""Steps along K that a piece of a product has at least: fewer would not fill its pipeline."""


@dataclass(frozen=True)
class Tile:
    """What one program works on: outputs, tokens, values of K at a time, steps in flight, warps. `resident`: programs
    that fit on a multiprocessor, by their shared memory and registers."""

    outputs: int = 64
    tokens: int = 16
    k: int = 128
    stages: int = 4
    warps: int = 4
    resident: int = 5


@dataclass(frozen=True)
class Workspace:
    """Counters by which the pieces of a product find the last of them: zero between launches. A workspace serves one
    stream; products on two streams at once need two."""

    counters: Tensor
    early: bool = False
    """A product asks for its weights while the launch before it is still at work, which must not have written them."""

    @classmethod
    def on(cls, device: str | torch.device, early: bool = False) -> "Workspace":
        """Counters for 8,192 tiles: more than any product of few tokens has."""
        return cls(torch.zeros(8192, dtype=torch.int32, device=device), early)


@dataclass(frozen=True)
class After:
    """What becomes of a result before it is written. `width`: of a head; with `cos` and `sin` [n, half] the tails of
    heads are turned. `form`: blocks of 32 are then rounded to it, WINDOW for the next quantised map, INDEX for queries.
    """

    width: int
    cos: Float[Tensor, "n half"] | None = None
    sin: Float[Tensor, "n half"] | None = None
    form: BlockFormat | None = None


def linear(
    x: Float[Tensor, "n inputs"],
    weight: Tensor,
    scale: Tensor | None,
    work: Workspace,
    rounded: bool = False,
    after: After | None = None,
    tile: Tile | DirectTile | None = None,
) -> Float[Tensor, "n outputs"]:
    """x @ weight.T with an fp8 weight and its scales, or (scale None) a bf16 one. An fp8 weight meets an activation
    rounded to fp8; `rounded`: x is so already, by `round_activation`, and need not be again."""
    _check("linear", x, weight, scale)
    if scale is not None and not rounded:
        x = round_activation(x)
    if x.shape[0] > DIRECT and tile is None:
        return _finished(F.linear(x, decode_weight(weight, scale)), after)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=x.device)
    _launch(x, weight, scale, out, work, 0, after, tile)
    return out


def linear_pair(
    x: Float[Tensor, "n inputs"],
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
    work: Workspace,
    rounded: bool = False,
    tile: Tile | DirectTile | None = None,
) -> Float[Tensor, "n both"]:
    """Two linear maps of one x, fp8 weights and scales, in one launch; their results side by side."""
    for weight, scale in (first, second):
        _check("linear_pair", x, weight, scale)
    border, outputs = first[0].shape[0], first[0].shape[0] + second[0].shape[0]
    x = x if rounded else round_activation(x)
    out = torch.empty((x.shape[0], outputs), dtype=torch.bfloat16, device=x.device)
    if x.shape[0] > DIRECT and tile is None:
        values = torch.empty((outputs, x.shape[1]), dtype=torch.bfloat16, device=x.device)
        decode_weight(*first, values[:border])
        decode_weight(*second, values[border:])
        return torch.mm(x, values.mT, out=out)  # one product of both: fewer rounds of tiles than two
    _launch(x, *first, out, work, 0, None, tile, second)
    return out


def linear_wide(
    x: Float[Tensor, "n inputs"], weight: Tensor, work: Workspace, tile: Tile | DirectTile | None = None
) -> Float[Tensor, "n outputs"]:
    """bf16 x @ weight.T in float32, the weight float32 or bf16. A float32 weight is split into three bf16 parts, which
    hold all of its bits: the sums are those of a float32 product."""
    _check("linear_wide", x, weight, None)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, out, work, 0, None, tile)
    return out


def grouped_linear(
    x: Float[Tensor, "n g inputs"],
    weight: Tensor,
    scale: Tensor | None,
    work: Workspace,
    after: After | None = None,
    tile: Tile | DirectTile | None = None,
) -> Float[Tensor, "n g outputs"]:
    """Each group of x with its own rows of weight [g * outputs, inputs]; the activation is not quantised."""
    _check("grouped_linear", x, weight, scale)
    n, groups, _ = x.shape
    outputs = weight.shape[0] // groups
    out = torch.empty((n, groups, outputs), dtype=torch.bfloat16, device=x.device)
    if n > DIRECT and tile is None:
        values = decode_weight(weight, scale).unflatten(0, (groups, outputs))
        for group in range(groups):  # each into its place: a batched product would have to be copied there
            torch.mm(x[:, group], values[group].mT, out=out[:, group])
        return _finished(out.flatten(1), after).view(n, groups, outputs)
    _launch(x.flatten(1), weight, scale, out.flatten(1), work, groups, after, tile)
    return out


def decode_weight(weight: Tensor, scale: Tensor | None, out: Tensor | None = None) -> Float[Tensor, "o i"]:
    """An fp8 weight as bf16, exactly, into `out` where it is given (contiguous); a bf16 one as it is."""
    if scale is None:
        return weight
    outputs, inputs = weight.shape
    values = torch.empty((outputs, inputs), dtype=torch.bfloat16, device=weight.device) if out is None else out
    kernels.decode_weight_kernel[(triton.cdiv(outputs, 32), triton.cdiv(inputs, 256))](
        weight.view(torch.uint8), scale.view(torch.uint8), values, outputs, inputs, BO=32, BK=256, num_warps=4
    )
    return values


def _finished(y: Float[Tensor, "n outputs"], after: After | None) -> Float[Tensor, "n outputs"]:
    """The same as the kernel does to a result before it writes it, in launches of its own."""
    if after is None:
        return y
    heads = y.unflatten(1, (-1, after.width))
    if after.cos is None or after.sin is None:
        return y if after.form is None else _round_to(y, after.form)
    if after.form is INDEX:
        return rotate_quantise(heads, after.cos, after.sin).flatten(1)
    turned = rotate(heads, after.cos, after.sin, in_place=True).flatten(1)
    return turned if after.form is None else _round_to(turned, after.form)


def _round_to(y: Tensor, form: BlockFormat) -> Tensor:
    if form is not WINDOW:
        raise OpsError(f"linear: results that are not turned are rounded to {WINDOW.name} only, not to {form.name}")
    return round_activation(y)


def _launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    out: Tensor,
    work: Workspace,
    groups: int,
    after: After | None,
    tile: Tile | DirectTile | None,
    second: tuple[Tensor, Tensor] | None = None,
) -> None:
    n, outputs, inputs = x.shape[0], out.shape[1], weight.shape[1]
    if n == 0:
        return
    each, border = outputs // groups if groups else 0, 0 if second is None else weight.shape[0]
    if tile is None and scale is not None and TO_REGISTERS:
        tile = direct_tile_for(n, outputs, inputs)
    if isinstance(tile, DirectTile):
        if scale is None:
            raise OpsError("linear: a DirectTile is for fp8 weights with scales")
        finish, steps = _finish(after, n), _steps(weight, scale, second)
        angles = _angles(x, after)
        counters, early = work.counters, work.early
        prepare_direct(x, weight, scale, out, counters, angles, finish, tile, each, border, steps, early).run()
        return
    if tile is None:
        tile = tile_for(n, weight.dtype)
        if (each or border) % tile.outputs:  # a tile holds outputs of one group, and of one weight
            tile = replace(tile, outputs=64)
    if each % tile.outputs or border % tile.outputs:
        whose = "a group" if each else "the first weight"
        raise OpsError(f"linear: outputs of {whose} are a multiple of {tile.outputs}, got {each or border}")
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(n, tile.tokens))
    pieces = pieces_for(grid[0] * grid[1], inputs, tile)
    if grid[0] * grid[1] > work.counters.shape[0]:
        raise OpsError(f"a product of {grid[0] * grid[1]} tiles: the workspace counts {work.counters.shape[0]}")
    partials = out
    if pieces > 1:
        sums = grid[0] * grid[1] * pieces * tile.outputs * tile.tokens
        partials = torch.empty(sums, dtype=torch.float32, device=x.device)
    kernels.product_kernel[(*grid, pieces)](
        x, weight if scale is None else weight.view(torch.uint8), x if scale is None else scale.view(torch.uint8),
        out, partials, work.counters, *_angles(x, after), n, outputs, x.stride(0), inputs, out.stride(0),
        *_steps(weight, scale, second), INPUTS=inputs, STORED=STORED[weight.dtype], GROUP=each, SECOND=border,
        WIDE=out.dtype == torch.float32, PIECES=pieces,
        BO=tile.outputs, BN=tile.tokens, BK=tile.k, STAGES=tile.stages, **_finish(after, n), **_options(tile),
    )  # fmt: skip


def _steps(weight: Tensor, scale: Tensor | None, second: tuple[Tensor, Tensor] | None) -> tuple[int, int]:
    """Bytes from a weight and its scale to a second one's."""
    if second is None or scale is None:
        return 0, 0
    return second[0].data_ptr() - weight.data_ptr(), second[1].data_ptr() - scale.data_ptr()


def _options(tile: Tile) -> dict[str, Any]:
    """A program gets no more of a multiprocessor's 65,536 registers than its neighbours leave it."""
    most = min(255, 65536 // (32 * tile.warps * tile.resident) // 8 * 8)
    return {**EXACT, "maxnreg": most, "num_warps": tile.warps, "num_stages": tile.stages}


def _angles(x: Tensor, after: After | None) -> tuple[Tensor, Tensor]:
    return (x, x) if after is None or after.cos is None or after.sin is None else (after.cos, after.sin)


def _finish(after: After | None, n: int) -> dict[str, int]:
    if after is None:
        return {"WIDTH": 2, "TURNED": 0, "FORM": 0}
    if after.form is not None and after.form not in (WINDOW, INDEX):
        raise OpsError(f"linear: results are rounded in blocks of 32, {after.form.name} has others")
    if after.width % 2 or (after.form is not None and after.width % 32):
        raise OpsError(f"linear: a head's width is even, and whole blocks if it is rounded, got {after.width}")
    turned = 0
    if after.cos is not None and after.sin is not None:
        check_angles("linear", after.cos, after.sin, n, after.width)
        turned = after.cos.shape[1]
    return {"WIDTH": after.width, "TURNED": turned, "FORM": 0 if after.form is None else CODES[after.form.name]}


STORED: Mapping[torch.dtype, int] = {torch.bfloat16: 0, torch.float8_e4m3fn: 1, torch.float32: 2}
"""The kernel's numbers of the weights' types."""


def tile_for(n: int, dtype: torch.dtype) -> Tile:
    """The configuration for n tokens. 64 outputs are what one warpgroup multiplies; many tokens take 128, so that the
    tokens are read half as often."""
    if dtype == torch.float32:
        return Tile(tokens=min(64, max(16, triton.next_power_of_2(n))), k=64, stages=3, resident=3)
    if n > 64:
        return Tile(outputs=128, tokens=128, k=64, warps=8, resident=2)
    if n > 32:
        return Tile(outputs=128, tokens=64, k=64, warps=8, resident=3)
    twice = dtype == torch.bfloat16  # as many bytes of weight
    return Tile(tokens=16 if n <= 16 else 32, resident=2 if twice else 5 if n <= 16 else 3)


def pieces_for(tiles: int, inputs: int, tile: Tile) -> int:
    """Pieces of K: as many as run at once, if each of them has steps enough."""
    steps = triton.cdiv(inputs, tile.k)
    pieces = max(1, min(MULTIPROCESSORS * tile.resident // tiles, steps // STEPS))
    return triton.cdiv(steps, triton.cdiv(steps, pieces))  # none without a step


def _check(op: str, x: Tensor, weight: Tensor, scale: Tensor | None) -> None:
    inputs = weight.shape[1]
    kinds = (torch.float8_e4m3fn,) if scale is not None else (torch.bfloat16, torch.float32)
    if weight.dtype not in kinds or (op != "linear_wide" and weight.dtype == torch.float32):
        raise OpsError(f"{op}: no kernel for a weight of {weight.dtype} with{'out' if scale is None else ''} scale")
    if x.dtype != torch.bfloat16 or x.shape[-1] != inputs or x.stride(-1) != 1:
        raise OpsError(f"{op}: x is bf16 [.., {inputs}] with neighbouring entries, got {x.dtype} {tuple(x.shape)}")
    if inputs % 32 or not weight.is_contiguous():
        raise OpsError(f"{op}: a contiguous weight with a multiple of 32 inputs, got {tuple(weight.shape)}")
    if scale is not None and scale.shape != (triton.cdiv(weight.shape[0], 32), inputs // 32):
        raise OpsError(f"{op}: a scale for each tile of 32 x 32 of {tuple(weight.shape)}, got {tuple(scale.shape)}")


# What an H200 is asked for at the released sizes

_SIGNATURE = {
    "x": "*bf16", "weight": "*u8", "scale": "*u8", "out": "*bf16", "partials": "*fp32", "counters": "*i32",
    "cos": "*fp32", "sin": "*fp32", "count": "i32",
}  # fmt: skip
_WEIGHTS = {0: "*bf16", 1: "*u8", 2: "*fp32"}


def _specimen(name: str, n: int, inputs: int, outputs: int, stored: int = 1, **constants: Any) -> Specimen:
    """As a launch makes it; whole numbers that a launch knows to be multiples of 16 are given as they are."""
    dtype = next(dtype for dtype, number in STORED.items() if number == stored)
    tile = tile_for(n, dtype)
    tiles = triton.cdiv(outputs, tile.outputs) * triton.cdiv(n, tile.tokens)
    known = {
        "outputs": outputs, "INPUTS": inputs, "x_stride": inputs, "x_group": inputs, "out_stride": outputs,
        "weight_step": 0, "scale_step": 0, "STORED": stored, "GROUP": 0, "WIDE": False, "SECOND": 0,
        "WIDTH": 2, "TURNED": 0, "FORM": 0,
        "PIECES": pieces_for(tiles, inputs, tile), "BO": tile.outputs, "BN": tile.tokens, "BK": tile.k,
        "STAGES": tile.stages, **constants,
    }  # fmt: skip
    kinds = {**_SIGNATURE, "weight": _WEIGHTS[stored], "out": "*fp32" if known["WIDE"] else "*bf16"}
    options = {name: value for name, value in _options(tile).items() if name not in ("num_warps", "num_stages")}
    return Specimen(f"products {name}", kernels.product_kernel, kinds, known, tile.warps, tile.stages, False, options)


SPECIMENS = [
    _specimen("wq_b turned, 16 tokens", 16, 1280, 32768, WIDTH=512, TURNED=32),
    _specimen("wo_a rounded, 16 tokens", 16, 4096, 8192, GROUP=1024, x_stride=32768, WIDTH=1024, FORM=1),
    _specimen("wq_a and wkv, 16 tokens", 16, 5120, 1792, weight_step=1 << 32, scale_step=1 << 32, SECOND=1280),
    _specimen("wo_b, 64 tokens", 64, 8192, 5120),
    _specimen("wo_b, 128 tokens", 128, 8192, 5120),
    _specimen("index queries, 128 tokens", 128, 1280, 4096, WIDTH=128, TURNED=32, FORM=3),
    _specimen("compressor, 64 tokens", 64, 5120, 512, stored=2, WIDE=True),
    _specimen("bf16, 16 tokens", 16, 5120, 512, stored=0),
    replace(
        _specimen("decode weight", 16, 1280, 32768),
        kernel=kernels.decode_weight_kernel,
        signature={"weight": "*u8", "scale": "*u8", "out": "*bf16"},
        constants={"outputs": 32768, "inputs": 1280, "BO": 32, "BK": 256},
    ),
]
