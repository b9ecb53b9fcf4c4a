"""All losses of one pack, computed by one module.

    pack -> the model without its head -> language, balance, and the draft's view
         -> index: what the indexers were given, held against attention
         -> draft: blocks of the text, told what the model tapped

It is a module so that whatever watches a forward sees every use of every weight between its beginning and its end.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openv41.model.transformer import Output, Transformer
from openv41.train.balance import Routing
from openv41.train.data import Pack
from openv41.train.draft import Blocks, draft_loss
from openv41.train.language import language_loss, run_headless
from openv41.train.lessons import Lessons, Target
from openv41.train.settings import Settings


@dataclass(frozen=True)
class Ask:
    """What one step asks for beside the language loss: what indexers are held against (None: they learn nothing), and
    whether their recall is to be told; the weight of the draft's loss (0: none of it)."""

    target: Target | None
    recall: bool
    draft: float


@dataclass
class Found:
    """The losses by name, detached. `recall`: of each layer whose indexer had a choice, its share of the true picks."""

    parts: dict[str, Tensor]
    recall: dict[str, float]


class Losses(nn.Module):
    """The losses of `model`. Which ones, and how they are weighed, is in the settings; `routing` counts loads."""

    def __init__(self, model: Transformer, settings: Settings) -> None:
        super().__init__()
        self.model, self.settings = model, settings
        self.routing = Routing(model)

    def forward(self, pack: Pack, ask: Ask | None, blocks: Blocks | None = None) -> tuple[Tensor, Found]:
        """The weighed sum of a pack's losses, with gradient, and what it is made of. `blocks`: where the draft is
        asked. With None for `ask`: the mean language loss alone."""
        step, loss = pack.step(self.settings.device), self.settings.loss
        targets = pack.targets(self.settings.device)
        if ask is None:
            hidden, _ = run_headless(self.model, step)
            language = language_loss(self.model.head, hidden, targets, loss.rows)
            return language, Found({"language": language}, {})
        frozen = loss.draft_only
        lessons = Lessons(self.model) if (ask.target or ask.recall) and not frozen else None
        with torch.no_grad() if frozen else self.routing.during(step), lessons or nullcontext():
            hidden, output = run_headless(self.model, step, self.settings.model.recompute)
        with torch.set_grad_enabled(not frozen):
            language = language_loss(self.model.head, hidden, targets, loss.rows)
        found, total = Found({"language": language}, {}), language
        if not frozen:
            found.parts["balance"] = self.routing.loss()
            total = total + loss.balance * found.parts["balance"]
            if lessons is not None and lessons.noted and ask.target is not None:
                found.parts["index"] = torch.stack(list(lessons.losses(ask.target).values())).sum()
                total = total + loss.index * found.parts["index"]
            if lessons is not None and ask.recall:  # layers that pick all are left out
                recall = lessons.recall().items()
                found.recall = {str(layer): round(share, 4) for layer, share in recall if math.isfinite(share)}
        if blocks is not None:
            total = total + ask.draft * self._draft(output, blocks, found)
        found.parts = {name: part.detach() for name, part in found.parts.items()}
        return total, found

    def _draft(self, output: Output, blocks: Blocks, found: Found) -> Tensor:
        assert self.model.mtp is not None
        with self.routing.during(None):
            loss = draft_loss(self.model.mtp, output, blocks)
        right = torch.tensor(loss.right)
        found.parts |= {"draft": loss.language, "confidence": loss.confidence, "right": right}
        return loss.total()
