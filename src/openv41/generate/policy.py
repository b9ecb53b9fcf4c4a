"""How long to draft: what a longer draft is expected to bring, against what it costs to make and to verify.

With `chances` a_0, a_1, ... that a drafted token is accepted once all before it were, a draft of k tokens brings
1 + a_0 + a_0 a_1 + ... ids (the first is the model's own), and takes the time to draft k tokens and to run 1 + k rows.
The best k brings the most ids in a second; 0 is one of them.

Whether a place is drafted must be settled before its token is drawn, since rejection sampling is exact for a token that
is verified whatever it is: confidence in a token depends on the tokens before it alone, and may be used; to drop a
token after a look at it, or at those behind it, would change the distribution.

A sampled id depends on whether its place was drafted. So for sequences that sample, what decides is made of the
sequence's own past and of costs that are counted in bytes, never of a clock or of the other sequences: a seed then
gives the same ids again. Greedy ids do not depend on drafts, and are decided for by the run's own measured seconds.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol, runtime_checkable

from torch import nn

from openv41.errors import InputError
from openv41.model.draft import Draft
from openv41.model.experts import Experts
from openv41.model.transformer import Transformer

Length = Literal["auto", "off"] | int
"""How long to draft: as long as it pays, never, or always so many tokens."""

Call = Literal["step", "begin", "next"]
"""What takes time: the model on so many rows; the stages of so many drafts; one more token of so many drafts."""

PRIOR_CHANCE, PRIOR_WEIGHT = 0.7, 2.0
"""Before anything is known the first token is accepted with this chance, and each later one with that of the one before
it; as if so many had been seen."""
MEMORY = 0.97
"""Every outcome makes those before it count less by this factor: about the latest thirty are remembered."""
WAIT, LONGEST_WAIT = 32, 1024
"""Where drafts do not pay one is made all the same after so many ids, then after twice as many, to see if they do."""
KEPT = 9
"""Of the latest calls of one size the median is taken."""


# Costs


@runtime_checkable
class Costs(Protocol):
    """What calls cost, in any unit that is the same for all of them."""

    def of(self, call: Call, size: int) -> float:
        """`size`: rows of a step, or sequences that draft."""


@dataclass(frozen=True)
class Weights:
    """Bytes of weights that a part reads: `dense` ones always, of `routed` ones those of the chosen experts."""

    dense: float
    routed: float = 0.0
    share: float = 1.0
    """Of the experts, for one row."""

    @classmethod
    def of(cls, part: nn.Module) -> "Weights":
        """Tables, of which a few rows are looked up, do not count."""
        experts = [module for module in part.modules() if isinstance(module, Experts)]
        routed = sum(weight.nbytes for one in experts for weight in one.experts.parameters())
        tables = sum(weight.nbytes for name, weight in part.named_parameters() if "embed." in name)
        whole = sum(weight.nbytes for weight in part.parameters())
        share = experts[0].gate.active / experts[0].gate.weight.shape[0] if experts else 1.0
        return cls(float(whole - routed - tables), float(routed), share)

    def read(self, rows: int) -> float:
        """Bytes for `rows` rows, each of which chooses its experts at random."""
        return self.dense + self.routed * (1 - (1 - self.share) ** rows)


class CountedCosts:
    """Bytes of weights that calls read: the time of a machine that is bound by memory, the same on every machine."""

    def __init__(self, transformer: Transformer, draft: Draft) -> None:
        markov = draft.stages()[-1].markov_head
        assert markov is not None
        self.layers, self.stages = Weights.of(transformer.layers), Weights.of(draft)
        self.head, self.markov = transformer.head.weight.nbytes, Weights.of(markov).dense
        self.block = transformer.config.dspark_block_size

    def of(self, call: Call, size: int) -> float:
        match call:
            case "step":
                return self.layers.read(size) + self.head
            case "begin":  # the whole block, whatever is asked for
                return self.stages.read(size * self.block) - self.markov + self.head
            case "next":
                return self.markov


class MeasuredCosts:
    """Seconds of the run's own calls. What was not measured is the nearest that was, times what the counted costs say
    of the difference."""

    def __init__(self, counted: Costs) -> None:
        self.counted = counted
        self.taken: dict[Call, dict[int, deque[float]]] = {"step": {}, "begin": {}, "next": {}}
        self.met: dict[Call, set[int]] = defaultdict(set)

    def note(self, call: Call, size: int, seconds: float) -> None:
        """The first call of a size does not count: it pays for what is kept afterwards."""
        if size in self.met[call]:
            self.taken[call].setdefault(size, deque(maxlen=KEPT)).append(seconds)
        self.met[call].add(size)

    def of(self, call: Call, size: int) -> float:
        known = call if self.taken[call] else "step"
        if not self.taken[known]:
            return self.counted.of(call, size)
        nearest = min(self.taken[known], key=lambda other: (abs(other - size), other))
        seconds = median(self.taken[known][nearest])
        return seconds * self.counted.of(call, size) / self.counted.of(known, nearest)


def best_length(chances: Sequence[float], costs: Costs, live: int, drawn: int = 0, asked: int = 0) -> int:
    """The length, from `drawn` to `len(chances)`, that brings the most ids per unit of cost.

    `live` sequences are taken to do alike. `drawn` tokens are drafted already, and stay; `asked` places have been
    paid for.
    """
    best, best_rate, expected, survival = drawn, 0.0, 1.0, 1.0
    for length in range(len(chances) + 1):
        if length:
            survival *= chances[length - 1]
            expected += survival
        if length < drawn:
            continue
        cost = costs.of("step", live * (1 + length))
        if length or asked:
            cost += costs.of("begin", live) + max(length, asked) * costs.of("next", live)
        if expected / cost > best_rate:
            best, best_rate = length, expected / cost
    return best


# Policies


@runtime_checkable
class Judge(Protocol):
    """Decides for one sequence, round by round."""

    def begins(self, most: int, live: int) -> bool:
        """Whether to draft in this round, at most `most` tokens, while `live` sequences are under way."""

    def goes_on(self, confidences: Sequence[float]) -> bool:
        """Whether to draft one more token. `confidences` are those in the tokens drafted so far and in that one."""

    def learn(self, confidences: Sequence[float], drawn: int, accepted: int) -> None:
        """What became of a draft: how many tokens were drawn and accepted. `confidences` are theirs, and with them that
        in the token that was not drawn any more, if it was asked for."""


@runtime_checkable
class Policy(Protocol):
    """How long the drafts of a batch are, `most` tokens at most."""

    most: int

    def judge(self, greedy: bool) -> Judge:
        """For one more sequence, which takes the likeliest ids or samples."""

    def note(self, call: Call, size: int, seconds: float) -> None:
        """How long a call took."""


class Always:
    """Drafts of one length, policy and judge in one."""

    def __init__(self, length: int) -> None:
        self.most = length

    def judge(self, greedy: bool) -> "Always":
        return self

    def note(self, call: Call, size: int, seconds: float) -> None:
        pass

    def begins(self, most: int, live: int) -> bool:
        return True

    def goes_on(self, confidences: Sequence[float]) -> bool:
        return len(confidences) <= self.most

    def learn(self, confidences: Sequence[float], drawn: int, accepted: int) -> None:
        pass


class WhilePays:
    """Drafts as long as they pay: by measured seconds for greedy sequences, by counted bytes for those that sample.

    Greedy sequences learn together. One that samples is judged by its own past alone, as if there were no other.
    """

    def __init__(self, counted: Costs, most: int) -> None:
        self.most, self.counted, self.measured = most, counted, MeasuredCosts(counted)
        self.shared = Past(most)

    def judge(self, greedy: bool) -> "OwnJudge":
        if greedy:
            return OwnJudge(self.shared, self.measured, alone=False)
        return OwnJudge(Past(self.most), self.counted, alone=True)

    def note(self, call: Call, size: int, seconds: float) -> None:
        self.measured.note(call, size, seconds)


class Past:
    """What became of drafts, by place.

    The chance of a place is accepted over reached, the latest outcomes counting most, from a prior that is the chance
    of the place before. Where confidence in a token is known, the chance is the sigmoid of it and a bias, which is
    fitted one Newton step an outcome, from a prior of 0 with a variance of 1.
    """

    def __init__(self, most: int) -> None:
        self.reached, self.accepted = [0.0] * most, [0.0] * most
        self.bias, self.precision = [0.0] * most, [1.0] * most

    def learn(self, confidences: Sequence[float], drawn: int, accepted: int) -> None:
        for place, confidence in enumerate(confidences[: accepted + 1]):  # those behind a rejection say nothing
            chance = self.chance(place, confidence)
            outcome = float(place < accepted) if place < drawn else chance  # of a token not drawn: what was expected
            self.reached[place] = MEMORY * self.reached[place] + 1
            self.accepted[place] = MEMORY * self.accepted[place] + outcome
            if place < drawn:
                self.precision[place] += chance * (1 - chance)
                self.bias[place] += (outcome - chance) / self.precision[place]

    def chances(self, most: int, confidences: Sequence[float] = ()) -> list[float]:
        """For each place up to `most`: by its confidence where that is known, else by what became of others."""
        chances, chance = [], PRIOR_CHANCE
        for place in range(most):
            weight = PRIOR_WEIGHT + self.reached[place]
            chance = (PRIOR_WEIGHT * chance + self.accepted[place]) / weight
            chances.append(self.chance(place, confidences[place]) if place < len(confidences) else chance)
        return chances

    def chance(self, place: int, confidence: float) -> float:
        logit = confidence + self.bias[place]
        return 1 / (1 + math.exp(-max(-30.0, min(30.0, logit))))


class OwnJudge:
    """Decides for one sequence by a past and by costs. `alone`: as if there were no other sequence."""

    def __init__(self, past: Past, costs: Costs, alone: bool) -> None:
        self.past, self.costs, self.alone = past, costs, alone
        self.waited, self.wait = 0, WAIT
        self.most, self.live, self.trial = 0, 1, False

    def begins(self, most: int, live: int) -> bool:
        self.most, self.live = most, 1 if self.alone else live
        pays = best_length(self.past.chances(most), self.costs, self.live) > 0
        self.trial = not pays and self.waited >= self.wait
        if pays:
            self.wait = WAIT
        elif self.trial:
            self.wait = min(2 * self.wait, LONGEST_WAIT)
        self.waited = 0 if pays or self.trial else self.waited + 1
        return pays or self.trial

    def goes_on(self, confidences: Sequence[float]) -> bool:
        drawn = len(confidences) - 1
        if self.trial and drawn == 0:
            return True  # or nothing would be learnt
        chances = self.past.chances(self.most, confidences)
        return best_length(chances, self.costs, self.live, drawn, drawn + 1) > drawn

    def learn(self, confidences: Sequence[float], drawn: int, accepted: int) -> None:
        self.past.learn(confidences, drawn, accepted)


def policy_for(length: Length, transformer: Transformer) -> Policy | None:
    """The policy that `length` names, or None for no drafts at all; "auto" is that too where the model has no draft.

    Raises `InputError` for a length that is none, or that the model cannot draft.
    """
    block = transformer.config.dspark_block_size if transformer.mtp is not None else 0
    if length == "auto" and transformer.mtp is not None:
        return WhilePays(CountedCosts(transformer, transformer.mtp), block)
    if length in ("auto", "off"):
        return None
    if type(length) is not int or length < 0:
        raise InputError(f"draft must be auto, off or a number of tokens, got {length!r}; auto drafts where it pays")
    if length > block:
        most = f"at most {block} (dspark_block_size)" if block else "0 or off: this model has no draft"
        raise InputError(f"draft must be {most}, got {length}; auto drafts where it pays")
    return Always(length) if length else None
