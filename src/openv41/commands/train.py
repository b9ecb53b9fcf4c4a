"""`openv41 train`: train a model from a TOML file of settings, or go on with a run."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openv41.commands.output import note
from openv41.errors import InputError, TrainingStopped

WENT_WRONG = 1


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model from a file of settings",
        description="Train a model. The run's folder gets metrics.jsonl, checkpoints in the released form, and the "
        "loss curve as PNG and SVG. A folder that holds a run already is taken up at its last checkpoint. "
        "Exit code 1: the numbers went wrong, told with the step, the part and the last good checkpoint.",
    )
    parser.add_argument("settings", metavar="CONFIG.toml", help="the settings: see docs/training.md")
    parser.add_argument("--minutes", type=float, metavar="M", help="end after M minutes with a checkpoint")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")


def run(args: argparse.Namespace) -> int:
    if args.minutes is not None and not args.minutes > 0:
        raise InputError(f"minutes must be above 0, got {args.minutes}; leave it out to train to the last step")
    if args.threads < 1:
        raise InputError(f"threads must be 1 or more, got {args.threads}; leave it out for 1")
    from openv41.train.settings import Settings

    settings = Settings.from_toml(args.settings)
    import torch

    from openv41.train.loop import METRICS, Training, read_metrics

    # Small models have small products, which threads mostly wait in; and sums depend on their number.
    torch.set_num_threads(args.threads)
    training = Training(settings)
    if training.step:
        note(f"resuming {settings.folder} after step {training.step}")
    elif (Path(settings.folder) / METRICS).is_file():
        note(f"{settings.folder} has no checkpoint: beginning again")
    try:
        with _deterministic(settings.device), _progress(settings.steps, training.step) as report:
            done = training.run(report, math.inf if args.minutes is None else 60 * args.minutes)
    except TrainingStopped as stopped:
        print(f"openv41: error: {stopped}", file=sys.stderr)
        return WENT_WRONG
    folder = Path(settings.folder)
    _draw(folder, read_metrics(folder / METRICS))
    if not done:
        note(f"ended after step {training.step} of {settings.steps}: run the same command to go on")
    print(training.saved)
    return 0


def _draw(folder: Path, lines: list[dict[str, Any]]) -> None:
    from openv41.train.plot import draw_curve

    try:
        paths = draw_curve(lines, folder)
    except InputError as error:
        note(f"no loss curve: {error}")
    else:
        note(f"loss curve in {paths[0]} and {paths[1].name}")


@contextmanager
def _deterministic(device: str) -> Iterator[None]:
    """On a CPU, sums in a fixed order for as long as the run lasts."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # On a GPU some sums have no fixed order, and asking for one would be an error.
    torch.use_deterministic_algorithms(torch.device(device).type == "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def _progress(steps: int, done: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What shows each line of the metrics: a bar on a terminal that has `rich`, else a line now and then."""
    try:
        if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            raise ImportError
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        every = max(1, steps // 20)
        yield lambda line: note(_summary(line)) if "validation" in line or line["step"] % every == 0 else None
        return
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=steps, completed=done)

        def show(line: dict[str, Any]) -> None:
            if "validation" in line:
                bar.console.print(_summary(line))
            else:
                bar.update(task, completed=line["step"], description=_summary(line))

        yield show


def _summary(line: dict[str, Any]) -> str:
    if "validation" in line:
        return f"step {line['step']}: validation {line['validation']:.4f}, {line['bits_per_byte']:.4f} bits per byte"
    load = max(line["load"].values(), default=1.0)
    return (
        f"step {line['step']}: loss {line['loss']:.4f}, norm {line['norm']:.2f}, rate {line['rate']:.2e}, "
        f"largest load {load:.2f} x mean, {line['tokens_per_second']:.0f} tokens/s"
    )
