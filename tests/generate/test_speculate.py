"""Drafts change nothing but the time: greedy text, state and the ends of sequences are those without, and sampled ids
have the distribution of the model alone.

Most tests drive the real transformer with a drafter that knows the text and says a wrong token where it is told to.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from openv41.generate import speculate
from openv41.generate.loop import Generation, Request
from openv41.generate.policy import Always, Policy, WhilePays, policy_for
from openv41.generate.sampling import Sampling, generator_for, probabilities
from openv41.generate.speculate import Drafted, Speculation, Tally, accept, speculation_for, verify
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Cache
from tests.drafts import BLOCK, DRAFTING, SHALLOW, Oracle, Table, TableDrafter, continued, drafted_by, texts_of
from tests.small import readable, small_config, small_model, tokens


@pytest.fixture(scope="module")
def plain() -> Transformer:
    """A window, a source of ratio 2, and one of ratio 1 with candidates; in plain numerics, which are faster."""
    return small_model(small_config(**SHALLOW), choose("cpu", "reference", "plain"))


@pytest.fixture(scope="module")
def published() -> Transformer:
    return small_model(small_config(**SHALLOW), choose("cpu", "reference"))


@pytest.fixture(scope="module")
def drafting() -> Transformer:
    """With a draft of its own, of random weights."""
    return small_model(small_config(**DRAFTING), choose("cpu", "reference", "plain"))


@pytest.fixture(scope="module")
def table(seed: int) -> Transformer:
    """For what the loop does by itself: a model that is a table, whose text does not repeat itself soon."""
    return Table(torch.randn(96, 96, generator=torch.Generator().manual_seed(seed)), turn=7)


def requests_of(
    model: Transformer, seed: int, lengths: Sequence[int], new: int, sampling: Sampling | None = None
) -> list[Request]:
    prompts = [tokens(model.config, length, seed + place).tolist() for place, length in enumerate(lengths)]
    return [Request(ids, new, sampling or Sampling(), place) for place, ids in enumerate(prompts)]


def ragged(seed: int) -> Callable[[int, int], int]:
    """How many tokens of a draft are right: 0 to 5, every number equally often, in another order for each slot."""
    return lambda slot, round: int(np.random.default_rng([seed, slot, round // 6]).permutation(6)[round % 6])


COVER = (0, 0, 1, 2, 1, 2, 3, 4, 3, 4, 5, 0, 5)
"""Accepted tokens, round by round: every number ends once at an even and once at an odd length."""


# Greedy text


@pytest.mark.parametrize(("numerics", "new"), [("plain", 40), ("published", 23)])
def test_greedy_text_is_that_without_drafts_in_ragged_batches(request, seed: int, numerics: str, new: int) -> None:
    """Prompts of odd and even lengths around the window of 4; each sequence accepts another number, 0 to 5.

    22 new ids are one from the prompt and six rounds, one of every number; with one id more to come no draft of these
    rounds is cut short, so that each place of a draft is accepted and rejected, in whatever order the numbers come.
    """
    model = request.getfixturevalue(numerics)
    requests = requests_of(model, seed, (7, 1, 4), new)
    texts = continued(model, requests)
    oracle = Oracle(texts, model.config.vocab_size, ragged(seed))
    generation = Generation(model, requests, None, speculation=drafted_by(oracle))
    assert texts_of(generation) == [text[-new:] for text in texts]
    tally = generation.speculation.tally
    assert all(0 < a < r for a, r in zip(tally.accepted, tally.reached, strict=True))
    assert oracle.remembered >= 1 + max(oracle.rounds.values())


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_any_length_of_drafts_gives_the_same_text(table: Transformer, seed: int, length: int) -> None:
    requests = requests_of(table, seed, (2, 5), 200)
    texts = continued(table, requests)
    for right in (lambda slot, round: 5, lambda slot, round: 0, ragged(seed)):
        oracle = Oracle(texts, table.config.vocab_size, right)
        got = texts_of(Generation(table, requests, None, speculation=drafted_by(oracle, length)))
        assert got == [text[-200:] for text in texts]


@pytest.mark.slow
def test_greedy_text_over_2000_tokens(seed: int) -> None:
    """Four sequences of 500: each goes 125 times round the window's rings, through 250 groups of two and 8 pages."""
    model = small_model(small_config(**SHALLOW, original_seq_len=512), choose("cpu", "reference"))
    requests = requests_of(model, seed, (5, 2, 8, 3), 500)
    texts = continued(model, requests)
    oracle = Oracle(texts, model.config.vocab_size, ragged(seed))
    generation = Generation(model, requests, None, speculation=drafted_by(oracle))
    assert texts_of(generation) == [text[-500:] for text in texts]
    assert generation.speculation.tally.mean_accepted == pytest.approx(2.5, abs=0.2)


