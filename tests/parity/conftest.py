"""Folders of golden cases made from the recorded one: some cases of it, with changes."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from golden_folder import GOLDEN
from safetensors.torch import save_file
from torch import Tensor

from openv41.parity import Folder


@pytest.fixture(scope="session")
def golden() -> Folder:
    return Folder(GOLDEN)


@pytest.fixture
def remade(tmp_path: Path) -> Callable[..., Folder]:
    """`remade(group, names, change)`: the named cases of a group in a folder of their own.

    `change(case, key, tensor)` gives the tensor to be stored, None to leave it out; `edit(entry)` changes an entry of
    the index.
    """
    source = Folder(GOLDEN)

    def make(
        group: str,
        names: Sequence[str] = (),
        change: Callable[[str, str, Tensor], Tensor | None] = lambda case, key, value: value,
        edit: Callable[[dict[str, Any]], None] = lambda entry: None,
    ) -> Folder:
        entries, tensors = [], {}
        index = json.loads((GOLDEN / "index.json").read_text())
        for entry in index["groups"][group]:
            if names and entry["name"] not in names:
                continue
            case = source.find(group, entry["name"])
            assert case is not None
            specs = {}
            for key, spec in entry["tensors"].items():
                stored = change(entry["name"], key, source.read(case.file, f"{entry['name']}/{key}").clone())
                if stored is not None:
                    tensors[f"{entry['name']}/{key}"] = stored.contiguous()
                    specs[key] = spec | {"shape": list(stored.shape)}
            entry["tensors"] = specs
            edit(entry)
            entries.append(entry)
        save_file({_renamed(key, entries): value for key, value in tensors.items()}, tmp_path / f"{group}.safetensors")
        (tmp_path / "index.json").write_text(json.dumps({"groups": {group: entries}}))
        return Folder(tmp_path)

    return make


def _renamed(key: str, entries: list[dict[str, Any]]) -> str:
    """Under the name that the entry has now; `edit` keeps the old one as `was`."""
    case, _, rest = key.partition("/")
    now = next((entry["name"] for entry in entries if entry.get("was") == case), case)
    return f"{now}/{rest}"
