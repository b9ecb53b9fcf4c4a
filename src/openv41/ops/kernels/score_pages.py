"""Index scores of single tokens for Hopper: whole pages of 68-byte records come by copies of 16 bytes, in order.

Arithmetic, rounding and bounds are those of `score.score_records`: one product for each group of 32 channels. What
differs is how records come. Read one by one, a record's 17 words lie across lines of memory, and each 4-byte copy
of a warp takes ten turns at the first-level cache. Here a half, 64 records, is a run of 4,352 bytes (or eight runs of
544, where blocks of eight positions are listed), copied as it lies into shared memory. There it is read as 64 rows of
17 words: a layout of rows of 16 words with one word of padding.

The rows of a matrix product are any order of the 64 records. They are numbered so that a warp's 32 reads fall into 32
banks, and so that the two records of which a thread holds scores are neighbours (`record_of`).

    step i   wait for pair i | copy pair i + STAGES - 1 | locate the next | each half: decode, products, sums, scores
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openv41.ops.kernels.index_grid import ROUND_PAIR
from openv41.ops.kernels.score import (
    EXACTLY,
    GROUP_LENGTH,
    HALF_BYTES,
    OCTAVES_MOST,
    SUM_MOST,
    WEIGHT_LEAST,
    WEIGHT_MOST,
)

WIDTH = gl.constexpr(128)
"""Channels of a key."""
WORDS = gl.constexpr(17)
"""32-bit words of a record: 16 of eight e2m1 codes, and one of four e8m0 scales."""
HALF = gl.constexpr(64)
"""Records of a half: what one matrix instruction of four warps takes."""
PAIR = gl.constexpr(2 * HALF)
MOST = gl.constexpr(512)
REST = gl.constexpr(32)
"""Copies of 16 bytes of a pair: four of each thread, and of a warp's one more."""
SLOT = gl.constexpr(4096)
"""Words of a slot: 2,176 of a pair, and what makes it a power of two."""
PIECE = gl.constexpr(16)
"""The ring is kept in pieces of so many words, so that a view can begin at any of them."""

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
BY_COPIES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
CODES = gl.constexpr(
    gl.PaddedSharedLayout(
        [[64, 4]], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [8, 0], [16, 0], [1, 0], [2, 0], [4, 0], [32, 0]],
        [], [64, 64],
    )
)  # fmt: skip
"""A half as bytes of codes, [64 rows, 64]: records 1, 2, 4, 8, 16, 32 are rows 8, 16, 1, 2, 4, 32 (`record_of`)."""
SCALES = gl.constexpr(
    gl.PaddedSharedLayout(
        [[16, 1]], [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [16, 0], [1, 0], [2, 0], [4, 0], [32, 0]], [], [64, 16]
    )
)  # fmt: skip
"""A half from its 16th word on: each row begins with a word of scales."""
ALL_SCALES = gl.constexpr(
    gl.PaddedSharedLayout(
        [[16, 1]], [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0], [64, 0]], [],
        [128, 16],
    )
)  # fmt: skip
"""A pair from its 16th word on, records in order."""

COPY = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
GROUP = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
"""Bytes of a group, [64, 16]: a thread holds four of rows r and r + 8, as the left operand of a product has them."""
OWN_SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 1]
    )
)  # fmt: skip
"""The same rows' words of scales, [64, 1]."""
EACH = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))
"""A word of scales of each of 128 records."""
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
KEPT = gl.constexpr(gl.NVMMASharedLayout(32, 8, rank=2))


