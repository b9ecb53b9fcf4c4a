"""Does it fit: state against real caches, the largest sizes against their neighbours, rules against each other."""

from dataclasses import replace

import pytest

from openv41.config import Config
from openv41.errors import InputError
from openv41.explain.fit import GIB, Plan, fit, largest, state_bytes
from openv41.explain.ledger import runtime_tallies, total
from openv41.state import Cache

RELEASED, TINY = Config.released(), Config.tiny()
H200 = Plan(8, 131 * GIB, 8, 131_072, 64)


@pytest.mark.parametrize("config", [TINY, RELEASED], ids=["tiny", "released"])
@pytest.mark.parametrize(("slots", "context"), [(1, 1), (1, 4096), (3, 100), (7, 1337)])
@pytest.mark.parametrize("draft", [True, False])
def test_state_is_what_a_cache_takes(config: Config, slots: int, context: int, draft: bool) -> None:
    slack = config.dspark_block_size if draft else 0
    cache = Cache(config, slots, slots * context, slack, device="meta", store="packed", draft=draft)
    told = state_bytes(config, slots, context, draft)
    assert {k: v for k, v in cache.nbytes().items() if v} == {k: v for k, v in told.items() if v}


def test_a_real_cache_is_as_large_as_one_without_memory() -> None:
    sizes = [Cache(TINY, 3, 500, 5, device=device, store="packed", draft=True).nbytes() for device in ("cpu", "meta")]
    assert sizes[0] == sizes[1]


def test_the_answer_adds_up() -> None:
    answer = fit(RELEASED, H200)
    assert answer.fits and answer.used + answer.free == H200.memory
    assert answer.used == sum(count for _, _, count in answer.rows)
    assert 40 * GIB < answer.used < 60 * GIB


def test_all_gpus_together_hold_the_model_once() -> None:
    """On one GPU nothing is divided, and with everything on it the weights are those of the runtime, but for `wo_a`,
    which this library keeps in fp8."""
    answer = fit(RELEASED, Plan(1, 1 << 50, 1, 4096, 1, "device"))
    weights = sum(count for kind, _, count in answer.rows if kind == "weights")
    held = total(runtime_tallies(RELEASED)).nbytes
    layers = RELEASED.n_layers + RELEASED.n_mtp_layers
    wo_a = RELEASED.n_heads * RELEASED.head_dim * RELEASED.o_lora_rank
    assert abs(weights - (held - layers * (wo_a - wo_a // 1024))) <= len(answer.rows)


@pytest.mark.parametrize(
    "plan", [H200, replace(H200, tp=1), replace(H200, batch=1), replace(H200, engram="device", draft=False)]
)
def test_the_largest_fits_and_the_next_does_not(plan: Plan) -> None:
    answer = fit(RELEASED, plan)
    for name, value, most in (
        ("context", answer.largest_context, RELEASED.context), ("batch", answer.largest_batch, 1 << 20)
    ):  # fmt: skip
        if value:
            assert fit(RELEASED, replace(plan, **{name: value})).fits
        if value < most:
            assert not fit(RELEASED, replace(plan, **{name: value + 1})).fits


def test_more_of_anything_takes_more() -> None:
    used = fit(RELEASED, H200).used
    assert fit(RELEASED, replace(H200, batch=65)).used > used
    assert fit(RELEASED, replace(H200, context=140_000)).used > used
    assert fit(RELEASED, replace(H200, tp=4)).used > used - 40 * GIB
    assert fit(RELEASED, replace(H200, gpus=16, tp=8)).used < used
    assert fit(RELEASED, replace(H200, engram="device")).used > used
    assert fit(RELEASED, replace(H200, draft=False)).used < used


def test_what_does_not_fit_says_so() -> None:
    answer = fit(RELEASED, Plan(1, 80 * GIB))
    assert not answer.fits and answer.largest_context == answer.largest_batch == 0


def test_largest() -> None:
    for limit, found in {0: 0, 1: 1, 7: 7, 10: 10, 99: 10}.items():
        assert largest(limit.__ge__, 10) == found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": 0}, "gpus must be 1 or more"),
        ({"batch": -1}, "batch must be 1 or more"),
        ({"context": 0}, "context must be 1 or more"),
        ({"context": 1 << 21}, "the context is 1048576 tokens at most"),
        ({"tp": 3}, "tp must divide the number of GPUs"),
        ({"gpus": 32, "tp": 16}, "tp must divide the 8 groups of heads"),
        ({"memory": 0}, "memory must be above 0"),
    ],
)
def test_numbers_that_cannot_be(change: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fit(RELEASED, replace(H200, **change))
