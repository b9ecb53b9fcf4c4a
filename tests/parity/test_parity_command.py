"""`openv41 parity` as a person or a script calls it."""

import json
from pathlib import Path
from typing import Any

import pytest
from golden_folder import GOLDEN

from openv41.cli import main


def test_one_line_a_case_and_the_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", str(GOLDEN), "--group", "rope", "--group", "vision"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 + 9 + 1 and lines[-1] == "15 passed, 0 failed, 0 skipped"
    assert lines[0].startswith("PASS table_compress  ")
    assert lines[6].split(maxsplit=2) == ["PASS", "weights", "198528 values equal"]


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", str(GOLDEN), "--case", "holes", "--ops", "reference", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (told["passed"], told["failed"], told["skipped"], told["ops"]) == (1, 0, 0, "reference")
    assert told["cases"][0]["status"] == "PASS" and told["cases"][0]["findings"][0]["what"] == "out"


def test_a_failure_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [{"name": "lost", "file": "none.safetensors", "tensors": {"positions": {}}}]
    (tmp_path / "index.json").write_text(json.dumps({"groups": {"rope": cases}}))
    assert main(["parity", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"
    assert main(["parity", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 1


@pytest.mark.parametrize("arguments", [["nowhere"], [str(GOLDEN), "--group", "x"], [str(GOLDEN), "--case", "x"]])
def test_what_cannot_be_used_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", *arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("openv41: error: ")
