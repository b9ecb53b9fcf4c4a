"""The house rules that a machine can hold: who may import whom, where Triton lives, and what no source file says.

The rules are read from the syntax tree, so they hold for imports inside functions and under TYPE_CHECKING as well.
"""

import ast
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "openv41"

# A room is a module, or a package with all that is in it; the longest name wins. "ops" alone is the seam (the
# protocol and the choice), "ops.*" are the sets behind it: the model sees the seam only.
PLAIN = {"errors", "config", "plan", "state"}
SEAM = {"formats", "ops"}
TEXTBOOK = PLAIN | SEAM | {"model"}
STORED = TEXTBOOK | {"weights", "weights.names"}
BELOW_API = STORED | {"ops.*", "inputs", "generate", "train", "explain"}
BESIDE_API = {"published", "parity"}

ROOMS: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "config": {"errors"},
    "plan": {"errors", "config"},
    "state": {"errors", "config", "plan", "formats"},
    "formats": {"errors"},
    "ops": {"errors", "formats", "ops.*", "ops.hopper"},
    "ops.*": {"errors", "formats", "ops"},
    "ops.hopper": {"errors", "formats", "ops", "ops.*", "ops.kernels"},
    "ops.kernels": set(),
    "model": PLAIN | SEAM,
    "weights": STORED,
    "weights.tiny": STORED | {"inputs"},
    "weights.names": {"errors", "config"},
    "inputs": {"errors", "config", "state"},
    "generate": {"errors", "state", "model"},
    "train": STORED | {"weights.tiny", "ops.*", "inputs", "generate"},
    "explain": STORED | {"ops.*", "inputs", "generate"},
    "published": BELOW_API,
    "parity": BELOW_API,
    "bench": BELOW_API | {"ops.hopper", "parity", "weights.tiny"},
    "texts": {"errors", "config", "state", "generate", "inputs"},
    "api": BELOW_API | BESIDE_API | {"_version", "texts"},
    "commands": BELOW_API | BESIDE_API | {"weights.tiny", "_version", "api", "texts", "bench"},
    "cli": BELOW_API | BESIDE_API | {"_version", "api", "texts", "commands", "__init__"},
    "__init__": BELOW_API | BESIDE_API | {"_version", "api", "texts"},
    "__main__": {"cli"},
}
TRITON_ROOMS = {"ops.hopper", "ops.kernels"}

# A path of one machine; a host that packages are fetched from. Put together from pieces: this file is searched too.
FORBIDDEN = re.compile(
    r"(?<![\w.])/" + r"work/"
    + "|" + r"\.".join(("pypi", "org"))
    + "|" + r"\.".join(("pythonhosted", "org"))
    + "|" + r"\.".join(("download", "pytorch", "org"))
    + "|" + r"\.".join(("registry", "npmjs"))
)  # fmt: skip


