"""Experts against the formula, in float64: which are chosen, how they are weighed, and where they are clamped."""

import pytest
import torch
from torch import Tensor

from openv41.config import Config
from openv41.formats import unpack_weight
from openv41.model.experts import Experts
from openv41.ops import choose
from tests.small import fill_randomly, small_config


def values(part: torch.nn.Module) -> Tensor:
    return (unpack_weight(part.weight, part.scale) if part.scale is not None else part.weight).double()


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    gate, up = (w1 @ x).clamp(max=limit), (w3 @ x).clamp(-limit, limit)
    return w2 @ (gate * gate.sigmoid() * up)


def by_hand(experts: Experts, config: Config, x: Tensor, image: bool) -> Tensor:
    """The result of one token."""
    router, routed, shared = experts.gate, experts.experts, experts.shared_experts
    scores = torch.nn.functional.softplus(router.weight.double() @ x).sqrt()
    bias = router.bias_vl if image else router.bias
    assert bias is not None and shared is not None
    chosen = (scores + bias).topk(config.n_activated_experts).indices
    result = swiglu(x, *(values(part) for part in (shared.w1, shared.w2, shared.w3)), config.swiglu_limit)
    stacks = [values(part) for part in (routed.w1, routed.w2, routed.w3)]
    for expert in chosen:
        weight = config.route_scale * scores[expert] / scores[chosen].sum()
        result = result + weight * swiglu(x, *(stack[expert] for stack in stacks), config.swiglu_limit)
    return result


@pytest.mark.parametrize("ops", ["reference", "fast", "cpu"])
@pytest.mark.parametrize("limit", [0.5, 10.0])
@torch.no_grad()
def test_experts_are_the_formula(ops: str, limit: float, seed: int) -> None:
    """Inputs of a size at which most of what enters a product is clamped; text and image tokens, whose biases choose
    others."""
    config = small_config(vision_n_layers=1, swiglu_limit=limit)
    experts = Experts(config, config.n_routed_experts, config.n_activated_experts, choose("cpu", ops, "plain"))
    fill_randomly(experts, seed)
    generator = torch.Generator().manual_seed(seed)
    x = 2 * limit * torch.randn(12, config.dim, generator=generator, dtype=torch.float64)
    image = torch.arange(12) % 2 == 1
    assert experts.gate.bias_vl is not None
    experts.gate.bias_vl.copy_(torch.tensor([9.0, -9.0, 9.0, -9.0]))
    expected = torch.stack([by_hand(experts, config, row, bool(mark)) for row, mark in zip(x, image, strict=True)])
    torch.testing.assert_close(experts(x, image), expected, rtol=1e-6, atol=1e-6 * limit**2)
