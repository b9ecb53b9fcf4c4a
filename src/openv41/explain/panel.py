"""The panel: one component in one call, everything that is asked about it, as one value."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from openv41.config import Config
from openv41.errors import InputError
from openv41.explain.components import (
    COMPONENTS,
    Call,
    Component,
    component_named,
    component_of,
    layers_with,
    row_for,
)
from openv41.explain.cost import Cost, Machine, Parts, last_chunk, machine_named, of_prompt, split
from openv41.explain.counting import values_in
from openv41.explain.ledger import count_of, parameters_of, tree
from openv41.explain.recorder import FORMS, Span, Touched, Value, tables
from openv41.explain.scene import Mode, Scene, counted_model, record_picture
from openv41.explain.words import evidence_of
from openv41.inputs.image import plan_image
from openv41.plan import LayerPlan
from openv41.state import Ring
from openv41.state.kinds import bytes_of_slot

CHUNK = 4096
"""Tokens of a prompt that are read in one call, where nothing else is asked."""


@dataclass(frozen=True)
class Question:
    """What is asked. `tokens`: of the call, a sequence each (decode: 1; prefill: the prompt or chunk); `chunk`: a
    longer prompt of the whole model is read in such pieces; `image`: (width, height) in pixels."""

    component: str
    layer: int | None = None
    mode: Mode = "decode"
    position: int | None = None
    tokens: int | None = None
    batch: int = 1
    slack: int = 0
    prefill: str = "halo"
    chunk: int = CHUNK
    image: tuple[int, int] | None = None


@dataclass
class Panel:
    """Ready to be shown; `to_dict` is what `--json` prints."""

    question: Question
    title: str
    layer: int | None
    role: str | None
    mode: str
    position: int
    tokens: int
    batch: int
    inputs: list[Value]
    outputs: list[Value]
    parameters: dict[str, Any]
    state: list[dict[str, Any]]
    cost: dict[str, Any]
    parts: list[dict[str, Any]]
    evidence: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    image: dict[str, Any] | None = None
    what_if: dict[str, Any] | None = None

    def __str__(self) -> str:
        from openv41.explain.render import as_text  # which is made of panels

        return as_text(self)

    @property
    def why(self) -> str:
        return " ".join(one["statement"] for one in self.evidence)

    def to_dict(self) -> dict[str, Any]:
        document = {
            "component": self.question.component,
            "title": self.title,
            "layer": self.layer,
            "role": self.role,
            "mode": self.mode,
            "position": self.position,
            "tokens": self.tokens,
            "batch": self.batch,
            "inputs": [_value(value) for value in self.inputs],
            "outputs": [_value(value) for value in self.outputs],
            "parameters": self.parameters,
            "state": self.state,
            "cost": self.cost,
            "parts": self.parts,
            "why": self.why,
            "evidence": self.evidence,
            "notes": self.notes,
        }
        if self.image is not None:
            document["image"] = self.image
        if self.what_if is not None:
            document["what_if"] = self.what_if
        return document


def _value(value: Value) -> dict[str, Any]:
    return {"name": value.name, "shape": list(value.shape), "axes": list(value.axes), "dtype": value.dtype}


def explain(
    config: Config,
    question: Question,
    machine: Machine | str = "h200",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Panel:
    """One component in one call. Raises `InputError` for a component, layer, position or size that there is not."""
    machine = machine_named(machine) if isinstance(machine, str) else machine
    component = component_named(question.component)
    row = row_for(config, component, question.layer)
    if component.level == "picture":
        return _picture(config, question, component, row, machine)
    if question.image is not None:
        raise InputError(f"an image's size goes with vision and aligner, not with {component.name}: leave it out")
    scene, prompt = _scene(config, question, component, row)
    whole, roots, parts = component.name in ("model", "draft"), [], {}
    if prompt:
        parts = of_prompt(config, prompt, scene.tokens, scene.batch, question.prefill, component_of, progress)
        roots = [last_chunk(config, prompt, scene.tokens, scene.batch, question.prefill)]
    else:
        roots = [_root(scene, component, row, question)]
        parts = split(roots[0], component_of) if whole else {}
    spans = [span for root in roots for span in _spans(root, component.calls(row))]
    spans = _first(spans) if component.within == "draft-stage" else spans
    inputs, outputs = _edges(spans, roots, component, row)
    cost = sum(parts.values(), Cost()) if whole else sum((Cost.of(span) for span in spans), Cost())
    of_layer = component.level in ("layer", "draft") and component.name != "draft"
    tokens = prompt or scene.tokens
    if prompt:  # its logits are those of the last chunk
        inputs = [Value("ids", (scene.batch, prompt), ("batch", "position"), "int64")]
    return Panel(
        question,
        component.title,
        row.layer if of_layer else None,
        row.role.value if of_layer else None,
        question.mode,
        scene.position,
        tokens,
        scene.batch,
        inputs,
        outputs,
        _parameters(config, component, row),
        _state(config, component, row, tokens, scene, cost),
        cost.to_dict(machine),
        _shares(parts, machine) if whole else [],
        evidence_of(config, component.statements(config, row)),
        _notes(component, question, bool(prompt)) + machine.figures(cost),
    )


# The call


def _scene(config: Config, question: Question, component: Component, row: LayerPlan) -> tuple[Scene, int]:
    """The call to record; and the tokens of a whole prompt, if it is one that takes several such calls, or 0."""
    draft = row.half == "draft" and component.level != "model"
    batch, slack = question.batch, question.slack
    if question.mode == "decode":
        position = min(1000, config.context - 1) if question.position is None else question.position
        tokens = 1 if draft or question.tokens is None else question.tokens  # the draft's block is its own
        return Scene(config, "decode", position, tokens, batch, slack), 0
    if draft:
        raise InputError(
            "the draft has no prefill, prompts only leave their vectors in its rings: ask with mode decode"
        )
    position = question.position or 0
    tokens = max(1, min(CHUNK, config.context - position)) if question.tokens is None else question.tokens
    if component.name != "model" or tokens <= question.chunk:
        return Scene(config, "prefill", position, tokens, batch, slack), 0
    if position:
        raise InputError(
            f"a prompt longer than a chunk of {question.chunk} tokens starts at position 0, got {position}: "
            "raise the chunk, or ask for fewer tokens"
        )
    if tokens > config.context:
        raise InputError(f"a prompt of {tokens} tokens must fit the context of {config.context}: ask for fewer")
    return Scene(config, "prefill", 0, question.chunk, batch, slack), tokens


def _root(scene: Scene, component: Component, row: LayerPlan, question: Question) -> Span:
    if row.half == "draft" and component.level != "model":
        return scene.record_draft()
    halo = component.name == "model" and scene.mode == "prefill" and question.prefill == "halo"
    return scene.record("halo" if halo else "full")


def _spans(root: Span, calls: list[Call]) -> list[Span]:
    if calls == [("", "")]:
        return [root]
    return [span for span in root.walk() if (span.path, span.method) in calls]


def _first(spans: list[Span]) -> list[Span]:
    """The first of several equal calls: the heads of the draft are called once a drafted token."""
    seen: dict[Call, Span] = {}
    for span in spans:
        seen.setdefault((span.path, span.method), span)
    return list(seen.values())


def _edges(
    spans: list[Span], roots: list[Span], component: Component, row: LayerPlan
) -> tuple[list[Value], list[Value]]:
    if component.name in ("model", "draft"):
        return _outer(roots, component)
    if component.name == "candidates":
        attention = _spans(roots[0], [(f"{row.name}.attn", "forward")])[0]
        masks = [value for value in attention.outputs if value.name == "candidates"]
        scores = [Value("index scores", value.shape, value.axes, "bf16") for value in masks]
        return scores, masks
    if component.name == "indexer":
        spans = [span for span in spans if span.method == "forward"]
    inputs = [value for span in spans for value in span.inputs]
    outputs = [value for span in spans for value in span.outputs]
    made = {value.name for value in outputs}
    # What one call of a pair makes and the other takes is shown where it is made.
    inputs = [v for v in inputs if len(spans) == 1 or v.name not in made or v.name in ("streams", "pre")]
    return _once(inputs), _once(outputs)


def _outer(roots: list[Span], component: Component) -> tuple[list[Value], list[Value]]:
    """Of the whole model, or the draft: ids in, logits out."""
    if not roots:
        return [], []
    first, last = ("begin", "logits") if component.name == "model" else ("forward", "next")
    begins = [span for span in roots[0].walk() if span.method == first and span.path in ("", "mtp")]
    ends = [span for span in roots[0].walk() if span.method == last and span.path in ("", "mtp")]
    inputs = begins[0].inputs if begins else []
    outputs = [value for value in (ends[-1].outputs if ends else [])]
    if outputs and component.name == "model":
        outputs = [Value("logits", outputs[0].shape, outputs[0].axes, outputs[0].dtype)]
    return _once(inputs), _once(outputs)


def _once(values: Iterable[Value]) -> list[Value]:
    return list({value.name: value for value in values}.values())


# Parameters


def _parameters(config: Config, component: Component, row: LayerPlan) -> dict[str, Any]:
    if component.name in ("model", "draft"):
        if component.name == "model":
            rows = [(node["name"], node["parameters"]) for node in tree(config)["inside"]]
        else:
            stage = COMPONENTS["draft-stage"]
            rows = [(row.name, count_of(config, stage, row)) for row in layers_with(config, stage)]
        per_instance, instances = sum(count for _, count in rows), 1
        numbers: list[int] = []
    else:
        model, _ = counted_model(config)
        module = model.get_submodule(component.path(row))
        counts = [(label, parameters_of(module, names)) for label, names in component.rows(row)]
        rows = [(label, count) for label, count in counts if count]
        per_instance = sum(count for _, count in rows) * component.per_layer
        if component.per_layer > 1:
            rows = [(f"{label} ({component.per_layer} a layer)", count * component.per_layer) for label, count in rows]
        numbers = [] if component.level in ("model", "picture") else _instances(config, component, row, per_instance)
        instances = max(1, len(numbers))
    return {
        "rows": [{"name": name, "parameters": count} for name, count in rows],
        "per_instance": per_instance,
        "instances": numbers,
        "total": per_instance * instances,
    }


def _instances(config: Config, component: Component, row: LayerPlan, parameters: int) -> list[int]:
    """Layers in which an equal one stands: of the same role, ratio and size."""
    return [
        one.layer
        for one in layers_with(config, component)
        if (one.role, one.ratio, one.half == "draft") == (row.role, row.ratio, row.half == "draft")
        and count_of(config, component, one) * component.per_layer == parameters
    ]


# State


def _state(
    config: Config, component: Component, row: LayerPlan, tokens: int, scene: Scene, cost: Cost
) -> list[dict[str, Any]]:
    """What the call touches, and the layer's own window: a sequence each, in values and in bytes as stored."""
    touched: dict[tuple[str, int], Touched] = {
        (kind, layer): Touched(cost.state[kind, layer, "state_read"], cost.state[kind, layer, "state_written"])
        for kind, layer, _ in cost.state
    }
    keys = set(touched)
    if component.name in ("attention", "block", "window", "sparse-attention") and row.half != "draft":
        keys.add(("window", row.layer))
    position = scene.position
    length = position + tokens
    if component.name == "model":
        return _all_state(config, scene, touched, length)
    place = Scene(config, "decode", 0, 1, 1, scene.slack).cache()
    entries = []
    for kind, layer, table in tables(place):
        if (kind, layer) in keys:
            one = touched.get((kind, layer), Touched())
            entry = _entry(kind, _keeper(config, layer), table, length)
            entries.append(entry | {"reads": one.read // scene.batch, "writes": one.written // scene.batch})
            if isinstance(table, Ring):
                entry = entries[-1]
                entry["slots"] = table.size
                entry["held"] = min(length, table.size)
                entry["writes_slot"] = position % table.size if one.written else None
    return entries


def _keeper(config: Config, layer: int) -> str:
    if layer < 0:
        return "the model"
    return f"layer {layer}" if layer < config.n_layers else f"draft stage {layer - config.n_layers}"


def _entry(kind: str, keeper: str, table: Any, length: int) -> dict[str, Any]:
    rows = table.size if isinstance(table, Ring) else length // table.ratio
    width = table.table.shape[-1]
    row_bytes = width * table.table.dtype.itemsize
    return {"name": kind, "kept_by": keeper, "values": rows * _width(kind, table), "bytes": rows * row_bytes}


def _width(kind: str, table: Any) -> int:
    form = FORMS.get(kind)
    width: int = table.table.shape[-1]
    return width if form is None else values_in(form, width)


def _all_state(
    config: Config, scene: Scene, touched: dict[tuple[str, int], Touched], length: int
) -> list[dict[str, Any]]:
    """By kind, over all layers."""
    place = Scene(config, "decode", 0, 1, 1, scene.slack).cache()
    per_token = bytes_of_slot(config).per_token
    kinds: dict[str, dict[str, Any]] = {}
    for kind, layer, table in tables(place):
        entry = _entry(kind, "", table, length)
        total = kinds.setdefault(kind, {"name": kind, "layers": [], "values": 0, "bytes": 0, "reads": 0, "writes": 0})
        one = touched.get((kind, layer), Touched())
        total["layers"].append(layer)
        total["values"] += entry["values"]
        total["bytes"] += entry["bytes"]
        total["reads"] += one.read // scene.batch
        total["writes"] += one.written // scene.batch
    for total in kinds.values():
        layers = total.pop("layers")
        keepers = [_keeper(config, layer) for layer in layers]
        total["kept_by"] = keepers[0] if len(keepers) == 1 else f"{len(keepers)} layers" if len(keepers) > 6 else (
            f"layers {', '.join(map(str, layers))}"
        )  # fmt: skip
        total["bytes_per_token"] = per_token.get(total["name"], 0)
    return list(kinds.values())


# Pictures


def _picture(config: Config, question: Question, component: Component, row: LayerPlan, machine: Machine) -> Panel:
    width, height = question.image or (1344, 896)
    if width < 1 or height < 1:
        raise InputError(f"an image has at least 1 x 1 pixels, got {width} x {height}")
    Scene(config, "decode", question.position or 0, question.tokens or 1)  # what is impossible elsewhere is so here
    size = plan_image(width, height, config)
    root = record_picture(config, size.rows, size.columns, question.batch)
    spans = _spans(root, component.calls(row))
    inputs, outputs = _once(v for s in spans for v in s.inputs), _once(v for s in spans for v in s.outputs)
    image = {
        "width": width, "height": height, "resized": [size.width, size.height], "patches": [size.rows, size.columns],
        "cells": [size.cell_rows, size.cell_columns], "tokens": size.tokens,
    }  # fmt: skip
    cost = sum((Cost.of(span) for span in spans), Cost())
    return Panel(
        question, component.title, None, None, "prefill", 0, size.tokens, question.batch, inputs, outputs,
        _parameters(config, component, row), [], cost.to_dict(machine), [],
        evidence_of(config, component.statements(config, row)),
        _notes(component, question, False) + machine.figures(cost), image,
    )  # fmt: skip


# Shares, notes


def _shares(parts: Parts, machine: Machine) -> list[dict[str, Any]]:
    flops, nbytes = (sum(getattr(cost, name) for cost in parts.values()) for name in ("total_flops", "total_bytes"))
    ordered = sorted(parts.items(), key=lambda item: -item[1].total_bytes)
    return [
        {
            "component": name,
            **cost.to_dict(machine),
            "flops_share": round(cost.total_flops / flops, 6) if flops else 0.0,
            "bytes_share": round(cost.total_bytes / nbytes, 6) if nbytes else 0.0,
        }
        for name, cost in ordered
        if cost.total_flops or cost.total_bytes
    ]


def _notes(component: Component, question: Question, long: bool) -> list[str]:
    notes = ["products only: norms, softmaxes and the mixing of streams are not counted as FLOPs"]
    if component.name in ("model", "block", "experts", "draft", "draft-stage"):
        notes.append("experts read: expected, all chosen equally often")
    if component.level in ("layer", "model") and component.name not in ("embedding", "head"):
        notes.append("state in packed records; a row that several tokens of a sequence read counts once")
    if component.name == "model":
        notes.append("the floor takes one machine with everything in its memory, Engram's tables as well")
        if question.mode == "prefill":
            notes.append(f"prefill={question.prefill}" + (f", in chunks of {question.chunk} tokens" if long else ""))
    return notes
