"""Selections compared: positions that an indexer picks, and the blocks of positions within which others pick.

Index scores are bf16, so the k-th and the (k+1)-th best are often equal, and either may be taken. A row is *tied* if
that happened. An untied row must have the recorded picks. A tied one may have any whose scores are the k best.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from openv41.model.indexer import Indexer
from openv41.ops import Ops
from openv41.parity.compare import Sheet
from openv41.parity.folder import BadCase

NOTHING = -torch.inf
STEPS = 4
"""bf16 steps of a row's largest score by which a score may have moved and other picks follow."""


@dataclass(frozen=True)
class Seen:
    """One call of an indexer. Scores are -inf where a row does not see the position or may not pick it."""

    scores: Float[Tensor, "n p"]
    picks: Int[Tensor, "n k"]
    blocks: Bool[Tensor, "n blocks"] | None
    visible: Int[Tensor, "n"]
    tied: Bool[Tensor, "n"]
    """The boundary of the picks is tied, or that of the blocks."""


class Watch:
    """Listens to an indexer and keeps what each of its calls saw and chose, one `Seen` a call."""

    def __init__(self, indexer: Indexer) -> None:
        self.seen: list[Seen] = []
        self.indexer = indexer
        indexer.register_forward_hook(self._listen, with_kwargs=True)

    def rows(self, places: list[int]) -> Seen:
        """Some rows of all the calls, taken one after another. Scores are as wide as the widest call's."""
        widths = {name: max(getattr(seen, name).shape[1] for seen in self.seen) for name in ("scores", "picks")}

        def joined(name: str, padding: int | float) -> Tensor:
            parts = [getattr(seen, name) for seen in self.seen]
            return torch.cat([F.pad(part, (0, widths[name] - part.shape[1]), value=padding) for part in parts])[places]

        visible, tied = (torch.cat([getattr(seen, name) for seen in self.seen])[places] for name in ("visible", "tied"))
        return Seen(joined("scores", NOTHING), joined("picks", -1), None, visible, tied)

    def _listen(self, module: nn.Module, args: tuple, kwargs: dict, result: object) -> None:
        indexer = self.indexer
        inputs = dict(zip(("x", "qr", "step", "keys", "within"), args, strict=False)) | kwargs
        step, within = inputs["step"], inputs["within"]
        q, weights = indexer.queries(inputs["x"], inputs["qr"], step.position)
        visible = step.visible(indexer.ratio)
        scores = q.new_full((len(step), max(known.count for known in inputs["keys"])), NOTHING)
        for run, known in zip(step.runs, inputs["keys"], strict=True):
            for piece in run.pieces(256):
                if known.count:
                    inside = None if within is None else within[piece]
                    every = known.upto(known.count)
                    scores[piece, : known.count] = indexer.scores(q[piece], weights[piece], every, inside)
        scores = hide(scores, visible)
        tied = tied_picks(scores, indexer.topk)
        if indexer.keeps_blocks:
            tied |= tied_blocks(scores, visible, indexer.block, indexer.keeps_blocks)
        self.seen.append(Seen(scores, result.positions, result.blocks, visible, tied))  # type: ignore[attr-defined]


