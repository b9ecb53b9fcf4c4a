"""Cost: what spans multiply and move, added up and split by component, and the time that a machine needs at least.

Bytes are those of the tensors as they are held: a weight once a call, with its scales; of the experts those that are
chosen, expected as if all were chosen equally often; state once a sequence and call, as packed records; activations
where they go in and out of a component. A floor is the larger of two times: all bytes at the machine's bandwidth, all
products at its rates. No implementation of the same calls is faster there; a real one is slower.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openv41.config import Config
from openv41.errors import InputError
from openv41.explain.counting import FORMATS
from openv41.explain.recorder import Span
from openv41.explain.scene import Scene

KINDS = ("weights", "table", "state_read", "state_written", "activations")


@dataclass(frozen=True)
class Cost:
    """FLOPs by format (`FORMATS`) and bytes by kind (`KINDS`; `table`: looked-up rows of embedding and Engram).

    `state`: the bytes of state once more, by (kind of table, layer, one of `KINDS`).
    """

    flops: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    state: Counter[tuple[str, int, str]] = field(default_factory=Counter)

    @classmethod
    def of(cls, span: Span) -> "Cost":
        """All of a span, its activations those of its own edge."""
        nbytes, state = Counter(span.read), Counter[tuple[str, int, str]]()
        for (kind, layer), touched in span.state.items():
            nbytes.update(state_read=touched.read, state_written=touched.written)
            state.update({(kind, layer, "state_read"): touched.read, (kind, layer, "state_written"): touched.written})
        nbytes.update(activations=span.activations())
        return cls(Counter(span.flops), nbytes, state)

    def __add__(self, other: "Cost") -> "Cost":
        total = Cost(Counter(self.flops), Counter(self.nbytes), Counter(self.state))
        for own, more in zip(total.counters, other.counters, strict=True):
            own.update(more)
        return total

    def less(self, other: "Cost") -> "Cost":
        rest = Cost(Counter(self.flops), Counter(self.nbytes), Counter(self.state))
        for own, taken in zip(rest.counters, other.counters, strict=True):
            own.subtract(taken)
        return rest

    def times(self, count: int) -> "Cost":
        return Cost(*(Counter({key: value * count for key, value in one.items()}) for one in self.counters))

    @property
    def counters(self) -> tuple[Counter[Any], ...]:
        return self.flops, self.nbytes, self.state

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes.values())

    def to_dict(self, machine: "Machine") -> dict[str, Any]:
        memory, compute = machine.seconds(self)
        return {
            "flops": {**{key: self.flops[key] for key in FORMATS}, "total": self.total_flops},
            "bytes": {**{key: self.nbytes[key] for key in KINDS}, "total": self.total_bytes},
            "flops_per_byte": round(self.total_flops / self.total_bytes, 3) if self.total_bytes else 0.0,
            "floor_us": round(max(memory, compute) * 1e6, 6),
            "bound_by": "memory" if memory >= compute else "compute",
            "machine": machine.name,
        }


NOTHING = Cost()

Parts = dict[str, Cost]
"""Costs by component."""


def split(span: Span, component_of: Callable[[Span, str], str], above: str = "other") -> Parts:
    """The cost of a span by component. `component_of(span, above)` says which component a span belongs to, given that
    of the span around it. Activations are counted where one component ends and another begins."""
    name = component_of(span, above)
    own = Cost.of(span)
    if name == above:
        own.nbytes["activations"] = 0
    parts: Parts = {}
    for inner in span.inside:
        inner_cost = Cost.of(inner)
        inner_cost.nbytes["activations"] = 0
        own = own.less(inner_cost)
        add(parts, split(inner, component_of, name))
    add(parts, {name: own})
    return parts


def add(parts: Parts, more: Mapping[str, Cost]) -> None:
    for name, cost in more.items():
        parts[name] = parts.get(name, NOTHING) + cost


def of_prompt(
    config: Config,
    tokens: int,
    chunk: int,
    batch: int,
    prefill: str,
    component_of: Callable[[Span, str], str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Parts:
    """The cost of prompts of `tokens` tokens read in chunks.

    Every chunk costs what it costs to run it; a stretch of chunks whose costs lie on a straight line (first, middle and
    last do, to the unit) is added up as one.
    """
    starts = range(0, tokens, chunk)
    known: dict[int, Parts] = {}

    def at(number: int) -> Parts:
        if number not in known:
            start = starts[number]
            scene = Scene(config, "prefill", start, min(chunk, tokens - start), batch)
            root = scene.record("halo" if prefill == "halo" else "full", prompt=tokens)
            known[number] = split(root, component_of)
            progress(len(known), len(starts))
        return known[number]

    def stretch(first: int, last: int) -> Parts:
        if last - first < 2:
            return _sum(at(number) for number in range(first, last + 1))
        if (last - first) % 2:  # a middle is needed
            return _sum((stretch(first, last - 1), at(last)))
        middle = (first + last) // 2
        if _line(at(first), at(middle), at(last)):
            return _times(at(middle), last - first + 1)
        return _sum((stretch(first, middle - 1), stretch(middle, last)))

    return stretch(0, len(starts) - 1)


def last_chunk(config: Config, tokens: int, chunk: int, batch: int, prefill: str) -> Span:
    """The recorded call that ends such prompts."""
    start = (tokens - 1) // chunk * chunk
    scene = Scene(config, "prefill", start, tokens - start, batch)
    return scene.record("halo" if prefill == "halo" else "full", prompt=tokens)


def _sum(several: Iterable[Parts]) -> Parts:
    total: Parts = {}
    for parts in several:
        add(total, parts)
    return total


def _times(parts: Parts, count: int) -> Parts:
    return {name: cost.times(count) for name, cost in parts.items()}


def _line(first: Parts, middle: Parts, last: Parts) -> bool:
    ends, twice = _sum((first, last)), _sum((middle, middle))
    return ends.keys() == twice.keys() and all(
        all(_same(a, b) for a, b in zip(ends[name].counters, twice[name].counters, strict=True)) for name in ends
    )


def _same(a: Counter[Any], b: Counter[Any]) -> bool:
    return all(a[key] == b[key] for key in {*a, *b})


# Machines


@dataclass(frozen=True)
class Machine:
    """Bytes per second from memory, FLOPs per second by format, and where each figure comes from."""

    name: str
    bandwidth: float
    rates: Mapping[str, float]
    sources: Mapping[str, str]

    def seconds(self, cost: Cost) -> tuple[float, float]:
        """For its bytes, and for its products."""
        compute = sum((count / self.rates[key] for key, count in cost.flops.items() if count), 0.0)
        return cost.total_bytes / self.bandwidth, compute

    def figures(self, cost: Cost) -> list[str]:
        """The figures that a floor of this cost rests on, each with its source."""
        found = [("bandwidth", f"{self.name} moves {self.bandwidth / 1e12:,.6g} TB/s")]
        for key in FORMATS:
            if cost.flops[key]:
                words = key.replace("_", " x ")
                found.append((key, f"{self.name} multiplies {words} at {self.rates[key] / 1e12:,.6g} TFLOP/s"))
        return [
            f"{words} ({self.sources.get(key, 'the machine file does not say from where')})" for key, words in found
        ]


MACHINES = {
    "h200": Machine(
        "h200",
        4.3e12,
        {"fp4_fp8": 1496e12, "fp8": 1496e12, "bf16": 807e12, "fp32": 67e12},
        {
            "bandwidth": "measured: device copy, read and written bytes",
            "bf16": "measured: matrix product",
            "fp8": "measured: matrix product",
            "fp4_fp8": "as fp8: Hopper has no fp4 units",
            "fp32": "data sheet, no tensor cores",
        },
    ),
    "h100": Machine(
        "h100",
        3.35e12,
        {"fp4_fp8": 1979e12, "fp8": 1979e12, "bf16": 989e12, "fp32": 67e12},
        {
            "bandwidth": "data sheet (SXM)",
            "bf16": "data sheet (SXM), dense; real products reach about three quarters",
            "fp8": "data sheet (SXM), dense",
            "fp4_fp8": "as fp8: Hopper has no fp4 units",
            "fp32": "data sheet (SXM), no tensor cores",
        },
    ),
    "cpu": Machine(
        "cpu",
        26.3e9,
        {"fp4_fp8": 332e9, "fp8": 332e9, "bf16": 332e9, "fp32": 332e9},
        {
            "bandwidth": "measured: 264 MB read once, 2 cores of a Xeon with AMX (benchmarks/results)",
            "fp32": "measured: squares of 2,048 on the same cores",
            "bf16": "as fp32: a low estimate where the cores have AMX",
            "fp8": "as fp32: weights are widened first",
            "fp4_fp8": "as fp32: weights are widened first",
        },
    ),
}


def machine_named(name: str) -> Machine:
    """One of `MACHINES`, or one described by a JSON file: {"name", "bandwidth" in bytes a second, "rates": {"fp4_fp8",
    "fp8", "bf16", "fp32" in FLOPs a second}, "sources" (optional)}.

    Raises `InputError` for any other name, and for a file that does not say these things.
    """
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if not path.is_file():
        raise InputError(f"no machine {name!r}: take {', '.join(MACHINES)}, or a JSON file with bandwidth and rates")
    try:
        if path.stat().st_size > 1 << 20:
            raise ValueError("larger than 1 MiB")
        values = json.loads(path.read_text(encoding="utf-8"))
        return _machine(values, path)
    except (OSError, UnicodeDecodeError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{name} does not describe a machine: {error}") from None


def _machine(values: Any, path: Path) -> Machine:
    if not isinstance(values, dict) or not isinstance(values.get("rates"), dict):
        raise ValueError("an object with bandwidth and rates is needed")

    def positive(key: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise ValueError(f"{key} must be a number above 0, got {value!r}")
        return float(value)

    rates = {key: positive(f"rates.{key}", values["rates"].get(key)) for key in FORMATS}
    return Machine(
        str(values.get("name", path.stem)),
        positive("bandwidth", values.get("bandwidth")),
        rates,
        {str(key): str(value) for key, value in dict(values.get("sources", {})).items()},
    )
