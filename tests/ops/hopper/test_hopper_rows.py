"""The writers and readers of rows against `ReferenceOps` and `formats`: bit-equal, norms and pooling included."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from openv41.errors import OpsError
from openv41.formats import FLOAT8, INDEX, LATENT, WINDOW, BlockFormat
from openv41.ops import ReferenceOps
from openv41.ops.hopper.rows import (
    Into,
    Norm,
    decode_table,
    latent_store,
    pool,
    pool_store,
    query_window,
    rms_norm,
    rms_norm_rounded,
    rotate,
    rotate_quantise,
    rotate_store,
    round_activation,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
JUDGE = ReferenceOps()
EPS = 1e-20
FORMS = [WINDOW, LATENT, INDEX]
NAMES = {"window": WINDOW, "latent": LATENT, "index": INDEX}


def randn(rng: torch.Generator, *shape: int) -> Tensor:
    """bf16 values whose rows differ in size; every fifth row is zero."""
    x = torch.randn(*shape, generator=rng) * torch.exp2(torch.randint(-6, 7, shape[:1], generator=rng).float()).view(
        -1, *[1] * (len(shape) - 1)
    )
    x[4::5] = 0.0
    return x.bfloat16().to(DEVICE)


def angles(rng: torch.Generator, n: int, half: int) -> tuple[Tensor, Tensor]:
    turned = torch.rand(n, half, generator=rng).to(DEVICE) * 6.28
    return turned.cos(), turned.sin()


def norm_of(rng: torch.Generator, width: int) -> Norm:
    return Norm((1 + 0.3 * torch.randn(width, generator=rng)).bfloat16().to(DEVICE), EPS)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """A table that shows what was written to it."""
    return torch.full(shape, 0xCD if dtype == torch.uint8 else torch.nan, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=list(NAMES))
def test_rotated_rows_reach_the_table_as_the_reference_stores_them(
    form: BlockFormat, packed: bool, rng: torch.Generator
):
    n, width, half = 7, 64, 8
    x, (cos, sin) = randn(rng, n, width), angles(rng, n, half)
    wanted = JUDGE.store(JUDGE.rotate(x, cos, sin), form, packed)
    assert same_bits(rotate_store(x, cos, sin, form, packed, tile=256), wanted)

    rows = torch.tensor([5, -1, 0, 11, 3, -1, 8], device=DEVICE)
    table = poisoned(12, wanted.shape[1], dtype=wanted.dtype)
    expected = table.clone()
    expected[rows[rows >= 0]] = wanted[rows >= 0]
    assert rotate_store(x, cos, sin, form, into=Into(table, rows), tile=256) is table
    assert same_bits(table, expected)


@pytest.mark.parametrize("width", [32, 512])
def test_the_norm_in_front_is_the_reference_to_the_bit(width: int, rng: torch.Generator):
    """Also where x is some columns of a wider product."""
    n, norm, (cos, sin) = 5, norm_of(rng, width), angles(rng, 5, 16)
    x = randn(rng, n, width + 64)[:, 32 : 32 + width]
    wanted = JUDGE.rotate(JUDGE.rms_norm(x, norm.weight, EPS), cos, sin)
    assert same_bits(rotate_store(x, cos, sin, None, norm=norm), wanted)
    assert same_bits(rotate_store(x, cos, sin, WINDOW, norm=norm), JUDGE.store(wanted, WINDOW, True))


def test_a_latent_comes_back_normed_and_is_stored_rotated(rng: torch.Generator):
    n, width = 6, 128
    x, norm, (cos, sin) = randn(rng, n, width), norm_of(rng, width), angles(rng, n, 16)
    table, rows = poisoned(9, LATENT.record_bytes(width), dtype=torch.uint8), torch.randperm(9, generator=rng)[:n]
    latents = latent_store(x, cos, sin, norm, Into(table, rows.to(DEVICE)))
    wanted = JUDGE.rms_norm(x, norm.weight, EPS)
    assert same_bits(latents, wanted)
    assert same_bits(table[rows], JUDGE.store(JUDGE.rotate(wanted, cos, sin), LATENT, True))


def test_pooled_groups_are_the_reference_to_the_bit(rng: torch.Generator):
    n, width, groups = 8, 64, 5
    pairs = (torch.randn(n, 2 * width, generator=rng) * torch.tensor([3.0, 9.0]).repeat_interleave(width)).to(DEVICE)
    kv, gate = pairs.chunk(2, 1)  # columns of one table
    members = torch.randint(0, n, (groups, 2), generator=rng).to(DEVICE)
    members[3] = -1
    norm, (cos, sin) = norm_of(rng, width), angles(rng, groups, 8)
    table = poisoned(6, LATENT.record_bytes(width), dtype=torch.uint8)
    rows = torch.tensor([5, 0, -1, 1, 3], device=DEVICE)
    latents = pool_store(kv, gate, members, cos, sin, norm, Into(table, rows), tile=128)

    real = members[:, 0] >= 0
    wanted = torch.zeros_like(latents)
    wanted[real] = JUDGE.rms_norm(JUDGE.pool(kv, gate, members[real]), norm.weight, EPS)
    assert same_bits(latents[real], wanted[real])
    assert not latents[~real].any()
    assert same_bits(pool(kv, gate, members, norm, tile=128), latents)
    expected = poisoned(6, LATENT.record_bytes(width), dtype=torch.uint8)
    goes = real & (rows >= 0)
    expected[rows[goes]] = JUDGE.store(JUDGE.rotate(wanted, cos, sin), LATENT, True)[goes]
    assert same_bits(table, expected)


def test_index_queries_are_rotated_and_rounded(rng: torch.Generator):
    q, (cos, sin) = randn(rng, 3, 4, 32), angles(rng, 3, 8)
    assert same_bits(rotate_quantise(q, cos, sin, tile=128), JUDGE.quantise(JUDGE.rotate(q, cos, sin), INDEX))


@pytest.mark.parametrize("inverse", [False, True])
def test_turning_alone(inverse: bool, rng: torch.Generator):
    q, (cos, sin) = randn(rng, 3, 5, 64), angles(rng, 3, 8)
    before, wanted = q.clone(), JUDGE.rotate(q, cos, sin, inverse)
    assert same_bits(rotate(q, cos, sin, inverse, tile=64), wanted)
    assert same_bits(q, before)
    assert rotate(q, cos, sin, inverse, in_place=True, tile=64) is q
    assert same_bits(q, wanted)


@pytest.mark.parametrize("width", [64, 96, 160, 672, 1280])
def test_norms_of_any_width_are_the_reference_to_the_bit(width: int, rng: torch.Generator):
    """32 times 1, 3, 5, 21 and 5 times 256: sums by halves pad odd counts."""
    x, norm = randn(rng, 3, width + 8)[:, :width], norm_of(rng, width)
    wanted = JUDGE.rms_norm(x, norm.weight, EPS)
    assert same_bits(rms_norm(x, norm), wanted)
    both = rms_norm_rounded(x, norm)
    assert same_bits(both[0], wanted)
    assert same_bits(both[1], WINDOW.round(wanted))


def test_query_and_window_in_one_launch_are_the_two_that_they_join(rng: torch.Generator):
    n, low, width = 4, 96, 64
    y, (cos, sin) = randn(rng, n, low + width), angles(rng, n, 8)
    q_norm, kv_norm, rows = norm_of(rng, low), norm_of(rng, width), torch.tensor([3, -1, 0, 2], device=DEVICE)
    tables = [poisoned(5, WINDOW.record_bytes(width), dtype=torch.uint8) for _ in range(2)]
    queries = query_window(y, cos, sin, q_norm, kv_norm, Into(tables[0], rows))
    assert same_bits(queries, rms_norm_rounded(y[:, :low], q_norm)[1])
    rotate_store(y[:, low:], cos, sin, WINDOW, into=Into(tables[1], rows), norm=kv_norm)
    assert same_bits(tables[0], tables[1])


def test_activations_are_rounded_and_stay_as_they_are_when_rounded_again(rng: torch.Generator):
    x = randn(rng, 11, 96)
    once = round_activation(x, tile=256)
    assert same_bits(once, WINDOW.round(x))
    assert same_bits(round_activation(once), once)


@pytest.mark.parametrize("form", FORMS, ids=list(NAMES))
def test_a_table_is_decoded_exactly(form: BlockFormat, rng: torch.Generator):
    records = form.to_records(randn(rng, 21, 64))
    wanted = JUDGE.read(records, form)
    assert same_bits(decode_table(records, form, tile=8), wanted)


def test_pages_are_decoded_side_by_side_or_in_place(rng: torch.Generator):
    records = LATENT.to_records(randn(rng, 24, 32))
    wanted, pages = JUDGE.read(records, LATENT), torch.tensor([4, 0, -1, 3], device=DEVICE)
    out = poisoned(24, 32, dtype=torch.bfloat16)
    decode_table(records, LATENT, pages, per_page=4, compact=False, out=out, tile=8)
    expected = poisoned(24, 32, dtype=torch.bfloat16)
    for page in (4, 0, 3):
        expected[4 * page : 4 * page + 4] = wanted[4 * page : 4 * page + 4]
    assert same_bits(out, expected)
    together = poisoned(16, 32, dtype=torch.bfloat16)
    decode_table(records, LATENT, pages, per_page=4, out=together, tile=8)
    assert same_bits(together[:8], torch.cat((wanted[16:20], wanted[:4])))
    assert together[8:12].isnan().all()
    assert same_bits(together[12:], wanted[12:16])


def test_nothing_to_do_is_done(rng: torch.Generator):
    none, (cos, sin) = torch.zeros(0, 64, dtype=torch.bfloat16, device=DEVICE), angles(rng, 0, 8)
    assert rotate_store(none, cos, sin, WINDOW).shape == (0, 66)
    assert rotate(none.unsqueeze(1), cos, sin).shape == (0, 1, 64)
    assert rms_norm(none, norm_of(rng, 64)).shape == round_activation(none).shape == (0, 64)


def test_what_is_not_supported_is_refused(rng: torch.Generator):
    x, (cos, sin) = randn(rng, 2, 96), angles(rng, 2, 8)
    with pytest.raises(OpsError, match="power of two and at least a block, got 96"):
        rotate_store(x, cos, sin, WINDOW)
    with pytest.raises(OpsError, match="no kernel for fp8_64_fp32scale"):
        rotate_store(x[:, :64], cos, sin, FLOAT8)
    with pytest.raises(OpsError, match="records of 66 bytes"):
        table = torch.zeros(4, 65, dtype=torch.uint8, device=DEVICE)
        rotate_store(x[:, :64], cos, sin, WINDOW, into=Into(table, torch.tensor([0, 1], device=DEVICE)))
    with pytest.raises(OpsError, match="angles of 2 tokens, 32 pairs or fewer, got"):
        rotate_store(x[:, :64], *angles(rng, 2, 40), WINDOW)
    with pytest.raises(OpsError, match="contiguous float32"):
        rotate(x[:, :64], cos.double(), sin)
    with pytest.raises(OpsError, match="no pages of 5"):
        records = WINDOW.to_records(x[:, :64])
        decode_table(records, WINDOW, torch.zeros(1, dtype=torch.int64, device=DEVICE), per_page=5)


@pytest.mark.skipif(sys.platform != "linux", reason="the assembler is a Linux program")
def test_kernels_compile_for_hopper_without_spills():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    names = ["rows window", "rows pool", "rows norm", "rows decode"]
    command = [sys.executable, "-m", "openv41.ops.hopper.compiled", *names, "--json"]
    printed = subprocess.run(
        command, env={**environment, "PYTHONPATH": "src"}, capture_output=True, text=True, check=True
    )
    found = json.loads(printed.stdout)
    assert len(found) == len(names)
    assert [one["name"] for one in found if one["stack"] or one["instructions"].get("LDL", 0)] == []


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 128, 4096])
def test_released_sizes_on_a_gpu(n: int, rng: torch.Generator):
    """Written twice with the same bits, and as the reference writes them."""
    x, norm, (cos, sin) = randn(rng, n, 512), norm_of(rng, 512), angles(rng, n, 32)
    twice = [rotate_store(x, cos, sin, WINDOW, norm=norm) for _ in range(2)]
    wanted = JUDGE.rotate(JUDGE.rms_norm(x, norm.weight, EPS), cos, sin)
    assert same_bits(twice[0], twice[1])
    assert same_bits(twice[0], JUDGE.store(wanted, WINDOW, True))
    q, low = randn(rng, n, 32, 128), randn(rng, n, 1280)
    assert same_bits(rotate_quantise(q, cos, sin), JUDGE.quantise(JUDGE.rotate(q, cos, sin), INDEX))
    lows = norm_of(rng, 1280)
    assert same_bits(rms_norm_rounded(low, lows)[1], WINDOW.round(JUDGE.rms_norm(low, lows.weight, EPS)))
    records = LATENT.to_records(x)
    assert same_bits(decode_table(records, LATENT), JUDGE.read(records, LATENT))
