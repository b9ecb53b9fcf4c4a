"""One attention layer of every role on a Hopper GPU, at the released sizes: decoding batches, and a chunk of a prompt.

    roles     window 0, source of ratio 2, its reader, candidate source, its reader, re-scorer
    decoding  1, 16, 64, 128 sequences, one token each, the layer as the replay of one CUDA graph
    chunk     4,096 tokens of one prompt
    behind    P compressed positions: 1,024, 32,768, 131,072, 1,048,576, as far as the context goes

Time, share of the floor, and the time of every operation alone. A floor is what `openv41 explain` counts of the layer,
bytes and products, at the rates measured here. First a small batch is compared with the reference, operation by
operation.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openv41.bench.agree import EACH, EACH_RULE, Beside
from openv41.bench.gpu import Ceilings, captured, ceilings, measure_gpu
from openv41.bench.layer import twin, values
from openv41.bench.results import Agreement, Figure, Report, Settings
from openv41.config import Config
from openv41.errors import InputError
from openv41.explain.cost import Cost, Machine
from openv41.explain.scene import Scene
from openv41.formats import FP8_TILES, INDEX, LATENT, WINDOW, BlockFormat
from openv41.model.attention import Attention
from openv41.ops import Ops, choose
from openv41.parity.compare import Bounds, Sheet
from openv41.plan import LayerPlan, Role, plan_layers
from openv41.state import Cache, Sight, Standing, Step

BATCHES = (1, 16, 64, 128)
CHUNK = 4096
BEHIND = (1 << 10, 1 << 15, 1 << 17, 1 << 20)
ROOM = 64
"""Tokens that a sequence may grow by while it is measured."""

FILLING = 1 << 24
"""Rows of a table that are filled at a time."""

SPLIT = Bounds(quantum=0.02, relative_rms_error=0.01)
"""Of attention: where a list is cut into pieces, their results are kept in bf16, and few values are quite equal."""

RULES = "attention: every value within 2 % of its row's largest, 1 % root mean square; all else: " + EACH_RULE


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


# What a layer is given


@dataclass(frozen=True)
class Given:
    """A layer's work: call it, and it runs the layer once. It may be run again and again: the same rows are written."""

    name: str
    x: Tensor
    step: Callable[[], Step]
    sight: Sight
    cache: Cache
    position: int
    batch: int
    decode: bool

    def __call__(self, layer: Attention) -> tuple[Tensor, Sight]:
        return layer(self.x, self.step(), self.sight, self.cache)


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


def given(layer: Attention, config: Config, position: int, batch: int, tokens: int, name: str) -> Given:
    """`batch` sequences of random rows, `position` tokens each, and `tokens` more to come, on the layer's device."""
    plan, device = plan_layers(config), layer.attn_sink.device
    source = layer.plan.latents_from
    kept = sorted({layer.layer} | (set() if source is None else {source}))
    room = batch * (position + tokens + ROOM + config.window_size)
    cache = Cache(config, batch, room, 1, device=device, layers=[plan[one] for one in kept], store="packed")
    for _ in range(batch):
        slot = cache.open()
        cache.pages.reserve([(slot, 0, position + tokens)])
        cache.lengths[slot] = cache.highest[slot] = position
    _randomise(cache.windows[layer.layer].table, WINDOW)
    sight = Sight()
    if source is not None:
        state = cache.sources[source]
        _randomise(state.latents.table, LATENT)
        _randomise(state.keys.table, INDEX)
        sight = _handed_down(layer, config, cache, source, position, batch, tokens)
    x = values("x", batch * tokens, config.dim).to(device)
    step: Callable[[], Step]
    if tokens == 1:
        standing = Standing(list(range(batch)), [position] * batch, device, ROOM)
        layer.rotary.hold(position + ROOM, standing.position.device)
        step = standing.step
    else:
        chunk = cache.step([(slot, [0] * tokens) for slot in range(batch)])
        step = partial(_same, chunk)
    what = f"decode, batch {batch}" if tokens == 1 else f"chunk of {tokens:,}"
    return Given(f"{name}, {what}", x, step, sight, cache, position, batch, tokens == 1)


def _same(step: Step) -> Step:
    return step


