"""One attention layer of every role on a Hopper GPU, at the released sizes: decoding batches, and a chunk of a prompt.

    roles     window 0, source of ratio 2, its reader, candidate source, its reader, re-scorer
    decoding  1, 16, 64, 128 sequences, one token each, the layer as the replay of one CUDA graph
    chunk     4,096 tokens of one prompt
    behind    P compressed positions: 1,024, 32,768, 131,072, 1,048,576, as far as the context goes

Time, share of the floor, and the time of every operation alone. What follows from a step's positions alone (angles, row
numbers) is worked out once for all layers of a kind: it is no part of a layer's time, and has a figure of its own. A
floor is what `openv41 explain` counts of the layer, bytes and products, at the rates measured here. First a small batch
is compared with the reference, operation by operation.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openv41.bench.agree import EACH, EACH_RULE, Beside
from openv41.bench.given import ROOM, Given, given, once
from openv41.bench.gpu import Ceilings, captured, ceilings, measure_gpu
from openv41.bench.layer import twin
from openv41.bench.results import Agreement, Figure, Report, Settings
from openv41.config import Config
from openv41.errors import InputError
from openv41.explain.cost import Cost, Machine
from openv41.explain.scene import Scene
from openv41.formats import FP8_TILES, WINDOW
from openv41.model.attention import Attention
from openv41.ops import BESIDES, Ops, choose
from openv41.parity.compare import Bounds, Sheet
from openv41.plan import LayerPlan, Role, plan_layers

BATCHES = (1, 16, 64, 128)
CHUNK = 4096
BEHIND = (1 << 10, 1 << 15, 1 << 17, 1 << 20)

SPLIT = Bounds(quantum=0.02, relative_rms_error=0.01)
"""Of attention: where a list is cut into pieces, their results are kept in bf16, and few values are quite equal."""

BESIDE = {name for protocol in BESIDES for name in vars(protocol) if not name.startswith("_")}
"""Operations that some sets have besides the protocol."""

SUMS = Bounds(quantum=1e-4, relative_rms_error=1e-5)
"""Of sums that stay in float32: no two of other order are equal."""

RULES = (
    "attention: every value within 2 % of its row's largest, 1 % root mean square; float32 sums: 0.01 % and 0.001 %; "
    "all else: " + EACH_RULE
)


def run(settings: Settings, progress: Callable[[str], None]) -> Report:
    """Raises `InputError` where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise InputError("ops hopper needs a CUDA GPU, and torch sees none: run it on one, or take --ops cpu")
    config, ops = Config.released(), choose("cuda", "hopper")
    layers = [layer_of(config, row.layer, ops, "cuda") for row in roles(config)]
    agreement = agreement_of(config, layers, choose("cuda", "reference"), 1500, progress)
    figures: list[Figure] = []
    if agreement.passed:
        progress("measuring what this GPU copies and multiplies")
        here = ceilings()
        machine = _machine(here)
        for layer in layers:
            for case in _cases(layer, config):
                if settings.only in case.name:
                    progress(case.name)
                    figures += _time(case, layer, config, machine, settings.repeats * 4)
    subject = f"{len(layers)} attention layers of the released model on {torch.cuda.get_device_name()}"
    return Report("attention", subject, settings, agreement, tuple(figures), ABOUT if agreement.passed else ())


ABOUT = (
    "Medians on the GPU, the L2 cache overwritten before each; a decoding layer is one CUDA graph. An operation's time",
    "is that of its calls alone, each the replay of a graph, less what the shortest graph takes; `between`: the rest.",
    "`once a step`: what the first layer works out of the positions for all like it (angles, rows of rings and pages),",
    "likewise less the shortest graph. It is no part of a layer's time; nor is the norm before, which rounds for it.",
)


def roles(config: Config) -> list[LayerPlan]:
    """A layer of each role, the first of its kind, readers of either ratio."""
    found: dict[tuple[Role, int], LayerPlan] = {}
    for row in plan_layers(config)[: config.n_layers]:
        found.setdefault((row.role, row.ratio), row)
    return list(found.values())


@torch.no_grad()
def layer_of(config: Config, number: int, ops: Ops, device: str) -> Attention:
    """A layer of random weights, of a size that keeps activations near 1."""
    with torch.device(device):
        layer = Attention(config, number, ops)
    generator = torch.Generator(device).manual_seed(number)
    for name, parameter in layer.named_parameters():
        if parameter.dtype == torch.float8_e4m3fn:
            codes, scale = FP8_TILES.pack(_normal(parameter.shape, parameter.shape[-1] ** -0.5, generator))
            parameter.copy_(codes)
            layer.get_parameter(name.removesuffix("weight") + "scale").copy_(scale)
        elif parameter.dtype != torch.float8_e8m0fnu:
            size = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.1
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(mean + _normal(parameter.shape, size, generator))
    return layer


def _normal(shape: torch.Size, size: float, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device) * size


# What is measured


def _cases(layer: Attention, config: Config) -> Iterator[Given]:
    ratio = layer.plan.ratio
    for behind in BEHIND if ratio else BEHIND[:1]:
        position = min(behind * max(1, ratio), config.context - CHUNK - ROOM)
        for batch in BATCHES:
            yield given(layer, config, position, batch, 1, f"{_named(layer)}, P {position // max(1, ratio):,}")
        yield given(layer, config, position, 1, CHUNK, f"{_named(layer)}, P {position // max(1, ratio):,}")


def _named(layer: Attention) -> str:
    ratio = f" of ratio {layer.plan.ratio}" if layer.plan.ratio else ""
    return f"layer {layer.layer}, {layer.plan.role.value}{ratio}"


# Compare


