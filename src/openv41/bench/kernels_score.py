"""Index scores and picks at the released sizes: 32 index heads of 128, 512 picks, 2,048 candidate blocks of 8."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openv41.bench.case import Case
from openv41.formats import INDEX
from openv41.ops import ReferenceOps
from openv41.ops.hopper import operands, pick, score
from openv41.ops.hopper.select import select

JUDGE = ReferenceOps()
HEADS, WIDTH, PICKS, BLOCK, KEPT, PAGE = 32, 128, 512, 8, 2048, 64
CHUNK = 4096
PREFILL, DECODE = (1024, 32768, 131072), ((1, 131072), (16, 131072), (128, 32768), (128, 131072), (1, 1048576))
ROWS = ((1, 1048576), (128, 131072), (128, 1048576), (4096, 32768), (4096, 131072))
SCORE_AIM = {(4096, 32768): 1250.0, (128, 131072): 498.0}
SELECT_AIM = {(4096, 32768): 1500.0, (128, 131072): 450.0}
PICK_AIM = {(1, 1048576): 36.0, (128, 131072): 65.0, (4096, 32768): 300.0}
SPREAD = ((1, CHUNK, 32768), (128, 1, 131072))
"""Slots, tokens of each and keys of the cases whose groups of 32 channels lie about an octave apart: prefill is then
scored by groups."""

SOME = 2
"""Tokens whose scores and picks are compared with the reference."""


def cases(device: str = "cuda") -> Iterator[Case]:
    """Everything is bit-equal to the reference."""
    for p in PREFILL:
        yield from Inputs(1, CHUNK, p, device).cases()
    for slots, length, p in SPREAD:
        yield from Inputs(slots, length, p, device, octaves=1.0).scores_alone()
    for slots, p in DECODE:
        yield from Inputs(slots, 1, p, device).cases()
    for n, p in ROWS:
        yield _pick_case(n, p, device)


class Inputs:
    """`slots` sequences of `p` keys each, in pages in disorder, and a run of `length` tokens of each. Groups of 32 are
    scaled by 2^(octaves N(0, 1))."""

    def __init__(self, slots: int, length: int, p: int, device: str, octaves: float = 0.0) -> None:
        self.draw, self.octaves = torch.Generator(device).manual_seed(0), octaves
        self.slots, self.length, self.p, self.n = slots, length, p, slots * length
        held = -(-p // PAGE)
        self.pages = torch.randperm(slots * held, generator=self.draw, device=device).view(slots, held)
        some = INDEX.to_records(self._vectors(8192))
        picked = torch.randint(8192, (slots * held * PAGE,), generator=self.draw, device=device)
        self.table = operands.KeyTable(some[picked], self.pages, PAGE)
        self.q = INDEX.round(self._vectors(self.n, HEADS))
        self.weights = self._randn(self.n, HEADS)
        self.slot = torch.arange(slots, device=device).repeat_interleave(length)
        self.visible = torch.full((self.n,), p, dtype=torch.int64, device=device)
        self.runs = [length] * slots

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw, device=self.draw.device).bfloat16()

    def _vectors(self, *shape: int) -> Tensor:
        x = self._randn(*shape, WIDTH)
        if not self.octaves:
            return x
        scales = torch.exp2(self._randn(*shape, WIDTH // 32).float() * self.octaves)
        return (x * scales.repeat_interleave(32, -1)).bfloat16()

    @property
    def name(self) -> str:
        name = f"decode, batch {self.slots}" if self.length == 1 else f"prefill {self.n:,}"
        return f"{name}, P {self.p:,}" + (f", groups {self.octaves:g} octave apart" if self.octaves else "")

    def scores_alone(self) -> Iterator[Case]:
        flops = 2.0 * self.n * self.p * HEADS * WIDTH
        moved = self.slots * self.p * INDEX.record_bytes(WIDTH) + self.q.nbytes + 2.0 * self.n * self.p
        aim = None if self.octaves else SCORE_AIM.get((self.n, self.p))
        yield Case("index scores", self.name, self.scores, self.scores_off, 0, moved, fp8_flops=flops,
                   aim_us=aim)  # fmt: skip

    def cases(self) -> Iterator[Case]:
        size = (self.n, self.p)
        moved = self.slots * self.p * INDEX.record_bytes(WIDTH) + self.q.nbytes
        flops = 2.0 * self.n * self.p * HEADS * WIDTH
        if self.n * self.p <= 1 << 28:  # scores of 512 MB
            yield from self.scores_alone()
        yield self._selects("score and pick", {}, moved, flops, SELECT_AIM.get(size))
        yield self._selects("score, pick and keep", {"keep": KEPT}, moved, flops, None)
        if self.p > KEPT * BLOCK:
            within = torch.zeros((self.n, self.p // BLOCK), dtype=torch.bool, device=self.q.device)
            within[:, torch.randperm(self.p // BLOCK, generator=self.draw, device=self.q.device)[:KEPT]] = True
            within[:, -1] = True
            inside = min(self.n, self.slots * self.p // (KEPT * BLOCK)) * KEPT * BLOCK * 68.0
            flops = 2.0 * self.n * KEPT * BLOCK * HEADS * WIDTH
            given = {"within": within, "kept": KEPT + 1}
            yield self._selects("score and pick inside candidates", given, inside, flops, None)

    def _selects(self, op: str, given: dict[str, Any], moved: float, flops: float, aim: float | None) -> Case:
        run = partial(self.select, **given)
        error = partial(self.select_off, run, given.get("within"))
        return Case(op, self.name, run, error, 0, moved, fp8_flops=flops, aim_us=aim)

    def scores(self) -> Tensor:
        """As `select` works them out."""
        queries = operands.encode_queries("index scores", self.q, self.weights)
        tokens = score.Tokens(self.slot, self.visible, self.length)
        scores = torch.empty((self.n, self.p), dtype=torch.bfloat16, device=self.q.device)
        if self.length == 1:
            score.score_stored(queries, tokens, self.table, self.p, scores)
        else:
            ready = operands.make_ready(self.table, self.slot, self.slots, self.length, self.p, WIDTH)
            score.score_ready(queries, tokens, self.table, ready, self.p, scores)
        return scores

    def select(self, **given: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        return select(self.q, self.weights, self.table.table, self.slot, self.pages, PAGE, self.visible, PICKS, self.p,
                      self.runs, BLOCK, **given)  # fmt: skip

    def wanted(self) -> Tensor:
        """The reference's scores of the last tokens."""
        pages = self.pages[self.slot[-SOME:]]
        rows = (pages.unsqueeze(2) * PAGE + torch.arange(PAGE, device=pages.device)).flatten(1)[:, : self.p]
        keys = INDEX.from_records(self.table.table[rows]).bfloat16()
        some = zip(self.q[-SOME:], self.weights[-SOME:], keys, strict=True)
        return torch.cat([JUDGE.index_scores(q[None], weights[None], own) for q, weights, own in some])

    def scores_off(self) -> float:
        return _unequal(self.scores()[-SOME:], self.wanted())

    def select_off(self, run: Callable[[], tuple[Tensor, Tensor, Tensor | None]], within: Tensor | None) -> float:
        wanted, (positions, *_) = self.wanted(), run()
        if within is not None:
            inside = within[-SOME:].repeat_interleave(BLOCK, 1)
            wanted = wanted.masked_fill(~inside, -torch.inf)
        return _unequal(positions[-SOME:], JUDGE.pick(wanted, self.visible[-SOME:], PICKS))


def _pick_case(n: int, p: int, device: str) -> Case:
    draw = torch.Generator(device).manual_seed(0)
    scores = torch.randn(n, p, generator=draw, device=device, dtype=torch.bfloat16)
    visible = torch.full((n,), p, dtype=torch.int64, device=device)
    run = partial(pick.pick, scores, visible, PICKS)
    error = partial(_picks_off, run, scores, visible)
    moved = scores.nbytes + n * PICKS * 8.0
    return Case("pick", f"{n:,} x {p:,}", run, error, 0, moved, aim_us=PICK_AIM.get((n, p)))


def _picks_off(run: Callable[[], Tensor], scores: Tensor, visible: Tensor) -> float:
    return _unequal(run()[-SOME:], JUDGE.pick(scores[-SOME:], visible[-SOME:], PICKS))


def _unequal(got: Tensor, wanted: Tensor) -> float:
    """The share of entries that differ."""
    return (got != wanted).double().mean().item()
