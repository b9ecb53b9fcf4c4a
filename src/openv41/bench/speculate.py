"""Speculation: wall time with drafts over without, on the small checkpoint, at batches of 1, 4 and 16.

Its weights are random, so that its draft is hardly ever right. What drafts would bring is measured with a synthetic
draft: the model's own one runs, and takes its time, but the tokens are those of the text, right with a set chance.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from openv41.bench.measure import Timing
from openv41.bench.results import Agreement, Figure, Report, Settings
from openv41.generate.loop import Generation, Request
from openv41.generate.policy import Length, policy_for
from openv41.generate.speculate import Drafter, Drafting, Speculation, Tally, speculation_for
from openv41.inputs.tokenizer import Tokenizer, compress_vocabulary
from openv41.model.draft import Draft
from openv41.model.transformer import Output, Transformer
from openv41.ops import choose
from openv41.state import Cache, Step
from openv41.weights.load import Checkpoint, load_into
from openv41.weights.tiny import write_tiny

BATCHES = (1, 4, 16)
CHANCES = (0.0, 0.5, 0.7, 0.9, 1.0)
LENGTHS: tuple[Length, ...] = (5, "auto")
OWN = ("off", "own_5", "own_auto")
"""Runs in which the model says what it says; in the others it is made to say the same text."""
FOR_GPUS = ("fast", "hopper")
"""Sets of operations that are timed on a GPU where there is one."""
PROMPT, NEW = 24, 32
"""Tokens of each prompt, and new ones."""
RULES = "greedy texts with drafts, by the model's own draft and by a synthetic one, are those without, id by id"
ABOUT = (
    "Ratios are of wall time per token, with drafts over without, in the same run: below 1 drafts pay. Greedy, all by",
    "the same prompts; reading them is not timed. Synthetic: the model's own draft runs and takes its time, but its",
    "tokens are those of the text, each right with the chance said once all before it were. The small model's own",
    "draft has random weights and says nothing of the released one's.",
)


@torch.no_grad()
def run(settings: Settings, progress: Callable[[str], None]) -> Report:
    """Compare texts under the reference, then time."""
    progress("comparing texts with and without drafts, under the reference")
    agreement = _agreement()
    figures: list[Figure] = []
    model = small_model(settings.ops, settings.weights)
    if agreement.passed:
        for batch in BATCHES:
            progress(f"timing a batch of {batch}")
            figures += _batch(model, batch, settings.repeats)
    where = "" if model.embed.weight.device.type == "cpu" else f", on {torch.cuda.get_device_name()}"
    subject = f"{model.config.n_layers} layers of width {model.config.dim}, {NEW} new tokens a sequence{where}"
    return Report("speculate", subject, settings, agreement, tuple(figures), ABOUT if figures else ())


def small_model(ops: str, weights: str | None) -> Transformer:
    """The small checkpoint with its draft; under the operations made for GPUs on one, where there is one."""
    device = "cuda" if ops in FOR_GPUS and torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(f"{folder}/tiny")
        checkpoint = Checkpoint.open(f"{folder}/tiny")
        config = checkpoint.config
        options: dict[str, Any] = {} if weights is None else {"weights": weights}
        with torch.device("meta"):
            model = Transformer(config, choose(device, ops, "published", **options))
        load_into(model, checkpoint, device=device)
        if model.lookback is not None:
            token_map = compress_vocabulary(Tokenizer.open(checkpoint.folder), config.vocab_size)
            model.lookback.token_map = token_map.to(device)
    return model


def requests_of(model: Transformer, count: int, new: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    words = model.config.vocab_size * 7 // 8  # behind them are markers
    prompts = torch.randint(3, words, (count, PROMPT), generator=generator).tolist()
    return [Request(ids, new, stream=place) for place, ids in enumerate(prompts)]


# A draft that is right with a set chance


class Synthetic:
    """The model's own draft, whose tokens are exchanged for those of the text: of slot i `texts[i]`, its prompt with
    what comes behind. Each is right with the given chance if all before it were, the others are wrong. How many are
    right is spread evenly over the drafts of a sequence, so that few of them have the right mean."""

    def __init__(self, draft: Draft, texts: Sequence[Sequence[int]], chance: float) -> None:
        self.draft, self.texts, self.chance = draft, texts, chance
        self.drafts = [0] * len(texts)

    def remember(self, taps: Tensor | None, step: Step | None, cache: Cache) -> None:
        self.draft.remember(taps, step, cache)

    def begin(self, ids: Tensor, slots: Sequence[int], cache: Cache, count: int) -> "Exchanged":
        places = [(slot, cache.length(slot) + 1, self._right(slot, count)) for slot in slots]
        return Exchanged(self, self.draft.begin(ids, slots, cache, count), places)

    def _right(self, slot: int, count: int) -> int:
        """Tokens of the next draft that are right: `chance ** k` of all drafts have k or more."""
        self.drafts[slot] += 1
        even = (self.drafts[slot] * GOLDEN + slot / len(self.texts)) % 1
        return sum(self.chance**places > even for places in range(1, count + 1))


GOLDEN = (5**0.5 - 1) / 2
"""Its multiples fill the interval from 0 to 1 evenly, however many there are."""


class Exchanged:
    """One block of a synthetic draft. Its confidence is the chance, as a logit."""

    def __init__(self, synthetic: Synthetic, own: Drafting, places: list[tuple[int, int, int]]) -> None:
        self.synthetic, self.own, self.places, self.place = synthetic, own, places, 0

    def next(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        logits, sure = self.own.next(previous)
        for row, (slot, first, right) in enumerate(self.places):
            text, at = self.synthetic.texts[slot], first + self.place
            id = text[at] if at < len(text) else 0
            logits[row, id if self.place < right else (id + 1) % logits.shape[1]] = logits[row].max() + 1
        self.place += 1
        return logits, torch.full_like(sure, self.synthetic.chance).logit(1e-6)


@contextmanager
def scripted(model: Transformer, texts: Sequence[Sequence[int]]) -> Iterator[None]:
    """Within it the model runs as ever and says the given texts: where operations are not row-stable its own would part
    from them sooner or later, and a synthetic draft would be wrong from there on."""

    def say(_: Transformer, arguments: tuple[Step, Cache], output: Output) -> None:
        step, rows = arguments[0], arguments[0].wanted
        places = zip(step.slot[rows].tolist(), step.position[rows].tolist(), strict=True)
        ids = [texts[slot][min(position + 1, len(texts[slot]) - 1)] for slot, position in places]
        said = torch.tensor(ids, device=output.logits.device).unsqueeze(1)
        output.logits.scatter_(1, said, output.logits.amax(1, keepdim=True) + 1)

    handle = model.register_forward_hook(say)
    try:
        yield
    finally:
        handle.remove()


# Runs


@dataclass(frozen=True)
class Run:
    """New ids by sequence, seconds a token of the phase behind the prompts, and what came of the drafts."""

    texts: list[list[int]]
    seconds: float
    tally: Tally | None = None


def decode(model: Transformer, requests: Sequence[Request], speculation: Speculation | None = None) -> Run:
    generation = Generation(model, requests, None, speculation=speculation)
    texts: list[list[int]] = [[] for _ in requests]
    for event in generation.events():
        texts[event.sequence].append(event.id)
    seconds = generation.decode.seconds / generation.decode.tokens
    return Run(texts, seconds, None if speculation is None else speculation.tally)


def synthetic(model: Transformer, texts: Sequence[Sequence[int]], chance: float, length: Length) -> Speculation:
    policy = policy_for(length, model)
    assert model.mtp is not None and policy is not None
    drafter: Drafter = Synthetic(model.mtp, texts, chance)
    return Speculation(drafter, policy)


def whole(requests: Sequence[Request], texts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*request.ids, *text] for request, text in zip(requests, texts, strict=True)]


def _agreement() -> Agreement:
    model = small_model("reference", None)
    requests = requests_of(model, 2, 8)
    free = decode(model, requests).texts
    others = {
        "the model's own draft": speculation_for(5, model),
        "a synthetic draft": synthetic(model, whole(requests, free), 0.7, 5),
    }
    equal, failures = 0, []
    for name, speculation in others.items():
        texts = decode(model, requests, speculation).texts
        equal += sum(a == b for own, other in zip(free, texts, strict=True) for a, b in zip(own, other, strict=True))
        if parted := first_difference(free, texts):
            failures.append(f"with {name} sequence {parted[0]} parts from the plain text at new id {parted[1]}")
    compared = len(others) * sum(map(len, free))
    return Agreement(RULES, compared, equal / compared, equal / compared, tuple(failures))


def first_difference(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Sequence and place of the earliest id that is another, or None."""
    pairs = enumerate(zip(texts, others, strict=True))
    found = [(place, sequence) for sequence, (own, other) in pairs for place, (a, b) in
             enumerate(zip(own, other, strict=True)) if a != b]  # fmt: skip
    return min(found)[::-1] if found else None


