"""A prompt that starts from a kept one gives what it gives cold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openv41.errors import InputError
from openv41.generate.prefix import PrefixStore, RadixIndex
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Cache
from tests.small import readable, small_config, small_model, tokens

CONFIG = small_config(original_seq_len=2048)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return small_model(CONFIG, choose("cpu", "reference"), 3)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=6), st.lists(st.integers(0, 2), max_size=9)
)
def test_the_index_finds_the_longest_shared_beginning(kept: list[list[int]], ids: list[int]) -> None:
    index = RadixIndex()
    for slot, prompt in enumerate(kept):
        index.add(prompt, slot)

    def shared(prompt: list[int]) -> int:
        pairs = enumerate(zip(prompt, ids, strict=False))
        return next((place for place, (a, b) in pairs if a != b), min(len(prompt), len(ids)))

    def check(left: dict[int, list[int]]) -> None:
        best = max(map(shared, left.values()), default=0)
        length, slot = index.longest(ids)
        assert length == best and (slot is None if best == 0 else shared(left[slot]) == best)

    left = dict(enumerate(kept))
    check(left)
    while left:
        slot, prompt = left.popitem()
        index.remove(prompt, slot)
        check(left)
    assert not index.root.then


@pytest.mark.parametrize("store", ["wide", "packed"])
@torch.no_grad()
def test_hits_at_any_length_give_the_logits_of_a_cold_run(store: str, model: Transformer, seed: int) -> None:
    """1, 127, 128, 129, 1,000 and 4,096 tokens: at every border of windows, groups and pages."""
    longest = 4096 if store == "wide" else 1000
    ids = tokens(CONFIG, longest + 3, seed).tolist()
    cache = Cache(CONFIG, 4, 2 * longest + 600, slack=2, store=store)
    slot = cache.open()
    cold = []
    for first in range(0, len(ids), 512):
        cold.append(model(cache.step([(slot, ids[first : first + 512])], "all"), cache).logits)
    logits = torch.cat(cold)
    kept = PrefixStore(model, cache, limit=1)
    kept.keep(slot, ids)
    cache.close(slot)
    for hit in (1, 127, 128, 129, 1000, 4096):
        if hit > longest:
            continue
        other = (ids[hit] + 1) % (CONFIG.vocab_size - 1)  # part ways right behind the hit
        prompt = [*ids[:hit], other]
        begun, reused = kept.begin(prompt)
        assert reused == hit
        alone = Cache(CONFIG, 1, hit, slack=2, store=store)
        model(alone.step([(alone.open(), ids[:hit])]), alone)
        for name, rows in readable(alone, 0).items():
            assert torch.equal(readable(cache, begun)[name], rows), name
        expected = [model(alone.step([(0, [id])]), alone).logits for id in (other, 5, 6)]
        got = [model(cache.step([(begun, [id])]), cache).logits for id in (other, 5, 6)]
        assert torch.equal(torch.cat(got), torch.cat(expected))
        cache.close(begun)
        again, _ = kept.begin(ids[: hit + 1])
        assert torch.equal(model(cache.step([(again, [ids[hit]])]), cache).logits[0], logits[hit])
        cache.close(again)


@torch.no_grad()
def test_a_half_depth_prefill_goes_on_from_a_hit(model: Transformer, seed: int) -> None:
    """The rest of the prompt is long enough that the upper layers skip some of it, or short enough that they do not."""
    ids = tokens(CONFIG, 150, seed).tolist()
    cache = Cache(CONFIG, 3, 600, slack=1)
    slot = cache.open()
    model(cache.step([(slot, ids[:60])]), cache)
    kept = PrefixStore(model, cache, limit=1)
    kept.keep(slot, ids[:60])
    for length in (150, 63, 33):
        begun, reused = kept.begin(ids[:length])
        assert reused == min(60, length - 1)
        got = model(cache.step([(begun, ids[reused:length])]), cache).logits
        alone = Cache(CONFIG, 1, length, slack=1)
        assert torch.equal(got, model(alone.step([(alone.open(), ids[:length])]), alone, prefill="full").logits)
        for name, rows in readable(alone, 0).items():
            assert torch.equal(readable(cache, begun)[name], rows), name
        cache.close(begun)


@torch.no_grad()
def test_bounded_replay_is_exact_while_it_reaches_the_start_and_close_after(model: Transformer, seed: int) -> None:
    ids = tokens(CONFIG, 200, seed).tolist()
    errors = {}
    for hit in (1, 3, 4, 60, 120):
        cache = Cache(CONFIG, 3, 400)
        slot = cache.open()
        expected = model(cache.step([(slot, ids[: hit + 1])]), cache).logits
        kept = PrefixStore(model, cache, limit=1, replay="bounded")
        kept.keep(slot, ids[: hit + 1])
        begun, reused = kept.begin(ids[: hit + 1])
        assert reused == hit
        got = model(cache.step([(begun, ids[hit : hit + 1])]), cache).logits
        errors[hit] = float((got - expected).abs().max() / expected.abs().max())
    assert all(errors[hit] == 0 for hit in (1, 3, 4))
    assert errors[60] > 0 and errors[120] > 0


@torch.no_grad()
def test_the_oldest_prompt_makes_room_and_nothing_leaks(model: Transformer, seed: int) -> None:
    cache = Cache(CONFIG, 3, 1000)
    kept = PrefixStore(model, cache, limit=2)
    prompts = [[i, *tokens(CONFIG, 69, seed + i).tolist()] for i in range(3)]  # which share no beginning
    for prompt in prompts:
        slot, reused = kept.begin(prompt)
        assert reused == 0
        model(cache.step([(slot, prompt)]), cache)
        kept.keep(slot, prompt)
        cache.close(slot)
    assert list(kept.kept.values()) == [tuple(prompt) for prompt in prompts[1:]]
    slot, reused = kept.begin(prompts[0])
    assert reused == kept.index.longest(prompts[0])[0]
    cache.close(slot)
    for held in list(kept.kept):
        kept.drop(held)
    assert len(cache.pages.free) == cache.pages.count and cache.lengths == [None] * 3
    with pytest.raises(InputError, match="ids were given"):
        kept.keep(cache.open(), [1, 2])
    with pytest.raises(InputError, match="at least 1 prompt"):
        PrefixStore(model, cache, limit=0)
