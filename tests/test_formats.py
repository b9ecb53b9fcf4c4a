"""Number formats against values worked out by hand, and against one another."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from openv41 import formats
from openv41.formats import FLOAT8, FORMATS, INDEX, LATENT, WINDOW, BlockFormat

ALL = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
SHORT = pytest.mark.parametrize("form", [WINDOW, INDEX, LATENT], ids=lambda form: form.name)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, the signs of zeros included."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def wide_random(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """float32 of every magnitude from denormals up, zeros of both signs, and some whole blocks of zeros."""
    exponent = torch.randint(-148, 40, (*shape[:-1], 1), generator=rng) + torch.randint(-20, 4, shape, generator=rng)
    x = (torch.randn(shape, generator=rng).double() * 2.0 ** exponent.double()).float()
    x[torch.rand(shape, generator=rng) < 0.05] = 0.0
    x[torch.rand(shape, generator=rng) < 0.05] = -0.0
    x[::17, :64] = 0.0
    return x


def block(form: BlockFormat, *values: float) -> torch.Tensor:
    """One block of the format that starts with these values."""
    x = torch.zeros(form.block)
    x[: len(values)] = torch.tensor(values)
    return x


def scale_of(form: BlockFormat, amax: float) -> float:
    return float(form.pack(block(form, 0.0, -amax))[1])


# Scales


@pytest.mark.parametrize("k", [-13, -3, 0, 1, 30, 100])
def test_fp8_scale_is_the_power_of_two_that_448_just_fits(k: int) -> None:
    assert scale_of(WINDOW, 448 * 2.0**k) == 2.0**k
    assert scale_of(WINDOW, 450 * 2.0**k) == 2.0 ** (k + 1)
    assert scale_of(WINDOW, 224 * 2.0**k) == 2.0 ** (k - 1)
    assert scale_of(WINDOW, 226 * 2.0**k) == 2.0**k


@pytest.mark.parametrize("k", [-120, -3, 0, 5, 120])
def test_fp4_scale_is_the_power_of_two_that_6_just_fits(k: int) -> None:
    assert scale_of(INDEX, 6 * 2.0**k) == 2.0**k
    assert scale_of(INDEX, 6.03125 * 2.0**k) == 2.0 ** (k + 1)
    assert scale_of(INDEX, 3 * 2.0**k) == 2.0 ** (k - 1)


@pytest.mark.parametrize("form, smallest", [(WINDOW, 2.0**-22), (INDEX, 2.0**-126), (LATENT, 2.0**-9)])
def test_a_zero_block_has_the_smallest_scale(form: BlockFormat, smallest: float) -> None:
    codes, scale = form.pack(torch.zeros(3, 2 * form.block))
    assert torch.equal(scale.float(), torch.full((3, 2), smallest))
    assert not codes.view(torch.uint8).any()
    assert scale_of(form, smallest / 4) == smallest


def test_blocks_have_scales_of_their_own() -> None:
    x = torch.cat([block(WINDOW, 448.0), block(WINDOW, -896.0), block(WINDOW, 3.5)])
    assert WINDOW.pack(x)[1].float().tolist() == [1.0, 2.0, 2.0**-7]


def test_float8_scale_is_the_largest_magnitude_over_448_unrounded() -> None:
    assert scale_of(FLOAT8, 100.0) == float(torch.tensor(100.0) * (1 / 448))
    assert scale_of(FLOAT8, 0.0) == float(torch.tensor(1e-4) * (1 / 448))
    assert FLOAT8.pack(torch.ones(128))[1].shape == (2,)


def test_e4m3_scale_may_be_below_a_sixth_and_then_saturates() -> None:
    x = block(LATENT, 6.3, 5.1, -6.3, 0.3)  # a sixth is 1.05; the neighbours are 1 and 1.125
    codes, scale = LATENT.pack(x)
    assert float(scale) == 1.0
    assert LATENT.unpack(codes, scale)[:4].tolist() == [6.0, 6.0, -6.0, 0.5]
    assert scale_of(LATENT, 6 * 1.0625) == 1.0  # halfway between them: the even code
    assert scale_of(LATENT, 6 * 1.1875) == 1.25


def test_latents_saturate_at_2688() -> None:
    x = block(LATENT, 1e6, -5000.0, 2688.0, 100.0)
    assert float(LATENT.pack(x)[1]) == 448.0
    assert LATENT.round(x)[:4].tolist() == [2688.0, -2688.0, 2688.0, 0.0]


# Values


def test_e4m3_takes_ties_to_even() -> None:
    hand = {17.0: 16, 19.0: 20, 18.0: 18, 1.0625: 1, 1.1875: 1.25, 432.0: 448, 416.0: 416, 400.0: 384, -17.0: -16}
    hand |= {1e9: 448, -449.0: -448, 464.0: 448}
    assert formats.to_e4m3(torch.tensor(list(hand))).float().tolist() == list(hand.values())


def test_e4m3_has_denormals_down_to_2_to_the_minus_9() -> None:
    unit = 2.0**-9
    steps = torch.tensor([0.5, 0.501, 1.0, 1.5, 2.5, 3.5, 7.0, 7.5, 8.0, -0.25, -1.5])
    rounded = formats.to_e4m3(steps * unit).float() / unit
    assert rounded.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 7.0, 8.0, 8.0, 0.0, -2.0]


@pytest.mark.parametrize("sign", [1, -1])
def test_e2m1_takes_ties_to_the_even_code(sign: int) -> None:
    ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4}
    x = sign * torch.tensor(list(ties))
    expected = [sign * float(value) for value in ties.values()]
    assert formats.to_e2m1(x).tolist() == expected
    assert formats.e2m1_values(formats.e2m1_codes(x)).tolist() == expected
    above = torch.nextafter(x, sign * torch.tensor(torch.inf))
    assert formats.to_e2m1(above).abs().tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    below = torch.nextafter(x, torch.tensor(0.0))
    assert formats.to_e2m1(below).abs().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]


def test_e2m1_in_one_step_equals_decoding_the_code() -> None:
    x = torch.cat([torch.linspace(-9, 9, 72001), torch.tensor([1e-45, -1e-45, 3e38, -3e38, 0.0, -0.0, 1e-38])])
    assert same_bits(formats.to_e2m1(x), formats.e2m1_values(formats.e2m1_codes(x)))
    assert set(formats.to_e2m1(x).abs().tolist()) == set(formats.E2M1_VALUES)


def test_all_sixteen_e2m1_codes_mean_their_values() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = formats.e2m1_values(codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(formats.e2m1_codes(values), codes)


@ALL
def test_zeros_keep_their_sign(form: BlockFormat) -> None:
    x = block(form, 1.0, -0.0, 0.0, -1e-6, 1e-6)
    signs = [False, True, False, True, False]
    assert torch.signbit(form.round(x))[:5].tolist() == signs
    assert torch.signbit(form.unpack(*form.pack(x)))[:5].tolist() == signs


@pytest.mark.parametrize("form", [INDEX, LATENT], ids=["index", "latent"])
def test_the_even_element_lies_in_the_low_nibble(form: BlockFormat) -> None:
    codes, _ = form.pack(block(form, 6.0, -1.0, 0.5, 3.0, 0.0, 6.0))
    assert codes[:3].tolist() == [0xA7, 0x51, 0x70]
    assert formats.split_nibbles(codes)[:6].tolist() == [7, 10, 1, 5, 0, 7]


# Packing and rounding are the same


@ALL
def test_rounding_equals_packing_and_unpacking_bit_for_bit(form: BlockFormat, rng: torch.Generator) -> None:
    x = wide_random(rng, 600, 128)
    assert same_bits(form.round(x), form.unpack(*form.pack(x)))
    short = x.bfloat16()
    assert same_bits(form.round(short), form.unpack(*form.pack(short)).bfloat16())
    cube = x.unflatten(0, (20, 30))
    assert same_bits(form.round(cube), form.round(x).unflatten(0, (20, 30)))


@given(
    form=st.sampled_from(list(FORMATS.values())),
    x=arrays.arrays("float32", 64, elements=st.floats(-(2.0**99), 2.0**99, width=32) | st.floats(-8, 8, width=32)),
)
def test_any_row_is_rounded_as_it_is_packed(form: BlockFormat, x) -> None:
    row = torch.from_numpy(x)
    assert same_bits(form.round(row), form.unpack(*form.pack(row)))


@SHORT
def test_bf16_holds_a_rounded_row_exactly(form: BlockFormat, rng: torch.Generator) -> None:
    x = wide_random(rng, 600, 128).bfloat16()
    assert torch.equal(form.round(x).float(), form.round(x.float()))


@pytest.mark.parametrize("form", [WINDOW, INDEX], ids=["window", "index"])
def test_rounding_twice_is_rounding_once(form: BlockFormat, rng: torch.Generator) -> None:
    once = form.round(wide_random(rng, 600, 128))
    assert same_bits(form.round(once), once)


def test_latents_are_rounded_once_where_their_scale_is_not_denormal(rng: torch.Generator) -> None:
    """A scale of 2^-8 may come of 1.5 x 2^-9; the largest value then is rounded to 4, and has another scale the next
    time."""
    once = LATENT.round(wide_random(rng, 600, 128))
    kept = (LATENT.pack(once)[1].float() >= 2.0**-6).repeat_interleave(16, -1)
    assert kept.float().mean() > 0.1
    assert torch.equal(LATENT.round(once)[kept], once[kept])
    twice = LATENT.round(LATENT.round(block(LATENT, 9 * 2.0**-9)))
    assert [float(LATENT.round(block(LATENT, 9 * 2.0**-9))[0]), float(twice[0])] == [8 * 2.0**-9, 6 * 2.0**-9]


@SHORT
def test_rounding_is_to_the_nearest_stored_value(form: BlockFormat, rng: torch.Generator) -> None:
    """Against every value that the block's scale allows."""
    x = torch.randn(64, form.block, generator=rng).bfloat16().float()
    scale = form.pack(x)[1].float()
    stored = torch.arange(256, dtype=torch.uint8)
    grid = stored.view(formats.E4M3).float() if form is WINDOW else formats.e2m1_values(stored[:16])
    grid = grid[grid.isfinite()] * scale.unsqueeze(-1)  # [64, 1, values]
    best = (grid - x.unsqueeze(-1)).abs().amin(-1)
    assert torch.equal((form.round(x) - x).abs(), best)


