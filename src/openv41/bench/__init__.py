"""Benchmarks: how long a part takes on this machine, beside what this machine could do at best.

    measure.py    how a figure is taken: several calls in turn, medians; what the machine reads and multiplies
    results.py    what a benchmark returns, as values, as JSON and as text
    layer.py      one attention layer with seeded weights, and what a step of it reads
    agree.py      whether a set of operations agrees with the reference on it
    attention.py  one re-scorer layer at the released sizes: a token, and a prompt
    state.py      the cache: bytes, verbs, half-depth prefill
    vision.py     the tower on images of several sizes, packed and padded
    speculate.py  text with and without drafts, by the model's own draft and by one that is right with a set chance
    registry.py   the benchmarks by name

A benchmark compares before it measures. Where the set of operations to be timed does not agree with the reference, its
report has no figures.
"""

from openv41.bench.registry import BENCHMARKS, Benchmark, find
from openv41.bench.results import Agreement, Figure, Report, Settings, format_report

__all__ = ["BENCHMARKS", "Agreement", "Benchmark", "Figure", "Report", "Settings", "find", "format_report"]
