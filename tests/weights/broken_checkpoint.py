"""A checkpoint to break, and a module of nothing but parameters to load it into."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from openv41.config import Config
from openv41.weights.names import Spec, place, published_tensors
from openv41.weights.shards import TORCH_DTYPES, build_header

INDEX = "model.safetensors.index.json"


class Broken:
    """A copy of the checkpoint, with ways to change it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def weight_map(self) -> dict[str, str]:
        return json.loads((self.folder / INDEX).read_text())["weight_map"]

    def file(self, name: str) -> Path:
        """The shard that holds the tensor."""
        return self.folder / self.weight_map[name]

    def change_json(self, file: str, change: Callable[[dict], object]) -> None:
        path = self.folder / file
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    def change_header(self, path: Path, change: Callable[[dict], object]) -> None:
        """Changes a shard's header and nothing else."""
        header, payload = read_shard(path)
        change(header)
        write_shard(path, json.dumps(header).encode(), payload)

    def change_tensors(self, path: Path, change: Callable[[dict[str, Spec]], object]) -> None:
        """Lets a shard hold other tensors, all zero, and the index agree with it."""
        header, _ = read_shard(path)
        specs = {name: Spec(tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()}
        before = dict(specs)
        change(specs)
        path.write_bytes(build_header(specs) + bytes(sum(spec.nbytes for spec in specs.values())))

        def follow(index: dict) -> None:
            kept = {name: file for name, file in index["weight_map"].items() if name not in before}
            index["weight_map"] = kept | dict.fromkeys(specs, path.name)
            index["metadata"] = {}

        self.change_json(INDEX, follow)


def read_shard(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_shard(path: Path, header: bytes, payload: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)


def cut(path: Path, change: int) -> None:
    """Makes a file longer or shorter by so many bytes."""
    os.truncate(path, path.stat().st_size + change)


def module_of(
    config: Config,
    change: Callable[[str, torch.dtype], torch.dtype] = lambda path, stored: stored,
    device: str = "meta",
    skip: Iterable[str] = (),
) -> nn.Module:
    """A module tree with a parameter for every place of the table. `change` may give it another type."""
    root = nn.Module()
    shapes: dict[str, tuple[tuple[int, ...], str, int]] = {}
    for name, spec in published_tensors(config).items():
        where = place(name)
        shapes[where.parameter] = (spec.shape, spec.dtype, 0 if where.index is None else where.index + 1)
    for path, (shape, dtype, rows) in shapes.items():
        if path in skip:
            continue
        *parents, attribute = path.split(".")
        part = root
        for parent in parents:
            if parent not in dict(part.named_children()):
                part.add_module(parent, nn.Module())
            part = part.get_submodule(parent)
        stored = torch.uint8 if dtype == "I8" else TORCH_DTYPES[dtype]
        data = torch.empty((rows, *shape) if rows else shape, dtype=change(path, stored), device=device)
        part.register_parameter(attribute, nn.Parameter(data, requires_grad=data.is_floating_point()))
    return root
