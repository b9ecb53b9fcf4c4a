"""Arithmetic whose bits depend on nothing but its operands.

A matrix library chooses its kernel, and with it the order of a sum, by the shape of the call: the same row multiplied
alone and in a batch may differ in the last bit. In this model that last bit flips an fp8 rounding, the rounding flips
an indexer's pick, and logits part by 0.3. So the specification must not use sums whose order is somebody else's choice.

The functions here use only operations that IEEE 754 defines to the last bit (add, multiply, divide, square root,
conversion, one element at a time) and float64 matrix products so short and so aligned that *every* order of summation
gives the exact result. They give the same bits alone, in a batch, in chunks, on any number of threads, on any machine.
"""

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

BLOCK = 32
"""Terms in one exact partial product. A product of 24-bit numbers needs 48 bits, a sum of 32 needs 53: float64."""

ROWS, COLUMNS, PIECE = 256, 1024, 1 << 18
"""A product is worked out in pieces of at most this many rows and columns, and as many blocks of K at a time as keep
the partial results within `PIECE` elements (2 MiB: a core's cache). None of the three changes a bit."""


def snap(x: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows b block"]:
    """`x` in blocks of 32 along its last dimension, in float64, on a grid of 2^-24 of each block's power of two.

    Values within 2^-16 of their block's largest are unchanged if they were bf16; smaller ones lose what a float32 sum
    with the largest would lose as well.
    """
    blocks = (F.pad(x, (0, -x.shape[-1] % BLOCK)) if x.shape[-1] % BLOCK else x).double().unflatten(-1, (-1, BLOCK))
    exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True)).exponent
    grid = power_of_two(exponent - 24)
    return (blocks / grid).round() * grid


def power_of_two(exponent: Tensor) -> Float[Tensor, "..."]:
    """2^exponent in float64, built from its bits (a library's `pow` need not be exact); clamped to the normal range."""
    return ((exponent.long().clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


def partial_products(
    x: Float[Tensor, "*batch b n block"], w: Float[Tensor, "*batch b o block"]
) -> Iterator[Float[Tensor, "*batch n o"]]:
    """x @ w.T of each block of K in turn, exact in float64. Operands must lie on a grid, as `snap` leaves them."""
    together = max(1, PIECE // max(1, x[..., 0].numel() // x.shape[-3] * w.shape[-2]))
    for xs, ws in zip(x.split(together, -3), w.split(together, -3), strict=True):
        yield from (xs @ ws.mT).unbind(-3)


def matmul(x: Float[Tensor, "*batch n k"], w: Float[Tensor, "*batch o k"]) -> Float[Tensor, "*batch n o"]:
    """x @ w.T in float32: exact products of 32 terms, added in float64 in order of K, rounded once."""
    x_blocks, w_blocks = snap(x).transpose(-3, -2), snap(w).transpose(-3, -2)  # [..., b, n, 32], [..., b, o, 32]
    return tiled(x_blocks, w_blocks, lambda xs, ws: _add_in_order(partial_products(xs, ws)).float())


def tiled(x: Tensor, w: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`product` of every piece of x's rows [..., n, :] with every piece of w's rows [..., o, :], put together."""
    return torch.cat([torch.cat([product(xs, ws) for ws in w.split(COLUMNS, -2)], -1) for xs in x.split(ROWS, -2)], -2)


def _add_in_order(parts: Iterator[Tensor]) -> Tensor:
    total = next(parts).clone()
    for part in parts:
        total += part
    return total


def tree_sum(x: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows"]:
    """The sum over the last dimension by halves: first half plus second half, until one is left."""
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = F.pad(x, (0, 1))
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


# Elementary functions: evaluated in float64 from additions and products alone, rounded once to float32.

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693147180369123816490  # the leading 33 bits of ln 2, so that k * LN2_HIGH is exact
LN2_LOW = 1.90821492927058770002e-10
EXP_TERMS = [1.0 / math.factorial(i) for i in range(13, -1, -1)]
ATANH_TERMS = [2.0 / (2 * i + 1) for i in range(17, -1, -1)]
ERF_TERMS = [2.0 ** (i + 1) / math.prod(range(1, 2 * i + 2, 2)) / math.sqrt(math.pi) for i in range(80, -1, -1)]


def _exp(x: Tensor) -> Tensor:
    x = x.clamp(-700.0, 700.0)
    k = (x * LOG2_E).round()
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    return _polynomial(EXP_TERMS, r) * power_of_two(torch.nan_to_num(k))


def _polynomial(terms: list[float], x: Tensor) -> Tensor:
    total = torch.full_like(x, terms[0])
    for term in terms[1:]:
        total = total * x + term
    return total


def exp(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    return _exp(x.double()).float()


def sigmoid(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    return (1.0 / (1.0 + _exp(-x.double()))).float()


def softplus(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """log(1 + e^x) as max(x, 0) + log(1 + t), t = e^-|x|, and log(1 + t) = 2 atanh(t / (2 + t)) by its series."""
    wide = x.double()
    t = _exp(-wide.abs())
    s = t / (2.0 + t)
    return (wide.clamp_min(0.0) + s * _polynomial(ATANH_TERMS, s * s)).float()


def erf(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The error function as e^(-x^2) times a series of positive terms. From 4 on it is 1 in float32."""
    wide = x.double().clamp(-4.0, 4.0)
    square = wide * wide
    return (wide * _exp(-square) * _polynomial(ERF_TERMS, square)).float()


def sqrt(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The correctly rounded square root. By way of float64: the float32 root of a vector library may be a bit off."""
    return x.double().sqrt().float()


def rsqrt(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """1 / sqrt(x), both rounded to float32 as published."""
    return 1.0 / sqrt(x)
