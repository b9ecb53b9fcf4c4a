"""How an indexer learns: from the attention of its own layer, and from nothing else.

Picks are numbers, so the language loss gives an indexer no gradient. Its own loss is the divergence of two
distributions over the same latents: that of its scores, and that of the attention's probabilities, summed over heads.

    target P_j = sum over heads of p_h(j), made to sum to 1        index Q_j = softmax of the scores
    loss = mean over tokens of  sum_j P_j (log P_j - log Q_j)      its gradient at a score: Q_j - P_j

All that the loss is made of is detached but the indexer's own weights: queries, head weights, and keys, which a source
makes for the re-scorers below it as well. It learns from a packed step with a fresh cache, all of whose tokens the
layer ran (`wanted="all"`).

    with Lessons(model) as lessons:
        output = model(step, checkpoint=True)
    index_loss = sum(lessons.losses(Target()).values())

Over picks, tokens of all sequences are compared together, and the cost grows with the tokens alone: only what was
picked is gathered. Over all latents it grows with their square; sequences are taken one at a time, some tokens of each.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from openv41.errors import InputError
from openv41.formats import INDEX
from openv41.model.attention import Attention
from openv41.model.far import Source
from openv41.ops import launch_bound, rows_at_once
from openv41.state import Cache, Run, Sight, Step
from openv41.state.step import on_device

PIECE = 1 << 22
"""Probabilities (heads x tokens x positions), and numbers of gathered rows, that exist at a time on a CPU."""

HIDDEN = -1e30
"""The score of a position that does not take part: finite, so that a row without any has no NaN."""


@dataclass(frozen=True)
class Target:
    """What the scores are held against.

    `kind`: "joint", the probabilities that attention has, with window and sink in the denominator, so that a head which
    looks elsewhere has little say; or "far_only", each head's softmax over latents alone, all heads with the same say.
    `over`: the latents compared, "picks", those that the indexer picked; or "dense", all visible ones, for a warm-up.
    `candidates`: whether a re-scorer's dense comparison stays within the candidate blocks.
    """

    kind: Literal["joint", "far_only"] = "joint"
    over: Literal["picks", "dense"] = "picks"
    candidates: bool = True


@dataclass(frozen=True)
class Lesson:
    """What one layer's indexer was given and picked: detached, and of the memory of its input."""

    attention: Attention
    x: Float[Tensor, "n dim"]
    step: Step
    before: Sight
    sight: Sight
    cache: Cache


class Lessons:
    """Notes what every indexer of `model` is given in one forward, inside a `with`."""

    def __init__(self, model: nn.Module) -> None:
        self.attentions = [part for part in model.modules() if isinstance(part, Attention) and part.indexer is not None]
        self.noted: dict[int, Lesson] = {}
        self.hooks: list[Any] = []

    def __enter__(self) -> "Lessons":
        self.hooks = [attention.register_forward_hook(self._note) for attention in self.attentions]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _note(self, attention: Attention, given: tuple[Any, ...], result: tuple[Tensor, Sight]) -> None:
        x, step, before, cache = given
        if attention.layer in self.noted:  # a checkpoint runs it again
            return
        if any(run.start for run in step.runs):
            raise InputError("an indexer learns from whole sequences: give the model no cache")
        self.noted[attention.layer] = Lesson(attention, x.detach(), step, before, result[1], cache)

    def losses(self, target: Target) -> dict[int, Float[Tensor, ""]]:
        """The loss of each layer that has an indexer, with gradient."""
        keys: Tensor | None = None
        found = {}
        for layer, lesson in self.noted.items():
            own = index_keys(lesson)
            keys = keys if own is None else own
            assert keys is not None, "a source lies above every re-scorer"
            found[layer] = (picks_loss if target.over == "picks" else dense_loss)(lesson, keys, target)
        return found

    @torch.no_grad()
    def recall(self) -> dict[int, float]:
        """Of each layer: how many of the `index_topk` latents that attention would weigh most, all visible ones taken
        into account (by the joint target), its indexer has picked. Tokens that see no more than that do not count."""
        return {layer: recall_of(lesson) for layer, lesson in self.noted.items()}


def index_keys(lesson: Lesson) -> Float[Tensor, "p c"] | None:
    """The index keys of all runs, one after another, with gradient, where the layer is a source; else None."""
    attention, step = lesson.attention, lesson.step
    far, indexer = attention.far, attention.indexer
    if not isinstance(far, Source) or indexer is None:
        return None
    groups = step.groups(indexer.ratio)
    with torch.no_grad():
        latents = far.compressor(lesson.x, step, lesson.cache.sources[attention.layer].group)
    return indexer.ops.quantise(indexer.keys(latents, groups.first), INDEX)


# Over picks


