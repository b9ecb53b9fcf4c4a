"""From a small corpus to a small model that ships: every script of mini/ on a run of a few steps."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import openv41
from openv41 import api
from openv41.cli import main as openv41_main
from openv41.errors import InputError
from openv41.inputs.tokenizer import Tokenizer
from openv41.plan import Role, plan_layers
from openv41.train import checkpoints
from openv41.train.data import read_files
from openv41.train.loop import METRICS, Training, read_metrics
from openv41.train.settings import Settings
from openv41.weights.tiny import SPECIAL, train_tokenizer
from tests.mini.scripts import ROOT, write_corpus
from tests.train.runs import as_toml, config_of_runs

import ablate, card, plan, prepare, ship  # isort: skip  # noqa: E401  (scripts puts them in reach)

EDGES, CONTEXTS = (0, 16, 64, 128), (16, 64, 128)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Documents, and token files in the vocabulary of the small model."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, {"train": 30, "validation": 6})
    tokenizer = Tokenizer(train_tokenizer(320), SPECIAL)
    found = {}
    for name in ("train", "validation"):
        texts = [json.loads(line)["text"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        found[name] = prepare.written(tokenizer, folder / f"{name}.bin.xz", texts, 10**9, 1 << 30)
    (folder / "prepared.json").write_text(json.dumps(found))
    (folder / "model.json").write_text(json.dumps(config_of_runs().to_dict()))
    return folder


def write_settings(corpus: Path, folder: Path, **sections) -> Path:
    values = {
        "folder": str(folder / "run"), "steps": 4,
        "model": {"base": str(corpus / "model.json"), "tokenizer": "tiny", "published_from": 0.5},
        "data": {
            "train": [str(corpus / "train.bin.xz")], "validation": [str(corpus / "validation.bin.xz")],
            "validation_tokens": 200, "context": 64, "tokens": 32,
        },
        "optimizer": {"rate": 1e-2, "warmup": 1, "cooldown": 0.5},
        "loss": {"draft": 1.0, "draft_from": 0.25, "draft_blocks": 8},
        "record": {"validate_every": 0, "checkpoint_every": 9, "recall_every": 0, "keep": 1},
    }  # fmt: skip
    for name, changes in sections.items():
        values[name] = values[name] | changes if isinstance(changes, dict) else changes
    path = folder / "train.toml"
    path.write_text(as_toml(values))
    return path


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    """A run of four steps, the last two in published numerics."""
    settings = Settings.from_toml(write_settings(corpus, tmp_path_factory.mktemp("mini")))
    Training(settings).run()
    return Path(settings.folder)


@pytest.fixture(scope="module")
def shipped(run, tmp_path_factory) -> Path:
    """What ships of it."""
    target = tmp_path_factory.mktemp("package") / "mini"
    target.mkdir()
    (target / "old").write_text("from before")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ship, "TOKENS", 100)
        assert ship.main([str(run), "--to", str(target)]) == 0
    return target


# Shipping


def test_what_ships_is_the_checkpoint_without_the_run(run, shipped):
    checkpoint = checkpoints.folder_of(run, 4)
    assert {path.name for path in checkpoint.iterdir()} == {path.name for path in shipped.iterdir()} | {"training.pt"}
    assert all((checkpoint / path.name).read_bytes() == path.read_bytes() for path in shipped.iterdir())
    assert list(shipped.parent.iterdir()) == [shipped]


def test_the_files_say_what_the_run_says(run, corpus):
    """Logits of the files' model and of the float weights that they were written from, in published numerics."""
    folder, settings, state = ship.last_of(run)
    own, files = ship.own_model(settings, state), api.load(folder)
    held = read_files([str(corpus / "validation.bin.xz")], files.tokenizer, 320)
    packs = ship.once(held, 64, 150, 150)
    found = ship.compare(own, files, packs)
    assert found["divergence"] < 1e-3 and found["tokens"] == 150
    assert found["bits_per_byte_run"] == pytest.approx(found["bits_per_byte_shipped"], abs=0.01)
    with torch.no_grad():  # another model is told
        files.transformer.head.weight.copy_(files.transformer.head.weight.flip(0))
    with pytest.raises(ship.Refused, match="nats a token from the run's own"):
        ship.compare(own, files, packs)


def test_what_may_not_ship_is_refused_and_leaves_what_was_there(run, shipped, tmp_path, monkeypatch, capsys):
    before = {path.name: path.read_bytes() for path in shipped.iterdir()}
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    state_path = checkpoints.folder_of(copy, 4) / "training.pt"
    state = torch.load(state_path, weights_only=True)

    def refusal(**changes):
        changed = json.loads(json.dumps(state["settings"]))
        for section, values in changes.items():
            changed[section] = changed[section] | values if isinstance(values, dict) else values
        torch.save(state | {"settings": changed}, state_path)
        assert ship.main([str(copy), "--to", str(shipped)]) == 2
        return capsys.readouterr().err

    assert "stands at step 4 of 9: go on" in refusal(steps=9)
    assert "were in plain numerics" in refusal(model={"published_from": 1.0})
    monkeypatch.setattr(ship, "MOST_BYTES", 1000)
    assert "more than 1,000: train a smaller" in refusal()
    assert "holds no checkpoint" in (ship.main([str(tmp_path), "--to", str(shipped)]), capsys.readouterr().err)[1]
    assert {path.name: path.read_bytes() for path in shipped.iterdir()} == before


