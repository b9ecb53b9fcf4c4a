"""Launches of index scores: bit for bit the reference's, in fp8 wherever that is exact (see `kernels.score`).

Tokens come in runs of one slot each. Long runs share keys: their slot's keys are made ready once, as e4m3 codes, and
four queries at a time are multiplied with them. Single tokens, and short runs, read the cache's records as they lie.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from openv41.ops.hopper import pick
from openv41.ops.hopper.compiled import Specimen
from openv41.ops.hopper.operands import KeyTable, Queries, Ready, check_keys, encode_queries, make_ready
from openv41.ops.kernels import blocks, index_grid, score, score_pages
from openv41.ops.kernels.interpreted import INTERPRETED

PROCESSORS = 132
"""Multiprocessors of an H200."""

COLUMNS = 16
"""Queries times heads of a tile, at least: what a matrix instruction wants."""

PTX = not INTERPRETED.value
"""Whether packed instructions are used. Where kernels are interpreted, plain Triton does the same."""


PAGES_CHUNK = 4096
"""Keys of a program that reads whole pages, where there are enough of them: of 1,024, 4,096 and 8,192 the best."""

BY_PAGES = True
"""Whether single tokens read whole pages of records, where `takes_pages` says that they can."""


@dataclass(frozen=True)
class Tiling:
    """How a launch divides the work: `queries` and `keys` of a tile, `chunk` keys of a program. `registers`: of a
    thread, at most; None: as many as the compiler likes. `pages`: by the kernel that reads whole pages."""

    queries: int
    keys: int
    chunk: int
    warps: int = 4
    stages: int = 3
    registers: int | None = None
    pages: bool = False


@dataclass(frozen=True)
class Tokens:
    """What is scored: the tokens' slots [n] and counts of visible positions [n], in runs of `run_length`; candidate
    blocks of `block` positions (`within` [n, blocks]), or, instead, lists of such blocks (`lists` [n, most]; `starts`
    [n, most]: their first records' rows, divided by eight)."""

    slots: Tensor
    visible: Tensor
    run_length: int
    block: int = 0
    within: Tensor | None = None
    lists: Tensor | None = None
    starts: Tensor | None = None


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, tiling: Tiling | None = None) -> Tensor:
    """Scores [n, p] (bf16) of queries [n, i, c] (bf16, on the fp4 grid) with weights [n, i] (bf16) against keys: bf16
    [p, c] or records [p, bytes]. Raises `OpsError` for what is not supported."""
    check_keys("index_scores", q, keys)
    queries, table = encode_queries("index_scores", q, weights), KeyTable.in_order(keys.contiguous())
    n, p = q.shape[0], keys.shape[0]
    scores = torch.empty((n, p), dtype=torch.bfloat16, device=q.device)
    if n and p:
        slots = torch.zeros(n, dtype=torch.int64, device=q.device)
        tokens = Tokens(slots, torch.full_like(slots, p), n)
        ready = make_ready(table, slots, 1, n, p, queries.width)
        score_ready(queries, tokens, table, ready, p, scores, tiling)
    return scores


