"""The speculative part of the loop: a draft proposes a few tokens, the model runs all of them at once, and those that
it would have said itself are kept.

    draft    for each sequence [latest id] -> d_1 .. d_k, by the draft's own logits
    verify   one packed step [latest id, d_1 .. d_k] of every sequence; logits of every row
    accept   d_i with probability min(1, p / q); at the first rejection an id from what p has more than q, else one
             more id from p
    rewind   the cache to the accepted tokens

p is what the request's sampling makes of the model's logits (temperature, top-k, top-p), q what it makes of the
draft's. Ids then have the distribution p, whatever q is. At temperature 0 both are one-hot, and the rule says: keep
what the model would have said. `docs/speculation.md` has the argument.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from openv41.generate.policy import Call, Judge, Length, Policy, policy_for
from openv41.generate.sampling import Sampling, draw, probabilities, sample
from openv41.model.transformer import Transformer
from openv41.state import Cache, Step


@runtime_checkable
class Drafting(Protocol):
    """A block for each of b sequences; its tokens are asked for one by one."""

    def next(self, previous: Int[Tensor, "b"]) -> tuple[Float[Tensor, "b v"], Float[Tensor, "b"]]:
        """Logits of the next token, and confidence in it before it is drawn, given the token before."""


@runtime_checkable
class Drafter(Protocol):
    """What proposes tokens: see `openv41.model.draft.Draft`."""

    def remember(self, taps: Tensor | None, step: Step | None, cache: Cache) -> None:
        """Takes in what the model tapped of the tokens of a step, after every step."""

    def begin(self, ids: Int[Tensor, "b"], slots: Sequence[int], cache: Cache, count: int) -> Drafting:
        """A block of up to `count` tokens for each slot, behind an id that was sampled and not run yet."""


@dataclass
class Drafted:
    """Tokens that were drafted for one sequence, and the distributions that they were drawn from (none for a greedy
    sequence, whose one-hot ones are plain from the ids). `confidences`: in each, and in one more if that was asked for
    and not drawn any more."""

    ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    distributions: list[Float[Tensor, "v"]] = field(default_factory=list)

    def draw(
        self, logits: Float[Tensor, "v"], likeliest: int, sampling: Sampling, generator: np.random.Generator
    ) -> None:
        """One more token, from the draft's logits of its place."""
        if sampling.greedy:
            self.ids.append(likeliest)
        else:
            distribution = probabilities(logits.unsqueeze(0), sampling)
            self.ids.append(int(draw(distribution, _uniform(generator, logits.device))))
            self.distributions.append(distribution[0])


