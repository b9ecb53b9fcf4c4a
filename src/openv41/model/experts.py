"""Experts: a router chooses a few of many small SwiGLU networks for each token; one shared network takes every token.

The router scores all experts; a learned bias takes part in choosing (another one for image tokens, in a model that
sees images) but not in the weights. The weight is applied before w2, so it passes through w2's activation quantiser.
Results are added in ascending order of expert, the shared one last, and rounded once.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from openv41.config import Config
from openv41.model.layers import Linear, Stored, empty_weight, stored_in
from openv41.ops import Ops


class Router(nn.Module):
    """x [n, dim] -> weights [n, k] and numbers [n, k] of each token's experts, best first."""

    def __init__(self, config: Config, experts: int, active: int, ops: Ops) -> None:
        super().__init__()
        self.ops, self.active = ops, active
        self.function, self.scale = config.score_func, config.route_scale
        self.weight = nn.Parameter(torch.empty(experts, config.dim, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(experts, dtype=torch.float32))
        self.bias_vl = nn.Parameter(torch.zeros(experts, dtype=torch.float32)) if config.vision_n_layers else None

    def forward(
        self, x: Float[Tensor, "n dim"], image: Bool[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        bias = self.bias.expand(x.shape[0], -1)  # [n, e]
        if self.bias_vl is not None:
            bias = torch.stack((self.bias, self.bias_vl))[image.long()]
        return self.ops.route(self.ops.linear_wide(x, self.weight), bias, self.active, self.scale, self.function)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x): the shared expert, and the form of every routed one."""

    def __init__(self, dim: int, inner: int, stored: Stored, limit: float, ops: Ops) -> None:
        super().__init__()
        self.ops, self.limit = ops, limit
        self.w1 = Linear(dim, inner, stored, ops)
        self.w2 = Linear(inner, dim, stored, ops)
        self.w3 = Linear(dim, inner, stored, ops)

    def forward(self, x: Float[Tensor, "n dim"], routing: Float[Tensor, "n 1"] | None = None) -> Float[Tensor, "n dim"]:
        return self.w2(self.ops.swiglu(self.w1(x), self.w3(x), self.limit, routing))


class Stack(nn.Module):
    """The same weight of every expert [e, outputs, inputs], with its scales."""

    def __init__(self, experts: int, inputs: int, outputs: int, stored: Stored) -> None:
        super().__init__()
        self.weight, self.scale = empty_weight(stored, experts, outputs, inputs)

    def pair(self) -> tuple[Tensor, Any]:
        """The weight, and what stands beside it: scales, or a master's format (see `model/masters.py`)."""
        return self.weight, self.scale


class RoutedExperts(nn.Module):
    """All routed experts, stacked. Published as `experts.E.w1.weight`; here row E of `experts.w1.weight`."""

    def __init__(self, config: Config, experts: int, ops: Ops) -> None:
        super().__init__()
        stored: Stored = "fp4" if config.expert_dtype == "fp4" else stored_in(config)
        self.ops, self.limit = ops, config.swiglu_limit
        self.w1 = Stack(experts, config.dim, config.moe_inter_dim, stored)
        self.w2 = Stack(experts, config.moe_inter_dim, config.dim, stored)
        self.w3 = Stack(experts, config.dim, config.moe_inter_dim, stored)

    def forward(
        self, x: Float[Tensor, "n dim"], routing: Float[Tensor, "n k"], chosen: Int[Tensor, "n k"]
    ) -> Float[Tensor, "n dim"]:
        return self.ops.experts(x, routing, chosen, self.w1.pair(), self.w2.pair(), self.w3.pair(), self.limit)


class Experts(nn.Module):
    """The feed-forward sublayer: router, routed experts, shared expert."""

    def __init__(self, config: Config, experts: int, active: int, ops: Ops) -> None:
        super().__init__()
        self.gate = Router(config, experts, active, ops)
        self.experts = RoutedExperts(config, experts, ops)
        inner = config.moe_inter_dim * config.n_shared_experts
        self.shared_experts = SwiGLU(config.dim, inner, stored_in(config), config.swiglu_limit, ops) if inner else None

    def forward(self, x: Float[Tensor, "n dim"], image: Bool[Tensor, "n"]) -> Float[Tensor, "n dim"]:
        result = self.experts(x, *self.gate(x, image))
        if self.shared_experts is not None:
            result = result + self.shared_experts(x)
        return result.to(x.dtype)
