"""Sparse attention with specialised warps against `ReferenceOps`.

Gluon has no interpreter: here the kernels' source runs in `gluon_machine`, at most a few queries at a time. On a GPU
they are launched in a process of their own, which is ended if a barrier should never come.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from openv41.errors import OpsError
from openv41.formats import LATENT, WINDOW
from openv41.ops import ReferenceOps
from openv41.ops.hopper.attend import attend
from openv41.ops.hopper.attend_gluon import (
    KERNELS,
    KEYS,
    RECORDS,
    Plan,
    attend_gluon,
    choose_pieces,
    choose_plan,
    prepare,
    put_together,
)
from openv41.ops.hopper.lists import checked_lists
from openv41.ops.kernels import (
    attend_hopper,
    attend_hopper_deep,
    attend_hopper_deep_records,
    attend_hopper_packed,
    attend_hopper_ring,
)
from tests.ops.hopper.gluon_machine import Machine, load_kernels, run

ROOT = Path(__file__).resolve().parents[3]
MODULES = (attend_hopper, attend_hopper_packed, attend_hopper_ring, attend_hopper_deep, attend_hopper_deep_records)
PATHS = {module.__name__: Path(module.__file__ or "") for module in MODULES}
SCALE = 512**-0.5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(
    rng: torch.Generator, n: int, heads: int, listed: tuple[int, int], packed: bool, rows: int = 50
) -> list[Tensor]:
    """Queries, tables, row numbers (a tenth of them -1) and sink. The tables' first row is not finite, or (records)
    as large as any: nothing may be read where there is -1."""
    q = torch.randn(n, heads, 512, generator=rng).bfloat16()
    tables = [torch.randn(rows, 512, generator=rng).bfloat16() for _ in range(2)]
    lists = [torch.randint(1, rows, (n, count), generator=rng) for count in listed]
    lists = [some.masked_fill(torch.rand(some.shape, generator=rng) < 0.1, -1) for some in lists]
    if packed:
        tables = [form.to_records(table) for form, table in zip((WINDOW, LATENT), tables, strict=True)]
    for table in tables:
        table[0] = 0x7E if packed else torch.nan
    return [q, tables[0], lists[0], tables[1], lists[1], torch.randn(heads, generator=rng)]


def plan_of(kernel: str, n: int, pieces: int = 1, keys: int = 64, whole: int = 0) -> Plan:
    """`whole`: queries that are not in pieces. `keys`: if the kernel takes so many."""
    return Plan(kernel, keys if keys in KEYS[kernel] else KEYS[kernel][0], n if pieces == 1 else whole, pieces)


def attended(given: list[Tensor | None], plan: Plan | None, seed: int) -> Tensor:
    """As `attend_gluon` does it, by two programs."""
    out = torch.full_like(given[0], torch.nan)
    launch = replace(prepare(*given, SCALE, out, plan), programs=2)
    for name in ("out", "partial", "maxima", "sums"):
        launch.arguments[name].fill_(torch.nan)
    run(launch, PATHS, seed)
    moved = {name: launch.arguments[name].to(DEVICE) for name in ("partial", "maxima", "sums")}
    whole = out.to(DEVICE)
    put_together(replace(launch, arguments=moved), given[5].to(DEVICE), whole)
    return whole.cpu()


def error(result: Tensor, expected: Tensor) -> float:
    assert result.dtype == expected.dtype and result.isfinite().all()
    return float((result.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kernel", KERNELS)
def test_whole_blocks_are_the_references(kernel: str, rng: torch.Generator, seed: int) -> None:
    """Where near rows fill their blocks, blocks, maxima and rounded weights are those of the reference: results differ
    by the order of sums alone."""
    given = inputs(rng, 2, 64, (128, 150), kernel in RECORDS)
    result = attended(given, plan_of(kernel, 2), seed)
    expected = ReferenceOps().sparse_attention(*given, SCALE)
    assert error(result, expected) < (6e-3 if "deep" in kernel else 1e-3)  # which has smaller blocks
    assert "deep" in kernel or (result == expected).double().mean() > 0.95


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("heads", "listed", "pieces", "keys", "whole"),
    [(7, (100, 300), 2, 64, 1), (64, (20, 270), 3, 64, 0), (1, (3, 0), 1, 64, 2), (33, (40, 130), 3, 32, 1)],
)
def test_pieces_and_any_sizes(
    kernel: str,
    heads: int,
    listed: tuple[int, int],
    pieces: int,
    keys: int,
    whole: int,
    rng: torch.Generator,
    seed: int,
) -> None:
    """Blocks begin anew with the far list, and pieces are kept in bf16: what is rounded differs, by 2^-9 of a value."""
    given = inputs(rng, 2, heads, listed, kernel in RECORDS)
    plan = plan_of(kernel, 2, pieces, keys, whole)
    assert error(attended(given, plan, seed), ReferenceOps().sparse_attention(*given, SCALE)) < 6e-3


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "records"])
def test_no_far_table_and_narrow_row_numbers(packed: bool, rng: torch.Generator, seed: int) -> None:
    given = [*inputs(rng, 2, 3, (70, 0), packed)]
    given[2], given[3], given[4] = given[2].int(), None, None
    assert error(attended(given, None, seed), ReferenceOps().sparse_attention(*given, SCALE)) < 6e-3


def test_a_list_of_nothing_and_extreme_sinks(rng: torch.Generator, seed: int) -> None:
    given = inputs(rng, 2, 4, (64, 64), False)
    given[2][0], given[4][0] = -1, -1
    given[5] = torch.tensor([0.0, torch.inf, -torch.inf, 1e4])
    result = attended(given, plan_of("ring", 2), seed)
    assert result.isfinite().all() and not result[0].any() and not result[1, (1, 3)].any()
    expected = ReferenceOps().sparse_attention(*given, SCALE)
    assert error(result[1], expected[1]) < 6e-3


@pytest.mark.parametrize(("form", "far", "scales"), [(WINDOW, False, (105, 194)), (LATENT, True, (1, 127))])
def test_every_code_is_decoded_exactly(form, far: bool, scales: tuple[int, int], rng: torch.Generator) -> None:
    """Half rows of 32 records; scales from the smallest that a writer makes to the largest that are exact."""
    codes = torch.randint(0, 256, (32, 256 // form.codes_per_byte), generator=rng, dtype=torch.uint8)
    if not far:
        codes = codes.where(codes & 0x7F != 0x7F, 0)  # NaN, which no writer makes
    scale = torch.randint(*scales, (32, 256 // form.block), generator=rng, dtype=torch.uint8)
    scale[0, :2] = torch.tensor([scales[0], scales[1] - 1], dtype=torch.uint8)
    decoded: list[Tensor] = []
    kernels = load_kernels(PATHS, Machine(0), 0, 1, {})
    kernels["decode"](
        codes.view(torch.int32), scale.as_subclass(type(kernels["gl"].zeros([1], torch.int32, None))),
        SimpleNamespace(store=decoded.append), far,
    )  # fmt: skip
    result = decoded[0].as_subclass(Tensor).contiguous().view(torch.bfloat16).double() * kernels["LIFT"]
    assert torch.equal(result, form.from_records(torch.cat((codes, scale), 1)).double())


def test_pieces_fill_the_multiprocessors() -> None:
    assert [choose_pieces(n, 5) for n in (0, 1, 16, 26, 27, 64, 66, 67, 4096)] == [5, 5, 5, 5, 4, 2, 2, 1, 1]


@pytest.mark.parametrize("records", [False, True])
def test_the_last_round_is_cut(records: bool, rng: torch.Generator) -> None:
    """132 multiprocessors: whole rounds, and of what is left over as many pieces as these have room for."""
    lists = checked_lists("", *inputs(rng, 2, 4, (128, 512), records)[:5])
    plans = {n: choose_plan(n, lists, records) for n in (1, 13, 14, 64, 128, 132, 133, 200, 4096)}
    few = (32, 0, 10) if records else (64, 0, 5)
    assert {n: (plan.keys, plan.whole, plan.pieces) for n, plan in plans.items()} == {
        1: few, 13: few, 14: (64, 0, 5), 64: (64, 0, 2), 128: (64, 128, 1), 132: (64, 132, 1), 133: (64, 132, 5),
        200: (64, 200, 1), 4096: (64, 4092, 5),
    }  # fmt: skip


def test_lists_backwards(rng: torch.Generator, seed: int) -> None:
    """Every second query of a program; the softmax does not depend on the order but in its rounding."""
    given = inputs(rng, 3, 8, (70, 200), False)
    for kernel in ("halves", "ring", "deep"):
        plan = replace(plan_of(kernel, 3), turns=True)
        assert error(attended(given, plan, seed), ReferenceOps().sparse_attention(*given, SCALE)) < 6e-3


def test_no_queries(rng: torch.Generator) -> None:
    given = inputs(rng, 0, 4, (64, 64), False)
    assert prepare(*given, SCALE, given[0]).programs == 0


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda q: q.float(), "bf16 queries"),
        (0, lambda q: q[..., :256].contiguous(), "of 512"),
        (0, lambda q: q.repeat(1, 20, 1), "1 to 64 heads"),
        (1, lambda near: near.float(), "near must be"),
        (3, LATENT.to_records, "both tables"),
        (4, lambda rows: rows[:1], "far_rows must be"),
    ],
)
def test_what_is_not_supported_is_refused(place: int, change, message: str, rng: torch.Generator) -> None:
    given = inputs(rng, 2, 4, (64, 64), False)
    given[place] = change(given[place])
    with pytest.raises(OpsError, match=message):
        prepare(*given, SCALE, given[0])


def test_other_scales_and_devices_are_refused(rng: torch.Generator) -> None:
    given = inputs(rng, 2, 4, (64, 64), False)
    with pytest.raises(OpsError, match="above 0"):
        prepare(*given, -SCALE, given[0])
    with pytest.raises(OpsError, match="Hopper"):
        attend_gluon(*given, SCALE)


@pytest.mark.parametrize(
    ("packed", "plan", "message"),
    [
        (True, Plan("ring", 64, 2, 1), "leave the plan out"),
        (False, Plan("records", 64, 2, 1), "leave the plan out"),
        (True, Plan("records", 64, 2, 1, turns=True), "leave the plan out"),
        (False, Plan("deep", 64, 2, 1), "blocks of .32,. keys"),
        (False, Plan("ring", 64, 0, 2), "pieces must be 1 to 1"),
        (False, Plan("ring", 64, 0, 1), "the first 0 to 2 are whole"),
    ],
)
def test_plans_that_do_not_fit_are_refused(packed: bool, plan: Plan, message: str, rng: torch.Generator) -> None:
    with pytest.raises(OpsError, match=message):
        prepare(*inputs(rng, 2, 4, (64, 64), packed), SCALE, torch.empty(0), plan)


COMPILE = """
import json
from dataclasses import asdict
from openv41.ops.hopper.attend_gluon import CHOSEN, SPECIMENS
from openv41.ops.hopper.compiled import compile_for_hopper
names = [f"attend gluon, {kernel}, {keys} keys" for (_, many), (kernel, keys) in CHOSEN.items() if many == "many"]
print(json.dumps([asdict(compile_for_hopper(one)) for one in SPECIMENS if one.name in names]))
"""


def test_compiled_for_hopper_nothing_spills_and_products_overlap() -> None:
    """Per group: 32 products for scores (512 dims by 16), 4 with its own weights (64 keys by 16), 4 with lent ones; and
    fewer waits: were the products taken one by one, there would be as many waits as products."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True,
        text=True, check=True, timeout=300,
    )  # fmt: skip
    compiled = json.loads(made.stdout)
    assert len(compiled) == 2
    for found in compiled:
        assert found["stack"] == 0 and found["shared"] <= 232448, found
        assert found["instructions"]["HGMMA"] >= 2 * (32 + 4 + 4)
        assert found["instructions"]["WARPGROUP"] <= 26