@gluon.constexpr_function
def products_of(heads):
    """The layout of products [64, heads]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, heads, 32])


@gluon.jit
def record_of(row):
    """The record of a row of a half."""
    return ((row & 7) << 2) | ((row >> 3) & 3) | (row & 32)


@gluon.jit
def head_of(column):
    """The head of a column, as in `index_grid.head_of_column`."""
    return (column & -8) | ((column & 1) << 2) | ((column >> 1) & 3)


@gluon.jit
def usual_size(weight):
    size = gl.where(weight == 0.0, 1.0, gl.abs(weight))
    return gl.min(((size >= WEIGHT_LEAST) & (size <= WEIGHT_MOST)).to(gl.int32), 0)


@gluon.jit
def weights_of(weights, units, token, HEADS: gl.constexpr):
    """Weights times units of the queries, of an even and the next odd column in one word; and whether all are zero or
    of a usual size."""
    row = token * HEADS + head_of(gl.arange(0, HEADS // 2, layout=LINE) * 2)
    even, odd = gl.load(weights + row).to(gl.float32), gl.load(weights + row + 4).to(gl.float32)
    usual = gl.minimum(usual_size(even), usual_size(odd))
    even, odd = even * gl.load(units + row), odd * gl.load(units + row + 4)
    both = (even.to(gl.uint32, bitcast=True) >> 16) | (odd.to(gl.uint32, bitcast=True) & 0xFFFF0000)
    return both.to(gl.int32, bitcast=True), usual


@gluon.jit
def group_of_query(codes):
    """Channels of a group as products take them: the even ones, then the odd ones."""
    return codes.reshape([codes.shape[0], 16, 2]).permute((0, 2, 1)).reshape([codes.shape[0], 32])


@gluon.jit
def load_query(q, queries, token, HEADS: gl.constexpr):
    """A token's codes to shared memory, [4 groups, HEADS, 32], heads in the order of columns."""
    head = head_of(gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERY)))
    own = q + (token * HEADS + head)[:, None] * WIDTH + gl.arange(0, 32, layout=gl.SliceLayout(0, QUERY))[None, :]
    a, b, c, d = gl.load(own), gl.load(own + 32), gl.load(own + 64), gl.load(own + 96)
    queries.index(0).store(group_of_query(a))
    queries.index(1).store(group_of_query(b))
    queries.index(2).store(group_of_query(c))
    queries.index(3).store(group_of_query(d))


