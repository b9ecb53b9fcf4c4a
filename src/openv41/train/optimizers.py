"""Who moves which parameter: Muon the matrices, AdamW the rest, row-sparse Adam the n-gram tables.

    matrices    weights of linear maps inside the layers, each routed expert one matrix        Muon, decay
    embeddings  token embedding, head, the draft's Markov embedding and head                    AdamW, decay
    vectors     norms, sinks, biases, the mixes of hyper-connections, image delimiters          AdamW, no decay
    tables      n-gram tables, at their own rate; rows that no token looked up cost nothing     SparseAdam
    balance     the routers' selection biases: moved by `Routing.move_bias`, by no gradient     -

PyTorch's own optimizers throughout. A parameter without a gradient is left as it is: no decay, no momentum.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from openv41.train.settings import OptimizerSettings

GROUPS = ("matrices", "embeddings", "vectors", "tables", "balance")


def group_of(name: str, parameter: Tensor) -> str:
    """The group of a parameter, by its path in the model."""
    if name.endswith(("gate.bias", "gate.bias_vl")):
        return "balance"
    if name.endswith("engram.embed.weight"):
        return "tables"
    if name in ("embed.weight", "head.weight") or ".markov_head." in name:
        return "embeddings"
    mixes = name.endswith((".fn", "q_weight", "k_weight"))  # rows side by side that are no one map
    return "vectors" if parameter.dim() < 2 or mixes else "matrices"


def groups_of(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Every parameter of the model by group and name."""
    groups: dict[str, dict[str, nn.Parameter]] = {group: {} for group in GROUPS}
    for name, parameter in model.named_parameters():
        groups[group_of(name, parameter)][name] = parameter
    return groups


def rate_at(step: int, steps: int, warmup: int, final: float) -> float:
    """The learning rate of step 0, 1, ... `steps` - 1 as a share of the highest: a line up, then a cosine down to
    `final` at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class Optimizers:
    """The optimizers of a model together. Selection biases want no gradient afterwards."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        s = settings
        self.settings, self.groups = settings, groups_of(model)
        for bias in self.groups["balance"].values():
            bias.requires_grad_(False)
        self.stacks = Stacks(p for p in self.groups["matrices"].values() if p.dim() > 2)
        flat = [p for p in self.groups["matrices"].values() if p.dim() == 2]
        betas = (s.beta1, s.beta2)
        dense = [
            {"params": list(self.groups["embeddings"].values()), "weight_decay": s.weight_decay},
            {"params": list(self.groups["vectors"].values()), "weight_decay": 0.0},
        ]
        self.parts: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(
                [*flat, *self.stacks.matrices],
                s.rate,
                s.weight_decay,
                s.momentum,
                adjust_lr_fn="match_rms_adamw",
            ),
            "adamw": torch.optim.AdamW(dense, s.rate, betas),
        }
        if self.groups["tables"]:
            tables = list(self.groups["tables"].values())
            self.parts["tables"] = torch.optim.SparseAdam(tables, s.rate * s.table_factor, betas)

    def set_rate(self, share: float) -> None:
        """Every rate as a share of its highest."""
        for name, part in self.parts.items():
            factor = self.settings.table_factor if name == "tables" else 1.0
            for group in part.param_groups:
                group["lr"] = self.settings.rate * factor * share

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that have a gradient now, by name."""
        for group in GROUPS[:-1]:
            yield from ((name, p) for name, p in self.groups[group].items() if p.grad is not None)

    def norm(self) -> Tensor:
        """The norm of all gradients together, as a tensor of one number. Rows looked up twice are added up before."""
        squares = []
        for _, parameter in self.trained():
            gradient = parameter.grad
            assert gradient is not None
            if gradient.is_sparse:
                parameter.grad = gradient = gradient.coalesce()
                gradient = gradient.values()
            squares.append(gradient.float().square().sum())
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def clip(self, norm: Tensor) -> None:
        """Scale all gradients down to the greatest norm that the settings allow."""
        factor = (self.settings.clip / (norm + 1e-12)).clamp_max(1.0)
        for _, parameter in self.trained():
            assert parameter.grad is not None
            parameter.grad.mul_(factor.to(parameter.grad.device))

    def step(self) -> None:
        """Move everything that has a gradient, and forget the gradients."""
        self.stacks.hand_out()
        for name, part in self.parts.items():
            if name != "tables" or any(p.grad is not None for p in self.groups["tables"].values()):
                part.step()
        self.zero()

    def zero(self) -> None:
        for group in self.groups.values():
            for parameter in group.values():
                parameter.grad = None
        for matrix in self.stacks.matrices:
            matrix.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class Stacks:
    """Stacked experts [e, outputs, inputs] as matrices of their own, for an optimizer that knows matrices only.

    The matrices are views: what is done to them is done to the stack.
    """

    def __init__(self, stacks: Iterable[nn.Parameter]) -> None:
        self.stacks = list(stacks)
        self.matrices = [nn.Parameter(matrix) for stack in self.stacks for matrix in stack.data.unbind(0)]

    def hand_out(self) -> None:
        """Give each matrix its part of the stack's gradient."""
        matrices = iter(self.matrices)
        for stack in self.stacks:
            for place in range(len(stack)):
                next(matrices).grad = None if stack.grad is None else stack.grad[place]
