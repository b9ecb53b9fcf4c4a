"""Even loads for the experts: what the routers chose, the loss that asks for balance, the rule that moves the bias.

For a sequence of T tokens, `f_e` is the share of its choices that fell on expert e, times the number of experts, and
`P_e` the mean of e's score among all scores of a token; the balance loss of a layer is the sum over e of f_e * P_e. It
is 1 when both are even. Sequences weigh by their tokens, layers are added up. The gradient flows through P alone.

The selection bias gets no gradient. After each step it goes up by a fixed amount for experts that had less than their
share of the step's tokens, and down for those that had more.

Source: DeepSeek-V3 report, section 2.1.2.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from openv41.model.experts import Router
from openv41.state import Step
from openv41.train.parallel import Processes


def balance_loss(
    scores: Float[Tensor, "*l n e"], chosen: Int[Tensor, "*l n k"], sequence: Int[Tensor, "n"], count: int = 0
) -> Float[Tensor, "*l"]:
    """The balance loss of one layer, or of each of several. `scores` before the bias; `sequence` numbers each token's
    sequence from 0 on; `count`, how many there are, is asked of the device where it is not given."""
    *layers, n, e = scores.shape
    count = count or int(sequence.max()) + 1
    shares = scores / scores.sum(-1, keepdim=True)
    means = scores.new_zeros(*layers, count, e).index_add(-2, sequence, shares)  # times T
    loads = torch.zeros_like(means).index_add(-2, sequence, marks(chosen, e).to(scores.dtype))  # f, times k T / e
    lengths = scores.new_zeros(count).index_add(0, sequence, scores.new_ones(n))
    each = (loads * means).sum(-1) * e / chosen.shape[-1] / lengths.square().clamp_min(1)
    return (each * lengths).sum(-1) / n


def marks(chosen: Int[Tensor, "*l n k"], experts: int) -> Float[Tensor, "*l n e"]:
    """1 where a token has chosen an expert, which it does once at most."""
    return torch.zeros(*chosen.shape[:-1], experts, device=chosen.device).scatter(-1, chosen, 1.0)


def imbalances(loads: Mapping[str, Float[Tensor, "e"]]) -> dict[str, float]:
    """Of each router that was used the largest load over the mean: 1 is even, the number of experts is one expert for
    all. The device is asked once."""
    known = torch.cat(list(loads.values())).tolist() if loads else []
    found = {}
    for path, load in loads.items():
        own, known = known[: len(load)], known[len(load) :]
        if any(own):
            found[path] = max(own) / (sum(own) / len(own))
    return found


class Routing:
    """Watches the routers of a model while steps run: their loads, and their balance losses.

    Routers are told by the path of their module. `loads` [e] of each counts how often the experts were chosen since the
    last `clear`. Gradients that a checkpoint computes anew are not counted twice: only what runs `during` a step is.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = {path: part for path, part in model.named_modules() if isinstance(part, Router)}
        self.loads: dict[str, Tensor] = {}
        self.watched: list[tuple[Tensor, Tensor]] = []
        self._sequence: Tensor | None = None
        self._count = 0
        self._watched: dict[str, Tensor | None] = {}
        self._open = False
        self._hooks = [router.register_forward_hook(self._hook(path)) for path, router in self.routers.items()]
        self.clear()

    def clear(self) -> None:
        """Count from nothing."""
        self.loads = {path: torch.zeros_like(router.bias) for path, router in self.routers.items()}
        self._watched = {}

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def during(self, step: Step | None) -> Iterator[None]:
        """Watch what runs in here: all of the step's tokens, or (None) tokens whose balance is not asked for."""
        self._sequence, self._open = (None if step is None else step.slot), True
        self._count, self.watched = (0 if step is None else 1 + max(run.slot for run in step.runs)), []
        try:
            yield
        finally:
            self._open = False

    def loss(self) -> Tensor:
        """The layers' balance losses of the latest step together."""
        if not self.watched:
            return torch.zeros(())
        sequence = self._sequence
        assert sequence is not None
        # Layers of a model have equally many experts each: all of them at once.
        scores, chosen = (torch.stack(parts) for parts in zip(*self.watched, strict=True))
        return balance_loss(scores, chosen, sequence, self._count).sum()

    def join(self, processes: Processes) -> None:
        """Add up what all processes counted."""
        paths, counts = list(self.loads), list(self.loads.values())
        if counts:
            total = processes.add(torch.cat(counts))
            self.loads = dict(zip(paths, total.split([len(count) for count in counts]), strict=True))

    @torch.no_grad()
    def move_bias(self, rate: float) -> None:
        """The sign rule, for every router that was used since the last `clear`."""
        for path, load in self.loads.items():
            self.routers[path].bias.add_(torch.sign(load.mean() - load), alpha=rate)  # 0 where nothing was chosen

    def _hook(self, path: str):  # type: ignore[no-untyped-def]  # torch names no type for it
        def hook(router: Router, given: tuple[Tensor, Tensor], result: tuple[Tensor, Tensor]) -> None:
            chosen = result[1]
            if self._open:
                self._watched[path] = self._sequence
                self.loads[path] += marks(chosen, len(router.bias)).sum(0)
            # A checkpoint expects the same operations when it runs the block anew: so they run whether open or not.
            sequence = self._watched.get(path)
            if sequence is not None and len(sequence) == len(chosen):
                scores = _scores(router, given[0])
                if self._open:
                    self.watched.append((scores, chosen))

        return hook


def _scores(router: Router, x: Float[Tensor, "n dim"]) -> Float[Tensor, "n e"]:
    """What the router chooses by, without the bias, in PyTorch's own functions."""
    logits = router.ops.linear_wide(x, router.weight)
    if router.function == "softmax":
        return logits.softmax(1)
    return logits.sigmoid() if router.function == "sigmoid" else F.softplus(logits).sqrt()
