"""One re-scorer layer at the released sizes: a token, and a prompt. Weights, caches and inputs are made from names.

The layer is the first re-scorer below the candidate source (layer 24 of the release, 132,024,128 parameters). It picks
512 of the positions that its source has handed down, and attends to them and to its window.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from openv41.bench import layers
from openv41.bench.agree import Piece, agree
from openv41.bench.layer import Work, continued, fill, held_tensors, operations, twin, values, work
from openv41.bench.measure import largest_cache, measure, product, readers
from openv41.bench.results import Agreement, Figure, Report, Settings
from openv41.config import Config
from openv41.errors import InputError
from openv41.model.attention import Attention
from openv41.ops import choose
from openv41.plan import Role, plan_layers

EDGE = 4
"""Of the prompt's rows, so many from either end are compared with the reference."""
TAIL = 64
"""The reference is timed on so many of the prompt's last tokens: a whole prompt would take minutes."""


def released_layer() -> tuple[Config, int]:
    """The configuration and the number of the layer that is timed."""
    config = Config.released()
    bounded = (row.layer for row in plan_layers(config) if row.role is Role.RESCORER and row.within is not None)
    return config, next(bounded)


@torch.no_grad()
def run(settings: Settings, progress: Callable[[str], None]) -> Report:
    """Compare the token and the prompt's first and last rows with the reference, then take the figures.

    The hopper operations have their own: a layer of every role, see `bench.layers`. Raises `InputError` for settings
    that the layer cannot be run with.
    """
    if settings.ops == "hopper":
        return layers.run(settings, progress)
    config, number = released_layer()
    _check(settings, config)
    options: dict[str, Any] = {} if settings.weights is None else {"weights": settings.weights}
    progress(f"making the weights of layer {number}")
    layer = Attention(config, number, choose("cpu", settings.ops, **options))
    fill(layer)
    bench = _Bench(settings, config, layer, progress)
    agreement = bench.agreement()
    figures = (*bench.token_figures(), *bench.prompt_figures()) if agreement.passed else ()
    return Report("attention", bench.subject(), settings, agreement, figures, ABOUT if agreement.passed else ())


ABOUT = (
    "Reading is the fastest of three reductions of exactly the tensors held, with all threads, in turn with the layer:",
    "each finds the processor's caches as the others left them, and may find there a part of what it reads.",
    "The reference is timed on the tokens named alone; nothing is scaled, and a factor is for the same tokens.",
)


def _check(settings: Settings, config: Config) -> None:
    for name, least, most in (
        ("position", 0, config.context - 1), ("prompt", 1, config.context), ("repeats", 1, 10**6),
    ):  # fmt: skip
        value = getattr(settings, name)
        if not least <= value <= most:
            raise InputError(f"{name} must lie in {least} to {most}, got {value}")
    if settings.weights is not None and settings.ops == "reference":
        raise InputError("weights are for the cpu operations (the reference reads them as stored): leave weights out")


