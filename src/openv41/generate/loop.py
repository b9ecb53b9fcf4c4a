"""The loop: prompts in, ids out one by one, all sequences of a batch in one packed step.

    prefill   the prompts side by side in one ragged step, or in chunks of so many tokens
    decode    one token of every live sequence a step; a finished sequence is closed and drops out. With a draft
              a step also verifies what was proposed for each sequence, and may give several ids at once

It knows ids, not text: whoever reads the events makes text of them, and may say when to stop.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from openv41.errors import InputError
from openv41.generate.pictures import Pictures, check_pictures
from openv41.generate.sampling import Sampling, generator_for
from openv41.generate.speculate import NONE, Drafted, Speculation, verify
from openv41.model.transformer import Transformer
from openv41.state import Cache, Placed

Finish = Literal["eos", "stop", "length", "context"]
"""Why a sequence ended: it said so itself, the caller did, it has its `max_new_tokens`, or the context is full."""

Parts = list[tuple[int, Sequence[int]]]
"""Sequences with their next ids."""

CHUNK = 2048
"""Prompt tokens in one step, to bound the memory that a long prompt takes."""


@dataclass(frozen=True)
class Request:
    """One sequence to continue. The sampling's seed and `stream` together choose its random numbers. `pictures`, in
    order, stand where the ids are those of the image token.

    Raises `InputError` for an empty prompt or fewer than one new token.
    """

    ids: Sequence[int]
    max_new_tokens: int = 128
    sampling: Sampling = Sampling()
    stream: int = 0
    pictures: Sequence[Placed] = ()

    def __post_init__(self) -> None:
        most = self.max_new_tokens
        if len(self.ids) == 0:
            raise InputError("a prompt must hold at least 1 token, got none; begin it with the begin id")
        if type(most) is not int or most < 1:
            raise InputError(f"max_new_tokens must be a whole number, 1 or more, got {most!r}; to read only, use score")


@dataclass(frozen=True)
class Event:
    """A new id of a sequence (its place among the requests); with its last id comes the reason to finish."""

    sequence: int
    id: int
    finish: Finish | None = None


@dataclass
class Pace:
    """Tokens that a phase brought, of the prompts read or new ones, and its seconds, choosing ids included."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second; 0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Generation:
    """One batch on its way. `events` runs it; `prefill` and `decode` tell how fast, the reader's own time left out.

    Raises `InputError` at once for what cannot be run: no request, ids outside the vocabulary, a prompt longer than the
    context, a picture beside the tokens that it belongs to. The cache has just the room that the requests may need.
    """

    def __init__(
        self,
        transformer: Transformer,
        requests: Sequence[Request],
        eos: int | None,
        stop: Callable[[int, int], bool] | None = None,
        chunk: int | None = CHUNK,
        speculation: Speculation | None = None,
    ) -> None:
        """`stop(sequence, id)` is asked about every new id but `eos`. With `chunk` None the prompts are one step.
        `speculation` (one for every batch) drafts; without it every step brings one id a sequence."""
        self.config = transformer.config
        for number, request in enumerate(requests):
            name = f"prompt {number + 1} of {len(requests)}"
            _check(request.ids, name, self.config.vocab_size, self.config.context)
            check_pictures(transformer, request.ids, request.pictures, name)
        if not requests or (chunk is not None and chunk < 1):
            raise InputError(f"a batch needs at least 1 request and chunks of 1 token, got {len(requests)} and {chunk}")
        self.transformer, self.requests, self.eos, self.stop = transformer, requests, eos, stop
        self.chunk = chunk or sum(len(request.ids) for request in requests)
        self.prefill, self.decode = Pace(), Pace()
        self.speculation = speculation
        self.pictures = Pictures(transformer, [request.pictures for request in requests])
        self.cache = self._fresh_cache()
        self.generators = [generator_for(request.sampling.seed, request.stream) for request in requests]
        self.made = [0] * len(requests)
        self.latest: dict[int, int] = {}  # the id that each live sequence is to read next

    def events(self) -> Generator[Event]:
        """Every new id as it comes. To be run once; closing the iterator ends the batch."""
        slots = [self.cache.open() for _ in self.requests]  # a fresh cache: sequence i lives in slot i
        try:
            for parts in self._chunks():
                yield from self._read(parts)
            while self.latest:
                yield from self._decode()
        finally:
            for slot in slots:
                if self.cache.lengths[slot] is not None:
                    self.cache.close(slot)

    def _fresh_cache(self) -> Cache:
        weights, speculation = self.transformer.embed.weight, self.speculation
        return Cache(
            self.config,
            len(self.requests),
            self._room(),
            slack=0 if speculation is None else speculation.most,
            dtype=self.transformer.ops.dtype,
            device=weights.device,
            draft=speculation is not None,
        )

    def _room(self) -> int:
        """Tokens that the sequences hold at most; the last id of each is never read."""
        ends = (len(request.ids) + request.max_new_tokens - 1 for request in self.requests)
        return sum(min(end, self.config.context) for end in ends)

    def _chunks(self) -> Iterator[Parts]:
        """The prompts, in steps of `chunk` tokens. A sequence has one part at most in each."""
        parts: Parts = []
        room = self.chunk
        for slot, request in enumerate(self.requests):
            first = 0
            while first < len(request.ids):
                piece = request.ids[first : first + room]
                parts.append((slot, piece))
                first, room = first + len(piece), room - len(piece)
                if room == 0:
                    yield parts
                    parts, room = [], self.chunk
        if parts:
            yield parts

    def _read(self, parts: Parts) -> Iterator[Event]:
        """One step of prompts."""
        begin = time.perf_counter()
        chosen = self._step(parts)
        self.prefill.seconds += time.perf_counter() - begin
        self.prefill.tokens += sum(len(ids) for _, ids in parts)
        yield from self._give(chosen)

    def _decode(self) -> Iterator[Event]:
        """One step of all live sequences: each reads its latest id, and with it what was drafted behind it."""
        begin = time.perf_counter()
        drafted = self._draft() if self.speculation is not None else {}
        parts: Parts = [(slot, [id, *drafted.get(slot, NONE).ids]) for slot, id in self.latest.items()]
        drafted_by = time.perf_counter()
        chosen = self._step(parts, drafted)
        if self.speculation is not None:
            self.speculation.settle(drafted, chosen, self.cache, time.perf_counter() - drafted_by)
        self.decode.seconds += time.perf_counter() - begin
        for event in self._give(chosen):
            self.decode.tokens += 1
            yield event

    def _draft(self) -> dict[int, Drafted]:
        assert self.speculation is not None
        most = {slot: self._most(slot) for slot in self.latest}
        samplings = {slot: self.requests[slot].sampling for slot in self.latest}
        generators = {slot: self.generators[slot] for slot in self.latest}
        return self.speculation.draft(self.latest, most, samplings, generators, self.cache)

    def _most(self, slot: int) -> int:
        """Tokens that a draft can bring: no more ids than are to come before the last, no position past the context."""
        before_last = self.requests[slot].max_new_tokens - self.made[slot] - 1
        return min(before_last, self.config.context - self.cache.length(slot) - 1)

    def _step(self, parts: Parts, drafted: Mapping[int, Drafted] = MappingProxyType({})) -> dict[int, list[int]]:
        """Run one step, and choose the next ids of every sequence whose prompt is through: one, and more of a draft."""
        prompts = {slot: len(self.requests[slot].ids) for slot, _ in parts}
        starts = ((slot, self.cache.length(slot), len(ids)) for slot, ids in parts)
        with torch.no_grad():
            image, features = self.pictures.take([(slot, start, start + count) for slot, start, count in starts])
            step = self.cache.step(parts, "all" if drafted else "last", image, prompts, features)
            output = self.transformer(step, self.cache)
        if self.speculation is not None:
            self.speculation.drafter.remember(output.taps, output.tapped, self.cache)
        slots = [slot for slot, _ in parts if self._is_ready(slot)]  # the others' prompts go on: no logits of theirs
        if not slots:
            return {}
        drafts = [drafted.get(slot, NONE) for slot in slots]
        samplings = [self.requests[slot].sampling for slot in slots]
        ids = verify(output.logits, drafts, samplings, [self.generators[slot] for slot in slots])
        return dict(zip(slots, ids, strict=True))

    def _is_ready(self, slot: int) -> bool:
        return self.cache.length(slot) >= len(self.requests[slot].ids)

    def _give(self, chosen: Mapping[int, Sequence[int]]) -> Iterator[Event]:
        """The ids one by one. What was accepted behind the end of a sequence is dropped."""
        for slot, ids in chosen.items():
            for id in ids:
                finish = self._take(slot, id)
                yield Event(slot, id, finish)
                if finish:
                    break

    def _take(self, slot: int, id: int) -> Finish | None:
        """Note a new id. A sequence that it finishes is closed."""
        self.made[slot] += 1
        self.latest[slot] = id
        finish = self._finish(slot, id)
        if finish:
            del self.latest[slot]
            self.cache.close(slot)
        return finish

    def _finish(self, slot: int, id: int) -> Finish | None:
        if id == self.eos:
            return "eos"
        if self.stop is not None and self.stop(slot, id):
            return "stop"
        if self.made[slot] == self.requests[slot].max_new_tokens:
            return "length"
        read = len(self.requests[slot].ids) + self.made[slot] - 1  # the cache may hold ids that are still to be given
        return "context" if read == self.config.context else None


def _check(ids: Sequence[int], name: str, vocabulary: int, context: int) -> None:
    if len(ids) > context:
        raise InputError(f"{name} must fit the context of {context} tokens, got {len(ids)}; shorten it")
    if outside := [id for id in ids if not 0 <= id < vocabulary]:
        raise InputError(f"ids of {name} must lie in 0 to {vocabulary - 1}, got {outside[0]}; use its own tokenizer")
