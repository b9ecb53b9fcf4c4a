"""The command line: results on stdout, everything else on stderr, and one line for whatever is wrong."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from openv41.cli import main
from openv41.commands import generate as generate_command
from openv41.commands import loading
from openv41.commands.output import human_bytes
from openv41.ops import Compound
from openv41.weights.tiny import write_tiny

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "def fibonacci(n):"
FIELDS = ["prompt_tokens", "tokens", "text", "ids", "finish_reason", "seconds", "tokens_per_second", "seed"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(folder)
    return str(folder)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]):
    """Runs a command in this process: exit code, stdout, stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(argv)
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


def process(*argv: str, **options) -> subprocess.Popen:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path} | options.pop("env", {})
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "openv41", *argv], env=environment, **{**pipes, **options})


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch):
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


# generate


def test_text_on_stdout_and_a_summary_on_stderr(cli, tiny: str) -> None:
    code, out, err = cli("generate", PROMPT, "--model", tiny, "--max-new-tokens", "4")
    assert code == 0 and out.endswith("\n")
    assert err.count("\n") == 1
    for part in ("12 prompt tokens at ", "4 new tokens (length) at ", "cache ", "window ", "latents ", "cpu ops"):
        assert part in err
    code, out_json, err = cli("generate", PROMPT, "--model", tiny, "--max-new-tokens", "4", "--json")
    assert json.loads(out_json)["text"] + "\n" == out and err == ""


def test_the_json_fields(cli, tiny: str) -> None:
    code, out, _ = cli("generate", PROMPT, "--model", tiny, "--max-new-tokens", "2", "--json", "--ops", "reference")
    document = json.loads(out)
    assert list(document) == [*FIELDS, "draft", "cache_bytes", "ops", "model"]
    assert (document["tokens"], document["prompt_tokens"], document["finish_reason"]) == (2, 12, "length")
    assert len(document["ids"]) == 2 and document["ops"] == "reference" and document["model"] == tiny
    assert document["cache_bytes"].keys() >= {"window", "latents", "keys"}


def test_seeds(cli, tiny: str) -> None:
    def text(*options: str) -> str:
        return cli("generate", "a", "--model", tiny, "--max-new-tokens", "3", "--temperature", "1", *options)[1]

    assert text("--seed", "3") == text("--seed", "3") != text("--seed", "4")
    assert text("--seed", "3", "--top-k", "1") == text("--seed", "4", "--top-p", "1e-9")


DRAFT = ["most", "rounds", "drafts", "drafted", "reached", "accepted", "acceptance", "mean_accepted"]


def test_drafts(cli, tiny: str) -> None:
    """The text is the same with any; what came of them is told beside it."""
    base = ["generate", PROMPT, "--model", tiny, "--ops", "reference", "--max-new-tokens", "4"]
    told = {length: json.loads(cli(*base, "--json", "--draft", length)[1]) for length in ("off", "0", "3", "auto")}
    assert len({document["text"] for document in told.values()}) == 1
    assert told["off"]["draft"] is None and told["0"]["draft"] is None
    for length, most in (("3", 3), ("auto", 5)):
        draft = told[length]["draft"]
        assert list(draft) == [*DRAFT, "seconds", "share"] and draft["most"] == most == len(draft["acceptance"])
        assert draft["drafted"][0] == draft["reached"][0] == draft["drafts"]
        assert list(draft["seconds"]) == ["prefill", "draft", "verify", "plain"] and min(draft["seconds"].values()) >= 0
        assert 0 < draft["share"]["draft"] + draft["share"]["verify"] <= 1
    assert told["3"]["draft"]["drafts"] > 0
    code, _, err = cli(*base, "--draft", "2")
    assert code == 0 and "tokens accepted on average (by place " in err and "verify " in err and err.count("\n") == 1
    assert "drafts" not in cli(*base, "--draft", "off")[2]


@pytest.mark.parametrize("length", ["6", "999"])
def test_a_draft_that_is_too_long_is_one_line(cli, tiny: str, length: str) -> None:
    complaint = one_line(cli("generate", "a", "--model", tiny, "--draft", length))
    assert f"draft must be at most 5 (dspark_block_size), got {length}" in complaint


@pytest.mark.parametrize("length", ["-1", "many", "2.5", ""])
def test_a_draft_that_is_no_length(cli, tiny: str, length: str) -> None:
    code, out, err = cli("generate", "a", "--model", tiny, f"--draft={length}")
    assert (code, out) == (2, "") and "must be auto, off or a number of tokens" in err


