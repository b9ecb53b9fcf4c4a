"""Does a set of operations agree with the reference on one layer? Asked before anything is timed.

Operation by operation, from the same inputs: nearly all values are equal. From end to end they need not be: one value
that falls on the other side of an fp8 rounding moves every later one a little. There the distance is bounded instead.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from openv41.bench.layer import Work
from openv41.bench.results import Agreement
from openv41.model.attention import Attention
from openv41.ops import Compound, Ops
from openv41.parity.compare import Bounds, Sheet
from openv41.parity.picks import compare_picks, hide, tied_picks

EACH = Bounds(min_equal=0.99, quantum=0.02)
"""Of one operation, from the same inputs: 99 % equal, the others within 2 % of their row's largest value."""
END = Bounds(quantum=0.05, relative_rms_error=0.02)
"""Of the layer's result: every value within 5 % of its row's largest, the root mean square of all within 2 %."""
EACH_RULE = "every operation from the same inputs: at least 99 % equal, the rest within 2 % of the row's largest"
RULES = f"{EACH_RULE}; the layer's result: within 5 %, and 2 % root mean square; picks equal up to ties"

COMPOUND = [name for name in vars(Compound) if not name.startswith("_")]

Piece = tuple[str, Tensor, Tensor, Work]
"""What it is, the layer's result for some tokens, its picks, and the same tokens as work for the judge."""


class Beside(Compound):
    """The judge's operations. Each call is repeated by another set on the same inputs, and both results are kept: of
    compound operations, and of the simple ones that the judge does for them."""

    def __init__(self, judge: Ops, other: Ops) -> None:
        self.judge, self.other = judge, other
        self.results: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # by operation: other's, judge's
        for name in COMPOUND:
            setattr(self, name, self._both(name, getattr(self, name)))

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.judge, name)
        return self._both(name, own) if name in vars(Ops) and callable(own) else own

    def _both(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [(value[0].clone(), value[1]) if _is_place(value) else value for value in args]
            wanted = own(*args, **kwargs)
            kept = wanted.clone() if any(map(_is_place, args)) else wanted  # a table will be written to again
            self.results[name].append((getattr(self.other, name)(*given, **kwargs), kept))
            return wanted

        return call


def _is_place(value: Any) -> bool:
    """Whether an argument is a table with the rows of it that will be written."""
    return isinstance(value, tuple) and isinstance(value[1], Tensor) and value[1].dtype == torch.int64


def agree(layer: Attention, judge: Attention, pieces: Iterable[Piece]) -> Agreement:
    """Compare what `layer` made with what `judge` makes of the same tokens, which sees the layer's weights."""
    assert layer.indexer is not None
    sheet, ends = Sheet(), {}
    beside = Beside(judge.ops, layer.ops)
    for what, y, picks, piece in pieces:
        scores = _scores(layer, piece), _scores(judge, piece)
        _give(judge, beside)
        wanted, sight = piece(judge)
        _give(judge, beside.judge)
        assert sight.picks is not None
        tied = tied_picks(scores[1], layer.indexer.topk)
        compare_picks(sheet, f"{what}: picks", picks, sight.picks, tied, scores)
        ends[what] = (y, wanted)
    for name, results in beside.results.items():
        sheet.compare_all({f"{name} {call}": pair for call, pair in enumerate(results)}, EACH)
    sheet.compare_all({f"{what}: result": pair for what, pair in ends.items()}, END)
    failures = tuple(f"{finding.what}: {finding.text}" for finding in sheet.findings if not finding.passed)
    each = [pair for results in beside.results.values() for pair in results]
    return Agreement(RULES, sum(got.numel() for got, _ in each), _equal(each), _equal(ends.values()), failures)


def _give(layer: Attention, ops: Any) -> None:
    for module in layer.modules():
        if hasattr(module, "ops"):
            setattr(module, "ops", ops)  # noqa: B010


def _equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The share of values that are equal; those of unlike shapes are not."""
    counts = [(int((got == wanted).sum()) if got.shape == wanted.shape else 0, wanted.numel()) for got, wanted in pairs]
    return sum(equal for equal, _ in counts) / max(1, sum(count for _, count in counts))


def _scores(layer: Attention, piece: Work) -> Tensor:
    """The index scores by which a layer picks for a step's tokens: -inf where it may not pick."""
    indexer, step, sight = layer.indexer, piece.step, piece.sight
    assert indexer is not None
    keys = sight.source()[1].first(0, step.runs[0].end // layer.plan.ratio)
    q, weights = indexer.queries(piece.x, layer.query(piece.x, step.position)[1], step.position)
    return hide(indexer.scores(q, weights, keys, sight.candidates), step.visible(layer.plan.ratio))
