"""One slot in one safetensors file: what `Cache.save` writes and `Cache.restore` reads.

Tensors by kind and layer, by position: `window.L`, `group.L`, `tail` and `draft.L` are rings' latest rows, oldest
first; `latents.L` and `keys.L` all compressed positions. The header names the format's version, the length, the kind
of storage, whether the draft's rings are there, a fingerprint of the configuration and a digest of the tensors, so that
no foreign or damaged file is taken.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from openv41.config import Config
from openv41.errors import CacheError

if TYPE_CHECKING:
    from openv41.state.cache import Cache

VERSION = "1"


def fingerprint(config: Config) -> str:
    """Digest of every key of the configuration."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def write_slot(cache: "Cache", slot: int, path: str | os.PathLike[str]) -> None:
    tensors = _tensors(cache, slot)
    header = {**_header(cache), "length": str(cache.length(slot)), "digest": _digest(tensors)}
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        try:
            safetensors.torch.save_file(tensors, name, header)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise CacheError(f"cannot write the slot to {target}: {error.strerror or error}") from error


def read_slot(cache: "Cache", path: str | os.PathLike[str]) -> int:
    length, tensors = _read(cache, Path(path))
    slot = cache.open()
    try:
        for old, new in cache.pages.reserve([(slot, 0, length)]):
            raise AssertionError(f"a fresh slot shares no pages, yet {old} -> {new}")
        for layer, source in cache.sources.items():
            source.latents.put(slot, tensors[f"latents.{layer}"])
            source.keys.put(slot, tensors[f"keys.{layer}"])
        spare = cache.slack
        for name, ring in cache.rings().items():
            rows = tensors[name][-ring.size :]
            ring.put(slot, length, rows)
            # Fewer rows than the ring holds: it is then as after tokens that were taken back already.
            spare = min(spare, cache.slack - (min(length, ring.size) - rows.shape[0]))
    except BaseException:
        cache.close(slot)
        raise
    cache.lengths[slot], cache.highest[slot] = length, length + cache.slack - max(0, spare)
    return slot


def _tensors(cache: "Cache", slot: int) -> dict[str, Tensor]:
    length = cache.length(slot)
    rewindable = cache.highest[slot] - length  # rows that rejected tokens have overwritten
    kept = {}
    for name, ring in cache.rings().items():
        count = min(length, ring.size - min(rewindable, cache.slack))
        kept[name] = ring.rows_of(slot, range(length - count, length)).contiguous()
    for layer, source in cache.sources.items():
        count = length // source.latents.ratio
        kept[f"latents.{layer}"] = source.latents.first(slot, count).contiguous()
        kept[f"keys.{layer}"] = source.keys.first(slot, count).contiguous()
    return kept


def _header(cache: "Cache") -> dict[str, str]:
    kind = {"store": cache.store, "dtype": str(cache.dtype).removeprefix("torch.")}
    kind["draft"] = "yes" if cache.drafts else "no"
    return {"openv41_slot": VERSION, "config": fingerprint(cache.config), **kind}


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read(cache: "Cache", path: Path) -> tuple[int, dict[str, Tensor]]:
    """Length and tensors of a file, everything checked against the cache that is to take it."""
    try:
        with safetensors.safe_open(path, "pt", device="cpu") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, safetensors.SafetensorError) as error:
        raise CacheError(f"cannot read a slot from {path}: {error}") from error
    for key, expected in _header(cache).items():
        if header.get(key) != expected:
            raise CacheError(
                f"{path} holds no slot for this cache: its {key} is {header.get(key)!r}, here it is {expected!r}: "
                "restore it into a cache of the same configuration and storage"
            )
    if header.get("digest") != _digest(tensors):
        raise CacheError(f"{path} is damaged: its tensors do not have the digest that its header names; save it again")
    return int(header["length"]), {name: tensor.to(cache.device) for name, tensor in tensors.items()}