@dataclass
class Tally:
    """What the drafts of a batch came to. `rounds` of decoding, counted for each sequence, and the `drafts` in them. By
    place in the draft: tokens drafted; those of them that were reached, all before them being accepted; those accepted.
    `seconds` to draft, and of the steps that verified a draft.
    """

    drafted: list[int]
    reached: list[int]
    accepted: list[int]
    rounds: int = 0
    drafts: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"draft": 0.0, "verify": 0.0})

    @classmethod
    def of(cls, most: int) -> "Tally":
        return cls([0] * most, [0] * most, [0] * most)

    @property
    def acceptance(self) -> list[float | None]:
        """By place: the share of the tokens reached that were accepted; None where none was reached."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [accepted / reached if reached else None for accepted, reached in pairs]

    @property
    def mean_accepted(self) -> float:
        """Drafted tokens that a draft brought, on average; 0 before the first."""
        return sum(self.accepted) / self.drafts if self.drafts else 0.0

    def note(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.drafts += drafted > 0
        for place in range(drafted):
            self.drafted[place] += 1
            self.reached[place] += place <= accepted
            self.accepted[place] += place < accepted


class Speculation:
    """The drafts of one batch, whose sequences are told apart by their slots."""

    def __init__(self, drafter: Drafter, policy: Policy) -> None:
        self.drafter, self.policy, self.most = drafter, policy, policy.most
        self.judges: dict[int, Judge] = {}
        self.tally = Tally.of(self.most)

    def draft(
        self,
        latest: Mapping[int, int],
        most: Mapping[int, int],
        samplings: Mapping[int, Sampling],
        generators: Mapping[int, np.random.Generator],
        cache: Cache,
    ) -> dict[int, Drafted]:
        """Drafts behind the latest id of each slot, `most` tokens long at most. Slots that begin none are left out.

        A token that was drawn is in the draft: nothing may take it out again (see `openv41.generate.policy`).
        """
        for slot in latest:
            if slot not in self.judges:
                self.judges[slot] = self.policy.judge(samplings[slot].greedy)
        most = {slot: min(self.most, room) for slot, room in most.items()}
        going = [slot for slot in latest if most[slot] and self.judges[slot].begins(most[slot], len(latest))]
        if not going:
            return {}
        begin = time.perf_counter()
        slots, ids = going, torch.tensor([latest[slot] for slot in going], device=cache.device)
        with torch.no_grad():
            drafting = self.drafter.begin(ids, slots, cache, max(most[slot] for slot in slots))
        self._note("begin", len(slots), begin)
        drafted = {slot: Drafted() for slot in slots}
        while going:
            begin = time.perf_counter()
            with torch.no_grad():
                logits, confidences = drafting.next(ids)
            sure, likeliest = confidences.tolist(), logits.argmax(1).tolist()
            for row, slot in enumerate(slots):
                if slot in going:
                    drafted[slot].confidences.append(sure[row])
            going = [slot for slot in going if self.judges[slot].goes_on(drafted[slot].confidences)]
            for row, slot in enumerate(slots):
                if slot in going:
                    drafted[slot].draw(logits[row], likeliest[row], samplings[slot], generators[slot])
            ids = torch.tensor([(drafted[slot].ids or [latest[slot]])[-1] for slot in slots], device=cache.device)
            going = [slot for slot in going if len(drafted[slot].ids) < most[slot]]
            self._note("next", len(slots), begin)
        return drafted

    def settle(
        self, drafted: Mapping[int, Drafted], chosen: Mapping[int, Sequence[int]], cache: Cache, seconds: float
    ) -> None:
        """Behind the step of a round, which took so many seconds: note what each sequence took of its draft, and take
        back the rest."""
        rows = sum(1 + len(drafted.get(slot, NONE).ids) for slot in chosen)
        self.policy.note("step", rows, seconds)
        self.tally.seconds["verify"] += seconds if rows > len(chosen) else 0.0
        for slot, ids in chosen.items():
            draft = drafted.get(slot, NONE)
            drawn, accepted = len(draft.ids), len(ids) - 1
            self.tally.note(drawn, accepted)
            self.judges[slot].learn(draft.confidences, drawn, accepted)
            if accepted < drawn:
                cache.rewind(slot, cache.length(slot) - drawn + accepted)

    def _note(self, call: Call, size: int, begin: float) -> None:
        seconds = time.perf_counter() - begin
        self.tally.seconds["draft"] += seconds
        self.policy.note(call, size, seconds)


def speculation_for(length: Length, transformer: Transformer) -> Speculation | None:
    """One batch's drafts by the model's own draft, or None for none. Raises `InputError` as `policy_for` does."""
    policy = policy_for(length, transformer)
    return None if policy is None or transformer.mtp is None else Speculation(transformer.mtp, policy)


NONE = Drafted()
"""Of a sequence that drafts nothing."""


def verify(
    logits: Float[Tensor, "j v"],
    drafted: Sequence[Drafted],
    samplings: Sequence[Sampling],
    generators: Sequence[np.random.Generator],
) -> list[list[int]]:
    """The ids that each sequence goes on with: its draft as far as it is accepted, and one id more.

    `logits` has 1 + k rows for a draft of k tokens: of the token before it and of each of its own.
    """
    firsts = np.cumsum([0] + [1 + len(draft.ids) for draft in drafted]).tolist()
    # Rows that are decided by themselves: all of greedy sequences, and the only one of a sequence without a draft.
    plain = [place for place, one in enumerate(samplings) if one.greedy or not drafted[place].ids]
    rows = [(place, row) for place in plain for row in range(firsts[place], firsts[place + 1])]
    chosen: dict[int, list[int]] = {place: [] for place in range(len(drafted))}
    if rows:
        own = [samplings[place] for place, _ in rows]
        ids = sample(logits[[row for _, row in rows]], own, [generators[place] for place, _ in rows])
        for (place, _), id in zip(rows, ids, strict=True):
            chosen[place].append(id)
    for place, draft in enumerate(drafted):
        if place in plain:
            chosen[place] = chosen[place][: 1 + _agreeing(draft.ids, chosen[place])]
        else:
            wanted = probabilities(logits[firsts[place] : firsts[place + 1]], samplings[place])
            chosen[place] = accept(draft.ids, draft.distributions, wanted, generators[place])
    return [chosen[place] for place in range(len(drafted))]


def accept(
    ids: Sequence[int],
    drafted: Sequence[Float[Tensor, "v"]],
    wanted: Float[Tensor, "places v"],
    generator: np.random.Generator,
) -> list[int]:
    """Rejection sampling: ids distributed as `wanted` [k + 1, v] says, made of k `ids` that were drawn from `drafted`.

    A token is accepted with probability min(1, p / q). The first that is not is replaced by a draw from the positive
    part of p - q, scaled to sum 1; behind a draft accepted as a whole one more id is drawn from p.
    """
    for place, id in enumerate(ids):
        p, q = float(wanted[place, id]), float(drafted[place][id])
        if p < q and generator.random() * q >= p:
            left = (wanted[place] - drafted[place]).clamp_min(0)
            # Where p and q differ by rounding alone nothing may be left: then they are the same distribution.
            left = left if bool(left.any()) else wanted[place]
            return [*ids[:place], int(draw(left.unsqueeze(0), _uniform(generator, left.device)))]
    return [*ids, int(draw(wanted[-1:], _uniform(generator, wanted.device)))]


def _agreeing(ids: Sequence[int], chosen: Sequence[int]) -> int:
    """How many ids at the beginning are the same."""
    return next((place for place, (a, b) in enumerate(zip(ids, chosen, strict=False)) if a != b), len(ids))


def _uniform(generator: np.random.Generator, device: torch.device) -> Float[Tensor, "1"]:
    return torch.tensor([generator.random()], dtype=torch.float64, device=device)