# On a GPU

LAUNCHES = [
    (1, 64, (128, 512), None), (16, 64, (128, 512), None), (64, 64, (128, 512), None), (300, 64, (128, 512), None),
    (3, 5, (100, 131), (2, 64, 0)), (140, 1, (1, 0), None), (5, 33, (0, 65), (1, 32, 0)),
    (2, 64, (77, 700), (6, 64, 0)), (20, 64, (77, 700), (11, 32, 2)), (1, 64, (0, 0), None),
    (4096, 64, (128, 512), None),
]  # fmt: skip
"""Queries, heads, places of the lists, and of a plan that is given: pieces, keys, whole queries."""


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_launched(kernel: str, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, __file__, kernel, str(seed)], env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def launched(given: list[Tensor], plan: Plan | None) -> Tensor:
    """Twice, into memory that held NaN: the same bits."""
    results = []
    for _ in range(2):
        poison = torch.full_like(given[0], torch.nan)
        del poison
        results.append(attend_gluon(*given, SCALE, plan=plan))
    torch.cuda.synchronize()
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))
    return results[0]


def check(kernel: str, launch: int, seed: int) -> None:
    """One of `LAUNCHES`, against the other kernel and, for few queries, the reference on the CPU."""
    rng = torch.Generator().manual_seed(seed % 2**32)
    n, heads, listed, planned = LAUNCHES[launch]
    packed = kernel in RECORDS
    given = [x.cuda() for x in inputs(rng, n, heads, listed, packed, 32768 if n > 1000 else 5000)]
    chosen = choose_plan(n, checked_lists("", given[0], *given[1:5]), packed)
    plan = chosen if chosen.kernel == kernel else plan_of(kernel, n)
    result = launched(given, plan_of(kernel, n, *planned) if planned else plan)
    others = [attend(*given, SCALE)]
    if n <= 16:
        others.append(ReferenceOps().sparse_attention(*(x.cpu() for x in given), SCALE).cuda())
    for other in others:
        if other.any():
            assert error(result, other) < 6e-3, (LAUNCHES[launch], error(result, other))
        else:
            assert not result.any()


if __name__ == "__main__":
    for place in range(len(LAUNCHES)):
        check(sys.argv[1], place, int(sys.argv[2]))