def picks_loss(lesson: Lesson, keys: Float[Tensor, "p c"], target: Target) -> Float[Tensor, ""]:
    """The mean over the tokens that picked any latent."""
    step, indexer, picks = lesson.step, lesson.attention.indexer, lesson.sight.picks
    assert indexer is not None and picks is not None
    view = View.of(lesson)
    q, weights = indexer.queries(lesson.x, view.qr, step.position)
    rows = picks + _first_keys(step, indexer.ratio).unsqueeze(1)
    numbers = picks.shape[1] * (view.q.shape[2] + keys.shape[1]) + lesson.attention.window_size * view.q.shape[2]
    some = rows_at_once(step.device, 2 * numbers * view.q.element_size(), max(1, PIECE // numbers))
    total = q.new_zeros((), dtype=view.window.dtype)
    for first in range(0, len(step), some):
        piece = slice(first, first + some)
        known = picks[piece] >= 0
        wanted = view.target_of_picks(piece, target.kind)
        given = q[piece], weights[piece], keys, rows[piece], known, wanted
        if launch_bound(step.device):
            total = total + picks_divergence(*given)
        else:
            total = total + checkpoint(picks_divergence, *given, use_reentrant=False, preserve_rng_state=False)
    return total / (picks >= 0).any(1).sum().clamp_min(1)


def picks_divergence(
    q: Float[Tensor, "q i c"], weights: Float[Tensor, "q i"], keys: Float[Tensor, "p c"], rows: Int[Tensor, "q k"],
    known: Bool[Tensor, "q k"], target: Float[Tensor, "q k"],
) -> Float[Tensor, ""]:  # fmt: skip
    """The divergences of some tokens, added. Scores are worked out in the target's precision, without roundings."""
    gathered = keys.index_select(0, rows.where(known, 0).flatten()).view(*rows.shape, keys.shape[1]).to(target.dtype)
    products = q.to(target.dtype) @ gathered.mT  # [q, i, k]
    scores = (products.relu() * weights.unsqueeze(-1)).sum(1)
    return divergence(scores, target, known)


def _first_keys(step: Step, ratio: int) -> Int[Tensor, "n"]:
    """For each token, in which row of `index_keys` its sequence's first key lies."""
    return step.remember(("first keys", ratio), lambda: _lay_out(step, ratio))


def _lay_out(step: Step, ratio: int) -> Int[Tensor, "n"]:
    rows, first = [], 0
    for run in step.runs:
        rows += [first] * run.length
        first += run.end // ratio
    return on_device((rows,), step.device)[0]


# Over all latents


def dense_loss(lesson: Lesson, keys: Float[Tensor, "p c"], target: Target) -> Float[Tensor, ""]:
    """The mean over the tokens that see any latent."""
    attention, step = lesson.attention, lesson.step
    indexer = attention.indexer
    assert indexer is not None
    view = View.of(lesson)
    q, weights = indexer.queries(lesson.x, view.qr, step.position)
    total, tokens = q.new_zeros((), dtype=view.window.dtype), q.new_zeros((), dtype=torch.int64)
    for run, own in zip(step.runs, keys.split([run.end // indexer.ratio for run in step.runs]), strict=True):
        for piece in run.pieces(view.rows_at_once(run)):
            mask = view.mask(piece, run, target)
            tokens = tokens + mask.any(1).sum()
            total = total + checkpoint(
                piece_loss, view, run, piece, mask, target, q[piece], weights[piece], own,
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
    return total / tokens.clamp_min(1)


def piece_loss(
    view: "View", run: Run, piece: slice, mask: Bool[Tensor, "q p"], target: Target,
    q: Float[Tensor, "q i c"], weights: Float[Tensor, "q i"], keys: Float[Tensor, "p c"],
) -> Float[Tensor, ""]:  # fmt: skip
    """The divergences of some tokens of a run, added."""
    indexer = view.lesson.attention.indexer
    assert indexer is not None
    scores = indexer.ops.index_scores(q, weights, keys)
    with torch.no_grad():
        wanted = view.target(piece, run, mask, target.kind)
    return divergence(scores.to(wanted.dtype), wanted, mask)


def divergence(
    scores: Float[Tensor, "q p"], target: Float[Tensor, "q p"], mask: Bool[Tensor, "q p"]
) -> Float[Tensor, ""]:
    """KL(target || softmax of the scores) over the positions of the mask, added over the rows that have any."""
    index = scores.masked_fill(~mask, HIDDEN).log_softmax(1)
    own = target.clamp_min(torch.finfo(target.dtype).tiny).log()
    return (target * (own - index)).masked_fill(~mask, 0).sum()


class View:
    """What a layer's attention sees, worked out again from its input, without gradient."""

    def __init__(self, lesson: Lesson, q: Tensor, qr: Tensor, window: Tensor) -> None:
        self.lesson, self.q, self.qr, self.window = lesson, q, qr, window

    @classmethod
    @torch.no_grad()
    def of(cls, lesson: Lesson) -> "View":
        attention, step = lesson.attention, lesson.step
        if len(lesson.x) != len(step) or lesson.sight.picks is None:
            raise InputError("an indexer learns from steps whose tokens were all run: ask for all logits")
        q, qr = attention.query(lesson.x, step.position)
        window = attention.stored(lesson.x, step.position, False)
        wide = torch.promote_types(q.dtype, torch.float32)
        return cls(lesson, q.to(wide), qr, window.to(wide))

    @cached_property
    def latents(self) -> dict[int, Float[Tensor, "p d"]]:
        """Those that each run made, by its slot."""
        step = self.lesson.step
        table, _ = self.lesson.sight.source()
        found = {}
        for run in step.runs:
            index = torch.arange(run.end // table.ratio, device=step.device).unsqueeze(0)
            rows = table.rows(step.slot[run.first : run.first + 1], index).squeeze(0)
            found[run.slot] = table.table[rows].detach().to(self.q.dtype)
        return found

    def rows_at_once(self, run: Run) -> int:
        heads, width = self.q.shape[1], self.lesson.attention.window_size
        scores = heads * (self._latents(run).shape[0] + width)
        return rows_at_once(self.q.device, 6 * scores * self.q.element_size(), max(1, PIECE // scores))

    def _latents(self, run: Run) -> Float[Tensor, "p d"]:
        return self.latents[run.slot]

    def mask(self, piece: slice, run: Run, target: Target) -> Bool[Tensor, "q p"]:
        """The positions that are compared."""
        lesson, indexer = self.lesson, self.lesson.attention.indexer
        assert indexer is not None and lesson.sight.picks is not None
        count = self._latents(run).shape[0]
        position = torch.arange(count, device=lesson.x.device)
        visible = position < lesson.step.visible(indexer.ratio)[piece].unsqueeze(1)
        if target.over == "picks":
            return picked(lesson.sight.picks[piece], count)
        within = None if isinstance(lesson.attention.far, Source) else lesson.before.candidates
        if within is None or not target.candidates:
            return visible
        return visible & within[piece].repeat_interleave(indexer.block, 1)[:, :count]

    def target(
        self, piece: slice, run: Run, mask: Bool[Tensor, "q p"], kind: Literal["joint", "far_only"]
    ) -> Float[Tensor, "q p"]:
        """The attention's distribution over the positions of the mask; 0 where there are none."""
        far = (self.q[piece] @ self._latents(run).mT).masked_fill(~mask.unsqueeze(1), -torch.inf)  # [q, h, p]
        return self._target(piece, far, kind)

    @torch.no_grad()
    def target_of_picks(self, piece: slice, kind: Literal["joint", "far_only"]) -> Float[Tensor, "q k"]:
        """The same over the picks, in their order; 0 where there is none."""
        table, picked = self.lesson.sight.far()
        latents = table.detach()[picked[piece].clamp_min(0)].to(self.q.dtype)  # [q, k, d]
        hidden = (picked[piece] < 0).unsqueeze(1)
        return self._target(piece, (self.q[piece] @ latents.mT).masked_fill(hidden, -torch.inf), kind)

    def _target(
        self, piece: slice, far: Float[Tensor, "q h t"], kind: Literal["joint", "far_only"]
    ) -> Float[Tensor, "q t"]:
        """From the products with latents, -inf where one is not compared."""
        attention, step, q = self.lesson.attention, self.lesson.step, self.q[piece]
        scores = far * attention.scale
        if kind == "joint":
            seen = step.window(attention.window_size)[piece]  # positions, which are rows from the run's first on
            first = torch.arange(piece.start, piece.start + len(q), device=q.device) - step.position[piece]
            near = self.window[(seen + first.unsqueeze(1)).clamp_min(0)]  # [q, w, d]
            near = (q @ near.mT * attention.scale).masked_fill((seen < 0).unsqueeze(1), -torch.inf)
            sink = attention.attn_sink.to(q.dtype).expand(q.shape[:2]).unsqueeze(-1)
            scores = torch.cat((scores, near, sink), -1)
        p = scores.softmax(-1)[..., : far.shape[-1]].nan_to_num(0).sum(1)  # far_only: NaN where nothing is seen
        return p / p.sum(1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)


def picked(picks: Int[Tensor, "q k"], count: int) -> Bool[Tensor, "q p"]:
    """Picks as marks."""
    marks = torch.zeros(picks.shape[0], count + 1, dtype=torch.bool, device=picks.device)
    return marks.scatter(1, picks.where(picks >= 0, count), True)[:, :count]


def recall_of(lesson: Lesson) -> float:
    """See `Lessons.recall`. NaN if no token sees more than it may pick."""
    view, step, indexer = View.of(lesson), lesson.step, lesson.attention.indexer
    assert indexer is not None and lesson.sight.picks is not None
    found, tokens = torch.zeros(2, dtype=torch.int64, device=step.device)
    for run in step.runs:
        if run.end // indexer.ratio <= indexer.topk:
            continue
        for piece in run.pieces(view.rows_at_once(run)):
            visible = view.mask(piece, run, Target(over="dense", candidates=False))
            many = visible.sum(1) > indexer.topk
            target = view.target(piece, run, visible, "joint").masked_fill(~visible, -1)
            best = target.topk(indexer.topk, 1).indices
            marks = picked(lesson.sight.picks[piece], visible.shape[1])
            found = found + (marks.gather(1, best) & many.unsqueeze(1)).sum()
            tokens = tokens + many.sum()
    return float(found / (tokens * indexer.topk))