def _randomise(table: Tensor, form: BlockFormat) -> None:
    """Random records: any codes but those of NaN, scales that keep values near 1."""
    generator = torch.Generator(table.device).manual_seed(1)
    flat = table.view(-1, table.shape[-1])
    width = next(w for w in (2**n for n in range(5, 16)) if form.record_bytes(w) == table.shape[-1])
    codes = width // form.codes_per_byte
    scale = {WINDOW.name: 120, LATENT.name: 0x28, INDEX.name: 126}[form.name]
    for part in flat.split(max(1, FILLING)):
        bytes_ = torch.randint(0, 256, (len(part), codes), generator=generator, device=table.device, dtype=torch.uint8)
        if form is WINDOW:
            bytes_ &= 0xB7  # exponents of e4m3 below its largest
        part[:, :codes], part[:, codes:] = bytes_, scale


def _handed_down(
    layer: Attention, config: Config, cache: Cache, source: int, position: int, batch: int, tokens: int
) -> Sight:
    """What the source would have handed down: its tables; for a reader random picks; for a re-scorer random blocks."""
    state, ratio = cache.sources[source], layer.plan.ratio
    sight = Sight(state.latents, state.keys)
    visible, n, device = max(1, position // ratio), batch * tokens, state.latents.table.device
    generator = torch.Generator(device).manual_seed(2)
    if layer.plan.role is Role.READER:
        drawn = torch.randint(0, visible, (n, config.index_topk), generator=generator, device=device).sort(1).values
        slot = torch.arange(batch, device=device).repeat_interleave(tokens)
        sight = sight.having(picks=drawn, rows=state.latents.rows(slot, drawn))
    if layer.plan.within is not None:
        seen = (torch.arange(position, position + tokens, device=device).repeat(batch) + 1) // ratio
        count = -(-(position + tokens + ROOM) // (ratio * config.candidate_block_size)) + 1
        number = torch.arange(count, device=device)
        order = torch.rand(n, count, generator=generator, device=device)
        order = order.masked_fill(number * config.candidate_block_size >= seen.unsqueeze(1), -1.0)
        order = order.scatter(1, ((seen - 1) // config.candidate_block_size).clamp_min(0).unsqueeze(1), 2.0)
        kept = order.topk(min(config.candidate_topk_blocks, count), 1).indices
        sight = sight.having(candidates=torch.zeros_like(order, dtype=torch.bool).scatter(1, kept, True) & (order >= 0))
    return sight


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
        judge, by_runs = twin(layer, config, beside), twin(layer, config, _ByRuns(layer.ops))
        for batch, tokens in sizes:
            case = given(layer, config, behind * max(1, layer.plan.ratio), batch, tokens, "")
            case(judge)
            if layer.indexer is not None:
                picked, wanted = (case(one)[1].picks for one in (layer, by_runs))
                assert picked is not None and wanted is not None
                beside.results["select"].append((picked.float(), wanted.float()))
        for name, results in beside.results.items():
            pairs = {f"{_named(layer)}: {name} {call}": pair for call, pair in enumerate(results)}
            sheet.compare_all(pairs, SPLIT if name == "sparse_attention" else EACH)
            compared += sum(got.numel() for got, _ in results)
            equal += sum(int((got == wanted).sum()) for got, wanted in results)
    failures = tuple(f"{finding.what}: {finding.text}" for finding in sheet.findings if not finding.passed)
    share = equal / max(1, compared)
    return Agreement(RULES, compared, share, share, failures)


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
    """Microseconds of each operation's calls, each call alone."""
    listener = _Listener(layer.ops)
    case(twin(layer, config, listener))
    least = torch.zeros((), device=case.x.device)
    calls = {"": captured(least.zero_), **{key: captured(call) for key, call in listener.calls.items()}}
    times = measure_gpu(calls, max(5, repeats // 2))
    empty = times.pop("").median
    parts: dict[str, float] = defaultdict(float)
    for key, timing in times.items():
        parts[key.partition(" ")[0]] += max(0.0, timing.median - empty) * 1e3
    return dict(parts)


class _ByRuns:
    """Operations without the one that picks for a whole step."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        if name == "select":
            raise AttributeError(name)
        return getattr(self.ops, name)


class _Listener:
    """Operations that keep every call as something that can be called again."""

    def __init__(self, ops: Ops) -> None:
        self.ops, self.calls, self.counts = ops, dict[str, Callable[[], Any]](), defaultdict[str, int](int)

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.ops, name)
        return self._kept(name, own) if (name in vars(Ops) or name == "select") and callable(own) else own

    def _kept(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            self.calls[f"{name} {self.counts[name]}"] = lambda: own(*args, **kwargs)
            return own(*args, **kwargs)

        return call


def _machine(here: Ceilings) -> Machine:
    rates = {"fp4_fp8": here.fp8_flops, "fp8": here.fp8_flops, "bf16": here.bf16_flops, "fp32": 67e12}
    return Machine("here", here.bytes_per_second, rates, {})