@torch.no_grad()
def agreement_of(
    config: Config,
    layers: list[Attention],
    judges: Ops,
    behind: int,
    progress: Callable[[str], None],
    sizes: tuple[tuple[int, int], ...] = ((3, 1), (1, 40)),
) -> Agreement:
    """Each layer's operations on three sequences and on a short chunk (`sizes`: sequences, tokens of each), beside the
    reference's from the same inputs."""
    sheet, compared, equal = Sheet(), 0, 0
    for layer in layers:
        progress(f"comparing {_named(layer)} with the reference")
        beside = Beside(judges, layer.ops)
        judge, simple = twin(layer, config, beside), twin(layer, config, _Simple(layer.ops))
        for batch, tokens in sizes:
            case = given(layer, config, behind * max(1, layer.plan.ratio), batch, tokens, "")
            case(judge)
            _compare_besides(beside, case, layer, simple)
        for name, results in beside.results.items():
            pairs = {f"{_named(layer)}: {name} {call}": pair for call, pair in enumerate(results)}
            bounds = SUMS if name == "linear_wide" else SPLIT if name.endswith("_attention") else EACH
            sheet.compare_all(pairs, bounds)
            compared += sum(got.numel() for got, _ in results)
            equal += sum(int((got == wanted).sum()) for got, wanted in results)
    failures = tuple(f"{finding.what}: {finding.text}" for finding in sheet.findings if not finding.passed)
    share = equal / max(1, compared)
    return Agreement(RULES, compared, share, share, failures)


def _compare_besides(beside: Beside, case: Given, layer: Attention, simple: Attention) -> None:
    """What the set has besides the protocol, against its own simple operations: what it begins with, and picks."""
    ring = case.cache.windows[layer.layer]
    begun = [one.begin(case.x, case.step, ring) for one in (layer, simple)]
    beside.results["query_window"].append((begun[0][0]().flatten(1), begun[1][0]().flatten(1)))
    window = [layer.ops.read(table[rows[:, -1]], WINDOW) for _, _, table, rows in begun]
    beside.results["query_window"].append((window[0], window[1]))
    if layer.indexer is not None:
        sights = [case(one)[1] for one in (layer, simple)]
        for name in ("picks", "rows"):
            picked, wanted = (getattr(sight, name) for sight in sights)
            beside.results["select"].append((picked.float(), wanted.float()))


# Measure


@torch.no_grad()
def _time(case: Given, layer: Attention, config: Config, machine: Machine, repeats: int) -> Iterator[Figure]:
    call = partial(case, layer)
    own = measure_gpu({"layer": captured(call) if case.decode else call}, repeats)["layer"]
    memory, compute = machine.seconds(cost_of(case, layer, config))
    floor = 1e6 * max(memory, compute)
    note = f"{floor / own.median / 10:.0f} % of the floor of {floor:.1f} us"
    yield Figure(case.name.replace(" ", "_"), case.name, own.median * 1e3, "us", own, note=note)
    parts = parts_of(case, layer, config, repeats)
    before = parts.pop("once a step", None)
    if before is not None:
        yield Figure(f"{case.name}_once".replace(" ", "_"), "  once a step, for all layers", before, "us")
    parts["between"] = own.median * 1e3 - sum(parts.values())
    for name, spent in sorted(parts.items(), key=lambda item: -item[1]):
        key, share = f"{case.name}_{name}".replace(" ", "_"), spent / own.median / 10
        yield Figure(key, f"  {name}", spent, "us", note=f"{share:.0f} %")


def cost_of(case: Given, layer: Attention, config: Config) -> Cost:
    """What `explain` counts of this layer's attention in such a call: of one sequence, and of a batch as many times
    that, but for the weights."""
    scene = Scene(config, "decode" if case.decode else "prefill", case.position, len(case.x) // case.batch, 1, slack=1)
    path = f"layers.{layer.layer}.attn"
    one = Cost.of(next(span for span in scene.record().walk() if span.path == path and span.method == "forward"))
    cost = one.times(case.batch)
    cost.nbytes["weights"] = one.nbytes["weights"]
    return cost


def parts_of(case: Given, layer: Attention, config: Config, repeats: int) -> dict[str, float]:
    """Microseconds of each operation's calls, each call alone; and of what a step works out `once a step`."""
    listener = _Listener(layer.ops)
    case(twin(layer, config, listener))
    least = torch.zeros((), device=case.x.device)
    calls = {"": captured(least.zero_), **{key: captured(call) for key, call in listener.calls.items()}}
    if case.decode:
        calls["once a step"] = captured(lambda: once(layer, case.fresh(), case.cache))
    times = measure_gpu(calls, max(5, repeats // 2))
    empty = times.pop("").median
    parts: dict[str, float] = defaultdict(float)
    for key, timing in times.items():
        name = key if key == "once a step" else key.partition(" ")[0]
        parts[name] += max(0.0, timing.median - empty) * 1e3
    return dict(parts)


class _Simple:
    """Operations without those that a set may have besides the protocol."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        if name in BESIDE:
            raise AttributeError(name)
        return getattr(self.ops, name)


class _Listener:
    """Operations that keep every call as something that can be called again."""

    def __init__(self, ops: Ops) -> None:
        self.ops, self.calls, self.counts = ops, dict[str, Callable[[], Any]](), defaultdict[str, int](int)

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.ops, name)
        return self._kept(name, own) if (name in vars(Ops) or name in BESIDE) and callable(own) else own

    def _kept(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            self.calls[f"{name} {self.counts[name]}"] = lambda: own(*args, **kwargs)
            return own(*args, **kwargs)

        return call


def _machine(here: Ceilings) -> Machine:
    rates = {"fp4_fp8": here.fp8_flops, "fp8": here.fp8_flops, "bf16": here.bf16_flops, "fp32": 67e12}
    return Machine("here", here.bytes_per_second, rates, {})
