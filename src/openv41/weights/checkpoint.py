"""A model folder, checked before any weight is read.

Nothing here is lenient: a tensor that the configuration does not explain is as much an error as one that is missing,
because both mean that the numbers would not be those of the model.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from openv41.config import Config
from openv41.errors import CheckpointError
from openv41.weights.names import Spec, published_tensors
from openv41.weights.shards import Shard, parse_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHOWN = 10
"""Names that an error lists of each kind before it only counts."""


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose files agree with each other and with its configuration.

    `specs` lists the tensors in the order of the release; nothing but headers has been read.
    """

    folder: Path
    config: Config
    specs: Mapping[str, Spec]
    shards: Mapping[str, Shard]  # by tensor name

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """Reads `config.json`, the index and every header, and compares them.

        Without an index, the weights are a single `model.safetensors`. Raises `CheckpointError` with the names of the
        tensors that are missing, surplus, of another shape or of another type, and for any file that is not whole;
        `ConfigError` for a configuration that no model can be built from.
        """
        folder = Path(folder)
        _check_folder(folder)
        config = Config.from_json(folder / "config.json")
        shards = _open_shards(folder)
        specs = published_tensors(config)
        _compare(folder, specs, {name: shard.entries[name].spec for name, shard in shards.items()})
        return cls(folder, config, specs, shards)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(spec.nbytes for spec in self.specs.values())

    def tensor(self, name: str, copy: bool = False) -> Tensor:
        """The tensor published as `name`, in its stored type: fp4 codes are int8 bytes.

        By default it stays in its file, and each page is read when it is touched: an Engram table of 94 GiB costs
        nothing until rows are looked up. Such a tensor must not be written to (the process would end). With `copy` it
        is read at once into memory of its own, which is far faster for a tensor that is needed whole.
        """
        if name not in self.shards:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}")
        shard = self.shards[name]
        return shard.read(name) if copy else shard.map(name)


# The folder


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"no model folder at {folder}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no model folder: it has no config.json")
    if not (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        raise CheckpointError(f"{folder} has no weights: expected {INDEX}, or {SINGLE} alone")


def _open_shards(folder: Path) -> dict[str, Shard]:
    """The shard of every tensor, after checking that index and headers name the same tensors."""
    if not (folder / INDEX).is_file():
        shard = Shard(folder / SINGLE)
        return dict.fromkeys(shard.entries, shard)
    files, total_size = _read_index(folder / INDEX)
    shards = {file: Shard(folder / file) for file in dict.fromkeys(files.values())}
    held = Counter(name for shard in shards.values() for name in shard.entries)
    refuse(
        f"{folder}: {INDEX} and the files disagree",
        {
            "in the index but not in the file it names": [n for n, f in files.items() if n not in shards[f].entries],
            "in a file but not in the index": [n for n in held if n not in files],
            "in two files": [n for n, count in held.items() if count > 1],
        },
    )
    size = sum(entry.spec.nbytes for shard in shards.values() for entry in shard.entries.values())
    if total_size not in (None, size):
        raise CheckpointError(f"{folder / INDEX} says total_size {total_size}, the files hold {size} bytes of tensors")
    return {name: shards[file] for name, file in files.items()}


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """The file of each tensor, and the promised bytes in all."""
    try:
        index = parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path} must have a weight_map from tensor names to files")
    for name, file in files.items():
        if not _is_plain(file):
            raise CheckpointError(f"{path} puts {name} into {file!r}; a shard is a plain *.safetensors name, no path")
    metadata = index.get("metadata")
    return files, metadata.get("total_size") if isinstance(metadata, dict) else None


def _is_plain(file: object) -> bool:
    """Whether this names a file directly in the folder, on any system."""
    return isinstance(file, str) and file.endswith(".safetensors") and not set(file) & set("/\\:\0")


def _compare(folder: Path, expected: Mapping[str, Spec], found: Mapping[str, Spec]) -> None:
    """Raises with every difference between what the configuration asks for and what the files hold."""
    both = [name for name in expected if name in found]
    surplus = [name for name in found if name not in expected]
    scales = [name for name in surplus if name.endswith(("scale", "scale_inv"))]
    refuse(
        f"{folder} does not fit its config.json",
        {
            "missing": [name for name in expected if name not in found],
            "surplus": [name for name in surplus if name not in scales],
            "scales that no weight uses": scales,
            "of another shape": [
                f"{name} {_shape(found[name])} instead of {_shape(expected[name])}{_tile_hint(name, expected, found)}"
                for name in both
                if found[name].shape != expected[name].shape
            ],
            "of another type": [
                f"{name} {found[name].dtype} instead of {expected[name].dtype}"
                for name in both
                if found[name].dtype != expected[name].dtype
            ],
        },
    )


def _tile_hint(name: str, expected: Mapping[str, Spec], found: Mapping[str, Spec]) -> str:
    weight = expected.get(name.removesuffix("scale") + "weight")
    if not name.endswith(".scale") or weight is None:
        return ""
    blocks = tuple(-(-side // 128) for side in weight.shape)
    return " (scales of 128 x 128 blocks; this model has one a 32 x 32 tile)" if found[name].shape == blocks else ""


def refuse(what: str, faults: Mapping[str, Sequence[str]]) -> None:
    """Raises `CheckpointError` if there is any fault, with a line for each kind."""
    lines = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in faults.items() if names]
    if lines:
        raise CheckpointError("\n  ".join([f"{what}:", *lines]))


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f", and {rest} more" if rest > 0 else "")


def _shape(spec: Spec) -> str:
    return str(list(spec.shape))
