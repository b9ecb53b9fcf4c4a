"""Index scores in float32, and scores as integers that a partial selection takes the best of: plain numerics."""

import triton
import triton.language as tl

from openv41.ops.kernels.interpreted import product


@triton.jit(do_not_specialize=["n", "p"])
def index_scores(
    q, weights, keys, out, n, p, HEADS: tl.constexpr, WIDTH: tl.constexpr, SPACE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out` [n, p] = sum over heads of relu(q . key) weight. Grid: tiles of ROWS tokens, of COLUMNS positions. `SPACE`,
    a power of two, is WIDTH or more."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, SPACE)
    inside = (part < WIDTH)[None, :]
    known = tl.load(keys + column[:, None] * WIDTH + part[None, :], mask=(column < p)[:, None] & inside, other=0.0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for head in tl.static_range(HEADS):
        of_head = row * HEADS + head
        queries = tl.load(q + of_head[:, None] * WIDTH + part[None, :], mask=(row < n)[:, None] & inside, other=0.0)
        products = product(queries, known.T, tl.zeros([ROWS, COLUMNS], tl.float32), PRECISION)
        total += tl.maximum(products, 0.0) * tl.load(weights + of_head, mask=row < n, other=0.0)[:, None]
    place = row[:, None] * p + column[None, :]
    tl.store(out + place, total, mask=(row < n)[:, None] & (column < p)[None, :])


@triton.jit(do_not_specialize=["p"])
def ranked(scores, visible, out, p, COLUMNS: tl.constexpr):
    """`out` [n, p] int64, in the order of (score, lower position first); the least one where a row does not see. Grid:
    rows, tiles of COLUMNS."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own = column < p
    score = tl.load(scores + row * p + column, mask=own, other=0.0).to(tl.float32)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0 is 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    rank = (ordered << 32) | (0x7FFFFFFF - column).to(tl.int64)
    seen = column < tl.load(visible + row)
    tl.store(out + row * p + column, tl.where(seen, rank, -0x7FFFFFFFFFFFFFFF), mask=own)
