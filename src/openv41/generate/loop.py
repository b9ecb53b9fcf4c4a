"""The loop: prompts in, ids out one by one, all sequences of a batch in one packed step.

    prefill   the prompts side by side in one ragged step, or in chunks of so many tokens
    decode    one token of every live sequence a step; a finished sequence is closed and drops out

It knows ids, not text: whoever reads the events makes text of them, and may say when to stop.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from openv41.errors import InputError
from openv41.generate.sampling import Sampling, generator_for, sample
from openv41.model.transformer import Transformer
from openv41.state import Cache

Finish = Literal["eos", "stop", "length", "context"]
"""Why a sequence ended: it said so itself, the caller did, it has its `max_new_tokens`, or the context is full."""

Parts = list[tuple[int, Sequence[int]]]
"""Sequences with their next ids."""

CHUNK = 2048
"""Prompt tokens in one step, to bound the memory that a long prompt takes."""


@dataclass(frozen=True)
class Request:
    """One sequence to continue. The sampling's seed and `stream` together choose its random numbers.

    Raises `InputError` for an empty prompt or fewer than one new token.
    """

    ids: Sequence[int]
    max_new_tokens: int = 128
    sampling: Sampling = Sampling()
    stream: int = 0

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
    """Tokens that went through the model in one phase, and the seconds that it took, choosing ids included."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second; 0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Generation:
    """One batch on its way. `events` runs it; `prefill` and `decode` tell how fast, the reader's own time left out.

    Raises `InputError` at once for what cannot be run: no request, ids outside the vocabulary, a prompt longer than the
    context. The cache has just the room that the requests may need.
    """

    def __init__(
        self,
        transformer: Transformer,
        requests: Sequence[Request],
        eos: int | None,
        stop: Callable[[int, int], bool] | None = None,
        chunk: int | None = CHUNK,
    ) -> None:
        """`stop(sequence, id)` is asked about every new id but `eos`. With `chunk` None the prompts are one step."""
        self.config = transformer.config
        for number, request in enumerate(requests):
            _check(request.ids, f"prompt {number + 1} of {len(requests)}", self.config.vocab_size, self.config.context)
        if not requests or (chunk is not None and chunk < 1):
            raise InputError(f"a batch needs at least 1 request and chunks of 1 token, got {len(requests)} and {chunk}")
        self.transformer, self.requests, self.eos, self.stop = transformer, requests, eos, stop
        self.chunk = chunk or sum(len(request.ids) for request in requests)
        self.prefill, self.decode = Pace(), Pace()
        device = transformer.embed.weight.device
        self.cache = Cache(self.config, len(requests), self._room(), dtype=transformer.ops.dtype, device=device)
        self.generators = [generator_for(request.sampling.seed, request.stream) for request in requests]
        self.made = [0] * len(requests)
        self.latest: dict[int, int] = {}  # the id that each live sequence is to read next

    def events(self) -> Generator[Event]:
        """Every new id as it comes. To be run once; closing the iterator ends the batch."""
        slots = [self.cache.open() for _ in self.requests]  # a fresh cache: sequence i lives in slot i
        try:
            for parts in self._chunks():
                yield from self._advance(parts, self.prefill)
            while self.latest:
                yield from self._advance([(slot, [id]) for slot, id in self.latest.items()], self.decode)
        finally:
            for slot in slots:
                if self.cache.lengths[slot] is not None:
                    self.cache.close(slot)

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

    def _advance(self, parts: Parts, pace: Pace) -> Iterator[Event]:
        """One step, and the next id of every sequence whose prompt is through."""
        begin = time.perf_counter()
        step = self.cache.step(parts, prompts={slot: len(self.requests[slot].ids) for slot, _ in parts})
        with torch.no_grad():
            logits = self.transformer(step, self.cache).logits
        slots = [slot for slot, _ in parts if self._is_ready(slot)]  # the others' prompts go on: no logits of theirs
        samplings = [self.requests[slot].sampling for slot in slots]
        ids = sample(logits, samplings, [self.generators[slot] for slot in slots]) if slots else []
        pace.seconds += time.perf_counter() - begin
        pace.tokens += len(step)
        for slot, id in zip(slots, ids, strict=True):
            yield Event(slot, id, self._take(slot, id))

    def _is_ready(self, slot: int) -> bool:
        return self.cache.length(slot) >= len(self.requests[slot].ids)

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
        return "context" if self.cache.length(slot) == self.config.context else None


def _check(ids: Sequence[int], name: str, vocabulary: int, context: int) -> None:
    if len(ids) > context:
        raise InputError(f"{name} must fit the context of {context} tokens, got {len(ids)}; shorten it")
    if outside := [id for id in ids if not 0 <= id < vocabulary]:
        raise InputError(f"ids of {name} must lie in 0 to {vocabulary - 1}, got {outside[0]}; use its own tokenizer")