# Records


@pytest.mark.parametrize("form, width, size", [(WINDOW, 512, 528), (LATENT, 512, 288), (INDEX, 128, 68)])
def test_a_record_is_codes_then_scales(form: BlockFormat, width: int, size: int, rng: torch.Generator) -> None:
    x = torch.randn(3, 5, width, generator=rng)
    records = form.to_records(x)
    assert records.shape == (3, 5, size) and records.dtype == torch.uint8
    assert form.record_bytes(width) == size
    codes, scale = form.pack(x)
    count = width // form.codes_per_byte
    assert torch.equal(records[..., :count], codes.view(torch.uint8))
    assert torch.equal(records[..., count:], scale.view(torch.uint8))
    assert same_bits(form.from_records(records), form.round(x))


@ALL
@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_records_of_any_width_come_back(form: BlockFormat, blocks: int, rng: torch.Generator) -> None:
    x = wide_random(rng, 20, blocks * form.block)
    records = form.to_records(x)
    assert records.shape[-1] == form.record_bytes(x.shape[-1])
    assert same_bits(form.from_records(records), form.round(x))


# Weights


@pytest.mark.parametrize("size", [1e-5, 0.02, 300.0])
@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (70, 45), (1, 32), (33, 1), (2, 40, 64)])
def test_an_fp8_weight_has_one_scale_a_tile_of_32_by_32(
    shape: tuple[int, ...], size: float, rng: torch.Generator
) -> None:
    weight = torch.randn(shape, generator=rng) * 10.0 ** torch.randint(-3, 2, shape, generator=rng) * size
    q, scale = formats.pack_fp8_weight(weight)
    o, i = shape[-2:]
    assert q.shape == shape and q.dtype == formats.E4M3
    assert scale.shape == (*shape[:-2], -(-o // 32), -(-i // 32)) and scale.dtype == formats.E8M0
    values = formats.unpack_fp8_weight(q, scale)
    for row in range(scale.shape[-2]):
        for column in range(scale.shape[-1]):
            tile = (..., slice(32 * row, 32 * row + 32), slice(32 * column, 32 * column + 32))
            step = formats.fp8_scale(weight[tile].abs().amax((-2, -1)))
            assert torch.equal(scale[..., row, column].float(), step.float())
            step = step.float()[..., None, None]
            assert torch.equal(values[tile], formats.to_e4m3(weight[tile] / step).float() * step)


def test_an_fp4_weight_has_one_scale_a_row_and_32_inputs(rng: torch.Generator) -> None:
    weight = torch.randn(3, 5, 96, generator=rng) * 2.0 ** torch.randint(-9, 9, (3, 5, 1), generator=rng)
    codes, scale = formats.pack_fp4_weight(weight)
    assert codes.shape == (3, 5, 48) and codes.dtype == torch.uint8
    assert scale.shape == (3, 5, 3) and scale.dtype == formats.E8M0
    for row in weight.flatten(0, 1):
        for part in row.split(32):
            assert float(INDEX.pack(part)[1]) == 2.0 ** float((part.abs().max().double() / 6).log2().ceil())
    assert same_bits(formats.unpack_fp4_weight(codes, scale), INDEX.round(weight))


def test_bf16_holds_every_stored_weight_exactly() -> None:
    """Every code, denormals among them, under scales from tiny to huge."""
    scale = torch.tensor([-110, -22, -1, 0, 3, 100]).double().exp2().float().to(formats.E8M0)
    q = torch.arange(256, dtype=torch.uint8)
    q = q[q.view(formats.E4M3).float().isfinite()]
    fp8 = q.repeat(13)[:3200].view(100, 32).repeat_interleave(1, 0)[:96].repeat(2, 1).view(formats.E4M3)  # 6 tiles
    fp4 = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 6)
    for values in (
        formats.unpack_weight(fp8, scale.unsqueeze(1)),
        formats.unpack_weight(fp4, scale.expand(16, 6)),
    ):
        assert values.dtype == torch.float32 and values.isfinite().all() and values.abs().min() == 0
        assert torch.equal(values.bfloat16().float(), values)


def test_the_dtype_tells_a_weights_format(rng: torch.Generator) -> None:
    weight = torch.randn(40, 64, generator=rng)
    assert torch.equal(
        formats.unpack_weight(*formats.pack_fp8_weight(weight)),
        formats.unpack_fp8_weight(*formats.pack_fp8_weight(weight)),
    )
    assert torch.equal(formats.unpack_weight(*formats.pack_fp4_weight(weight)), INDEX.round(weight))
    assert formats.unpack_weight(weight, None) is weight


@pytest.mark.parametrize("stored", ["fp8", "fp4"])
def test_scales_of_blocks_of_128_are_refused(stored: str, rng: torch.Generator) -> None:
    """llama.cpp#28696: they loaded, and were silently wrong."""
    weight = torch.randn(128, 256, generator=rng)
    pack = formats.pack_fp8_weight if stored == "fp8" else formats.pack_fp4_weight
    codes, scale = pack(weight)
    coarse = scale.view(torch.uint8)[:: 4 if stored == "fp8" else 1, ::4].contiguous().view(formats.E8M0)
    with pytest.raises(RuntimeError):
        formats.unpack_weight(codes, coarse)
