"""The components: where each stands in the model, what its parameters are called, and why it is there.

A component is one or more recorded calls (path and method), rows of parameters, and statements. A statement rests on
keys of the configuration and on source of this project, whose lines are looked up when it is shown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from openv41.config import Config
from openv41.errors import InputError
from openv41.explain.recorder import Span
from openv41.explain.words import (
    Statement,
    aligner_words,
    attention_words,
    block_words,
    candidate_words,
    compressor_words,
    confidence_words,
    delimiter_words,
    draft_words,
    embedding_words,
    engram_words,
    experts_words,
    head_words,
    indexer_words,
    markov_words,
    model_words,
    output_words,
    query_words,
    router_words,
    sparse_words,
    streams_words,
    vision_words,
    window_words,
)
from openv41.plan import LayerPlan, Role, plan_layers

Level = Literal["model", "layer", "draft", "picture"]
"""Once in the model, once (or not at all) a layer, in the draft, or run for pictures before the prompt."""

Call = tuple[str, str]
"""Path of a module, and the method of it that is recorded."""


@dataclass(frozen=True)
class Component:
    """`calls` and `rows` (label, parameter names below the module) are worked out for a layer's row of the plan;
    `within` is the component it is a part of; `path` the module whose parameters are meant."""

    name: str
    title: str
    level: Level
    within: str
    path: Callable[[LayerPlan], str]
    calls: Callable[[LayerPlan], list[Call]]
    rows: Callable[[LayerPlan], list[tuple[str, tuple[str, ...]]]]
    statements: Callable[[Config, LayerPlan], list[Statement]]
    stands: Callable[[Config, LayerPlan], bool] = lambda config, row: True
    per_layer: int = 1


# Parameters by name


def _attention_rows(row: LayerPlan) -> list[tuple[str, tuple[str, ...]]]:
    indexer = "indexer (re-scored)" if row.role is Role.RESCORER else "indexer (with keys)"
    rows = [
        ("query compression", ("wq_a", "q_norm")),
        ("query heads", ("wq_b",)),
        ("window keys and values", ("wkv", "kv_norm")),
        (f"compressor (ratio {row.ratio})", ("compressor",)),
        (indexer, ("indexer",)),
        ("sink", ("attn_sink",)),
        ("grouped output", ("wo_a", "wo_b")),
    ]
    return rows


def _is_draft(row: LayerPlan) -> bool:
    return row.half == "draft"


def _attn(row: LayerPlan) -> str:
    return f"{row.name}.attn"


def _attention_call(row: LayerPlan) -> list[Call]:
    return [(_attn(row), "attend" if _is_draft(row) else "forward")]


def _no_rows(row: LayerPlan) -> list[tuple[str, tuple[str, ...]]]:
    return []


def _prefixed(prefix: str) -> Callable[[LayerPlan], str]:
    return lambda row: prefix


def _last_stage(config: Config, row: LayerPlan) -> bool:
    return _is_draft(row) and row.layer == config.n_layers + config.n_mtp_layers - 1


def _below(name: str) -> Callable[[LayerPlan], str]:
    return lambda row: f"{row.name}.{name}"


def _part(name: str, title: str, calls: Any, names: tuple[str, ...], words: Any, stands: Any = None) -> Component:
    """A part of attention."""
    return Component(
        name, title, "layer", "attention", _attn, calls, lambda row: [(title, names)] if names else [], words,
        stands or (lambda config, row: True),
    )  # fmt: skip


COMPONENTS: dict[str, Component] = {
    one.name: one
    for one in (
        Component(
            "model", "The whole model", "model", "", _prefixed(""), lambda row: [("", "")], _no_rows, model_words,
        ),
        Component(
            "embedding", "Embedding", "model", "model", _prefixed("embed"), lambda row: [("", "begin")],
            lambda row: [("embedding", ("weight",))], embedding_words,
        ),
        Component(
            "block", "A layer", "layer", "model", lambda row: row.name,
            lambda row: [(row.name, "descend" if _is_draft(row) else "forward")],
            lambda row: [
                ("engram", ("engram",)),
                ("hyper-connections", ("hc_attn", "hc_ffn")),
                ("norms", ("attn_norm", "ffn_norm")),
                ("attention", ("attn",)),
                ("router", ("ffn.gate",)),
                ("routed experts", ("ffn.experts",)),
                ("shared expert", ("ffn.shared_experts",)),
                ("way in from the model", ("main_proj", "main_norm")),
                ("norm before the head", ("norm",)),
                ("Markov head", ("markov_head",)),
                ("confidence head", ("confidence_head",)),
            ],
            block_words,
        ),
        Component(
            "engram", "Engram: n-gram memory", "layer", "block", _below("engram"),
            lambda row: [(f"{row.name}.engram", "forward")],
            lambda row: [("table", ("embed",)), ("keys and value", ("wkv",)), ("gate", ("q_weight", "k_weight"))],
            engram_words, lambda config, row: row.engram,
        ),
        Component(
            "hyper-connections", "Hyper-connection of a sublayer", "layer", "block", _below("hc_attn"),
            lambda row: [(f"{row.name}.hc_attn", "read"), (f"{row.name}.hc_attn", "write")],
            lambda row: [("mix", ("fn", "base", "scale"))], streams_words, per_layer=2,
        ),
        Component(
            "attention", "Attention", "layer", "block", _attn, _attention_call, _attention_rows, attention_words,
        ),
        _part("query", "query", lambda row: [(_attn(row), "query")], ("wq_a", "q_norm", "wq_b"), query_words),
        _part(
            "window", "window keys and values", lambda row: [(_attn(row), "stored" if _is_draft(row) else "window")],
            ("wkv", "kv_norm"), window_words,
        ),
        _part(
            "compressor", "compressor", lambda row: [(f"{_attn(row)}.compressor", "forward")], ("compressor",),
            compressor_words, lambda config, row: row.latents_from == row.layer,
        ),
        _part(
            "indexer", "indexer",
            lambda row: [(f"{_attn(row)}.indexer", "forward"), (f"{_attn(row)}.indexer", "store_keys")], ("indexer",),
            indexer_words, lambda config, row: row.picks_from == row.layer,
        ),
        _part(
            "candidates", "candidate stage", lambda row: [(f"{_attn(row)}.indexer", "ops.pick_blocks")], (),
            candidate_words, lambda config, row: row.publishes_candidates,
        ),
        _part(
            "sparse-attention", "sparse attention", lambda row: [(_attn(row), "ops.sparse_attention")], ("attn_sink",),
            sparse_words,
        ),
        _part("output", "grouped output", lambda row: [(_attn(row), "output")], ("wo_a", "wo_b"), output_words),
        Component(
            "router", "Router", "layer", "experts", _below("ffn.gate"),
            lambda row: [(f"{row.name}.ffn.gate", "forward")],
            lambda row: [("scores", ("weight",)), ("bias", ("bias",)), ("bias for image tokens", ("bias_vl",))],
            router_words,
        ),
        Component(
            "experts", "Experts", "layer", "block", _below("ffn"), lambda row: [(f"{row.name}.ffn", "forward")],
            lambda row: [
                ("router", ("gate",)), ("routed experts", ("experts",)), ("shared expert", ("shared_experts",)),
            ],
            experts_words,
        ),
        Component(
            "head", "Head", "model", "model", _prefixed(""), lambda row: [("", "logits")],
            lambda row: [("norm", ("norm",)), ("head", ("head",))], head_words,
        ),
        Component(
            "draft", "DSpark, the draft", "draft", "model", _prefixed("mtp"), lambda row: [("", "")], _no_rows,
            draft_words,
        ),
        Component(
            "draft-stage", "A draft stage", "draft", "draft", lambda row: row.name, lambda row: [(row.name, "descend")],
            lambda row: [
                ("hyper-connections", ("hc_attn", "hc_ffn")),
                ("norms", ("attn_norm", "ffn_norm", "norm")),
                ("attention", ("attn",)),
                ("router", ("ffn.gate",)),
                ("routed experts", ("ffn.experts",)),
                ("shared expert", ("ffn.shared_experts",)),
                ("way in from the model", ("main_proj", "main_norm")),
                ("Markov head", ("markov_head",)),
                ("confidence head", ("confidence_head",)),
            ],
            draft_words, lambda config, row: _is_draft(row),
        ),
        Component(
            "markov-head", "Markov head of the draft", "draft", "draft-stage", _below("markov_head"),
            lambda row: [(f"{row.name}.markov_head", "embedding"), (f"{row.name}.markov_head.head", "forward")],
            lambda row: [("embedding", ("embed",)), ("head", ("head",))], markov_words, _last_stage,
        ),
        Component(
            "confidence-head", "Confidence head of the draft", "draft", "draft-stage", _below("confidence_head"),
            lambda row: [(f"{row.name}.confidence_head", "forward")], lambda row: [("projection", ("proj",))],
            confidence_words, _last_stage,
        ),
        Component(
            "vision", "Vision tower", "picture", "model", _prefixed("vision"), lambda row: [("vision", "forward")],
            lambda row: [("patches", ("patch_embed",)), ("blocks", ("blocks",)), ("norm", ("norm",))], vision_words,
            lambda config, row: config.vision_n_layers > 0,
        ),
        Component(
            "aligner", "Aligner", "picture", "model", _prefixed("aligner"), lambda row: [("aligner", "forward")],
            lambda row: [("first map", ("w1",)), ("second map", ("w2",))], aligner_words,
            lambda config, row: config.vision_n_layers > 0,
        ),
        Component(
            "delimiters", "Image delimiters", "picture", "model", _prefixed(""), lambda row: [],
            lambda row: [(name, (name,)) for name in ("image_start", "image_newline", "image_end")], delimiter_words,
            lambda config, row: config.vision_n_layers > 0,
        ),
    )
}  # fmt: skip


def component_named(name: str) -> Component:
    """Raises `InputError` for a name that is none."""
    if name not in COMPONENTS:
        raise InputError(f"no component {name!r}: there are {', '.join(COMPONENTS)}")
    return COMPONENTS[name]


def layers_with(config: Config, component: Component) -> list[LayerPlan]:
    """The rows of the plan in which a component stands: of the draft for draft components, else of all."""
    rows = plan_layers(config)
    if component.level == "draft":
        rows = tuple(row for row in rows if _is_draft(row))
    return [row for row in rows if component.stands(config, row)]


def row_for(config: Config, component: Component, layer: int | None) -> LayerPlan:
    """The layer asked for, or the first in which the component stands. Raises `InputError` where it stands in none, or
    not in this one, or there is no such layer, or it is no part of a layer."""
    rows, having = plan_layers(config), layers_with(config, component)
    if not having:
        raise InputError(f"this configuration has no {component.name}: its part is switched off")
    if layer is None:
        return having[0]
    if component.level in ("model", "picture"):
        raise InputError(f"{component.name} stands once, in no layer: leave the layer out, got {layer}")
    if not 0 <= layer < len(rows):
        raise InputError(
            f"layer must be 0 to {len(rows) - 1} ({config.n_layers} layers, then {config.n_mtp_layers} draft stages), "
            f"got {layer}"
        )
    row = rows[layer]
    if row not in having:
        numbers = ", ".join(str(one.layer) for one in having)
        raise InputError(f"layer {layer} ({row.role.value}) has no {component.name}: layers with one are {numbers}")
    return row


# Which component a call belongs to, for splitting costs


def component_of(span: Span, above: str) -> str:
    """The finest component of a recorded call; that of the call around it where it has none of its own."""
    path, method = span.path, span.method
    if path.startswith("mtp"):
        return _draft_component(path, method, above)
    last = path.rpartition(".")[2]
    if path == "":
        return {"begin": "embedding", "logits": "head"}.get(method, above)
    if last == "attn":
        parts = {"publish": "compressor", "ops.sparse_attention": "sparse-attention"}
        parts |= {part: part for part in ("query", "window", "output")}
        return parts.get(method, above)
    named = {
        "compressor": "compressor", "indexer": "indexer", "engram": "engram", "hc_attn": "hyper-connections",
        "hc_ffn": "hyper-connections", "attn_norm": "norms", "ffn_norm": "norms", "gate": "router",
        "experts": "routed experts", "shared_experts": "shared expert", "vision": "vision", "aligner": "aligner",
    }  # fmt: skip
    if method == "ops.pick_blocks":
        return "candidates"
    return named.get(last, above)


def _draft_component(path: str, method: str, above: str) -> str:
    if path == "mtp":
        return {"vectors": "draft: way in", "logits": "draft: head", "next": "draft: next"}.get(method, above)
    if path.endswith("confidence_head"):
        return "draft: confidence head"
    return "draft: stages" if method == "descend" else above
