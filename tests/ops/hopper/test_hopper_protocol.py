"""The barriers of attention with specialised warps: the kernels' own source, run by `gluon_machine` in random order.

That the machine would notice is tested by leaving out or turning round every single wait, arrival and fence.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openv41.formats import LATENT, WINDOW
from openv41.ops import ReferenceOps
from openv41.ops.hopper.attend_gluon import KERNELS, KEYS, RECORDS, Launch, Plan, prepare
from openv41.ops.kernels import (
    attend_hopper,
    attend_hopper_deep,
    attend_hopper_deep_records,
    attend_hopper_packed,
    attend_hopper_ring,
)
from tests.ops.hopper.gluon_machine import Deadlock, Race, run

MODULES = (attend_hopper, attend_hopper_packed, attend_hopper_ring, attend_hopper_deep, attend_hopper_deep_records)
PATHS = {module.__name__: Path(module.__file__ or "") for module in MODULES}
SYNCHRONISING = re.compile(r"\s+(mbarrier\.(wait|arrive)\(|fence_async_shared\(|async_copy\.mbarrier_arrive)")
SPARE = [
    # Group 1, whose weights came, has waited for the same copies.
    "attend_hopper: mbarrier.wait(shared.full.index(B0), phase) left out",
    # The query is copied before the first unit that a group waits for.
    *2 * ["attend_hopper_ring: mbarrier.wait(shared.query_full, taken & 1) left out"],
    *2 * ["attend_hopper_deep: mbarrier.wait(shared.query_full, taken & 1) left out"],
]
"""Waits that follow from others, and are kept all the same."""


def inputs(
    rng: torch.Generator, n: int, heads: int, near_count: int, far_count: int, packed: bool
) -> tuple[torch.Tensor, ...]:
    """Queries, tables, row numbers (a tenth of them -1) and sink."""
    q, near, far = (
        torch.randn(*shape, 512, generator=rng).bfloat16()
        for shape in ((n, heads), (near_count + 1,), (far_count + 1,))
    )
    lists = [torch.randint(0, count + 1, (n, count), generator=rng) for count in (near_count, far_count)]
    lists = [rows.masked_fill(torch.rand(rows.shape, generator=rng) < 0.1, -1) for rows in lists]
    if packed:
        near, far = WINDOW.to_records(near), LATENT.to_records(far)
    return q, near, lists[0], far, lists[1], torch.randn(heads, generator=rng)


def launch_of(given: tuple[torch.Tensor, ...], programs: int, kernel: str, keys: int) -> tuple[Launch, torch.Tensor]:
    """A launch by so many programs, and its poisoned output."""
    out = torch.full_like(given[0], torch.nan)
    return replace(prepare(*given, 0.05, out, Plan(kernel, keys, len(out), 1)), programs=programs), out


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("near_count", "far_count", "n", "programs"),
    [(0, 0, 2, 1), (5, 0, 1, 3), (0, 64, 3, 2), (64, 64, 1, 1), (70, 1, 2, 1), (128, 150, 3, 2), (20, 270, 2, 1)],
    ids=lambda x: str(x),
)
def test_any_count_of_blocks_queries_and_programs(
    kernel: str, near_count: int, far_count: int, n: int, programs: int, rng: torch.Generator, seed: int
) -> None:
    """0 to 6 blocks; several queries a program, and programs without one."""
    given = inputs(rng, n, 2, near_count, far_count, kernel in RECORDS)
    launch, out = launch_of(given, programs, kernel, KEYS[kernel][0])
    run(launch, PATHS, seed)
    expected = ReferenceOps().sparse_attention(*given, 0.05)
    assert (out - expected).norm() <= 5e-3 * expected.norm()
    assert out.isfinite().all()


@pytest.fixture(scope="module")
def busy() -> dict[str, list[Launch]]:
    """By kernel file: two queries of two pairs of blocks by one program, in blocks of every size that it takes."""
    rng = torch.Generator().manual_seed(1)
    made = {}
    for kernel, sizes in KEYS.items():
        given = [inputs(rng, 2, 1, 2 * keys, 2 * keys, kernel in RECORDS) for keys in sizes]
        made[kernel] = [launch_of(some, 1, kernel, keys)[0] for some, keys in zip(given, sizes, strict=True)]
    files = {"attend_hopper_packed": "records", "attend_hopper_ring": "ring", "attend_hopper_deep": "deep"}
    files["attend_hopper_deep_records"] = "deep records"
    every = [launch for launches in made.values() for launch in launches]
    return {name: made[kernel] for name, kernel in files.items()} | {"attend_hopper": every}


def changes() -> Iterator[tuple[str, str, str]]:
    """Kernel files with one thing wrong: what, the file, its source."""
    for name, path in PATHS.items():
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            code, space = line.partition("  #")[0].strip(), line[: len(line) - len(line.lstrip())]
            wrong = []
            if SYNCHRONISING.match(line):
                wrong.append(("left out", ["pass"]))
            if code.startswith("mbarrier.wait("):
                wrong.append(("phase turned", [code[:-1] + " ^ 1)"]))
            if code.startswith("mbarrier.init("):
                wrong.append(("one more arrival", [code[:-1] + " + 1)"]))
            if code.startswith("fence_async_shared()") and "arrive" in lines[i + 1]:
                wrong.append(("after the arrival", [lines[i + 1].strip(), code]))
            for what, instead in wrong:
                taken = 1 if len(instead) == 1 else 2
                source = [*lines[:i], *(space + one for one in instead), *lines[i + taken :]]
                yield f"{path.stem}: {code} {what}", name, "\n".join(source)


def noticed(launches: list[Launch], changed: dict[str, str], seed: int, orders: int = 1) -> bool:
    """In some orders in which the partitions may run: a wait for the wrong phase can be passed by luck."""
    for order in range(orders):
        for launch in launches:
            try:
                run(launch, PATHS, seed + order, changed)
            except (Race, Deadlock, AssertionError):
                return True
    return False


def test_every_wait_arrival_and_fence_is_needed(busy: dict[str, list[Launch]], seed: int) -> None:
    assert not noticed(busy["attend_hopper"], {}, seed)
    wrong = list(changes())
    assert len(wrong) > 50
    missed = [
        what
        for what, name, source in wrong
        if not noticed(busy[name.rpartition(".")[2]], {name: source}, seed, orders=4)
    ]
    assert missed == SPARE
