"""Scores by whole pages, lists and picks as compiled for sm_90a, run by `ptx_machine`: bit for bit the reference's.

Where Triton interprets, nothing is compiled: each check runs in a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from openv41.formats import INDEX
from openv41.ops.hopper import operands, pick, score, select
from openv41.ops.reference import ReferenceOps
from tests.ops.hopper import ptx_machine

REFERENCE = ReferenceOps()


def keys_of(p: int, page: int, octaves: float, rng: torch.Generator) -> tuple[Tensor, operands.KeyTable]:
    """Keys, one of them and one group of another zero; and the same as records, in pages in disorder."""
    keys = on_grid((p, 128), octaves, rng)
    keys[5], keys[6, :32] = 0, 0
    count = -(-p // page)
    pages = torch.randperm(count + 2, generator=rng)[None, :count].contiguous()
    table = torch.zeros(((count + 2) * page, 128), dtype=torch.bfloat16)
    at = torch.arange(p)
    table[pages[0, at // page] * page + at % page] = keys
    return keys, operands.KeyTable(INDEX.to_records(table), pages, page)


def on_grid(shape: tuple[int, ...], octaves: float, rng: torch.Generator) -> Tensor:
    exponent = (torch.randn(*shape[:-1], shape[-1] // 32, generator=rng) * octaves).round()
    x = torch.randn(*shape, generator=rng) * torch.exp2(exponent).repeat_interleave(32, -1)
    return INDEX.round(x.bfloat16())


def queries_of(n: int, heads: int, octaves: float, rng: torch.Generator) -> operands.Queries:
    q, weights = on_grid((n, heads, 128), octaves, rng), torch.randn(n, heads, generator=rng).bfloat16()
    return operands.encode_queries("test", q, weights)


def check_pages(rng: torch.Generator) -> None:
    """Two tokens that see more and less than a page, with candidate blocks; three pairs of halves to two slots."""
    keys, table = keys_of(330, 64, 1.0, rng)
    queries, visible = queries_of(2, 32, 1.0, rng), torch.tensor([330, 61])
    within = torch.rand(2, 42, generator=rng) < 0.5
    tokens = score.Tokens(torch.zeros(2, dtype=torch.int64), visible, 1, 8, within)
    scores = torch.full((2, 384), torch.nan, dtype=torch.bfloat16)
    left = score._score_pages(queries, tokens, table, 330, scores, score.Tiling(1, 128, 512, stages=2, pages=True))
    wanted = REFERENCE.index_scores(queries.q, queries.weights, keys)
    wanted = wanted.masked_fill(~within.repeat_interleave(8, 1)[:, :330], -torch.inf)
    assert not left.any()
    for row, seen in enumerate(visible):
        assert torch.equal(scores[row, :seen], wanted[row, :seen]) and scores[row, seen:].isnan().all()


def check_out_of_reach(rng: torch.Generator) -> None:
    """Only a chunk that holds a key with groups too far apart is left to the exact kernel, and all of a row whose
    weights are of an unusual size."""
    keys, table = keys_of(200, 64, 0.0, rng)
    queries = queries_of(2, 32, 0.0, rng)
    queries.weights[1, 3] = 2.0**-100
    far = table.pages[0, 2] * 64 + 5  # position 133
    table.table[far, 64:66] = torch.tensor([140, 112], dtype=torch.uint8)
    tokens = score.Tokens(torch.zeros(2, dtype=torch.int64), torch.tensor([200, 200]), 1)
    scores = torch.empty((2, 256), dtype=torch.bfloat16)
    left = score._score_pages(queries, tokens, table, 200, scores, score.Tiling(1, 128, 128, stages=2, pages=True))
    assert left.tolist() == [[0, 2], [2, 2]]
    wanted = REFERENCE.index_scores(queries.q, queries.weights, keys)
    assert torch.equal(scores[0, :128], wanted[0, :128])


def check_listed(rng: torch.Generator) -> None:
    """Candidate blocks listed, scored and picked from; pages of eight; the newest block is visible in part."""
    keys, table = keys_of(300, 8, 1.0, rng)
    queries, visible = queries_of(2, 16, 1.0, rng), torch.tensor([299, 137])
    within = torch.rand(2, 40, generator=rng) < 0.6
    for row, seen in enumerate(visible.tolist()):
        within[row, (seen - 1) // 8], within[row, (seen - 1) // 8 + 1 :] = True, False
    kept, slots = int(within.sum(1).max()), torch.zeros(2, dtype=torch.int64)
    lists, listed, starts = select.list_blocks(within, visible, 8, kept, table, slots)
    tokens = score.Tokens(slots, listed, 1, 8, lists=lists, starts=starts)
    scores = torch.full((2, 320), torch.nan, dtype=torch.bfloat16)
    left = score._score_pages(queries, tokens, table, 8 * kept, scores, score.Tiling(1, 128, 256, pages=True))
    picks, rows = torch.empty((2, 2, 20), dtype=torch.int64)
    paged = pick.Paged(slots, table.pages, table.per_page, rows)
    pick.pick_into(picks, scores[:, : 8 * kept], listed, 20, lists=lists, block=8, paged=paged)
    wanted = REFERENCE.index_scores(queries.q, queries.weights, keys)
    wanted = wanted.masked_fill(~within.repeat_interleave(8, 1)[:, :300], -torch.inf)
    assert not left.any()
    assert torch.equal(picks, REFERENCE.pick(wanted, visible, 20))
    assert torch.equal(rows, table.pages[0, picks // 8] * 8 + picks % 8)


def check_picks(rng: torch.Generator) -> None:
    """Short rows, where a thread would have two entries if there were no least number of blocks; and all levels."""
    divisions = (None, pick.Division(256, 4))
    for p, k, division in ((40, 5, divisions[0]), (2500, 20, divisions[1]), (37, 16, divisions[0])):
        normal = torch.randn(3, p, generator=rng)
        for scores in (normal.bfloat16(), normal.mul(2).round().bfloat16()):
            visible = torch.tensor([p, p // 3, 0])
            assert torch.equal(pick.pick(scores, visible, k, division), REFERENCE.pick(scores, visible, k))


def check_races(rng: torch.Generator) -> None:
    """Without a barrier, or without the fence before products, the machine stops."""
    _, table = keys_of(300, 64, 0.0, rng)
    tokens = score.Tokens(torch.zeros(1, dtype=torch.int64), torch.tensor([300]), 1)
    given = (queries_of(1, 32, 0.0, rng), tokens, table, 300, torch.empty((1, 320), dtype=torch.bfloat16))
    score._score_pages(*given, score.Tiling(1, 128, 512, stages=2, pages=True))
    (key,) = (key for key in ptx_machine.compiled if "score_pages" in key[0])
    made = ptx_machine.compiled[key]
    whole = made.asm["ptx"]
    waits = whole.index("cp.async.wait_group")
    for pattern, start in ((r"bar\.sync\s+0;", waits), (r"fence\.proxy\.async[.\w:]*;", 0)):
        changed = whole[:start] + re.sub(pattern, "", whole[start:], count=1)
        assert changed != whole
        made.asm["ptx"] = changed
        with pytest.raises(ptx_machine.Race):
            score._score_pages(*given, score.Tiling(1, 128, 512, stages=2, pages=True))


CHECKS = {check.__name__: check for check in (check_pages, check_out_of_reach, check_listed, check_picks, check_races)}


def main(name: str, seed: int) -> None:
    JITFunction.run = ptx_machine.launch  # type: ignore[method-assign]
    CHECKS[name](torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CHECKS)
def test_compiled_kernels(name: str, seed: int) -> None:
    root = Path(__file__).parents[3]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OPENV41_JAXTYPING": "0", "PYTHONPATH": os.pathsep.join((str(root), str(root / "src")))}
    code = f"from tests.ops.hopper import test_hopper_ptx; test_hopper_ptx.main({name!r}, {seed})"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
