"""openv41-mini as it lies in the package: whole, small, of every kind of layer, and able to finish a function."""

import ast
import json

import pytest

import openv41
from openv41 import api
from openv41.plan import Role, plan_layers
from tests.mini.scripts import ROOT

import card  # isort: skip  (scripts puts it in reach)

MOST_BYTES = 24_000_000
SNIPPET = '''def mean(values):
    """The average of some numbers."""
    total = 0
    for value in values:
        total += value
    return total / len(values)
'''


@pytest.fixture(scope="module")
def assistant() -> api.Assistant:
    return openv41.load(ops="reference")


def test_it_is_part_of_the_package_and_small(assistant):
    folder = api.shipped()
    assert folder is not None and assistant.folder == folder
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES


def test_it_has_every_part(assistant):
    config = assistant.config
    assert {row.role for row in plan_layers(config)} == set(Role)
    assert config.engram_layer_ids and config.n_mtp_layers == 3 and config.hc_mult == 4 and config.n_shared_experts
    assert config.context >= 8192 and config.dtype == "fp8" and config.vision_n_layers


def test_it_finishes_the_function_of_the_demo(assistant):
    """The same text on every machine: the reference's bits do not depend on one."""
    prompt = (ROOT / "mini" / "prompt.txt").read_text()
    made = assistant.generate(prompt, max_new_tokens=64, stop=["\n\n "]).text
    (point,) = ast.parse(prompt + made).body
    assert isinstance(point, ast.ClassDef)
    last = point.body[-1]
    assert isinstance(last, ast.FunctionDef) and last.name == "__repr__"
    assert isinstance(last.body[-1], ast.Return) and last.body[-1].value is not None


def test_python_is_likelier_to_it_than_its_characters_in_disorder(assistant):
    text, disorder = (assistant.score(one).bits_per_byte for one in (SNIPPET, "".join(sorted(SNIPPET))))
    assert 2 * text < disorder and text < 2, (text, disorder)


def test_its_card_is_its_own():
    """The figures in mini/results are of these weights, and docs/mini.md says what they say."""
    results = ROOT / "mini" / "results"
    digest = card.Subject(api.shipped(), None, results, results).digest
    for name in card.OF_MODEL:
        assert json.loads((results / f"{name}.json").read_text())["weights"] == digest, name
