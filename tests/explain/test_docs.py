"""docs/explain.md shows what the commands print. OPENV41_WRITE_DOCS=1 writes it anew; =all also what takes minutes."""

import os
import re
from pathlib import Path

import pytest

from openv41.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explain.md"
BLOCK = re.compile(r"(<!-- output: (?P<command>[^:>]+?)(?P<slow> : slow)? -->\n)(?P<shown>.*?)(<!-- end -->)", re.S)
SHORT = re.compile(r"\n(why|evidence|taken for granted)\n.*", re.S)
WRITE = os.environ.get("OPENV41_WRITE_DOCS", "")


def printed(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints, as the page shows it: without words and sources, but for the first panel."""
    capsys.readouterr()
    assert main(command.split()) == 0
    text = capsys.readouterr().out.rstrip("\n")
    if "--position 1000" not in command:
        text = SHORT.sub("", text).rstrip("\n")
    return f"```console\n$ openv41 {command}\n{text}\n```\n"


def blocks() -> list[re.Match[str]]:
    return list(BLOCK.finditer(PAGE.read_text(encoding="utf-8")))


@pytest.mark.parametrize("number", range(len(blocks())))
def test_the_page_shows_what_is_printed(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    block = blocks()[number]
    if block["slow"] and WRITE != "all":
        assert block["shown"].startswith(f"```console\n$ openv41 {block['command']}\n"), "it was never run"
        return
    text = printed(block["command"], capsys)
    if WRITE:
        page = PAGE.read_text(encoding="utf-8")
        start, end = block.span("shown")
        PAGE.write_text(page[:start] + text + page[end:], encoding="utf-8")
    else:
        assert _without_lines(block["shown"]) == _without_lines(text), "OPENV41_WRITE_DOCS=1 pytest tests/explain"


def _without_lines(text: str) -> str:
    """Line numbers of sources move with every edit."""
    return re.sub(r"\.py:\d+-\d+", ".py", text)
