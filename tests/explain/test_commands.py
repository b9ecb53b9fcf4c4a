"""`openv41 explain` and `openv41 fit`: text, JSON and Markdown say the same; one line for what is wrong."""

import builtins
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from openv41.cli import main
from openv41.config import Config
from openv41.explain.components import COMPONENTS
from openv41.explain.panel import Panel, Question, explain
from openv41.explain.render import as_markdown, as_rich, as_text, columns, sections_of, show, title_of

TINY = Config.tiny()
ATTENTION = ("explain", "attention", "--layer", "24", "--mode", "decode", "--position", "1000")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(argv)
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


def panel() -> Panel:
    return explain(TINY, Question("attention", layer=6, position=100))


def test_the_panel_as_text(cli: Any) -> None:
    code, out, err = cli(*ATTENTION)
    assert code == 0 and err == ""
    for line in (
        "Attention · layer 24 (re-scorer) · decode at position 1,000",
        "latents     [B, 1001, 512]",
        "index keys  [B, 1001, 128]",
        "candidates  [B, 1, 1001]",
        "picks  [B, 1, 512]",
        "x 4 (layers 24, 28, 32, 36) = 528,096,512",
        "128 of 128 slots hold a position; position 1,000 goes to slot 1,000 mod 128 = 104",
        "src/openv41/model/attention.py:",
        "index_source_layers=(2, 8, 14, 20, 24, 28, 32, 36)",
    ):
        assert line in out, line
    assert out.isprintable() or all(ord(c) < 0x3000 for c in out) and "\x1b" not in out, "no escape sequences in a file"


def test_the_panel_as_json(cli: Any) -> None:
    code, out, _ = cli(*ATTENTION, "--json")
    document = json.loads(out)
    assert code == 0 and document["parameters"]["total"] == 528_096_512
    keys = "component layer role mode position batch inputs outputs parameters state cost evidence".split()
    assert set(keys) <= set(document)
    assert set(document["cost"]) >= {"flops", "bytes", "floor_us"}
    for one in document["evidence"]:
        assert one["statement"] and all(set(source) == {"name", "file", "lines"} for source in one["source"])


def test_markdown_and_rich_say_what_the_text_says() -> None:
    told = panel()
    text, markdown = as_text(told), as_markdown(told)
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, width=160, highlight=False).print(as_rich(told))
    drawn = stream.getvalue()
    assert "\x1b[" in drawn and "╭" in drawn
    for section in sections_of(told):
        assert section.title in text and section.title in markdown and section.title in drawn
        for row in section.rows:
            if len(row) > 1:
                for cell in filter(None, row):
                    assert cell in text and cell in drawn and cell.replace("|", "\\|") in markdown, cell
    assert title_of(told) in drawn
    for line in markdown.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")


def test_without_rich_it_is_plain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "rich":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    told = panel()
    show(told)
    assert capsys.readouterr().out.rstrip("\n") == as_text(told)


def test_a_panel_prints_itself() -> None:
    assert str(panel()) == as_text(panel())


def test_the_tree(cli: Any) -> None:
    code, out, _ = cli("explain")
    assert code == 0 and "763,205,315,794" in out and "510,286,023,000" in out and "96,048" in out
    code, out, _ = cli("explain", "--json")
    document = json.loads(out)
    assert document["runtime"]["total"]["parameters"] == document["checkpoint"]["total"]["parameters"]
    assert document["tree"]["parameters"] == 763_205_315_794
    named: set[str] = set()

    def walk(node: dict[str, Any]) -> None:
        named.add(node["name"])
        for one in node["inside"]:
            walk(one)

    walk(document["tree"])
    assert set(COMPONENTS) - named <= {"draft-stage"}, "every component is in the tree"


def test_what_if(cli: Any) -> None:
    code, out, _ = cli(*ATTENTION, "--what-if", "index_topk=256", "--json")
    document = json.loads(out)
    assert code == 0 and document["what_if"]["changes"] == {"index_topk": 256}
    assert document["what_if"]["differences"]
    code, out, _ = cli(*ATTENTION, "--what-if", "index_topk=256")
    assert code == 0 and "what if" in out and "with index_topk=256" in out


def test_an_image(cli: Any) -> None:
    code, out, _ = cli("explain", "vision", "--image-size", "1344x896", "--json")
    document = json.loads(out)
    assert code == 0 and document["image"]["tokens"] == 728 and document["image"]["patches"] == [64, 96]
    assert document["inputs"][0]["shape"] == [64 * 96, 3, 14, 14]
    _, out, _ = cli("explain", "aligner", "--image-size", "1344x896", "--json")
    assert json.loads(out)["outputs"][0]["shape"] == [22 * 32, 5120]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("attention", "--layer", "99"), "layer must be 0 to 42"),
        (("attention", "--position", "1048576"), "must fit the context"),
        (("indexer", "--layer", "21"), "layer 21 (reader) has no indexer"),
        (("nothing",), "no component 'nothing'"),
        (("vision", "--image-size", "12"), "--image-size is WIDTHxHEIGHT"),
        (("vision", "--image-size", "0x5"), "at least 1 x 1"),
        (("attention", "--machine", "b200"), "no machine 'b200'"),
        (("attention", "--what-if", "index_topk=0"), "index_topk"),
        (("attention", "--what-if", "topk=3"), "KEY=VALUE"),
        (("model", "--mode", "prefill", "--chunk", "0"), "--chunk must be 1 or more"),
        (("attention", "--config", "no-such-file.json"), "no-such-file.json"),
        (("--layer", "99"), "--layer goes with a component"),
        (("--image-size", "5x5"), "--image-size goes with a component"),
    ],
)
def test_what_cannot_be_explained(cli: Any, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = cli("explain", *arguments)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1 and "Traceback" not in err


def test_fit(cli: Any) -> None:
    arguments = ("fit", "--gpus", "8", "--memory", "131", "--tp", "8", "--batch", "64")
    code, out, _ = cli(*arguments)
    assert code == 0 and "fits" in out and "largest context with batch 64: 1,048,576 tokens" in out
    assert "assumptions" in out and "elsewhere: Engram's tables (host)" in out
    code, out, _ = cli(*arguments, "--json")
    document = json.loads(out)
    assert code == 0 and document["fits"] and document["used"] + document["free"] == document["memory"]
    code, out, _ = cli("fit", "--gpus", "1", "--memory", "80")
    assert code == 1 and "does not fit" in out
    code, out, err = cli("fit", "--gpus", "8", "--memory", "131", "--tp", "3")
    assert (code, out) == (2, "") and "tp must divide" in err and err.count("\n") == 1
    code, _, err = cli("fit", "--gpus", "8", "--memory", "nan")
    assert code == 2 and "--memory" in err


def test_fit_of_a_model_with_a_short_context(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY.to_dict()))
    asked = ("fit", "--gpus", "1", "--memory", "8", "--config", str(path))
    code, out, _ = cli(*asked, "--json")
    assert code == 0 and json.loads(out)["context"] == TINY.context < 131_072
    code, out, err = cli(*asked, "--context", "131072")
    assert (code, out) == (2, "") and f"the context is {TINY.context} tokens at most" in err


def test_columns() -> None:
    assert columns([["a", "1"], ["bcd", "1,000"]]) == ["a        1", "bcd  1,000"]
    assert columns([["a line"]]) == ["a line"]
