"""What if: the same question of a changed configuration, and what is different."""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from openv41.config import Config
from openv41.errors import InputError
from openv41.explain.cost import Machine
from openv41.explain.panel import Panel, Question, explain

SHOWN = ("inputs", "outputs", "parameters", "state", "cost")


def changed(config: Config, changes: list[str]) -> tuple[Config, dict[str, Any]]:
    """The configuration with KEY=VALUE set, each value as in JSON (or a plain word). Checked as usual: raises
    `InputError` for a key that there is not, `ConfigError` for what contradicts the rest."""
    known = {one.name for one in fields(Config)}
    values: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in known:
            raise InputError(f"--what-if takes KEY=VALUE with a key of the configuration, got {change!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        values[key] = tuple(value) if isinstance(value, list) else value
    return config.replace(**values), values


def compare(
    config: Config,
    changes: list[str],
    question: Question,
    machine: Machine,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Panel:
    """The panel of the changed configuration; `what_if` holds the changes and every number that differs."""
    other, values = changed(config, changes)
    before = explain(config, question, machine, progress)
    after = explain(other, question, machine, progress)
    old, new = (dict(_leaves("", {key: panel.to_dict()[key] for key in SHOWN})) for panel in (before, after))
    differences = [
        {"what": what, "before": old.get(what), "after": new.get(what)}
        for what in [*old, *(what for what in new if what not in old)]
        if old.get(what) != new.get(what)
    ]
    after.what_if = {"changes": values, "differences": differences}
    return after


def _leaves(prefix: str, value: Any) -> list[tuple[str, Any]]:
    """Numbers and shapes by path; members of lists are called by their names."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(f"{prefix} {key}".strip(), inner)]
    if isinstance(value, list) and value and all(isinstance(one, dict) and "name" in one for one in value):
        named = {
            f"{one['name']}": {k: v for k, v in one.items() if k not in ("name", "axes", "dtype")} for one in value
        }
        return _leaves(prefix, named)
    if isinstance(value, list):
        return [(prefix, str(value))]
    return [(prefix, value)] if isinstance(value, int | float | str) else []
