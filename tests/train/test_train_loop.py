"""Whole runs: they learn, they resume to the bit however they ended, and they stop where numbers go wrong."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from openv41.api import load
from openv41.cli import main
from openv41.commands.train import _progress
from openv41.errors import CheckpointError, ConfigError, InputError, TrainingStopped
from openv41.train import checkpoints
from openv41.train.data import Pack
from openv41.train.loop import METRICS, Training, read_metrics
from tests.train.runs import settings_of


def unigram_entropy(corpus):
    """Nats a token of a model that knows how often each token occurs, and nothing else."""
    ids = torch.from_numpy(corpus.ids.astype("int64"))
    shares = ids.bincount().double() / len(ids)
    return float(-(shares[shares > 0] * shares[shares > 0].log()).sum())


def weights(settings, step):
    return checkpoints.load(Path(settings.folder), step)["weights"]


def metrics(settings):
    """Lines without what a clock says."""
    lines = read_metrics(Path(settings.folder) / METRICS)
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six steps that nothing interrupted."""
    settings = settings_of(tmp_path_factory.mktemp("whole"))
    assert Training(settings).run()
    return settings


def test_a_run_learns_more_than_how_often_tokens_occur(tmp_path):
    settings = settings_of(tmp_path, steps=30, record={"checkpoint_every": 30})
    training = Training(settings)
    bound = unigram_entropy(training.packs.pieces)
    training.run()
    lines = read_metrics(tmp_path / "run" / METRICS)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert abs(losses[0] - math.log(320)) < 0.5  # begins knowing nothing
    assert sum(losses[-5:]) / 5 < bound - 1
    assert lines[-1]["validation"] < bound - 1
    # What is left is a model like any other, in the published formats.
    assistant = load(training.saved)
    assert assistant.config.expert_dtype == "fp4" and assistant.config.dtype == "fp8"
    assert assistant.score("the fisherman waits for his daughter.").bits_per_byte < 3
    assert isinstance(assistant.generate("the boat", max_new_tokens=4).text, str)


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, whole):
    settings = settings_of(tmp_path)
    first = Training(settings)
    for _ in range(3):
        first.advance()
        if first.step == 2:
            first.save()
    resumed = Training(settings)
    assert resumed.step == 2
    assert resumed.run()
    assert same(weights(settings, 6), weights(whole, 6))
    assert metrics(settings) == [line for line in metrics(whole) if line["step"] > 2]


def test_a_run_that_was_killed_goes_on_to_the_bit(tmp_path, whole):
    settings = settings_of(tmp_path)
    command = [sys.executable, "-m", "openv41", "train", str(tmp_path / "train.toml"), "--threads", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    path = tmp_path / "run" / METRICS
    until = time.monotonic() + 120
    while len(read_metrics(path)) < 3 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert checkpoints.saved_steps(tmp_path / "run") in ([2], [2, 4])
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # as a line may look that was being written
    assert main(["train", str(tmp_path / "train.toml"), "--threads", "1"]) == 0
    assert same(weights(settings, 6), weights(whole, 6))
    assert metrics(settings) == metrics(whole)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_a_run_may_be_done_in_pieces(tmp_path, whole):
    settings = settings_of(tmp_path)
    for _ in range(40):
        if Training(settings).run(seconds=1.0):
            break
    assert same(weights(settings, 6), weights(whole, 6)) and metrics(settings) == metrics(whole)


def test_only_the_latest_checkpoints_are_kept(whole):
    assert checkpoints.saved_steps(Path(whole.folder)) == [4, 6]


def test_packs_of_a_step_add_up(tmp_path):
    """The sequences of a pack in two packs, or in one: the same gradients."""
    one, two = (Training(settings_of(tmp_path, data={"tokens": 128}, loss={"index": 0.0})) for _ in "ab")
    pack = one.packs.next()
    halves = Pack(pack.sequences[:1]), Pack(pack.sequences[1:])
    one.backward(pack, 1.0)
    for half in halves:
        two.backward(half, len(half) / len(pack))
    for (name, a), (_, b) in zip(one.optimizers.trained(), two.optimizers.trained(), strict=True):
        a, b = a.grad.to_dense(), b.grad.to_dense()
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4), name


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        (lambda t: t.model.layers[3].attn.wq_a.weight.data.fill_(math.nan), "language loss is nan.*layers.3.attn.wq_a"),
        (
            lambda t: t.model.layers[2].attn.wkv.weight.register_hook(lambda g: g * math.inf),
            "the gradient of layers.2.attn.wkv.weight.* not finite",
        ),
        (lambda t: setattr(t, "recent", [0.1] * 20), "more than loss.explosion"),
    ],
)
def test_numbers_that_go_wrong_stop_the_run(tmp_path, poison, message):
    training = Training(settings_of(tmp_path))
    training.advance()
    training.save()
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    poison(training)
    with pytest.raises(TrainingStopped, match=f"stopped at step 2: .*{message}.*step-000001"):
        training.run()
    others = [name for name, p in training.model.named_parameters() if not torch.equal(p, before[name])]
    assert others in ([], ["layers.3.attn.wq_a.weight"])  # nothing moved


