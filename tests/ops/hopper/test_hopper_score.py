"""Index scores, picks and candidate blocks by kernels: bit for bit the reference's, whatever the operands.

Scores are equal because every step is either exact or the reference's own rounding, in its order; picks are equal
because they are a matter of order alone. So nothing here has a tolerance.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy
import pytest
import torch
import triton.language as tl
from torch import Tensor

from openv41.errors import OpsError
from openv41.formats import INDEX
from openv41.model.indexer import Indexer, Keys, Picks
from openv41.ops import choose
from openv41.ops.hopper import operands, pick, score, select
from openv41.ops.kernels import score as kernels
from openv41.ops.kernels.interpreted import product
from openv41.ops.reference import ReferenceOps
from openv41.state import Cache, Paged
from tests.small import small_config, small_model, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = ReferenceOps()


def on_grid(shape: Sequence[int], octaves: float, rng: torch.Generator) -> Tensor:
    """Normal values on the fp4 grid, groups of 32 apart by about so many octaves."""
    x = torch.randn(*shape, generator=rng)
    exponent = (torch.randn(*shape[:-1], shape[-1] // 32, generator=rng) * octaves).round()
    return INDEX.round((x * torch.exp2(exponent).repeat_interleave(32, -1)).bfloat16())


def index_weights(shape: Sequence[int], rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=rng).bfloat16()


AT_ONCE, BY_GROUPS, EXACTLY = (int(way.value) for way in (kernels.AT_ONCE, kernels.BY_GROUPS, kernels.EXACTLY))


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Collects the ways in which each launch of scores does its tiles."""
    seen: list[Tensor] = []
    rest = score._score_rest

    def listening(queries, tokens, table, width, scores, todo, tiling):
        seen.append(todo.clone())
        rest(queries, tokens, table, width, scores, todo, tiling)

    monkeypatch.setattr(score, "_score_rest", listening)
    return seen


@pytest.mark.parametrize(("heads", "width"), [(2, 32), (4, 64), (32, 128)])
def test_scores_are_the_references_bits(heads: int, width: int, rng: torch.Generator, monkeypatch) -> None:
    q, keys = on_grid((3, heads, width), 0.0, rng), on_grid((70, width), 0.0, rng)
    keys[7] = 0
    weights = index_weights((3, heads), rng)
    left = noted(monkeypatch)
    tiling = score.Tiling(score.choose_tiling(heads, 3, 3, 70, ready=True).queries, 64, 64)
    wanted = REFERENCE.index_scores(q, weights, keys)
    for given in (keys, INDEX.to_records(keys)):
        got = score.index_scores(q.to(DEVICE), weights.to(DEVICE), given.to(DEVICE), tiling)
        assert torch.equal(got.cpu(), wanted)
    assert len(left) == 2 and all((todo == AT_ONCE).any() for todo in left), "some tiles were left to fp8"


@pytest.mark.parametrize("stored", [False, True], ids=["ready", "stored"])
def test_scores_that_fp8_would_get_wrong(stored: bool, rng: torch.Generator, monkeypatch) -> None:
    """Groups many octaves apart, weights near the smallest, and rows off the grid."""
    q, keys = on_grid((2, 4, 64), 8.0, rng), on_grid((66, 64), 8.0, rng)
    keys[0, :32], keys[0, 32:] = 1.0, 2.0**-9  # more octaves than a sum in float32 holds exactly
    q[0], weights = 1.0, index_weights((2, 4), rng)
    weights[1, 0] = 2.0**-100
    left = noted(monkeypatch)
    wanted = REFERENCE.index_scores(q, weights, keys)
    assert torch.equal(scores_of(q, weights, keys, stored), wanted)
    assert (left[0] == EXACTLY).any(), "none of the tiles was left to the exact kernel"


