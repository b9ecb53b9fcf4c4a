"""Exact arithmetic: close to the truth, and the same bits whatever the shape of the call."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from openv41.ops import exact


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def operands(rng: torch.Generator, n: int = 37, k: int = 200, o: int = 45, dtype: torch.dtype = torch.float32):
    return torch.randn(n, k, generator=rng).to(dtype), torch.randn(o, k, generator=rng).to(dtype)


# Products


@pytest.mark.parametrize("k", [1, 31, 32, 33, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_close_to_float64(dtype: torch.dtype, k: int, rng: torch.Generator) -> None:
    x, w = operands(rng, k=k, dtype=dtype)
    result = exact.matmul(x, w)
    assert result.dtype == torch.float32
    error = (result.double() - x.double() @ w.double().T).abs()
    size = x.double().abs() @ w.double().abs().T
    assert (error / size).max() < (1e-7 if dtype == torch.bfloat16 else 4e-7)


def test_a_product_of_small_integers_is_exact(rng: torch.Generator) -> None:
    x, w = (torch.randint(-9, 10, (n, 512), generator=rng).float() for n in (20, 30))
    assert torch.equal(exact.matmul(x, w), (x.long() @ w.long().T).float())


def test_terms_that_cancel_are_kept(rng: torch.Generator) -> None:
    """2^23 + 1 - 2^23: a float32 sum that takes the terms of a block in turn may lose the small one, this must not."""
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([2.0**23, 1.0, -(2.0**23)])
    for order in (torch.arange(32), torch.randperm(32, generator=rng)):
        assert exact.matmul(x[:, order], torch.ones(1, 32)).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rows_bits_depend_on_no_other_row(dtype: torch.dtype, rng: torch.Generator) -> None:
    x, w = operands(rng, dtype=dtype)
    together = exact.matmul(x, w)
    for i in (0, 1, 17, 36):
        assert torch.equal(exact.matmul(x[i : i + 1], w)[0], together[i])
    others = x * torch.randn(x.shape[0], 1, generator=rng).to(dtype) * 1000
    others[17] = x[17]
    assert torch.equal(exact.matmul(others, w)[17], together[17])


def test_a_rows_bits_do_not_depend_on_its_place(rng: torch.Generator) -> None:
    x, w = operands(rng)
    rows, columns = torch.randperm(37, generator=rng), torch.randperm(45, generator=rng)
    assert torch.equal(exact.matmul(x[rows], w[columns]), exact.matmul(x, w)[rows][:, columns])


def test_neither_memory_layout_nor_batching_changes_a_bit(rng: torch.Generator) -> None:
    x, w = operands(rng)
    together = exact.matmul(x, w)
    assert torch.equal(exact.matmul(x.T.contiguous().T, w.T.contiguous().T), together)
    batch = exact.matmul(torch.stack((x.flip(0), x)), torch.stack((w, w)))
    assert batch.shape == (2, 37, 45)
    assert torch.equal(batch[1], together) and torch.equal(batch[0], together.flip(0))


@pytest.mark.parametrize("rows, columns, piece", [(1, 1, 1), (3, 7, 64), (256, 4, 1 << 20), (36, 1024, 5000)])
def test_piece_sizes_change_no_bit(
    rows: int, columns: int, piece: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = operands(rng)
    usual = exact.matmul(x, w)
    monkeypatch.setattr(exact, "ROWS", rows)
    monkeypatch.setattr(exact, "COLUMNS", columns)
    monkeypatch.setattr(exact, "PIECE", piece)
    assert torch.equal(exact.matmul(x, w), usual)


def test_the_number_of_threads_changes_no_bit(rng: torch.Generator) -> None:
    x, w = operands(rng, 150, 700, 160)
    with threads(1):
        one = exact.matmul(x, w), exact.tree_sum(x), exact.exp(x), exact.softplus(x)
    with threads(2):
        two = exact.matmul(x, w), exact.tree_sum(x), exact.exp(x), exact.softplus(x)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_snapping_leaves_bf16_near_the_blocks_largest_alone(rng: torch.Generator) -> None:
    size = 2.0 ** torch.randint(-40, 40, (50, 1), generator=rng)
    x = (torch.randn(50, 96, generator=rng) * 2.0 ** -torch.randint(0, 24, (50, 96), generator=rng)).bfloat16() * size
    blocks = x.double().unflatten(-1, (-1, 32))
    snapped = exact.snap(x)
    largest = blocks.abs().amax(-1, keepdim=True)
    near = blocks.abs() >= largest * 2.0**-16
    assert 0.2 < near.double().mean() < 0.95
    assert torch.equal(snapped[near], blocks[near])
    assert ((snapped - blocks).abs() <= largest * 2.0**-24).all()
    assert (snapped != blocks).any()


def test_snapping_fills_the_last_block_with_zeros() -> None:
    blocks = exact.snap(torch.ones(2, 40))
    assert blocks.shape == (2, 2, 32) and blocks.dtype == torch.float64
    assert blocks.sum((1, 2)).tolist() == [40.0, 40.0] and not blocks[:, 1, 8:].any()
    assert not exact.snap(torch.zeros(1, 32)).any()


# Sums


@pytest.mark.parametrize("k", [1, 2, 3, 63, 64, 65, 640, 1023])
def test_a_tree_sum_is_close_to_the_exact_sum(k: int, rng: torch.Generator) -> None:
    x = torch.randn(30, k, generator=rng)
    for row, total in zip(x, exact.tree_sum(x), strict=True):
        size = math.fsum(row.abs().tolist())
        assert abs(total.item() - math.fsum(row.tolist())) <= size * 2.0**-24 * math.ceil(math.log2(k))


def test_a_tree_sum_adds_the_second_half_to_the_first() -> None:
    assert exact.tree_sum(torch.tensor([1e8, 1.0, -1e8, 1.0])).item() == 2.0  # one after another gives 1
    assert exact.tree_sum(torch.tensor([1e8, 1.0, 1.0, -1e8])).item() == 0.0  # neighbours first gives another


def test_a_tree_sum_of_a_row_does_not_depend_on_others_or_on_layout(rng: torch.Generator) -> None:
    x = torch.randn(6, 7, 77, generator=rng)
    together = exact.tree_sum(x)
    assert torch.equal(exact.tree_sum(x[3, 4]), together[3, 4])
    assert torch.equal(exact.tree_sum(x.movedim(-1, 0).contiguous().movedim(0, -1)), together)


# Elementary functions


GRID = torch.cat([
    torch.linspace(-110, 95, 200_001),
    torch.linspace(-1e-3, 1e-3, 2_001),
    torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-30, -1e-30]),
])  # fmt: skip


def truth(name: str, x: torch.Tensor) -> torch.Tensor:
    """The float64 result, rounded once."""
    wide = x.double()
    if name == "exp":
        return wide.exp().float()
    if name == "sigmoid":
        return (1 / (1 + (-wide).exp())).float()
    if name == "erf":
        return wide.erf().float()
    return (wide.clamp_min(0) + (-wide.abs()).exp().log1p()).float()


@pytest.mark.parametrize("name", ["exp", "sigmoid", "softplus", "erf"])
def test_functions_are_the_float64_results_rounded_once(name: str) -> None:
    result = getattr(exact, name)(GRID)
    assert result.dtype == torch.float32
    assert torch.equal(result, truth(name, GRID))


@pytest.mark.parametrize(
    "name, low, high",
    [("exp", 0.0, math.inf), ("sigmoid", 0.0, 1.0), ("softplus", 0.0, math.inf), ("erf", -1.0, 1.0)],
)
def test_functions_of_infinities_and_nan(name: str, low: float, high: float) -> None:
    function = getattr(exact, name)
    assert function(torch.tensor([-math.inf, -1e30, -3e38, -710.0])).tolist() == [low] * 4
    assert function(torch.tensor([math.inf])).item() == high
    assert math.isnan(function(torch.tensor([math.nan])).item())
    at_zero = {"exp": 1, "sigmoid": 0.5, "softplus": truth(name, torch.zeros(1)), "erf": 0}
    assert function(torch.tensor([0.0])).item() == at_zero[name]


def test_functions_of_big_numbers() -> None:
    big = torch.tensor([88.0, 89.0, 1e30])
    assert exact.exp(big)[0].isfinite() and exact.exp(big)[1:].tolist() == [math.inf] * 2
    assert exact.sigmoid(big).tolist() == [1.0] * 3
    assert torch.equal(exact.softplus(big), big)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "softplus", "rsqrt", "erf"])
def test_a_functions_bits_do_not_depend_on_the_place_in_the_tensor(name: str, rng: torch.Generator) -> None:
    x = torch.rand(203, generator=rng) * 20
    function = getattr(exact, name)
    together = function(x)
    for first, last in ((0, 1), (5, 6), (1, 203), (7, 24), (202, 203)):
        assert torch.equal(function(x[first:last]), together[first:last])
    assert torch.equal(function(x[::3]), together[::3])


def test_rsqrt_is_two_correctly_rounded_operations(rng: torch.Generator) -> None:
    x = torch.rand(5000, generator=rng) * 2.0 ** torch.randint(-60, 60, (5000,), generator=rng)
    root = np.sqrt(x.double().numpy()).astype(np.float32)  # innocent double rounding: 53 bits are enough for 24
    assert torch.equal(exact.rsqrt(x), torch.from_numpy((1 / root.astype(np.float64)).astype(np.float32)))


def test_powers_of_two_are_exact_and_stay_normal() -> None:
    exponents = torch.arange(-1022, 1024)
    assert exact.power_of_two(exponents).tolist() == [2.0**k for k in range(-1022, 1024)]
    assert exact.power_of_two(torch.tensor([-5000, -1023, 1024, 9999])).tolist() == [2.0**-1022] * 2 + [2.0**1023] * 2
    assert exact.power_of_two(torch.tensor([3.0, -2.0])).tolist() == [8.0, 0.25]
