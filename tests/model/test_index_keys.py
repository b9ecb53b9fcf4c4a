"""`index_keys`: what a ratio-2 source scores against on a single-token step that completes no group.

"own_keys": its own keys, always. "as_written": the keys published last, which are another layer's. Prefill and steps
that complete a group are the same in both.
"""

import pytest
import torch

from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Cache, Step
from tests.small import small_config, small_model, tokens


def models(seed: int) -> tuple[Transformer, Transformer]:
    ops = choose("cpu", "reference")
    own, written = (small_model(small_config(), ops, seed, mode) for mode in ("own_keys", "as_written"))
    return own, written


@torch.no_grad()
def prefill_then_one(model: Transformer, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt without its last token, and of that token in a step of its own."""
    cache = Cache(model.config, 1, len(ids))
    slot = cache.open()
    prompt = model(cache.step([(slot, ids[:-1])], "all"), cache).logits
    return prompt, model(cache.step([(slot, ids[-1:])]), cache).logits


def test_prefill_is_the_same_and_so_is_a_step_that_completes_a_group(seed: int) -> None:
    own, written = models(seed)
    for length in (20, 22, 28):  # the last token stands at an odd position
        ids = tokens(own.config, length, seed)
        for a, b in zip(prefill_then_one(own, ids), prefill_then_one(written, ids), strict=True):
            assert torch.equal(a, b)


def test_a_step_that_completes_no_group_differs(seed: int) -> None:
    """At even positions, with 26 and more keys to choose two from: keys of another layer seldom give the same two."""
    own, written = models(seed)
    changed = 0
    for length in (53, 57, 61, 65):
        ids = tokens(own.config, length, seed)
        (prompt, step), (same, other) = prefill_then_one(own, ids), prefill_then_one(written, ids)
        assert torch.equal(prompt, same)
        changed += not torch.equal(step, other)
    assert changed >= 2


@torch.no_grad()
def test_own_keys_decode_agrees_with_prefill_and_as_written_does_not(seed: int) -> None:
    own, written = models(seed)
    ids = tokens(own.config, 57, seed)
    whole = own(_whole(own, ids)).logits
    assert torch.equal(prefill_then_one(own, ids)[1], whole)
    decoded = [prefill_then_one(written, ids[:n])[1] for n in (41, 49, 57)]
    prompts = [written(_whole(written, ids[:n])).logits for n in (41, 49, 57)]
    assert any(not torch.equal(a, b) for a, b in zip(decoded, prompts, strict=True))


def _whole(model: Transformer, ids: torch.Tensor) -> Step:
    cache = Cache(model.config, 1, len(ids))
    return cache.step([(cache.open(), ids)])


@pytest.mark.parametrize("position", [20, 26])
@torch.no_grad()
def test_as_written_scores_the_other_sources_keys(position: int, seed: int) -> None:
    """Layer 1 (ratio 2) at an even position: the first (position + 1) // 2 keys of layer 3 (ratio 1)."""
    _, written = models(seed)
    ids = tokens(written.config, position + 1, seed)
    cache = Cache(written.config, 1, position + 1)
    slot = cache.open()
    written(cache.step([(slot, ids[:-1])]), cache)
    seen: list[torch.Tensor] = []
    block = next(b for i, b in enumerate(written.blocks()) if i == 1)
    keys_of = (position + 1) // 2
    block.attn.indexer.register_forward_pre_hook(lambda _, given: seen.append(given[3][0].upto(keys_of).clone()))
    expected = cache.view("keys", 3, slot)[: (position + 1) // 2].clone()
    written(cache.step([(slot, ids[-1:])]), cache)
    assert torch.equal(seen[0], expected)
    assert not torch.equal(expected, cache.view("keys", 1, slot))
