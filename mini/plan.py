"""How many steps fit into so many minutes: measured, and written to the settings.

    python mini/plan.py SETTINGS.toml --minutes M [--probe N] [--write]

A few steps of the run are done in a folder that is thrown away, in every phase that the settings have: without the
draft, with it, in published numerics. With the seconds that a step takes in each, the number of steps follows that
takes M minutes, validations and checkpoints included. `--write` puts it in the place of `steps` in the file: before the
run, or while it is at its highest rate (docs/training.md). Minutes are those that are still left: steps that the run
has done count as done.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from openv41.errors import InputError, OpenV41Error
from openv41.train import checkpoints
from openv41.train.loop import Training
from openv41.train.schedule import Phase, begin_of, phase_at
from openv41.train.settings import Settings
from openv41.train.setup import arithmetic

Kind = tuple[str, bool]
"""A phase as far as it costs time: its numerics, and whether the draft learns."""
MANY = 1_000_000
"""More steps than any run here has."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a step in each phase, of a validation, of a checkpoint; and tokens of a step."""

    steps: dict[Kind, float]
    validation: float
    checkpoint: float
    tokens: int


def kind_of(phase: Phase) -> Kind:
    return phase.numerics, phase.draft > 0


def kinds_of(settings: Settings) -> list[Kind]:
    """The phases that a run goes through, in order."""
    shares = sorted({0.0, settings.model.published_from, settings.loss.draft_from} - {1.0})
    many = replace(settings, steps=MANY)
    return list(dict.fromkeys(kind_of(phase_at(many, begin_of(share, MANY))) for share in shares))


def measure(settings: Settings, count: int) -> Cost:
    """The seconds that steps take: of each phase the median of `count`, after as many to warm up."""
    with tempfile.TemporaryDirectory() as folder, arithmetic(settings):
        training = Training(replace(settings, folder=folder, steps=MANY))
        found = {}
        for kind in kinds_of(settings):
            seconds = [timed(training, kind) for _ in range(2 * count)]
            found[kind] = statistics.median(seconds[count:])
        validation = float(training.validate()["seconds"])
        began = time.monotonic()
        training.save()
        return Cost(found, validation, time.monotonic() - began, settings.data.tokens * settings.data.packs)


def timed(training: Training, kind: Kind) -> float:
    """The seconds of one step in a phase of this kind."""
    numerics, drafts = kind
    s = training.settings
    shares = {"published_from": 0.0 if numerics == "published" and s.model.numerics == "plain" else 1.0}
    training.settings = replace(
        s, model=replace(s.model, **shares), loss=replace(s.loss, draft_from=0.0 if drafts else 1.0)
    )
    line = training.advance()
    training.settings = s
    if (line["numerics"], "draft" in line) != kind:
        raise InputError(f"a step of {kind} was to be measured, and {line} was")
    return float(line["seconds"])


def seconds_of(settings: Settings, cost: Cost, steps: int, done: int = 0) -> float:
    """What the rest of a run of `steps` steps takes."""
    run, record = replace(settings, steps=steps), settings.record
    total = sum(cost.steps[kind_of(phase_at(run, step))] for step in range(done, steps))
    validations = 1 + (steps - done) // record.validate_every if record.validate_every else 1
    return total + cost.validation * validations + cost.checkpoint * (1 + (steps - done) // record.checkpoint_every)


def fitting(seconds: Callable[[int], float], budget: float, least: int) -> int:
    """The most steps, `least` or more, whose time is within the budget."""
    low, high = least, least + 1
    while seconds(high) <= budget and high < MANY:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= budget else (low, middle)
    return low


def with_steps(path: Path, steps: int) -> str:
    """The file's text with the number in the place of its own, which must be there."""
    text, count = re.subn(r"(?m)^steps = \d+", f"steps = {steps}", path.read_text(encoding="utf-8"))
    if count != 1:
        raise InputError(f"{path} must have one line 'steps = N', got {count}; write one")
    return text


def write_steps(path: Path, steps: int) -> None:
    """Set it in the file."""
    path.write_text(with_steps(path, steps), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("settings", type=Path, metavar="SETTINGS.toml")
    parser.add_argument("--minutes", type=float, required=True, metavar="M", help="that the rest of the run may take")
    parser.add_argument("--probe", type=int, default=5, metavar="N", help="steps to measure in each phase (default: 5)")
    parser.add_argument("--write", action="store_true", help="set `steps` in the file")
    args = parser.parse_args(argv)
    try:
        settings = Settings.from_toml(args.settings)
        if args.write:
            with_steps(args.settings, settings.steps)  # a complaint comes before anything slow
        cost = measure(settings, max(1, args.probe))
    except OpenV41Error as error:
        print(f"plan: error: {error}", file=sys.stderr)
        return 2
    done = max(checkpoints.saved_steps(Path(settings.folder)), default=0)
    least = max(1, done, settings.optimizer.warmup)
    steps = fitting(lambda count: seconds_of(settings, cost, count, done), 60 * args.minutes, least)
    rates = {f"{n}{', draft' if d else ''}": round(cost.tokens / seconds, 1) for (n, d), seconds in cost.steps.items()}
    report = {
        "steps": steps, "done": done, "tokens": steps * cost.tokens, "tokens_per_second": rates,
        "validation_seconds": round(cost.validation, 2), "checkpoint_seconds": round(cost.checkpoint, 2),
        "minutes": round(seconds_of(settings, cost, steps, done) / 60, 2),
    }  # fmt: skip
    print(json.dumps(report, indent=2))
    if args.write:
        write_steps(args.settings, steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
