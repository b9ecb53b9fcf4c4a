"""What each part is worth: the same run without it, at equal steps.

    python mini/ablate.py run [NAME ...] [--steps N] [--minutes M]    train them, or those named; the same again goes on
    python mini/ablate.py table                                      mini/results/ablations.json, and a table of it

    full              the base: mini/train.toml without draft, tower and published numerics, so many steps
    no-engram         without n-gram memory
    window            no far part: every layer sees its window of 128 tokens and nothing else
    indexer-frozen    the far part's picks are chosen by indexers as they were drawn
    plain-residual    one residual stream (hc_mult = 1), read as it is and added to: nothing mixes, nothing gates

All see the same tokens in the same order. They have not the same number of parameters: nothing takes the place of what
is left out.
"""

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from openv41.config import Config
from openv41.errors import InputError, OpenV41Error
from openv41.train.loop import METRICS, Training, read_metrics
from openv41.train.settings import Settings

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
STEPS = 1200
FOUND = "ablation.json"
NAMES = ("full", "no-engram", "window", "indexer-frozen", "plain-residual")
ROW = "| {name} | {bits_per_byte:.4f} | {difference:+.4f} | {parameters:,} | {tokens_per_second:,.0f} |"


def changes(name: str, config: Config) -> dict[str, Any]:
    """What a variant changes in the base's configuration."""
    layers = config.n_layers
    base = {"n_mtp_layers": 0, "compress_ratios": list(config.compress_ratios[:layers]), "vision_n_layers": 0}
    window = {
        "compress_ratios": [0] * layers, "kv_source_layers": [], "index_source_layers": [],
        "candidate_source_layer": -1,
    }  # fmt: skip
    own = {
        "no-engram": {"engram_layer_ids": [], "engram_num_embeddings": []},
        "window": window,
        "plain-residual": {"hc_mult": 1},
    }
    return base | own.get(name, {})


def settings_of(name: str, base: Settings, steps: int) -> Settings:
    """A variant's settings; its folder lies beside that of the base."""
    path = Path(base.model.base)
    config = Config.from_json(path / "config.json" if path.is_dir() else path)
    replaced = {**base.model.replace, **changes(name, config.replace(**base.model.replace))}
    return replace(
        base,
        folder=str(Path(base.folder).with_name("ablations") / name),
        steps=steps,
        model=replace(base.model, published_from=1.0, replace=replaced),
        optimizer=replace(base.optimizer, warmup=min(base.optimizer.warmup, steps // 10)),
        loss=replace(base.loss, draft=0.0, draft_from=0.0, index=0.0 if name == "indexer-frozen" else base.loss.index),
        record=replace(base.record, validate_every=0, keep=1),
    )


def train(settings: Settings, seconds: float) -> bool:
    """Go on with one of them; whether it is done. What it came to is then in its folder."""
    training = Training(settings)
    done = training.run(None, seconds)
    lines = read_metrics(Path(settings.folder) / METRICS)
    steps = [line for line in lines if "loss" in line]
    found = {
        "steps": training.step, "tokens": steps[-1]["tokens"], "device": steps[-1]["device"],
        "bits_per_byte": next((line["bits_per_byte"] for line in reversed(lines) if "validation" in line), None),
        "parameters": sum(
            p.numel()
            for name, p in training.model.named_parameters()
            if p.requires_grad and (settings.loss.index or ".indexer." not in name)
        ),
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steps),
        "context": settings.data.context, "validation_tokens": sum(map(len, training.held)),
    }  # fmt: skip
    if done:
        (Path(settings.folder) / FOUND).write_text(json.dumps(found, indent=2) + "\n")
    return done


def gather(folder: Path) -> dict[str, Any]:
    """All that are done, by name; at equal steps, or `InputError` says otherwise."""
    found = {
        name: json.loads((folder / name / FOUND).read_text()) for name in NAMES if (folder / name / FOUND).is_file()
    }
    if len({one["steps"] for one in found.values()}) != 1 or "full" not in found:
        done = ", ".join(f"{name} {one['steps']}" for name, one in found.items()) or "none"
        raise InputError(f"all must be done at equal steps, full among them; done are: {done}")
    return found


def table(found: dict[str, Any]) -> str:
    """In Markdown: bits per byte, how much worse than the full model, parameters, speed of training."""
    rows = [
        ROW.format(name=name, difference=one["bits_per_byte"] - found["full"]["bits_per_byte"], **one)
        for name, one in found.items()
    ]
    head = "| model | bits per byte | against full | trained parameters | tokens/s in training |\n|---|---|---|---|---|"
    return "\n".join([head, *rows])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--base", type=Path, default=HERE / "train.toml", metavar="SETTINGS.toml")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of each (default: {STEPS})")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="for all of them, then stop")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_intermixed_args(argv)
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"unknown {', '.join(sorted(unknown))}: choose among {', '.join(NAMES)}")
    try:
        base = Settings.from_toml(args.base)
        if args.command == "run":
            return run(base, args.names or NAMES, args.steps, 60 * args.minutes)
        found = gather(Path(base.folder).with_name("ablations"))
    except OpenV41Error as error:
        print(f"ablate: error: {error}", file=sys.stderr)
        return 2
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / "ablations.json").write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))
    return 0


def run(base: Settings, names: Any, steps: int, seconds: float) -> int:
    """Train one after another as long as time is left; 3 where some is not done."""
    until = time.monotonic() + seconds
    for name in names:
        settings = settings_of(name, base, steps)
        done = (Path(settings.folder) / FOUND).is_file() or (
            time.monotonic() < until and train(settings, until - time.monotonic())
        )
        print(f"{name}: {'done' if done else 'not done yet: run the same command to go on'}", file=sys.stderr)
        if not done:
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
