"""The draft's loss: blocks of the text itself, begun at some of its tokens, with all that a real draft would see.

    taps of main tokens (no gradient into the model) -> each stage's vectors
    block that begins at a: the token at a, then noise -> stages, over the window before a and the block -> hidden
    place j: logits + Markov bias of the text's token at a + j -> cross-entropy with the token at a + j + 1
             confidence -> how likely the likeliest token is the text's: binary cross-entropy

Generation runs the same module (`Draft.begin`); here many blocks of all sequences run side by side, as rows of one
table. Embedding and head are the model's own, and so is what the taps say: the loss has no gradient for them, it
reaches the draft's parameters alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from openv41.model.draft import Draft
from openv41.model.transformer import Output
from openv41.train.data import Pack

NOT_ASKED = -100
"""Stands for the text's token where the sequence has none: such places are left out, on the device."""


@dataclass(frozen=True)
class DraftLoss:
    """Mean cross-entropy in nats; mean binary cross-entropy of the confidence; and how many tokens of a block, from
    its beginning, are the text's on average."""

    language: Float[Tensor, ""]
    confidence: Float[Tensor, ""]
    right: float

    def total(self) -> Float[Tensor, ""]:
        return self.language + self.confidence


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of `places` tokens, in packed sequences. `text` [b, places + 1]: the text from the block's first token
    on, and `known` [b, places], which of the tokens behind the first the sequence still has. `first` [b]: the block's
    position; `row` [b]: the step's row at which its sequence begins."""

    text: Int[Tensor, "b more"]
    known: Bool[Tensor, "b places"]
    first: Int[Tensor, "b"]
    row: Int[Tensor, "b"]


def draw_blocks(pack: Pack, places: int, most: int, generator: torch.Generator) -> Blocks:
    """At most `most` blocks, each beginning at another token that has one before it and one behind it. Which ones,
    `generator` draws. Where no token has, one block at the beginning of which nothing is known: its loss is 0."""
    lengths = np.array([len(ids) for ids in pack.sequences])
    starts = lengths.cumsum() - lengths
    may = np.concatenate([np.arange(length - 2) + start + 1 for start, length in zip(starts, lengths, strict=True)])
    if not len(may):
        text = torch.full((1, places + 1), int(pack.sequences[0][0]))
        nowhere = torch.zeros(1, dtype=torch.int64)
        return Blocks(text, torch.zeros(1, places, dtype=torch.bool), nowhere, nowhere)
    drawn = np.sort(may[torch.randperm(len(may), generator=generator)[:most].numpy()])
    sequence = np.searchsorted(starts, drawn, side="right") - 1
    at = drawn[:, None] + np.arange(places + 1)
    ends = (starts + lengths)[sequence][:, None]
    text = np.concatenate(pack.sequences).astype(np.int64)[np.minimum(at, ends - 1)]
    # A sequence has one id more than it has rows of the step.
    row = starts[sequence] - sequence
    first = drawn - starts[sequence]
    return Blocks(*map(torch.from_numpy, (text, at[:, 1:] < ends, first.astype(np.int64), row.astype(np.int64))))


def draft_loss(draft: Draft, output: Output, blocks: Blocks) -> DraftLoss:
    """The loss of these blocks. `output` is the model's, of the whole step (`prefill="full"`)."""
    with unmoved(draft):
        return _draft_loss(draft, output, blocks)


@contextmanager
def unmoved(draft: Draft) -> Iterator[None]:
    """While it lasts, the embedding and the head that the draft shares with the model take no gradient."""
    weights = [part.weight for part in draft.shared]
    wanted = [weight.requires_grad for weight in weights]
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight, want in zip(weights, wanted, strict=True):
            weight.requires_grad_(want)


def _draft_loss(draft: Draft, output: Output, blocks: Blocks) -> DraftLoss:
    assert output.taps is not None and output.tapped is not None
    device, places, window = output.taps.device, blocks.known.shape[1], draft.config.window_size
    text, known, first, row = (x.to(device) for x in (blocks.text, blocks.known, blocks.first, blocks.row))
    histories = draft.vectors(output.taps.detach(), output.tapped.position)
    begin, tapped = first.unsqueeze(1), len(output.tapped)

    ids = torch.full_like(text[:, :-1], draft.config.dspark_noise_token_id)
    ids[:, 0] = text[:, 0]
    before = (begin - window).clamp_min(0) + torch.arange(window, device=device)
    seen = (before + row.unsqueeze(1)).masked_fill(before >= begin, -1)  # oldest first, as `Step.around` has them
    own = tapped + torch.arange(ids.numel(), device=device).view_as(ids)
    rows = torch.cat((seen, own), 1).repeat_interleave(places, 0)  # every token of a block sees all of it
    position = begin + torch.arange(places, device=device)
    hidden = draft(ids.flatten(), position.flatten(), histories, rows)  # [b * places, dim]

    stage = draft.stages()[-1]
    assert stage.markov_head is not None and stage.confidence_head is not None
    embedding = stage.markov_head.embedding(text[:, :-1].flatten())
    logits = (draft.logits(hidden) + stage.markov_head.head(embedding)).float()
    sure = stage.confidence_head(hidden, embedding).float()
    target, asked = text[:, 1:].flatten(), known.flatten()
    right = logits.detach().argmax(1) == target
    count = asked.sum().clamp_min(1)
    return DraftLoss(
        F.cross_entropy(logits, target.masked_fill(~asked, NOT_ASKED), ignore_index=NOT_ASKED, reduction="sum") / count,
        F.binary_cross_entropy_with_logits(sure, right.float(), asked.float(), reduction="sum") / count,
        float((right.view_as(known) & known).cumprod(1).sum(1).float().mean()),
    )