class TorchTies:
    """Operations that take ties as `torch.topk` does, which the published code calls; the rest is `ops`' own."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def pick(self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], k: int) -> Int[Tensor, "n k"]:
        chosen = hide(scores, visible).topk(min(k, scores.shape[1])).indices
        return ordered(chosen.masked_fill(chosen >= visible.unsqueeze(1), -1), k)

    def pick_blocks(
        self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], block: int, k: int
    ) -> Bool[Tensor, "n blocks"]:
        best = block_best(scores, visible, block)
        kept = best.topk(min(k, best.shape[1])).indices
        return torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True) & (best > NOTHING)


def hide(scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"]) -> Float[Tensor, "n p"]:
    return scores.masked_fill(torch.arange(scores.shape[1]) >= visible.unsqueeze(1), NOTHING)


def tied_picks(scores: Float[Tensor, "n p"], k: int) -> Bool[Tensor, "n"]:
    """Rows whose k-th and (k+1)-th best score are equal, so that it is open which positions are picked."""
    if scores.shape[1] <= k:
        return torch.zeros(scores.shape[0], dtype=torch.bool)
    best = scores.float().topk(k + 1).values
    return (best[:, k - 1] == best[:, k]) & (best[:, k] > NOTHING)


def block_best(scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], block: int) -> Float[Tensor, "n blocks"]:
    """The best visible score of each block, that of the block with the newest visible position being +inf."""
    best = F.pad(hide(scores.float(), visible), (0, -scores.shape[1] % block), value=NOTHING)
    best = best.unflatten(1, (-1, block)).amax(2)
    newest = (visible.unsqueeze(1) - 1) // block == torch.arange(best.shape[1])
    return best.masked_fill(newest & (visible.unsqueeze(1) > 0), torch.inf)


def tied_blocks(scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], block: int, k: int) -> Bool[Tensor, "n"]:
    return tied_picks(block_best(scores, visible, block), k) if scores.shape[1] else visible.new_zeros(len(visible)) > 0


def mask_of(blocks: Bool[Tensor, "n blocks"], block: int, positions: int) -> Bool[Tensor, "n p"]:
    return blocks.repeat_interleave(block, 1)[:, :positions]


def ordered(picks: Int[Tensor, "*n k"], width: int) -> Int[Tensor, "*n width"]:
    """Picks ascending with -1 behind, in `width` columns: two lists of the same set come out equal."""
    picks = F.pad(picks.long(), (0, max(0, width - picks.shape[-1])), value=-1)
    last = torch.iinfo(torch.int64).max
    picks = picks.masked_fill(picks < 0, last).sort(-1).values
    return picks.masked_fill(picks == last, -1)


def without_offset(recorded: Int[Tensor, "*n k"], offset: int) -> Int[Tensor, "*n k"]:
    """Recorded picks as positions: in the published lists they stand behind `offset` window entries."""
    if bool(((recorded >= 0) & (recorded < offset)).any()):
        raise BadCase(f"recorded picks must be below 0 or at least {offset}, the number of window entries before them")
    return torch.where(recorded >= 0, recorded.long() - offset, -1)


def compare_picks(
    sheet: Sheet,
    what: str,
    got: Int[Tensor, "n k"],
    recorded: Int[Tensor, "n k2"],
    tied: Bool[Tensor, "n"],
    scores: tuple[Float[Tensor, "n p"], Float[Tensor, "n p"]] | None = None,
    judged: Bool[Tensor, "n"] | None = None,
) -> Bool[Tensor, "n"]:
    """Rows without a tie must pick the recorded positions; with one, as many, and none that scores below the worst of
    those. Where a row's own `scores` (ours, recorded) differ by a few steps, none may score lower by more than both
    could have moved. Rows that are not `judged` may differ: the candidates above them were tied. Returns the rows that
    lawfully differ."""
    width = max(got.shape[1], recorded.shape[1])
    ours, theirs = ordered(got, width), ordered(recorded, width)
    differ = (ours != theirs).any(1)
    wrong = differ & ~tied
    if scores is not None:
        slack, moved = _moved(*scores)
        wrong = differ & torch.where(tied | moved, _worse(ours, theirs, scores[1], slack), True)
    if judged is not None:
        wrong &= judged
    count = int(wrong.sum())
    first = int(wrong.nonzero()[0]) if count else 0
    sheet.require(what, not count, f"{count} of {len(wrong)} rows pick other positions (row {first})")
    return differ & ~wrong


def _moved(ours: Tensor, recorded: Tensor) -> tuple[Float[Tensor, "n"], Bool[Tensor, "n"]]:
    """By how much two scores of a row may have changed places, and the rows in which any could: scores that came out a
    few bf16 steps apart. Rows with scores further apart are no excuse for other picks."""
    if not ours.shape[1]:
        return torch.zeros(len(ours), dtype=torch.float64), torch.zeros(len(ours), dtype=torch.bool)
    apart = (ours.double() - recorded.double()).abs().nan_to_num(0.0, torch.inf).amax(1)  # -inf less -inf is NaN
    largest = recorded.double().masked_fill(~recorded.isfinite(), 0.0).abs().amax(1)
    few = (apart > 0) & (apart <= STEPS * 2.0**-8 * largest)
    return torch.where(few, 2 * apart, 0.0), few


def compare_most(
    sheet: Sheet,
    what: str,
    got: Int[Tensor, "n k"],
    recorded: Int[Tensor, "n k2"],
    tied: Bool[Tensor, "n"],
    others: int,
) -> Bool[Tensor, "n"]:
    """Like `compare_picks` without scores, but `others` of an untied row's picks may be others. Returns all rows that
    differ."""
    width = max(got.shape[1], recorded.shape[1])
    ours, theirs = ordered(got, width), ordered(recorded, width)
    new = torch.stack([~torch.isin(row, known) for row, known in zip(ours, theirs, strict=True)]).sum(1)
    fewer = (ours >= 0).sum(1) != (theirs >= 0).sum(1)
    wrong = (fewer | (new > others)) & ~tied
    most = int(new.masked_fill(tied, 0).max()) if len(new) else 0
    sheet.require(what, not bool(wrong.any()), f"up to {most} of {width} picks are others than recorded")
    return (ours != theirs).any(1)


def _worse(ours: Tensor, theirs: Tensor, scores: Tensor, slack: Tensor) -> Bool[Tensor, "n"]:
    """Rows in which ours, or theirs, are no k best by `scores`: another number, a repeat, one below the k-th best."""
    scores = scores.double().masked_fill(scores.isnan(), NOTHING)  # padding
    scores = F.pad(scores, (0, 1), value=NOTHING)  # a score for what lies outside
    count = (theirs >= 0).sum(1)
    best = scores.sort(1, descending=True).values
    kth = best.gather(1, (count - 1).clamp(0, best.shape[1] - 1).unsqueeze(1)).squeeze(1)

    def no_best(picks: Tensor) -> Tensor:
        repeat = ((picks[:, 1:] == picks[:, :-1]) & (picks[:, 1:] >= 0)).any(1)
        taken = scores.gather(1, picks.clamp(0, scores.shape[1] - 1)).masked_fill(picks < 0, torch.inf)
        return repeat | ((picks >= 0).sum(1) != count) | (taken < (kth - slack).unsqueeze(1)).any(1)

    return no_best(ours) | no_best(theirs)