def margin(model: Transformer, ids: Sequence[int]) -> float:
    """How far apart the two likeliest logits behind these ids are, over the largest of all."""
    logits = model(Step.pack([(0, 0, list(ids))], device=model.embed.weight.device)).logits[0]
    best = logits.topk(2).values
    return float((best[0] - best[1]) / logits.abs().max())


# Figures


def _batch(model: Transformer, batch: int, repeats: int) -> Iterator[Figure]:
    requests = requests_of(model, batch, NEW)
    free = decode(model, requests)
    texts = whole(requests, free.texts)
    calls: dict[str, Callable[[], Speculation | None]] = {"off": lambda: None}
    for length in LENGTHS:
        calls[f"own_{length}"] = partial(speculation_for, length, model)
        for chance in CHANCES:
            calls[f"{chance}_{length}"] = partial(synthetic, model, texts, chance, length)
    runs: dict[str, list[Run]] = defaultdict(list)
    for _ in range(repeats):
        for name, speculation in calls.items():
            with nullcontext() if name in OWN else scripted(model, texts):
                runs[name].append(decode(model, requests, speculation()))
    yield _time(f"batch_{batch}_ms", f"batch {batch}: a token without drafts", [run.seconds for run in runs["off"]])
    for name in [key for key in calls if key != "off"]:
        source, drafted = name.split("_")
        # Runs of one round are neighbours in time, so each is compared with the plain one of its round.
        ratios = [own.seconds / plain.seconds for own, plain in zip(runs[name], runs["off"], strict=True)]
        tally = runs[name][-1].tally
        assert tally is not None
        who = "the model's own draft" if source == "own" else f"synthetic, right {float(source):.0%}"
        note = f"{tally.mean_accepted:.2f} accepted of a draft, {tally.drafts / tally.rounds:.0%} of rounds with one"
        if parted := first_difference(free.texts, runs[name][-1].texts):
            sequence, place = parted
            apart = margin(model, texts[sequence][: PROMPT + place])
            note += f"; a text parts at id {place}, where the two likeliest are {apart:.1e} apart"
        what = f"  {who}, --draft {drafted}: time over without"
        yield Figure(f"batch_{batch}_{name.replace('.', '')}", what, median(ratios), "", note=note)
    even = _break_even([(chance, runs[f"{chance}_5"]) for chance in CHANCES], runs["off"])
    yield Figure(f"batch_{batch}_break_even", "  --draft 5 pays from this chance on", even, "")


def _break_even(synthetic_runs: Sequence[tuple[float, list[Run]]], plain: list[Run]) -> float:
    """The chance at which the ratio passes 1, between the two that were measured around it; 2 where none pays."""
    before: tuple[float, float] | None = None
    for chance, runs in synthetic_runs:
        ratio = median(own.seconds / other.seconds for own, other in zip(runs, plain, strict=True))
        if ratio <= 1:
            below, above = before or (chance, 1.0)
            return below + (chance - below) * (above - 1) / (above - ratio) if above > ratio else chance
        before = chance, ratio
    return 2.0


def _time(key: str, what: str, seconds: Sequence[float]) -> Figure:
    in_ms = [1e3 * one for one in seconds]
    return Figure(key, what, median(in_ms), "ms", Timing(median(in_ms), min(in_ms), max(in_ms), len(in_ms)))
