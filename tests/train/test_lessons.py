"""The indexer's own loss: its target, its gradient, whom it reaches, and what it teaches."""

import pytest
import torch
from torch import Tensor

from openv41.errors import InputError
from openv41.model.masters import make_masters
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Cache, Step
from openv41.train.lessons import Lessons, Target, View, dense_loss, divergence, index_keys, picks_loss
from tests.small import small_config, small_model, tokens

TARGETS = [
    Target(kind, over, candidates)
    for kind in ("joint", "far_only") for over in ("picks", "dense") for candidates in (True, False)
]  # fmt: skip


def learning(seed: int, numerics: str = "plain", **changes) -> Transformer:
    want = "reference" if numerics == "plain" else "cpu"
    model = small_model(small_config(**changes), choose("cpu", want, numerics, training=True), seed)
    make_masters(model, model.ops, torch.float64 if numerics == "plain" else torch.float32)
    return model


def taught(model: Transformer, seed: int, lengths=(13, 1, 26), **options) -> Lessons:
    step = Step.pack([(i, 0, tokens(model.config, n, seed + i)) for i, n in enumerate(lengths)], "all")
    with Lessons(model) as lessons:
        model(step, **options)
    return lessons


def test_no_gradient_where_the_index_is_the_target(rng: torch.Generator) -> None:
    mask = torch.rand(6, 9, generator=rng) < 0.6
    mask[2] = False
    target = torch.rand(6, 9, generator=rng, dtype=torch.float64).masked_fill(~mask, 0)
    target = target / target.sum(1, keepdim=True).clamp_min(1e-300)
    scores = (target.clamp_min(1e-300).log() + 3).requires_grad_()
    loss = divergence(scores, target, mask)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert abs(float(loss.detach())) < 1e-12 and gradient.abs().max() < 1e-12
    other = torch.randn(6, 9, generator=rng, dtype=torch.float64).requires_grad_()
    loss = divergence(other, target, mask)
    (gradient,) = torch.autograd.grad(loss, other)
    index = other.detach().masked_fill(~mask, -torch.inf).softmax(1).nan_to_num(0)
    assert loss > 0
    torch.testing.assert_close(gradient, index - target)