def module_of(path: str) -> str:
    """`model/block.py` -> `openv41.model.block`, `model/__init__.py` -> `openv41.model` (below src/openv41)."""
    parts = [PACKAGE, *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The room that a module of the package lies in, or None where the table has none for it."""
    name = module.removeprefix(PACKAGE).removeprefix(".")
    if not name:
        return "__init__"
    if name in ROOMS:
        return name
    while "." in name:
        name = name.rpartition(".")[0]
        for room in (f"{name}.*", name):
            if room in ROOMS:
                return room
    return None


def imports(tree: ast.AST, path: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of each module that a file imports; `modules` tells a submodule from a name in a module."""
    here = module_of(path)
    package = here if path.endswith("__init__.py") else here.rpartition(".")[0]
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = module or ""
                if level:
                    parents = package.split(".")
                    above = parents[: len(parents) - level + 1]
                    base = ".".join([*above, module] if module else above)
                for alias in names:
                    submodule = f"{base}.{alias.name}"
                    is_module = submodule in modules or room_named(submodule)
                    yield node.lineno, submodule if is_module else base
            case ast.Call(func=ast.Name(id=verb) | ast.Attribute(attr=verb), args=[ast.Constant(str(name)), *_]):
                if verb in ("import_module", "__import__"):
                    yield node.lineno, package + name if name.startswith(".") else name


def room_named(module: str) -> bool:
    """Whether a name is one of the table's rooms, be its file written or not."""
    package, _, name = module.partition(".")
    return package == PACKAGE and name in ROOMS


def broken_imports(files: Mapping[str, str]) -> list[str]:
    """Every import that breaks a rule, as `file:line: rule`; `files` maps a path below src/openv41 to its source."""
    modules = {module_of(path) for path in files}
    broken = set()
    for path, source in files.items():
        room = room_of(module_of(path))
        if room is None:
            broken.add(f"{path}:1: this file is in no room: give it a row in ROOMS or move it into one")
            continue
        for line, target in imports(ast.parse(source, path), path, modules):
            where = f"{path}:{line}: "
            top = target.partition(".")[0]
            if top == "triton" and room not in TRITON_ROOMS:
                broken.add(where + f"triton is imported in {room}, but only {' and '.join(sorted(TRITON_ROOMS))} may")
            if top != PACKAGE:
                continue
            there = room_of(target)
            if there is None:
                broken.add(where + f"{target} is in no room")
            elif there != room and there not in ROOMS[room]:
                allowed = ", ".join(sorted(ROOMS[room])) or "no other room"
                broken.add(where + f"{room} imports {there} ({target}), but {room} may import {allowed}")
    return sorted(broken)


def source_files() -> dict[str, str]:
    top = ROOT / "src" / PACKAGE
    return {path.relative_to(top).as_posix(): path.read_text() for path in sorted(top.rglob("*.py"))}


def project_texts() -> Iterator[Path]:
    for folder in ("src", "tests", "docs", "benchmarks"):
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in {".py", ".md", ".toml"})
    yield from sorted(ROOT.glob("*.md"))
    yield from (ROOT / name for name in ("Makefile", "pyproject.toml", "requirements.txt"))


def test_every_import_follows_the_rules() -> None:
    files = source_files()
    assert files, "no source file found"
    broken = broken_imports(files)
    assert not broken, "\n" + "\n".join(broken)


def test_rooms_that_may_be_imported_exist_in_the_table() -> None:
    assert set().union(*ROOMS.values()) <= ROOMS.keys()


def test_rooms_form_no_circle_but_the_seam() -> None:
    """A room never imports itself through others. The seam chooses among its sets, and they are written against it."""
    seam = {"ops", "ops.*", "ops.hopper"}
    edges = {a: {b for b in allowed if a != b and not {a, b} <= seam} for a, allowed in ROOMS.items()}
    seen: dict[str, set[str]] = {}

    def below(room: str, trail: tuple[str, ...]) -> set[str]:
        assert room not in trail, f"a circle of rooms: {' -> '.join([*trail, room])}"
        if room not in seen:
            seen[room] = set().union(*({b} | below(b, (*trail, room)) for b in edges[room]))
        return seen[room]

    for room in ROOMS:
        below(room, ())


