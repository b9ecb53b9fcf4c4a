"""`openv41 train`: train a model from a TOML file of settings, or go on with a run.

Of several processes that `torchrun` started, the first one speaks for all.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openv41.commands.output import note
from openv41.errors import InputError, OpenV41Error, TrainingStopped

if TYPE_CHECKING:
    from openv41.train.loop import Training
    from openv41.train.parallel import Processes
    from openv41.train.settings import Settings

WENT_WRONG, BAD_INPUT = 1, 2
BAR = 24
"""Columns of the progress bar."""


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
    from openv41.train.parallel import launched, number_of_process

    try:
        settings = _settings(args)
        import torch

        # Small models have small products, which threads mostly wait in; and sums depend on their number.
        torch.set_num_threads(args.threads)
        processes = launched(settings.device)
        training = _opened(settings, processes)
    except (OpenV41Error, OSError):  # in all processes alike
        if number_of_process():
            return BAD_INPUT
        raise
    code = _train(training, args.minutes)
    del training  # it holds what `close` is to end
    processes.close()
    return code


def _settings(args: argparse.Namespace) -> "Settings":
    if args.minutes is not None and not args.minutes > 0:
        raise InputError(f"minutes must be above 0, got {args.minutes}; leave it out to train to the last step")
    if args.threads < 1:
        raise InputError(f"threads must be 1 or more, got {args.threads}; leave it out for 1")
    from openv41.train.settings import Settings

    return Settings.from_toml(args.settings)


def _opened(settings: "Settings", processes: "Processes") -> "Training":
    from openv41.train.loop import Training

    try:
        return processes.together(partial(Training, settings, processes))
    except (OpenV41Error, OSError):
        processes.close()
        raise


def _train(training: "Training", minutes: float | None) -> int:
    from openv41.train.loop import METRICS, read_metrics
    from openv41.train.setup import arithmetic

    settings = training.settings
    say, folder = note if training.writes else _nothing, Path(settings.folder)
    if training.step:
        say(f"resuming {settings.folder} after step {training.step}")
    elif (folder / METRICS).is_file():
        say(f"{settings.folder} has no checkpoint: beginning again")
    shown = _progress(settings.steps, training.step) if training.writes else nullcontext(None)
    try:
        with arithmetic(settings), shown as report:
            done = training.run(report, math.inf if minutes is None else 60 * minutes)
    except TrainingStopped as stopped:
        if training.writes:
            print(f"openv41: error: {stopped}", file=sys.stderr)
        return WENT_WRONG
    if training.writes:
        _draw(folder, read_metrics(folder / METRICS))
        print(training.saved)
    if not done:
        say(f"ended after step {training.step} of {settings.steps}: run the same command to go on")
    return 0


def _nothing(text: str) -> None:
    """Where another process says it."""


def _draw(folder: Path, lines: list[dict[str, Any]]) -> None:
    from openv41.train.plot import draw_curve

    try:
        paths = draw_curve(lines, folder)
    except InputError as error:
        note(f"no loss curve: {error}")
    else:
        note(f"loss curve in {paths[0]} and {paths[1].name}")


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
    # On a terminal of 80 columns all of it has a place.
    columns = BarColumn(BAR), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=steps, completed=done)

        def show(line: dict[str, Any]) -> None:
            if "validation" in line:
                bar.console.print(_summary(line))
            else:
                said = f"loss {line['loss']:.4f}, {line['tokens_per_second']:.0f} tokens/s"
                bar.update(task, completed=line["step"], description=said)

        yield show


def _summary(line: dict[str, Any]) -> str:
    if "validation" in line:
        return f"step {line['step']}: validation {line['validation']:.4f}, {line['bits_per_byte']:.4f} bits per byte"
    load = max(line["load"].values(), default=1.0)
    return (
        f"step {line['step']}: loss {line['loss']:.4f}, norm {line['norm']:.2f}, rate {line['rate']:.2e}, "
        f"largest load {load:.2f} x mean, {line['tokens_per_second']:.0f} tokens/s"
    )
