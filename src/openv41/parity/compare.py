"""How far two tensors are apart, and how far they may be.

`Bounds` says what is allowed, read from a case's own `tolerance`; `Sheet` collects what was found in one case. A rule
that the index does not give, or gives in words or numbers that make no sense, is replaced by the strict one beside the
comparison: nothing passes for want of a tolerance.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

SHARES = ("min_equal", "min_within_1ulp")
QUANTUM = 0.35
"""Of a row's largest value: where a tolerance gives a share alone, the other elements may be off by this. It is one
step of the coarsest stored format (fp4: 4 to 6)."""


@dataclass(frozen=True)
class Bounds:
    """What is allowed. An element is near if it is equal, within `atol + rtol * |wanted|`, or within `max_ulp` steps of
    its type; every element must be near, and the shares and root mean squares are of all elements together."""

    atol: int | float = 0
    rtol: int | float = 0
    max_ulp: int | float = 0
    quantum: int | float = 0  # of the row's largest
    min_equal: int | float = 0
    min_within_1ulp: int | float = 0
    relative_rms_error: int | float = inf
    rms_error: int | float = inf

    @classmethod
    def read(cls, rules: Any) -> "Bounds | None":
        """From an object of the index, or None where it holds no rule that makes sense."""
        if rules == "exact" or isinstance(rules, Mapping) and rules.get("bit_exact") is True:
            return EXACT
        if isinstance(rules, str):
            number = r"(\w+)\s+([\d.]+(?:e-?\d+)?)"
            rules = {key: float(value) for key, value in re.findall(number, rules) if key in LIMITS}
        if not isinstance(rules, Mapping):
            return None
        found = {key: float(rules[key]) for key in LIMITS if key in rules and _sensible(key, rules[key])}
        if not found:
            return None
        element = found.keys() & {"atol", "rtol", "max_ulp"}
        if not element:
            found["quantum" if found.keys() & set(SHARES) else "atol"] = QUANTUM if found.keys() & set(SHARES) else inf
        return cls(**found)


LIMITS = [rule.name for rule in fields(Bounds) if rule.name != "quantum"]
EXACT = Bounds()


def _sensible(key: str, value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value) and 0 <= value <= (1 if key in SHARES else 2**16)


def bounds(tolerance: Mapping[str, Any], *names: str, otherwise: Bounds = EXACT) -> Bounds:
    """The rule for a tensor: the first of `names` that the tolerance has, or its rules for all, or `otherwise`.

    Tolerances for one kind of machine stand under "torch on CPU" and "elsewhere"; this runs torch on the CPU.
    """
    for name in names:
        rules = tolerance.get(name)
        if isinstance(rules, Mapping) and isinstance(rules.get("torch on CPU"), Mapping):
            rules = rules["torch on CPU"]
        if (found := Bounds.read(rules)) is not None:
            return found
    return Bounds.read(tolerance) or otherwise


@dataclass(frozen=True)
class Finding:
    """One comparison. `used` is the part of what is allowed that was used up; above 1 it has failed."""

    what: str
    used: float
    text: str

    @property
    def passed(self) -> bool:
        return self.used <= 1


@dataclass
class Sheet:
    """Everything that was compared in one case."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    values: int = 0
    reported: bool = False  # looked at, but not judged

    def compare(self, what: str, got: Tensor, wanted: Tensor, allowed: Bounds) -> None:
        self.compare_all({what: (got, wanted)}, allowed)

    def compare_all(self, pairs: Mapping[str, tuple[Tensor, Tensor]], allowed: Bounds) -> None:
        """Pairs (got, wanted) of one kind: each element by itself, the shares over all of them."""
        total = _Total()
        for what, (got, wanted) in pairs.items():
            if got.shape != wanted.shape:
                self.fail(what, f"shape {list(got.shape)}, wanted {list(wanted.shape)}")
            elif wanted.numel():
                self.findings.append(_nearness(what, got, wanted, allowed, total))
        self.findings += _shares("+".join(pairs) if len(pairs) < 3 else f"{next(iter(pairs))}...", allowed, total)
        self.values += total.count

    def require(self, what: str, holds: bool, otherwise: str) -> None:
        self.findings.append(Finding(what, 0.0 if holds else inf, "" if holds else otherwise))
        self.values += 1

    def fail(self, what: str, why: str) -> None:
        self.require(what, False, why)

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def worst(self) -> Finding | None:
        return max(self.findings, key=lambda finding: finding.used, default=None)


@dataclass
class _Total:
    count: int = 0
    equal: int = 0
    within_1ulp: int = 0
    squares: float = 0.0
    wanted_squares: float = 0.0


