"""The draft's loss is of what generation drafts, its gradient stays in the draft, and it learns."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from openv41.state import Cache
from openv41.train.data import Pack
from openv41.train.draft import Blocks, draft_loss, draw_blocks
from openv41.train.language import run_headless
from openv41.train.loop import Training
from openv41.train.trainable import build
from tests.small import drafting_config, fill_randomly, tokens
from tests.train.runs import plain_ops, settings_of


@pytest.fixture(scope="module")
def model():
    built = build(drafting_config(), plain_ops(), 1)
    fill_randomly(built, 1)
    return built


def pack_of(model, *lengths):
    return Pack(tuple(tokens(model.config, length, seed).numpy() for seed, length in enumerate(lengths)))


def test_blocks_begin_wherever_there_is_a_token_before_and_behind(rng):
    pack = Pack((np.arange(10, 14), np.arange(20, 22), np.arange(30, 33)))
    blocks = draw_blocks(pack, 3, 100, rng)
    assert blocks.text.tolist() == [[11, 12, 13, 13], [12, 13, 13, 13], [31, 32, 32, 32]]
    assert blocks.known.tolist() == [[True, True, False], [True, False, False], [True, False, False]]
    assert blocks.first.tolist() == [1, 2, 1] and blocks.row.tolist() == [0, 0, 4]
    assert len(draw_blocks(pack, 3, 2, rng).text) == 2


def test_the_loss_is_of_the_blocks_that_generation_runs(model, rng):
    """The blocks drafted one by one, by `Draft.begin` with a cache, told the text's tokens."""
    pack, draft, places = pack_of(model, 12, 7), model.mtp, model.config.dspark_block_size
    blocks = draw_blocks(pack, places, 100, rng)
    _, output = run_headless(model, pack.step())
    found = draft_loss(draft, output, blocks)

    logits, targets, sure, hits = [], [], [], []
    with torch.no_grad():
        for text, known, first, row in zip(blocks.text, blocks.known, blocks.first, blocks.row, strict=True):
            ids = torch.from_numpy(pack.sequences[int(row > 0)])
            cache = Cache(model.config, 1, 64, dtype=torch.float32, draft=True)
            slot = cache.open()
            before = model(cache.step([(slot, ids[: int(first)])]), cache)
            draft.remember(before.taps, before.tapped, cache)
            drafting = draft.begin(text[:1], [slot], cache)
            right = 0
            for place in range(places):
                row_of, confidence = drafting.next(text[place : place + 1])
                if known[place]:
                    logits.append(row_of[0]), targets.append(text[place + 1]), sure.append(confidence[0])
                    right += int(right == place and row_of[0].argmax() == text[place + 1])
            hits.append(right)
    logits, targets, sure = torch.stack(logits), torch.stack(targets), torch.stack(sure)
    assert torch.allclose(found.language, F.cross_entropy(logits, targets), atol=1e-4)
    expected = F.binary_cross_entropy_with_logits(sure, (logits.argmax(1) == targets).float())
    assert torch.allclose(found.confidence, expected, atol=1e-4)
    assert found.right == pytest.approx(sum(hits) / len(hits))


def test_where_no_block_may_begin_the_loss_is_nothing_and_moves_nothing(model, rng):
    """But it reaches all that another pack's loss reaches, so that all processes have gradients of the same weights."""
    reached = []
    for pack in (Pack(pack_of(model, 2, 2).sequences), pack_of(model, 12)):
        _, output = run_headless(model, pack.step())
        total = draft_loss(model.mtp, output, draw_blocks(pack, 3, 2, rng)).total()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        reached.append({name: g for name, g in zip(named, found, strict=True) if g is not None})
    nothing, something = reached
    assert nothing.keys() == something.keys() and all(name.startswith("mtp.") for name in nothing)
    assert not any(g.any() for g in nothing.values()) and any(g.any() for g in something.values())


def test_blocks_do_not_see_one_another(model, rng):
    pack = pack_of(model, 12, 7)
    blocks = draw_blocks(pack, 3, 100, rng)
    _, output = run_headless(model, pack.step())
    half = Blocks(*(x[::2] for x in vars(blocks).values()))
    other = Blocks(*(x[1::2] for x in vars(blocks).values()))
    counts = [int(x.known.sum()) for x in (half, other)]
    whole, *parts = (float(draft_loss(model.mtp, output, x).language.detach()) for x in (blocks, half, other))
    together = sum(part * count for part, count in zip(parts, counts, strict=True)) / sum(counts)
    assert whole == pytest.approx(together, rel=1e-5)


@pytest.mark.parametrize("alone", [True, False])
def test_the_gradient_reaches_the_draft_alone(tmp_path, alone):
    """With the model frozen or not: what the draft's loss does to the model is nothing."""
    loss = {"draft": 1.0, "draft_only": alone, "draft_blocks": 16}
    training = Training(settings_of(tmp_path, loss=loss))
    plain = Training(settings_of(tmp_path))
    pack = training.packs.next()
    parts = training.backward(pack, 1.0)
    assert {"language", "draft", "confidence", "right"} <= parts.keys()
    plain.backward(pack, 1.0)
    own = {name: p.grad for name, p in training.optimizers.trained()}
    drafts = {name for name in own if name.startswith("mtp.")}
    every = {name for name, p in training.model.named_parameters() if name.startswith("mtp.") and p.requires_grad}
    idle = {name for name in every - drafts if ".experts." not in name}
    assert not idle and drafts
    rest = {name: grad for name, grad in own.items() if name not in drafts}
    expected = {} if alone else {name: p.grad for name, p in plain.optimizers.trained()}
    assert rest.keys() == expected.keys()
    assert all(torch.equal(rest[name].to_dense(), expected[name].to_dense()) for name in rest)


def test_a_draft_learns_while_the_model_stays(tmp_path):
    loss = {"draft": 1.0, "draft_only": True, "draft_blocks": 24}
    training = Training(settings_of(tmp_path, loss=loss, steps=25))
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    lines = [training.advance() for _ in range(25)]
    moved = {name for name, p in training.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(name.startswith("mtp.") for name in moved)
    assert lines[-1]["draft"] < lines[0]["draft"] - 1
