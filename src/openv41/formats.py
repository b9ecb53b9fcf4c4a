"""Number formats: how values are packed into fp8 and fp4, unpacked again, and rounded in place.

Four block formats occur in the model. Each gives a run of neighbouring values one shared scale:

    name     values  scale            block  used for
    WINDOW   e4m3    e8m0 (2^k)       32     activations of every quantised linear, window KV
    INDEX    e2m1    e8m0 (2^k)       32     index queries and keys
    LATENT   e2m1    e4m3             16     compressed KV
    FLOAT8   e4m3    float32          64     accepted by the published code, unused by the released model

Weights are stored as e4m3 with one e8m0 scale per 32 x 32 tile, or (experts) as e2m1 with one e8m0 scale per row and
32 inputs. Two e2m1 codes share a byte, the even element in the low nibble.

Everything here is a pure function on tensors, computed in float32 as published, and follows the published rounding:
to nearest, ties to the even code. Rows with infinities or NaN give unspecified values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TILE = 32
"""Side of a weight tile, and the inputs that share a scale in an fp4 weight's row."""


@dataclass(frozen=True)
class BlockFormat:
    """A way to store a row as codes plus one scale per `block` values.

    `scale_of(amax)`: the scale, as stored, of a block with that largest magnitude. `encode(x)`: nearest codes of values
    [..., k] that have been divided by their scales; `decode(codes)` the values of codes; `nearest(x)` both in one.
    `stored_as`: the types of codes and scales.
    """

    name: str
    block: int
    codes_per_byte: int
    scale_of: Callable[[Tensor], Tensor]
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    nearest: Callable[[Tensor], Tensor]
    stored_as: tuple[torch.dtype, torch.dtype]

    def pack(self, x: Float[Tensor, "*rows k"]) -> tuple[Tensor, Tensor]:
        """Codes, and scales [..., k / block], of the rows of `x`."""
        parts, scale = self._scaled(x)
        return self.encode(parts.flatten(-2)), scale

    def unpack(self, codes: Tensor, scale: Tensor) -> Float[Tensor, "*rows k"]:
        """The stored rows in float32."""
        return (self.decode(codes).unflatten(-1, (-1, self.block)) * scale.float().unsqueeze(-1)).flatten(-2)

    def round(self, x: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows k"]:
        """What comes back after storing `x`: the published quantise-and-dequantise in place, in `x`'s dtype."""
        parts, scale = self._scaled(x)
        return (self.nearest(parts) * scale.float().unsqueeze(-1)).flatten(-2).to(x.dtype)

    def _scaled(self, x: Tensor) -> tuple[Float[Tensor, "*rows b block"], Tensor]:
        parts = x.float().unflatten(-1, (-1, self.block))
        scale = self.scale_of(parts.abs().amax(-1))
        return parts / scale.float().unsqueeze(-1), scale

    def to_records(self, x: Float[Tensor, "*rows k"]) -> UInt8[Tensor, "*rows bytes"]:
        """Each row of `x` as the bytes it is stored in: its codes, then its scales."""
        codes, scale = self.pack(x)
        return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), -1)

    def from_records(self, records: UInt8[Tensor, "*rows bytes"]) -> Float[Tensor, "*rows k"]:
        """The rows' values in float32."""
        code_type, scale_type = self.stored_as
        total = records.shape[-1]  # k / codes_per_byte + k / block * scale bytes
        count = total * self.block // (self.block + self.codes_per_byte * scale_type.itemsize)
        codes, scale = records.split((count, total - count), -1)
        return self.unpack(codes.contiguous().view(code_type), scale.contiguous().view(scale_type))

    def record_bytes(self, width: int) -> int:
        """Bytes of one stored row of `width` values and its scales."""
        return width // self.codes_per_byte + width // self.block * self.stored_as[1].itemsize


# Scales: from a block's largest magnitude


def ceil_power_of_two(x: Float[Tensor, "*blocks"]) -> Tensor:
    """The e8m0 value of the smallest power of two not below `x` (float32, positive), read off its exponent bits."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    return (exponent + ((bits & 0x7FFFFF) != 0)).to(torch.uint8).view(torch.float8_e8m0fnu)


def fp8_scale(amax: Float[Tensor, "*blocks"]) -> Tensor:
    """Never below that of 1e-4: an all-zero block has 2^-22."""
    return ceil_power_of_two(fp8_float_scale(amax))


def fp8_float_scale(amax: Float[Tensor, "*blocks"]) -> Float[Tensor, "*blocks"]:
    return amax.clamp_min(1e-4) * (1 / E4M3_MAX)


def fp4_scale(amax: Float[Tensor, "*blocks"]) -> Tensor:
    """An all-zero block has 2^-126."""
    return ceil_power_of_two(amax.clamp_min(6 * 2.0**-126) * (1 / E2M1_MAX))


def fp4_e4m3_scale(amax: Float[Tensor, "*blocks"]) -> Tensor:
    """The largest magnitude / 6, rounded to nearest: it may be the smaller neighbour, and then the largest values
    saturate at 6 scales. It stops at 448, so magnitudes beyond 2,688 saturate too."""
    return to_e4m3(amax.clamp_min(6 * 2.0**-9) / E2M1_MAX)


# Values: once they have been divided by their scale


def to_e4m3(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Nearest e4m3 value, ties to even; beyond +-448 saturates (the bare cast would give NaN)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def to_e2m1(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Nearest e2m1 value, ties to the even code, beyond +-6 saturating; zero keeps its sign.

    Neighbours are 0.5 apart up to 2, then 1, from 4 on 2, and `round` takes ties to the even multiple.
    """
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round().mul_(step).clamp_(-E2M1_MAX, E2M1_MAX)