def _nearness(what: str, got: Tensor, wanted: Tensor, allowed: Bounds, total: _Total) -> Finding:
    same = _same(got, wanted)
    g, w = got.double(), wanted.double()
    distance = (g - w).abs().masked_fill(same, 0.0).nan_to_num(inf, inf)
    steps = ulp_distance(got, wanted).masked_fill(same, 0)
    total.count += wanted.numel()
    total.equal += int(same.sum())
    total.within_1ulp += int((steps <= 1).sum())
    total.squares += float(distance.square().sum())
    total.wanted_squares += float(w.masked_fill(~w.isfinite(), 0.0).square().sum())

    room = allowed.atol + allowed.rtol * w.abs().nan_to_num(0.0, 0.0, 0.0)
    if allowed.quantum:
        room = room + allowed.quantum * w.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    used = torch.minimum(distance / room, steps / allowed.max_ulp if allowed.max_ulp else torch.full_like(g, inf))
    used = used.nan_to_num(inf, inf).masked_fill(same, 0.0)  # inf / inf: an infinite room is no room for NaN
    worst = int(used.flatten().argmax())
    most, d = float(used.flatten()[worst]), float(distance.flatten()[worst])
    differ = int((~same).sum())
    if not differ:
        return Finding(what, 0.0, "")
    step = float(steps.flatten()[worst])
    if allowed.max_ulp and step < inf and step / allowed.max_ulp <= most:
        text = f"{step:.0f} ulp of {allowed.max_ulp:g}"
    else:
        text = f"{d:.2g} of {float(room.expand_as(g).flatten()[worst]):.2g}"
    return Finding(what, most, f"{text}, {differ} of {wanted.numel()} differ")


def _shares(what: str, allowed: Bounds, total: _Total) -> list[Finding]:
    if not total.count:
        return []
    found = []
    for rule, count in (("min_equal", total.equal), ("min_within_1ulp", total.within_1ulp)):
        if least := getattr(allowed, rule):
            off = 1 - count / total.count
            used = off / (1 - least) if least < 1 else inf if off else 0.0
            kind = "unequal" if rule == "min_equal" else "beyond 1 ulp"
            found.append(Finding(what, used, f"{off:.2%} {kind} of {1 - least:.2%}"))
    rms = (total.squares / total.count) ** 0.5
    scale = (total.wanted_squares / total.count) ** 0.5
    if isfinite(allowed.rms_error):
        found.append(Finding(what, _ratio(rms, allowed.rms_error), f"rms {rms:.2g} of {allowed.rms_error:g}"))
    if isfinite(allowed.relative_rms_error):
        relative = _ratio(rms, scale)
        used = _ratio(relative, allowed.relative_rms_error)
        found.append(Finding(what, used, f"relative rms {relative:.2g} of {allowed.relative_rms_error:g}"))
    return found


def _ratio(value: float, limit: float) -> float:
    return value / limit if limit else inf if value else 0.0


def _same(got: Tensor, wanted: Tensor) -> Tensor:
    if not (got.is_floating_point() or wanted.is_floating_point()):
        return got == wanted  # float64 does not hold every whole number
    g, w = got.double(), wanted.double()
    return (g == w) | (g.isnan() & w.isnan())


def same_bits(got: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Both as integers of their bits, so that the sign of a zero counts; NaN are all one."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def bits(x: Tensor) -> Tensor:
        # The one-byte formats are compared by code: a NaN has one there.
        if x.dtype.itemsize > 1 and x.is_floating_point():
            x = x.masked_fill(x.isnan(), torch.nan)
        return x.contiguous().view(kinds[x.dtype.itemsize])

    return (bits(got), bits(wanted)) if got.dtype == wanted.dtype else (got, wanted)


def ulp_distance(got: Tensor, wanted: Tensor) -> Tensor:
    """Steps of the wanted tensor's type between floating-point tensors, as float64; for other types the distance."""
    kinds = {2: torch.int16, 4: torch.int32}
    kind = kinds.get(wanted.dtype.itemsize) if wanted.is_floating_point() else None
    if kind is None:
        return (got.double() - wanted.double()).abs().nan_to_num(inf, inf)

    def order(x: Tensor) -> Tensor:
        bits = x.to(wanted.dtype).contiguous().view(kind).long()
        lowest = torch.iinfo(kind).min
        return torch.where(bits < 0, lowest - bits, bits)

    apart = (order(got) - order(wanted)).abs().double()
    return apart.masked_fill(~(got.isfinite() & wanted.isfinite()), inf)
