"""Index scores, picks and candidate blocks by kernels: bit for bit the reference's, whatever the operands.

Scores are equal because every step is either exact or the reference's own rounding, in its order; picks are equal
because they are a matter of order alone. So nothing here has a tolerance.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from openv41.errors import OpsError
from openv41.formats import INDEX
from openv41.model.indexer import Indexer, Keys, Picks
from openv41.ops import choose
from openv41.ops.hopper import operands, pick, score, select
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


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Collects which tiles each launch of scores leaves to the exact kernel."""
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
    assert len(left) == 2 and all(not todo.all() for todo in left), "some tiles were left to fp8"


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
    assert left[0].any(), "none of the tiles was left to the exact kernel"


def scores_of(q: Tensor, weights: Tensor, keys: Tensor, stored: bool) -> Tensor:
    """Scores against records, made ready first or read as they lie, in pages in disorder."""
    n, p, page = len(q), len(keys), 8
    pages = torch.arange(-(-p // page)).flip(0).unsqueeze(0)
    table = torch.zeros((pages.numel() * page, keys.shape[1]), dtype=torch.bfloat16)
    table[(pages[0, torch.arange(p) // page] * page + torch.arange(p) % page)] = keys
    held = operands.KeyTable(INDEX.to_records(table).to(DEVICE), pages.to(DEVICE), page)
    queries = operands.encode_queries("test", q.to(DEVICE), weights.to(DEVICE))
    slots = torch.zeros(n, dtype=torch.int64, device=DEVICE)
    some = score.Tokens(slots, slots + p, n)
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
    assert len(pick.coarse_widths(p, k)) == levels
    got = pick.pick(scores.to(DEVICE), visible.to(DEVICE), k)
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
        positions, blocks = select_as(indexer, x, qr, step, keys, within, made.positions.shape[1])
        assert torch.equal(positions.cpu(), made.positions), f"layer {layer}"
        assert (blocks is None) == (made.blocks is None)
        if blocks is not None and made.blocks is not None:
            assert torch.equal(blocks.cpu(), made.blocks), f"layer {layer}"
        heard.append(layer)

    return compare


def select_as(indexer: Indexer, x, qr, step, keys: Sequence[Keys], within, k: int) -> tuple[Tensor, Tensor | None]:
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
    q, weights = on_grid((n, 2, 32), 0.5, rng), index_weights((n, 2), rng)
    pages = torch.randperm(11, generator=rng)[:10].view(2, 5)
    keys = on_grid((11 * page, 32), 0.5, rng)
    slot = torch.tensor([1, 1, 1, 1, 1, 0, 0])
    visible = torch.tensor([36, 37, 38, 39, 40, 3, 4])
    rows = (pages.unsqueeze(2) * page + torch.arange(page)).flatten(1)[:, :most]  # [slots, most]
    scores = torch.cat(
        [REFERENCE.index_scores(q[t : t + 1], weights[t : t + 1], keys[rows[slot[t]]]) for t in range(n)]
    )
    table = INDEX.to_records(keys) if packed else keys
    given = (tensor.to(DEVICE) for tensor in (q, weights, table, slot, pages))
    positions, blocks = select.select(
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
        (lambda: pick.coarse_widths(1 << 20, 1), "too long for 1 picks, 4096 are supported"),
        (lambda: select.select(q, weights, q[0], visible, visible[None], 8, visible, 2, 99), "most must lie in 0 to"),
        (lambda: select.select(q, weights, q[0], visible, visible[None], 8, visible, 2, 9, [3]), "add up to the 2 tok"),
    ):  # fmt: skip
        with pytest.raises(OpsError, match=word):
            call()


def test_compiled_for_hopper() -> None:
    """On any machine: nothing spills, scores are taken in fp8 on tensor cores, exact ones in bf16."""
    names = ["score_prepared", "score_records", "score_exactly", "encode_rows", "pick_rows", "coarsen"]
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
        wanted = {"score_prepared": "QGMMA", "score_records": "QGMMA", "score_exactly": "HGMMA"}.get(name)
        assert wanted is None or counts.get(wanted, 0) > 0, name
    # Records begin at multiples of four bytes: 17 copies a key, before the loop and in it. Wider ones would fault.
    assert found["score_records"][1]["LDGSTS"] == 2 * 17


# On a GPU


@pytest.mark.gpu
def test_packed_instructions_equal_plain_ones(rng: torch.Generator, monkeypatch) -> None:
    q, keys = on_grid((64, 32, 128), 0.5, rng), on_grid((4096, 128), 0.5, rng)
    weights = index_weights((64, 32), rng)
    packed = [scores_of(q, weights, keys, stored) for stored in (False, True)]
    monkeypatch.setattr(score, "PTX", False)
    plain = [scores_of(q, weights, keys, stored) for stored in (False, True)]
    assert torch.equal(packed[0], packed[1])
    assert torch.equal(packed[0], plain[0]) and torch.equal(packed[1], plain[1])
    assert torch.equal(packed[0], REFERENCE.index_scores(q, weights, keys))


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
    slots, most, page = 4, 20000, 64
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
            positions, blocks = select.select(*given, keep=2048)
            gathered, _ = select.select(*given, within=blocks, kept=2048)
            dense, _ = select.select(*given, within=blocks)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(gathered, positions) and torch.equal(dense, positions)
        rows = (pages.unsqueeze(2) * page + torch.arange(page, device="cuda")).flatten(1)
        for t in (0, n - 1):
            keys = INDEX.from_records(table[rows[slot[t], :most]]).bfloat16()
            scores = REFERENCE.index_scores(q[t : t + 1].cpu(), weights[t : t + 1].cpu(), keys.cpu())
            assert torch.equal(positions[t].cpu(), REFERENCE.pick(scores, visible[t : t + 1].cpu(), 512)[0])
