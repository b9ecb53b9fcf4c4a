"""The `k` best of each row of scores, exactly: by score, and among equals the lower position first.

The k best lie in k blocks, those whose largest scores are best (among equals the lower block): whoever lies in another
block has k better ones before him, one in each. So `coarsen` takes the largest of every `FAN` neighbours, of these
again, and of these, until a row is short; `pick_rows` picks k of the shortest, then k of the `FAN` times k entries
under these, and so on down to the scores. Every score is read once, and no row is harder than another, however many
scores are equal.

A pick out of a few thousand entries is a search: the largest number that at least k of them reach, by thirds of what
it may be. What k blocks' best reach, the k best of their entries reach too: further down the search is shorter.
Scores are compared as integers in the order of their values, 16 bits, plus and minus zero equal; -1 is no score. All
sums are of integers, and picks are written in order of position: nothing depends on which thread comes first.
"""

import triton
import triton.language as tl

from openv41.ops.kernels.interpreted import rounded

FAN = tl.constexpr(8)
"""Entries of which the largest is an entry of the next coarser row: 16 bytes of scores."""

LOWEST = tl.constexpr(0x007F)
"""Minus infinity, ordered."""


@triton.jit
def seen_of(visible, row, width, UNIT: tl.constexpr):
    """Entries of a row, `width` at most: visible positions, or blocks of `UNIT` of them, the last perhaps in part."""
    return tl.minimum((tl.load(visible + row).to(tl.int32) + UNIT - 1) // UNIT, width)


@triton.jit
def coarsen(
    scores, visible, coarse,
    stride, width, coarse_stride, second, third,
    SIZE: tl.constexpr, LEVELS: tl.constexpr, UNIT: tl.constexpr, PIN: tl.constexpr, TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """The largest of every `SIZE` visible scores, bf16; from `second` and `third` on, of every `FAN` of these and of
    those, if there are so many `LEVELS`. With `PIN` the newest visible score's block has plus infinity, so that it is
    always kept. `ALIGNED`: rows are a multiple of `SIZE` long in memory, so that all of a block may be read."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seen = seen_of(visible, row, width, UNIT)
    coarse += row * coarse_stride
    if part * TILE * SIZE < seen:
        block = part * TILE + tl.arange(0, TILE)
        position = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        if ALIGNED:
            known = tl.broadcast_to((block * SIZE < seen)[:, None], position.shape)
        else:
            known = position < seen
        score = tl.load(scores + row * stride + position, mask=known, other=0.0).to(tl.float32)
        best = tl.max(tl.where(position < seen, score, float("-inf")), 1)
        if PIN:
            best = tl.where(block == (seen - 1) // SIZE, float("inf"), best)
        count = (seen + SIZE - 1) // SIZE
        tl.store(coarse + block, rounded(best, tl.bfloat16), mask=block < count)
        if LEVELS > 1:
            best = _store_coarser(coarse + second, best, part, count, TILE)
        if LEVELS > 2:
            _store_coarser(coarse + third, best, part, (count + FAN - 1) // FAN, TILE // FAN)


@triton.jit
def _store_coarser(coarse, best, part, count, TILE: tl.constexpr):
    """The largest of every `FAN` of a tile of a row of `count` entries."""
    best = tl.max(best.reshape(TILE // FAN, FAN), 1)
    block = part * (TILE // FAN) + tl.arange(0, TILE // FAN)
    tl.store(coarse + block, rounded(best, tl.bfloat16), mask=block * FAN < count)
    return best


@triton.jit
def ordered(patterns):
    """bf16 patterns (int16) as int32 in the order of their values: 0 to 0xFFFF."""
    bits = patterns.to(tl.int32) & 0xFFFF
    bits = tl.where(bits == 0x8000, 0, bits)
    return tl.where(bits >= 0x8000, 0xFFFF - bits, bits | 0x8000)


@triton.jit
def kth_largest(values, k, low, high):
    """The k-th largest of ordered scores [blocks, FAN], which lies in `low` to `high`: the largest number that at least
    k of them reach. Each step tries two numbers, and is a loop in the machine's code too: instructions that are run
    once and not again are waited for longer than they take."""
    third = 1
    for _ in range(10):
        third = tl.where(third * 3 <= high - low, third * 3, third)  # 3^10 is less than 2^16, 3^11 more
    for _ in range(11):
        if third > 0:
            both = (values >= low + third).to(tl.int32) + ((values >= low + 2 * third).to(tl.int32) << 16)
            reached = tl.sum(both)
            low += tl.where((reached >> 16) & 0xFFFF >= k, 2 * third, tl.where(reached & 0xFFFF >= k, third, 0))
            third = third // 3
    return low


@triton.jit
def reached_by(values, COUNT: tl.constexpr):
    """What at least `COUNT` of some ordered scores reach: the worst of the best ones of as many parts, any of them."""
    parts = tl.reshape(values, [COUNT, values.numel // COUNT], can_reorder=True)
    return tl.maximum(tl.min(tl.max(parts, 1), 0), 0)


@triton.jit
def pick_in_blocks(entries, block, there, seen, k, low, COUNT: tl.constexpr, ALIGNED: tl.constexpr):
    """The k best entries of some blocks, ascending, of a row of which `seen` entries are known: their numbers and
    values [blocks, FAN], which are picked, each one's place among the picks, and the worst one's value. At least k
    reach `low`; `COUNT`: if that is not known, a power of two from k on, else 0."""
    number = block[:, None] * FAN + tl.arange(0, FAN)[None, :]
    known = there[:, None] & (number < seen)
    if ALIGNED:
        patterns = tl.load(entries + number, mask=tl.broadcast_to(there[:, None], number.shape), other=0)
    else:
        patterns = tl.load(entries + number, mask=known, other=0)
    values = tl.where(known, ordered(patterns), -1)
    if COUNT > 0 and COUNT < values.numel:
        low = reached_by(values, COUNT)
    threshold = kth_largest(values, k, low, tl.max(values))
    above, equal = (values > threshold).to(tl.int32), (values == threshold).to(tl.int32)
    need = k - tl.sum(above)
    both = above + (equal << 16)  # two counts in one sum
    in_block = tl.sum(both, 1)
    before = (tl.cumsum(in_block, 0) - in_block)[:, None] + tl.cumsum(both, 1) - both
    equal_before = before >> 16
    picked = (above != 0) | ((equal != 0) & (equal_before < need))
    return number, values, picked, (before & 0xFFFF) + tl.minimum(equal_before, need), threshold


@triton.jit
def pick_finer(picks, entries, block, there, seen, k, low, COUNT: tl.constexpr, FIRST: tl.constexpr):
    """Pick k entries of a coarse row: the blocks to look into one row further down, [COUNT], which there are, and what
    k entries of them reach, as each has one that is as large as the block's own."""
    few = tl.minimum(seen, k)
    number, _, picked, place, low = pick_in_blocks(entries, block, there, seen, few, low, COUNT if FIRST else 0, True)
    tl.debug_barrier()  # all have read what was picked before
    tl.store(picks + place, number, mask=picked)
    tl.debug_barrier()  # what other threads have picked is read here
    slot = tl.arange(0, COUNT)
    return tl.load(picks + slot, mask=slot < few, other=0), slot < few, tl.where(few < k, 0, low)


@triton.jit
def pick_rows(
    scores, coarse, visible, lists, picks, out, slots, pages, rows,
    stride, width, coarse_stride, second, third, k, out_stride, listed_most, pages_held, rows_stride,
    COUNT: tl.constexpr, TOP: tl.constexpr, LEVELS: tl.constexpr, UNIT: tl.constexpr, MASK: tl.constexpr,
    LISTED: tl.constexpr, ALIGNED: tl.constexpr, PER_PAGE: tl.constexpr,
):  # fmt: skip
    """A row's picks: positions, ascending, -1 behind; or, with `MASK`, a one at each pick whose score is not minus
    infinity (the mask has been cleared before). With `LISTED` position j stands for one of the blocks of so many
    positions that are listed. With `PER_PAGE` also the `rows` of a table of pages in which the positions lie. `COUNT`:
    a power of two from k on; `TOP`: blocks of the shortest row, likewise."""
    row = tl.program_id(0).to(tl.int64)
    coarse += row * coarse_stride
    picks += row * COUNT
    out += row * out_stride
    seen = seen_of(visible, row, width, UNIT)
    seen_1 = (seen + FAN - 1) // FAN
    seen_2 = (seen_1 + FAN - 1) // FAN
    block, low = tl.arange(0, TOP), 0
    if LEVELS == 3:
        seen_3 = (seen_2 + FAN - 1) // FAN
        block, there, low = pick_finer(picks, coarse + third, block, block * FAN < seen_3, seen_3, k, low, COUNT, True)
    if LEVELS >= 2:
        if LEVELS == 2:
            there = block * FAN < seen_2
        block, there, low = pick_finer(picks, coarse + second, block, there, seen_2, k, low, COUNT, LEVELS == 2)
    if LEVELS >= 1:
        if LEVELS == 1:
            there = block * FAN < seen_1
        block, there, low = pick_finer(picks, coarse, block, there, seen_1, k, low, COUNT, LEVELS == 1)
    else:
        there = block * FAN < seen
    count = tl.minimum(seen, k)
    position, values, picked, place, _ = pick_in_blocks(
        scores + row * stride, block, there, seen, count, low, COUNT if LEVELS == 0 else 0, ALIGNED
    )
    picked = picked & (count > 0)
    if MASK:
        tl.store(out + position, (values * 0 + 1).to(tl.uint8), mask=picked & (values > LOWEST))
    else:
        if LEVELS > 0:
            tl.debug_barrier()  # all have read what was picked before
        tl.store(picks + place, position, mask=picked)
        tl.debug_barrier()
        column = tl.arange(0, COUNT)
        known = column < count
        position = tl.load(picks + column, mask=known, other=0)
        if LISTED > 0:
            listed = tl.load(lists + row * listed_most + position // LISTED, mask=known, other=0)
            position = listed * LISTED + position % LISTED
        tl.store(out + column, tl.where(known, position, -1).to(tl.int64), mask=column < k)
        if PER_PAGE > 0:
            slot = tl.load(slots + row)
            page = tl.load(pages + slot * pages_held + position // PER_PAGE, mask=known, other=0)
            place = page * PER_PAGE + position % PER_PAGE
            tl.store(rows + row * rows_stride + column, tl.where(known, place, -1), mask=column < k)