def e2m1_codes(x: Float[Tensor, "*any"]) -> UInt8[Tensor, "*any"]:
    """The 4-bit code of each value's nearest e2m1 value; bit 3 is the sign."""
    size = x.abs()
    # The magnitudes' midpoints in turn; where the upper neighbour's code is even, the midpoint itself goes up.
    code = (size > 0.25).to(torch.uint8)
    for midpoint, goes_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += size >= midpoint if goes_up else size > midpoint
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_values(codes: UInt8[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    return _e2m1_table(codes.device)[codes.long()]


@lru_cache(maxsize=16)
def _e2m1_table(device: torch.device) -> Float[Tensor, "16"]:
    """Made once: to bring numbers to a device takes longer than to look them up."""
    with torch.inference_mode(False):
        return torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=device)


def join_nibbles(codes: UInt8[Tensor, "*rows k"]) -> UInt8[Tensor, "*rows half"]:
    """Two codes a byte, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def split_nibbles(packed: Tensor) -> UInt8[Tensor, "*rows k"]:
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def _encode_fp4(x: Tensor) -> Tensor:
    return join_nibbles(e2m1_codes(x))


def _decode_fp4(packed: Tensor) -> Tensor:
    return e2m1_values(split_nibbles(packed))


def _nearest_e4m3(x: Tensor) -> Tensor:
    return to_e4m3(x).float()


_E4M3 = (to_e4m3, Tensor.float, _nearest_e4m3)
_E2M1 = (_encode_fp4, _decode_fp4, to_e2m1)

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
WINDOW = BlockFormat("fp8_32_ue8m0", 32, 1, fp8_scale, *_E4M3, (E4M3, E8M0))
INDEX = BlockFormat("fp4_32_e8m0", 32, 2, fp4_scale, *_E2M1, (torch.uint8, E8M0))
LATENT = BlockFormat("fp4_16_e4m3", 16, 2, fp4_e4m3_scale, *_E2M1, (torch.uint8, E4M3))
FLOAT8 = BlockFormat("fp8_64_fp32scale", 64, 1, fp8_float_scale, *_E4M3, (E4M3, torch.float32))
FORMATS = {f.name: f for f in (WINDOW, INDEX, LATENT, FLOAT8)}


# Weights


def _tiles(count: int) -> int:
    return -(-count // TILE)


def pack_fp8_weight(weight: Float[Tensor, "*e o i"]) -> tuple[Tensor, Tensor]:
    """e4m3 values and one e8m0 scale per 32 x 32 tile; the last tile of a side may be partial."""
    o, i = weight.shape[-2:]
    rows, columns = _tiles(o), _tiles(i)
    padded = F.pad(weight.float(), (0, columns * TILE - i, 0, rows * TILE - o))
    tiles = padded.unflatten(-1, (columns, TILE)).unflatten(-3, (rows, TILE))  # [..., rows, 32, columns, 32]
    scale = fp8_scale(tiles.abs().amax((-3, -1)))
    q = to_e4m3(tiles / scale.float()[..., :, None, :, None])
    return q.flatten(-4, -3).flatten(-2)[..., :o, :i].contiguous(), scale


def unpack_fp8_weight(q: Tensor, scale: Tensor) -> Float[Tensor, "*e o i"]:
    o, i = q.shape[-2:]
    tiles = scale.float().repeat_interleave(TILE, -2)[..., :o, :].repeat_interleave(TILE, -1)[..., :i]
    return q.float() * tiles


def pack_fp4_weight(weight: Float[Tensor, "*e o i"]) -> tuple[Tensor, Tensor]:
    """Packed e2m1 codes [..., o, i / 2] and one e8m0 scale per row and 32 inputs [..., o, i / 32]."""
    return INDEX.pack(weight)


def unpack_fp4_weight(packed: Tensor, scale: Tensor) -> Float[Tensor, "*e o i"]:
    return INDEX.unpack(packed, scale)


def unpack_weight(weight: Tensor, scale: Tensor | None) -> Float[Tensor, "*e o i"]:
    """A weight as it is stored (fp8 tiles, packed fp4, or a plain float type without scale) as float values.

    The dtype tells the format. Quantised weights come back in float32, which holds them exactly; others as they are.
    """
    if scale is None:
        return weight
    if weight.dtype == torch.float8_e4m3fn:
        return unpack_fp8_weight(weight, scale)
    return unpack_fp4_weight(weight, scale)


@dataclass(frozen=True)
class WeightFormat:
    """How a weight is stored, for one that is kept as floats: what it is to be rounded to. `pack(weight)` gives codes
    and scales, `unpack` their values. A weight that lies on the format's grid comes back unchanged."""

    name: str
    pack: Callable[[Tensor], tuple[Tensor, Tensor]]
    unpack: Callable[[Tensor, Tensor], Tensor]


FP8_TILES = WeightFormat("fp8 tiles", pack_fp8_weight, unpack_fp8_weight)
FP4_ROWS = WeightFormat("fp4 rows", pack_fp4_weight, unpack_fp4_weight)
FP8_ROWS = WeightFormat("fp8 rows", WINDOW.pack, WINDOW.unpack)
"""Of an Engram table: each row by itself, a scale per 32 of its values."""