def scores_of(q: Tensor, weights: Tensor, keys: Tensor, stored: bool, within: Tensor | None = None) -> Tensor:
    """Scores against records, made ready first or read as they lie, in pages in disorder."""
    n, p, page = len(q), len(keys), 8
    pages = torch.arange(-(-p // page)).flip(0).unsqueeze(0)
    table = torch.zeros((pages.numel() * page, keys.shape[1]), dtype=torch.bfloat16)
    table[(pages[0, torch.arange(p) // page] * page + torch.arange(p) % page)] = keys
    held = operands.KeyTable(INDEX.to_records(table).to(DEVICE), pages.to(DEVICE), page)
    queries = operands.encode_queries("test", q.to(DEVICE), weights.to(DEVICE))
    slots = torch.zeros(n, dtype=torch.int64, device=DEVICE)
    some = score.Tokens(slots, slots + p, n, 8, None if within is None else within.to(DEVICE))
    scores = torch.full((n, p), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    if stored:
        score.score_stored(queries, some, held, p, scores)
    else:
        score.score_ready(queries, some, held, operands.make_ready(held, slots, 1, n, p, q.shape[2]), p, scores)
    return scores.cpu()


@pytest.mark.parametrize("stored", [False, True], ids=["ready", "stored"])
def test_sums_of_fourteen_bits_lose_nothing(stored: bool, rng: torch.Generator, monkeypatch) -> None:
    """Long rows of the largest and the smallest values, hardly a sign apart: sums just below the bound, many odd."""
    q, keys = (
        torch.where(torch.rand(*shape, 128, generator=rng) < 0.5, 6.0, 0.5)
        * torch.where(torch.rand(*shape, 128, generator=rng) < 0.05, -1.0, 1.0)
        for shape in ((2, 2), (70,))
    )
    left = noted(monkeypatch)
    weights = index_weights((2, 2), rng)
    wanted = REFERENCE.index_scores(q.bfloat16(), weights, keys.bfloat16())
    assert torch.equal(scores_of(q.bfloat16(), weights, keys.bfloat16(), stored), wanted)
    assert not left[0].any() and (q[0] @ keys.T).max() * 4 > 2**12


def as_hopper_adds(a: tl.tensor, b: tl.tensor, total: tl.tensor, precision: str) -> tl.tensor:
    """A product of matrices as Hopper's tensor cores take it in fp8: 32 terms at a time are aligned with the largest of
    them and of the sum so far, and what is below 13 bits of that is cut off. Others as they are."""
    if a.dtype != tl.float8e4nv:
        return product(a, b, total, precision)
    left, right = (x.to(tl.float32).handle.data.astype(numpy.float64) for x in (a, b))
    sums = total.handle.data.astype(numpy.float64)
    for first in range(0, left.shape[1], 32):
        some = slice(first, first + 32)
        terms = left[:, None, some] * right.T[None, :, some]
        size = exponents(left)[:, None, some] + exponents(right).T[None, :, some]
        top = numpy.maximum(numpy.where(terms == 0, -99, size).max(2), numpy.where(sums == 0, -99, exponents(sums)))
        grid = numpy.exp2(top - 13.0)
        sums = (numpy.trunc(terms / grid[..., None]).sum(2) + numpy.trunc(sums / grid)) * grid
        rest = numpy.exp2(exponents(sums) - 13.0)
        sums = numpy.trunc(sums / rest) * rest
    made = total + 0.0
    made.handle.data = sums.astype(numpy.float32)
    return made


def exponents(x: numpy.ndarray) -> numpy.ndarray:
    """Of e4m3 values, as a multiplier sees them: of subnormal ones the smallest that there is."""
    return numpy.maximum(numpy.frexp(x)[1] - 1, -6)


@pytest.fixture
def fourteen_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores, or what stands in for them where there are none."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "product", as_hopper_adds)


@pytest.mark.usefixtures("fourteen_bits")
@pytest.mark.parametrize(
    ("octaves", "n", "heads", "p"), [(0.5, 9, 2, 65), (1.0, 3, 32, 70), (2.0, 9, 2, 65), (4.0, 2, 8, 66)]
)
def test_groups_octaves_apart(octaves: float, n: int, heads: int, p: int, rng: torch.Generator, monkeypatch) -> None:
    """By tensor cores that add in 14 bits: up to an octave nothing is left to the exact kernel. With candidates."""
    q, keys = on_grid((n, heads, 128), octaves, rng), on_grid((p, 128), octaves, rng)
    keys[7] = 0
    keys[9, :32] = 0
    weights = index_weights((n, heads), rng)
    within = torch.rand(n, -(-p // 8), generator=rng) < 0.5
    inside = within.repeat_interleave(8, 1)[:, :p]
    wanted = REFERENCE.index_scores(q, weights, keys).masked_fill(~inside, -torch.inf)
    left = noted(monkeypatch)
    for stored in (False, True):
        assert torch.equal(scores_of(q, weights, keys, stored, within), wanted)
    ways = [set(todo.flatten().tolist()) for todo in left]
    if octaves == 1.0:
        assert ways == [{BY_GROUPS}, {AT_ONCE}]
    assert (EXACTLY in ways[0] or EXACTLY in ways[1]) == (octaves > 1.0)


def sharp_case(octaves: int, rest: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A query and a key, nearly parallel, whose first groups' product is 279 x 2^(4 + 2 octaves), in the middle between
    two bf16 numbers; each of the three other groups adds a small integer. Their lengths' product is 2 % more than the
    first groups' product, in units both of their lowest bits and of the key's smallest scale."""
    q, keys = torch.zeros(1, 2, 128), torch.zeros(1, 128)
    q[0, 0, :31] = keys[0, :31] = 12 * 2.0**octaves
    keys[0, 31] = 12 * 2.0**octaves
    for group, number in enumerate(rest, 1):
        q[0, 0, 32 * group] = 1
        keys[0, 32 * group], keys[0, 32 * group + 1] = number, 12
    return (q / 2).bfloat16(), torch.ones(1, 2).bfloat16(), (keys / 2).bfloat16()


@pytest.mark.usefixtures("fourteen_bits")
@pytest.mark.parametrize(
    ("bound", "octaves", "rest", "stored"),
    [("PRODUCT_MOST", 1, (-1, 0, 0), False), ("SUM_MOST", 6, (-2, 1, -1), False), ("SUM_MOST", 6, (-2, 1, -1), True)],
)
def test_bounds_are_as_wide_as_they_may_be(bound: str, octaves: int, rest, stored: bool, monkeypatch) -> None:
    """What is done one way an octave below the bound is done the next way here; and if the bound on the lengths'
    product were twice as large, the score would be wrong."""
    left = noted(monkeypatch)
    fine = AT_ONCE if stored or bound == "PRODUCT_MOST" else BY_GROUPS
    for fewer in (1, 0):
        q, weights, keys = sharp_case(octaves - fewer, rest)
        assert torch.equal(scores_of(q, weights, keys, stored), REFERENCE.index_scores(q, weights, keys))
    assert [todo.item() for todo in left] == [fine, BY_GROUPS if bound == "PRODUCT_MOST" else EXACTLY]
    if DEVICE == "cuda":
        return  # a kernel's constants are as it was compiled
    monkeypatch.setattr(kernels, bound, tl.constexpr(4 * getattr(kernels, bound).value))
    assert not torch.equal(scores_of(q, weights, keys, stored), REFERENCE.index_scores(q, weights, keys))
    assert left[-1].item() == fine


def test_runs_of_two_slots_by_groups(rng: torch.Generator, monkeypatch) -> None:
    """Each run has its own keys; one program takes a chunk of the tile at once, and the other one by groups."""
    monkeypatch.setattr(score, "_ways", lambda tiles, chunks: 1)
    q, weights = on_grid((4, 2, 64), 0.0, rng), index_weights((4, 2), rng)
    keys = on_grid((2, 70, 64), 0.0, rng)
    keys[:, 64:, :32] *= 2.0**6
    pages = torch.arange(2).unsqueeze(1)
    held = operands.KeyTable(torch.cat([keys, keys[:, :10]], 1).view(160, 64).to(DEVICE), pages.to(DEVICE), 80)
    queries, slots = operands.encode_queries("test", q.to(DEVICE), weights.to(DEVICE)), torch.tensor([1, 1, 0, 0])
    left, scores = noted(monkeypatch), torch.full((4, 70), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    some = score.Tokens(slots.to(DEVICE), torch.full((4,), 70, device=DEVICE), 2)
    ready = operands.make_ready(held, some.slots, 2, 2, 70, 64)
    score.score_ready(queries, some, held, ready, 70, scores, score.Tiling(8, 64, 64))
    assert left[0].tolist() == [[AT_ONCE, BY_GROUPS]] * 2
    wanted = [REFERENCE.index_scores(q[t : t + 1], weights[t : t + 1], keys[slots[t]]) for t in range(4)]
    assert torch.equal(scores.cpu(), torch.cat(wanted))


@pytest.mark.parametrize(("stored", "exponent"), [(False, -70), (True, 40)])
def test_weights_of_unusual_size(stored: bool, exponent: int, rng: torch.Generator, monkeypatch) -> None:
    q, keys, weights = on_grid((1, 2, 32), 0.0, rng), on_grid((5, 32), 0.0, rng), index_weights((1, 2), rng)
    weights[0, 1] = 2.0**exponent
    left = noted(monkeypatch)
    assert torch.equal(scores_of(q, weights, keys, stored), REFERENCE.index_scores(q, weights, keys))
    assert left[0].item() == EXACTLY


def test_rows_are_codes_as_far_as_e4m3_reaches() -> None:
    """Groups up to 14 octaves apart; a group that is no fp4 group is refused, whatever its row's length."""
    rows = torch.zeros(70, 64)
    octaves = torch.arange(20)
    rows[:20, 0], rows[:20, 32] = torch.exp2(octaves.float()) * 6, 0.5
    rows[20, 0], rows[20, 1] = 448.0, 1.0
    ready = operands.make_ready(operands.KeyTable.in_order(rows.bfloat16().to(DEVICE)), None, 1, 1, 70, 64)
    norms, values = ready.norms[0].cpu(), (ready.codes[0].float() * ready.units[0].unsqueeze(1)).cpu()
    assert torch.equal(norms[:15], (4.0 ** (octaves[:15] + 1)) * 36 + 1) and norms[15:21].isinf().all()
    assert torch.equal(values[:15], rows[:15]) and not norms[21:].any()
    assert (norms[:15] * norms[:15] < kernels.SUM_MOST.value).tolist() == [o <= 8 for o in range(15)]


def test_ready_keys_are_padded_to_whole_tiles(rng: torch.Generator) -> None:
    """A program reads up to 128 keys at a time without a mask; what is behind the last key scores nothing."""
    keys = on_grid((70, 32), 0.5, rng).to(DEVICE)
    ready = operands.make_ready(operands.KeyTable.in_order(keys), None, 1, 1, 70, 32)
    assert ready.codes.shape == (1, 128, 32) and ready.peaks.shape == (1, 2)
    values = ready.codes[0].float() * ready.units[0].unsqueeze(1)
    assert torch.equal(values[:70], keys.float()) and not values[70:].any()
    norms = (ready.codes[0].float() ** 2).sum(1)
    assert torch.equal(ready.norms[0], norms) and torch.equal(ready.peaks[0], norms.view(2, 64).amax(1))


def test_stored_keys_are_scored_in_fp8(rng: torch.Generator, monkeypatch) -> None:
    q, keys = on_grid((2, 8, 128), 0.5, rng), on_grid((70, 128), 1.0, rng)
    keys[3, 32:64] = 0
    weights = index_weights((2, 8), rng)
    left = noted(monkeypatch)
    assert torch.equal(scores_of(q, weights, keys, stored=True), REFERENCE.index_scores(q, weights, keys))
    assert not left[0].any()


SCORES = {
    "normal": lambda x: x,
    "ties": lambda x: x.mul(2).round(),
    "zeros": lambda x: torch.where(x > 0, 0.0, -0.0),
    "mostly hidden": lambda x: torch.where(x < 0.8, -torch.inf, x),
}


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(("p", "k", "levels"), [(40, 5, 0), (37, 16, 0), (270, 3, 2), (1100, 2, 3)])
def test_picks_are_the_references(kind: str, p: int, k: int, levels: int, rng: torch.Generator) -> None:
    scores = SCORES[kind](torch.randn(3, p, generator=rng)).bfloat16()
    visible = torch.tensor([p, int(torch.randint(p, (), generator=rng)), 0])[: 3 if levels < 2 else 2]
    scores = scores[: len(visible)]
    division = pick.Division(8 * (1 << (k - 1).bit_length()), 4)
    assert len(pick.coarse_widths(p, k, division.direct)) == levels
    got = pick.pick(scores.to(DEVICE), visible.to(DEVICE), k, division)
    assert torch.equal(got.cpu(), REFERENCE.pick(scores, visible, k))


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("block", [2, 8])
def test_kept_blocks_are_the_references(kind: str, block: int, rng: torch.Generator) -> None:
    scores = SCORES[kind](torch.randn(3, 75, generator=rng)).bfloat16()
    visible = torch.tensor([75, int(torch.randint(1, 75, (), generator=rng)), 0])
    got = pick.pick_blocks(scores.to(DEVICE), visible.to(DEVICE), block, 3)
    assert torch.equal(got.cpu(), REFERENCE.pick_blocks(scores, visible, block, 3))


@pytest.mark.parametrize(("store", "gathers"), [("wide", False), ("packed", False), ("packed", True)])
@torch.no_grad()
def test_every_indexer_of_a_model_picks_the_same(store, gathers: bool, seed: int, monkeypatch) -> None:
    """A model at ratios 2 and 1, with a candidate source and a re-scorer; slots of several lengths, one rewound, one
    forked; steps of one token, of a short run and of a long one."""
    monkeypatch.setattr(select, "GATHER_FROM", {True: 0, False: 0} if gathers else {True: 10**9, False: 10**9})
    monkeypatch.setattr(select, "READY_FROM", 5)
    model = small_model(small_config(), choose("cpu", "reference"), seed)
    cache = Cache(model.config, 3, 400, slack=3, store=store)
    ids = tokens(model.config, 40, seed)
    first, second = cache.open(), cache.open()
    model(cache.step([(first, ids[:13]), (second, ids[13:20])]), cache, prefill="full")
    twin = cache.fork(first)
    cache.rewind(second, 5)
    model(cache.step([(first, ids[20:21])]), cache, prefill="full")
    heard: list[int] = []
    for block in model.blocks():
        if block.attn.indexer is not None:
            block.attn.indexer.register_forward_hook(compares(heard, block.layer), with_kwargs=True)
    step = cache.step([(first, ids[21:22]), (second, ids[22:24]), (twin, ids[24:29])])
    model(step, cache, prefill="full")
    assert heard == list(model.config.index_source_layers)


def compares(heard: list[int], layer: int):
    def compare(indexer: Indexer, given: tuple, named: dict, made: Picks) -> None:
        x, qr, step, keys, within = (*given, *named.values())
        positions, rows, blocks = select_as(indexer, x, qr, step, keys, within, made.positions.shape[1])
        assert torch.equal(positions.cpu(), made.positions), f"layer {layer}"
        assert torch.equal(rows.cpu(), keys[0].held.rows(step.slot, made.positions)), f"layer {layer}"
        assert (blocks is None) == (made.blocks is None)
        if blocks is not None and made.blocks is not None:
            assert torch.equal(blocks.cpu(), made.blocks), f"layer {layer}"
        heard.append(layer)

    return compare


def select_as(indexer: Indexer, x, qr, step, keys: Sequence[Keys], within, k: int) -> tuple[Tensor, ...]:
    q, weights = indexer.queries(x, qr, step.position)
    held = keys[0].held
    assert isinstance(held, Paged)
    return select.select(
        q.to(DEVICE), weights.to(DEVICE), held.table.to(DEVICE), step.slot.to(DEVICE),
        held.pages.numbers.to(DEVICE), held.per_page, step.visible(indexer.ratio).to(DEVICE), k,
        max(known.count for known in keys), [run.length for run in step.runs], indexer.block, indexer.keeps_blocks,
        None if within is None else within.to(DEVICE), indexer.most_blocks,
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["wide", "packed"])
def test_a_small_budget_changes_nothing(packed: bool, rng: torch.Generator) -> None:
    """A long run in pieces, and several runs that are taken in turn: 40 positions of one slot, then of another."""
    n, most, page = 7, 40, 8
    q, weights = on_grid((n, 2, 64), 1.0, rng), index_weights((n, 2), rng)
    pages = torch.randperm(11, generator=rng)[:10].view(2, 5)
    keys = on_grid((11 * page, 64), 1.0, rng)
    slot = torch.tensor([1, 1, 1, 1, 1, 0, 0])
    visible = torch.tensor([36, 37, 38, 39, 40, 3, 4])
    rows = (pages.unsqueeze(2) * page + torch.arange(page)).flatten(1)[:, :most]  # [slots, most]
    scores = torch.cat(
        [REFERENCE.index_scores(q[t : t + 1], weights[t : t + 1], keys[rows[slot[t]]]) for t in range(n)]
    )
    table = INDEX.to_records(keys) if packed else keys
    given = (tensor.to(DEVICE) for tensor in (q, weights, table, slot, pages))
    positions, _, blocks = select.select(
        *given, page, visible.to(DEVICE), 4, most, [5, 1, 1], block=4, keep=3, budget=4 * 64
    )
    assert torch.equal(positions.cpu(), REFERENCE.pick(scores, visible, 4))
    assert blocks is not None and torch.equal(blocks.cpu(), REFERENCE.pick_blocks(scores, visible, 4, 3))


def test_what_is_not_supported_is_said() -> None:
    q, weights = torch.zeros(2, 4, 32, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.bfloat16)
    scores, visible = torch.zeros(2, 9, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    for call, word in (
        (lambda: score.index_scores(q, weights, q[0, :, :16]), r"bf16 \[p, 32\] or uint8 records \[p, 17\]"),
        (lambda: score.index_scores(q[:, :3], weights[:, :3], q[0]), r"heads one of \(2, 4, .* got \(2, 3, 32\)"),
        (lambda: score.index_scores(q, weights.float(), q[0]), "weights must be bf16"),
        (lambda: pick.pick(scores.float(), visible, 2), r"scores must be bf16 \[n, p\]"),
        (lambda: pick.pick(scores, visible.int(), 2), r"visible must be int64 \[2\]"),
        (lambda: pick.pick(scores, visible, 5000), "k must be 1 to 4096, got 5000"),
        (lambda: pick.pick_blocks(scores, visible, 3, 2), "block must be a power of two, got 3"),
        (lambda: pick.coarse_widths(1 << 20, 1, 8), "too long for 1 picks, 4096 are supported"),
        (lambda: select.select(q, weights, q[0], visible, visible[None], 8, visible, 2, 99), "most must lie in 0 to"),
        (lambda: select.select(q, weights, q[0], visible, visible[None], 8, visible, 2, 9, [3]), "add up to the 2 tok"),
    ):  # fmt: skip
        with pytest.raises(OpsError, match=word):
            call()


def test_compiled_for_hopper() -> None:
    """On any machine: nothing spills, scores are taken in fp8 on tensor cores, exact ones in bf16."""
    scores = ["score_prepared", "score_grouped", "score_records", "score_pages", "score_exactly"]
    names = [*scores, "encode_rows", "list_kept", "pick_rows", "coarsen"]
    code = (
        "import json; from openv41.ops.hopper import compiled, score;"
        "print(json.dumps({one.name: [found.stack, dict(found.instructions)] for one in score.SPECIMENS"
        f" if one.name in {names} for found in [compiled.compile_for_hopper(one)]}}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert sorted(found) == sorted(names)
    assert {name: stack for name, (stack, _) in found.items() if stack} == {}
    for name, (_, counts) in found.items():
        wanted = "" if name not in scores else "HGMMA" if name == "score_exactly" else "QGMMA"
        assert not wanted or counts.get(wanted, 0) > 0, name
    # Two halves of a tile, each a product of four groups that are added outside: none was put into another's sum.
    assert found["score_grouped"][1]["QGMMA"] == 2 * 4 and found["score_grouped"][1]["FADD"] >= 2 * 3 * 32
    # Records begin at multiples of four bytes: 17 copies a key, before the loop and in it. Wider ones would fault.
    assert found["score_records"][1]["LDGSTS"] == 2 * 17
    # Whole pages come 16 bytes at a time, five copies a thread; all products of a half run side by side.
    assert found["score_pages"][1]["LDGSTS"] == 2 * 5 and found["score_pages"][1]["QGMMA"] == 2 * 4
    assert found["score_pages"][1]["WARPGROUP"] == 2 * 5


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("octaves", "way"), [(0.0, AT_ONCE), (1.0, BY_GROUPS), (4.0, EXACTLY)])
def test_packed_instructions_equal_plain_ones(octaves: float, way: int, rng: torch.Generator, monkeypatch) -> None:
    q, keys = on_grid((64, 32, 128), octaves, rng), on_grid((4096, 128), octaves, rng)
    weights = index_weights((64, 32), rng)
    left = noted(monkeypatch)
    packed = [scores_of(q, weights, keys, stored) for stored in (False, True)]
    monkeypatch.setattr(score, "PTX", False)
    plain = [scores_of(q, weights, keys, stored) for stored in (False, True)]
    assert torch.equal(packed[0], packed[1])
    assert torch.equal(packed[0], plain[0]) and torch.equal(packed[1], plain[1])
    assert torch.equal(packed[0], REFERENCE.index_scores(q, weights, keys))
    assert (left[0] == way).all()


@pytest.mark.gpu
def test_long_rows_are_picked_from_exactly(rng: torch.Generator) -> None:
    for n, p in ((1, 1 << 20), (16, 131072), (200, 32768)):
        scores = torch.randn(n, p, generator=rng).bfloat16().cuda()
        visible = torch.randint(p // 2, p + 1, (n,), generator=rng).cuda()
        wanted = REFERENCE.pick(scores, visible, 512)
        for _ in range(3):
            assert torch.equal(pick.pick(scores, visible, 512), wanted)
        assert torch.equal(pick.pick_blocks(scores, visible, 8, 2048), REFERENCE.pick_blocks(scores, visible, 8, 2048))


@pytest.mark.gpu
def test_released_sizes_need_no_word_from_the_device(rng: torch.Generator) -> None:
    """Decode and a chunk at 32 heads of 128 and 512 picks, gathered and dense; the host never waits."""
    slots, most, page = 4, 30000, 64
    held = -(-most // page)
    pages = torch.randperm(slots * held, generator=rng).view(slots, held).cuda()
    table = INDEX.to_records(on_grid((slots * held * page, 128), 0.5, rng)).cuda()
    for runs in ([1] * slots, [130, 1, 1, 1]):
        n = sum(runs)
        q, weights = on_grid((n, 32, 128), 0.5, rng).cuda(), index_weights((n, 32), rng).cuda()
        slot = torch.arange(slots).repeat_interleave(torch.tensor(runs)).cuda()
        visible = torch.randint(most - 500, most + 1, (n,), generator=rng).cuda()
        given = (q, weights, table, slot, pages, page, visible, 512, most, runs)
        select.select(*given, keep=2048)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            positions, _, blocks = select.select(*given, keep=2048)
            gathered, _, _ = select.select(*given, within=blocks, kept=2048)
            dense, _, _ = select.select(*given, within=blocks)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(gathered, positions) and torch.equal(dense, positions)
        rows = (pages.unsqueeze(2) * page + torch.arange(page, device="cuda")).flatten(1)
        for t in (0, n - 1):
            keys = INDEX.from_records(table[rows[slot[t], :most]]).bfloat16()
            scores = REFERENCE.index_scores(q[t : t + 1].cpu(), weights[t : t + 1].cpu(), keys.cpu())
            assert torch.equal(positions[t].cpu(), REFERENCE.pick(scores, visible[t : t + 1].cpu(), 512)[0])