def test_a_stop_text_that_straddles_tokens(cli, tiny: str) -> None:
    from openv41.api import load

    pieces = [piece.text for piece in load(tiny).stream(PROMPT, max_new_tokens=8)]
    free = "".join(pieces)
    at = next(i for i in range(1, 6) if pieces[i].strip() and pieces[i + 1].strip())
    stop = pieces[at][-1] + pieces[at + 1][0]
    base = ["generate", PROMPT, "--model", tiny, "--max-new-tokens", "8"]
    code, out, err = cli(*base, "--stop", stop, "--stop", "not to come")
    assert (code, out) == (0, free[: free.index(stop)] + "\n")
    assert "(stop)" in err
    # The beginning of a stop text at the end of the text is none.
    assert cli(*base, "--stop", free[-1] + "\x01")[1] == free + "\n"


def test_several_prompts_are_one_batch_and_give_what_each_gives_alone(cli, tiny: str, tmp_path: Path) -> None:
    texts = {"one.txt": PROMPT, "two.txt": "Où?\n", "three.txt": "x"}
    base = ["generate", "--model", tiny, "--ops", "reference", "--max-new-tokens", "2"]
    files = []
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        files += ["--file", str(tmp_path / name)]
    alone = [cli(*base, text)[1] for text in texts.values()]
    code, out, err = cli(*base, *files)
    headers = [f"==> {place}: {tmp_path / name} <==\n" for place, name in enumerate(texts, 1)]
    assert out == "".join(header + text for header, text in zip(headers, alone, strict=True))
    assert code == 0 and "6 new tokens (length)" in err and err.count("\n") == 1
    document = json.loads(cli(*base, *files, "--json")[1])
    assert [one["text"] + "\n" for one in document["completions"]] == alone
    assert all(list(one) == FIELDS for one in document["completions"])


def test_json_lines_with_options_of_their_own(cli, tiny: str, stdin) -> None:
    lines = [
        {"prompt": "a"},
        {"prompt": "b", "max_new_tokens": 2, "temperature": 1, "seed": 5, "top_k": 3, "top_p": 0.9},
        {"prompt": "c", "stop": ["never"], "temperature": 1},
        {"prompt": "c", "temperature": 1},
    ]
    stdin("\n\n".join(map(json.dumps, lines)).encode() + b"\n")
    base = ["generate", "--model", tiny, "--ops", "reference", "--json"]
    code, out, err = cli(*base, "--jsonl", "-", "--max-new-tokens", "3")
    done = json.loads(out)["completions"]
    assert code == 0 and err == ""
    assert [one["tokens"] for one in done] == [3, 2, 3, 3]
    assert done[2]["ids"] != done[3]["ids"], "equal prompts draw different numbers"
    stdin(json.dumps(lines[1]).encode())
    assert json.loads(cli(*base, "--jsonl", "-")[1])["completions"][0]["ids"] == done[1]["ids"]


@pytest.fixture
def shots(tmp_path: Path) -> list[str]:
    """Two images of different sizes."""
    files = [str(tmp_path / name) for name in ("red.png", "wide.jpg")]
    Image.new("RGB", (90, 60), (200, 30, 40)).save(files[0])
    Image.new("RGB", (400, 30), (10, 200, 40)).save(files[1])
    return files


def test_images_stand_where_the_prompt_says(cli, tiny: str, tmp_path: Path, shots: list[str], stdin) -> None:
    options = ("--model", tiny, "--ops", "cpu", "--max-new-tokens", "3", "--json")
    red, wide = shots
    code, out, err = cli("generate", "See <image> and <image>.", "--image", red, "--image", wide, *options)
    assert (code, err) == (0, "")
    plain = json.loads(cli("generate", "See  and .", *options)[1])
    both = json.loads(out)
    assert both["prompt_tokens"] > plain["prompt_tokens"] + 2 * 184
    for name, text in (("one", "See <image>"), ("none", "Nothing"), ("other", "<image>?")):
        (tmp_path / name).write_text(text)
    files = [word for name in ("one", "none", "other") for word in ("--file", str(tmp_path / name))]
    told = json.loads(cli("generate", *files, "--image", red, "--image", wide, *options)[1])
    stdin(f'{{"prompt": "See <image>", "images": ["{red}"]}}\n{{"prompt": "<image> is text here"}}'.encode())
    lines = json.loads(cli("generate", "--jsonl", "-", *options)[1])
    assert lines["completions"][0]["prompt_tokens"] == told["completions"][0]["prompt_tokens"]
    assert lines["completions"][1]["prompt_tokens"] < 20


