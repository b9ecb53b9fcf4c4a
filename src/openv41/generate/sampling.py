"""From logits to an id: the likeliest token, or a draw with temperature, top-k and top-p.

A draw inverts the cumulative distribution at one uniform number, so an id depends on its row of logits and on that
number alone. Each sequence has a generator of its own, and what else is in the batch changes nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from openv41.errors import InputError, OpsError

Number = float | int


@dataclass(frozen=True)
class Sampling:
    """How an id is chosen. The default takes the likeliest token and is repeatable without a seed.

    `temperature` divides the logits; 0 takes the first of the likeliest. `top_k` keeps the k likeliest tokens (0: all),
    then `top_p` the likeliest tokens that together reach this probability. `seed` is 0 or more.
    Raises `InputError` for a value outside its range.
    """

    temperature: Number = 0.0
    top_p: Number = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        heat, mass = self.temperature, self.top_p
        rule = "a finite number, 0 or more"
        _require(_finite(heat) and heat >= 0, "temperature", heat, rule, "0 takes the likeliest token")
        _require(_finite(mass) and 0 < mass <= 1, "top_p", mass, "above 0 and at most 1", "1 keeps every token")
        _require(_whole(self.top_k), "top_k", self.top_k, "a whole number, 0 or more", "0 keeps every token")
        _require(_whole(self.seed), "seed", self.seed, "a whole number, 0 or more", "any such number will do")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def generator_for(seed: int, sequence: int) -> np.random.Generator:
    """The generator of one sequence of a batch, unrelated to those of the others."""
    return np.random.default_rng([seed, sequence])


def probabilities(logits: Float[Tensor, "j v"], sampling: Sampling) -> Float[Tensor, "j v"]:
    """The distribution that `sampling` draws from, in float64; tokens that it rules out have exactly 0.

    At temperature 0 all probability is on the first maximum. Among equal logits the lower ids are kept first.
    """
    logits = _checked(logits)
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    # The maximum goes first: dividing by a tiny temperature then gives 0 and -inf, never inf - inf.
    scaled = (logits - logits.amax(1, keepdim=True)) / sampling.temperature
    narrowed = 0 < sampling.top_k < logits.shape[1] or sampling.top_p < 1
    return _narrow(scaled, sampling) if narrowed else scaled.softmax(1)


def _narrow(scaled: Float[Tensor, "j v"], sampling: Sampling) -> Float[Tensor, "j v"]:
    ordered, ids = scaled.sort(dim=1, descending=True, stable=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = -torch.inf
    mass = ordered.softmax(1)
    before = mass.cumsum(1) - mass  # of the likelier tokens; the first has 0, so one token always stays
    mass = mass.masked_fill(before >= sampling.top_p, 0)
    return torch.zeros_like(mass).scatter_(1, ids, mass / mass.sum(1, keepdim=True))


def draw(distribution: Float[Tensor, "j v"], uniform: Float[Tensor, "j"]) -> Int[Tensor, "j"]:
    """The id of each row at which the cumulative distribution passes `uniform`, of [0, 1)."""
    rising = distribution.double().cumsum(1)
    at = torch.searchsorted(rising, uniform.unsqueeze(1) * rising[:, -1:], right=True).squeeze(1)
    # Rounding can bring the product up to the whole sum: then it is the last id that is possible at all.
    possible = torch.arange(distribution.shape[1], device=distribution.device) * (distribution > 0)
    return torch.minimum(at, possible.amax(1))


def sample(
    logits: Float[Tensor, "j v"], samplings: Sequence[Sampling], generators: Sequence[np.random.Generator]
) -> list[int]:
    """One id a row, each by its own sampling; a row that is not greedy takes one number from its generator."""
    chosen = _checked(logits).argmax(1)  # of equal maxima the first
    for sampling in dict.fromkeys(s for s in samplings if not s.greedy):
        rows = [row for row, own in enumerate(samplings) if own == sampling]
        uniform = torch.tensor([generators[row].random() for row in rows], dtype=torch.float64, device=logits.device)
        chosen[rows] = draw(probabilities(logits[rows], sampling), uniform)
    return chosen.tolist()


def _checked(logits: Float[Tensor, "j v"]) -> Float[Tensor, "j v"]:
    """In float64. NaN or infinity would make every choice meaningless without a sign."""
    if not bool(logits.amax(1).isfinite().all()):
        raise OpsError("logits must be finite, got NaN or infinity: check the weights, or compare with ops='reference'")
    return logits.double()


def _require(holds: bool, field: str, value: object, rule: str, way_out: str) -> None:
    if not holds:
        raise InputError(f"{field} must be {rule}, got {value!r}; {way_out}")


def _finite(value: Number) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # false for NaN, fit for any int


def _whole(value: object) -> bool:
    return type(value) is int and value >= 0
