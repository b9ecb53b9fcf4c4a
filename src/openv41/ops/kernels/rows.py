"""Rows on their way into and out of the tables: pooled, normed, rotated, quantised, stored, decoded.

A row of width `d` is held as pairs, `a` its even entries and `b` its odd ones [rows, d / 2]: rotation turns pairs, and
two codes of four bits share a byte. Sums are taken by halves, as `ops.exact` takes them, and divisions and roots are
the correctly rounded ones, so that with contraction off every result equals the reference's to the bit.
"""

import triton
import triton.language as tl

from openv41.ops.kernels import bits
from openv41.ops.kernels.interpreted import rounded


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sums [ROWS] of x [ROWS, WIDTH]: first half plus second half, until one is left. WIDTH is a power of two."""
    if WIDTH == 1:
        return tl.reshape(x, (ROWS,))
    else:
        return tree_sum(tl.sum(tl.reshape(x, (ROWS, 2, WIDTH // 2)), 1), ROWS, WIDTH // 2)


@triton.jit
def inverse_rms(squares, width, eps):
    """1 / root mean square from the sum of squares: root and quotient each rounded."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, width) + eps))


@triton.jit
def load_pairs(x, first, wanted, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Even and odd entries, in float32, of the rows of width 2 * HALF that start at `first` [ROWS]."""
    place = tl.arange(0, 2 * HALF)
    row = tl.load(x + first[:, None] + place[None, :], mask=wanted[:, None], other=0.0).to(tl.float32)
    return tl.split(tl.reshape(row, (ROWS, HALF, 2)))


@triton.jit
def store_pairs(out, first, a, b, wanted, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Entries a and b in turn, to the rows that start at `first` [ROWS]. Types have been settled before."""
    place = tl.arange(0, 2 * HALF)
    row = tl.reshape(tl.join(a, b), (ROWS, 2 * HALF))
    tl.store(out + first[:, None] + place[None, :], row, mask=wanted[:, None])


@triton.jit
def norm_pairs(a, b, weight, eps, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Rows over their root mean square, times the weight, rounded to bf16; float32 in and out."""
    squares = tree_sum(a * a, ROWS, HALF) + tree_sum(b * b, ROWS, HALF)
    factor = inverse_rms(squares, 2.0 * HALF, eps)[:, None]
    pair = 2 * tl.arange(0, HALF)
    even, odd = tl.load(weight + pair).to(tl.float32), tl.load(weight + pair + 1).to(tl.float32)
    a = rounded(a * factor * even[None, :], tl.bfloat16).to(tl.float32)
    b = rounded(b * factor * odd[None, :], tl.bfloat16).to(tl.float32)
    return a, b


@triton.jit
def turn_pairs(a, b, cos, sin, token, HALF: tl.constexpr, TURNED: tl.constexpr, INVERSE: tl.constexpr):
    """The last TURNED pairs turned by their token's angles and rounded to bf16; float32 in and out."""
    pair = tl.arange(0, HALF) - (HALF - TURNED)
    angle = token[:, None] * TURNED + pair[None, :]
    in_tail = (pair >= 0)[None, :]
    c = tl.load(cos + angle, mask=in_tail, other=1.0)
    s = tl.load(sin + angle, mask=in_tail, other=0.0)
    if INVERSE:
        s = -s
    real = rounded(a * c - b * s, tl.bfloat16).to(tl.float32)
    imaginary = rounded(a * s + b * c, tl.bfloat16).to(tl.float32)
    return tl.where(in_tail, real, a), tl.where(in_tail, imaginary, b)  # the head as it is, its zeros' signs too


@triton.jit
def pair_scales(a, b, FORM: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Codes [ROWS, HALF / PAIRS] of the scales of blocks of PAIRS pairs."""
    size = tl.reshape(tl.maximum(tl.abs(a), tl.abs(b)), (ROWS, HALF // PAIRS, PAIRS))
    return bits.scale_code(tl.max(size, 2), FORM)


@triton.jit
def spread(x, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EACH: tl.constexpr):
    """x [ROWS, BLOCKS], each repeated EACH times [ROWS, BLOCKS * EACH]."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, BLOCKS, EACH)), (ROWS, BLOCKS * EACH))


@triton.jit
def put_rows(
    table, target, wanted, a, b,
    FORM: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Quantise rows to FORM and write them to rows `target` [ROWS] (int64) of a table: PACKED, as records of bytes,
    else as bf16."""
    if FORM == bits.NONE:
        store_pairs(table, target * (2 * HALF), rounded(a, tl.bfloat16), rounded(b, tl.bfloat16), wanted, ROWS, HALF)
    else:
        blocks: tl.constexpr = 2 * HALF // BLOCK
        scale = pair_scales(a, b, FORM, ROWS, HALF, BLOCK // 2)
        each = spread(scale, ROWS, blocks, BLOCK // 2)
        even, odd = bits.value_code(a, each, FORM), bits.value_code(b, each, FORM)
        if PACKED:
            code_bytes: tl.constexpr = 2 * HALF if FORM == bits.WINDOW else HALF
            first = target * (code_bytes + blocks)
            if FORM == bits.WINDOW:
                store_pairs(table, first, even.to(tl.uint8), odd.to(tl.uint8), wanted, ROWS, HALF)
            else:
                both = (even | (odd << 4)).to(tl.uint8)
                tl.store(table + first[:, None] + tl.arange(0, HALF)[None, :], both, mask=wanted[:, None])
            place = first[:, None] + code_bytes + tl.arange(0, blocks)[None, :]
            tl.store(table + place, scale.to(tl.uint8), mask=wanted[:, None])
        else:
            a = rounded(bits.code_value(even, each, FORM), tl.bfloat16)
            b = rounded(bits.code_value(odd, each, FORM), tl.bfloat16)
            store_pairs(table, target * (2 * HALF), a, b, wanted, ROWS, HALF)


@triton.jit
def targets_of(rows, row, wanted, LISTED: tl.constexpr):
    """Table rows that the rows go to, and which of them go anywhere."""
    if LISTED:
        target = tl.load(rows + row, mask=wanted, other=-1)
        return target, target >= 0
    else:
        return row, wanted


@triton.jit
def store_tile(
    x, weight, cos, sin, rows, table, normed, row, count, stride, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr, INVERSE: tl.constexpr,
    NORM: tl.constexpr, KEEP: tl.constexpr, FORM: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
    LISTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows `row` [ROWS] of x, `stride` apart: normed (KEEP: and written to `normed`), rotated, quantised, stored. HEADS
    neighbouring rows have one token's angles."""
    wanted = row < count
    a, b = load_pairs(x, row * stride, wanted, ROWS, HALF)
    if NORM:
        a, b = norm_pairs(a, b, weight, eps, ROWS, HALF)
    if KEEP:
        even, odd = rounded(a, tl.bfloat16), rounded(b, tl.bfloat16)
        store_pairs(normed, row * (2 * HALF), even, odd, wanted, ROWS, HALF)
    if TURNED > 0:
        token = tl.minimum(row, count - 1) // HEADS
        a, b = turn_pairs(a, b, cos, sin, token, HALF, TURNED, INVERSE)
    target, goes = targets_of(rows, row, wanted, LISTED)
    put_rows(table, target, goes, a, b, FORM, PACKED, BLOCK, ROWS, HALF)


@triton.jit
def rotate_store_kernel(
    x, weight, cos, sin, rows, table, normed, count, stride, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr, INVERSE: tl.constexpr,
    NORM: tl.constexpr, KEEP: tl.constexpr, FORM: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
    LISTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program: see `store_tile`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    store_tile(
        x, weight, cos, sin, rows, table, normed, row, count, stride, eps,
        HEADS, HALF, TURNED, INVERSE, NORM, KEEP, FORM, PACKED, BLOCK, LISTED, ROWS,
    )  # fmt: skip


@triton.jit
def exp_of(x):
    """e^x of float32 by way of float64, rounded once: the polynomial of `ops.exact`, in its order."""
    x = tl.minimum(tl.maximum(x.to(tl.float64), -700.0), 700.0)
    shift: tl.constexpr = 6755399441055744.0  # 1.5 * 2^52: beside it float64 keeps whole numbers only
    k = (x * 1.4426950408889634 + shift) - shift
    r = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10  # ln 2 in two parts
    total = tl.full(x.shape, 1.0 / 6227020800, tl.float64)  # 1 / 13!
    total = total * r + 1.0 / 479001600
    total = total * r + 1.0 / 39916800
    total = total * r + 1.0 / 3628800
    total = total * r + 1.0 / 362880
    total = total * r + 1.0 / 40320
    total = total * r + 1.0 / 5040
    total = total * r + 1.0 / 720
    total = total * r + 1.0 / 120
    total = total * r + 1.0 / 24
    total = total * r + 1.0 / 6
    total = total * r + 0.5
    total = total * r + 1.0
    total = total * r + 1.0
    power = ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return (total * power).to(tl.float32)


@triton.jit
def pool_two(old, new, old_gate, new_gate):
    """Two tokens' kv, weighted by the softmax of their gates, channel by channel; rounded to bf16."""
    best = tl.maximum(old_gate, new_gate)
    first, second = exp_of(old_gate - best), exp_of(new_gate - best)
    total = first + second
    pooled = tl.div_rn(first, total) * old + tl.div_rn(second, total) * new
    return rounded(pooled, tl.bfloat16).to(tl.float32)


@triton.jit
def pool_store_kernel(
    kv, gate, members, weight, cos, sin, rows, table, latents, count, kv_stride, gate_stride, eps,
    HALF: tl.constexpr, TURNED: tl.constexpr, FORM: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
    STORE: tl.constexpr, LISTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Groups of two tokens, rows `members` [groups, 2] of kv and gate: pooled, normed, written to `latents`; STORE: and
    rotated, quantised, stored. A group whose first member is -1 is none: zeros are written to `latents`, and nothing is
    stored."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    wanted = group < count
    old = tl.load(members + 2 * group, mask=wanted, other=-1)
    new = tl.load(members + 2 * group + 1, mask=wanted, other=-1)
    known = (old >= 0) & (new >= 0)
    old_a, old_b = load_pairs(kv, old * kv_stride, known, ROWS, HALF)
    new_a, new_b = load_pairs(kv, new * kv_stride, known, ROWS, HALF)
    old_gate_a, old_gate_b = load_pairs(gate, old * gate_stride, known, ROWS, HALF)
    new_gate_a, new_gate_b = load_pairs(gate, new * gate_stride, known, ROWS, HALF)
    a = pool_two(old_a, new_a, old_gate_a, new_gate_a)
    b = pool_two(old_b, new_b, old_gate_b, new_gate_b)
    a, b = norm_pairs(a, b, weight, eps, ROWS, HALF)
    even, odd = rounded(a, tl.bfloat16), rounded(b, tl.bfloat16)
    store_pairs(latents, group * (2 * HALF), even, odd, wanted, ROWS, HALF)
    if STORE:
        a, b = turn_pairs(a, b, cos, sin, tl.minimum(group, count - 1), HALF, TURNED, False)
        target, goes = targets_of(rows, group, wanted, LISTED)
        put_rows(table, target, goes & known, a, b, FORM, PACKED, BLOCK, ROWS, HALF)


@triton.jit
def turn_kernel(
    x, cos, sin, out, count,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The last 2 * TURNED entries of rows of WIDTH, turned; nothing else is read or written. `out` may be x."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    wanted = row < count
    first = row * WIDTH + (WIDTH - 2 * TURNED)
    a, b = load_pairs(x, first, wanted, ROWS, TURNED)
    a, b = turn_pairs(a, b, cos, sin, tl.minimum(row, count - 1) // HEADS, TURNED, TURNED, INVERSE)
    store_pairs(out, first, rounded(a, tl.bfloat16), rounded(b, tl.bfloat16), wanted, ROWS, TURNED)


# Norms of any width


@triton.jit
def fold(x, COUNT: tl.constexpr, SPACE: tl.constexpr):
    """The sum of x [SPACE], zero from COUNT on, by halves: an odd count is made even by a zero at its end."""
    if COUNT == 1:
        return tl.sum(x, 0)
    else:
        half: tl.constexpr = (COUNT + 1) // 2
        place = tl.arange(0, SPACE)
        other = tl.sum(tl.where(place[:, None] + half == place[None, :], x[None, :], 0.0), 1)
        return fold(tl.where(place < half, x + other, 0.0), half, SPACE)


@triton.jit
def norm_row(
    x, weight, out, rounded_out, row, stride, eps,
    POWER: tl.constexpr, ODD: tl.constexpr, SPACE: tl.constexpr, BLOCKS: tl.constexpr,
    KEEP: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """A row of width POWER * ODD (ODD odd), over its root mean square, times the weight. KEEP: to `out`; ROUND: rounded
    to fp8 in blocks of 32, as a quantised linear map rounds what it is given, to `rounded_out`. SPACE >= ODD and
    32 * BLOCKS >= width are powers of two."""
    width: tl.constexpr = POWER * ODD
    rest = tl.arange(0, SPACE)
    spaced = tl.arange(0, POWER)[None, :] * ODD + rest[:, None]  # halving a width brings these together last
    known = (rest < ODD)[:, None]
    parts = tl.load(x + row * stride + spaced, mask=known, other=0.0).to(tl.float32)
    factor = inverse_rms(fold(tree_sum(parts * parts, SPACE, POWER), ODD, SPACE), 1.0 * width, eps)
    place = tl.arange(0, BLOCKS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = place < width
    y = tl.load(x + row * stride + place, mask=inside, other=0.0).to(tl.float32) * factor
    y = rounded(y * tl.load(weight + place, mask=inside, other=0.0).to(tl.float32), tl.bfloat16)
    if KEEP:
        tl.store(out + row * width + place, y, mask=inside)
    if ROUND:
        tl.store(rounded_out + row * width + place, round_blocks(y.to(tl.float32)), mask=inside)


@triton.jit
def rms_norm_kernel(
    x, weight, out, rounded_out, stride, eps,
    POWER: tl.constexpr, ODD: tl.constexpr, SPACE: tl.constexpr, BLOCKS: tl.constexpr,
    KEEP: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """A row a program: see `norm_row`."""
    row = tl.program_id(0).to(tl.int64)
    norm_row(x, weight, out, rounded_out, row, stride, eps, POWER, ODD, SPACE, BLOCKS, KEEP, ROUND)


@triton.jit
def query_window_kernel(
    y, q_weight, kv_weight, cos, sin, rows, table, queries, count, stride, eps,
    POWER: tl.constexpr, ODD: tl.constexpr, SPACE: tl.constexpr, BLOCKS: tl.constexpr,
    HALF: tl.constexpr, TURNED: tl.constexpr, FORM: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """What follows an attention layer's first products, y [n, low rank, then kv]. Programs (i, 0) norm and round row
    i's low-rank vector, programs (i, 1) norm, rotate, quantise and store its kv."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        norm_row(y, q_weight, y, queries, row, stride, eps, POWER, ODD, SPACE, BLOCKS, False, True)
    else:
        own = row + tl.arange(0, 1)
        store_tile(
            y + POWER * ODD, kv_weight, cos, sin, rows, table, y, own, count, stride, eps,
            1, HALF, TURNED, False, True, False, FORM, PACKED, BLOCK, LISTED, 1,
        )  # fmt: skip


@triton.jit
def round_blocks(x):
    """x [blocks, 32] in float32: bf16 of what comes back after storing it in fp8, a power-of-two scale each block."""
    scale = bits.scale_code(tl.max(tl.abs(x), 1), bits.WINDOW)[:, None]
    return rounded(bits.code_value(bits.value_code(x, scale, bits.WINDOW), scale, bits.WINDOW), tl.bfloat16)


@triton.jit
def round_kernel(x, out, blocks, BLOCKS: tl.constexpr):
    """`round_blocks` of a whole tensor, BLOCKS blocks a program."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    place = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    wanted = (block < blocks)[:, None]
    y = round_blocks(tl.load(x + place, mask=wanted, other=0.0).to(tl.float32))
    tl.store(out + place, y, mask=wanted)


# Reading


@triton.jit
def words_of(records, row, wanted, RECORD: tl.constexpr, WORDS: tl.constexpr):
    """The first WORDS 32-bit words of records [rows, RECORD bytes]; byte by byte where records are no whole words."""
    place = tl.arange(0, WORDS)[None, :]
    if RECORD % 4 == 0:
        words = records.to(tl.pointer_type(tl.int32)) + row[:, None] * (RECORD // 4) + place
        return tl.load(words, mask=wanted[:, None], other=0)
    else:
        first = records + row[:, None] * RECORD + 4 * place
        word = tl.load(first, mask=wanted[:, None], other=0).to(tl.int32)
        for byte in tl.static_range(1, 4):
            word |= tl.load(first + byte, mask=wanted[:, None], other=0).to(tl.int32) << (8 * byte)
        return word


@triton.jit
def e4m3_of_words(word, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """The four values in each word [ROWS, WORDS], in order [ROWS, 4 * WORDS], float32."""
    low = tl.join(bits.e4m3_value(word), bits.e4m3_value(word >> 16))
    high = tl.join(bits.e4m3_value(word >> 8), bits.e4m3_value(word >> 24))
    return tl.reshape(tl.join(low, high), (ROWS, 4 * WORDS))


@triton.jit
def e2m1_of_words(word, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """The eight values in each word [ROWS, WORDS], in order [ROWS, 8 * WORDS], float32."""
    a = tl.join(bits.e2m1_value(word), bits.e2m1_value(word >> 16))
    b = tl.join(bits.e2m1_value(word >> 4), bits.e2m1_value(word >> 20))
    c = tl.join(bits.e2m1_value(word >> 8), bits.e2m1_value(word >> 24))
    d = tl.join(bits.e2m1_value(word >> 12), bits.e2m1_value(word >> 28))
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, 8 * WORDS))


@triton.jit
def decode_kernel(
    records, pages, out, count, per_page,
    FORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RECORD: tl.constexpr,
    PAGED: tl.constexpr, COMPACT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Records to bf16 rows. PAGED: `count` rows of the pages listed; COMPACT: written side by side, else each to its
    own row number. ROWS divides `per_page`, or pages are not asked for."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    wanted = number < count
    row = number
    if PAGED:
        page = tl.load(pages + number // per_page, mask=wanted, other=-1)
        row = page * per_page + number % per_page
        wanted = wanted & (page >= 0)
    if FORM == bits.WINDOW:
        values = e4m3_of_words(words_of(records, row, wanted, RECORD, WIDTH // 4), ROWS, WIDTH // 4)
    else:
        values = e2m1_of_words(words_of(records, row, wanted, RECORD, WIDTH // 8), ROWS, WIDTH // 8)
    blocks: tl.constexpr = WIDTH // BLOCK
    place = row[:, None] * RECORD + (RECORD - blocks) + tl.arange(0, blocks)[None, :]
    scale = bits.scale_value(tl.load(records + place, mask=wanted[:, None], other=0), FORM)
    values = rounded(values * spread(scale, ROWS, blocks, BLOCK), tl.bfloat16)
    target = row
    if COMPACT:
        target = number
    tl.store(out + target[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], values, mask=wanted[:, None])
