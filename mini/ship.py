"""From the last checkpoint of a run to the model of the package: checked, then put there whole.

    python mini/ship.py RUN [--to DIR]      by default src/openv41/mini

Refused unless the run is done, its last steps were in published numerics, the files load strictly, all numbers are
finite, the files have at most 24 MB, and the model in the files says what the run's own says: its float weights in
published numerics, on held-out tokens. The two differ in one thing, which the files round to bf16 and the run does not:
norms, embeddings, routers.
"""

import argparse
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from figures.sizes import is_shipped
from torch import Tensor

from openv41.api import Assistant, load
from openv41.errors import OpenV41Error
from openv41.model.masters import change_ops
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.train import checkpoints
from openv41.train.data import Pack, once
from openv41.train.schedule import phase_at
from openv41.train.settings import Settings
from openv41.train.setup import open_model, open_texts

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parent / "src" / "openv41" / "mini"
MOST_BYTES = 24_000_000
MOST_DIVERGENCE = 1e-2
"""Nats a token, on average, that the distributions of the two models may differ by. Values that lie at a border of fp8
or between two experts fall to one side or the other: sums taken in another order alone make 4e-3 of it."""
TOKENS = 4096


class Refused(Exception):
    """What keeps a checkpoint from shipping, in one line."""


def last_of(run: Path) -> tuple[Path, Settings, dict[str, Any]]:
    """The last checkpoint of a run that is done, its settings and its state."""
    steps = checkpoints.saved_steps(run)
    if not steps:
        raise Refused(f"{run} holds no checkpoint: train first")
    state = checkpoints.load(run, steps[-1])
    settings = Settings.from_dict(state["settings"])
    if state["step"] < settings.steps:
        raise Refused(f"{run} stands at step {state['step']} of {settings.steps}: go on with it first")
    if phase_at(settings, settings.steps - 1).numerics != "published":
        raise Refused(
            f"the last steps of {run} were in plain numerics, and what ships is rounded: set model.published_from"
        )
    return checkpoints.folder_of(run, steps[-1]), settings, state


def own_model(settings: Settings, state: dict[str, Any]) -> Transformer:
    """The run's model, on the CPU, in published numerics."""
    _, _, model = open_model(replace(settings, device="cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state["weights"][name])
    change_ops(model, choose("cpu", numerics="published", training=True))
    return model


def check_files(folder: Path) -> int:
    """Their size together."""
    size = sum(path.stat().st_size for path in folder.iterdir() if is_shipped(path))
    if size > MOST_BYTES:
        raise Refused(f"the files have {size:,} bytes, more than {MOST_BYTES:,}: train a smaller configuration")
    return size


def check_finite(model: Transformer) -> None:
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if value.is_floating_point() and not value.float().isfinite().all():
            raise Refused(f"{name} is not finite")


@torch.no_grad()
def logits_of(model: Transformer, pack: Pack) -> Tensor:
    return model(pack.step(), prefill="full").logits.float()


def compare(own: Transformer, shipped: Assistant, packs: list[Pack]) -> dict[str, float]:
    """Of the packs' tokens: bits a byte by both models, and how far their distributions are from each other."""
    tokenizer = shipped.tokenizer
    divergence, agreeing, count, size = 0.0, 0, 0, 0
    nats = {"run": 0.0, "shipped": 0.0}
    for pack in packs:
        targets = pack.targets()
        one, other = (logits_of(model, pack).log_softmax(1) for model in (own, shipped.transformer))
        divergence += float((one.exp() * (one - other)).sum())
        agreeing += int((one.argmax(1) == other.argmax(1)).sum())
        for name, values in (("run", one), ("shipped", other)):
            nats[name] -= float(values.gather(1, targets.unsqueeze(1)).sum())
        count += len(pack)
        size += len(tokenizer.decode(targets.tolist(), special=False).encode())
    found = {f"bits_per_byte_{name}": value / math.log(2) / size for name, value in nats.items()}
    found |= {"divergence": divergence / count, "same_likeliest": agreeing / count, "tokens": count}
    if not found["divergence"] <= MOST_DIVERGENCE:
        raise Refused(
            f"the files' model is {found['divergence']:.2e} nats a token from the run's own, more than "
            f"{MOST_DIVERGENCE:.0e}: {found}"
        )
    return found


def put(folder: Path, target: Path) -> None:
    """The model's files in the place of what is there, all at once."""
    fresh, old = (target.with_name(f".{target.name}.{word}") for word in ("partial", "replaced"))
    for left in (fresh, old):
        shutil.rmtree(left, ignore_errors=True)
    fresh.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if is_shipped(path):
            shutil.copyfile(path, fresh / path.name)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def ship(run: Path, target: Path) -> dict[str, Any]:
    """Check, put, and tell what was found."""
    folder, settings, state = last_of(run)
    size = check_files(folder)
    shipped = load(folder)
    check_finite(shipped.transformer)
    _, held = open_texts(settings.data, shipped.tokenizer, shipped.config.vocab_size)
    packs = once(held, settings.data.context, settings.data.tokens, TOKENS)
    found = compare(own_model(settings, state), shipped, packs)
    put(folder, target)
    return {"from": str(folder), "to": str(target), "bytes": size, **found}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--to", type=Path, default=SHIPPED, metavar="DIR", help="instead of src/openv41/mini")
    args = parser.parse_args(argv)
    try:
        print(json.dumps(ship(args.run, args.to), indent=2))
    except (Refused, OpenV41Error) as error:
        print(f"ship: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
