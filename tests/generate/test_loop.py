"""The loop against the plainest one: the whole sequence through the model again for every id.

In plain numerics, which are fast; `test_api.py` holds that the published ones give the same bits alone and in a batch.
"""

from collections.abc import Sequence

import pytest
import torch
from small import run_at_once, small_config, small_model, tokens

from openv41.errors import InputError
from openv41.generate.loop import Event, Generation, Request
from openv41.generate.sampling import Sampling, generator_for, sample
from openv41.model.transformer import Transformer
from openv41.ops import choose


@pytest.fixture(scope="module")
def model() -> Transformer:
    return small_model(small_config(), choose("cpu", "reference", "plain"))


@pytest.fixture(scope="module")
def prompts(model: Transformer) -> list[list[int]]:
    return [tokens(model.config, count, seed=count).tolist() for count in (7, 1, 9, 4)]


def run(model: Transformer, requests: Sequence[Request], **options) -> list[list[int]]:
    """The new ids of each sequence."""
    ids: list[list[int]] = [[] for _ in requests]
    for event in Generation(model, requests, **{"eos": None, **options}).events():
        ids[event.sequence].append(event.id)
    return ids


def run_plainly(model: Transformer, request: Request) -> list[int]:
    ids = list(request.ids)
    generator = generator_for(request.sampling.seed, request.stream)
    with torch.no_grad():
        for _ in range(request.max_new_tokens):
            ids += sample(run_at_once(model, torch.tensor(ids))[-1:], [request.sampling], [generator])
    return ids[len(request.ids) :]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_p=0.9, top_k=20, seed=5)])
def test_the_loop_gives_what_the_plainest_loop_gives(
    model: Transformer, prompts: list[list[int]], sampling: Sampling
) -> None:
    requests = [Request(ids, 5 - place, sampling, place) for place, ids in enumerate(prompts)]
    alone = [run_plainly(model, request) for request in requests]
    assert run(model, requests) == alone
    assert [run(model, [request])[0] for request in requests] == alone


@pytest.mark.parametrize("chunk", [3, 5, None])
def test_chunks_change_nothing(model: Transformer, prompts: list[list[int]], chunk: int | None) -> None:
    requests = [Request(ids, 2) for ids in prompts]
    assert run(model, requests, chunk=chunk) == run(model, requests)


def test_events_name_the_sequence_and_the_end(model: Transformer, prompts: list[list[int]]) -> None:
    events = list(Generation(model, [Request(prompts[0], 1), Request(prompts[1], 3)], eos=None).events())
    assert [(event.sequence, event.finish) for event in events] == [(0, "length"), (1, None), (1, None), (1, "length")]


def test_the_end_id_ends_a_sequence_and_the_others_go_on(model: Transformer, prompts: list[list[int]]) -> None:
    requests = [Request(ids, 4) for ids in prompts]
    free = run(model, requests)
    eos = free[2][1]
    ended = run(model, requests, eos=eos)
    for got, full in zip(ended, free, strict=True):
        assert got == (full[: full.index(eos) + 1] if eos in full else full)
    finish = [event for event in Generation(model, requests, eos=eos).events() if event.finish]
    assert {event.sequence: event.finish for event in finish}[2] == "eos"


def test_the_caller_may_stop_a_sequence(model: Transformer, prompts: list[list[int]]) -> None:
    seen: list[tuple[int, int]] = []

    def stop(sequence: int, id: int) -> bool:
        seen.append((sequence, id))
        return sequence == 1 and len([s for s, _ in seen if s == 1]) == 2

    events = list(Generation(model, [Request(ids, 4) for ids in prompts[:2]], None, stop).events())
    assert [event.finish for event in events if event.sequence == 1] == [None, "stop"]
    assert seen == [(event.sequence, event.id) for event in events]


@pytest.mark.parametrize("length", [13, 15, 16])
def test_the_context_ends_a_sequence(length: int) -> None:
    model = small_model(small_config(original_seq_len=16, rope_factor=1), choose("cpu", "reference", "plain"))
    request = Request(tokens(model.config, length, seed=0).tolist(), 100)
    events = list(Generation(model, [request], eos=None).events())
    # The last id is made from a full context and is not read any more.
    assert len(events) == 16 - length + 1
    assert [event.finish for event in events] == [None] * (16 - length) + ["context"]


def test_nothing_is_left_open(model: Transformer, prompts: list[list[int]]) -> None:
    for taken in (0, 1, 6):
        generation = Generation(model, [Request(ids, 3) for ids in prompts], eos=None)
        events = generation.events()
        for _ in zip(range(taken), events, strict=False):
            pass
        events.close()
        assert generation.cache.lengths == [None] * 4
        assert len(generation.cache.pages.free) == generation.cache.pages.count


def test_an_interrupt_in_the_model_leaves_nothing_open(
    model: Transformer, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = Generation(model, [Request(ids, 9) for ids in prompts], eos=None)
    events = generation.events()
    next(events)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model.layers[3], "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(events)
    assert generation.cache.lengths == [None] * 4


def test_a_finished_sequence_gives_its_room_back(model: Transformer, prompts: list[list[int]]) -> None:
    generation = Generation(model, [Request(prompts[0], 1), Request(prompts[1], 5)], eos=None)
    for event in generation.events():
        if event == Event(0, event.id, "length"):
            assert generation.cache.lengths[0] is None and generation.cache.pages.held[0] == []


def test_the_cache_has_the_room_that_is_needed(model: Transformer) -> None:
    page = Generation(model, [Request([1], 1)], eos=None).cache.pages.tokens
    cache = Generation(model, [Request([1] * page, 2 * page + 1)], eos=None).cache
    assert cache.pages.count == 1 + 3
    whole = Generation(model, [Request([1], 10**12)], eos=None).cache
    assert whole.pages.count == 1 + model.config.context // page


def test_the_pace_counts_what_went_through_the_model(model: Transformer, prompts: list[list[int]]) -> None:
    generation = Generation(model, [Request(prompts[0], 4), Request(prompts[1], 2)], eos=None)
    assert generation.decode.rate == 0
    list(generation.events())
    assert (generation.prefill.tokens, generation.decode.tokens) == (8, 3 + 1)
    assert generation.prefill.rate > 0 and generation.decode.rate > 0


def test_no_gradient_is_kept(model: Transformer, prompts: list[list[int]]) -> None:
    generation = Generation(model, [Request(prompts[0], 2)], eos=None)
    list(generation.events())
    assert not any(ring.table.requires_grad for ring in generation.cache.windows.values())


@pytest.mark.parametrize(
    ("ids", "options", "complaint"),
    [
        ([], {}, "a prompt must hold at least 1 token"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be .* got 0"),
        ([1], {"max_new_tokens": True}, "max_new_tokens must be .* got True"),
    ],
)
def test_a_request_that_cannot_be_run_is_refused(ids: list[int], options: dict, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Request(ids, **options)


def test_a_batch_that_cannot_be_run_is_refused(model: Transformer) -> None:
    context, vocabulary = model.config.context, model.config.vocab_size
    good = Request([1])
    for requests, chunk, complaint in [
        ([], None, "at least 1 request"),
        ([good], 0, "chunks of 1 token"),
        ([good, Request([0] * (context + 1))], None, f"prompt 2 of 2 must fit the context of {context} tokens"),
        ([Request([3, vocabulary])], None, f"must lie in 0 to {vocabulary - 1}, got {vocabulary}"),
        ([Request([3, -1])], None, "got -1"),
    ]:
        with pytest.raises(InputError, match=complaint):
            Generation(model, requests, eos=None, chunk=chunk)
