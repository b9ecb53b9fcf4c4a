"""Distances, bounds, and picks that may or may not be others."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openv41.ops import choose
from openv41.parity.compare import EXACT, Bounds, Sheet, bounds, same_bits, ulp_distance
from openv41.parity.picks import TorchTies, compare_most, compare_picks, ordered, tied_blocks, tied_picks


def passes(got: list[float], wanted: list[float], allowed: Bounds, dtype: torch.dtype = torch.float32) -> bool:
    sheet = Sheet()
    sheet.compare("x", torch.tensor(got, dtype=dtype), torch.tensor(wanted, dtype=dtype), allowed)
    return sheet.passed


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 5))
def test_ulp_distance_counts_steps(value: float, steps: int) -> None:
    one = torch.tensor([value]).bfloat16()
    other = one
    for _ in range(steps):
        other = torch.nextafter(other, torch.full_like(other, torch.inf))
    if other.isfinite().all():
        assert int(ulp_distance(other, one)) == int(ulp_distance(one, other)) == steps


def test_zero_has_no_sign_in_steps_but_has_in_bits() -> None:
    zeros = torch.tensor([0.0, -0.0]).bfloat16()
    assert ulp_distance(zeros[:1], zeros[1:]).item() == 0
    ours, theirs = same_bits(zeros[:1], zeros[1:])
    assert ours != theirs


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_near_to_itself_alone(bad: float) -> None:
    loose = Bounds(atol=1e30, rtol=1e30, max_ulp=1e30)
    assert passes([bad], [bad], EXACT)
    assert not passes([bad], [1.0], loose)
    assert not passes([1.0], [bad], Bounds(atol=1e30)) or not math.isnan(bad)
    assert not passes([bad], [1.0], Bounds(atol=math.inf, rms_error=0.3))


def test_elements_shares_and_means() -> None:
    assert passes([1.0, 2.009], [1.0, 2.0], Bounds(atol=0.01)) and not passes(
        [1.0, 2.011], [1.0, 2.0], Bounds(atol=0.01)
    )
    assert passes([100.1], [100.0], Bounds(rtol=0.01)) and not passes([102.0], [100.0], Bounds(rtol=0.01))
    one_ulp = [1.0078125] + [1.0] * 9
    assert passes(one_ulp, [1.0] * 10, Bounds(max_ulp=1, min_equal=0.9), torch.bfloat16)
    assert not passes(one_ulp, [1.0] * 10, Bounds(max_ulp=1, min_equal=0.95), torch.bfloat16)
    assert not passes([1.016, 1.0], [1.0] * 2, Bounds(max_ulp=1), torch.bfloat16)
    assert not passes([1.5] + [1.0] * 9, [1.0] * 10, Bounds(atol=1, min_within_1ulp=0.95))
    assert passes([1.1, 1.0], [1.0, 1.0], Bounds(atol=1, rms_error=0.08))
    assert not passes([1.2, 1.0], [1.0, 1.0], Bounds(atol=1, rms_error=0.08))
    assert not passes([1.2, 1.0], [1.0, 1.0], Bounds(atol=1, relative_rms_error=0.08))


def test_another_shape_fails_whatever_is_allowed() -> None:
    assert not passes([1.0, 1.0], [1.0], Bounds(atol=1e9))


def test_a_share_alone_still_bounds_each_element() -> None:
    allowed = Bounds.read({"min_equal": 0.5})
    assert allowed is not None
    assert passes([3.0, 1.0], [3.0, 1.1], allowed) and not passes([3.0, 1.0], [3.0, 9.0], allowed)


def test_bounds_are_found_by_name_then_for_all_then_the_given_ones() -> None:
    told = {
        "bit_exact": "same machine",
        "y": {"torch on CPU": {"atol": 0.01}, "elsewhere": {"atol": 9}},
        "idx": "exact",
    }
    assert bounds(told, "y") == Bounds(atol=0.01)
    assert bounds(told, "idx", otherwise=Bounds(atol=1)) == EXACT
    assert bounds(told, "z", otherwise=Bounds(atol=1)) == Bounds(atol=1)
    assert bounds(told, "z") == EXACT
    assert bounds({"atol": 2}, "z", otherwise=EXACT) == Bounds(atol=2)
    assert bounds({"bit_exact": True, "atol": 2}, "z", otherwise=Bounds(atol=9)) == EXACT
    assert bounds({"bit_exact": False}, "z") == EXACT
    assert bounds({"x": "min_equal 0.97, atol 0.05"}, "x") == Bounds(min_equal=0.97, atol=0.05)
    assert bounds({"x": "atol 1e-3"}, "x") == Bounds(atol=1e-3)


# Picks

SCORES = torch.tensor([[5.0, 4.0, 3.0, 3.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0]]).bfloat16()


def test_ties_at_the_boundary_are_seen() -> None:
    assert tied_picks(SCORES, 3).tolist() == [True, False]
    assert tied_picks(SCORES, 2).tolist() == [False, False]
    assert tied_picks(SCORES, 5).tolist() == [False, False]
    assert tied_picks(SCORES.masked_fill(SCORES < 4, -torch.inf), 3).tolist() == [False, False]


def test_tied_blocks_leave_out_the_pinned_one() -> None:
    scores = torch.tensor([[3.0, 0.0, 3.0, 0.0, 1.0, 1.0]])
    assert tied_blocks(scores, torch.tensor([6]), 2, 2).tolist() == [True]
    assert tied_blocks(scores, torch.tensor([6]), 2, 3).tolist() == [False]
    assert tied_blocks(scores, torch.tensor([3]), 2, 1).tolist() == [False]


@pytest.mark.parametrize(
    ("picks", "fine"),
    [
        ([[0, 1, 3], [0, 1, 2]], True),  # the other one of two equal scores
        ([[0, 1, 2], [0, 1, 2]], True),
        ([[2, 1, 0], [2, 0, 1]], True),  # a set, in whatever order
        ([[0, 1, 4], [0, 1, 2]], False),  # tied, but worse
        ([[0, 1, 1], [0, 1, 2]], False),
        ([[0, 1, -1], [0, 1, 2]], False),
        ([[0, 1, 2], [0, 1, 3]], False),  # not tied
        ([[0, 1, 9], [0, 1, 2]], False),
    ],
)
def test_picks_may_differ_in_tied_rows_alone(picks: list[list[int]], fine: bool) -> None:
    sheet, wanted = Sheet(), torch.tensor([[0, 1, 2], [0, 1, 2]])
    differ = compare_picks(sheet, "idx", torch.tensor(picks), wanted, torch.tensor([True, False]), (SCORES, SCORES))
    assert sheet.passed == fine
    assert differ.tolist() == [fine and sorted(row) != [0, 1, 2] for row in picks]  # the lawful ones


def test_picks_follow_a_score_that_moved() -> None:
    """Ours prefers position 3 by a hair, because its score came out a step higher than recorded."""
    theirs = torch.tensor([[5.0, 4.0, 3.0, 2.984375]]).bfloat16()
    ours = torch.tensor([[5.0, 4.0, 3.0, 3.015625]]).bfloat16()
    wanted, tied = torch.tensor([[0, 1, 2]]), torch.tensor([False])
    for scores, fine in (((ours, theirs), True), ((theirs, theirs), False)):
        sheet = Sheet()
        compare_picks(sheet, "idx", torch.tensor([[0, 1, 3]]), wanted, tied, scores)
        assert sheet.passed == fine


def test_rows_below_tied_candidates_are_not_judged() -> None:
    wanted, got, none = torch.tensor([[0, 1]]), torch.tensor([[0, 3]]), torch.tensor([False])
    for judged, fine in ((False, True), (True, False)):
        sheet = Sheet()
        compare_picks(sheet, "idx", got, wanted, none, judged=torch.tensor([judged]))
        assert sheet.passed == fine


@pytest.mark.parametrize(("others", "fine"), [(1, True), (0, False)])
def test_a_few_picks_may_be_others(others: int, fine: bool) -> None:
    sheet = Sheet()
    compare_most(sheet, "idx", torch.tensor([[0, 1, 9]]), torch.tensor([[0, 1, 2]]), torch.tensor([False]), others)
    assert sheet.passed == fine


def test_lists_of_other_widths_are_ordered_alike() -> None:
    assert ordered(torch.tensor([[3, -1, 1]]), 4).tolist() == [[1, 3, -1, -1]]


@given(st.integers(0, 2**31 - 1), st.integers(1, 6))
def test_torch_ties_pick_as_well_as_ours(seed: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 3, (7, 12), generator=generator).bfloat16()
    visible = torch.randint(1, 13, (7,), generator=generator)
    ops = choose("cpu", "reference")
    theirs, ours = TorchTies(ops).pick(scores, visible, k), ops.pick(scores, visible, k)
    sheet = Sheet()
    hidden = scores.masked_fill(torch.arange(12) >= visible.unsqueeze(1), -torch.inf)
    compare_picks(sheet, "idx", theirs, ours, tied_picks(hidden, k), (hidden, hidden))
    assert sheet.passed
