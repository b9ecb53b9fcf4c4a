"""Settings: every key checked, each complaint one line that names the key."""

import pytest

from openv41.errors import ConfigError
from openv41.train.settings import Settings
from openv41.train.setup import open_model
from tests.train.runs import settings_of

DATA = {"train": ["a.txt"]}


def test_what_is_given_replaces_the_defaults(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text('steps = 70\n[data]\ntrain = "texts/*.txt"\n[optimizer]\nrate = 1\n[model.replace]\nn_layers = 3\n')
    settings = Settings.from_toml(path)
    assert settings.steps == 70 and settings.optimizer.rate == 1.0 and settings.optimizer.clip == 1.0
    assert settings.data.train == (str(tmp_path / "texts/*.txt"),) and settings.folder == str(tmp_path / "run")
    assert settings.model.base == "tiny" and settings.model.replace == {"n_layers": 3}
    assert Settings.from_dict(settings.to_dict()) == settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stesp": 3, "data": DATA}, "stesp is no key of these settings, got 3; did you mean steps?"),
        ({"data": DATA | {"zzz": 3}}, "data.zzz is no key of these settings, got 3; the keys here are train, "),
        ({"data": 3}, "data must be a section, got 3; write [data]"),
        ({"data": {"train": [1]}}, "data.train must be a list of texts, got [1]; write"),
        ({}, "data.train must name at least one file, got none; write"),
        ({"steps": 0, "data": DATA}, "steps must be at least 1, got 0; raise it, or leave it out for 300"),
        ({"steps": 1.5, "data": DATA}, "steps must be a whole number, got 1.5"),
        ({"seed": True, "data": DATA}, "seed must be a whole number, got True"),
        ({"optimizer": {"rate": 0}, "data": DATA}, "optimizer.rate must be above 0, got 0.0"),
        ({"optimizer": {"rate": float("nan")}, "data": DATA}, "optimizer.rate must be a finite number, got nan"),
        ({"optimizer": {"final": 1.5}, "data": DATA}, "optimizer.final must be at most 1, got 1.5; lower it"),
        ({"optimizer": {"warmup": 9}, "steps": 8, "data": DATA}, "optimizer.warmup must be at most steps (8), got 9"),
        ({"data": DATA | {"validation_share": 0}}, "data.validation_share must be above 0 without data.validation"),
        ({"device": 3, "data": DATA}, "device must be a text, got 3"),
    ],
)
def test_complaints_name_the_key_the_value_and_the_way_out(values, message):
    with pytest.raises(ConfigError) as error:
        Settings.from_dict(values)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_files_that_are_none_are_told(tmp_path):
    with pytest.raises(ConfigError, match="no settings at"):
        Settings.from_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("steps = ")
    with pytest.raises(ConfigError, match="bad.toml is no TOML"):
        Settings.from_toml(tmp_path / "bad.toml")
    (tmp_path / "key.toml").write_text("step = 1")
    with pytest.raises(ConfigError, match="key.toml: step is no key"):
        Settings.from_toml(tmp_path / "key.toml")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (dict(model={"replace": {"n_layer": 3}}), "model.replace.n_layer is no field"),
        (dict(model={"replace": {"n_heads": 3}}), "o_groups must divide n_heads"),
        (dict(data={"context": 4096}), "data.context must be at most 1024"),
        (dict(device="gpu0"), "device must be cpu, cuda or cuda:N, got 'gpu0'"),
        (dict(device="cuda:99"), "device must be one that torch sees, got 'cuda:99'"),
        (dict(model={"numerics": "fp8"}), "model.numerics must be one of plain, published, got 'fp8'"),
        (
            dict(model={"replace": {"n_mtp_layers": 0, "compress_ratios": [0, 2, 1, 1]}}, loss={"draft": 1.0}),
            "loss.draft must be 0 for a model without draft stages",
        ),
    ],
)
def test_a_model_that_cannot_be_is_told(tmp_path, sections, message):
    with pytest.raises(ConfigError, match=message):
        open_model(settings_of(tmp_path, **sections))
