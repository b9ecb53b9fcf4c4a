"""What the run was: data, tokens seen, time and device by phase, the curve. All of it from what the run left."""

import json
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corpus import Package, permissive

from openv41.train.loop import METRICS, read_metrics
from openv41.train.plot import draw_curve


def data(packages: Sequence[Package], prepared: dict[str, Any]) -> dict[str, Any]:
    """Packages and licences of the record, and what of it the token files hold."""
    licences = Counter(package.licence for package in packages)
    assert all(permissive(licence) for licence in licences)
    held = sorted(package.name for package in packages if package.held_out)
    return {"packages": len(packages), "held_out": held, "licences": dict(licences.most_common()), **prepared}


def run(folder: Path) -> dict[str, Any]:
    """Steps, tokens, seconds and devices of a run; by numerics the median speed; every validation."""
    lines = read_metrics(folder / METRICS)
    steps = [line for line in lines if "loss" in line]
    held = [line for line in lines if "validation" in line]
    speeds: dict[str, list[float]] = {}
    for line in steps:
        speeds.setdefault(f"{line['numerics']}{', draft' if 'draft' in line else ''}", []).append(
            line["tokens_per_second"]
        )
    return {
        "steps": steps[-1]["step"], "tokens": steps[-1]["tokens"], "loss": steps[-1]["loss"],
        "seconds": sum(line["seconds"] for line in (*steps, *held)),
        "devices": dict(Counter(line["device"] for line in steps)),
        "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "validations": [{key: line[key] for key in ("step", "validation", "bits_per_byte")} for line in held],
    }  # fmt: skip


def curve(folder: Path, results: Path) -> None:
    """The run's curve among the results."""
    with tempfile.TemporaryDirectory() as made:
        for path in draw_curve(read_metrics(folder / METRICS), Path(made)):
            shutil.copyfile(path, results / path.name)


def data_table(found: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {found[name]['documents']:,} | {found[name]['bytes']:,} | {found[name]['tokens']:,} |"
        for name in ("train", "validation")
    ]
    licences = ", ".join(f"{name} ({count})" for name, count in found["licences"].items())
    return "\n".join(
        [
            "| | documents | bytes of text | tokens |", "|---|---|---|---|", *rows, "",
            f"{found['packages']} packages; held out as a whole: {', '.join(found['held_out'])}. Licences, as the "
            f"packages word them: {licences}.",
        ]
    )  # fmt: skip


def run_table(found: dict[str, Any]) -> str:
    devices = ", ".join(f"{name} ({count:,} steps)" for name, count in found["devices"].items())
    speeds = "; ".join(f"{name}: {rate:,.0f}" for name, rate in found["tokens_per_second"].items())
    last = found["validations"][-1]
    return "\n".join(
        [
            "| | |", "|---|---|",
            f"| steps | {found['steps']:,} |", f"| tokens seen | {found['tokens']:,} |",
            f"| device | {devices} |", f"| time of all steps and validations | {found['seconds'] / 60:.1f} minutes |",
            f"| tokens a second, median | {speeds} |",
            f"| last validation of the run | {last['bits_per_byte']:.4f} bits per byte |",
            "", "![Loss by step](../mini/results/curve.svg)",
        ]
    )  # fmt: skip


def prepared(folder: Path) -> dict[str, Any]:
    """What `prepare.py` noted."""
    found: dict[str, Any] = json.loads((folder / "prepared.json").read_text())
    return found
