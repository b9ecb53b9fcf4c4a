"""The ledger: how many parameters there are, counted from the modules, and the two published ways to add them up.

Scales of quantised weights are no parameters; a byte of fp4 codes holds two. The published sources draw two lines
differently. As the model runs (`runtime`), `wo_a` is held in bf16 without scales, each draft stage names the shared
embedding and head once more, and the image delimiters belong to vision. In the files (`checkpoint`), the delimiters lie
beside the embedding and count as backbone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from openv41.config import Config
from openv41.explain.components import COMPONENTS, Component, layers_with
from openv41.explain.counting import values_of
from openv41.explain.scene import counted_model
from openv41.plan import LayerPlan
from openv41.weights.names import Spec, published_tensors

Part = Literal["backbone", "engram", "draft", "vision"]
PARTS: tuple[Part, ...] = ("backbone", "engram", "draft", "vision")
SCALE = torch.float8_e8m0fnu
STACKED = ".ffn.experts.w"
"""In the path of a parameter that holds the same weight of all experts, each published by itself."""


@dataclass(frozen=True)
class Tally:
    """Parameters, scales beside them, bytes of both, and tensors under their published names."""

    parameters: int = 0
    scales: int = 0
    nbytes: int = 0
    tensors: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.parameters + other.parameters,
            self.scales + other.scales,
            self.nbytes + other.nbytes,
            self.tensors + other.tensors,
        )

    def to_dict(self) -> dict[str, int]:
        return {
            "parameters": self.parameters,
            "scales": self.scales,
            "bytes": self.nbytes,
            "tensors": self.tensors,
        }


def parameters_of(module: nn.Module, names: Iterable[str] | None = None) -> int:
    """Parameters below a module; with `names`, those of these submodules or parameters of it alone."""
    wanted = None if names is None else tuple(names)
    return sum(
        values_of(parameter)
        for name, parameter in module.named_parameters()
        if parameter.dtype != SCALE
        and (wanted is None or any(name == own or name.startswith(f"{own}.") for own in wanted))
    )


def runtime_tallies(config: Config) -> dict[Part, Tally]:
    """As the model runs, under the names of the published runtime."""
    model, _ = counted_model(config)
    tallies: dict[Part, Tally] = {part: Tally() for part in PARTS}
    for name, parameter in model.named_parameters():
        tensors = parameter.shape[0] if STACKED in name else 1
        widened = ".wo_a." in name and parameter.dtype.itemsize == 1
        if parameter.dtype == SCALE:
            own = Tally() if widened else Tally(0, parameter.numel(), parameter.nbytes, tensors)
        else:
            own = Tally(values_of(parameter), 0, parameter.nbytes * (2 if widened else 1), tensors)
        tallies[_part(name, delimiters="vision")] += own
    tallies["draft"] += Tally(tensors=2 * config.n_mtp_layers)  # names of the shared embedding and head, per stage
    return tallies


@lru_cache(maxsize=4)
def checkpoint_tallies(config: Config) -> dict[Part, Tally]:
    """As it lies in the files."""
    tallies: dict[Part, Tally] = {part: Tally() for part in PARTS}
    for name, spec in published_tensors(config).items():
        tallies[_part(name, delimiters="backbone")] += _tally(spec)
    return tallies


def _tally(spec: Spec) -> Tally:
    count = prod(spec.shape)
    if spec.dtype == "F8_E8M0":
        return Tally(0, count, spec.nbytes, 1)
    return Tally(count * (2 if spec.dtype == "I8" else 1), 0, spec.nbytes, 1)


def _part(name: str, delimiters: Part) -> Part:
    if ".engram." in name:
        return "engram"
    if name.startswith("mtp."):
        return "draft"
    if name.startswith("image_"):
        return delimiters
    return "vision" if name.startswith(("vision.", "aligner.")) else "backbone"


def total(tallies: dict[Part, Tally]) -> Tally:
    return sum(tallies.values(), Tally())


# By component


def count_of(config: Config, component: Component, row: LayerPlan) -> int:
    model, _ = counted_model(config)
    module = model.get_submodule(component.path(row))
    return sum(parameters_of(module, names) for _, names in component.rows(row))


def tree(config: Config) -> dict[str, Any]:
    """All components with the parameters they have in the whole model, and in how many places they stand."""
    nodes = [_node(config, "embedding"), _layers(config), _node(config, "head")]
    if config.n_mtp_layers:
        nodes.append(_draft_node(config))
    if config.vision_n_layers:
        nodes += [_node(config, name) for name in ("vision", "aligner", "delimiters")]
    return {
        "name": "model", "title": COMPONENTS["model"].title, "instances": 1,
        "parameters": sum(node["parameters"] for node in nodes), "inside": nodes,
    }  # fmt: skip


def _node(config: Config, name: str, rows: list[LayerPlan] | None = None, inside: Any = ()) -> dict[str, Any]:
    component = COMPONENTS[name]
    having = layers_with(config, component)
    if component.level in ("model", "picture"):
        count, instances = count_of(config, component, having[0]), 1
    else:
        having = [row for row in having if rows is None or row in rows]
        count = sum(count_of(config, component, row) for row in having) * component.per_layer
        instances = len(having) * component.per_layer
    return {
        "name": name, "title": component.title, "instances": instances, "parameters": count, "inside": list(inside),
    }  # fmt: skip


def _layers(config: Config) -> dict[str, Any]:
    rows = [row for row in layers_with(config, COMPONENTS["block"]) if row.half != "draft"]
    return _node(config, "block", rows, _layer_parts(config, rows))


def _draft_node(config: Config) -> dict[str, Any]:
    rows = layers_with(config, COMPONENTS["draft-stage"])
    stages = _node(config, "draft-stage", rows)
    heads = [_node(config, name) for name in ("markov-head", "confidence-head")]
    rest = [node for node in _layer_parts(config, rows)]
    known = sum(node["parameters"] for node in (*heads, *rest))
    way_in = {
        "name": "way in and last norm", "title": "from the model's taps; before the head", "instances": 1,
        "parameters": stages["parameters"] - known, "inside": [],
    }  # fmt: skip
    return {**stages, "name": "draft", "title": COMPONENTS["draft"].title, "inside": [way_in, *rest, *heads]}


def _layer_parts(config: Config, rows: list[LayerPlan]) -> list[dict[str, Any]]:
    parts = [
        _node(config, name, rows)
        for name in ("query", "window", "compressor", "indexer", "candidates", "sparse-attention", "output")
    ]
    model, _ = counted_model(config)
    norms = sum(parameters_of(model.get_submodule(row.name), ("attn_norm", "ffn_norm")) for row in rows)
    nodes = [
        _node(config, "attention", rows, [part for part in parts if part["instances"]]),
        _node(config, "hyper-connections", rows),
        {"name": "norms", "title": "before each sublayer", "instances": 2 * len(rows), "parameters": norms,
         "inside": []},
        _node(config, "experts", rows, [_node(config, "router", rows), *_networks(config, rows)]),
    ]  # fmt: skip
    engram = [row for row in rows if row.engram]
    return [_node(config, "engram", engram), *nodes] if engram else nodes


def _networks(config: Config, rows: list[LayerPlan]) -> list[dict[str, Any]]:
    """Of the experts, apart from the router: routed and shared ones."""
    model, _ = counted_model(config)
    counts = {
        name: sum(parameters_of(model.get_submodule(f"{row.name}.ffn"), [inner]) for row in rows)
        for name, inner in (("routed experts", "experts"), ("shared expert", "shared_experts"))
    }
    routed = sum(row.experts for row in rows)
    instances = {"routed experts": routed, "shared expert": len(rows) * config.n_shared_experts}
    return [
        {"name": name, "title": "SwiGLU networks", "instances": instances[name], "parameters": count, "inside": []}
        for name, count in counts.items()
        if count
    ]
