"""Sparse attention's kernels against the specification: in float32 to rounding, in bf16 and from records to 1e-2.

bf16 cannot be bit-equal: products are added in another order, and p is rounded against maxima of other blocks.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from openv41.errors import OpsError
from openv41.formats import LATENT, WINDOW
from openv41.ops import ReferenceOps
from openv41.ops.hopper.attend import Tiling, attend, attend_with_log_sum, choose_tiling, combine
from openv41.ops.hopper.lists import checked_lists

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = ReferenceOps("plain", torch.float64)
SMALL = Tiling(16, 16, 1, 4, 1)
"""Small enough for several blocks, pieces and tiles of heads at small sizes."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
"""q, near, near_rows, far, far_rows, sink."""


def lists(rng: torch.Generator, n: int, places: int, rows: int) -> Tensor:
    """Row numbers, a quarter of them -1; the last query lists nothing. Row 0 is never listed."""
    listed = torch.randint(1, rows, (n, places), generator=rng)
    listed[torch.rand(n, places, generator=rng) < 0.25] = -1
    listed[-1] = -1
    return listed.to(DEVICE)


def table(rng: torch.Generator, rows: int, d: int, dtype: torch.dtype) -> Tensor:
    """Row 0, where -1 would lead if it led anywhere, is NaN."""
    values = torch.randn(rows, d, generator=rng)
    values[0] = torch.nan
    return values.to(dtype).to(DEVICE)


def made(rng: torch.Generator, n: int, h: int, d: int, w: int, k: int | None, dtype: torch.dtype) -> Inputs:
    """Sinks of 30, -30 and minus infinity among others; `k` None: no far list."""
    sink = torch.randn(h, generator=rng)
    sink[: min(h, 3)] = torch.tensor([30.0, -30.0, -torch.inf])[: min(h, 3)]
    q = torch.randn(n, h, d, generator=rng).to(dtype).to(DEVICE)
    near, near_rows = table(rng, 9, d, dtype), lists(rng, n, w, 9)
    if k is None:
        return q, near, near_rows, None, None, sink.to(DEVICE)
    return q, near, near_rows, table(rng, 23, d, dtype), lists(rng, n, k, 23), sink.to(DEVICE)


def expected(inputs: Inputs, scale: float) -> Tensor:
    """In float64. Where neither a row nor a sink has any weight, the softmax is of nothing: 0."""
    q, near, near_rows, far, far_rows, sink = (None if x is None else x.cpu() for x in inputs)
    found = PLAIN.sparse_attention(
        q.double(), near.double(), near_rows, None if far is None else far.double(), far_rows, sink.double(), scale
    )
    return found.nan_to_num(0.0)


def distance(got: Tensor, want: Tensor) -> float:
    """Relative, in the norm; NaN anywhere makes it NaN, which passes no bound."""
    return ((got.cpu().double() - want).norm() / want.norm().clamp_min(1e-30)).item()


SIZES = {
    "one head, less than a block": (2, 1, 64, 5, 3),
    "blocks not full": (2, 3, 64, 19, 37),
    "two tiles of heads": (2, 20, 64, 16, 17),
    "no far list": (2, 3, 64, 33, None),
    "far list of no places": (2, 3, 64, 7, 0),
    "near list of no places": (2, 3, 128, 0, 20),
}


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_float32_is_the_plain_specification(size: tuple, pieces: int, rng: torch.Generator) -> None:
    inputs = made(rng, *size, torch.float32)
    got = attend(*inputs, 0.2, "ieee", replace(SMALL, pieces=pieces))
    assert distance(got, expected(inputs, 0.2)) < 1e-5


@pytest.mark.parametrize("pieces", [1, 2])
def test_bf16_is_the_published_specification(pieces: int, rng: torch.Generator) -> None:
    inputs = made(rng, 2, 3, 64, 19, 37, torch.bfloat16)
    got = attend(*inputs, 0.2, tiling=replace(SMALL, pieces=pieces))
    published = ReferenceOps().sparse_attention(*(None if x is None else x.cpu() for x in inputs), 0.2)
    assert distance(got[:-1], published[:-1].double()) < 1e-2
    assert torch.equal(got[-1], torch.zeros_like(got[-1]))  # it lists nothing