def test_stdin(cli, tiny: str, stdin) -> None:
    base = ["generate", "--model", tiny, "--max-new-tokens", "3", "--json"]
    stdin("Où".encode())
    code, out, _ = cli(*base, "-")
    assert code == 0
    stdin("Où".encode())
    assert json.loads(cli(*base, "--file", "-")[1])["ids"] == json.loads(out)["ids"]
    assert json.loads(cli(*base, "Où")[1])["ids"] == json.loads(out)["ids"]


def test_the_demo_model_is_made_on_demand(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openv41.api.SHIPPED", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, out, err = cli("generate", "a", "--max-new-tokens", "1", "--json")
    folder = Path(json.loads(out)["model"])
    assert code == 0 and folder.parent == tmp_path / "cache" / "openv41"
    assert "demo model" in err and err.count("\n") == 1
    assert list(folder.parent.iterdir()) == [folder], "nothing else is left"
    written = (folder / "config.json").stat().st_mtime_ns
    assert cli("generate", "a", "--max-new-tokens", "1", "--json")[0] == 0
    assert (folder / "config.json").stat().st_mtime_ns == written


def test_two_demos_at_once_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "openv41" / "tiny"
    (folder).mkdir(parents=True)
    (folder / "config.json").write_text("the other's")
    loading._write_demo(folder)
    assert (folder / "config.json").read_text() == "the other's"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_demo_that_cannot_be_written_is_an_error(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("openv41.api.SHIPPED", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert one_line(cli("generate", "a")).startswith("the demo model cannot be written to ")


def one_line(result: tuple[int, str, str]) -> str:
    """The complaint of a command that failed as it should."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("openv41: error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert "Traceback" not in err
    return err.removeprefix("openv41: error: ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "no prompt given"),
        ([""], "the prompt must not be empty"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["x", "--max-new-tokens", "-3"], "max_new_tokens must be"),
        (["x", "--temperature", "-1"], "temperature must be"),
        (["x", "--temperature", "nan"], "temperature must be"),
        (["x", "--temperature", "inf"], "temperature must be"),
        (["x", "--top-p", "0"], "top_p must be"),
        (["x", "--top-p", "1.5"], "top_p must be"),
        (["x", "--top-p", "nan"], "top_p must be"),
        (["x", "--top-k", "-1"], "top_k must be"),
        (["x", "--seed", "-1"], "seed must be"),
        (["x", "--stop", ""], "a stop text must not be empty"),
        (["x", "--threads", "0"], "threads must be"),
        (["x", "--device", "banana"], "device must be"),
        (["x", "--model", "nowhere"], "no model folder at nowhere"),
        (["x", "--model", "{tmp}"], "is no model folder"),
        (["x", "--model", "{tmp}/latin1.txt"], "no model folder at"),
        (["{long}"], "prompt 1 of 1 must fit the context of 8192 tokens, got"),
        (["--file", "{tmp}/latin1.txt"], "must be text in UTF-8, got byte 0xf9 at 1"),
        (["--file", "{tmp}/empty.txt"], "the prompt must not be empty"),
        (["--file", "{tmp}/nowhere.txt"], "nowhere.txt cannot be read: No such file"),
        (["--file", "{tmp}"], "cannot be read: Is a directory"),
        (["x", "--file", "{tmp}/empty.txt"], "both an argument and --file"),
        (["x", "--jsonl", "{tmp}/empty.txt"], "--jsonl and others"),
        (["--file", "{tmp}/empty.txt", "--jsonl", "{tmp}/empty.txt"], "--jsonl and others"),
        (["--file", "-", "--file", "-"], "standard input can be read once"),
        (["O\udcf9"], "must be UTF-8"),
        (["--jsonl", "{tmp}/empty.txt"], "must hold one JSON object a line"),
        (["--jsonl", "{tmp}/nowhere"], "cannot be read"),
        (["x", "--image", "{tmp}/dot.png"], "one <image> for each --image, got 0 in the prompt and 1 images"),
        (["<image>"], "one <image> for each --image, got 1 in the prompt and 0 images"),
        (["<image> <image>", "--image", "{tmp}/dot.png"], "got 2 in the prompt and 1 images"),
        (["<image>", "--image", "{tmp}/nowhere.png"], "nowhere.png cannot be read: No such file"),
        (["<image>", "--image", "{tmp}/latin1.txt"], "latin1.txt is no image that can be read"),
        (["<image>", "--image", "{tmp}/cut.png"], "cut.png is a broken image"),
        (["--jsonl", "{tmp}/empty.txt", "--image", "{tmp}/dot.png"], "--image must go with a prompt or --file"),
    ],
)
def test_bad_input_is_one_line(cli, tiny: str, tmp_path: Path, arguments: list[str], complaint: str) -> None:
    Image.effect_noise((40, 40), 50).save(tmp_path / "dot.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "dot.png").read_bytes()[:500])
    (tmp_path / "latin1.txt").write_bytes("Où".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")
    filled = [text.replace("{tmp}", str(tmp_path)).replace("{long}", "a b " * 6000) for text in arguments]
    model = [] if "--model" in filled else ["--model", tiny]
    assert complaint in one_line(cli("generate", *filled, *model))
    assert complaint in one_line(cli("generate", *filled, *model, "--json"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", "each line must be a JSON object, but"),
        ("[1]", 'with a text under "prompt"'),
        ("{}", 'with a text under "prompt"'),
        ('{"prompt": 3}', 'with a text under "prompt"'),
        ('{"prompt": ""}', "the prompt must not be empty"),
        ('{"prompt": "x", "temprature": 1, "best_of": 2}', "unknown keys best_of, temprature"),
        ('{"prompt": "x", "temperature": "hot"}', "temperature must be"),
        ('{"prompt": "x", "temperature": NaN}', "temperature must be"),
        ('{"prompt": "x", "max_new_tokens": 1.5}', "max_new_tokens must be"),
        ('{"prompt": "x", "max_new_tokens": true}', "max_new_tokens must be"),
        ('{"prompt": "x", "top_p": null}', "top_p must be"),
        ('{"prompt": "x", "stop": [1]}', "stop must be"),
        ('{"prompt": "x", "stop": [""]}', "a stop text must not be empty"),
        ('{"prompt": "\\ud83d"}', "half a surrogate pair"),
        ('{"prompt": "<image>", "images": "a.png"}', "images must be a list of files"),
        ('{"prompt": "<image>", "images": []}', "one <image> for each image, got 1 of them and 0 images"),
        ('{"prompt": "<image>", "images": ["nowhere.png"]}', "nowhere.png cannot be read"),
    ],
)
def test_a_bad_line_of_json_is_named(cli, tiny: str, tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    told = one_line(cli("generate", "--jsonl", str(path), "--model", tiny))
    assert complaint in told and f"{path}, line 3: " in told


@pytest.mark.parametrize("arguments", [[], ["bogus"], ["generate", "x", "--top-k", "a"], ["tiny"], ["plan", "a", "b"]])
def test_what_does_not_parse_ends_as_argparse_does(cli, arguments: list[str]) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "") and err.startswith("usage: openv41")


def test_a_checkpoint_that_does_not_fit_is_one_line(cli, tiny: str, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    path = copy / "config.json"
    document = json.loads(path.read_text())
    document["text_config"]["n_routed_experts"] = 7
    path.write_text(json.dumps(document))
    told = one_line(cli("generate", "x", "--model", str(copy)))
    assert "does not fit its config.json: " in told and "surplus: layers.0.ffn.experts.7" in told


# In a process of its own


def test_an_interrupt_keeps_what_there_is(tiny: str) -> None:
    child = process("generate", PROMPT, "--model", tiny, "--max-new-tokens", "8000", "--threads", "1")
    assert child.stdout is not None and child.stderr is not None
    first = child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and first and out.endswith(b"\n")
    assert b"Traceback" not in err and err.count(b"\n") == 1
    assert b"new tokens (interrupted) at " in err


def test_an_interrupt_with_json_leaves_json(tiny: str, cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from openv41.texts import Stream

    following = Stream.__next__

    def interrupted(stream: Stream):
        if len(stream.completions[0].ids) == 3:
            raise KeyboardInterrupt
        return following(stream)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    code, out, err = cli("generate", PROMPT, "--model", tiny, "--json")
    document = json.loads(out)
    assert (code, document["finish_reason"], document["tokens"], err) == (generate_command.INTERRUPTED, None, 3, "")


def test_an_interrupt_while_loading_says_nothing(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "open_assistant", interrupt)
    assert cli("generate", "x") == (130, "", "")


def test_a_reader_that_leaves_early_is_no_fault(tiny: str) -> None:
    child = process("generate", PROMPT, "--model", tiny, "--max-new-tokens", "8000", "--threads", "1")
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    assert child.wait(timeout=60) == 0
    assert child.stderr.read() == b""


def test_a_terminal_that_cannot_show_a_character(tiny: str) -> None:
    narrow = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    child = process("generate", PROMPT, "--model", tiny, "--max-new-tokens", "6", "--json", env=narrow)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0 and err == b""
    assert not json.loads(out.decode("ascii"))["text"].isascii()


def test_version_and_help_do_without_torch() -> None:
    code = (
        "import sys; from openv41.cli import build_parser; build_parser().format_help();"
        "heavy = {'torch', 'numpy', 'tokenizers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})
    child = process("--version")
    assert child.communicate(timeout=60) == (b"openv41 0.1.0\n", b"") and child.returncode == 0


# The other commands


def test_score(cli, tiny: str, tmp_path: Path) -> None:
    code, out, err = cli("score", "Où est-il?", "--model", tiny, "--json", "--top", "2")
    document = json.loads(out)
    assert code == 0 and err == ""
    assert document["count"] == len(document["tokens"]) and document["bytes"] == 11
    assert "".join(token["text"] for token in document["tokens"]) == "Où est-il?"
    assert all(len(token["likeliest"]) == 2 for token in document["tokens"])
    assert document["logprob"] == pytest.approx(sum(token["logprob"] for token in document["tokens"]))
    (tmp_path / "text.txt").write_text("Où est-il?", encoding="utf-8")
    code, out, err = cli("score", "--file", str(tmp_path / "text.txt"), "--model", tiny)
    assert code == 0 and f"perplexity {document['perplexity']:.4f}" in out
    assert out.count("\n") == document["count"] + 3 and "likeliest" not in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "no text given"),
        ([""], "the text to score must not be empty"),
        (["x", "--top", "-1"], "top must be"),
        (["x", "--file", "y"], "both an argument and --file"),
        (["--file", "nowhere"], "nowhere cannot be read"),
        (["a b " * 6000], "the text must fit the context of 8192 tokens"),
    ],
)
def test_bad_input_of_score_is_one_line(cli, tiny: str, arguments: list[str], complaint: str) -> None:
    assert complaint in one_line(cli("score", *arguments, "--model", tiny))


def test_plan(cli, tiny: str, tmp_path: Path) -> None:
    code, out, _ = cli("plan")
    assert code == 0 and len(out.splitlines()) == 1 + 43 and "candidate source" in out
    assert json.loads(cli("plan", "--json")[1])[2]["role"] == "source"
    assert cli("plan", tiny) == cli("plan", f"{tiny}/config.json")
    assert "nowhere: the file cannot be read" in one_line(cli("plan", "nowhere"))
    (tmp_path / "config.json").write_text("[]")
    assert "must hold one JSON object" in one_line(cli("plan", str(tmp_path)))


def test_tiny(cli, tmp_path: Path) -> None:
    out = str(tmp_path / "new" / "model")
    code, text, err = cli("tiny", out, "--seed", "3")
    assert code == 0 and err == "" and text.startswith(f"wrote {out}: 8 layers and 3 draft stages, ")
    assert "is not empty" in one_line(cli("tiny", out))
    assert cli("tiny", out, "--overwrite")[0] == 0
    assert "seed must be" in one_line(cli("tiny", out, "--seed", "-1"))
    (tmp_path / "file").write_text("")
    one_line(cli("tiny", str(tmp_path / "file")))
    one_line(cli("tiny", str(tmp_path / "file" / "below")))


def test_doctor(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = cli("doctor")
    assert code == 0 and err == "" and "DIFFERS" not in out
    document = json.loads(cli("doctor", "--json")[1])
    owners = document["ops"]["owners"]
    assert owners["grouped_linear"] == "CpuOps" and owners["linear"] == "FastOps" and owners["store"] == "ReferenceOps"
    assert [check["op"] for check in document["agreement"]] == ["linear", "sparse_attention", "index_scores", "pick"]
    reference = json.loads(cli("doctor", "--json", "--ops", "reference")[1])
    whose = reference["ops"]["owners"]
    assert {whose[name] for name in vars(Compound) if name in whose} == {"Compound"}
    assert {owner for name, owner in whose.items() if name not in vars(Compound)} == {"ReferenceOps"}
    assert all(check["difference"] == 0 for check in reference["agreement"])


@pytest.mark.parametrize("op", ["linear", "sparse_attention", "index_scores", "pick"])
def test_the_doctor_notices_a_wrong_operation(cli, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    from openv41.ops.cpu import CpuOps

    right = getattr(CpuOps, op)
    monkeypatch.setattr(CpuOps, op, lambda *arguments: right(*arguments).roll(1, 0))
    code, out, _ = cli("doctor")
    assert code == 1 and out.count("DIFFERS") == 1
    one_line(cli("doctor", "--device", "cuda:99"))


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**19, "1.5 MiB"), (2**50, "1024.0 TiB")]
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
