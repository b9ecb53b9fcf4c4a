"""How long to draft: as long as it pays, learnt quickly, and at nearly no cost where it never does."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openv41.config import Config
from openv41.errors import InputError
from openv41.generate.policy import (
    LONGEST_WAIT,
    WAIT,
    Always,
    CountedCosts,
    MeasuredCosts,
    OwnJudge,
    Past,
    Weights,
    WhilePays,
    best_length,
    policy_for,
)
from openv41.model.transformer import Transformer
from openv41.ops import choose


class Costs:
    """A step takes `fixed` and `row` a row; a draft `begin` and `next` a token."""

    def __init__(self, fixed: float = 1.0, row: float = 0.1, begin: float = 0.2, next: float = 0.01) -> None:
        self.fixed, self.row, self.begin, self.next = fixed, row, begin, next

    def of(self, call: str, size: int) -> float:
        return {"step": self.fixed + self.row * size, "begin": self.begin, "next": self.next}[call]


# The best length


def brute(chances: list[float], costs: Costs, live: int) -> int:
    def rate(length: int) -> float:
        ids = 1 + sum(math.prod(chances[: place + 1]) for place in range(length))
        cost = costs.of("step", live * (1 + length))
        return ids / (cost + (costs.of("begin", live) + length * costs.of("next", live) if length else 0))

    return max(range(len(chances) + 1), key=lambda length: (rate(length), -length))


@given(st.lists(st.floats(0, 1), max_size=5), st.floats(0, 0.5), st.floats(0, 1), st.integers(1, 16))
def test_the_best_length_brings_the_most_ids_in_a_unit_of_cost(chances, row, begin, live) -> None:
    costs = Costs(row=row, begin=begin)
    assert best_length(chances, costs, live) == brute(chances, costs, live)


def test_no_draft_where_none_pays_and_all_of_it_where_all_do() -> None:
    assert best_length([1.0] * 5, Costs(row=0), 1) == 5
    assert best_length([0.0] * 5, Costs(row=0), 1) == 0
    assert best_length([0.5] * 5, Costs(fixed=0, row=1), 1) == 0, "a row costs as much as a step"
    assert best_length([], Costs(), 1) == 0


def test_a_large_batch_drafts_less() -> None:
    lengths = [best_length([0.7] * 5, Costs(fixed=5, row=0.5), live) for live in (1, 2, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]


def test_what_was_paid_for_counts_no_more() -> None:
    """Before it a draft would not begin; after it, with the block made and the token asked for, it is drawn."""
    costs, chances = Costs(row=0.4, begin=0.6), [0.5]
    assert best_length(chances, costs, 1) == 0
    assert best_length(chances, costs, 1, drawn=0, asked=1) == 1
    assert best_length([0.0, 0.0], costs, 1, drawn=1, asked=1) == 1, "what is drawn stays"


# Costs


def test_measured_costs_are_medians_scaled_to_what_was_not_measured() -> None:
    counted = Costs(fixed=10.0, row=1.0, begin=5.0, next=1.0)
    costs = MeasuredCosts(counted)
    assert costs.of("step", 3) == 13, "nothing measured yet"
    for seconds in (9.0, 0.1, 0.3, 0.2):  # the first pays for what is kept afterwards
        costs.note("step", 2, seconds)
    assert costs.of("step", 2) == pytest.approx(0.2)
    assert costs.of("step", 14) == pytest.approx(0.2 * 24 / 12)
    assert costs.of("begin", 1) == pytest.approx(0.2 * 5 / 12), "as the model's step says"
    for seconds in (1.0, 0.5):
        costs.note("begin", 1, seconds)
    assert costs.of("begin", 1) == 0.5
    for seconds in (1.0, 7.0):
        costs.note("step", 12, seconds)
    assert costs.of("step", 14) == pytest.approx(7.0 * 24 / 22), "the nearest counts"


def meta(config: Config) -> Transformer:
    with torch.device("meta"):
        return Transformer(config, choose("cpu", "reference"))


def test_counted_costs_are_bytes_of_weights() -> None:
    model = meta(Config.tiny())
    assert model.mtp is not None
    costs = CountedCosts(model, model.mtp)
    experts = sum(p.nbytes for name, p in model.named_parameters() if name.startswith("layers") and ".experts." in name)
    dense = sum(
        p.nbytes
        for name, p in model.named_parameters()
        if name.startswith("layers") and ".experts." not in name and "embed" not in name
    )
    assert costs.of("step", 1) == pytest.approx(dense + experts * 2 / 8 + model.head.weight.nbytes)
    assert costs.of("step", 2) - costs.of("step", 1) == pytest.approx(experts * (2 / 8) * (6 / 8))
    assert costs.of("step", 1000) == pytest.approx(dense + experts + model.head.weight.nbytes)
    markov = model.mtp.stages()[-1].markov_head
    assert markov is not None
    assert costs.of("next", 9) == markov.head.weight.nbytes
    assert costs.of("begin", 1) > model.head.weight.nbytes


def test_what_the_released_model_reads() -> None:
    """Its step reads some 14 GB, an added row a third of that, a draft a third: docs/speculation.md."""
    model = meta(Config.released())
    assert model.mtp is not None
    costs = CountedCosts(model, model.mtp)
    step = costs.of("step", 1)
    assert 10e9 < step < 16e9
    assert 0.2 < (costs.of("step", 2) - step) / step < 0.5
    assert 0.2 < costs.of("begin", 1) / step < 0.5
    assert Weights(1.0).read(7) == 1.0


def test_the_page_tells_what_the_counted_costs_say() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "speculation.md").read_text(encoding="utf-8")
    chances, lengths, gains = (
        [float(cell) for cell in re.findall(rf"^\| {row} \|(.*)\|$", page, re.M)[0].split("|")]
        for row in ("chance of each token", "best length", "ids for the same bytes, over none")
    )
    model = meta(Config.released())
    assert model.mtp is not None and len(chances) == 6
    costs = CountedCosts(model, model.mtp)
    for chance, length, gain in zip(chances, lengths, gains, strict=True):
        best = best_length([chance] * 5, costs, 1)
        ids = sum(chance**place for place in range(best + 1))
        cost = costs.of("step", 1 + best) + (costs.of("begin", 1) + best * costs.of("next", 1) if best else 0)
        assert (best, round(ids * costs.of("step", 1) / cost, 2)) == (length, gain)


# A sequence's own judge


def rounds(judge: OwnJudge, count: int, confidence, outcomes, live: int = 1, most: int = 5) -> list[int]:
    """How many tokens were drafted in each round. `outcomes()` says whether a token would be accepted."""
    drawn_by_round = []
    for _ in range(count):
        drawn, accepted, confidences = 0, 0, []
        if judge.begins(most, live):
            hit = True
            while drawn < most:
                confidences.append(confidence())
                if not judge.goes_on(confidences):
                    break
                hit = hit and outcomes()
                accepted += hit
                drawn += 1
        judge.learn(confidences, drawn, accepted)
        drawn_by_round.append(drawn)
    return drawn_by_round


def test_where_nothing_is_accepted_drafts_end_soon_and_are_tried_ever_less() -> None:
    drawn = rounds(OwnJudge(Past(5), Costs(), alone=True), 4000, lambda: 2.0, lambda: False)
    drafts = [round for round, count in enumerate(drawn) if count]
    early = [round for round in drafts if round < WAIT]
    assert len(early) <= 4, early
    late = [round for round in drafts if round >= WAIT]
    gaps = [b - a for a, b in itertools.pairwise(late)]
    assert gaps == sorted(gaps) and gaps[-1] > LONGEST_WAIT, "twice as rarely each time"
    assert sum(count > 0 for count in drawn) < 0.005 * 4000


def test_confidences_that_promise_too_much_or_too_little_are_put_right(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for raw, share in ((3.0, 0.5), (-3.0, 0.9)):
        judge = OwnJudge(Past(1), Costs(row=0.0, begin=0.0, next=0.0), alone=True)
        # So many that what is learnt varies by 0.013 from seed to seed.
        rounds(judge, 1600, lambda raw=raw: raw, lambda s=share: bool(torch.rand(1, generator=generator) < s), most=1)
        assert judge.past.chance(0, raw) == pytest.approx(share, abs=0.1)


def test_confidence_that_always_refuses_turns_drafts_off() -> None:
    """Otherwise each round would pay for a block that nothing is drawn of."""
    asked = []

    def confidence() -> float:
        asked.append(1)
        return -20.0

    drawn = rounds(OwnJudge(Past(5), Costs(), alone=True), 1000, confidence, lambda: False)
    assert len(asked) < 30 and sum(drawn) < 20


def test_drafts_come_back_when_they_pay_again() -> None:
    judge = OwnJudge(Past(5), Costs(), alone=True)
    rounds(judge, 60, lambda: 2.0, lambda: False)
    drawn = rounds(judge, 400, lambda: 2.0, lambda: True)
    assert drawn[-50:] == [5] * 50


def test_a_sure_draft_is_longer_than_an_unsure_one() -> None:
    judge = OwnJudge(Past(5), Costs(), alone=True)
    judge.begins(5, 1)
    assert judge.goes_on([3.0]) and judge.goes_on([3.0, 3.0]) and not judge.goes_on([3.0, -6.0])


def test_greedy_sequences_go_by_seconds_and_the_batch_and_sampled_ones_by_neither() -> None:
    policy = WhilePays(Costs(), 5)
    greedy, sampled = policy.judge(greedy=True), policy.judge(greedy=False)
    for _ in range(3):
        policy.note("step", 1, 1.0)
        policy.note("step", 6, 60.0)  # here a row costs as much as a step
        policy.note("step", 2, 20.0)
    assert not greedy.begins(5, 1) and sampled.begins(5, 1)
    costly = WhilePays(Costs(fixed=1, row=0.3), 5)
    assert not costly.judge(greedy=True).begins(5, 64) and costly.judge(greedy=False).begins(5, 64)


def test_greedy_sequences_learn_together_and_sampled_ones_by_themselves() -> None:
    policy = WhilePays(Costs(), 5)
    for greedy in (True, False):
        rounds(policy.judge(greedy), 20, lambda: 2.0, lambda: False)
        assert policy.judge(greedy).begins(5, 1) is not greedy


def test_places_that_were_never_reached_are_thought_no_better_than_those_before() -> None:
    past = Past(3)
    assert past.chances(3) == pytest.approx([0.7] * 3)
    for _ in range(8):
        past.learn([2.0] * 3, drawn=3, accepted=0)
    assert past.chances(3)[0] < 0.2 and past.chances(3) == pytest.approx([past.chances(3)[0]] * 3)
    past.learn([2.0] * 3, drawn=3, accepted=3)
    assert past.chances(3)[1] > past.chances(3)[0]


def test_no_more_is_drafted_than_can_be_used() -> None:
    assert max(rounds(OwnJudge(Past(5), Costs(), alone=True), 50, lambda: 5.0, lambda: True, most=2)) == 2


def test_one_length() -> None:
    always = Always(2)
    assert always.judge(True).begins(5, 3)
    assert always.goes_on([0.0]) and always.goes_on([0.0, -9.0]) and not always.goes_on([0.0] * 3)


# By name


@pytest.fixture(scope="module")
def with_draft() -> Transformer:
    return meta(Config.tiny())


@pytest.fixture(scope="module")
def without_draft() -> Transformer:
    with torch.device("meta"):
        return Transformer(Config.tiny(), choose("cpu", "reference"), draft=False)


def test_names(with_draft: Transformer, without_draft: Transformer) -> None:
    assert policy_for("off", with_draft) is None and policy_for(0, with_draft) is None
    assert isinstance(policy_for("auto", with_draft), WhilePays)
    assert isinstance(policy_for(5, with_draft), Always)
    for length in ("auto", "off", 0):
        assert policy_for(length, without_draft) is None


@pytest.mark.parametrize(
    ("length", "complaint"),
    [(6, "draft must be at most 5 .*got 6"), (-1, "draft must be auto, off or a number of tokens, got -1")],
)
def test_other_lengths_are_refused(with_draft: Transformer, length: int, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        policy_for(length, with_draft)


def test_a_model_without_a_draft_cannot_draft(without_draft: Transformer) -> None:
    with pytest.raises(InputError, match="draft must be 0 or off: this model has no draft, got 2"):
        policy_for(2, without_draft)
