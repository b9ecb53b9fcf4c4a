"""Sinkhorn's rounds in one kernel, and their gradient, against the library's steps in float64."""

import pytest
import torch

from openv41.errors import OpsError
from openv41.ops.hopper.sinkhorn import balanced
from openv41.ops.reference import ReferenceOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("size", [1.0, 80.0])
@pytest.mark.parametrize(("n", "m", "rounds"), [(1, 4, 20), (70, 4, 3), (5, 2, 1), (0, 4, 20)])
def test_rounds_and_gradient_are_the_specifications(
    n: int, m: int, rounds: int, size: float, rng: torch.Generator
) -> None:
    logits = (torch.randn(n, m, m, generator=rng) * size).to(DEVICE).requires_grad_()
    weights = torch.randn(n, m, m, generator=rng).to(DEVICE)
    slow = logits.detach().double().requires_grad_()
    expected = ReferenceOps("plain").sinkhorn(slow, rounds, 1e-6)
    (expected * weights).sum().backward()
    found = balanced(logits, rounds, 1e-6)
    (found * weights).sum().backward()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(logits.grad.double(), slow.grad, atol=2e-5, rtol=2e-3)


def test_matrices_that_it_cannot_hold_are_refused() -> None:
    for logits, rounds in ((torch.zeros(1, 3, 3), 2), (torch.zeros(1, 4, 4).double(), 2), (torch.zeros(1, 4, 4), 0)):
        with pytest.raises(OpsError, match="sinkhorn"):
            balanced(logits.to(DEVICE), rounds, 1e-6)
