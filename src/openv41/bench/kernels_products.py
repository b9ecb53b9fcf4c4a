"""The linear maps of an attention layer at the released sizes: a decode batch, and a chunk of a prompt."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openv41.bench.case import Case
from openv41.formats import WINDOW, pack_fp8_weight, unpack_fp8_weight
from openv41.ops.hopper.products import (
    After,
    Workspace,
    decode_weight,
    grouped_linear,
    linear,
    linear_pair,
    linear_wide,
)
from openv41.ops.hopper.rows import round_activation

DECODE, CHUNK = (1, 16, 64, 128), 4096
MOST_ERROR = 3e-3
"""Relative error against float64: a bf16 result's own rounding is 1.7e-3."""

Weight = tuple[Tensor, Tensor]


def cases(sizes: tuple[int, ...] = (*DECODE, CHUNK), device: str = "cuda") -> Iterator[Case]:
    draw = torch.Generator(device).manual_seed(0)
    work = Workspace.on(device)
    weights = {name: _fp8(draw, *shape) for name, shape in SHAPES.items()}
    compressor = 0.02 * torch.randn(1024, 5120, generator=draw, device=device)
    for n in sizes:
        yield from _maps(n, draw, work, weights)
        yield _wide(n, _randn(draw, n, 5120), compressor, work)
    weight = weights["wq_b"]
    write = partial(decode_weight, *weight)
    yield Case("write an fp8 weight as bf16", "wq_b", write, partial(_unlike, weight), 0, 3.0 * weight[0].numel())


def _wide(n: int, x: Tensor, weight: Tensor, work: Workspace) -> Case:
    run = partial(linear_wide, x, weight, work)
    error = partial(_error, run, x, weight)
    flops = 3 * 2.0 * n * weight.numel()  # three bf16 parts
    return _case("compressor, float32 weights", n, run, error, weight.nbytes, x.nbytes, n * 1024 * 4, flops)


def _unlike(weight: Weight) -> float:
    """The share of values that differ."""
    return (decode_weight(*weight) != unpack_fp8_weight(*weight).bfloat16()).double().mean().item()


SHAPES = {"wq_a": (1280, 5120), "wkv": (512, 5120), "wq_b": (32768, 1280), "index wq_b": (4096, 1280),
          "wo_a": (8192, 4096), "wo_b": (5120, 8192)}  # fmt: skip
"""[outputs, inputs] of the fp8 weights; wo_a's outputs are those of 8 groups."""


def _maps(n: int, draw: torch.Generator, work: Workspace, weights: dict[str, Weight]) -> Iterator[Case]:
    turned = torch.rand(n, 32, generator=draw, device=draw.device) * 6.28
    heads, rounded = After(512, turned.cos(), turned.sin()), After(1024, form=WINDOW)
    x, low, middle = (round_activation(_randn(draw, n, width)) for width in (5120, 1280, 8192))
    first, second = weights["wq_a"], weights["wkv"]
    codes, scale = (torch.cat((_bytes(a), _bytes(b))) for a, b in zip(first, second, strict=True))
    both = codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)
    yield _of(n, "wq_a and wkv", partial(linear_pair, x, first, second, work, True), x, both)
    for name, given in (("wq_b", low), ("index wq_b", low), ("wo_b", middle)):
        yield _of(n, name, partial(linear, given, *weights[name], work, True), given, weights[name])
    turn = partial(linear, low, *weights["wq_b"], work, True, heads)
    plain = _of(n, "wq_b", partial(linear, low, *weights["wq_b"], work, True), low, weights["wq_b"])
    yield replace(plain, op="wq_b, heads turned", run=turn)
    weight, values = weights["wo_a"], _randn(draw, n, 8, 4096)
    run = partial(grouped_linear, values, *weight, work, rounded)
    error = partial(_grouped_error, values, weight, work)
    flops = 2.0 * n * weight[0].numel()
    yield _case("wo_a, result rounded", n, run, error, weight[0].numel(), values.nbytes, n * 8192 * 2, flops)


def _of(n: int, name: str, run: Callable[[], Any], x: Tensor, weight: Weight) -> Case:
    outputs, inputs = weight[0].shape
    error = partial(_error, run, x, unpack_fp8_weight(*weight))
    size = outputs * inputs * (1 + 1 / 1024)
    return _case(name, n, run, error, size, x.nbytes, n * outputs * 2, 2.0 * n * outputs * inputs)


def _case(op: str, n: int, run: Callable[[], Any], error: Callable[[], float], *counts: float) -> Case:
    """`counts`: bytes of the weight, of x, of the result; then operations."""
    *sizes, flops = counts
    name = f"prefill {n:,}" if n == CHUNK else f"decode, batch {n}"
    return Case(op, name, run, error, MOST_ERROR, sum(sizes), flops)


def _error(run: Callable[[], Tensor], x: Tensor, weight: Tensor) -> float:
    """Relative error of the first rows against float64."""
    got, wanted = run()[:64].double(), x[:64].double() @ weight.double().mT
    return ((got - wanted).norm() / wanted.norm()).item()


def _grouped_error(x: Tensor, weight: Weight, work: Workspace) -> float:
    got, groups = grouped_linear(x, *weight, work), unpack_fp8_weight(*weight).unflatten(0, (x.shape[1], -1))
    return max(_error(partial(got.select, 1, i), x[:, i], groups[i]) for i in range(x.shape[1]))


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _fp8(draw: torch.Generator, outputs: int, inputs: int) -> Weight:
    return pack_fp8_weight(torch.randn(outputs, inputs, generator=draw, device=draw.device) * inputs**-0.5)


def _randn(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw, device=draw.device).bfloat16()
