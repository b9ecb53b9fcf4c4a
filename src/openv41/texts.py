"""Text around the loop, which knows ids only: prompts before it, pieces, completions and scores behind it.

    Prompt -> Request -> Generation -> Event -> Piece -> Completion
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from openv41.config import Config
from openv41.errors import InputError
from openv41.generate.loop import Event, Finish, Generation, Request
from openv41.generate.sampling import Number, Sampling
from openv41.inputs.image import PLACEHOLDER, Source, place_pictures, read_picture
from openv41.inputs.tokenizer import Tokenizer
from openv41.state import Picture, Placed


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and how.

    `max_new_tokens`, `temperature`, `top_p`, `top_k` and `seed` are those of `Request` and `Sampling`. `stop` is a text
    or several: the continuation ends before the first of them. `stream` tells prompts of one seed apart. `images` are
    paths, the bytes of files, or pictures made before, one for each `<image>` in the text, in order; with None (not
    with an empty list) `<image>` is text like any other.
    Raises `InputError` for an empty text, for values out of range, and for more or fewer images than places for them.
    """

    text: str
    max_new_tokens: int = 128
    temperature: Number = 0.0
    top_p: Number = 1.0
    top_k: int = 0
    stop: str | Sequence[str] = ()
    seed: int = 0
    stream: int = 0
    images: Sequence[Source | Picture] | None = None

    def __post_init__(self) -> None:
        if not self.text:
            raise InputError("the prompt must not be empty; give at least one character to continue")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise InputError("the prompt must be text, but holds half a surrogate pair; remove it")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if not all(self.stop):
            raise InputError(f"a stop text must not be empty, got {self.stop!r}; leave it out to stop nowhere")
        if self.images is not None:
            places = self.text.count(PLACEHOLDER)
            if places != len(self.images):
                raise InputError(
                    f"the prompt must have one {PLACEHOLDER} for each image, got {places} of them and "
                    f"{len(self.images)} images"
                )
            object.__setattr__(self, "images", tuple(self.images))
        self.request([0])  # checks the numbers now rather than in the middle of a batch

    def request(self, ids: Sequence[int], pictures: Sequence[Placed] = ()) -> Request:
        """What the loop is asked, once the text is ids."""
        sampling = Sampling(self.temperature, self.top_p, self.top_k, self.seed)
        return Request(ids, self.max_new_tokens, sampling, self.stream, pictures)

    def encode(self, tokenizer: Tokenizer, config: Config) -> Request:
        """The request, its images read. Raises `InputError` for one that cannot be, or a model without vision."""
        if not self.images:
            return self.request(tokenizer.encode(self.text))
        if not config.vision_n_layers:
            raise InputError("the prompt has images, but the model has no vision tower; give it text alone")
        pictures = [one if isinstance(one, Picture) else read_picture(one, config) for one in self.images]
        return self.request(*place_pictures(self.text, pictures, tokenizer, config))


@dataclass(frozen=True)
class Piece:
    """What one new id adds to a prompt's continuation. Its text is empty while a character, or what may be a stop text,
    is incomplete. With the last piece comes the reason to finish: eos, stop, length or context."""

    sequence: int
    text: str
    id: int
    finish_reason: Finish | None = None


