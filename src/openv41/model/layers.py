"""The layers that everything else is made of: Linear, Embedding, RMSNorm, Rotary.

Parameters are created empty, in the formats they are stored in: load a checkpoint, or fill them by name.
"""

import math
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from openv41.config import Config
from openv41.errors import OpsError
from openv41.formats import TILE, WINDOW, BlockFormat
from openv41.ops import Ops

Stored = Literal["fp8", "fp4", "bf16", "fp32"]


def stored_in(config: Config) -> Stored:
    """The format of a Linear's weight where nothing else is said: it follows `config.dtype`."""
    return "fp8" if config.dtype == "fp8" else "bf16"


def empty_weight(stored: Stored, *shape: int) -> tuple[nn.Parameter, nn.Parameter | None]:
    """A weight [..., outputs, inputs] and its scale as they are stored: fp8 with one e8m0 scale per 32 x 32 tile, fp4
    as bytes [..., outputs, inputs / 2] with one per row and 32 inputs, bf16 and fp32 without."""
    *stack, outputs, inputs = shape
    if stored == "fp8":
        tiles = (*stack, -(-outputs // TILE), -(-inputs // TILE))
        return frozen(torch.empty(shape, dtype=torch.float8_e4m3fn)), frozen(_empty_scale(tiles))
    if stored == "fp4":
        codes = torch.empty((*stack, outputs, inputs // 2), dtype=torch.uint8)
        return frozen(codes), frozen(_empty_scale((*stack, outputs, inputs // TILE)))
    return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16 if stored == "bf16" else torch.float32)), None


def _empty_scale(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float8_e8m0fnu)


def frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


class Linear(nn.Module):
    """y = x @ weight.T. `stored` is the weight's format; a quantised weight quantises the activation as well."""

    def __init__(self, inputs: int, outputs: int, stored: Stored, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.weight, self.scale = empty_weight(stored, outputs, inputs)

    @property
    def stored(self) -> tuple[Tensor, Any]:
        """As operations take it: the weight, and what stands beside it: scales, or a master's format."""
        return self.weight, self.scale

    @property
    def reads(self) -> BlockFormat | None:
        """What activations are rounded to on their way in."""
        return None if self.scale is None else WINDOW

    def forward(self, x: Float[Tensor, "n inputs"]) -> Float[Tensor, "n outputs"]:
        return self.ops.linear(x, *self.stored)


class WideLinear(nn.Module):
    """A linear map whose result stays in the accumulator's precision. The weight is not quantised."""

    def __init__(self, inputs: int, outputs: int, stored: Literal["bf16", "fp32"], ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.weight, _ = empty_weight(stored, outputs, inputs)

    def forward(self, x: Float[Tensor, "n inputs"]) -> Float[Tensor, "n outputs"]:
        return self.ops.linear_wide(x, self.weight)


class Embedding(nn.Module):
    """A row for every id of the vocabulary."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width, dtype=torch.bfloat16))


class RMSNorm(nn.Module):
    """x over its root mean square, times a learned weight. With the published eps of 1e-20 a zero row stays zero."""

    def __init__(self, width: int, eps: float, ops: Ops, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.ops, self.eps = ops, eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    @property
    def stored(self) -> tuple[Tensor, float]:
        """As operations take it: weight and eps."""
        return self.weight, self.eps

    def forward(self, x: Float[Tensor, "*n width"]) -> Float[Tensor, "*n width"]:
        return self.ops.rms_norm(x, self.weight, self.eps)


class Rotary:
    """Cosines and sines of a branch's rotary angles, worked out for the positions asked for and kept.

    The angle is the float32 product of position and frequency, and cosine and sine are taken of that float32 value:
    this rounding is part of the model (at position 1,000,000 an exact angle differs by 0.03 radians).
    With YaRN (`original` > 0) frequencies that turn fewer than `beta_slow` times within the original context are
    divided by `factor`, those that turn more than `beta_fast` times are kept, and a linear ramp lies between. There is
    no temperature (mscale).
    """

    PIECE = 64  # positions worked out at a time, always the same ones together
    KEPT = 4  # tensors of positions whose angles are kept: a step's tokens, its groups by ratio, a draft's blocks

    def __init__(
        self,
        width: int,
        theta: float,
        original: int = 0,
        factor: float = 1.0,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
    ) -> None:
        frequencies = 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width))
        if original > 0:

            def corner(rotations: float) -> float:
                return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

            low = max(math.floor(corner(beta_fast)), 0)
            high = min(math.ceil(corner(beta_slow)), width - 1)
            ramp = torch.arange(width // 2, dtype=torch.float32, device="cpu") - low
            kept = 1 - (ramp / (high - low if high > low else 0.001)).clamp(0, 1)
            frequencies = frequencies / factor * (1 - kept) + frequencies * kept
        self.frequencies = frequencies
        self.pieces: dict[int, tuple[Tensor, Tensor]] = {}
        self.latest: list[tuple[Tensor, tuple[Tensor, Tensor]]] = []
        self.tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @classmethod
    @lru_cache(maxsize=8)
    def for_branch(cls, config: Config, compressed: bool) -> "Rotary":
        """Layers with compressed KV turn everything, their window included, by YaRN angles; the others by plain ones.

        All layers of a branch share one object: these are constants of the configuration.
        """
        if not compressed:
            return cls(config.rope_head_dim, config.rope_theta)
        return cls(
            config.rope_head_dim,
            config.compress_rope_theta,
            config.original_seq_len,
            config.rope_factor,
            config.beta_fast,
            config.beta_slow,
        )

    def at(self, positions: Int[Tensor, "n"]) -> tuple[Float[Tensor, "n half"], Float[Tensor, "n half"]]:
        """Cosine and sine [n, width / 2], float32, of each position."""
        for known, angles in self.latest:  # forty layers ask for the same few tensors in turn
            if known is positions:
                return angles
        angles = self._at(positions)
        self.latest = [*self.latest[1 - self.KEPT :], (positions, angles)]
        return angles

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if positions.device.type != "cpu":
            return self._on(positions)
        numbers, which = (positions // self.PIECE).unique(return_inverse=True)
        tables = [self._piece(number) for number in numbers.tolist()] or [self._piece(0)]
        cos, sin = (torch.stack(parts)[which, positions % self.PIECE] for parts in zip(*tables, strict=True))
        return cos, sin

    def _on(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """From a table on the device, of all positions up to the furthest that was asked for, or twice as far as
        before. The device is asked for one number; while a graph is captured it cannot be, and `hold` must have been
        called for enough positions."""
        table = self.tables.get(positions.device)
        if positions.is_cuda and torch.cuda.is_current_stream_capturing():
            if table is None:
                raise OpsError("a step that is captured looks its angles up in a table: call hold before")
        else:
            needed = int(positions.max()) + 1 if len(positions) else 1
            if table is None or len(table[0]) < needed:
                table = self.hold(max(needed, 2 * len(table[0]) if table else 0), positions.device)
        cos, sin = table
        return cos[positions], sin[positions]

    def hold(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """A table on a device of the angles of the first `count` positions and a few more; it stays for later."""
        pieces = (self._piece(number) for number in range(-(-count // self.PIECE)))
        cosines, sines = zip(*pieces, strict=True)
        self.tables[device] = torch.cat(cosines).to(device), torch.cat(sines).to(device)
        return self.tables[device]

    def _piece(self, number: int) -> tuple[Tensor, Tensor]:
        if number not in self.pieces:
            positions = torch.arange(number * self.PIECE, (number + 1) * self.PIECE, dtype=torch.float32, device="cpu")
            angles = torch.outer(positions, self.frequencies)
            turned = torch.polar(torch.ones_like(angles), angles)  # its cosines, not torch.cos's, are the published
            self.pieces[number] = turned.real.contiguous(), turned.imag.contiguous()
        return self.pieces[number]