def score_ready(
    queries: Queries, tokens: Tokens, table: KeyTable, ready: Ready, width: int, scores: Tensor,
    tiling: Tiling | None = None,
) -> None:  # fmt: skip
    """Write `scores` [n, at least width] of the first `width` keys of each token's slot, as many as the token's tile
    sees; `table` is what `ready` was made from."""
    n, length = queries.q.shape[0], tokens.run_length
    tiling = tiling or choose_tiling(queries.heads, n, length, width, ready=True)
    tiles_a_run = triton.cdiv(length, tiling.queries)
    grid = (n // length * tiles_a_run, triton.cdiv(width, tiling.chunk))
    todo = torch.empty(grid, dtype=torch.int32, device=scores.device)
    score.score_prepared[grid](
        queries.codes, queries.units, queries.norms, queries.weights, ready.codes, ready.units, ready.peaks,
        tokens.visible, _bytes(tokens.within), scores, todo,
        tiles_a_run, length, width, ready.padded, _blocks(tokens), scores.stride(0),
        **_shape(queries, tokens, tiling), STAGES=tiling.stages, PTX=PTX, num_warps=tiling.warps,
    )  # fmt: skip
    _score_groups(queries, tokens, ready, width, scores, todo, tiling)
    _score_rest(queries, tokens, table, width, scores, todo, tiling)


def score_stored(
    queries: Queries, tokens: Tokens, table: KeyTable, width: int, scores: Tensor, tiling: Tiling | None = None
) -> None:
    """The same from the cache's records. With lists, `width` and the visible counts are of the positions listed."""
    n, length = queries.q.shape[0], tokens.run_length
    if tiling is None:
        pages = BY_PAGES and takes_pages(queries, tokens, table)
        tiling = choose_tiling(queries.heads, n, length, width, ready=False, pages=pages)
    if tiling.pages:
        todo = _score_pages(queries, tokens, table, width, scores, tiling)
        _score_rest(queries, tokens, table, width, scores, todo, tiling)
        return
    tiles_a_run = triton.cdiv(length, tiling.queries)
    grid = (n // length * tiles_a_run, triton.cdiv(width, tiling.chunk))
    todo = torch.empty(grid, dtype=torch.int32, device=scores.device)
    score.score_records[grid](
        queries.codes, queries.units, queries.norms, queries.weights, table.table, _words(table.table),
        tokens.slots, table.pages, tokens.lists, tokens.visible, _bytes(tokens.within), scores, todo,
        tiles_a_run, length, width, table.pages.stride(0), _listed(tokens), _blocks(tokens), scores.stride(0),
        **_shape(queries, tokens, tiling), **_places(tokens, table), STAGES=tiling.stages, PTX=PTX,
        num_warps=tiling.warps, maxnreg=tiling.registers,
    )  # fmt: skip
    _score_rest(queries, tokens, table, width, scores, todo, tiling)


def takes_pages(queries: Queries, tokens: Tokens, table: KeyTable) -> bool:
    """Whether `kernels.score_pages` takes these: compiled, single tokens, keys of 128 channels in whole pages."""
    fits = not INTERPRETED.value and tokens.run_length == 1 and queries.width == 128 and queries.heads in (16, 32, 64)
    if not fits or not table.packed or table.per_page == 0 or table.per_page % 8 or table.table.data_ptr() % 16:
        return False
    return (tokens.lists is None or tokens.starts is not None) and len(table.table) % table.per_page == 0


def _score_pages(
    queries: Queries, tokens: Tokens, table: KeyTable, width: int, scores: Tensor, tiling: Tiling
) -> Tensor:
    """What `score_stored` does first, from whole pages, or from blocks of eight positions; what is left to do."""
    n = queries.q.shape[0]
    todo = torch.empty((n, triton.cdiv(width, tiling.chunk)), dtype=torch.int32, device=scores.device)
    score_pages.score_pages[todo.shape](
        queries.codes, queries.units, queries.norms, queries.weights, _words(table.table), tokens.slots, table.pages,
        tokens.starts, tokens.visible, _bytes(tokens.within), scores, todo,
        width, table.pages.stride(0), 0 if tokens.starts is None else tokens.starts.stride(0), _blocks(tokens),
        scores.stride(0),
        HEADS=queries.heads, CHUNK=tiling.chunk, BLOCK=0 if tokens.within is None else tokens.block,
        PER_PAGE=table.per_page, LISTED=tokens.starts is not None,
        RUN=64 if table.per_page % 64 == 0 and tokens.starts is None else 8, STAGES=tiling.stages,
        num_warps=4, maxnreg=tiling.registers,
    )  # fmt: skip
    return todo


def _score_groups(
    queries: Queries, tokens: Tokens, ready: Ready, width: int, scores: Tensor, todo: Tensor, tiling: Tiling
) -> None:
    """The chunks whose groups are too far apart for one product in fp8. Where there are none, every program finds that
    out and is done."""
    tiles, chunks = todo.shape
    score.score_grouped[(tiles, _ways(tiles, chunks))](
        queries.codes, queries.units, queries.weights, ready.codes, ready.units,
        tokens.visible, _bytes(tokens.within), scores, todo, chunks,
        triton.cdiv(tokens.run_length, tiling.queries), tokens.run_length, width, ready.padded, _blocks(tokens),
        scores.stride(0),
        **_shape(queries, tokens, tiling), TOGETHER=_together(queries.heads, tiling.queries), STAGES=tiling.stages,
        PTX=PTX, num_warps=tiling.warps,
    )  # fmt: skip


def _together(heads: int, queries: int) -> int:
    """Queries of a tile that are multiplied by groups at a time: 64 columns, of which the accumulators of four groups
    take half of the registers."""
    return min(queries, max(1, 64 // heads))


def _ways(tiles: int, chunks: int) -> int:
    """Programs among which the chunks of a tile are divided where few may have anything to do."""
    return min(chunks, triton.cdiv(4 * PROCESSORS, tiles))


def _score_rest(
    queries: Queries, tokens: Tokens, table: KeyTable, width: int, scores: Tensor, todo: Tensor, tiling: Tiling
) -> None:
    """The chunks that fp8 may get wrong in either way. Mostly there are none."""
    tiles, chunks = todo.shape
    together = max(1, COLUMNS // queries.heads)
    score.score_exactly[(tiles, _ways(tiles, chunks))](
        queries.q, queries.weights, table.table, tokens.slots, table.pages, tokens.lists, tokens.visible,
        _bytes(tokens.within), scores, todo, chunks,
        triton.cdiv(tokens.run_length, tiling.queries), tokens.run_length, width, table.pages.stride(0),
        _listed(tokens), _blocks(tokens), scores.stride(0),
        **_shape(queries, tokens, replace(tiling, keys=64)), **_places(tokens, table), TOGETHER=together,
        RECORDS=table.packed, PAGED=table.per_page > 0, num_warps=4,
    )  # fmt: skip


def choose_tiling(
    heads: int, n: int, run_length: int, width: int, ready: bool, pages: bool = False
) -> Tiling:  # fmt: skip
    """Four queries of 32 heads and 64 keys are the best tile of those measured for long runs; a single query takes 128
    keys, and 128 registers, so that four programs fit on a multiprocessor. Chunks are as long as lets a launch fill the
    GPU four times, or, by whole pages, twice."""
    if pages:
        chunk = PAGES_CHUNK
        while chunk > 128 and n * triton.cdiv(width, chunk) < 8 * PROCESSORS:
            chunk //= 2
        return Tiling(1, 128, chunk, stages=2, registers=128 if heads <= 32 else None, pages=True)
    least = max(1, COLUMNS // heads)
    queries = max(least, min(triton.next_power_of_2(run_length), max(1, 128 // heads)))
    tiles = n // run_length * triton.cdiv(run_length, queries)
    keys = 64 if queries * heads > 64 else 128
    chunk = 4096 if ready else 1024
    while chunk > 256 and tiles * triton.cdiv(width, chunk) < 4 * PROCESSORS:
        chunk //= 2
    if ready:
        return Tiling(queries, keys, chunk, stages=3)
    return Tiling(queries, keys, chunk, stages=2, registers=128 if queries * heads <= 32 else None)


def _shape(queries: Queries, tokens: Tokens, tiling: Tiling) -> dict[str, Any]:
    return dict(
        HEADS=queries.heads, WIDTH=queries.width, QUERIES=tiling.queries, KEYS=tiling.keys, CHUNK=tiling.chunk,
        BLOCK=0 if tokens.within is None else tokens.block,
    )  # fmt: skip


def _places(tokens: Tokens, table: KeyTable) -> dict[str, Any]:
    return dict(PER_PAGE=table.per_page, LISTED=0 if tokens.lists is None else tokens.block)


def _words(records: Tensor) -> Tensor:
    """Records in words of four bytes, if they are whole words: else as they are, and nothing reads them as words."""
    return records.view(torch.int32) if records.shape[1] % 4 == 0 else records


def _bytes(within: Tensor | None) -> Tensor | None:
    return None if within is None else within.view(torch.uint8)


def _blocks(tokens: Tokens) -> int:
    return 0 if tokens.within is None else tokens.within.stride(0)


def _listed(tokens: Tokens) -> int:
    return 0 if tokens.lists is None else tokens.lists.stride(0)


# What an H200 runs at the released sizes: 32 heads of 128 channels, pages of 64 positions

_NUMBERS = {name: "*i64" for name in ("slots", "pages", "visible")}
_TENSORS = _NUMBERS | {
    "q": "*fp8e4nv", "q_units": "*fp32", "q_norms": "*fp32", "weights": "*bf16", "table": "*u8", "words": "*i32",
    "within": "*u8", "lists": "*i32", "scores": "*bf16", "todo": "*i32", "keys": "*fp8e4nv", "key_units": "*fp32",
    "peaks": "*fp32", "starts": "*i32", "listed": "*i64",
}  # fmt: skip


def _specimen(
    name: str, kernel: Any, warps: int, stages: int, types: dict[str, str], options: dict[str, Any] | None = None,
    gluon: bool = False, **constants: Any,
) -> Specimen:  # fmt: skip
    signature = {arg: types.get(arg, _TENSORS.get(arg, "i32")) for arg in kernel.arg_names}
    multiples = ("stride", "padded", "listed_most", "most", "blocks")
    return Specimen(name, kernel, signature, constants, warps, stages, gluon, options or {}, multiples)


_RELEASED: dict[str, Any] = dict(HEADS=32, WIDTH=128)
_LONG: dict[str, Any] = dict(_RELEASED, QUERIES=4, KEYS=64, CHUNK=4096)
_SINGLE: dict[str, Any] = dict(
    _RELEASED, QUERIES=1, KEYS=128, CHUNK=1024, PER_PAGE=64, BLOCK=0, STAGES=2, PTX=True, within=None,
    tiles_a_run=1, run_length=1,  # a launch takes an argument of 1 for a constant
)  # fmt: skip
_PAGED: dict[str, Any] = dict(PER_PAGE=64, BLOCK=0, LISTED=0, RECORDS=True, PAGED=True, TOGETHER=1)
_FOUR_PROGRAMS = {"maxnreg": 128}
_PAGES: dict[str, Any] = dict(HEADS=32, CHUNK=4096, BLOCK=0, PER_PAGE=64, STAGES=2, within=None)

SPECIMENS = [
    *pick.SPECIMENS,
    _specimen("score_prepared", score.score_prepared, 4, 3, {}, **_LONG, BLOCK=0, STAGES=3, PTX=True, within=None),
    _specimen("score_prepared, candidates", score.score_prepared, 4, 3, {}, **_LONG, BLOCK=8, STAGES=3, PTX=True),
    _specimen(
        "score_grouped", score.score_grouped, 4, 3, {}, **_LONG, TOGETHER=2, BLOCK=0, STAGES=3, PTX=True, within=None
    ),
    _specimen("score_records", score.score_records, 4, 2, {}, _FOUR_PROGRAMS, **_SINGLE, LISTED=0, lists=None),
    _specimen("score_records, listed", score.score_records, 4, 2, {}, _FOUR_PROGRAMS, **_SINGLE, LISTED=8),
    _specimen(
        "score_pages", score_pages.score_pages, 4, 3, {}, _FOUR_PROGRAMS, True, **_PAGES, LISTED=False, RUN=64,
        starts=None,
    ),
    _specimen(
        "score_pages, listed", score_pages.score_pages, 4, 3, {}, _FOUR_PROGRAMS, True, **_PAGES, LISTED=True, RUN=8
    ),
    _specimen(
        "list_kept", blocks.list_kept, 4, 3, {"lists": "*i32", "blocks": "i32"}, TILE=512, BLOCK=8, PER_PAGE=64
    ),
    _specimen(
        "score_exactly", score.score_exactly, 4, 3, {"q": "*bf16"}, **dict(_LONG, **_PAGED), within=None, lists=None
    ),
    _specimen(
        "encode_rows", index_grid.encode_rows, 4, 3, {"codes": "*u8", "units": "*fp32", "norms": "*fp32"},
        RECORDS=True, PER_PAGE=64, WIDTH=128, PAGED=True, COUNT=64,
    ),
]  # fmt: skip
