"""Index scores, bit for bit the reference's: q . k rounded to bf16, relu, times the head's weight, rounded to bf16, the
heads added in float32 in the reference's order, and rounded to bf16.

A program scores a tile of neighbouring queries of one slot, all heads of them side by side, against a chunk of the
slot's keys. `score_prepared` reads keys that lie ready as e4m3 codes, and multiplies all channels at once where that is
exact. It notes in `todo` the chunks where it might not be: `score_grouped` does them with one product for each 32
channels, added in float32. `score_records` decodes the cache's records on the way, and always takes groups. What may be
too much for float32's 24 bits is done by `score_exactly`, in bf16 and float64.
"""

import triton
import triton.language as tl

from openv41.ops.kernels.index_grid import ROWS, add_heads, group_values, head_of_column, row_numbers, shares_of
from openv41.ops.kernels.interpreted import bound, product, rounded

AT_ONCE = tl.constexpr(0)
BY_GROUPS = tl.constexpr(1)
EXACTLY = tl.constexpr(2)
"""Ways to score a chunk of a tile, as `todo` has them."""

PRODUCT_MOST = tl.constexpr(2.0**28)
"""Squared lengths of a query and a key, multiplied, stay below this: then every partial sum is below 2^14."""

SUM_MOST = tl.constexpr(2.0**48 - 2.0**36)
"""The same for sums of groups in float32's 24 bits. A squared length beyond 2^24 is itself rounded: the rest of 2^36
is far more than that can be."""

GROUP_LENGTH = tl.constexpr(144.0 * 32.0)
"""Squared length of a record's group, at most: 32 integers up to 12."""

OCTAVES_MOST = tl.constexpr(24)
"""Octaves that a record's scales may lie from 1: products, shares and sums are then normal numbers of bf16."""

WEIGHT_LEAST = tl.constexpr(2.0**-60)
WEIGHT_MOST = tl.constexpr(2.0**30)
"""Weights beyond these might leave bf16's normal numbers once a unit is folded into them."""

HALF_BYTES = tl.constexpr("""{
    .reg .b32 size, sign;
    shl.b32 size, $2, 2;
    shl.b32 sign, $2, 4;
    and.b32 size, size, 0x1C1C1C1C;
    and.b32 sign, sign, 0x80808080;
    or.b32 $0, size, sign;
    shr.b32 size, $2, 2;
    and.b32 size, size, 0x1C1C1C1C;
    and.b32 sign, $2, 0x80808080;
    or.b32 $1, size, sign;
}""")


@triton.jit
def tile_of(tile, tiles_a_run, run_length, QUERIES: tl.constexpr):
    """The run of a tile, its first token, and how many tokens of the run there are from it on. Runs are of one length,
    and every tile lies in one run."""
    run = tile // tiles_a_run
    place = tile % tiles_a_run * QUERIES
    return run, run * run_length + place, run_length - place


@triton.jit
def keys_to_score(visible, token, tokens, chunk, width, CHUNK: tl.constexpr, QUERIES: tl.constexpr):
    """First key of a chunk, and the end of those that any query of the tile sees."""
    query = tl.arange(0, QUERIES)
    seen = tl.max(tl.load(visible + token + query, mask=query < tokens, other=0), 0).to(tl.int32)
    begin = chunk * CHUNK
    return begin, tl.minimum(tl.minimum(begin + CHUNK, seen), width)