@pytest.mark.parametrize("length", ["auto", 5])
def test_the_models_own_draft_changes_no_greedy_text(drafting: Transformer, seed: int, length: str | int) -> None:
    requests = requests_of(drafting, seed, (6, 3, 9), 10)
    free = texts_of(Generation(drafting, requests, None))
    generation = Generation(drafting, requests, None, None, 4, speculation_for(length, drafting))
    assert texts_of(generation) == free
    assert generation.speculation.tally.drafts > 0
    assert generation.cache.nbytes()["draft"] > 0


# State


class Compared(Speculation):
    """Compares what each slot keeps, whenever a draft is settled, with what plain decoding keeps of as many tokens: bit
    for bit in published numerics, to 1e-9 in plain ones."""

    def __init__(self, oracle: Oracle, length: int, kept: list[dict[int, dict[str, torch.Tensor]]]) -> None:
        super().__init__(oracle, Always(length))
        self.kept, self.seen = kept, set()

    def settle(self, drafted, chosen, cache, seconds) -> None:
        super().settle(drafted, chosen, cache, seconds)
        for slot, ids in chosen.items():
            length = cache.length(slot)
            if length not in self.kept[slot]:
                continue  # the end: its last id is not read
            self.seen.add((len(ids) - 1, length % 4, length % 2))
            for name, rows in self.kept[slot][length].items():
                exact = rows.dtype != torch.float64
                close = dict(rtol=0, atol=0) if exact else dict(rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(readable(cache, slot)[name], rows, **close, msg=f"{slot} {length} {name}")


def kept_by_plain_decoding(
    model: Transformer, requests: Sequence[Request]
) -> tuple[list[list[int]], list[dict[int, dict[str, torch.Tensor]]]]:
    """Whole texts, and by length what each slot keeps: windows, latents, index keys, open groups, the n-gram tail."""
    generation = Generation(model, requests, None)
    texts, kept = [list(request.ids) for request in requests], [{} for _ in requests]
    for event in generation.events():
        slot, cache = event.sequence, generation.cache
        texts[slot].append(event.id)
        if not event.finish:
            kept[slot][cache.length(slot)] = {name: rows.clone() for name, rows in readable(cache, slot).items()}
    return texts, kept


@pytest.mark.parametrize(("numerics", "new"), [("plain", 50), ("published", 14)])
def test_after_a_rejection_all_state_is_that_of_plain_text(request, seed: int, numerics: str, new: int) -> None:
    """0 to 5 accepted, at every place of the window's ring and in both halves of a group."""
    model = request.getfixturevalue(numerics)
    requests = requests_of(model, seed, (3, 6), new)
    texts, kept = kept_by_plain_decoding(model, requests)
    oracle = Oracle(texts, model.config.vocab_size, lambda slot, round: COVER[(round + 9 * slot) % len(COVER)])
    compared = Compared(oracle, BLOCK, kept)
    texts_of(Generation(model, requests, None, speculation=compared))
    if numerics == "published":
        return  # too short for all of it
    assert {accepted for accepted, _, _ in compared.seen} == set(range(6))
    assert {place for _, place, _ in compared.seen} == set(range(4))
    assert {(accepted, half) for accepted, _, half in compared.seen} == {(a, h) for a in range(6) for h in range(2)}


def test_the_draft_rings_hold_accepted_tokens_alone(drafting: Transformer, seed: int) -> None:
    """After rejections they are what the same tokens leave when they are run one by one."""
    request = requests_of(drafting, seed, (6,), 12)[0]
    generation = Generation(drafting, [request], None, speculation=speculation_for(3, drafting))
    ids = list(request.ids)
    rings = {}
    for event in generation.events():
        if generation.cache.lengths[0] is not None:
            length = generation.cache.length(0)
            rings[length] = {layer: generation.cache.view("draft", layer, 0) for layer in generation.cache.drafts}
        ids.append(event.id)
    cache = Cache(drafting.config, 1, len(ids), dtype=drafting.ops.dtype, draft=True)
    slot = cache.open()
    for id in ids[:-1]:
        with torch.no_grad():
            output = drafting(cache.step([(slot, [id])]), cache)
        drafting.mtp.remember(output.taps, output.tapped, cache)
        for layer, rows in rings.get(cache.length(slot), {}).items():
            assert torch.allclose(cache.view("draft", layer, slot), rows, rtol=1e-9, atol=1e-9)
    assert len(rings) > 2


# Ends of a sequence


def ends(model: Transformer, requests: list[Request], texts, right: int = 5, **options) -> list[tuple]:
    oracle = Oracle(texts, model.config.vocab_size, lambda slot, round: right)
    generation = Generation(model, requests, **{"eos": None, "speculation": drafted_by(oracle), **options})
    events = [(event.sequence, event.id, event.finish) for event in generation.events()]
    assert generation.cache.lengths == [None] * len(requests)
    assert len(generation.cache.pages.free) == generation.cache.pages.count
    return sorted(events, key=lambda event: event[0])


def ends_plainly(model: Transformer, requests: list[Request], **options) -> list[tuple]:
    events = Generation(model, requests, **{"eos": None, **options}).events()
    return sorted(((event.sequence, event.id, event.finish) for event in events), key=lambda event: event[0])


@pytest.mark.parametrize("right", [0, 2, 5])
@pytest.mark.parametrize("place", range(1, 8))
def test_the_end_id_inside_an_accepted_draft(table: Transformer, seed: int, place: int, right: int) -> None:
    """At every place of a draft, and as the id behind it; in the other sequence it may be anywhere."""
    requests = requests_of(table, seed, (3, 4), 14)
    texts = continued(table, requests)
    eos = texts[0][3 + place]
    assert ends(table, requests, texts, right, eos=eos) == ends_plainly(table, requests, eos=eos)


@pytest.mark.parametrize("place", range(1, 8))
def test_a_stop_by_the_caller_inside_a_draft(table: Transformer, seed: int, place: int) -> None:
    requests = requests_of(table, seed, (3, 4), 14)
    texts = continued(table, requests)

    def counting() -> tuple[list[tuple[int, int]], Callable[[int, int], bool]]:
        seen: list[tuple[int, int]] = []

        def stop(sequence: int, id: int) -> bool:
            seen.append((sequence, id))
            return sequence == 0 and len([one for one, _ in seen if one == 0]) == place

        return seen, stop

    (drafted_ids, stop), (plain_ids, same_stop) = counting(), counting()
    events = ends(table, requests, texts, stop=stop)
    assert events == ends_plainly(table, requests, stop=same_stop)
    # Asked about each id once, in order, and about none behind the end.
    assert [id for one, id in drafted_ids if one == 0] == [id for one, id in plain_ids if one == 0]
    assert [finish for one, _, finish in events if one == 0][-1] == "stop"


@pytest.mark.parametrize("new", range(1, 9))
def test_max_new_tokens_inside_a_draft(table: Transformer, seed: int, new: int) -> None:
    long = requests_of(table, seed, (3, 4), 20)
    requests = [Request(long[0].ids, new), long[1]]
    texts = continued(table, long)
    events = ends(table, requests, texts)
    assert events == ends_plainly(table, requests)
    assert len([one for one, _, _ in events if one == 0]) == new


@pytest.mark.parametrize("right", [0, 3, 5])
@pytest.mark.parametrize("length", range(8, 17))
def test_a_context_that_ends_inside_a_draft(seed: int, length: int, right: int) -> None:
    model = Table(torch.randn(96, 96, generator=torch.Generator().manual_seed(seed)), 7, context=16)
    requests = requests_of(model, seed, (length,), 100)
    texts = continued(model, requests)
    events = ends(model, requests, texts, right)
    assert events == ends_plainly(model, requests) and events[-1][2] == "context"
    assert len(events) == 16 - length + 1


def test_the_context_ends_inside_the_models_own_draft(seed: int) -> None:
    config = small_config(**DRAFTING, original_seq_len=16, rope_factor=1)
    model = small_model(config, choose("cpu", "reference", "plain"))
    requests = requests_of(model, seed, (9, 13), 100)
    events = list(Generation(model, requests, None, speculation=speculation_for(5, model)).events())
    assert [event.finish for event in events].count("context") == 2
    assert sorted((e.sequence, e.id) for e in events) == sorted((s, i) for s, i, _ in ends_plainly(model, requests))


def test_nothing_is_left_open_when_the_reader_goes(table: Transformer, seed: int) -> None:
    requests = requests_of(table, seed, (3, 4), 14)
    texts = continued(table, requests)
    for taken in range(9):  # before the first id, within a draft, and at its border
        oracle = Oracle(texts, table.config.vocab_size, lambda slot, round: 4)
        generation = Generation(table, requests, None, speculation=drafted_by(oracle))
        events = generation.events()
        got = [next(events) for _ in range(taken)]
        events.close()
        assert generation.cache.lengths == [None] * 2
        assert len(generation.cache.pages.free) == generation.cache.pages.count
        for sequence in range(2):
            ids = [event.id for event in got if event.sequence == sequence]
            assert ids == texts[sequence][len(requests[sequence].ids) :][: len(ids)]


def test_an_interrupt_while_drafting_leaves_nothing_open(
    table: Transformer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(table, seed, (3, 4), 14)
    oracle = Oracle(continued(table, requests), table.config.vocab_size, lambda slot, round: 4)
    generation = Generation(table, requests, None, speculation=drafted_by(oracle))
    events = generation.events()
    next(events)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(oracle, "begin", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(events)
    assert generation.cache.lengths == [None] * 2


def test_no_room_is_taken_for_tokens_that_cannot_be_kept(table: Transformer, seed: int) -> None:
    """The cache has as many pages as without drafts, and a draft at its very end fits."""
    page = Generation(table, [Request([1], 1)], None).cache.pages.tokens
    requests = requests_of(table, seed, (page - 9,), 10)
    texts = continued(table, requests)
    generation = Generation(table, requests, None, speculation=drafted_by(Oracle(texts, 96, lambda slot, round: 5)))
    assert generation.cache.pages.count == Generation(table, requests, None).cache.pages.count
    assert texts_of(generation) == [texts[0][page - 9 :]]


# Sampling

VOCABULARY = 16
SAMPLINGS = [
    dict(temperature=1.0),
    dict(temperature=0.6, top_p=0.9),
    dict(temperature=1.3, top_k=5),
    dict(temperature=0.9, top_p=0.8, top_k=9),
]


CHANCE = 6.0
"""Standard deviations of surprise that chance does not reach: once in a hundred million tests, or less."""

Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tables_of(seed: int) -> Tables:
    """Logits of a model and of a draft that has half an idea of it, and a confidence that knows nothing."""
    generator = torch.Generator().manual_seed(seed)
    target, noise = (1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=generator) for _ in range(2))
    return target, 0.7 * target + 0.7 * noise, torch.randn(VOCABULARY, generator=generator)


@pytest.fixture(scope="module")
def tables(seed: int) -> Tables:
    return tables_of(seed)


def surprise(observed: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Pearson's chi-square over several multinomials, in standard deviations of a normal variable (Wilson, Hilferty).
    Cells of fewer than 5 expected are taken together."""
    square, free = 0.0, 0
    for counts, shares in zip(observed, expected, strict=True):
        if counts[shares == 0].sum():
            return math.inf  # an id came that is ruled out
        wanted = shares * counts.sum()
        small = wanted < 5
        cells = [(counts[~small], wanted[~small]), (counts[small].sum(keepdims=True), wanted[small].sum(keepdims=True))]
        got, due = (np.concatenate(parts) for parts in zip(*cells, strict=True))
        got, due = got[due > 0], due[due > 0]
        if len(due) > 1 and counts.sum() > 0:
            square += float(((got - due) ** 2 / due).sum())
            free += len(due) - 1
    return ((square / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


def transitions(texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """How often each id came behind each other."""
    counts = np.zeros((VOCABULARY, VOCABULARY))
    for text in texts:
        np.add.at(counts, (text[:-1], text[1:]), 1)
    return list(counts)


def judged(texts: Sequence[Sequence[int]], target: torch.Tensor, samplings: Sequence[dict]) -> float:
    """The surprise of ids that came behind others, each text by its own sampling."""
    observed, expected = [], []
    for options in SAMPLINGS:
        own = [text for text, used in zip(texts, samplings, strict=True) if used == options]
        observed += transitions(own)
        expected += list(probabilities(target, Sampling(**options)).numpy())
    return surprise(observed, expected)


@pytest.mark.parametrize("sequences", [1, 20])
def test_the_loops_sampled_ids_have_the_models_distribution(tables, seed: int, sequences: int) -> None:
    """Each id is judged by what came before it; one sequence, and many in packed slots, each with a sampling of its
    own."""
    target, drafted, confidence = tables
    samplings = [SAMPLINGS[place % 4] for place in range(sequences)]
    requests = [
        Request([place % VOCABULARY], 4_500 // sequences, Sampling(**options, seed=seed), place)
        for place, options in enumerate(samplings)
    ]
    speculation = Speculation(TableDrafter(drafted, confidence), Always(BLOCK))
    texts = texts_of(Generation(Table(target), requests, None, speculation=speculation))
    assert abs(judged(texts, target, samplings)) < CHANCE
    tally = speculation.tally
    assert 0 < tally.accepted[0] < tally.reached[0], "some drafts are rejected, and some are not"


class Picky(Always):
    """Goes on with some confidences only; what a policy may do."""

    def judge(self, greedy: bool) -> "Picky":
        return self

    def begins(self, most: int, live: int) -> bool:
        self.turn = getattr(self, "turn", 0) + 1
        return self.turn % 3 > 0

    def goes_on(self, confidences: Sequence[float]) -> bool:
        return confidences[-1] > -0.5


class Costs:
    """A step costs one and a little a row; a draft costs a little."""

    def of(self, call: str, size: int) -> float:
        return {"step": 1 + 0.1 * size, "begin": 0.2, "next": 0.02}[call]


@pytest.mark.parametrize("policy", [lambda: Picky(BLOCK), lambda: WhilePays(Costs(), BLOCK)])
def test_drafts_of_changing_length_keep_the_distribution(tables, seed: int, policy: Callable[[], Policy]) -> None:
    target, drafted, confidence = tables
    requests = [Request([place], 450, Sampling(**SAMPLINGS[0], seed=seed), place) for place in range(10)]
    speculation = Speculation(TableDrafter(drafted, confidence), policy())
    texts = texts_of(Generation(Table(target), requests, None, speculation=speculation))
    assert abs(judged(texts, target, [SAMPLINGS[0]] * 10)) < CHANCE
    tally = speculation.tally
    assert 0 < tally.drafts and tally.drafted[-1] < tally.rounds, "some rounds draft less than a block, or nothing"


def packed(tables: Tables, seed: int, count: int, sequences: int) -> float:
    """The surprise of `count` samples behind id 3, packed into one call, with drafts of 0 to 3 tokens and the four
    samplings in turn: the first id of each, and the one behind it. The numbers are those of so many sequences."""
    target, drafted, _ = tables
    samplings = [SAMPLINGS[sequence // 4 % 4] for sequence in range(count)]
    own = {str(options): probabilities(drafted, Sampling(**options)) for options in SAMPLINGS}
    generators = [generator_for(seed, sequence) for sequence in range(sequences)] * (count // sequences)
    drafts, rows = [], []
    for sequence, (options, generator) in enumerate(zip(samplings, generators, strict=True)):
        draft, previous = Drafted(), 3
        rows.append(previous)
        for _ in range(sequence % 4):
            row = own[str(options)][previous]
            previous = int(generator.choice(VOCABULARY, p=row.numpy()))
            draft.ids.append(previous)
            draft.distributions.append(row)
            rows.append(previous)
        drafts.append(draft)
    chosen = verify(target[rows], drafts, [Sampling(**options) for options in samplings], generators)
    return judged([[3, *ids[:2]] for ids in chosen], target, samplings)


@pytest.mark.parametrize("sequences", [1, 15_000])
def test_15_000_samples_have_the_models_distribution(tables: Tables, seed: int, sequences: int) -> None:
    assert abs(packed(tables, seed, 15_000, sequences)) < CHANCE


def as_it_comes(ids, drafted, wanted, generator):
    """Takes whatever was drafted."""
    return accept(ids, list(wanted), wanted, generator)


def replaced_wrongly(ids, drafted, wanted, generator):
    """Replaces a rejected token by one from p instead of from what p has more than q."""
    got = accept(ids, drafted, wanted, generator)
    return got if len(got) > len(ids) else [*got[:-1], int(generator.choice(VOCABULARY, p=wanted[len(got) - 1]))]


def dropped_after_a_look(ids, drafted, wanted, generator):
    """Verifies only what is sure to be accepted: why a policy is asked before a token is drawn, not after."""
    kept = next((place for place, id in enumerate(ids) if wanted[place, id] < drafted[place][id]), len(ids))
    return accept(ids[:kept], drafted[:kept], wanted[: kept + 1], generator)


@pytest.mark.parametrize("rule", [as_it_comes, replaced_wrongly, dropped_after_a_look])
def test_the_test_above_notices_a_wrong_rule(seed: int, monkeypatch, rule: Callable) -> None:
    """Even of a quarter of the samples. The tables are always the same: how much a wrong rule changes depends on how
    far the draft's rows are from the model's. In these it is 14 or more, and varies by 1 from seed to seed."""
    monkeypatch.setattr(speculate, "accept", rule)
    assert packed(tables_of(9), seed, 4_000, 4_000) > 1.5 * CHANCE


def test_equal_distributions_accept_everything() -> None:
    row = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    for number in range(50):
        assert accept([1, 2], [row, row], row.expand(3, 3), generator_for(0, number))[:2] == [1, 2]


def test_distributions_without_a_common_id_reject_the_first() -> None:
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ([0.0, 0.0, 1.0], [0.5, 0.5, 0.0]))
    assert accept([0, 1], [q, q], p.expand(3, 3), generator_for(0, 0)) == [2]


def test_a_rejection_by_rounding_alone_still_gives_a_possible_id() -> None:
    """p and q differ in the last bit of the drafted id, and nowhere else: nothing is left of p - q."""

    class Highest(np.random.Generator):
        def random(self, *arguments):
            return 1 - 2.0**-53

    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    q = torch.tensor([math.nextafter(0.5, 1), 0.5, 0.0], dtype=torch.float64)
    generator = Highest(np.random.PCG64(0))
    assert accept([0], [q], torch.stack((p, p)), generator) in ([0, 1], [1])


# Seeds


def sampled(model: Transformer, requests: Sequence[Request], length) -> list[list[int]]:
    return texts_of(Generation(model, requests, None, speculation=speculation_for(length, model)))


@pytest.mark.parametrize("length", ["auto", 3])
def test_seeds_reproduce_alone_and_in_any_batch(drafting: Transformer, seed: int, length) -> None:
    """Also with "auto", whose decisions for sequences that sample do not depend on time or on others."""
    requests = requests_of(drafting, seed, (6, 3), 8, Sampling(1.0, 0.95, seed=seed))
    greedy = Request(tokens(drafting.config, 4, seed + 9).tolist(), 4)
    alone = [sampled(drafting, [request], length)[0] for request in requests]
    together = sampled(drafting, [greedy, *requests[::-1]], length)[1:][::-1]
    assert together == alone
    other = [Request(one.ids, 8, Sampling(1.0, 0.95, seed=seed + 1), one.stream) for one in requests]
    assert sampled(drafting, other, length) != alone


def test_without_a_draft_in_it_a_round_takes_the_numbers_that_the_plain_loop_takes(tables, seed: int) -> None:
    target, drafted, confidence = tables

    class Never(Always):
        def begins(self, most: int, live: int) -> bool:
            return False

        def judge(self, greedy: bool) -> "Never":
            return self

    requests = [Request([place], 50, Sampling(1.0, seed=seed), place) for place in range(3)]
    free = texts_of(Generation(Table(target), requests, None))
    speculation = Speculation(TableDrafter(drafted, confidence), Never(BLOCK))
    assert texts_of(Generation(Table(target), requests, None, speculation=speculation)) == free


# Figures


def test_the_tally_counts_by_place() -> None:
    tally = Tally.of(3)
    assert tally.acceptance == [None] * 3 and tally.mean_accepted == 0
    for drafted, accepted in ((3, 1), (2, 2), (3, 3), (1, 0), (0, 0)):
        tally.note(drafted, accepted)
    assert (tally.rounds, tally.drafts) == (5, 4)
    assert (tally.drafted, tally.reached, tally.accepted) == ([4, 3, 2], [4, 3, 1], [3, 2, 1])
    assert tally.acceptance == [3 / 4, 2 / 3, 1.0] and tally.mean_accepted == 6 / 4


def test_what_a_batch_tells_of_its_drafts(table: Transformer, seed: int) -> None:
    requests = requests_of(table, seed, (3, 4), 13)
    texts = continued(table, requests)
    pattern = defaultdict(lambda: 2)
    speculation = drafted_by(Oracle(texts, table.config.vocab_size, lambda slot, round: pattern[slot]), 4)
    generation = Generation(table, requests, None, speculation=speculation)
    texts_of(generation)
    tally = speculation.tally
    # The first id comes from the prompt; 12 more in rounds of 3.
    assert (tally.rounds, tally.drafts, tally.mean_accepted) == (8, 8, 2.0)
    assert tally.accepted == [8, 8, 0, 0] and generation.decode.tokens == 24
    assert 0 < sum(tally.seconds.values()) <= generation.decode.seconds


def test_policies_by_name(drafting: Transformer, plain: Transformer) -> None:
    assert policy_for("off", drafting) is None and policy_for(0, drafting) is None and policy_for("auto", plain) is None
    assert isinstance(policy_for("auto", drafting), WhilePays) and policy_for(3, drafting).most == 3
