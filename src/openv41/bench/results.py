"""What a benchmark is asked, and what it returns."""

from dataclasses import asdict, dataclass
from typing import Any

from openv41.bench.measure import Timing


@dataclass(frozen=True)
class Settings:
    """What to time. `weights`: how the cpu operations hold them (None where the set has no such choice). `position`:
    where the token stands; `prompt`: tokens of the prompt; `repeats`: timed runs of the prompt, four times as many of
    the token. `reference`: whether the reference is timed as well. `only`: a part of the names of what is timed."""

    ops: str = "cpu"
    weights: str | None = "cached"
    position: int = 1000
    prompt: int = 1000
    repeats: int = 5
    reference: bool = True
    only: str = ""


@dataclass(frozen=True)
class Agreement:
    """What was compared with the reference before anything was timed. `equal`: the share of values that were equal,
    operation by operation; `equal_at_the_end`: of the layer's result. `failures` says what lies beyond the rules."""

    rules: str
    compared: int
    equal: float
    equal_at_the_end: float
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


@dataclass(frozen=True)
class Figure:
    """One number. `timing` is given for times, `aim` where there is one, `note` says what a reader must know. A `what`
    that is set in belongs to the figure above."""

    key: str
    what: str
    value: float
    unit: str
    timing: Timing | None = None
    aim: str = ""
    note: str = ""


@dataclass(frozen=True)
class Report:
    """`subject` says what was run, `about` how to read the figures. Without agreement there are no figures; where
    cases are judged `apart`, those that disagree have none, and the others have theirs."""

    benchmark: str
    subject: str
    settings: Settings
    agreement: Agreement
    figures: tuple[Figure, ...]
    about: tuple[str, ...] = ()
    apart: bool = False

    @property
    def shown(self) -> tuple[Figure, ...]:
        """The figures that agreement allows."""
        return self.figures if self.agreement.passed or self.apart else ()

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; the figures by key, and none of them unless the agreement passed."""
        told = asdict(self)
        del told["apart"]
        told["agreement"]["passed"] = self.agreement.passed
        figures = (asdict(figure) for figure in self.shown)
        told["figures"] = {figure.pop("key"): figure | {"what": figure["what"].strip()} for figure in figures}
        return told


def format_report(report: Report) -> str:
    agreement = report.agreement
    lines = [
        f"{report.benchmark}: {report.subject}",
        f"agreement with the reference: {agreement.equal:.3%} of {agreement.compared:,} values equal by operation, "
        f"{agreement.equal_at_the_end:.1%} at the end",
    ]
    if not agreement.passed:
        lines += [f"DIFFERS  {failure}" for failure in agreement.failures]
        none = "no figures of these" if report.apart else "no figures"
        lines.append(f"{none}: the rules are: {agreement.rules}")
    if not report.shown:
        return "\n".join(lines)
    rows = [[figure.what, _value(figure), figure.unit, _beside(figure)] for figure in report.shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for what, value, unit, beside in rows:
        lines.append(f"  {what:{widths[0]}}  {value:>{widths[1]}} {unit:{widths[2]}}  {beside}".rstrip())
    return "\n".join([*lines, *report.about])


def _value(figure: Figure) -> str:
    value = figure.value
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _beside(figure: Figure) -> str:
    parts = []
    if figure.timing is not None:
        timing = figure.timing
        runs = "one run" if timing.repeats == 1 else f"median of {timing.repeats}"
        parts.append(runs if timing.repeats == 1 else f"{runs}, {timing.fastest:.1f} to {timing.slowest:.1f}")
    if figure.aim:
        parts.append(f"aim: {figure.aim}")
    return "; ".join([*parts, *[figure.note] * bool(figure.note)])
