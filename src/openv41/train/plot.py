"""The curve of a run, drawn from its metrics with matplotlib (the extra `train`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openv41.errors import InputError


def draw_curve(lines: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write curve.png and curve.svg: the language loss of every step, its running mean, and the validations; a line
    where numerics change.

    Raises `InputError` where matplotlib is missing or there is nothing to draw.
    """
    try:
        import matplotlib
    except ImportError:
        raise InputError('the curve needs matplotlib: pip install "openv41[train]"') from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    held = [(line["step"], line["validation"]) for line in lines if "validation" in line]
    if not steps:
        raise InputError("no step has been done yet: there is no curve to draw")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    x, y = zip(*steps, strict=True)
    axes.plot(x, y, color="#9db8d9", linewidth=0.8, label="training, each step")
    axes.plot(x, _running_mean(y), color="#1f4e8c", linewidth=1.6, label="training, running mean")
    if held:
        axes.plot(*zip(*held, strict=True), "o-", color="#c4541d", markersize=4, label="validation")
    for step, numerics in changes(lines):
        axes.axvline(step, color="#777777", linewidth=0.8, linestyle=":", label=f"from here on {numerics} numerics")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    paths = [folder / "curve.png", folder / "curve.svg"]
    with matplotlib.rc_context({"svg.hashsalt": "openv41"}):  # the same metrics give the same file
        figure.savefig(paths[0], dpi=150, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def changes(lines: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """The steps whose numerics are others than those of the step before."""
    steps = [(line["step"], line["numerics"]) for line in lines if "numerics" in line]
    return [later for earlier, later in zip(steps, steps[1:], strict=False) if earlier[1] != later[1]]


def _running_mean(values: Sequence[float], keep: float = 0.95) -> list[float]:
    """Each value with those before it, which count less and less; even at the beginning it is a mean."""
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight)
    return means
