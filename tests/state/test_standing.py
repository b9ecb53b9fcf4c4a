"""Steps whose tensors stay where they are do what other steps do, to the bit."""

import pytest
import torch

from openv41.errors import InputError
from openv41.ops import choose
from openv41.state import Cache, Standing
from tests.small import readable, small_config, small_model, tokens


@torch.no_grad()
@pytest.mark.parametrize("store", ["wide", "packed"])
def test_standing_steps_give_the_bits_of_ordinary_ones(store: str, seed: int) -> None:
    """Two sequences of other parity, around the window of 4 and through many groups of two."""
    model = small_model(small_config(engram_layer_ids=(), engram_num_embeddings=()), choose("cpu", "reference"))
    ids = [tokens(model.config, 24, seed + slot) for slot in range(2)]
    caches = [Cache(model.config, 2, 128, slack=1, store=store) for _ in range(2)]
    starts, steps = (7, 4), 12
    for cache in caches:
        slots = [cache.open() for _ in ids]
        model(cache.step([(slot, ids[slot][: starts[slot]]) for slot in slots]), cache)
    plain, still = caches
    standing = Standing([0, 1], starts, "cpu", steps)
    held = standing.ids.data_ptr(), standing.position.data_ptr()
    for turn in range(steps):
        given = [ids[slot][starts[slot] + turn : starts[slot] + turn + 1] for slot in range(2)]
        wanted = model(plain.step(list(enumerate(given))), plain).logits
        standing.ids.copy_(torch.cat(given))
        got = model(standing.step(), still).logits
        standing.advance()
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert (standing.step().ids.data_ptr(), standing.step().position.data_ptr()) == held
    for slot in range(2):
        for name, rows in readable(plain, slot).items():
            torch.testing.assert_close(readable(still, slot)[name], rows, rtol=0, atol=0, msg=name)


def test_what_cannot_stand_is_refused() -> None:
    with pytest.raises(InputError, match="a length for each slot, got 2 and 1"):
        Standing([0, 1], [5], "cpu", 4)
    with pytest.raises(InputError, match="ahead=0"):
        Standing([0], [5], "cpu", 0)
