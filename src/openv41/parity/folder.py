"""A folder of golden cases: `index.json`, and the safetensors files that it names.

    {"groups": {group: [{"name", "file", "checks", "tolerance", "config", "notes",
                         "tensors": {key: {"shape", "dtype"[, "stored_as"]}}}, ...]}}

A case's tensor `key` lies in the case's file as "<case name>/<key>". Nothing here is trusted: a value is used after it
has been checked, and a complaint names the case's fault. A fault in one case leaves the others alone.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from openv41.errors import InputError, OpenV41Error

DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "float4_e2m1fn_x2": torch.uint8,  # two codes a byte; torch has the type but no operations on it
}


class FolderError(InputError):
    """The folder is none, or its index cannot be read."""


class BadCase(OpenV41Error):
    """A case whose entry, tensors or configuration cannot be used: it has failed."""


class Skip(OpenV41Error):
    """A case of a kind that is not run here; the message says why."""


@dataclass(frozen=True, eq=False)
class Case:
    """One entry of the index. `key in case` asks for a tensor, `case[key]` reads it."""

    folder: "Folder" = field(repr=False)
    group: str
    name: str
    file: str = ""
    tolerance: Mapping[str, Any] = field(default_factory=dict, repr=False)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: str = field(default="", repr=False)
    tensors: Mapping[str, Any] = field(default_factory=dict, repr=False)
    fault: str = ""  # what is wrong with the entry

    def __contains__(self, key: str) -> bool:
        return key in self.tensors

    def __getitem__(self, key: str) -> Tensor:
        """A tensor in its true dtype. Raises `BadCase`: not there, not as the index says, or the file is broken."""
        if key not in self.tensors:
            raise BadCase(f"{key}: the index lists no such tensor")
        spec = self.tensors[key]
        if not isinstance(spec, dict) or spec.get("dtype") not in DTYPES:
            raise BadCase(f"{key}: the index must give a shape and a known dtype, got {spec!r}")
        value = self.folder.read(self.file, f"{self.name}/{key}")
        dtype = DTYPES[spec["dtype"]]
        if list(value.shape) != spec.get("shape"):
            raise BadCase(f"{key}: shape {list(value.shape)} in the file, {spec.get('shape')} in the index")
        if value.dtype not in (dtype, DTYPES.get(str(spec.get("stored_as")))):
            raise BadCase(f"{key}: {value.dtype} in the file, {spec['dtype']} in the index")
        if value.dtype == torch.bool and value.numel() and int(value.view(torch.uint8).max()) > 1:
            raise BadCase(f"{key}: a bool is stored as 0 or 1")
        if value.dtype.itemsize != dtype.itemsize:
            raise BadCase(f"{key}: {spec['dtype']} cannot be stored as {value.dtype}")
        return value if value.dtype == dtype else value.view(dtype)

    def find(self, key: str) -> Tensor | None:
        return self[key] if key in self else None

    def matching(self, start: str) -> list[str]:
        """Keys that begin with `start`."""
        return [key for key in self.tensors if key.startswith(start)]

    # Values of the configuration

    def whole(self, key: str, least: int = 0, most: int = 1 << 20) -> int:
        value = self.settings.get(key)
        if type(value) is not int or not least <= value <= most:
            raise BadCase(f"config.{key} must be a whole number from {least} to {most}, got {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self.settings.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
            raise BadCase(f"config.{key} must be a finite number, got {value!r}")
        return float(value)

    @property
    def settings(self) -> dict[str, Any]:
        """The case's configuration; one that names the case with its weights has that one's, changed by its own."""
        weights = self.config.get("weights")
        if not isinstance(weights, str):
            return dict(self.config)
        lender = self.folder.find(self.group, weights)
        if lender is None or lender is self:
            raise BadCase(f"config.weights names {weights!r}, which is no case of {self.group}")
        return {**lender.config, **self.config}

    # Cases that share tensors

    def lender(self, key: str) -> "Case":
        """The case that holds `key` for this one: itself, or another case of the group. Raises `BadCase`.

        In turn: the case named by `config.weights`, those named in the notes, `as_written` for `own_keys`, and then the
        others that begin with the same word, those of the most similar name first.
        """
        for case in (self, *self.relatives()):
            if key in case:
                return case
        raise BadCase(f"{key}: neither this case nor a related one of {self.group} has it")

    def relatives(self) -> Iterator["Case"]:
        others = [case for case in self.folder.groups[self.group] if case is not self]
        named = [self.config.get("weights"), self.name.replace("own_keys", "as_written")]
        words = set(self.notes.replace("(", " ").replace(")", " ").replace(",", " ").replace('"', " ").split())
        yield from (case for case in others if case.name == named[0])
        yield from (case for case in others if case.name in words)
        yield from (case for case in others if case.name == named[1])
        kin = [case for case in others if case.name.split("_")[0] == self.name.split("_")[0]]
        yield from sorted(kin, key=lambda case: -len(commonprefix((case.name, self.name))))


class Folder:
    """The cases by group. Raises `FolderError` where there is no readable index."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FolderError(f"{self.path} is no folder: give one that holds an index.json")
        try:
            index = json.loads((self.path / "index.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise FolderError(f"{self.path / 'index.json'} cannot be read: {error}") from error
        groups = index.get("groups") if isinstance(index, dict) else None
        if not isinstance(groups, dict) or not all(isinstance(cases, list) for cases in groups.values()):
            raise FolderError(f"{self.path / 'index.json'} must hold groups, each a list of cases")
        if not any(groups.values()):
            raise FolderError(f"{self.path / 'index.json'} lists no case")
        self._open: dict[str, Any] = {}
        self.groups = {
            group: [self._case(group, number, entry) for number, entry in enumerate(entries)]
            for group, entries in groups.items()
        }

    def _case(self, group: str, number: int, entry: Any) -> Case:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name or not name.isprintable():
            return Case(self, group, f"{group}[{number}]", fault="the entry must be an object with a name")
        file, tensors, config = entry.get("file", ""), entry.get("tensors", {}), entry.get("config", {})
        fault = ""
        if not isinstance(file, str) or Path(file).name != file:
            fault = f"file must be the name of a file in the folder, got {file!r}"
        elif not isinstance(tensors, dict) or not isinstance(config, dict):
            fault = "tensors and config must be objects"
        if fault:
            return Case(self, group, name, fault=fault)
        tolerance, notes = entry.get("tolerance"), entry.get("notes", "")
        return Case(
            self, group, name, file,
            tolerance if isinstance(tolerance, dict) else {},
            config,
            notes if isinstance(notes, str) else json.dumps(notes),
            tensors,
        )  # fmt: skip

    def find(self, group: str, name: str) -> Case | None:
        return next((case for case in self.groups[group] if case.name == name and not case.fault), None)

    def read(self, file: str, name: str) -> Tensor:
        """A tensor of a file, which is opened once: its header is checked then, and that it is as long as it says."""
        try:
            if file not in self._open:
                self._open[file] = safe_open(str(self.path / file), framework="pt")
            return self._open[file].get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            raise BadCase(f"{file}: {' '.join(str(error).split())}") from error
