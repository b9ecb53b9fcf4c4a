"""docs/training.md says what the settings are: its files are read, and every number that it calls a default is one."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from openv41.cli import build_parser
from openv41.config import Config
from openv41.train.checkpoints import folder_of
from openv41.train.settings import Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


def commands():
    """The lines of the four commands, from nothing to a model."""
    (block,) = re.findall(r"```sh\n(pip install .*?)```", PAGE, re.S)
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def test_four_commands_lead_to_a_model():
    install, write, train, generate = commands()
    assert install == ["pip", "install", "openv41[train]"]
    assert write[0] == "printf" and write[2:] == [">", "train.toml"]
    settings = Settings.from_dict(tomllib.loads(write[1].replace("\\n", "\n")))
    for command in (train, generate):
        assert command[0] == "openv41" and build_parser().parse_args(command[1:])
    assert train[-1] == "train.toml"
    assert Path(generate[3]) == folder_of(Path(settings.folder), settings.steps)  # where the last checkpoint will be
    steps = f"{settings.steps} steps of {settings.data.tokens:,} tokens"
    assert f"vocabulary of {Config.tiny().vocab_size:,}, {steps}" in PAGE


def test_the_file_of_settings_is_one():
    (block,) = re.findall(r"```toml\n(folder = .*?)```", PAGE, re.S)
    settings = Settings.from_dict(tomllib.loads(block) | {"device": "cpu"})
    assert settings.model.replace and settings.data.packs == 4


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("`balance`, {:.0e}", Settings().loss.balance),
        ("+- {} by the sign of the load", Settings().loss.bias_rate),
        ("n-gram tables, at {:.0f} x the rate", Settings().optimizer.table_factor),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_settings(words, value):
    assert words.format(value).replace("e-0", "e-") in PAGE


def test_every_key_that_is_named_is_a_key():
    """In the text, written as section.key."""
    known = Settings().to_dict()
    named = set(re.findall(r"`(model|data|optimizer|loss|record)\.(\w+)`", PAGE))
    assert ("loss", "explosion") in named
    assert all(key in known[section] for section, key in named), named