@triton.jit
def weights_of(weights, token, tokens, parity, HEADS: tl.constexpr, QUERIES: tl.constexpr):
    """Weights [QUERIES, HEADS / 2] of the tile's even or odd columns in float32, and their rows."""
    query = tl.arange(0, QUERIES)[:, None]
    column = tl.arange(0, HEADS // 2)[None, :] * 2 + parity
    row = (token + query).to(tl.int64) * HEADS + head_of_column(column, HEADS)
    return tl.load(weights + row, mask=query < tokens, other=0.0).to(tl.float32), row


@triton.jit
def scaled_weights(weights, units, token, tokens, parity, HEADS: tl.constexpr, QUERIES: tl.constexpr):
    """The same times the queries' units, and whether all are zero or of a usual size."""
    weight, row = weights_of(weights, token, tokens, parity, HEADS, QUERIES)
    size = tl.where(weight == 0.0, 1.0, tl.abs(weight))
    usual = (size >= WEIGHT_LEAST) & (size <= WEIGHT_MOST)
    unit = tl.load(units + row, mask=tl.arange(0, QUERIES)[:, None] < tokens, other=1.0)
    return weight * unit, tl.min(tl.min(usual.to(tl.int32), 1), 0) != 0


@triton.jit
def query_rows(token, tokens, HEADS: tl.constexpr, QUERIES: tl.constexpr):
    """Rows [columns] of the tile's queries, and which of them there are."""
    column = tl.arange(0, QUERIES * HEADS)
    row = (token + column // HEADS).to(tl.int64) * HEADS + head_of_column(column, HEADS)
    return row, column // HEADS < tokens


@triton.jit
def store_scores(
    scores, stride, sums, key, end, token, tokens, within, blocks, BLOCK: tl.constexpr, QUERIES: tl.constexpr
):  # fmt: skip
    """Write sums [keys, queries]; with `BLOCK`, minus infinity outside the candidate blocks."""
    query = tl.arange(0, QUERIES)
    known = (key < end)[:, None] & (query < tokens)[None, :]
    place = (token + query).to(tl.int64)[None, :]
    if BLOCK > 0:
        inside = tl.load(within + place * blocks + (key // BLOCK)[:, None], mask=known, other=0)
        sums = tl.where(inside != 0, sums, float("-inf"))
    tl.store(scores + place * stride + key[:, None], rounded(sums, tl.bfloat16), mask=known)


@triton.jit
def way_to_score(norm, peak, usual):
    """How a tile is to be scored, from the largest norms of its queries and keys. A product of infinity and zero is
    below no bound."""
    way = tl.where(norm * peak < SUM_MOST, BY_GROUPS, EXACTLY)
    way = tl.where(norm * peak < PRODUCT_MOST, AT_ONCE, way)
    return tl.where(usual, way, EXACTLY)


@triton.jit
def score_prepared(
    q, q_units, q_norms, weights, keys, key_units, peaks, visible, within, scores, todo,
    tiles_a_run, run_length, width, padded, blocks, stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Scores against keys that lie ready as codes [runs, padded, WIDTH], with units and, for every 64 of them, the
    largest norm; one product of all channels where that is exact. Notes in `todo` the way for each chunk of a tile."""
    tile, chunk = tl.program_id(0), tl.program_id(1)
    run, token, tokens = tile_of(tile, tiles_a_run, run_length, QUERIES)
    begin, end = keys_to_score(visible, token, tokens, chunk, width, CHUNK, QUERIES)
    row, known = query_rows(token, tokens, HEADS, QUERIES)
    even, even_usual = scaled_weights(weights, q_units, token, tokens, 0, HEADS, QUERIES)
    odd, odd_usual = scaled_weights(weights, q_units, token, tokens, 1, HEADS, QUERIES)
    norm = tl.max(tl.load(q_norms + row, mask=known, other=0.0), 0)
    part = begin // ROWS + tl.arange(0, CHUNK // ROWS)
    some = part * ROWS < end
    peak = tl.max(tl.load(peaks + run * (padded // ROWS) + part, mask=some, other=0.0), 0)
    way = tl.where(begin < end, way_to_score(norm, peak, even_usual & odd_usual), AT_ONCE)
    tl.store(todo + tile * tl.num_programs(1) + chunk, way)
    end = tl.where(way == AT_ONCE, end, begin)
    channel = tl.arange(0, WIDTH)
    own = tl.load(q + row[:, None] * WIDTH + channel[None, :], mask=known[:, None], other=0.0)
    keys += run.to(tl.int64) * padded * WIDTH
    key_units += run.to(tl.int64) * padded
    for first in tl.range(bound(begin), bound(end), KEYS, num_stages=STAGES):
        key = first + tl.arange(0, KEYS)
        codes = tl.load(keys + key.to(tl.int64)[:, None] * WIDTH + channel[None, :])
        products = product(codes, own.T, tl.zeros([KEYS, QUERIES * HEADS], tl.float32), "tf32")
        low, high = shares_of(products, even, odd, KEYS, QUERIES, HEADS, PTX)
        sums = add_heads(low, high, KEYS, QUERIES, HEADS)
        sums = sums * tl.load(key_units + key)[:, None]
        store_scores(scores, stride, sums, key, end, token, tokens, within, blocks, BLOCK, QUERIES)


@triton.jit
def queries_by_groups(
    q, q_units, weights, token, tokens, HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr
):  # fmt: skip
    """Codes of some queries' groups of channels, each [columns, 32], and the weights of even and of odd columns."""
    row, known = query_rows(token, tokens, HEADS, QUERIES)
    own = ()
    for group in tl.static_range(WIDTH // 32):
        places = row[:, None] * WIDTH + group * 32 + tl.arange(0, 32)[None, :]
        own = own + (tl.load(q + places, mask=known[:, None], other=0.0),)
    even, _ = scaled_weights(weights, q_units, token, tokens, 0, HEADS, QUERIES)
    odd, _ = scaled_weights(weights, q_units, token, tokens, 1, HEADS, QUERIES)
    return own, even, odd


@triton.jit
def sum_of_groups(codes, own, KEYS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr):
    """Products [KEYS, COLUMNS]: one for each group in fp8, added in float32 outside of the tensor cores."""
    zero = tl.zeros([KEYS, COLUMNS], tl.float32)
    products = product(codes[0], own[0].T, zero, "tf32")
    for group in tl.static_range(1, GROUPS):
        products += product(codes[group], own[group].T, zero, "tf32")
    return products


@triton.jit
def score_grouped(
    q, q_units, weights, keys, key_units, visible, within, scores, todo,
    chunks, tiles_a_run, run_length, width, padded, blocks, stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, TOGETHER: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The chunks of prepared keys that `todo` wants by groups. A program takes every so many chunks of a tile, and
    multiplies `TOGETHER` of its queries at a time: there are as many accumulators as groups."""
    tile = tl.program_id(0)
    for chunk in range(bound(tl.program_id(1)), bound(chunks), bound(tl.num_programs(1))):
        if tl.load(todo + tile * chunks + chunk) == BY_GROUPS:
            run, token, tokens = tile_of(tile, tiles_a_run, run_length, QUERIES)
            begin, end = keys_to_score(visible, token, tokens, chunk, width, CHUNK, QUERIES)
            start = run.to(tl.int64) * padded
            _score_by_groups(
                q, q_units, weights, keys + start * WIDTH, key_units + start, within, scores,
                token, tokens, begin, end, blocks, stride,
                HEADS, WIDTH, QUERIES, TOGETHER, KEYS, BLOCK, STAGES, PTX,
            )  # fmt: skip


@triton.jit
def _score_by_groups(
    q, q_units, weights, keys, key_units, within, scores,
    token, tokens, begin, end, blocks, stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, TOGETHER: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    own, even, odd = (), (), ()
    for part in tl.static_range(QUERIES // TOGETHER):
        done = part * TOGETHER
        some = queries_by_groups(q, q_units, weights, token + done, tokens - done, HEADS, WIDTH, TOGETHER)
        own, even, odd = own + (some[0],), even + (some[1],), odd + (some[2],)
    for first in tl.range(bound(begin), bound(end), KEYS, num_stages=STAGES):
        key = first + tl.arange(0, KEYS)
        codes = ()
        for group in tl.static_range(WIDTH // 32):
            place = key.to(tl.int64)[:, None] * WIDTH + group * 32 + tl.arange(0, 32)[None, :]
            codes = codes + (tl.load(keys + place),)
        unit = tl.load(key_units + key)[:, None]
        for part in tl.static_range(QUERIES // TOGETHER):
            done = part * TOGETHER
            products = sum_of_groups(codes, own[part], KEYS, TOGETHER * HEADS, WIDTH // 32)
            low, high = shares_of(products, even[part], odd[part], KEYS, TOGETHER, HEADS, PTX)
            sums = add_heads(low, high, KEYS, TOGETHER, HEADS) * unit
            store_scores(
                scores, stride, sums, key, end, token + done, tokens - done, within, blocks, BLOCK, TOGETHER
            )  # fmt: skip


@triton.jit
def listed(key, end, lists, token, listed_most, LISTED: tl.constexpr):
    """Compressed positions of keys: themselves, or, in blocks of `LISTED`, as the query's list has them."""
    if LISTED == 0:
        return key
    else:
        block = tl.load(lists + token.to(tl.int64) * listed_most + key // LISTED, mask=key < end, other=0)
        return block * LISTED + key % LISTED


@triton.jit
def half_bytes(pairs, PTX: tl.constexpr):
    """e4m3 codes of the low and the high e2m1 code of bytes: the value times 2^-6, subnormals included."""
    if PTX:
        return tl.inline_asm_elementwise(
            HALF_BYTES, "=r,=r,r", [pairs], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    else:
        low = ((pairs << 2) & 0x1C) | ((pairs << 4) & 0x80)
        return low.to(tl.uint8), (((pairs >> 2) & 0x1C) | (pairs & 0x80)).to(tl.uint8)


@triton.jit
def record_codes(start, known, group, KEYS: tl.constexpr, PTX: tl.constexpr):
    """e4m3 codes [KEYS, 32] of a group of records: its even channels, then its odd ones."""
    pairs = tl.load(start[:, None] + group * 16 + tl.arange(0, 16)[None, :], mask=known[:, None], other=0)
    low, high = half_bytes(pairs, PTX)
    return tl.join(low, high).permute(0, 2, 1).reshape(KEYS, 32).to(tl.float8e4nv, bitcast=True)


@triton.jit
def scales_of(table, words, row, known, WIDTH: tl.constexpr):
    """The scales' exponents of a record, biased by 127, a byte each: of four groups, or fewer (the rest are 1, which
    is what an empty group has). `words`: the table in words of four bytes, if records are whole words."""
    if WIDTH == 128:
        return tl.load(words + row * 17 + 16, mask=known, other=0x01010101)
    else:
        scales = tl.full(row.shape, 0x01010101, tl.int32)
        for group in tl.static_range(WIDTH // 32):
            place = row * (WIDTH // 2 + WIDTH // 32) + WIDTH // 2 + group
            scale = tl.load(table + place, mask=known, other=1).to(tl.int32)
            scales = scales ^ ((scale ^ 1) << (8 * group))
        return scales


@triton.jit
def group_factor(scales, group: tl.constexpr):
    """2 to the exponent of a group's scale, in float32."""
    return (((scales >> (8 * group)) & 0xFF) << 23).to(tl.float32, bitcast=True)


@triton.jit
def out_of_reach(scales, most):
    """Whether a record's groups are so far apart that float32 may not hold their sum, as the squared length of a record
    may pass `most` units of its smallest group, or so far from 1 that bf16 may not hold what is made of it. Empty
    groups do not count."""
    length, low = tl.zeros(scales.shape, tl.float32), scales * 0 + 127 + OCTAVES_MOST
    for group in tl.static_range(4):
        factor = group_factor(scales, group)
        length += factor * factor
        exponent = (scales >> (8 * group)) & 0xFF
        low = tl.minimum(low, tl.where(exponent <= 1, 127 + OCTAVES_MOST, exponent))
    unit = (low << 23).to(tl.float32, bitcast=True)
    far = (low < 127 - OCTAVES_MOST) | (length >= 4.0 * 4.0**OCTAVES_MOST)
    return (length * GROUP_LENGTH >= most * unit * unit) | far


@triton.jit
def score_records(
    q, q_units, q_norms, weights, table, words, slots, pages, lists, visible, within, scores, todo,
    tiles_a_run, run_length, width, pages_held, listed_most, blocks, stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, PER_PAGE: tl.constexpr, LISTED: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Scores against keys as the cache stores them, one product for each group of 32, so that any scales are exact.

    With `LISTED` the keys are blocks of so many positions, chosen for each query: score j is that of the j-th position
    listed, and `visible` counts these."""
    tile, chunk = tl.program_id(0), tl.program_id(1)
    run, token, tokens = tile_of(tile, tiles_a_run, run_length, QUERIES)
    begin, end = keys_to_score(visible, token, tokens, chunk, width, CHUNK, QUERIES)
    row, known = query_rows(token, tokens, HEADS, QUERIES)
    even, even_usual = scaled_weights(weights, q_units, token, tokens, 0, HEADS, QUERIES)
    odd, odd_usual = scaled_weights(weights, q_units, token, tokens, 1, HEADS, QUERIES)
    norm = tl.maximum(tl.max(tl.load(q_norms + row, mask=known, other=0.0), 0), 1.0)
    fits = (norm < float("inf")) & even_usual & odd_usual
    stop = tl.where(fits, end, begin)
    most = SUM_MOST / norm
    slot = tl.load(slots + token)
    place = tl.arange(0, 32)
    channel = place % 16 * 2 + place // 16  # even channels of a group, then odd ones
    own = ()
    for group in tl.static_range(WIDTH // 32):
        places = row[:, None] * WIDTH + group * 32 + channel[None, :]
        own = own + (tl.load(q + places, mask=known[:, None], other=0.0),)
    beyond = tl.zeros([KEYS], tl.int32)
    for first in tl.range(bound(begin), bound(stop), KEYS, num_stages=STAGES):
        key = first + tl.arange(0, KEYS)
        there = key < end
        index = listed(key, end, lists, token, listed_most, LISTED)
        number = row_numbers(index, there, slot, pages, pages_held, PER_PAGE)
        start = table + number * (WIDTH // 2 + WIDTH // 32)
        scales = scales_of(table, words, number, there, WIDTH)
        beyond = beyond | out_of_reach(scales, most).to(tl.int32)
        products = tl.zeros([KEYS, QUERIES * HEADS], tl.float32)
        for group in tl.static_range(WIDTH // 32):
            codes = record_codes(start, there, group, KEYS, PTX)
            part = product(codes, own[group].T, tl.zeros([KEYS, QUERIES * HEADS], tl.float32), "tf32")
            products += part * group_factor(scales, group)[:, None]
        low, high = shares_of(products, even, odd, KEYS, QUERIES, HEADS, PTX)
        sums = add_heads(low, high, KEYS, QUERIES, HEADS) * 64.0  # codes hold the values times 2^-6
        store_scores(scores, stride, sums, key, end, token, tokens, within, blocks, BLOCK, QUERIES)
    left = (begin < end) & ((fits == 0) | (tl.max(beyond, 0) != 0))
    tl.store(todo + tile * tl.num_programs(1) + chunk, tl.where(left, EXACTLY, AT_ONCE))


@triton.jit
def score_exactly(
    q, weights, table, slots, pages, lists, visible, within, scores, todo,
    chunks, tiles_a_run, run_length, width, pages_held, listed_most, blocks, stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, TOGETHER: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PER_PAGE: tl.constexpr, LISTED: tl.constexpr, RECORDS: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """The chunks that `todo` wants exactly: each group's products are summed in bf16, which is exact, and the groups in
    float64, in order, as the reference does it. A program takes every so many chunks of a tile, `TOGETHER` queries at a
    time."""
    tile = tl.program_id(0)
    for chunk in range(bound(tl.program_id(1)), bound(chunks), bound(tl.num_programs(1))):
        if tl.load(todo + tile * chunks + chunk) == EXACTLY:
            run, token, tokens = tile_of(tile, tiles_a_run, run_length, QUERIES)
            tokens = tl.minimum(tokens, QUERIES)
            for done in range(0, bound(tokens), TOGETHER):
                _score_some_exactly(
                    q, weights, table, slots, pages, lists, visible, within, scores,
                    token + done, tokens - done, chunk, width, pages_held, listed_most, blocks, stride,
                    HEADS, WIDTH, TOGETHER, KEYS, CHUNK, BLOCK, PER_PAGE, LISTED, RECORDS, PAGED,
                )  # fmt: skip


@triton.jit
def _score_some_exactly(
    q, weights, table, slots, pages, lists, visible, within, scores,
    token, tokens, chunk, width, pages_held, listed_most, blocks, stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, PER_PAGE: tl.constexpr, LISTED: tl.constexpr, RECORDS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    begin, end = keys_to_score(visible, token, tokens, chunk, width, CHUNK, QUERIES)
    slot = 0
    if PAGED:
        slot = tl.load(slots + token)
    row, known = query_rows(token, tokens, HEADS, QUERIES)
    even, _ = weights_of(weights, token, tokens, 0, HEADS, QUERIES)
    odd, _ = weights_of(weights, token, tokens, 1, HEADS, QUERIES)
    for first in range(bound(begin), bound(end), KEYS):
        key = first + tl.arange(0, KEYS)
        there = key < end
        index = listed(key, end, lists, token, listed_most, LISTED)
        number = row_numbers(index, there, slot, pages, pages_held, PER_PAGE)
        products = tl.zeros([KEYS, QUERIES * HEADS], tl.float64)
        for group in tl.static_range(WIDTH // 32):
            values = rounded(group_values(table, number, there, group, RECORDS, WIDTH), tl.bfloat16)
            places = row[:, None] * WIDTH + group * 32 + tl.arange(0, 32)[None, :]
            own = tl.load(q + places, mask=known[:, None], other=0.0)
            part = product(values, own.T, tl.zeros([KEYS, QUERIES * HEADS], tl.float32), "tf32")
            products += part.to(tl.float64)
        low, high = shares_of(products.to(tl.float32), even, odd, KEYS, QUERIES, HEADS, False)
        sums = add_heads(low, high, KEYS, QUERIES, HEADS)
        store_scores(scores, stride, sums, key, end, token, tokens, within, blocks, BLOCK, QUERIES)
