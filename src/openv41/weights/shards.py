"""One safetensors file: its header, checked down to the last byte, and the tensors behind it.

The file is eight bytes of header length (little endian), a JSON header, and the tensors' bytes without gaps:
https://github.com/huggingface/safetensors#format. Tensors are read one at a time or mapped without being read, which
the library of that name does not offer for the types and sizes here.
"""

import json
import mmap
import os
import warnings
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openv41.errors import CheckpointError
from openv41.weights.names import BYTES, Spec

MAX_HEADER = 100_000_000
"""Longest header that the format allows, in bytes. The largest released one has about 250 thousand."""

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}


class Entry(NamedTuple):
    """A tensor in a file: what it is, and its first byte counted from the start of the file."""

    spec: Spec
    start: int


class Shard:
    """A safetensors file whose header has been read and found whole. Its tensors are read when asked for.

    Raises `CheckpointError` naming the file and the fault: truncated or too long, a header that is no header, a tensor
    of a type that no checkpoint of ours has, a tensor whose size is not shape times type, overlaps and gaps.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = _read_entries(path)
        self._map: mmap.mmap | None = None

    def read(self, name: str) -> Tensor:
        """The tensor in memory of its own."""
        spec, start = self.entries[name]
        data = torch.empty(spec.nbytes, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(start)
            read = file.readinto(data.numpy().data) if spec.nbytes else 0
        if read != spec.nbytes:
            raise CheckpointError(f"{self.path} changed since it was opened: {name} ends after {read} bytes")
        return data.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)

    def map(self, name: str) -> Tensor:
        """The tensor where it lies: the system reads the pages that are touched, one by one. Never write to it."""
        spec, start = self.entries[name]
        dtype = TORCH_DTYPES[spec.dtype]
        # Other writers may place a tensor off its type's alignment, where it cannot be used in place.
        if not spec.nbytes or start % dtype.itemsize:
            return self.read(name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            data = torch.frombuffer(self._mapped(), dtype=torch.uint8, count=spec.nbytes, offset=start)
        return data.view(dtype).view(spec.shape)

    def _mapped(self) -> mmap.mmap:
        # Read only: a private writable mapping counts as memory in use, and a table is larger than most machines.
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            # Reading ahead fetches megabytes around each row of a table: 1,400 times the bytes, measured on an SSD.
            if hasattr(mmap, "MADV_RANDOM"):
                self._map.madvise(mmap.MADV_RANDOM)
        return self._map


def build_header(specs: Mapping[str, Spec]) -> bytes:
    """The first bytes of a file that holds these tensors in this order, up to the first tensor."""
    entries: dict[str, Any] = {}
    start = 0
    for name, spec in specs.items():
        entries[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [start, start + spec.nbytes]}
        start += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the first tensor is aligned for every type
    return len(text).to_bytes(8, "little") + text


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object whose keys are all different; `where` names it in the error."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8, bad JSON and repeated keys
        raise CheckpointError(f"{where} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must be a JSON object, got a {type(value).__name__}")
    return value


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} appears twice")
        result[key] = value
    return result


def _read_entries(path: Path) -> dict[str, Entry]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise CheckpointError(
                    f"{path} is no whole safetensors file: its header says {length} bytes, "
                    f"the file has {max(size - 8, 0)} after that and a header has at most {MAX_HEADER}"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    header = parse_json(text, f"the header of {path}")
    header.pop("__metadata__", None)
    spans = {name: _parse_entry(path, name, entry) for name, entry in header.items()}
    _check_spans(path, spans, size - 8 - length)
    return {name: Entry(spec, 8 + length + start) for name, (spec, start) in spans.items()}


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[Spec, int]:
    """The tensor and the offset of its first byte among the tensors."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]} if len(entry) == 3:
            if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
                raise CheckpointError(f"{path}: {name} has a shape or offsets that are no counts: {entry!s:.200}")
        case _:
            raise CheckpointError(f"{path}: {name} must have a dtype, a shape and two data_offsets, got {entry!s:.200}")
    if dtype not in BYTES:
        raise CheckpointError(f"{path}: {name} has the type {dtype}; a checkpoint holds {', '.join(BYTES)}")
    spec = Spec(tuple(shape), dtype)
    if end - start != spec.nbytes:
        raise CheckpointError(
            f"{path}: {name} is {dtype} {list(shape)}, which is {prod(shape) * BYTES[dtype]} bytes, "
            f"but its offsets span {end - start}"
        )
    return spec, start


def _check_spans(path: Path, spans: Mapping[str, tuple[Spec, int]], size: int) -> None:
    """The tensors must lie one after the other and fill the rest of the file."""
    filled = 0
    for name, (spec, start) in sorted(spans.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
        if start != filled:
            fault = "overlaps the tensor before it" if start < filled else "leaves a gap before it"
            raise CheckpointError(f"{path}: {name} {fault}: it starts at byte {start}, expected {filled}")
        filled += spec.nbytes
    if filled != size:
        fault = "is truncated" if size < filled else "is longer than its tensors"
        raise CheckpointError(f"{path} {fault}: its tensors take {filled} bytes, the file has {size} for them")
