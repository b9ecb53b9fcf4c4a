"""End to end, a step may differ lawfully once a pick or a kept row was rounded otherwise, and not before."""

import pytest
import torch

from openv41.ops import choose
from openv41.parity import Folder, select
from openv41.parity.compare import Sheet
from openv41.parity.groups.model import ROUNDED, Model

STEPS = 31
"""A prompt's last position, and thirty single steps."""


@pytest.fixture(scope="module")
def model(golden: Folder) -> Model:
    (case,) = select(golden, ["model"], ["short_own_keys"])
    return Model(case, choose("cpu", "cpu"))


def passes(model: Model, off: dict[int, float], parted: int = STEPS, rounded: int = STEPS) -> bool:
    """Whether logits pass that are off by so much at some steps."""
    logits = model.case["logits"].clone()
    assert logits.shape[1] == STEPS
    for step, by in off.items():
        logits[0, step, 7] += by
    sheet = Sheet()
    model._judge_steps(sheet, logits, parted, rounded)
    return sheet.passed


def test_nine_of_ten_steps_are_near(model: Model) -> None:
    assert passes(model, {}) and passes(model, dict.fromkeys(range(5, 8), 9.0))
    assert not passes(model, dict.fromkeys(range(5, 9), 0.06))
    assert passes(model, dict.fromkeys(range(5, 9), 0.04))


def test_behind_a_row_rounded_otherwise_the_bound_is_wider(model: Model) -> None:
    late = range(20, STEPS)
    assert ROUNDED == 0.25 and not passes(model, dict.fromkeys(late, 0.2))
    assert passes(model, dict.fromkeys(late, 0.2), rounded=20)
    assert not passes(model, dict.fromkeys(late, 0.2), rounded=24)
    assert not passes(model, dict.fromkeys(late, 0.3), rounded=20)


def test_behind_another_pick_no_step_is_judged_by_itself(model: Model) -> None:
    assert passes(model, dict.fromkeys(range(20, STEPS), 3.0), parted=20)
    assert not passes(model, dict.fromkeys(range(20, STEPS), 3.0), parted=24)


def test_the_first_call_that_keeps_another_row(model: Model) -> None:
    def held(call: int, other: int) -> dict[str, torch.Tensor]:
        rows = torch.arange(float(call)).view(-1, 1)
        return {"window.0.0": rows, "keys.2.0": rows + (call >= other)}

    model.kept = [held(call, 9) for call in range(1, 5)]
    assert model._rounded([held(call, 9) for call in range(1, 5)]) == 4
    assert model._rounded([held(call, 3) for call in range(1, 5)]) == 2
    model.kept = []
