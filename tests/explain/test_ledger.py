"""The two published ways to add up, both reproduced to the unit."""

import json
from pathlib import Path

import pytest

from openv41.config import Config
from openv41.explain.ledger import PARTS, checkpoint_tallies, parameters_of, runtime_tallies, total
from openv41.explain.scene import counted_model
from openv41.weights.names import published_tensors

TESTS = Path(__file__).resolve().parents[1]
COUNTS = json.loads((TESTS / "golden" / "param_counts.json").read_text())
RELEASED, TINY = Config.released(), Config.tiny()


@pytest.mark.parametrize("part", PARTS)
def test_parts_as_the_model_runs(part: str) -> None:
    published = COUNTS["parts"][{"draft": "mtp"}.get(part, part)]
    tally = runtime_tallies(RELEASED)[part]  # type: ignore[index]
    assert (tally.parameters, tally.scales, tally.nbytes) == (
        published["parameters"], published["scale_entries"], published["bytes"],
    )  # fmt: skip


def test_all_as_the_model_runs() -> None:
    tally = total(runtime_tallies(RELEASED))
    assert tally.parameters == COUNTS["total"]["parameters"] and tally.nbytes == COUNTS["total"]["bytes"]
    assert tally.scales == COUNTS["total"]["scale_entries"] and tally.tensors == COUNTS["tensor_count_in_state_dict"]


def test_the_files() -> None:
    """Added up; name, shape and type of every tensor are compared with the files' headers in tests/weights."""
    tallies = checkpoint_tallies(RELEASED)
    tally = total(tallies)
    assert (tally.tensors, tally.nbytes, tally.parameters) == (96_085, 510_286_023_000, 763_205_315_794)
    delimiters = 3 * RELEASED.dim
    assert tallies["vision"].parameters == COUNTS["parts"]["vision"]["parameters"] - delimiters
    assert tallies["backbone"].parameters == COUNTS["parts"]["backbone"]["parameters"] + delimiters


@pytest.mark.parametrize(
    "config",
    [TINY, TINY.replace(dtype="bf16", expert_dtype=None), TINY.replace(hc_mult=1)],
    ids=["fp8", "bf16", "one stream"],
)
def test_modules_and_files_hold_the_same_parameters(config: Config) -> None:
    model, _ = counted_model(config)
    counted = parameters_of(model)
    assert counted == total(checkpoint_tallies(config)).parameters == total(runtime_tallies(config)).parameters
    assert total(checkpoint_tallies(config)).tensors == len(published_tensors(config))
