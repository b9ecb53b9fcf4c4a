"""The README's examples work: its commands and its Python run here from top to bottom, in one folder.

A command whose line ends in `# not run in the test`, and a block of Python whose first line is that comment, are left
out (Python is compiled all the same): for what needs the released checkpoint or a GPU.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
NOT_RUN = "# not run in the test"
SHELLS = {"console", "bash", "sh", "shell"}
SECONDS = 300


@dataclass(frozen=True)
class Example:
    line: int  # of the first line, from 1
    language: str
    text: str


def fenced_blocks(markdown: str) -> list[Example]:
    """Every block between two fences with its language; an indented block loses its indent."""
    blocks = []
    fence, indent, language, start, body = "", 0, "", 0, []
    for number, line in enumerate(markdown.splitlines(), start=1):
        opening = re.match(r"( *)(`{3,}|~{3,})\s*([\w+-]*)", line)
        if not fence and opening:
            indent, fence, language = len(opening[1]), opening[2], opening[3].lower()
            start, body = number + 1, []
        elif fence and line.strip() == fence:
            blocks.append(Example(start, language, "\n".join(body)))
            fence = ""
        elif fence:
            body.append(line[indent:] if line[:indent].isspace() else line)
    assert not fence, f"the fence before line {start} is never closed"
    return blocks


def commands(block: Example) -> list[Example]:
    """The `openv41` and `make` commands of a shell block, a continued line as one.

    After a prompt ("$ "), or bare in a block without any prompt; everything else is output or somebody else's command.
    """
    lines = block.text.splitlines()
    prompt = "$ " if any(line.startswith("$ ") for line in lines) else ""
    found, skip_to = [], 0
    for index, line in enumerate(lines):
        if index < skip_to or not re.match(rf"{re.escape(prompt)}(openv41|make)(\s|$)", line):
            continue
        last = index
        while lines[last].endswith("\\") and last + 1 < len(lines):
            last += 1
        skip_to = last + 1
        text = "\n".join(lines[index : last + 1]).removeprefix(prompt)
        found.append(Example(block.line + index, "command", text))
    return found


def run_command(example: Example, folder: Path) -> None:
    """Runs an `openv41` command through this interpreter; of a `make` command, only what it would do is asked."""
    where = f"README.md:{example.line}: {example.text}"
    if example.text.startswith("make"):
        script = f"make() {{ command make --dry-run --directory '{ROOT}' \"$@\"; }}\n{example.text}"
    else:
        script = f"openv41() {{ '{sys.executable}' -m openv41 \"$@\"; }}\n{example.text}"
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=env | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{where}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}"


def run_python(block: Example) -> None:
    """Executes a block in a namespace of its own; blank lines above it make a traceback show the README's lines."""
    code = compile("\n" * (block.line - 1) + block.text, str(README), "exec")
    if not block.text.lstrip().startswith(NOT_RUN):
        exec(code, {"__name__": "__readme__"})


@pytest.mark.skipif(not README.exists(), reason="there is no README.md")
def test_the_readme_works_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = {"python": 0, "openv41": 0, "make": 0}
    for block in fenced_blocks(README.read_text()):
        if block.language == "python":
            run_python(block)
            ran["python"] += 1
        elif block.language in SHELLS:
            for command in commands(block):
                if not command.text.endswith(NOT_RUN):
                    run_command(command, tmp_path)
                    ran[command.text.split()[0]] += 1
    assert all(ran.values()), f"the README shows Python, openv41 and make, but this ran: {ran}"


MARKDOWN = """\
Words, `$ openv41 inline`.

```python
x = 1

y = x
```

```console
$ make test
$ openv41 generate "a b" \\
    --seed 0
openv41 printed this
$ pip install something
$ openv41 load huge  # not run in the test
```

```bash
openv41 plan | head -3
makefile is no command
```

1. In a list:
   ```python
   if True:
       z = 1
   ```

````markdown
```python
nested
```
````
"""


def test_blocks_are_found_with_their_lines() -> None:
    blocks = fenced_blocks(MARKDOWN)
    assert [(b.line, b.language) for b in blocks] == [
        (4, "python"),
        (10, "console"),
        (19, "bash"),
        (25, "python"),
        (30, "markdown"),
    ]
    assert blocks[0].text == "x = 1\n\ny = x"
    assert blocks[3].text == "if True:\n    z = 1"


def test_commands_are_told_from_output() -> None:
    found = [(c.line, c.text) for block in fenced_blocks(MARKDOWN) if block.language in SHELLS for c in commands(block)]
    assert found == [
        (10, "make test"),
        (11, 'openv41 generate "a b" \\\n    --seed 0'),
        (15, "openv41 load huge  # not run in the test"),
        (19, "openv41 plan | head -3"),
    ]


def test_a_fence_left_open_is_an_error() -> None:
    with pytest.raises(AssertionError, match="never closed"):
        fenced_blocks("```python\nx = 1\n")


def test_python_runs_in_its_own_namespace_and_names_the_readme_line() -> None:
    run_python(Example(1, "python", "kept = 1"))
    with pytest.raises(NameError) as caught:
        run_python(Example(7, "python", "\nkept"))
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == (str(README), 8)
    run_python(Example(1, "python", f"{NOT_RUN}\nraise SystemExit"))
    with pytest.raises(SyntaxError):
        run_python(Example(1, "python", f"{NOT_RUN}\n1 +"))


def test_a_command_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"README.md:9: openv41 no-such-command(.|\n)*exit [1-9]"):
        run_command(Example(9, "command", "openv41 no-such-command"), tmp_path)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_a_make_target_is_looked_up_without_running_it(tmp_path: Path) -> None:
    run_command(Example(1, "command", "make test  # a minute"), tmp_path)
    with pytest.raises(AssertionError, match="no-such-target"):
        run_command(Example(1, "command", "make no-such-target"), tmp_path)
