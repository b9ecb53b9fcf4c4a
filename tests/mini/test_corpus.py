"""The corpus of the mini model: what is taken from an archive, and what is not. No network: archives are made here."""

import hashlib
import importlib.util
import io
import json
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("corpus", ROOT / "mini" / "corpus.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["corpus"] = module
    spec.loader.exec_module(module)
    return module


corpus = load()
CODE = "".join(f"def function_{i}(argument):\n    return argument * {i} + {i * i}\n\n" for i in range(20))


def archive(files: dict[str, bytes | str], links: dict[str, str] | None = None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(f"thing-1.0/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(f"thing-1.0/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return stream.getvalue()


def package(**changes: object):
    values = {"name": "thing", "version": "1.0", "licence": "MIT", "file": "thing-1.0.tar.gz", "sha256": ""}
    return corpus.Package(**(values | changes))


def test_what_is_kept() -> None:
    data = archive(
        {
            "src/thing/a.py": CODE, "README.md": "# Thing\n" + "words " * 50 + "\n" + "more " * 60,
            "docs/index.rst": CODE,
            "tests/test_a.py": CODE, "src/thing/test_b.py": CODE, "src/thing/_vendor/six.py": CODE, "conftest.py": CODE,
            "src/thing/data.json": "{}" * 500, "src/thing/short.py": "x = 1\n", "src/thing/wide.py": "x" * 5000,
            "src/thing/latin.py": b"\xe9" * 500, "src/thing/made.py": "# Auto-generated, do not edit\n" + CODE,
            "src/thing/nul.py": CODE + "\0",
        },
        links={"src/thing/link.py": "/etc/passwd"},
    )  # fmt: skip
    kept = [one.path for one in corpus.documents(package(), data)]
    assert kept == ["README.md", "docs/index.rst", "src/thing/a.py"]


def test_text_is_made_even() -> None:
    text = corpus.text_of(("\n\n" + CODE.replace("\n", "  \r\n") + "\n\n").encode())
    assert text == CODE.rstrip("\n") + "\n"


@pytest.mark.parametrize("data", [b"", b"no archive", archive({"a.py": CODE})[:-40]], ids=["empty", "other", "cut"])
def test_a_broken_archive_is_one_error(data: bytes) -> None:
    with pytest.raises(corpus.CorpusError, match="not a source archive"):
        list(corpus.members(data))


def test_near_duplicates() -> None:
    seen = corpus.Seen()
    assert seen.add(CODE)
    assert not seen.add(CODE) and not seen.add(CODE.replace("function_3", "another_3"))
    assert seen.add("".join(f"class Other{i}:\n    value = {i}\n    name = 'n{i}'\n" for i in range(30)))
    assert seen.add("short")


def test_similar_halves_stay_apart() -> None:
    """Files that share half of their text are different files."""
    other = "".join(f"for index_{i} in range({i}):\n    print(index_{i}, {i} ** 2)\n\n" for i in range(20))
    seen = corpus.Seen()
    assert seen.add(CODE + other) and seen.add(CODE + other.replace("print", "log").replace("index", "place"))


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True), ("BSD-3-Clause", True), ("Apache Software License", True), ("Apache-2.0 OR BSD-2-Clause", True),
        ("GPL-3.0-or-later", False), ("MPL-2.0", False), ("MIT AND LGPL-2.1", False), ("", False),
        ("Proprietary", False),
    ],
)  # fmt: skip
def test_licences(licence: str, allowed: bool) -> None:
    assert corpus.permissive(licence) is allowed


def test_the_licence_is_what_the_package_says() -> None:
    assert corpus.licence_of("Name: a\nLicense-Expression: MIT\nLicense: other\n\n") == "MIT"
    classifiers = "Classifier: License :: OSI Approved\nClassifier: License :: OSI Approved :: BSD License\n"
    assert corpus.licence_of(f"Name: a\n{classifiers}License: see file\n\n") == "BSD License"
    assert corpus.licence_of("Name: a\nLicense: Apache 2.0\n\n") == "Apache 2.0"
    assert corpus.licence_of("Name: a\n\n") == ""


def test_the_newest_release() -> None:
    files = [{"filename": f"thing-{version}.tar.gz"} for version in ("1.9", "1.10", "2.0rc1", "oops")]
    assert corpus.newest(files)["filename"] == "thing-1.10.tar.gz"
    with pytest.raises(corpus.CorpusError, match="no source archive"):
        corpus.newest([{"filename": "thing-1.0a1.tar.gz"}])


def test_the_record_of_packages() -> None:
    """Every package of the record is permissive by its own word, and some are held out."""
    packages = corpus.read_record()
    assert len(packages) > 50 and len({one.name for one in packages}) == len(packages)
    for one in packages:
        assert corpus.permissive(one.licence), one
        assert len(one.sha256) == 64 and one.file.endswith(".tar.gz")
    assert 3 <= sum(one.held_out for one in packages) <= 20


def test_building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out packages are seen first: what they share stays out of training. Changed archives are refused."""
    monkeypatch.setattr(corpus, "FOLDER", tmp_path)
    own = "".join(f"async def task_{i}(queue):\n    await queue.put({i})\n\n" for i in range(20))
    made = {"held": archive({"held/a.py": CODE}), "thing": archive({"thing/a.py": CODE, "thing/b.py": own})}
    packages = []
    for name, data in made.items():
        corpus.keep(f"{name}.tar.gz", data)
        sha256 = hashlib.sha256(data).hexdigest()
        packages.append(package(name=name, file=f"{name}.tar.gz", sha256=sha256, held_out=name == "held"))
    counts = corpus.build(packages)
    assert counts["held"]["documents"] == 1 and counts["thing"]["documents"] == 1
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert rows == [{"package": "thing", "path": "thing/b.py", "text": own.rstrip("\n") + "\n"}]
    corpus.keep("thing.tar.gz", made["held"])
    with pytest.raises(corpus.CorpusError, match="is not the archive"):
        corpus.build(packages)


def test_a_wrong_hash_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "thing.tar.gz"
    path.write_bytes(archive({"a.py": CODE}))
    assert corpus.download(path.as_uri(), hashlib.sha256(path.read_bytes()).hexdigest()) == path.read_bytes()
    with pytest.raises(corpus.CorpusError, match="has the SHA-256"):
        corpus.download(path.as_uri(), "0" * 64)


def test_the_command_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "FOLDER", tmp_path / "none")
    for command, words in (("fetch", "--index is needed"), ("build", ".tar.gz: fetch it first")):
        assert corpus.main([command]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