def told_its_own(scores: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """The divergence from a target that is what the index says."""
    assert target.shape == scores.shape == mask.shape
    own = scores.detach().masked_fill(~mask, -torch.inf).softmax(1).nan_to_num(0)
    return divergence(scores, own, mask)


def test_in_every_option_an_indexer_that_says_the_target_has_no_gradient(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = learning(seed)
    lessons = taught(model, seed)
    indexers = [p for name, p in model.named_parameters() if ".indexer." in name]
    for target in TARGETS:
        model.zero_grad()
        sum(lessons.losses(target).values()).backward()
        usual = max(float(p.grad.abs().max()) for p in indexers)
        model.zero_grad()
        with monkeypatch.context() as patch:
            patch.setattr("openv41.train.lessons.divergence", told_its_own)
            sum(lessons.losses(target).values()).backward()
        assert all(p.grad.abs().max() < 1e-9 * usual for p in indexers), target


@pytest.mark.parametrize("numerics", ["plain", "published"])
def test_the_loss_reaches_the_indexers_alone(numerics: str, seed: int) -> None:
    model = learning(seed, numerics)
    lessons = taught(model, seed, checkpoint=numerics == "published")
    for target in TARGETS if numerics == "plain" else TARGETS[:1]:
        model.zero_grad()
        losses = lessons.losses(target)
        assert list(losses) == [1, 3, 5] and all(loss > 0 and loss.isfinite() for loss in losses.values())
        sum(losses.values()).backward()
        reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.count_nonzero()}
        assert reached == {name for name, _ in model.named_parameters() if ".indexer." in name}


@pytest.mark.parametrize("kind", ["joint", "far_only"])
def test_the_target_is_the_attentions_distribution(kind: str, seed: int) -> None:
    """One token and head at a time."""
    model = learning(seed)
    lessons = taught(model, seed)
    for lesson in lessons.noted.values():
        view, attention, step = View.of(lesson), lesson.attention, lesson.step
        run = step.runs[2]
        piece = slice(run.first, run.first + run.length)
        mask = view.mask(piece, run, Target(kind))
        got = view.target(piece, run, mask, kind)
        latents = lesson.cache.view("latents", 1 if attention.layer == 1 else 3, run.slot)
        for t in (5, 25):
            picks = [pick for pick in lesson.sight.picks[run.first + t].tolist() if pick >= 0]
            assert mask[t].nonzero().flatten().tolist() == picks
            near = view.window[run.first + max(0, t - 3) : run.first + t + 1]
            total = torch.zeros(len(picks), dtype=torch.float64)
            for head, q in enumerate(view.q[run.first + t]):
                far = (latents[picks] @ q * attention.scale).exp()
                rest = (near @ q * attention.scale).exp().sum() + attention.attn_sink[head].exp()
                total += far / (far.sum() + (rest if kind == "joint" else 0))
            torch.testing.assert_close(got[t, picks], (total / total.sum()).detach())


@pytest.mark.parametrize("kind", ["joint", "far_only"])
def test_what_was_picked_is_gathered_or_everything_else_hidden(kind: str, seed: int) -> None:
    """Two ways to the same loss, and to the same gradients of every indexer."""
    model = learning(seed)
    lessons = taught(model, seed)
    keys = None
    for lesson in lessons.noted.values():
        own = index_keys(lesson)
        keys = keys if own is None else own
        indexers = [p for name, p in model.named_parameters() if ".indexer." in name]
        gathered, hidden = (loss(lesson, keys, Target(kind)) for loss in (picks_loss, dense_loss))
        torch.testing.assert_close(gathered, hidden, rtol=1e-10, atol=1e-12)
        found = [
            torch.autograd.grad(loss, indexers, retain_graph=True, allow_unused=True) for loss in (gathered, hidden)
        ]
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


def test_dense_masks_are_the_visible_positions_and_candidates_a_part_of_them(seed: int) -> None:
    lessons = taught(learning(seed), seed)
    lesson = lessons.noted[5]
    view, run = View.of(lesson), lesson.step.runs[2]
    piece = slice(run.first, run.first + run.length)
    everything = view.mask(piece, run, Target(over="dense", candidates=False))
    inside = view.mask(piece, run, Target(over="dense"))
    picks = view.mask(piece, run, Target())
    assert torch.equal(everything, torch.ones(26, 26, dtype=torch.bool).tril())
    assert inside.sum(1).max() == 4 and not (inside & ~everything).any() and not (picks & ~inside).any()


def test_a_re_scorer_teaches_its_sources_keys(seed: int) -> None:
    model = learning(seed)
    lessons = taught(model, seed)
    assert index_keys(lessons.noted[5]) is None
    lessons.losses(Target())[5].backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.count_nonzero()}
    assert {name.partition(".attn")[0] for name in reached} == {"layers.3", "layers.5"}
    assert {name for name in reached if "layers.3" in name} == {
        "layers.3.attn.indexer.wk.weight", "layers.3.attn.indexer.k_norm.weight"
    }  # fmt: skip


def test_an_indexer_learns_and_its_recall_rises(seed: int) -> None:
    """The model stands still; only its indexers move, in a dense warm-up."""
    model = learning(3, index_topk=3, candidate_topk_blocks=8)
    lengths = (40,)
    target = Target(over="dense", candidates=False)
    indexers = [p for name, p in model.named_parameters() if ".indexer." in name]
    optimizer = torch.optim.Adam(indexers, 0.03)
    lessons = taught(model, 3, lengths)
    first, before = lessons.losses(target), lessons.recall()
    for _ in range(12):
        optimizer.zero_grad()
        sum(lessons.losses(target).values()).backward()
        optimizer.step()
    lessons = taught(model, 3, lengths)
    last, after = lessons.losses(target), lessons.recall()
    print(before, after)
    assert last[1] < 0.8 * first[1]  # its input does not depend on picks
    assert sum(after.values()) > sum(before.values()) and all(0 <= value <= 1 for value in after.values())


def test_recall_is_whole_where_picks_are_the_best(seed: int) -> None:
    model = learning(seed)
    lesson = taught(model, seed).noted[1]
    view = View.of(lesson)
    for run in lesson.step.runs:
        piece = slice(run.first, run.first + run.length)
        visible = view.mask(piece, run, Target(over="dense"))
        if visible.shape[1] >= 2:
            best = view.target(piece, run, visible, "joint").masked_fill(~visible, -1).topk(2).indices
            lesson.sight.picks[piece] = best
    lessons = Lessons(model)
    lessons.noted[1] = lesson
    assert lessons.recall() == {1: 1.0}


def test_an_indexer_learns_from_whole_sequences(seed: int) -> None:
    model = learning(seed)
    cache = Cache(model.config, 1, 30, dtype=model.ops.dtype)
    slot = cache.open()
    model(cache.step([(slot, tokens(model.config, 9, seed))], "all"), cache)
    with Lessons(model), pytest.raises(InputError, match="whole sequences"):
        model(cache.step([(slot, tokens(model.config, 9, seed))], "all"), cache)
