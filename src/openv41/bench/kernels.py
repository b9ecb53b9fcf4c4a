"""Every kernel of the Hopper operations at the released sizes: time, share of the floor, other people's kernels.

The floor is the larger of two times: the fewest bytes at the speed of a large copy, and the operations at the speed of
a large matrix product, both measured here, on this GPU, in this run.
"""

import importlib
from collections.abc import Callable, Iterator

import torch

from openv41.bench.case import Case
from openv41.bench.gpu import Ceilings, captured, ceilings, measure_gpu
from openv41.bench.results import Agreement, Figure, Report, Settings
from openv41.errors import InputError

MODULES = ("attend", "attend_gluon", "score", "rows", "products")
"""`bench/kernels_NAME.py` has the cases of the launch module `ops/hopper/NAME.py`."""

RULES = "each case's own bound on its distance from the reference"


def run(settings: Settings, progress: Callable[[str], None]) -> Report:
    """Raises `InputError` where there is no CUDA device, or `settings.only` names no case."""
    if not torch.cuda.is_available():
        raise InputError("the kernels' benchmark needs a CUDA GPU, and torch sees none: run it on one")
    progress("measuring what this GPU copies and multiplies")
    here = ceilings()
    figures, failures, checked = list(_of_machine(here)), [], 0
    for case in _cases(settings.only):
        progress(f"{case.op}: {case.case}")
        checked += 1
        try:
            figures += _judged(case, here, settings.repeats * 4)
        except Exception as failure:  # it has no figure; the others have theirs
            failures.append(f"{case.op}, {case.case}: {type(failure).__name__}: {failure}")
    if not checked:
        raise InputError(f"no case has {settings.only!r} in its name: run it without --only to see them all")
    agreement = Agreement(RULES, checked, 1 - len(failures) / checked, 1 - len(failures) / checked, tuple(failures))
    return Report("kernels", torch.cuda.get_device_name(), settings, agreement, tuple(figures), ABOUT, apart=True)


ABOUT = (
    "Times are medians on the GPU, each the replay of a CUDA graph, the L2 cache overwritten before it: they hold what",
    "the shortest kernel in a graph takes. A peer is timed in turn, on the same inputs, as a graph too.",
)


class Disagrees(Exception):
    """The result is not the reference's."""


def _judged(case: Case, here: Ceilings, repeats: int) -> list[Figure]:
    """The case's figures. Raises `Disagrees` where it has none."""
    error = case.error()
    if not error <= case.most_error:  # a NaN disagrees
        raise Disagrees(f"off by {error:.3g}, at most {case.most_error:.3g} is allowed")
    return list(_time(case, here, repeats))


def _cases(only: str) -> Iterator[Case]:
    for name in MODULES:
        cases = importlib.import_module(f"openv41.bench.kernels_{name}").cases()
        yield from (case for case in cases if only in f"{case.op}, {case.case}")


def _of_machine(here: Ceilings) -> Iterator[Figure]:
    yield Figure("copy_tb_s", "copy, read and written", here.bytes_per_second / 1e12, "TB/s")
    yield Figure("bf16_tflop_s", "bf16 products", here.bf16_flops / 1e12, "TFLOP/s")
    yield Figure("fp8_tflop_s", "fp8 products", here.fp8_flops / 1e12, "TFLOP/s")
    one = torch.zeros((), device="cuda")
    least = measure_gpu({"least": captured(one.zero_)})["least"]
    yield Figure("least_us", "the shortest kernel, in a graph", least.median * 1e3, "us", least)


def _time(case: Case, here: Ceilings, repeats: int) -> Iterator[Figure]:
    calls = {name: captured(call) for name, call in {"": case.run, **case.peers}.items()}
    times = measure_gpu(calls, repeats)
    own = times.pop("")
    floor = here.floor(case.bytes, case.bf16_flops, case.fp8_flops)
    note = f"{floor / own.median / 10:.0f} % of the floor of {floor:.1f} us"
    key = f"{case.op}, {case.case}".replace(" ", "_")
    aim = "" if case.aim_us is None else f"{case.aim_us:g} us"
    yield Figure(key, f"{case.op}: {case.case}", own.median * 1e3, "us", own, aim, note)
    for name, timing in times.items():
        ratio = timing.median / own.median
        yield Figure(f"{key}_{name}", f"  {name}", timing.median * 1e3, "us", timing, "", f"{ratio:.2f} of ours")