class _Bench:
    def __init__(self, settings: Settings, config: Config, layer: Attention, progress: Callable[[str], None]) -> None:
        self.settings, self.config, self.layer, self.progress = settings, config, layer, progress
        self.judge = twin(layer, config, choose("cpu", "reference"))
        self.x = values("prompt", settings.prompt, config.dim)
        self.token_x = values("token", 1, config.dim)
        self.times_reference = settings.reference and layer.ops.name != "reference"

    def subject(self) -> str:
        layer, held = self.layer, list(held_tensors(self.layer))
        count = sum(p.numel() for name, p in layer.named_parameters() if not name.endswith(".scale"))
        size = sum(tensor.nbytes for tensor in held)
        largest = max(held, key=lambda tensor: tensor.nbytes).dtype
        return (
            f"layer {layer.layer} ({layer.plan.role.value}), {count:,} parameters, {size / 1e6:.1f} MB as held "
            f"({str(largest).removeprefix('torch.')}), {layer.ops.name} operations, threads: {torch.get_num_threads()}"
        )

    def token(self, layer: Attention) -> Work:
        return work(layer, self.config, self.token_x, self.settings.position)

    # Compare

    def agreement(self) -> Agreement:
        """The token, and the first and last rows of the whole prompt, against the reference."""
        return agree(self.layer, self.judge, self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        """What the layer made, its picks, and the same tokens for the judge. A prompt's rows are those of the whole
        prompt; the reference, whose rows do not depend on one another, runs them alone."""
        self.progress("comparing with the reference: the token")
        yield "the token", *_made(self.token(self.layer), self.layer), self.token(self.judge)
        self.progress("comparing with the reference: the prompt's first and last rows")
        y, picks = _made(work(self.layer, self.config, self.x, 0), self.layer)
        yield "first rows", y[:EDGE], picks[:EDGE], work(self.judge, self.config, self.x[:EDGE], 0)
        last = max(EDGE, len(self.x) - EDGE)
        if last < len(self.x):
            yield "last rows", y[last:], picks[last:], continued(self.judge, self.config, self.x, last)

    # Measure

    def token_figures(self) -> Iterator[Figure]:
        self.progress("timing the token, and reading the weights, in turn")
        held, token = list(held_tensors(self.layer)), self.token(self.layer)
        times = measure({"layer": lambda: token(self.layer), **readers(held)}, 4 * self.settings.repeats, warm_up=2)
        own = times.pop("layer")
        way, read = min(times.items(), key=lambda item: item[1].median)
        size = sum(tensor.nbytes for tensor in held)
        yield Figure("token_ms", f"token after {self.settings.position:,} positions", own.median, "ms", own)
        note = f"{size / 1e6:.0f} MB as {way}; largest cache {largest_cache() or 'unknown'}"
        yield Figure("read_ms", "  weights as held, read once", read.median, "ms", read, note=note)
        yield Figure("read_gb_s", "  which is", size / read.median / 1e6, "GB/s")
        yield Figure("token_over_read", "  token over reading", own.median / read.median, "x", aim="1.5 or less")
        if self.times_reference:
            self.progress("timing the reference: the token")
            slow = self.token(self.judge)
            theirs = measure({"reference": lambda: slow(self.judge)}, 1, warm_up=0)["reference"]
            yield Figure("token_reference_ms", "  reference", theirs.median, "ms", theirs)
            yield Figure("token_factor", "  over the reference", theirs.median / own.median, "x")

    def prompt_figures(self) -> Iterator[Figure]:
        self.progress(f"timing the prompt of {len(self.x)} tokens, and a float32 product, in turn")
        prompt = work(self.layer, self.config, self.x, 0)
        _, picks = _made(prompt, self.layer)
        multiply, count = product()
        times = measure({"layer": lambda: prompt(self.layer), "product": multiply}, self.settings.repeats)
        own, machine = times["layer"], times["product"]
        parts = operations(self.layer, prompt.step, picks, self.config)
        total = sum(parts.values())
        counted = ", ".join(f"{name} {value / 1e9:.3g}" for name, value in parts.items())
        rate, limit = total / own.median / 1e6, count / machine.median / 1e6
        yield Figure("prompt_ms", f"prompt of {len(self.x):,} tokens", own.median, "ms", own)
        yield Figure("prompt_gflop", "  counted", total / 1e9, "GFLOP", note=counted)
        yield Figure("prompt_gflop_s", "  which is", rate, "GFLOP/s")
        yield Figure("product_gflop_s", "  fp32 matrix products", limit, "GFLOP/s", note="squares of 2,048")
        yield Figure("prompt_share", "  share of that rate", rate / limit, "", aim="0.5 or more")
        if self.times_reference:
            yield from self._prompt_factor()

    def _prompt_factor(self) -> Iterator[Figure]:
        first = max(0, len(self.x) - TAIL)
        count = len(self.x) - first
        self.progress(f"timing the reference: the prompt's last {count} tokens")
        fast, slow = (continued(layer, self.config, self.x, first) for layer in (self.layer, self.judge))
        own = measure({"layer": lambda: fast(self.layer)}, self.settings.repeats)["layer"]
        theirs = measure({"reference": lambda: slow(self.judge)}, 1, warm_up=0)["reference"]
        yield Figure("tail_ms", f"prompt's last {count} tokens alone", own.median, "ms", own)
        yield Figure("tail_reference_ms", "  reference", theirs.median, "ms", theirs)
        yield Figure("tail_factor", "  over the reference", theirs.median / own.median, "x")


def _made(piece: Work, layer: Attention) -> tuple[Tensor, Tensor]:
    y, sight = piece(layer)
    assert sight.picks is not None
    return y, sight.picks
