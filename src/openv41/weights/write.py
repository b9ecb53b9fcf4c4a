"""A model folder in the form of the release: shards, index, configuration, and the files that go with it.

The folder appears at once and whole, or not at all.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from openv41.config import Config, SpecialIds
from openv41.errors import CheckpointError
from openv41.weights.checkpoint import INDEX
from openv41.weights.names import BYTES, Spec, place, published_tensors, shard_of
from openv41.weights.shards import TORCH_DTYPES, build_header

Source = Callable[[str, Spec], Tensor]
"""Gives the tensor published under a name, in the shape and type of its `Spec`."""


def write_checkpoint(
    folder: str | Path,
    config: Config,
    special: SpecialIds,
    tensors: Source | Mapping[str, Tensor],
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint of `config` to `folder`, asking for one tensor at a time.

    `tensors` is a mapping by published name, or a function that is called once for each name in the order of the
    files. `files` are written beside them as they are, `tokenizer.json` for example. The configuration takes the nested
    published form; that form cannot say bf16, so a bf16 model gets the flat one, which does not hold `special`.

    An existing folder must be empty, or with `overwrite` a model folder, which is replaced as a whole. Raises
    `CheckpointError` otherwise, and for a tensor that is missing, surplus or not as its `Spec` says; nothing is left
    behind then.
    """
    folder = Path(folder)
    _check_target(folder, overwrite)
    specs = published_tensors(config)
    source = _from_mapping(tensors, specs) if isinstance(tensors, Mapping) else tensors
    values = config.to_hf(special) if config.dtype == "fp8" else config.to_dict()
    with _appearing(folder) as partial:
        _write(partial / "config.json", _json(values))
        for name, data in (files or {}).items():
            if not _is_free(name):
                raise CheckpointError(f"cannot write {name!r} beside the weights: give a plain name of its own")
            _write(partial / name, data)
        _write_shards(partial, config, specs, source)


def tensors_of(module: nn.Module) -> Source:
    """The parameters of `module` as a source of published tensors: what `load_into` did, backwards.

    Experts are unstacked, bytes get their published type back, and fp32 parameters that are published in bf16 are
    rounded. Raises `CheckpointError` where the module keeps a weight dequantised: it does not say how to quantise it.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))

    def tensor(name: str, spec: Spec) -> Tensor:
        where = place(name)
        if where.parameter not in parameters:
            raise CheckpointError(f"the module has no parameter {where.parameter}, which {name} is written from")
        value = parameters[where.parameter].detach()
        value = value if where.index is None else value[where.index]
        if (value.dtype, spec.dtype) == (torch.float32, "BF16"):
            return value.to(torch.bfloat16)
        return value.view(TORCH_DTYPES[spec.dtype]) if value.dtype == torch.uint8 else value

    return tensor


# Tensors


def _from_mapping(tensors: Mapping[str, Tensor], specs: Mapping[str, Spec]) -> Source:
    missing = [name for name in specs if name not in tensors]
    surplus = [name for name in tensors if name not in specs]
    if missing or surplus:
        raise CheckpointError(
            f"the tensors do not fit the configuration: {len(missing)} missing ({', '.join(missing[:10])}), "
            f"{len(surplus)} surplus ({', '.join(surplus[:10])})"
        )
    return lambda name, spec: tensors[name]


def _write_shards(folder: Path, config: Config, specs: Mapping[str, Spec], source: Source) -> None:
    files = shard_of(config)
    shards: dict[str, dict[str, Spec]] = {}
    for name, file in files.items():
        shards.setdefault(file, {})[name] = specs[name]
    for file, held in shards.items():
        _write_shard(folder / file, held, source)
    total = sum(spec.nbytes for spec in specs.values())
    _write(folder / INDEX, _json({"metadata": {"total_size": total}, "weight_map": files}))


def _write_shard(path: Path, specs: Mapping[str, Spec], source: Source) -> None:
    # Widest type first: then every tensor is aligned for its type, and can be used where it lies.
    ordered = dict(sorted(specs.items(), key=lambda item: -BYTES[item[1].dtype]))
    with _synced(path) as write:
        write(build_header(ordered))
        for name, spec in ordered.items():
            write(_bytes_of(name, spec, source(name, spec)))


def _bytes_of(name: str, spec: Spec, tensor: Tensor) -> memoryview:
    if tuple(tensor.shape) != spec.shape or tensor.dtype != TORCH_DTYPES[spec.dtype]:
        raise CheckpointError(
            f"{name} must be {TORCH_DTYPES[spec.dtype]} {list(spec.shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


# Files


def _check_target(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give a folder to write the model to")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(f"{folder} is not empty: choose another folder, or pass overwrite=True to replace it")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no model (no config.json), so it is not replaced: choose another folder")


def _is_free(name: str) -> bool:
    """Whether a file of this name may lie beside the weights."""
    taken = name in ("", "..", INDEX, "config.json") or name.endswith(".safetensors")
    return Path(name).name == name and not taken


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place on success and vanishes on failure."""
    folder = folder.absolute()
    token = secrets.token_hex(4)
    partial = folder.with_name(f".{folder.name}.{token}.partial")
    replaced = folder.with_name(f".{folder.name}.{token}.replaced")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    try:
        yield partial
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        raise
    if replaced.exists():
        shutil.rmtree(replaced)


@contextmanager
def _synced(path: Path) -> Iterator[Callable[[bytes | memoryview], object]]:
    """A new file's `write`; the bytes are on the disk when the block ends."""
    with path.open("xb") as file:
        yield file.write
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, data: bytes) -> None:
    with _synced(path) as write:
        write(data)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
