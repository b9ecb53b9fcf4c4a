"""The curve: two files that are what they say, the same for the same metrics, and a clear word without matplotlib."""

import sys
from xml.etree import ElementTree

import pytest

from openv41.cli import main
from openv41.errors import InputError
from openv41.train.plot import changes, draw_curve
from tests.train.runs import settings_of

LINES = [{"step": step, "loss": 5 / step} for step in range(1, 30)] + [{"step": 29, "validation": 0.4}]


def test_the_curve_is_a_png_and_an_svg(tmp_path):
    pytest.importorskip("matplotlib")
    png, svg = draw_curve(LINES, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    again = tmp_path / "again"
    again.mkdir()
    assert [path.read_bytes() for path in draw_curve(LINES, again)] == [png.read_bytes(), svg.read_bytes()]


def test_no_step_is_no_curve(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match="no step has been done yet"):
        draw_curve([], tmp_path)


def test_without_matplotlib_the_run_is_done_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    settings_of(tmp_path, steps=1, optimizer={"warmup": 0}, record={"recall_every": 0})
    assert main(["train", str(tmp_path / "train.toml")]) == 0
    shown = capsys.readouterr()
    assert 'no loss curve: the curve needs matplotlib: pip install "openv41[train]"' in shown.err
    assert shown.out.strip().endswith("step-000001") and not (tmp_path / "run" / "curve.png").exists()


def test_the_curve_says_where_numerics_change():
    lines = [{"step": step, "loss": 1.0, "numerics": "plain" if step < 3 else "published"} for step in range(1, 6)]
    assert changes([*lines, {"step": 5, "validation": 1.0}]) == [(3, "published")]
    assert changes(LINES) == []
