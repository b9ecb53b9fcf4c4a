"""Who moves which parameter: Muon the matrices, AdamW the rest, row-sparse Adam the n-gram tables.

    matrices    weights of linear maps inside the layers, each routed expert one matrix        Muon, decay
    embeddings  token embedding, head, the draft's Markov embedding and head                    AdamW, decay
    vectors     norms, sinks, biases, the mixes of hyper-connections, image delimiters          AdamW, no decay
    tables      n-gram tables, at their own rate; rows that no token looked up cost nothing     SparseAdam
    balance     the routers' selection biases: moved by `Routing.move_bias`, by no gradient     -

PyTorch's own optimizers throughout, on a GPU Muon for many matrices at once (`openv41.train.muon`). A parameter without
a gradient is left as it is: no decay, no momentum.

Of several processes each moves its own rows (see `openv41.train.parallel`), and replicas as all do. Muon needs whole
matrices, so a matrix is put together for it: it moves as it would in one process. Experts are whole as they are.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from openv41.train.held import Held, own_state, parts_of, whole_state
from openv41.train.muon import Muon
from openv41.train.parallel import Alone, Processes
from openv41.train.settings import OptimizerSettings

GROUPS = ("matrices", "embeddings", "vectors", "tables", "balance")
REPLICAS = ("tables", "balance")
"""Groups that every process has whole."""


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


def rate_at(step: int, steps: int, warmup: int, final: float, cooldown: float = 1.0) -> float:
    """The learning rate of step 0, 1, ... `steps` - 1 as a share of the highest: a line up, then the highest,
    then, in the last share `cooldown` of the steps, a cosine down to `final` at the last one."""
    if step < warmup:
        return (step + 1) / warmup
    begin = max(warmup, steps - round(cooldown * steps))
    done = (step - begin) / max(1, steps - 1 - begin)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))


class Optimizers:
    """The optimizers of a model together. Selection biases want no gradient afterwards."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings, processes: Processes | None = None) -> None:
        s = settings
        self.settings, self.groups, self.processes = settings, groups_of(model), processes or Alone()
        for bias in self.groups["balance"].values():
            bias.requires_grad_(False)
        for table in self.groups["tables"].values():
            if table.requires_grad:
                table.register_hook(Tensor.coalesce)  # of each pack alone, so that packs add up alike in any process
        groups = {
            name: [Held(p, self.processes, name == "matrices" and p.dim() > 2) for p in group.values()]
            for name, group in self.groups.items()
        }
        matrices = sorted(groups["matrices"], key=lambda one: one.stacked)  # stable: those that are no stack come first
        self.held = {"muon": matrices, "adamw": groups["embeddings"] + groups["vectors"], "tables": groups["tables"]}
        betas = (s.beta1, s.beta2)
        dense = [
            {"params": parts_of(groups["embeddings"]), "weight_decay": s.weight_decay},
            {"params": parts_of(groups["vectors"]), "weight_decay": 0.0},
        ]
        self.parts: dict[str, torch.optim.Optimizer] = {
            "muon": Muon(parts_of(matrices), s.rate, s.weight_decay, s.momentum, adjust_lr_fn="match_rms_adamw"),
            "adamw": torch.optim.AdamW(dense, s.rate, betas),
        }
        if groups["tables"]:
            self.parts["tables"] = torch.optim.SparseAdam(parts_of(groups["tables"]), s.rate * s.table_factor, betas)

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
        values, counted = [], []
        for _, parameter in self.trained():
            gradient = parameter.grad
            assert gradient is not None
            if gradient.is_sparse:
                parameter.grad = gradient = self.processes.mean_rows(gradient)
                gradient = gradient.values()
            values.append(self.processes.own(gradient).float())
            counted.append(self.processes.counts(parameter))
        if not values:
            return torch.zeros(())
        # Squares in float64, so that it does not matter how many processes add them up.
        squares = torch.stack(torch._foreach_norm(values, 2, torch.float64)).square()
        squares = torch.stack(
            [one if counts else torch.zeros_like(one) for one, counts in zip(squares, counted, strict=True)]
        )
        return self.processes.add(squares).sum().sqrt().float()

    def clip(self, norm: Tensor) -> None:
        """Scale all gradients down to the greatest norm that the settings allow."""
        gradients = [
            self.processes.own(parameter.grad) for _, parameter in self.trained() if parameter.grad is not None
        ]
        factor = (self.settings.clip / (norm + 1e-12)).clamp_max(1.0)
        for gradient in (one for one in gradients if one.is_sparse):
            gradient.mul_(factor.to(gradient.device))
        if dense := [gradient for gradient in gradients if not gradient.is_sparse]:
            torch._foreach_mul_(dense, factor.to(dense[0].device))

    def step(self) -> None:
        """Move everything that has a gradient, and forget the gradients."""
        for held in (held for group in self.held.values() for held in group):
            held.hand_out()
        muon = self.parts["muon"]
        assert isinstance(muon, Muon)
        for held in self.held["muon"]:
            held.move_whole(muon)
        for name, part in self.parts.items():
            if name != "tables" or any(p.grad is not None for p in self.groups["tables"].values()):
                part.step()
        self.zero()

    def zero(self) -> None:
        for group in self.groups.values():
            for parameter in group.values():
                parameter.grad = None
        for held in (held for group in self.held.values() for held in group):
            for part in held.parts:
                part.grad = None

    def state_dict(self) -> dict[str, Any]:
        """What the optimizers remember, of whole parameters: the same whatever the number of processes. All must ask;
        the first one gets it."""
        return {name: whole_state(part.state_dict(), self.held[name]) for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(own_state(state[name], self.held[name]))
