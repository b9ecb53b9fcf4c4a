"""Device functions for codes and scales against `formats`, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from openv41.formats import FORMATS, INDEX, LATENT, WINDOW, BlockFormat, e2m1_values, split_nibbles
from openv41.ops.kernels import bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CODES = {WINDOW.name: 1, LATENT.name: 2, INDEX.name: 3}


@triton.jit
def read_all(codes, e4m3, e2m1, e8m0):
    i = tl.arange(0, 256)
    code = tl.load(codes + i)
    tl.store(e4m3 + i, bits.e4m3_value(code))
    tl.store(e2m1 + i, bits.e2m1_value(code & 15))
    tl.store(e8m0 + i, bits.e8m0_value(code))


@triton.jit
def write_blocks(x, codes, scales, values, FORM: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    rows = tl.load(x + place)
    scale = bits.scale_code(tl.max(tl.abs(rows), 1), FORM)
    code = bits.value_code(rows, scale[:, None], FORM)
    tl.store(scales + block, scale.to(tl.uint8))
    tl.store(codes + place, code.to(tl.uint8))
    tl.store(values + place, bits.code_value(code, scale[:, None], FORM))


@triton.jit
def nearest_e4m3(x, codes, COUNT: tl.constexpr):
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(codes + place, bits.e4m3_code(tl.load(x + place)).to(tl.uint8))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8).cpu(), b.contiguous().view(torch.uint8).cpu())


def test_every_code_is_read():
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    e4m3, e2m1, e8m0 = torch.full((3, 256), torch.nan, device=DEVICE)
    read_all[(1,)](codes, e4m3, e2m1, e8m0)
    finite = (codes & 0x7F) != 0x7F
    assert same_bits(e4m3[finite], codes[finite].view(torch.float8_e4m3fn).float())
    assert e4m3[~finite].tolist() == [480.0, -480.0]  # as the docstring says
    assert same_bits(e2m1, e2m1_values(codes & 15))
    assert same_bits(e8m0[:255], codes[:255].view(torch.float8_e8m0fnu).float())
    assert e8m0[255].isnan()


def blocks_of(form: BlockFormat, rng: torch.Generator, count: int) -> Tensor:
    """Blocks of every size, some of values far apart, with zeros of both signs, subnormals and the largest values."""
    size = torch.randint(-140, 126, (count, 1), generator=rng).float()
    x = torch.randn(count, form.block, generator=rng) * torch.exp2(size)
    far = torch.exp2(torch.randint(-14, 14, (count // 4, form.block), generator=rng).float())
    x[::4] = torch.randn(count // 4, form.block, generator=rng) * far
    x[1::16, 0] = 3.0e38
    x[2::16] = 0.0
    x[3::16] = -0.0
    x[4::16, 1:] = 0.0
    x[5::16] = torch.exp2(torch.randint(-133, -120, (1, form.block), generator=rng).float())
    x[6::16] = torch.randint(-12, 13, x[6::16].shape, generator=rng) / 4  # ties, and values on the grid
    x[7::16] = 448.0 * torch.exp2(torch.randint(-8, 8, x[7::16].shape, generator=rng).float())
    return x.clamp(-3.38e38, 3.38e38).bfloat16()


@pytest.mark.parametrize("form", [WINDOW, LATENT, INDEX], ids=lambda form: form.name)
def test_blocks_are_written_as_formats_writes_them(form: BlockFormat, rng: torch.Generator):
    x = blocks_of(form, rng, 1024)
    codes = torch.full(x.shape, 0xAB, dtype=torch.uint8, device=DEVICE)
    scales = torch.full(x.shape[:1], 0xAB, dtype=torch.uint8, device=DEVICE)
    values = torch.full(x.shape, torch.nan, device=DEVICE)
    # As float32: the interpreter widens subnormal bf16 values wrongly.
    write_blocks[(4,)](x.float().to(DEVICE), codes, scales, values, FORM=CODES[form.name], BLOCK=form.block, COUNT=256)
    wanted, wanted_scales = form.pack(x)
    assert same_bits(scales, wanted_scales.squeeze(-1))
    assert same_bits(codes, wanted if form.codes_per_byte == 1 else split_nibbles(wanted))
    assert same_bits(values, form.unpack(wanted, wanted_scales))


def test_e4m3_ties_and_borders():
    """Every e4m3 value, the midpoints between neighbours, and what lies just beside either."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat((grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([464.0, 1e9, 3e38, 2.0**-11, 2.0**-140])))
    near = torch.cat((points, torch.nextafter(points, points + 1), torch.nextafter(points, -points - 1)))
    x = torch.nn.functional.pad(torch.cat((near, -near)), (0, -2 * len(near) % 256))
    codes = torch.full(x.shape, 0xAB, dtype=torch.uint8, device=DEVICE)
    nearest_e4m3[(len(x) // 256,)](x.to(DEVICE), codes, COUNT=256)
    assert same_bits(codes, x.clamp(-448, 448).to(torch.float8_e4m3fn))


def test_forms_have_the_numbers_that_the_kernels_use():
    assert {name: int(getattr(bits, each)) for name, each in
            ((WINDOW.name, "WINDOW"), (LATENT.name, "LATENT"), (INDEX.name, "INDEX"))} == CODES  # fmt: skip
    assert set(CODES) <= set(FORMATS)
