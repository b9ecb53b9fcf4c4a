"""Folders that are none, broken files, entries that lie: each fails what it must and nothing else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_folder import GOLDEN
from safetensors.torch import save_file
from torch import Tensor

from openv41.parity import Folder, FolderError, Result, ops_named, run_cases, select


def results(folder: Folder, *groups: str) -> dict[str, Result]:
    return {result.name: result for result in run_cases(select(folder, groups), ops_named("cpu"))}


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FolderError):
            Folder(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"groups"', "{}", '{"groups": []}', '{"groups": {"rope": 3}}', '{"groups": {"rope": []}}',
             "[" * 100_000, "\0", '{"groups": {}}']
)  # fmt: skip
def test_an_index_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(FolderError):
        Folder(tmp_path)


def test_unknown_groups_and_cases_are_refused(golden: Folder) -> None:
    for groups, names in ((["ropes"], []), ([], ["table"]), (["rope"], ["holes"])):
        with pytest.raises(FolderError):
            select(golden, groups, names)
    assert [case.name for case in select(golden, ["window"], ["ring_weights"])] == ["ring_weights"]


@pytest.mark.parametrize("spoil", ["truncated", "missing", "empty", "noise", "header"])
def test_a_broken_file_fails_its_own_cases(tmp_path: Path, spoil: str) -> None:
    for name in ("index.json", "rope.safetensors", "window.safetensors"):
        shutil.copy(GOLDEN / name, tmp_path)
    broken = tmp_path / "rope.safetensors"
    whole = broken.read_bytes()
    match spoil:
        case "truncated":
            broken.write_bytes(whole[:-100])
        case "missing":
            broken.unlink()
        case "empty":
            broken.write_bytes(b"")
        case "noise":
            broken.write_bytes(bytes(range(256)) * 40)
        case "header":
            broken.write_bytes((1 << 40).to_bytes(8, "little") + whole[8:])
    found = results(Folder(tmp_path), "rope", "window")
    for name, result in found.items():
        in_rope = result.group == "rope"
        assert result.status == ("FAIL" if in_rope else "PASS"), (name, result.text)
        assert not in_rope or "rope.safetensors" in result.text


def entry(**changes: Any) -> dict[str, Any]:
    """One sparse_attn case of our own, of sizes that no recorded one has."""
    names = {"q": [3, 2, 5, 16], "kv": [3, 9, 16], "idx": [3, 2, 7], "sink": [5], "out": [3, 2, 5, 16]}
    dtypes = {"idx": "int32", "sink": "float32"}
    tensors = {key: {"shape": shape, "dtype": dtypes.get(key, "bfloat16")} for key, shape in names.items()}
    whole = {"name": "mine", "file": "mine.safetensors", "config": {"scale": 0.25}, "tolerance": {"atol": 4e-3}}
    return whole | {"tensors": tensors} | changes


def write(path: Path, *entries: Any, tensors: dict[str, Tensor] | None = None) -> Folder:
    generator = torch.Generator().manual_seed(1)
    q, kv = (torch.randn(shape, generator=generator).bfloat16() for shape in ([3, 2, 5, 16], [3, 9, 16]))
    listed = torch.randint(-1, 9, (3, 2, 7), generator=generator, dtype=torch.int32)
    sink = torch.randn(5, generator=generator)
    out = torch.stack(
        [
            ops_named("reference").sparse_attention(q[b], kv[b], listed[b].long(), None, None, sink, 0.25)
            for b in range(3)
        ]
    )
    whole = {"q": q, "kv": kv, "idx": listed, "sink": sink, "out": out} | (tensors or {})
    save_file({f"mine/{key}": value for key, value in whole.items()}, path / "mine.safetensors")
    (path / "index.json").write_text(json.dumps({"groups": {"sparse_attn": list(entries)}}))
    return Folder(path)


def test_a_folder_of_another_make(tmp_path: Path) -> None:
    assert results(write(tmp_path, entry()))["mine"].status == "PASS"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"file": "../mine.safetensors"}, "file"),
        ({"file": 3}, "file"),
        ({"file": ".."}, ".."),
        ({"file": "a\0b"}, ""),
        ({"tensors": []}, "objects"),
        ({"config": {}}, "scale"),
        ({"config": {"scale": True}}, "scale"),
        ({"config": {"scale": float("nan")}}, "scale"),
        ({"config": {"scale": "0.25"}}, "scale"),
        ({"tensors": entry()["tensors"] | {"out": {"shape": [3, 2, 80], "dtype": "bfloat16"}}}, "shape"),
        ({"tensors": entry()["tensors"] | {"out": {"shape": [3, 2, 5, 16], "dtype": "float32"}}}, "index"),
        ({"tensors": entry()["tensors"] | {"out": {"shape": [3, 2, 5, 16], "dtype": "bf17"}}}, "dtype"),
        ({"tensors": entry()["tensors"] | {"out": 5}}, "dtype"),
        ({"tensors": {key: spec for key, spec in entry()["tensors"].items() if key != "out"}}, "out"),
        (
            {"tensors": entry()["tensors"]
             | {"out": {"shape": [3, 2, 5, 16], "dtype": "float32", "stored_as": "bfloat16"}}}, "stored",
        ),
    ],
)  # fmt: skip
def test_an_entry_that_lies_fails_alone(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    folder = write(tmp_path, entry(**changes), {"name": 7}, "nothing", entry(name="other", tensors={}))
    first, second, third, fourth = run_cases(select(folder), ops_named("cpu"))
    assert first.status == "FAIL" and word in first.text, first
    assert [second.status, third.status, fourth.status] == ["FAIL", "FAIL", "SKIP"]


@pytest.mark.parametrize("row", [9, 1000, -2])
def test_rows_outside_the_table_fail(tmp_path: Path, row: int) -> None:
    listed = torch.full((3, 2, 7), row, dtype=torch.int32)
    assert results(write(tmp_path, entry(), tensors={"idx": listed}))["mine"].status == "FAIL"


def test_a_bool_that_is_none_fails(remade: Callable[..., Folder]) -> None:
    name = "candidates_decode_one"

    def change(case: str, key: str, value: Tensor) -> Tensor:
        return (value.to(torch.uint8) * 2).view(torch.bool) if key == "mask" else value

    assert "bool" in results(remade("indexer", [name], change))[name].text


def test_unknown_groups_and_kinds_are_skipped_with_a_reason(tmp_path: Path) -> None:
    groups = ["rope", "quant", "sparse_attn", "compressor", "indexer", "window", "stack", "block", "model", "real"]
    index = {group: [{"name": "strange", "file": "", "tensors": {"x0": {}}}] for group in (*groups, "tower")}
    (tmp_path / "index.json").write_text(json.dumps({"groups": index}))
    for result in run_cases(select(Folder(tmp_path)), ops_named("cpu")):
        assert result.status == "SKIP" and result.text, result


# Folders of the same format with other names and sizes


def test_cases_of_other_names(remade: Callable[..., Folder]) -> None:
    def rename(entry: dict[str, Any]) -> None:
        entry["was"], entry["name"] = entry["name"], entry["name"].replace("fp8", "night")

    found = results(remade("stack", ["fp8_as_written", "fp8_own_keys"], edit=rename))
    assert {name: result.status for name, result in found.items()} == {
        "night_as_written": "PASS", "night_own_keys": "PASS",
    }  # fmt: skip


@pytest.mark.parametrize("group", ["rope", "compressor", "indexer", "stack", "block"])
def test_a_smaller_batch(remade: Callable[..., Folder], group: str) -> None:
    """The first sequence alone."""
    flat = ("w.", "lens", "cos", "sin", "positions", "primes", "offsets", "multipliers", "token_map", "fn", "base")
    kept = ("scale", "decode_produced", "weight", "bias", "indices", "routing")

    def change(case: str, key: str, value: Tensor) -> Tensor:
        alone = key.startswith(flat + kept) or case.startswith(("gate", "expert"))
        return value if alone else value[:1]

    names = ["bf16_as_written", "bf16_own_keys"] if group == "stack" else []
    for name, result in results(remade(group, names, change)).items():
        assert result.status == "PASS", (name, result.text)


# Tolerances


@pytest.mark.parametrize(
    "tolerance", [None, {}, {"nearness": 3}, {"atol": "much"}, {"atol": -1}, {"atol": float("inf")}, 7]
)
def test_without_a_tolerance_that_makes_sense_the_strict_one_holds(
    remade: Callable[..., Folder], tolerance: object
) -> None:
    def nudge(case: str, key: str, value: Tensor) -> Tensor:
        return value * (1 + 1e-3) if key == "comb" else value

    def edit(entry: dict[str, Any]) -> None:
        entry["tolerance"] = tolerance

    found = results(remade("block", ["hc_split_sinkhorn_20"], nudge, edit))
    assert found["hc_split_sinkhorn_20"].status == "FAIL"


def test_a_tolerance_of_the_case_is_used(remade: Callable[..., Folder]) -> None:
    def nudge(case: str, key: str, value: Tensor) -> Tensor:
        return value * (1 + 1e-3) if key == "comb" else value

    for atol, status in ((1e-2, "PASS"), (1e-5, "FAIL")):

        def edit(entry: dict[str, Any], atol: float = atol) -> None:
            entry["tolerance"] = {"atol": atol}

        assert results(remade("block", ["hc_split_sinkhorn_20"], nudge, edit))["hc_split_sinkhorn_20"].status == status