@pytest.mark.parametrize("pieces", [1, 2])
def test_records_are_the_rows_that_they_hold(pieces: int, rng: torch.Generator) -> None:
    """Whatever the tables hold, the same bits; and those of the specification to 1e-2."""
    q, near, near_rows, far, far_rows, sink = made(rng, 2, 3, 64, 19, 21, torch.bfloat16)
    packed = [form.to_records(x.cpu()).to(DEVICE) for form, x in ((WINDOW, near), (LATENT, far))]
    wide = [form.from_records(x.cpu()).bfloat16().to(DEVICE) for form, x in zip((WINDOW, LATENT), packed, strict=True)]
    tiling = replace(SMALL, pieces=pieces)
    both = attend(q, packed[0], near_rows, packed[1], far_rows, sink, 0.2, tiling=tiling)
    assert torch.equal(both, attend(q, packed[0], near_rows, wide[1], far_rows, sink, 0.2, tiling=tiling))
    assert torch.equal(both, attend(q, wide[0], near_rows, packed[1], far_rows, sink, 0.2, tiling=tiling))
    assert distance(both, expected((q, wide[0], near_rows, wide[1], far_rows, sink), 0.2)) < 1e-2


def test_every_code_and_scale_is_read_exactly(rng: torch.Generator) -> None:
    """Attention to one row, without a sink, is the row."""
    d, n = 128, 8
    codes = torch.arange(256, dtype=torch.uint8)[(torch.arange(256) & 0x7F) != 0x7F]  # but NaN
    window = codes[torch.randint(len(codes), (n, d), generator=rng)]
    window[:2].view(-1)[: len(codes)] = codes
    scales = torch.randint(105, 141, (n, d // 32), generator=rng, dtype=torch.uint8)
    near = torch.cat((window, scales), 1)
    latent = torch.randint(256, (n, d // 2), generator=rng, dtype=torch.uint8)
    latent[:4].view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    scales = torch.randint(1, 127, (n, d // 16), generator=rng, dtype=torch.uint8)
    scales[0] = torch.arange(1, 9)  # the subnormal ones and the least normal one
    far = torch.cat((latent, scales), 1)

    each, none = torch.arange(n).unsqueeze(1), torch.full((n, 1), -1)
    q, sink = torch.zeros(n, 1, d, dtype=torch.bfloat16), torch.tensor([-torch.inf])
    given = [x.to(DEVICE) for x in (q, near, far, each, none, sink)]
    q, near, far, each, none, sink = given
    for near_rows, far_rows, want in ((each, none, WINDOW.from_records(near)), (none, each, LATENT.from_records(far))):
        got = attend(q, near, near_rows, far, far_rows, sink, 1.0, tiling=SMALL)
        assert torch.equal(got.squeeze(1).float(), want)


@pytest.mark.parametrize("pieces", [1, 2])
def test_log_sum(pieces: int, rng: torch.Generator) -> None:
    """A sink of 1e29 as well: what is left of the rows is nothing, and nothing is NaN."""
    q, near, near_rows, far, far_rows, sink = made(rng, 3, 4, 64, 18, 5, torch.float32)
    sink[3] = 1e29
    inputs, tiling = (q, near, near_rows, far, far_rows, sink), replace(SMALL, pieces=pieces)
    out, got = attend_with_log_sum(*inputs, 0.2, "ieee", tiling)
    assert torch.equal(out, attend(*inputs, 0.2, "ieee", tiling))
    values = torch.cat((near[near_rows.clamp_min(0)], far[far_rows.clamp_min(0)]), 1).double()
    listed = torch.cat((near_rows, far_rows), 1) >= 0
    scores = (q.double() @ values.nan_to_num(0.0).mT * 0.2).masked_fill(~listed.unsqueeze(1), -torch.inf)
    want = torch.cat((scores, sink.double().expand(3, 4).unsqueeze(-1)), -1).logsumexp(-1)
    want[want == -torch.inf] = 0.0
    assert ((got - want).abs() <= 1e-5 * (1 + want.abs())).all()
    assert torch.equal(out[:, 3], torch.zeros_like(out[:, 3]))


def test_pieces_are_combined_as_their_sums_say(rng: torch.Generator) -> None:
    """Against the same in float64; a piece without rows, a query without pieces that have any."""
    pieces, n, h, d = 3, 2, 5, 64
    partial = torch.randn(pieces, n, h, d, generator=rng)
    best, total = torch.randn(pieces, n, h, generator=rng) * 20, torch.rand(pieces, n, h, generator=rng) + 1
    for empty in ((1, 0), (slice(None), 1)):
        partial[empty], best[empty], total[empty] = 0.0, -1e30, 0.0
    sink = torch.randn(h, generator=rng)
    highest = best.double().amax(0)
    weights = (best.double() - highest).exp2()
    whole = (weights * total).sum(0) + (sink.double() / math.log(2) - highest).exp2()
    want = (weights.unsqueeze(-1) * partial).sum(0) / whole.unsqueeze(-1)
    out = torch.full((n, h, d), torch.nan, device=DEVICE)
    combine(*(x.to(DEVICE) for x in (partial, best, total, sink)), out)
    assert distance(out, want) < 1e-5


def test_row_numbers_of_32_bits(rng: torch.Generator) -> None:
    q, near, near_rows, far, far_rows, sink = made(rng, 2, 3, 64, 5, 7, torch.bfloat16)
    got = [
        attend(q, near, near_rows.to(a), far, far_rows.to(b), sink, 0.2, tiling=SMALL)
        for a, b in ((torch.int64, torch.int64), (torch.int32, torch.int32), (torch.int32, torch.int64))
    ]
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


def test_no_queries_and_no_places(rng: torch.Generator) -> None:
    q, near, near_rows, far, far_rows, sink = made(rng, 2, 3, 64, 5, 7, torch.bfloat16)
    assert attend(q[:0], near, near_rows[:0], far, far_rows[:0], sink, 0.2).shape == (0, 3, 64)
    out = attend(q, near[:0], near_rows[:, :0], None, None, sink, 0.2, tiling=SMALL)
    assert torch.equal(out, torch.zeros_like(q))


@pytest.mark.parametrize("n, pieces", [(1, 10), (16, 5), (64, 2), (128, 1), (4096, 1)])
def test_few_queries_are_cut_into_pieces(n: int, pieces: int) -> None:
    """About a program for each multiprocessor, of whole blocks."""
    rows = torch.empty(n, 128, dtype=torch.int64), torch.empty(n, 512, dtype=torch.int64)
    q, near = torch.empty(n, 64, 512, dtype=torch.bfloat16), torch.empty(1, 512, dtype=torch.bfloat16)
    checked = checked_lists("this", q, near, rows[0], near, rows[1])
    tiling = choose_tiling(n, 64, 512, 2, checked)
    blocks = checked.blocks(tiling.keys)
    assert (tiling.keys, blocks) == (64, 10)
    each = -(-blocks // tiling.pieces)
    assert -(-blocks // each) == pieces
    half = choose_tiling(n, 64, 512, 2, checked, processors=66)
    assert half.pieces <= tiling.pieces


def wrong(**changes: object) -> dict[str, object]:
    given: dict[str, object] = {
        "q": torch.zeros(2, 3, 64, dtype=torch.bfloat16), "near": torch.zeros(4, 64, dtype=torch.bfloat16),
        "near_rows": torch.zeros(2, 5, dtype=torch.int64), "far": torch.zeros(4, 64, dtype=torch.bfloat16),
        "far_rows": torch.zeros(2, 5, dtype=torch.int64), "sink": torch.zeros(3), "scale": 1.0,
    }  # fmt: skip
    return given | changes


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"q": torch.zeros(2, 3, 64, dtype=torch.float16)}, "bf16 or float32"),
        ({"q": torch.zeros(2, 3, 96, dtype=torch.bfloat16)}, "one of (64, 128, 256, 512), got [2, 3, 96]"),
        ({"q": torch.zeros(2, 129, 64, dtype=torch.bfloat16)}, "1 to 128 heads, got 129"),
        ({"sink": torch.zeros(1)}, "sink must be [3]"),
        ({"near": torch.zeros(4, 32, dtype=torch.bfloat16)}, "uint8 records [rows, 66]"),
        ({"near": torch.zeros(64, 4, dtype=torch.bfloat16).mT}, "non-contiguous"),
        ({"far": torch.zeros(4, 66, dtype=torch.uint8)}, "uint8 records [rows, 36]"),
        ({"far": None}, "or neither"),
        ({"far_rows": torch.zeros(3, 5, dtype=torch.int64)}, "far_rows must be int32 or int64 [2, places]"),
        ({"near_rows": torch.zeros(2, 5)}, "near_rows must be int32 or int64"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, object], said: str) -> None:
    with pytest.raises(OpsError) as caught:
        attend(**wrong(**changes))
    assert said in str(caught.value)


def test_compiled_for_hopper() -> None:
    """Products on the tensor cores, Hopper's own where 64 heads fill them, and no spills but of a few descriptors of
    shared memory: the compiler works out those of a loop over records before it, more than there are registers."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    names = ["attend prefill", "attend records, decode", "attend mini", "attend combine"]
    command = [sys.executable, "-m", "openv41.ops.hopper.compiled", *names, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)}
    for name, products, stack in zip(names, ("HGMMA", "HGMMA", "HMMA", "LDG"), (0, 8, 0, 0), strict=True):
        one = found[name]
        assert one["instructions"].get(products, 0) > 0, one
        assert one["stack"] <= stack and one["shared"] <= 227 * 1024, one


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["wide", "records"])
@pytest.mark.parametrize("n", [1, 16, 100, 300])
def test_released_sizes_on_a_gpu(n: int, packed: bool, rng: torch.Generator) -> None:
    """The result of every tiling, twice the same bits; memory full of NaN before."""
    q, near, near_rows, far, far_rows, sink = made(rng, n, 64, 512, 128, 512, torch.bfloat16)
    forms = ((WINDOW, near), (LATENT, far))
    records = [form.to_records(x) for form, x in forms]
    near, far = (form.from_records(x).bfloat16() for (form, _), x in zip(forms, records, strict=True))
    tables = records if packed else (near, far)
    first = attend(q, tables[0], near_rows, tables[1], far_rows, sink, 512**-0.5)
    spoilt = torch.full((20, *q.shape), torch.nan, device=DEVICE, dtype=q.dtype)  # what is allocated next was this
    del spoilt
    again = attend(q, tables[0], near_rows, tables[1], far_rows, sink, 512**-0.5)
    assert torch.equal(first, again)
    want = expected((q[-16:], near, near_rows[-16:], far, far_rows[-16:], sink), 512**-0.5)
    assert distance(first[-16:], want) < 1e-2 if n > 1 else torch.equal(first, torch.zeros_like(first))


@pytest.mark.gpu
@pytest.mark.parametrize("precision, bound", [("tf32", 2e-3), ("ieee", 1e-5)])
def test_float32_on_a_gpu(precision: str, bound: float, rng: torch.Generator) -> None:
    for size in ((64, 8, 64, 128, 64), (5, 64, 512, 128, 100), (5, 128, 256, 10, None)):
        inputs = made(rng, *size, torch.float32)
        assert distance(attend(*inputs, size[2] ** -0.5, precision), expected(inputs, size[2] ** -0.5)) < bound