def test_the_command_tells_in_one_line_and_exits_with_1(tmp_path, capsys):
    settings_of(tmp_path, optimizer={"rate": 1e30, "clip": 1e30, "warmup": 0})
    assert main(["train", str(tmp_path / "train.toml")]) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(error) == 1 and "stopped at step" in error[0] and "checkpoint" in error[0]


def test_the_command_leaves_a_model_metrics_and_a_curve(tmp_path, capsys):
    settings_of(tmp_path, steps=2, optimizer={"warmup": 1})
    assert main(["train", str(tmp_path / "train.toml")]) == 0
    shown = capsys.readouterr()
    folder = tmp_path / "run" / "checkpoints" / "step-000002"
    assert shown.out.strip() == str(folder) and (folder / "tokenizer.json").is_file()
    assert "validation" in shown.err and "loss" in shown.err
    lines = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert {"step", "tokens", "loss", "balance", "rate", "norm", "load", "tokens_per_second"} <= lines[0].keys()
    assert lines[-1].keys() == {"step", "validation", "bits_per_byte", "seconds"}
    assert main(["train", str(tmp_path / "train.toml")]) == 0
    assert "resuming" in capsys.readouterr().err


class Terminal(io.StringIO):
    """Of 80 columns."""

    def isatty(self):
        return True


def test_a_terminal_shows_a_bar_with_the_step_and_the_loss(monkeypatch):
    """All of it within one line, and a validation above it."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    for name, value in {"COLUMNS": "80", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    line = {"step": 70000, "loss": 10.25, "norm": 1.0, "rate": 1e-3, "load": {}, "tokens_per_second": 123456.7}
    with _progress(100000, 0) as report:
        report(line)
        report({"step": 70000, "validation": 2.5, "bits_per_byte": 1.25})
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    assert re.search("━{10,}.* 70000/100000 loss 10.2500, 123457 tokens/s ", text)
    assert "step 70000: validation 2.5000, 1.2500 bits per byte" in text


def test_a_folder_that_cannot_be_made_is_told(tmp_path, capsys):
    settings_of(tmp_path)
    path = tmp_path / "train.toml"
    path.write_text(path.read_text().replace('folder = "run"', 'folder = "texts.jsonl"'))
    assert main(["train", str(tmp_path / "train.toml")]) == 2
    error = capsys.readouterr().err
    assert f"folder must be one that can be made, got {tmp_path / 'texts.jsonl'}" in error and error.count("\n") == 1


def test_a_folder_with_another_run_is_refused(tmp_path):
    training = Training(settings_of(tmp_path))
    training.save()
    Training(settings_of(tmp_path, record={"keep": 5, "checkpoint_every": 2}))  # may change
    with pytest.raises(ConfigError, match="another data.tokens, optimizer.rate"):
        Training(settings_of(tmp_path, optimizer={"rate": 0.1}, data={"tokens": 50}))


def test_a_broken_checkpoint_is_told(tmp_path):
    training = Training(settings_of(tmp_path))
    training.save()
    (training.saved / checkpoints.STATE).write_bytes(b"no")
    with pytest.raises(CheckpointError, match="training.pt cannot be read"):
        Training(settings_of(tmp_path))


def test_a_run_may_start_from_a_model(tmp_path, whole):
    start = str(checkpoints.folder_of(Path(whole.folder), 6))
    training = Training(settings_of(tmp_path, model={"start": start}))
    last, random = training.validate(), metrics(whole)[-1]
    assert last["validation"] == pytest.approx(random["validation"], abs=0.2)  # rounded to fp8 and fp4 in between


def test_texts_that_leave_nothing_for_validation_are_refused(tmp_path):
    settings = settings_of(tmp_path)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "only one"}))
    with pytest.raises(InputError, match="data.validation has no text"):
        Training(settings)


def test_indexers_learn_by_their_own_loss_and_nothing_else_does(tmp_path):
    with_loss = Training(settings_of(tmp_path, loss={"index_dense": 1}, record={"recall_every": 1}))
    without = Training(settings_of(tmp_path, loss={"index": 0.0}))
    pack = with_loss.packs.next()
    assert float(with_loss.backward(pack, 1.0)["index"]) > 0
    without.backward(pack, 1.0)
    own, rest = ({name: p.grad for name, p in t.optimizers.trained()} for t in (with_loss, without))
    indexers = {name for name, _ in with_loss.model.named_parameters() if ".indexer." in name}
    assert indexers and own.keys() - rest.keys() == indexers
    assert all(torch.equal(own[name].to_dense(), rest[name].to_dense()) for name in rest)
    with_loss.optimizers.zero()
    line = with_loss.advance()
    assert set(line["recall"]) <= {"1", "2", "3"} and all(0 <= share <= 1 for share in line["recall"].values())
