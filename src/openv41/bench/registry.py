"""The benchmarks by name."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from openv41.bench import attention, kernels, speculate, state, vision
from openv41.bench.results import Report, Settings
from openv41.errors import InputError

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Benchmark:
    """`run(settings, progress)` compares, measures and reports; it calls `progress` with a line before a long phase."""

    name: str
    what: str
    run: Callable[[Settings, Progress], Report]


BENCHMARKS = (
    Benchmark("attention", "one re-scorer layer at the released sizes: a token, and a prompt", attention.run),
    Benchmark("state", "bytes, the cache's verbs, half-depth prefill, bounded replay, long packed caches", state.run),
    Benchmark("speculate", "text with and without drafts: time per token at batches of 1, 4 and 16", speculate.run),
    Benchmark("vision", "two blocks of the tower at the released width: packed images against padded ones", vision.run),
    Benchmark("kernels", "the Hopper kernels at the released sizes, beside their floors; needs a GPU", kernels.run),
)


def find(name: str) -> Benchmark:
    """The benchmark of that name. Raises `InputError` for another."""
    names = [benchmark.name for benchmark in BENCHMARKS]
    if name in names:
        return BENCHMARKS[names.index(name)]
    near = difflib.get_close_matches(name, names, n=1)
    way_out = f"did you mean {near[0]}?" if near else "openv41 bench alone lists them"
    raise InputError(f"a benchmark must be one of {', '.join(names)}, got {name!r}; {way_out}")