@gluon.jit
def start_of(slot, position, end, pages, pages_held, PER_PAGE: gl.constexpr):
    """The row of a position's record, divided by eight; of the last position's page, where it is past the end."""
    page = gl.load(pages + slot * pages_held + gl.minimum(position, end - 1) // PER_PAGE).to(gl.int32)
    return page * (PER_PAGE // 8) + position % PER_PAGE // 8


@gluon.jit
def locate(
    first, end, slot, token, pages, starts, pages_held, listed_most,
    PER_PAGE: gl.constexpr, LISTED: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """Where the records of 128 positions from `first` on lie, of any other ones where they are past the end: rows,
    divided by eight, of the two halves, or of the run of each copy."""
    if RUN == 64:
        early = start_of(slot, first, end, pages, pages_held, PER_PAGE)
        return early, start_of(slot, first + HALF, end, pages, pages_held, PER_PAGE)
    else:
        position = first + gl.arange(0, MOST, layout=gl.SliceLayout(1, COPY)) // (RUN * WORDS // 4) * 8
        last = first + (gl.arange(0, REST, layout=gl.SliceLayout(1, COPY)) + MOST) // (RUN * WORDS // 4) * 8
        if LISTED:
            row = starts + gl.cast(token, gl.int64) * listed_most
            return gl.load(row + gl.minimum(position, end - 1) // 8), gl.load(row + gl.minimum(last, end - 1) // 8)
        else:
            most = start_of(slot, position, end, pages, pages_held, PER_PAGE)
            return most, start_of(slot, last, end, pages, pages_held, PER_PAGE)


@gluon.jit
def copy_pair(ring, number, words, early, late, RUN: gl.constexpr):
    """Start copies of records, 16 bytes each, to a slot of the ring; from where `locate` says."""
    column = gl.arange(0, 4, layout=gl.SliceLayout(0, COPY))
    copy = gl.arange(0, MOST, layout=gl.SliceLayout(1, COPY))
    last = gl.arange(0, REST, layout=gl.SliceLayout(1, COPY)) + MOST
    run: gl.constexpr = RUN * WORDS // 4  # copies of records that lie side by side
    start = early
    if RUN == 64:
        start = gl.where(copy < run, early, late)
    slot = ring.index(SLOT // PIECE * number)
    source = words + (start.to(gl.int64) * (8 * WORDS) + copy % run * 4)[:, None] + column[None, :]
    async_copy.async_copy_global_to_shared(slot._reinterpret(gl.int32, [MOST, 4], BY_COPIES), source)
    slot = ring.index(SLOT // PIECE * number + 4 * MOST // PIECE)
    source = words + (late.to(gl.int64) * (8 * WORDS) + last % run * 4)[:, None] + column[None, :]
    async_copy.async_copy_global_to_shared(slot._reinterpret(gl.int32, [REST, 4], BY_COPIES), source)


@gluon.jit
def out_of_reach(scales, most):
    """As `score.out_of_reach`."""
    length = gl.zeros_like(scales).to(gl.float32)
    low = gl.full_like(scales, 127 + OCTAVES_MOST)
    for group in gl.static_range(4):
        exponent = (scales >> (8 * group)) & 0xFF
        factor = (exponent << 23).to(gl.float32, bitcast=True)
        length += factor * factor
        low = gl.minimum(low, gl.where(exponent <= 1, 127 + OCTAVES_MOST, exponent))
    unit = (low << 23).to(gl.float32, bitcast=True)
    far = (low < 127 - OCTAVES_MOST) | (length >= 4.0 * 4.0**OCTAVES_MOST)
    return (length * GROUP_LENGTH >= most * unit * unit) | far


@gluon.jit
def beyond_of(ring, number, first, end, most):
    """Which of a pair's records are out of reach, [128]."""
    view = ring.index(SLOT // PIECE * number + 1)._reinterpret(gl.int32, [PAIR, 16], ALL_SCALES)
    scales = gl.convert_layout(view.slice(0, 1, dim=1).load(EACH).reshape([PAIR]), LINE)
    known = first + gl.arange(0, PAIR, layout=LINE) < end
    return (known & out_of_reach(scales, most)).to(gl.int32)


@gluon.jit
def operand(half, group, LAYOUT: gl.constexpr):
    """e4m3 codes [64, 32] of a group of a half: its even channels, then its odd ones."""
    pairs = half._reinterpret(gl.uint8, [HALF, 64], CODES).slice(16 * group, 16, dim=1).load(GROUP)
    low, high = gl.inline_asm_elementwise(
        HALF_BYTES, "=r,=r,r", [pairs], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )
    codes = gl.join(low, high).permute((0, 2, 1)).reshape([HALF, 32]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(codes, LAYOUT)


@gluon.jit
def add_halves(x, COUNT: gl.constexpr, LEFT: gl.constexpr):
    """First half plus second half of the last dimension, which has `COUNT`, until `LEFT` are left."""
    if COUNT > LEFT:
        x = gl.sum(x.reshape([HALF, 2, COUNT // 2]), 1)
        return add_halves(x, COUNT // 2, LEFT)
    else:
        return x


@gluon.jit
def pairs_of_columns(products, HEADS: gl.constexpr):
    return gl.split(products.reshape([HALF, HEADS // 2, 2]))


@gluon.jit
def sum_of_heads(products, both, HEADS: gl.constexpr):
    """Sums [64] of the heads' shares, in the reference's order (see `index_grid.add_heads`)."""
    low, high = pairs_of_columns(products, HEADS)
    both = both[None, :] + gl.zeros_like(low).to(gl.int32)
    low, high = gl.inline_asm_elementwise(
        ROUND_PAIR, "=f,=f,f,f,r", [low, high, both], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    x = add_halves(low, HEADS // 2, 4) + add_halves(high, HEADS // 2, 4)
    return add_halves(x, 4, 1).reshape([HALF])


@gluon.jit
def factor_of(scales, group: gl.constexpr):
    """2 to the exponents of a group's scales."""
    return (((scales >> (8 * group)) & 0xFF) << 23).to(gl.float32, bitcast=True)[:, None]


@gluon.jit
def score_half(half, scales, queries, HEADS: gl.constexpr):
    """q . key of 64 records and all heads, [64, HEADS], times 2^-6."""
    PRODUCTS: gl.constexpr = products_of(HEADS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 4)
    zero = gl.zeros([HALF, HEADS], gl.float32, PRODUCTS)
    a, b = operand(half, 0, OPERAND), operand(half, 1, OPERAND)
    p = warpgroup_mma(a, queries.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    q = warpgroup_mma(b, queries.index(1).permute((1, 0)), zero, use_acc=False, is_async=True)
    c, d = operand(half, 2, OPERAND), operand(half, 3, OPERAND)
    r = warpgroup_mma(c, queries.index(2).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(d, queries.index(3).permute((1, 0)), zero, use_acc=False, is_async=True)
    p, q, r, s = warpgroup_mma_wait(0, deps=[p, q, r, s])
    return p * factor_of(scales, 0) + q * factor_of(scales, 1) + r * factor_of(scales, 2) + s * factor_of(scales, 3)


@gluon.jit
def store_half(scores, sums, first, end, within, BLOCK: gl.constexpr):
    """Write the scores of a half; with `BLOCK`, minus infinity outside the candidate blocks."""
    key = first + record_of(gl.arange(0, HALF, layout=sums.type.layout))
    if BLOCK > 0:
        inside = gl.load(within + key // BLOCK, mask=key < end, other=0)
        sums = gl.where(inside != 0, sums, float("-inf"))
    gl.store(scores + key, sums.to(gl.bfloat16), mask=key < end)


@gluon.jit
def score_pages(
    q, q_units, q_norms, weights, words, slots, pages, starts, visible, within, scores, todo,
    width, pages_held, listed_most, blocks, stride,
    HEADS: gl.constexpr, CHUNK: gl.constexpr, BLOCK: gl.constexpr, PER_PAGE: gl.constexpr, LISTED: gl.constexpr,
    RUN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of one token against a chunk of its slot's keys, as `score.score_records`: with `LISTED`, score j is that
    of the j-th position of blocks of eight, whose rows, divided by eight, `starts` lists. `RUN`: how many records lie
    side by side, 64 or 8."""
    token, part = gl.program_id(0), gl.program_id(1)
    begin = part * CHUNK
    end = gl.minimum(gl.minimum(begin + CHUNK, gl.load(visible + token).to(gl.int32)), width)
    left = 0
    if begin < end:
        PRODUCTS: gl.constexpr = products_of(HEADS)
        ring = gl.allocate_shared_memory(gl.int32, [STAGES * SLOT // PIECE, PIECE], FLAT)
        queries = gl.allocate_shared_memory(gl.float8e4nv, [4, HEADS, 32], KEPT)
        slot = gl.load(slots + token)
        early, late = locate(begin, end, slot, token, pages, starts, pages_held, listed_most, PER_PAGE, LISTED, RUN)
        for pair in gl.static_range(STAGES - 1):
            copy_pair(ring, pair, words, early, late, RUN)
            async_copy.commit_group()
            early, late = locate(
                begin + (pair + 1) * PAIR, end, slot, token, pages, starts, pages_held, listed_most,
                PER_PAGE, LISTED, RUN,
            )  # fmt: skip
        load_query(q, queries, token, HEADS)
        fence_async_shared()  # products read what was stored; the wait for the first pair is the barrier behind it
        both, usual = weights_of(weights, q_units, token, HEADS)
        norm = gl.load(q_norms + token * HEADS + gl.arange(0, HEADS, layout=LINE))
        norm = gl.maximum(gl.max(norm, 0), 1.0)
        most = SUM_MOST / norm
        low, _ = pairs_of_columns(gl.zeros([HALF, HEADS], gl.float32, PRODUCTS), HEADS)
        both = gl.convert_layout(both, gl.SliceLayout(0, low.type.layout))
        scores += gl.cast(token, gl.int64) * stride
        if BLOCK > 0:
            within += gl.cast(token, gl.int64) * blocks
        beyond = gl.zeros([PAIR], gl.int32, LINE)
        for pair in range(0, (end - begin + PAIR - 1) // PAIR):
            async_copy.wait_group(STAGES - 2)
            ahead = pair + STAGES - 1
            if begin + ahead * PAIR < end:
                copy_pair(ring, ahead % STAGES, words, early, late, RUN)
                early, late = locate(  # for the next step: nothing waits for it
                    begin + (ahead + 1) * PAIR, end, slot, token, pages, starts, pages_held, listed_most,
                    PER_PAGE, LISTED, RUN,
                )  # fmt: skip
            async_copy.commit_group()
            here = pair % STAGES
            beyond = beyond | beyond_of(ring, here, begin + pair * PAIR, end, most)
            for half in gl.static_range(2):
                first = begin + pair * PAIR + half * HALF
                place = SLOT // PIECE * here + HALF * WORDS // PIECE * half
                scales = ring.index(place + 1)._reinterpret(gl.int32, [HALF, 16], SCALES).slice(0, 1, dim=1)
                scales = gl.convert_layout(scales.load(OWN_SCALES).reshape([HALF]), gl.SliceLayout(1, PRODUCTS))
                products = score_half(ring.index(place), scales, queries, HEADS)
                sums = sum_of_heads(products, both, HEADS) * 64.0  # codes hold the values times 2^-6
                store_half(scores, sums, first, end, within, BLOCK)
        async_copy.wait_group(0)
        left = gl.max(beyond, 0)
        if norm == float("inf"):
            left = 1
        if usual == 0:
            left = 1
    gl.store(todo + token * gl.num_programs(1) + part, left * EXACTLY)
