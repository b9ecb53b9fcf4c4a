"""Half-depth prefill: the upper layers run only what can still matter, and nothing else changes by a bit."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from openv41.model.block import Block
from openv41.model.transformer import Halo, Transformer
from openv41.ops import choose
from openv41.state import Cache
from tests.small import readable, small_config, small_model, tokens

CONFIG = small_config()


@pytest.fixture(scope="module")
def model() -> Transformer:
    return small_model(CONFIG, choose("cpu", "reference"), 2)


@torch.no_grad()
def run(
    model: Transformer,
    prompts: Sequence[torch.Tensor],
    pieces: Sequence[Sequence[int]],
    prefill: str,
    slack: int = 0,
    store: str = "wide",
) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]], Counter]:
    """Prompts fed in pieces whose end is known: last logits and those of three more tokens, state, tokens by layer."""
    cache = Cache(model.config, len(prompts), sum(map(len, prompts)) + 8 * len(prompts), slack, store=store)
    slots = [cache.open() for _ in prompts]
    ends = {slot: len(ids) for slot, ids in zip(slots, prompts, strict=True)}
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    work: Counter = Counter()
    hooks = [
        block.register_forward_pre_hook(lambda block, given: work.update({block.layer: len(given[1])}))
        for block in model.modules()
        if isinstance(block, Block)
    ]
    for turn in range(max(map(len, pieces))):
        parts, done = [], []
        for slot, (ids, lengths) in enumerate(zip(prompts, pieces, strict=True)):
            if turn < len(lengths):
                first = sum(lengths[:turn])
                parts.append((slot, ids[first : first + lengths[turn]]))
                done += [slot] if turn == len(lengths) - 1 else []
        result = model(cache.step(parts, prompts=ends), cache, prefill=prefill).logits
        for slot, row in zip(done, result, strict=True):
            logits[slot].append(row)
    for hook in hooks:
        hook.remove()
    kept = [readable(cache, slot) for slot in slots]
    for _ in range(3):
        step = cache.step([(slot, [7]) for slot in slots])
        for slot, row in enumerate(model(step, cache, prefill=prefill).logits):
            logits[slot].append(row)
    return [torch.stack(rows) for rows in logits], kept, work


def assert_same(a: tuple, b: tuple) -> None:
    for one, other in zip(a[0], b[0], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(a[1], b[1], strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("length", [1, 6, 13, 40, 90])
def test_logits_and_cache_are_those_of_the_full_pass(model: Transformer, length: int, slack: int, seed: int) -> None:
    ids = [tokens(CONFIG, length, seed)]
    full, halo = (run(model, ids, [[length]], prefill, slack) for prefill in ("full", "halo"))
    assert_same(full, halo)


def test_in_chunks_and_ragged_batches(model: Transformer, seed: int) -> None:
    prompts = [tokens(CONFIG, n, seed + n) for n in (70, 33, 5)]
    full = run(model, prompts, [[70], [33], [5]], "full")
    for pieces in ([[70], [33], [5]], [[30, 25, 15], [32, 1], [5]], [[64, 6], [7, 7, 7, 7, 5], [2, 3]]):
        for store in ("wide", "packed"):
            assert_same(full, run(model, prompts, pieces, "halo", store=store))


def test_the_work_is_what_the_halo_says(model: Transformer, seed: int) -> None:
    length = 120
    *_, full = run(model, [tokens(CONFIG, length, seed)], [[length]], "full")
    *_, halo = run(model, [tokens(CONFIG, length, seed)], [[length]], "halo")
    first, last, window = CONFIG.kv_source_layers[-1], CONFIG.n_layers - 1, CONFIG.window_size
    assert set(full.values()) == {length}
    for layer in range(CONFIG.n_layers):
        expected = length if layer < first else window + (last - layer) * (window - 1)
        assert halo[layer] == expected


def test_the_released_model_saves_nearly_half_of_a_long_prompt() -> None:
    config = CONFIG.released()
    length = 32768
    halo = Halo(config.kv_source_layers[-1], config.n_layers - 1, config.window_size, config.window_size)
    run = sum(length if layer < halo.first else halo.reach(layer) for layer in range(config.n_layers))
    assert 0.515 < run / (config.n_layers * length) < 0.525


@torch.no_grad()
def test_more_wanted_logits_push_the_halo_back(model: Transformer, seed: int) -> None:
    ids = tokens(CONFIG, 50, seed)
    results = []
    for prefill in ("full", "halo"):
        cache = Cache(CONFIG, 1, 50)
        results.append(model(cache.step([(cache.open(), ids)], "all"), cache, prefill=prefill).logits)
    assert torch.equal(*results)
