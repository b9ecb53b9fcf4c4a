"""The loop with pictures in its prompts: chunks of any size, batches, and each picture seen once."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from openv41.errors import InputError
from openv41.generate.loop import Generation, Request
from openv41.generate.pictures import Pictures
from openv41.generate.prefix import PrefixStore
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Cache, Picture, Placed
from tests.small import picture_of, seeing_config, small_config, small_model, tokens

CONFIG = seeing_config()
RATIO = CONFIG.vision_downsample_ratio


@pytest.fixture(scope="module")
def model() -> Transformer:
    return small_model(CONFIG, choose("cpu", "reference", "plain"))


class Counting:
    """Notes the patches of every call of the tower."""

    def __init__(self, model: Transformer) -> None:
        self.calls: list[int] = []
        assert model.vision is not None
        self.hook = model.vision.register_forward_hook(lambda _, arguments, __: self.calls.append(len(arguments[0])))


def request_of(parts: Sequence[int | Picture], seed: int, **options) -> Request:
    ids: list[int] = []
    placed = []
    for number, part in enumerate(parts):
        if isinstance(part, Picture):
            placed.append(Placed(len(ids), part))
            ids += [CONFIG.image_token_id] * part.tokens(RATIO)
        else:
            ids += tokens(CONFIG, part, seed + number).tolist()
    return Request(ids, pictures=placed, **options)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    one, other = picture_of(CONFIG, 4, 5, 1), picture_of(CONFIG, 1, 7, 2)
    parts = [[2, one, 3, other, 1], [5], [other], [1, one]]
    return [request_of(each, 10 * number, max_new_tokens=3) for number, each in enumerate(parts)]


def run(model: Transformer, requests: Sequence[Request], chunk: int | None = None) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in requests]
    for event in Generation(model, requests, eos=None, chunk=chunk).events():
        ids[event.sequence].append(event.id)
    return ids


def test_chunks_of_any_size_and_other_prompts_change_nothing(model: Transformer, requests: list[Request]) -> None:
    alone = [run(model, [request])[0] for request in requests]
    for chunk in (None, 2, 7):
        assert run(model, requests, chunk) == alone


@pytest.mark.parametrize(("chunk", "calls"), [(None, [20 + 7 + 7 + 20]), (9, [20, 7, 7, 20])])
def test_each_picture_goes_through_the_tower_once(
    model: Transformer, requests: list[Request], chunk: int | None, calls: list[int]
) -> None:
    counting = Counting(model)
    generation = Generation(model, requests, eos=None, chunk=chunk)
    list(generation.events())
    counting.hook.remove()
    assert counting.calls == calls and not generation.pictures.seen  # nothing is kept of them


@torch.no_grad()
def test_rows_are_those_of_the_spans(model: Transformer, requests: list[Request]) -> None:
    """Put together from steps of five tokens."""
    pictures = Pictures(model, [request.pictures for request in requests])
    wanted = model.see([one.picture for one in requests[0].pictures])
    images: list[Tensor] = []
    rows: list[Tensor] = []
    for first in range(0, len(requests[0].ids), 5):
        last = min(first + 5, len(requests[0].ids))
        image, features = pictures.take([(1, 0, 2), (0, first, last)])
        if image is None:
            images.append(torch.zeros(last - first, dtype=torch.bool))
        else:
            assert features is not None and not image[:2].any() and len(features) == int(image.sum())
            images.append(image[2:])
            rows.append(features)
    torch.testing.assert_close(torch.cat(rows), torch.cat(wanted), rtol=1e-12, atol=1e-12)
    assert torch.cat(images).tolist() == [id == CONFIG.image_token_id for id in requests[0].ids]


def test_pictures_must_fit_their_tokens(model: Transformer) -> None:
    picture = picture_of(CONFIG, 4, 5, 1)
    good = request_of([2, picture, 1], 0)

    def refused(message: str, ids: Sequence[int], *placed: Placed) -> None:
        with pytest.raises(InputError, match=message):
            Generation(model, [Request(ids, pictures=placed)], eos=None)

    refused("image 1 of prompt 1 of 1 takes positions 4 to 11", good.ids, Placed(4, picture))
    refused("image 1 .* takes positions -1 to", good.ids, Placed(-1, picture))
    refused("must have the id 95", good.ids, Placed(1, picture))
    refused("image 2 .* behind the image before it", good.ids, Placed(2, picture), Placed(3, picture))
    blind = small_model(small_config(), choose("cpu", "reference", "plain"))
    with pytest.raises(InputError, match="prompt 1 of 1 has images, but the model has no vision tower"):
        Generation(blind, [good], eos=None)


@torch.no_grad()
def test_of_a_prompt_with_a_picture_the_text_before_it_is_kept(model: Transformer) -> None:
    """Two pictures of one shape have the same ids: neither may stand for the other."""
    picture = picture_of(CONFIG, 4, 5, 1)
    request = request_of([6, picture, 2], 0)
    cache = Cache(CONFIG, 6, 200, dtype=model.ops.dtype)
    store = PrefixStore(model, cache, 2)
    slot = cache.open()
    image, features = Pictures(model, [request.pictures]).take([(0, 0, len(request.ids))])
    logits = model(cache.step([(slot, request.ids)], image=image, features=features), cache).logits
    store.keep(slot, request.ids)
    twin, held = store.begin(request.ids)
    assert held == 6
    assert image is not None
    rest = cache.step([(twin, request.ids[6:])], image=image[6:], features=features)
    torch.testing.assert_close(model(rest, cache).logits, logits, rtol=1e-9, atol=1e-9)
    only = request_of([picture, 2], 0)
    slot = cache.open()
    image, features = Pictures(model, [only.pictures]).take([(0, 0, len(only.ids))])
    model(cache.step([(slot, only.ids)], image=image, features=features), cache)
    store.keep(slot, only.ids)
    assert store.begin(only.ids)[1] == 0
