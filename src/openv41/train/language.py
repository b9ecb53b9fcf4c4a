"""The language loss: cross-entropy of every token of a pack, without ever holding all of its logits.

The head of the model is taken off while it runs, and what it would have read is kept. The loss then goes through the
rows some at a time, and once more on the way back: 16,384 tokens of the released vocabulary would be 8 GB of logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from openv41.model.transformer import Output, Transformer
from openv41.ops import rows_at_once
from openv41.ops.training import TrainingOps
from openv41.state import Step


def run_headless(model: Transformer, step: Step, recompute: bool = False) -> tuple[Float[Tensor, "j dim"], Output]:
    """The model's own forward, whole, with a fresh cache: what the head would have read [j, dim], and the output, whose
    logits have no rows. `recompute`: the model's `checkpoint`. Masters are packed anew for it."""
    if isinstance(model.ops, TrainingOps):
        model.ops.forget()
    with _without_head(model.head) as kept:
        output = model(step, prefill="full", checkpoint=recompute)
    return kept[0], output


def language_loss(
    head: nn.Module, hidden: Float[Tensor, "n dim"], targets: Int[Tensor, "n"], rows: int
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats, in float32, `rows` rows at a time; on a GPU as many as a piece holds, if that is
    more."""
    rows = max(rows, rows_at_once(hidden.device, 16 * _width(head), rows))
    total = hidden.new_zeros((), dtype=torch.float32)
    for some, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        total = total + checkpoint(_cross_entropy, head, some, wanted, use_reentrant=False)
    return total / len(targets)


def _width(head: nn.Module) -> int:
    """How many logits a row has."""
    return head.get_parameter("weight").shape[0]


def _cross_entropy(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")


@contextmanager
def _without_head(head: nn.Module) -> Iterator[list[Tensor]]:
    """While it lasts, `head` computes nothing; the rows that it is given are collected."""
    kept: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        kept.append(given[0])
        return (given[0][:0],)

    hook = head.register_forward_pre_hook(keep)
    try:
        yield kept
    finally:
        hook.remove()