@dataclass(frozen=True)
class Completion:
    """A prompt's continuation: its text (ended before a stop text), all its ids but the end id, and why it ended (None:
    it was interrupted). `seconds` from the batch's beginning to this sequence's end."""

    text: str
    ids: tuple[int, ...]
    finish_reason: Finish | None
    prompt_tokens: int
    seconds: float
    seed: int

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class StopTexts:
    """Lets text through up to a stop text, and holds back what may be the beginning of one.

    What comes out does not depend on how the text was cut into pieces: the stop text that is complete first counts,
    and of several that end together the longest.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.found = False

    def put(self, piece: str) -> str:
        """The text that is certain to be kept. After a stop text there is none."""
        if self.found:
            return ""
        text = self._held + piece
        # What is held back is the longest end that a stop text begins with, so no match starts before it.
        matches = [(at + len(stop), at) for stop in self._texts if (at := text.find(stop)) >= 0]
        if matches:
            self.found, self._held = True, ""
            return text[: min(matches)[1]]
        keep = len(text) - self._longest_beginning(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back, once no more text comes: it has turned out to be no stop text."""
        rest, self._held = self._held, ""
        return rest

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that a stop text begins with."""
        most = min(len(text), max((len(stop) - 1 for stop in self._texts), default=0))
        return next((size for size in range(most, 0, -1) if self._begins(text[-size:])), 0)

    def _begins(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._texts)


class Writer:
    """One sequence's text as its ids come."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        special = tokenizer.special
        self.silent = (special.bos, special.eos, special.pad)  # they stand for no text
        self.decoder, self.stops = tokenizer.stream(), StopTexts(prompt.stop)
        self.text, self.ids, self.ready = "", list[int](), ""
        self.finish_reason: Finish | None = None
        self.seconds: float | None = None

    def put(self, id: int) -> bool:
        """Takes in an id; whether the text has come to a stop text."""
        self.ids.append(id)
        if id not in self.silent:
            self.ready += self.stops.put(self.decoder.put(id))
        return self.stops.found

    def take(self, finish: Finish | None) -> str:
        """The text that has become certain since the last call, all of it at the end."""
        if finish:
            self.finish_reason = finish
            self.ready += self.stops.put(self.decoder.finish()) + self.stops.finish()
        piece, self.ready = self.ready, ""
        self.text += piece
        return piece


class Stream:
    """An iterator over the pieces of a batch as they come, those of several prompts interleaved.

    `completions` is what there is so far, at any time. `close()` ends the batch early; nothing is left open.
    """

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[Prompt], generation: Generation) -> None:
        self.prompts, self.generation = prompts, generation
        self._writers = [Writer(tokenizer, prompt) for prompt in prompts]
        generation.stop = lambda sequence, id: self._writers[sequence].put(id)
        self._begin = time.perf_counter()
        self._events = generation.events()

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        return self._piece(next(self._events))

    def close(self) -> None:
        self._events.close()

    @property
    def seconds(self) -> float:
        """From the beginning until now, or until the last sequence ended."""
        ends = [writer.seconds for writer in self._writers if writer.seconds is not None]
        return max(ends) if len(ends) == len(self._writers) else time.perf_counter() - self._begin

    @property
    def completions(self) -> list[Completion]:
        each = zip(self.prompts, self._writers, self.generation.requests, strict=True)
        return [self._completion(*one) for one in each]

    def _piece(self, event: Event) -> Piece:
        writer = self._writers[event.sequence]
        if event.finish:
            writer.seconds = time.perf_counter() - self._begin
        return Piece(event.sequence, writer.take(event.finish), event.id, event.finish)

    def _completion(self, prompt: Prompt, writer: Writer, request: Request) -> Completion:
        seconds = self.seconds if writer.seconds is None else writer.seconds
        ids = tuple(writer.ids)
        return Completion(writer.text, ids, writer.finish_reason, len(request.ids), seconds, prompt.seed)


@dataclass(frozen=True)
class TokenScore:
    """A token of a text with its natural log-probability after all before it, and the likeliest tokens in its place."""

    id: int
    text: str
    logprob: float
    likeliest: tuple["TokenScore", ...] = field(default=())


@dataclass(frozen=True)
class Score:
    """How likely a model holds a text: token by token after the begin id, and as a whole."""

    tokens: tuple[TokenScore, ...]
    bytes: int

    @property
    def logprob(self) -> float:
        """Natural log-probability of the whole text."""
        return math.fsum(token.logprob for token in self.tokens)

    @property
    def perplexity(self) -> float:
        """The number of equally likely tokens that would be as surprising, per token."""
        surprise = -self.logprob / len(self.tokens)
        return math.exp(surprise) if surprise < 709 else math.inf  # above, exp overflows

    @property
    def bits_per_byte(self) -> float:
        """Bits that the text would take, coded by the model, per byte of its UTF-8 form."""
        return -self.logprob / math.log(2) / self.bytes
