"""Two processes against one: the same losses and weights, checkpoints for one another, and no process left waiting."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from openv41.errors import ConfigError
from openv41.train import checkpoints
from openv41.train.data import Pack
from openv41.train.loop import METRICS, Training, read_metrics
from openv41.train.parallel import Alone, deal, launched, number_of_process, share
from openv41.train.settings import Settings
from tests.train.runs import settings_of

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240
"""Seconds until processes that should have ended count as hanging."""


def small(home, name, **changes):
    """The run `name` of six steps with everything that is trained: memory, indexers, balance, draft."""
    values = {
        "data": {"tokens": 48, "context": 48, "packs": 2, "validation_tokens": 120},
        "loss": {"draft": 1.0, "draft_blocks": 8},
        "model": {},
        "record": {"checkpoint_every": 4, "recall_every": 5, "validate_every": 0},
    }
    settings_of(home, **{section: value | changes.get(section, {}) for section, value in values.items()})
    path = home / f"{name}.toml"
    path.write_text((home / "train.toml").read_text().replace('folder = "run"', f'folder = "{name}"'))
    return Settings.from_toml(path)


def run_in_two(folder, jobs):
    """What each process of each job left: see `tests/train/ranks.py`."""
    folder.mkdir()
    listed = [{"arguments": ["train", str(path)], "disturbed": disturbed} for path, disturbed in jobs]
    (folder / "jobs.json").write_text(json.dumps(listed))
    command = [sys.executable, "-m", "tests.train.ranks", str(folder / "jobs.json")]
    common = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with tempfile.TemporaryFile("w+") as log:
        processes = [
            subprocess.Popen(
                command, cwd=ROOT, env=common | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
                stdout=log, stderr=log,
            )
            for rank in "01"
        ]  # fmt: skip
        try:
            codes = [process.wait(PATIENCE) for process in processes]
        finally:
            for process in processes:
                process.kill()
        log.seek(0)
        assert codes == [0, 0], log.read()
    return [[json.loads((folder / f"{job}-{rank}.json").read_text()) for rank in "01"] for job in range(len(jobs))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def alone(folder):
    """The six steps, in one process; a checkpoint after four."""
    settings = small(folder, "alone")
    assert Training(settings).run()
    return settings


@pytest.fixture(scope="module")
def two(folder, alone):
    """All that two processes are asked for, by name: they start once."""
    half = small(folder, "half")
    shutil.copytree(alone.folder, half.folder, ignore=shutil.ignore_patterns("step-000006"))
    small(folder, "both")
    small(folder, "nan", record={"checkpoint_every": 1})
    small(folder, "table")
    small(folder, "three", data={"packs": 3})
    names = {"both": "", "half": "", "nan": "nan", "table": "table", "three": ""}
    results = run_in_two(folder / "jobs", [(folder / f"{name}.toml", how) for name, how in names.items()])
    return dict(zip(names, results, strict=True))


def lines(folder):
    """Metrics without what a clock says."""
    kept = read_metrics(Path(folder) / METRICS)
    return [{key: value for key, value in line.items() if "second" not in key} for line in kept]


def close(ours, theirs):
    """The same lines, numbers to 1e-5."""
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert b[key] == (pytest.approx(value, abs=1e-5, rel=0) if isinstance(value, float) else value), key


def state(run):
    return checkpoints.load(Path(run), 6)


def close_states(ours, theirs):
    for name, weight in ours["weights"].items():
        assert torch.allclose(theirs["weights"][name], weight, atol=1e-5), name
    for part, of in ours["optimizers"].items():
        there = theirs["optimizers"][part]
        assert of["state"].keys() == there["state"].keys() and of["param_groups"] == there["param_groups"]
        for number, entry in of["state"].items():
            for key, value in entry.items():
                assert torch.allclose(torch.as_tensor(there["state"][number][key]), torch.as_tensor(value), atol=1e-5)


def test_two_processes_do_what_one_does(folder, alone, two):
    assert [one["code"] for one in two["both"]] == [0, 0]
    run = folder / "both"
    close(lines(alone.folder), lines(run))
    assert {"index", "draft", "balance", "recall"} <= lines(run)[5].keys()
    assert lines(run)[-1]["validation"] < 5
    close_states(state(alone.folder), state(run))


def test_each_holds_its_rows_of_all_but_the_replicas(two):
    first, second = (one["rows"] for one in two["both"])
    for name, (own, rows) in first.items():
        if name.endswith(("engram.embed.weight", "gate.bias")):
            assert own == second[name][0] == rows, name
        else:
            assert own == -(-rows // 2) and own + second[name][0] == rows, name


def test_the_first_speaks_for_all(folder, two):
    first, second = two["both"]
    assert first["out"].strip() == str(folder / "both" / "checkpoints" / "step-000006")
    assert "validation" in first["err"] and not second["out"] and not second["err"]


def test_what_one_began_two_go_on_with(folder, alone, two):
    assert [one["code"] for one in two["half"]] == [0, 0] and "resuming" in two["half"][0]["err"]
    close(lines(alone.folder), lines(folder / "half"))
    close_states(state(alone.folder), state(folder / "half"))


def test_what_two_began_one_goes_on_with(folder, alone, two):
    settings = replace(alone, folder=str(folder / "resumed"))
    shutil.copytree(folder / "both", settings.folder, ignore=shutil.ignore_patterns("step-000006"))
    training = Training(settings)
    assert training.step == 4 and training.run()
    close(lines(alone.folder), lines(settings.folder))
    close_states(state(alone.folder), state(settings.folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", "stopped at step 2: the language loss is nan; the last good checkpoint is .*step-000001"),
        ("table", "stopped at step 1: the gradient of layers.1.engram.embed.weight is not finite; there is no check"),
    ],
)
def test_numbers_that_go_wrong_in_one_process_stop_both(two, name, message):
    first, second = two[name]
    assert first["code"] == second["code"] == 1
    complaints = [line for line in first["err"].splitlines() if "error" in line]
    assert len(complaints) == 1 and re.search(message, complaints[0])
    assert not second["err"] and not second["out"]


def test_packs_that_cannot_be_divided_are_told_once(two):
    first, second = two["three"]
    assert first["code"] == second["code"] == 2
    assert first["err"].count("\n") == 1 and not second["err"]
    assert "data.packs must be a multiple of the number of processes (2), got 3" in first["err"]
    assert "set data.packs = 4" in first["err"]


def test_any_pack_has_gradients_of_the_same_weights(tmp_path):
    """Processes add gradients weight by weight: one that had none of a weight would leave the others waiting. And what
    runs the layers once more has the same ones, the draft's loss or not."""
    training = Training(small(tmp_path, "all"))
    again = Training(small(tmp_path, "again", model={"base": "model.json", "tokenizer": "tiny", "recompute": True}))
    usual = training.packs.next()
    short = [Pack(tuple(np.array(range(5, 5 + length)) for _ in range(8))) for length in (2, 3)]
    reached = []
    for pack in (*short, usual):
        training.optimizers.zero()
        training.backward(pack, 1.0)
        reached.append({name for name, _ in training.optimizers.trained()})
    assert reached[0] == reached[1] == reached[2] and len(reached[0]) > 100
    again.packs.next()
    again.backward(usual, 1.0)
    ours, theirs = (dict(run.optimizers.trained()) for run in (training, again))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].grad.to_dense(), theirs[name].grad.to_dense()) for name in ours)


class OneOf(Alone):
    """One of several, for what needs no other."""

    def __init__(self, number, count):
        self.number, self.count = number, count


def test_packs_are_shared_out():
    three = [OneOf(number, 3) for number in range(3)]
    assert [share(range(6), one) for one in three] == [[0, 3], [1, 4], [2, 5]]
    assert [deal(range(4), one) for one in three] == [[0, 3], [1, None], [2, None]]
    assert share("ab", Alone()) == deal("ab", Alone()) == ["a", "b"]
    with pytest.raises(ConfigError, match="multiple of the number of processes"):
        share(range(5), three[0])


def test_without_torchrun_there_is_one_process(monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(launched("cpu"), Alone) and number_of_process() == 0
    texts = {path.name: path.read_text() for path in (ROOT / "src" / "openv41" / "train").glob("*.py")}
    assert [name for name, text in texts.items() if "import torch.distributed" in text] == ["ranks.py"]
    importing = {name: text for name, text in texts.items() if "train.ranks import" in text}
    assert list(importing) == ["parallel.py"] and "\n    from openv41.train.ranks import" in importing["parallel.py"]
