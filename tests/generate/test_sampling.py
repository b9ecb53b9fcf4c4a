"""The sampler draws from the distribution that it states, and a sequence's draws are its own."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openv41.errors import InputError, OpsError
from openv41.generate.sampling import Sampling, draw, generator_for, probabilities, sample

VOCABULARY = 16
LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.5, 3.0, 1.0, -4.0, 0.0, 2.5, 1.5, -0.5, 0.25, 1.75, -2.0, 0.75, 2.0]])


def draws(sampling: Sampling, count: int, stream: int = 0) -> torch.Tensor:
    """How often each token of `LOGITS` comes in `count` samples of one sequence."""
    generator = generator_for(sampling.seed, stream)
    ids = sample(LOGITS.expand(count, -1), [sampling] * count, [generator] * count)
    return torch.bincount(torch.tensor(ids), minlength=VOCABULARY)


def surprise(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's chi-square in standard deviations of a normal variable (Wilson and Hilferty)."""
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a token came that is ruled out"
    wanted = expected[possible] * counts.sum()
    square = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    free = int(possible.sum()) - 1
    return ((square / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=1.0),
        dict(temperature=0.5),
        dict(temperature=3.0),
        dict(temperature=1.0, top_k=5),
        dict(temperature=1.0, top_p=0.8),
        dict(temperature=1.5, top_p=0.9, top_k=9),
    ],
)
def test_samples_have_the_stated_distribution(options: dict, number: int) -> None:
    sampling = Sampling(**options, seed=number)
    assert abs(surprise(draws(sampling, 10_000), probabilities(LOGITS, sampling)[0])) < 3.5


def test_the_test_above_notices_another_temperature() -> None:
    counts = draws(Sampling(1.0), 10_000)
    assert surprise(counts, probabilities(LOGITS, Sampling(1.1))[0]) > 3.5


def test_plain_temperature_is_softmax() -> None:
    expected = (LOGITS.double() / 0.7).softmax(1)
    assert torch.allclose(probabilities(LOGITS, Sampling(0.7)), expected, rtol=1e-12)


def test_greedy_takes_the_first_maximum() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [7.0, 7.0, 7.0, 7.0], [-3.0, -2.0, -9.0, -2.0]])
    none = [generator_for(0, 0)] * 3
    assert sample(logits, [Sampling()] * 3, none) == [1, 0, 1]
    assert probabilities(logits, Sampling()).argmax(1).tolist() == [1, 0, 1]
    assert torch.equal(probabilities(logits, Sampling()).sum(1), torch.ones(3, dtype=torch.float64))


def test_top_k_keeps_the_likeliest_and_of_equals_the_lower() -> None:
    kept = probabilities(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), Sampling(1.0, top_k=2))[0] > 0
    assert kept.tolist() == [True, True, False, False]


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.3, 0.5, 0.77, 0.9, 0.999, 1.0])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float) -> None:
    full = LOGITS.double().softmax(1)[0]
    narrowed = probabilities(LOGITS, Sampling(1.0, top_p=top_p))[0]
    kept = narrowed > 0
    mass = full[kept].sum()
    assert kept.any() and mass >= top_p - 1e-12
    assert kept.sum() == 1 or mass - full[kept].min() < top_p, "one token fewer would have done"
    assert full[kept].min() >= (full[~kept].max() if not kept.all() else 0)
    assert torch.allclose(narrowed[kept], full[kept] / mass, rtol=1e-12)


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    # Of the three that stay, 0.4 and 0.3 make up 7/9, which reaches 0.75; of all four they would not.
    assert (probabilities(logits, Sampling(1.0, top_p=0.75, top_k=3)) > 0).tolist() == [[True, True, False, False]]
    assert (probabilities(logits, Sampling(1.0, top_p=0.75)) > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert torch.equal(probabilities(LOGITS, Sampling(temperature)), probabilities(LOGITS, Sampling()))


def test_a_huge_temperature_is_uniform() -> None:
    even = torch.full((1, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64)
    assert torch.allclose(probabilities(LOGITS * 1e30, Sampling(1.7e308)), even)


WEIGHTS = st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda weights: sum(weights) > 1e-3)


@given(WEIGHTS, st.floats(0, 1, exclude_max=True))
def test_no_draw_is_impossible(weights: list[float], uniform: float) -> None:
    distribution = torch.tensor([weights], dtype=torch.float64)
    [id] = draw(distribution, torch.tensor([uniform], dtype=torch.float64)).tolist()
    assert weights[id] > 0


def test_draws_at_the_ends() -> None:
    distribution = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 4)
    uniform = torch.tensor([0.0, 0.499, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(distribution, uniform).tolist() == [1, 1, 3, 3]


def test_a_sequence_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1))
    plain, narrow = Sampling(1.0), Sampling(2.0, 0.9)
    samplings = [plain, Sampling(), Sampling(0.8, seed=3), plain, Sampling(1.0, top_k=4), narrow]

    def rounds(rows: list[int]) -> np.ndarray:
        generators = [generator_for(samplings[row].seed, row) for row in rows]
        picked = [samplings[row] for row in rows]
        return np.array([sample(logits[rows], picked, generators) for _ in range(20)])

    together = rounds([0, 1, 2, 3, 4, 5])
    for row in range(6):
        assert (rounds([row])[:, 0] == together[:, row]).all()
    assert (rounds([4, 2])[:, ::-1] == together[:, [2, 4]]).all()


def test_seeds_and_streams_give_other_numbers() -> None:
    numbers = {generator_for(seed, stream).random() for seed in range(4) for stream in range(4)}
    assert len(numbers) == 16
    assert draws(Sampling(1.0, seed=2**80), 50).tolist() == draws(Sampling(1.0, seed=2**80), 50).tolist()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (dict(temperature=-0.1), "temperature"),
        (dict(temperature=math.nan), "temperature"),
        (dict(temperature=math.inf), "temperature"),
        (dict(temperature=10**400), "temperature"),
        (dict(temperature=True), "temperature"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.01), "top_p"),
        (dict(top_p=math.nan), "top_p"),
        (dict(top_k=-1), "top_k"),
        (dict(seed=-1), "seed"),
    ],
)
def test_values_out_of_range_are_refused(options: dict, field: str) -> None:
    with pytest.raises(InputError, match=rf"^{field} must be .*, got .*; "):
        Sampling(**options)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_refused(value: float, temperature: float) -> None:
    logits = LOGITS.clone()
    logits[0, 3] = value
    with pytest.raises(OpsError, match="logits must be finite"):
        sample(logits, [Sampling(temperature)], [generator_for(0, 0)])