@pytest.mark.parametrize(
    ("path", "source", "line", "rule"),
    [
        ("ops/cpu.py", "import torch\nfrom openv41.config import Config\n", 2, "ops.* imports config"),
        ("ops/cpu.py", "from .. import state\n", 1, "ops.* imports state"),
        ("ops/__init__.py", "import openv41.model.block as b\n", 1, "ops imports model"),
        ("ops/kernels/gemm.py", "from ...errors import OpsError\n", 1, "ops.kernels imports errors"),
        ("ops/reference.py", "from openv41.ops.kernels import gemm\n", 1, "ops.* imports ops.kernels"),
        ("model/block.py", "from openv41.ops import reference\n", 1, "model imports ops.*"),
        ("model/block.py", "from openv41.ops.hopper import HopperOps\n", 1, "model imports ops.hopper"),
        ("model/block.py", "def f():\n    from ..weights import load\n", 2, "model imports weights"),
        ("model/block.py", "import importlib\nimportlib.import_module('openv41.api')\n", 2, "model imports api"),
        ("model/block.py", "from openv41 import load\n", 1, "model imports __init__"),
        ("state.py", "if TYPE_CHECKING:\n    from .model.block import Block\n", 2, "state imports model"),
        ("plan.py", "from openv41.state import Step\n", 1, "plan imports state"),
        ("errors.py", "from . import config\n", 1, "errors imports config"),
        ("formats.py", "from openv41 import ops\n", 1, "formats imports ops"),
        ("weights/names.py", "from openv41.model.block import Block\n", 1, "weights.names imports model"),
        ("generate/loop.py", "from openv41.inputs.tokenizer import Tokenizer\n", 1, "generate imports inputs"),
        ("train/loop.py", "import openv41.parity.diff\n", 1, "train imports parity"),
        ("published.py", "from openv41.api import load\n", 1, "published imports api"),
        ("api.py", "from openv41.cli import main\n", 1, "api imports cli"),
        ("config.py", "from .nowhere import x\n", 1, "openv41.nowhere is in no room"),
        ("utils.py", "", 1, "in no room"),
        ("ops/cpu.py", "import triton.language as tl\n", 1, "triton is imported in ops.*"),
        ("api.py", "def f():\n    from triton import jit\n", 2, "triton is imported in api"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str, line: int, rule: str) -> None:
    found = broken_imports({"ops/reference.py": "", path: source})
    assert len(found) == 1 and found[0].startswith(f"{path}:{line}: ") and rule in found[0], found


def test_what_the_rules_allow_is_not_reported() -> None:
    allowed = {
        "__init__.py": "from openv41.api import load\nfrom ._version import __version__\n",
        "__main__.py": "from openv41.cli import main\n",
        "cli.py": "from openv41 import api, parity\nimport openv41.parity.cases\n",
        "model/block.py": "from openv41.ops import Ops\nfrom . import streams\nfrom ..state import Step\n",
        "model/streams.py": "from openv41.model.layers import Linear\nimport tritonclient\n",
        "ops/__init__.py": "def choose():\n    from .hopper import HopperOps\n    from openv41.ops import cpu\n",
        "ops/hopper.py": "import triton\nfrom .kernels import gemm\nfrom openv41.ops.reference import ReferenceOps\n",
        "ops/kernels/gemm.py": "import triton\nfrom .blocks import tile\n",
        "parity/diff.py": "from openv41.ops.reference import ReferenceOps\nfrom openv41.weights import names\n",
    }
    assert broken_imports(allowed) == []


def test_there_is_no_utils() -> None:
    found = [path for path in (ROOT / "src").rglob("*") if path.stem == "utils" and path.suffix in {".py", ""}]
    assert not found, f"a room without a noun collects what has no home: {found}"


def test_no_text_names_a_machine_path_or_a_package_host() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in project_texts()
        if path.exists()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if FORBIDDEN.search(line)
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("word", ["see /" + "work/x", "https://pypi" + ".org/simple", "files.pythonhosted" + ".org"])
def test_a_forbidden_word_is_found(word: str) -> None:
    assert FORBIDDEN.search(word)


def test_ordinary_words_are_not_forbidden() -> None:
    assert not FORBIDDEN.search("how the experts divide their work/time; see docs.pytorch.org and src/work/")


@pytest.mark.skipif(os.environ.get("OPENV41_JAXTYPING") == "0", reason="shape checks are turned off")
def test_shapes_are_checked_in_tests() -> None:
    spec = importlib.import_module("openv41.errors").__spec__
    assert spec is not None and type(spec.loader).__module__.startswith("jaxtyping")