def test_numbers_that_are_not_finite_are_refused(shipped):
    model = api.load(shipped).transformer
    ship.check_finite(model)
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(ship.Refused, match="norm.weight is not finite"):
        ship.check_finite(model)


# The default model


def test_with_a_shipped_model_it_is_the_default(shipped, monkeypatch, capsys):
    monkeypatch.setattr(api, "SHIPPED", shipped)
    assert openv41.load().folder == shipped
    assert openv41_main(["generate", "def total(", "--max-new-tokens", "2", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["model"] == str(shipped) and "demo model" not in shown.err


def test_without_one_the_tiny_demo_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(api, "SHIPPED", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert openv41_main(["generate", "a", "--max-new-tokens", "1", "--json"]) == 0
    shown = capsys.readouterr()
    assert "tiny-" in json.loads(shown.out)["model"] and "no openv41-mini in this installation" in shown.err
    with pytest.raises(InputError, match="has no openv41-mini .* give a model folder, or make one with openv41 tiny"):
        openv41.load()


# The card


@pytest.fixture(scope="module")
def results(run, shipped, corpus, tmp_path_factory) -> Path:
    """Every figure of the card, of the small model."""
    folder = tmp_path_factory.mktemp("results")
    subject = card.Subject(
        shipped, run, corpus, folder, size=2000, documents=3, samples=3, prompts=2, tokens=16, edges=EDGES,
        contexts=CONTEXTS,
    )  # fmt: skip
    for name in card.FIGURES:
        card.measure(name, subject)
    return folder


def test_every_figure_is_kept(results, run):
    found = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    assert found.keys() == card.FIGURES.keys()
    assert {path.name for path in results.glob("*.svg")} == {"curve.svg", "positions.svg"}
    assert found["bits"]["bytes"] == found["ngram"]["bytes"] == found["compressors"]["bytes"] >= 2000
    assert len({found[name]["weights"] for name in card.OF_MODEL}) == 1
    assert found["training"]["steps"] == 4 and found["training"]["tokens"] == 128
    lines = read_metrics(run / METRICS)
    assert found["training"]["seconds"] == pytest.approx(sum(line["seconds"] for line in lines))
    assert found["training"]["validations"][-1]["bits_per_byte"] == lines[-1]["bits_per_byte"]
    assert found["training"]["devices"] == {"cpu": 4}
    assert found["training"]["tokens_per_second"].keys() == {"plain", "plain, draft", "published, draft"}
    assert found["validity"]["model"]["count"] == 3 and found["validity"]["real"]["valid"] > 0
    assert 1 <= found["drafts"]["tokens_per_round"] <= 1 + found["drafts"]["most"]
    assert found["sizes"]["tree"][0]["parameters"] == sum(
        part["parameters"] for part in found["sizes"]["parts"].values()
    )


def test_the_page_is_filled_from_the_results_and_from_nothing_else(results, tmp_path):
    text = card.PAGE.read_text()
    empty = card.page(text, {})
    assert empty.count(card.MISSING) == len(card.PARTS)
    path = tmp_path / "mini.md"
    path.write_text(text)
    card.write_page(path, results)
    filled = path.read_text()
    assert filled.count(card.MISSING) == 1  # the ablations, which are trained apart
    bits = json.loads((results / "bits.json").read_text())["bits_per_byte"]
    assert f"| {bits:.3f} |" in filled and "| 64 to 128 |" in filled
    card.write_page(path, results)
    assert path.read_text() == filled
    assert card.page(filled, {}) == empty


def test_figures_of_two_models_make_no_page(results):
    found = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    found["recall"]["weights"] = "another"
    with pytest.raises(InputError, match="of different models: .*recall another"):
        card.page(card.PAGE.read_text(), found)
    found["recall"]["weights"] = found["bits"]["weights"]
    found["ngram"]["bytes"] += 1
    with pytest.raises(InputError, match="measured on different bytes"):
        card.page(card.PAGE.read_text(), found)


def test_one_figure_is_a_command(corpus, shipped, run, tmp_path, capsys):
    base = ["--corpus", str(corpus), "--results", str(tmp_path), "--bytes", "500"]
    assert card.main(["compressors", *base]) == 0
    assert json.loads(capsys.readouterr().out)["compressors"]["bytes"] >= 500
    assert card.main(["training", str(run), *base]) == 0
    assert card.main(["sizes", str(shipped), *base]) == 0
    assert {path.name for path in tmp_path.glob("*.json")} == {"compressors.json", "training.json", "sizes.json"}
    capsys.readouterr()
    for arguments, complaint in (
        (["bits"], "card: error: this figure is of a model: name its folder"),
        (["training"], "card: error: this figure is of a run: name its folder"),
        (["page", "--page", str(corpus / "model.json")], "card: error: the page must have the part sizes once"),
        (["data", "--corpus", str(tmp_path / "none")], "card: error: "),
    ):
        assert card.main([*arguments, *base, *arguments[1:]]) == 2
        error = capsys.readouterr().err
        assert error.startswith(complaint) and error.count("\n") == 1
    with pytest.raises(SystemExit):
        card.main(["nothing", *base])


# Before the run


def test_a_plan_fits_its_budget(corpus, tmp_path, capsys):
    path = write_settings(corpus, tmp_path, record={"validate_every": 10, "checkpoint_every": 20})
    assert plan.main([str(path), "--minutes", "0.5", "--probe", "1", "--write"]) == 0
    report = json.loads(capsys.readouterr().out)
    settings = Settings.from_toml(path)
    assert settings.steps == report["steps"] > 4 and report["minutes"] <= 0.5
    assert report["tokens_per_second"].keys() == {"plain", "plain, draft", "published, draft"}
    assert not Path(settings.folder).exists()
    cost = plan.Cost({kind: 1.0 for kind in plan.kinds_of(settings)}, 2.0, 3.0, 64)
    taken = plan.seconds_of(settings, cost, 40)
    assert taken == 40 + 2 * (1 + 4) + 3 * (1 + 2)
    assert plan.fitting(lambda count: plan.seconds_of(settings, cost, count), taken, 1) == 40
    path.write_text("[data]\n")
    with pytest.raises(InputError, match="must have one line 'steps = N'"):
        plan.with_steps(path, 3)


def test_ablations_are_the_same_run_without_one_part(corpus, tmp_path, capsys):
    path = write_settings(corpus, tmp_path)
    base = ["--base", str(path), "--steps", "1", "--results", str(tmp_path)]
    assert ablate.main(["run", *base]) == 0
    settings = {name: ablate.settings_of(name, Settings.from_toml(path), 1) for name in ablate.NAMES}
    assert len({one.folder for one in settings.values()}) == len(ablate.NAMES)
    replaced = {name: one.model.replace for name, one in settings.items()}
    configs = {name: config_of_runs().replace(**values) for name, values in replaced.items()}
    assert not configs["no-engram"].engram_layer_ids and configs["plain-residual"].hc_mult == 1
    assert {row.role for row in plan_layers(configs["window"])} == {Role.WINDOW}
    assert settings["indexer-frozen"].loss.index == 0 and settings["full"].loss.index == 1
    assert replaced["indexer-frozen"] == replaced["full"]
    with pytest.raises(SystemExit):
        ablate.main(["run", "something", *base])
    capsys.readouterr()
    (tmp_path / "undone").mkdir()
    undone = write_settings(corpus, tmp_path / "undone")
    assert ablate.main(["table", "--base", str(undone), "--results", str(tmp_path)]) == 2
    assert "ablate: error: all must be done at equal steps" in capsys.readouterr().err
    assert ablate.main(["table", *base]) == 0
    found = json.loads((tmp_path / "ablations.json").read_text())
    assert list(found) == list(ablate.NAMES) and {one["steps"] for one in found.values()} == {1}
    fewer = [found[name]["parameters"] for name in ablate.NAMES[1:]]
    assert all(count < found["full"]["parameters"] for count in fewer)
    assert capsys.readouterr().out.strip() == ablate.table(found)


def test_tokens_that_fit(tmp_path):
    """As many documents as a file of this size holds, the first ones; what is written is what was given."""
    tokenizer = Tokenizer(train_tokenizer(320), SPECIAL)
    generator = torch.Generator().manual_seed(0)
    documents = [[0, *torch.randint(3, 320, (2000,), generator=generator).tolist(), 1] for _ in range(40)]
    path = tmp_path / "some.bin.xz"
    count, tokens = prepare.write_fitting(path, documents, 10**6, prepare.HELD + 20_000)
    assert 5 <= count < 40 and tokens == 2002 * count
    assert [list(one) for one in read_files([str(path)], tokenizer, 320)] == documents[:count]
    assert prepare.write_fitting(path, documents, 5000, 1 << 30) == (2, 4004)


def test_without_a_corpus_one_line_says_what_makes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "FOLDER", tmp_path)
    assert prepare.main([]) == 2
    assert capsys.readouterr().err == (
        f"prepare: error: {tmp_path}/train.jsonl: No such file or directory; python mini/corpus.py build makes it\n"
    )


def test_the_shipped_run_is_what_its_page_says():
    """mini/train.toml: published numerics at its end, the draft in its last third, sequences of 8,192."""
    settings = Settings.from_toml(ROOT / "mini" / "train.toml")
    assert (settings.model.published_from, settings.loss.draft_from, settings.data.context) == (0.85, 0.65, 8192)
    assert settings.optimizer.cooldown <= 0.5 and settings.loss.index > 0 and settings.loss.draft > 0
