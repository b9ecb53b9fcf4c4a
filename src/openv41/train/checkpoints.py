"""Checkpoints of a run: a model folder in the released form, with all that a resumed run needs beside the weights.

    FOLDER/checkpoints/step-000300/   config.json, tokenizer.json, weights: any command takes it as --model
                                      training.pt: float weights, optimizers, loads' biases, place in the data, settings

A checkpoint appears whole or not at all, whenever the process ends; the ones before it go only then.
"""

import io
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from openv41.config import Config, SpecialIds
from openv41.errors import CheckpointError, ConfigError
from openv41.weights.write import Source, write_checkpoint

STATE = "training.pt"
_NAME = re.compile(r"step-(\d{6,})")


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return run / "checkpoints" / f"step-{step:06d}"


def saved_steps(run: Path) -> list[int]:
    """The steps after which there is a checkpoint, ascending."""
    found = [_NAME.fullmatch(path.name) for path in (run / "checkpoints").glob("step-*") if (path / STATE).is_file()]
    return sorted(int(match[1]) for match in found if match)


def save(
    run: Path,
    step: int,
    config: Config,
    special: SpecialIds,
    tensors: Source,
    files: Mapping[str, bytes],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint after `step` steps, then remove all but the latest `keep`."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    folder = folder_of(run, step)
    write_checkpoint(folder, config, special, tensors, {**files, STATE: buffer.getvalue()}, overwrite=True)
    for old in saved_steps(run)[:-keep]:
        # Renamed first: a folder that is only half removed is no checkpoint any more.
        gone = folder_of(run, old).rename(run / "checkpoints" / f".step-{old:06d}.removed")
        shutil.rmtree(gone)
    return folder


def load(run: Path, step: int) -> dict[str, Any]:
    """What `save` was given as `state`, on the CPU. Raises `CheckpointError` for a file that is none."""
    path = folder_of(run, step) / STATE
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read: {reason}; remove its folder to go on from the one before"
        ) from None
    return state


def prepare(run: Path) -> None:
    """Make the run's folder where there is none, and remove what a process that was killed left half written in it."""
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder must be one that can be made, got {run} ({error.strerror}); give another") from None
    for ending in ("partial", "removed"):
        for path in (run / "checkpoints").glob(f".step-*.{ending}"):
            shutil.rmtree(path, ignore_errors=True)
