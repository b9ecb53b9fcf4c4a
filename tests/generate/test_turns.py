"""A conversation that goes on from what was kept of it, turn by turn, is the same ids read at once."""

import pytest
import torch

from openv41.generate.prefix import PrefixStore
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Cache
from tests.drafts import SHALLOW
from tests.small import readable, small_config, small_model, tokens

CONFIG = small_config(**SHALLOW)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return small_model(CONFIG, choose("cpu", "reference"), 5)


@torch.no_grad()
def test_a_hit_of_any_length_gives_the_logits_of_the_whole(seed: int) -> None:
    """At each place of window, group and block, and around the end of a page of 64 tokens. In float64."""
    model = small_model(CONFIG, choose("cpu", "cpu", "plain"), 5)
    ids = tokens(CONFIG, 67, seed).tolist()
    cache = Cache(CONFIG, 3, 300, slack=1, dtype=model.ops.dtype)
    assert cache.pages.tokens == 64
    slot = cache.open()
    logits = model(cache.step([(slot, ids)], "all"), cache).logits
    store = PrefixStore(model, cache, limit=1)
    store.keep(slot, ids)
    for hit in (*range(1, 14), *range(61, len(ids))):
        begun, held = store.begin(ids[: hit + 1])
        assert held == hit
        got = model(cache.step([(begun, ids[hit : hit + 1])]), cache).logits[0]
        assert (got - logits[hit]).abs().max() <= 1e-9 * logits[hit].abs().max(), hit
        cache.close(begun)


@torch.no_grad()
def test_turns_are_one_text(model: Transformer, seed: int) -> None:
    """Each turn: what was said before is found, some ids are new, and an answer is decoded in drafts that are partly
    rejected. The answer's last id is not read in its own turn: it is the first new id of the next one."""
    cache = Cache(CONFIG, 3, 600, slack=3)
    store = PrefixStore(model, cache, limit=1)
    text: list[int] = []
    for turn in range(4):
        text += tokens(CONFIG, 5 + 9 * turn, seed + turn).tolist()
        slot, held = store.begin(text)
        assert held == (cache.length(store_of(store)) if turn else 0)
        logits = model(cache.step([(slot, text[held:])]), cache).logits
        for place in range(3):
            text.append(int(logits[-1].argmax()))
            wrong = tokens(CONFIG, 3, seed + 10 * turn + place).tolist()
            answer = model(cache.step([(slot, [text[-1], *wrong])], "all"), cache).logits
            cache.rewind(slot, len(text))
            logits = answer[:1]
        text.append(int(logits[-1].argmax()))
        store.keep(slot, text[:-1])
        whole = Cache(CONFIG, 1, len(text), slack=3)
        expected = model(whole.step([(whole.open(), text[:-1])]), whole).logits
        assert torch.equal(logits, expected), turn
        for name, rows in readable(whole, 0).items():
            assert torch.equal(readable(cache, slot)[name], rows), (turn, name)
        cache.close(slot)


def store_of(store: PrefixStore) -> int:
    """The slot of the one prompt that is kept."""
    (slot,) = store.kept
    return slot
