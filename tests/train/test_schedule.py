"""What changes while a run goes on: when, that a resumed run does the same, what may be changed between two calls."""

import json

import pytest
import torch

from openv41.errors import ConfigError
from openv41.model.masters import change_ops
from openv41.ops import choose
from openv41.state import Step
from openv41.train.loop import Training
from openv41.train.schedule import check_resumable, phase_at
from openv41.train.settings import Settings
from openv41.train.setup import ops_of
from openv41.train.trainable import build
from tests.small import drafting_config, tokens
from tests.train.runs import plain_ops, settings_of

PHASES = {
    "steps": 4,
    "optimizer": {"warmup": 1, "cooldown": 0.5},
    "model": {"published_from": 0.5},
    "loss": {"draft": 1.0, "draft_from": 0.25, "draft_blocks": 8},
    "record": {"checkpoint_every": 9, "recall_every": 0},
}


@pytest.fixture
def other_path(tmp_path_factory):
    """A folder for a second run."""
    return tmp_path_factory.mktemp("other")


def settings(**changes):
    values = {"steps": 10, "data": {"train": ["a.txt"]}, "optimizer": {"warmup": 2, "cooldown": 0.4}} | changes
    return Settings.from_dict(values)


def test_phases_begin_where_their_shares_say():
    s = settings(model={"published_from": 0.75}, loss={"draft": 0.5, "draft_from": 0.3})
    phases = [phase_at(s, step) for step in range(10)]
    assert [phase.numerics for phase in phases] == ["plain"] * 8 + ["published"] * 2
    assert [phase.draft for phase in phases] == [0.0] * 3 + [0.5] * 7
    rates = [phase.rate for phase in phases]
    assert rates[:2] == [0.5, 1.0] and rates[2:7] == [1.0] * 5 and rates[9] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[6:], rates[7:], strict=False))


def test_without_shares_nothing_changes_but_the_rate():
    plain = [phase_at(settings(), step) for step in range(10)]
    assert {(phase.numerics, phase.draft) for phase in plain} == {("plain", 0.0)}
    assert phase_at(settings(model={"numerics": "published"}), 0).numerics == "published"
    assert phase_at(settings(optimizer={"warmup": 0, "cooldown": 0}), 9).rate == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"published_from": 1.2}}, "model.published_from must be at most 1, got 1.2"),
        ({"model": {"published_from": 0.5, "numerics": "published"}}, "model.published_from must be 1 with numerics"),
        ({"loss": {"draft": 1.0, "draft_from": 0.5, "draft_only": True}}, "loss.draft_from must be 0 with loss"),
        ({"optimizer": {"cooldown": -0.1}}, "optimizer.cooldown must be at least 0, got -0.1"),
    ],
)
def test_shares_out_of_range_are_told(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_operations_may_change_under_a_model(seed):
    """A model that changes to published numerics gives what one gives that was built with them, and back."""
    config = drafting_config()
    published = choose("cpu", numerics="published", training=True)
    changing, built = build(config, plain_ops(), seed), build(config, published, seed)
    step = Step.pack([(0, 0, tokens(config, 30, seed))], "all")
    before = changing(step).logits
    change_ops(changing, published)
    assert torch.equal(changing(step).logits, built(step).logits)
    assert not torch.equal(before, built(step).logits)
    change_ops(changing, plain_ops())
    assert torch.equal(changing(step).logits, before)
    assert ops_of(Settings(), config, "published").dtype == torch.bfloat16


def test_a_run_through_all_phases_resumes_to_the_bit(tmp_path, other_path):
    whole = Training(settings_of(other_path, **PHASES))
    lines = []
    whole.run(lines.append)
    steps = [line for line in lines if "loss" in line]
    assert [line["numerics"] for line in steps] == ["plain"] * 2 + ["published"] * 2
    assert ["draft" in line for line in steps] == [False] + [True] * 3
    assert all(line["device"] == "cpu" for line in steps)
    for steps in (1, 1, 2):  # ended where the draft begins to learn, and where the numerics change
        piece = Training(settings_of(tmp_path, **PHASES))
        for _ in range(steps):
            piece.advance()
        piece.save()
    assert piece.step == whole.step == 4
    for (name, one), (_, other) in zip(whole.model.named_parameters(), piece.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert whole.validate()["validation"] == piece.validate()["validation"]


def test_the_number_of_steps_may_change_until_the_rate_falls(tmp_path, other_path):
    """A run at its highest rate that is told to end sooner is the run that was to end there."""
    short = {"steps": 4, "optimizer": {"warmup": 1, "cooldown": 0.5}, "record": {"recall_every": 0}}
    known = Training(settings_of(other_path, **short))
    known.run()
    long = Training(settings_of(tmp_path, **(short | {"steps": 40})))
    for _ in range(2):
        long.advance()
    long.save()
    shortened = Training(settings_of(tmp_path, **short))
    assert shortened.step == 2 and shortened.run()
    for (name, one), (_, other) in zip(known.model.named_parameters(), shortened.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    with pytest.raises(ConfigError, match="steps may change as long as no step would have been another, but step 4 of"):
        Training(settings_of(tmp_path, **(short | {"steps": 5})))
    with pytest.raises(ConfigError, match="steps must be at least 4 here, got 3"):
        Training(settings_of(tmp_path, **(short | {"steps": 3})))


def test_nothing_else_may_change():
    before = settings()
    check_resumable(before, before, 10)
    with pytest.raises(ConfigError, match="another optimizer.rate"):
        check_resumable(settings(optimizer={"warmup": 2, "cooldown": 0.4, "rate": 1.0}), before, 0)
    with pytest.raises(ConfigError, match="model.published_from may change .* step 6 of the 8"):
        check_resumable(settings(model={"published_from": 0.5}), before, 8)
    check_resumable(settings(model={"published_from": 0.8}), before, 8)
    assert json.loads(json.dumps(before.to_dict()))["optimizer"]["cooldown"] == 0.4


def test_indexers_may_learn_now_and_then(tmp_path):
    """In the steps between they stay as they are; what they find is told whether they learn or not."""
    training = Training(settings_of(tmp_path, loss={"index_every": 3}, record={"recall_every": 2}))
    indexers = {name: p for name, p in training.model.named_parameters() if ".indexer." in name}
    moved, lines = [], []
    for _ in range(4):
        before = {name: p.detach().clone() for name, p in indexers.items()}
        lines.append(training.advance())
        moved.append(any(not torch.equal(p, before[name]) for name, p in indexers.items()))
    assert moved == [True, False, False, True] == ["index" in line for line in lines]
    assert ["recall" in line for line in lines] == [True, False, True, False]
