"""The `k` best of each row of scores, exactly: by score, and among equals the lower position first.

The k best lie in k blocks, those whose largest scores are best (among equals the lower block): whoever lies in another
block has k better ones before him, one in each. So `coarsen` takes the largest of every `FAN` neighbours, of these
again, and of these, until a row is short; `pick_rows` picks k of the shortest, then k of the `FAN` times k entries
under these, and so on down to the scores. Every score is read once, and no row is harder than another, however many
scores are equal.

A pick out of a few thousand entries is a bisection: the largest number that at least k of them reach, bit by bit.
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
def kth_largest(values, k):
    """The k-th largest of ordered scores [blocks, FAN]: the largest number that at least k of them reach."""
    best = 0
    for step in tl.static_range(16):
        trial = best | (1 << (15 - step))
        best = tl.where(tl.sum((values >= trial).to(tl.int32)) >= k, trial, best)
    return best


@triton.jit
def pick_in_blocks(entries, block, there, seen, k, ALIGNED: tl.constexpr):
    """The k best entries of some blocks, ascending, of a row of which `seen` entries are known: their numbers and
    values [blocks, FAN], which are picked, and each one's place among the picks."""
    number = block[:, None] * FAN + tl.arange(0, FAN)[None, :]
    known = there[:, None] & (number < seen)
    if ALIGNED:
        patterns = tl.load(entries + number, mask=tl.broadcast_to(there[:, None], number.shape), other=0)
    else:
        patterns = tl.load(entries + number, mask=known, other=0)
    values = tl.where(known, ordered(patterns), -1)
    threshold = kth_largest(values, k)
    above, equal = (values > threshold).to(tl.int32), (values == threshold).to(tl.int32)
    need = k - tl.sum(above)
    both = above + (equal << 16)  # two counts in one sum
    in_block = tl.sum(both, 1)
    before = (tl.cumsum(in_block, 0) - in_block)[:, None] + tl.cumsum(both, 1) - both
    equal_before = before >> 16
    picked = (above != 0) | ((equal != 0) & (equal_before < need))
    return number, values, picked, (before & 0xFFFF) + tl.minimum(equal_before, need)


@triton.jit
def pick_finer(picks, entries, block, there, seen, k, COUNT: tl.constexpr):
    """Pick k entries of a coarse row: the blocks to look into one row further down, [COUNT], and which there are."""
    k = tl.minimum(seen, k)
    number, _, picked, place = pick_in_blocks(entries, block, there, seen, k, True)
    tl.store(picks + place, number, mask=picked)
    tl.debug_barrier()  # what other threads have picked is read here
    slot = tl.arange(0, COUNT)
    return tl.load(picks + slot, mask=slot < k, other=0), slot < k


@triton.jit
def pick_rows(
    scores, coarse, visible, lists, picks, out,
    stride, width, coarse_stride, second, third, k, out_stride, listed_most,
    COUNT: tl.constexpr, TOP: tl.constexpr, LEVELS: tl.constexpr, UNIT: tl.constexpr, MASK: tl.constexpr,
    LISTED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A row's picks: positions, ascending, -1 behind; or, with `MASK`, a one at each pick whose score is not minus
    infinity (the mask has been cleared before). With `LISTED` position j stands for one of the blocks of so many
    positions that are listed. `COUNT`: a power of two from k on; `TOP`: blocks of the shortest row, likewise."""
    row = tl.program_id(0).to(tl.int64)
    coarse += row * coarse_stride
    picks += row * COUNT
    out += row * out_stride
    seen = seen_of(visible, row, width, UNIT)
    seen_1 = (seen + FAN - 1) // FAN
    seen_2 = (seen_1 + FAN - 1) // FAN
    block = tl.arange(0, TOP)
    if LEVELS == 3:
        seen_3 = (seen_2 + FAN - 1) // FAN
        block, there = pick_finer(picks, coarse + third, block, block * FAN < seen_3, seen_3, k, COUNT)
    if LEVELS >= 2:
        if LEVELS == 2:
            there = block * FAN < seen_2
        block, there = pick_finer(picks, coarse + second, block, there, seen_2, k, COUNT)
    if LEVELS >= 1:
        if LEVELS == 1:
            there = block * FAN < seen_1
        block, there = pick_finer(picks, coarse, block, there, seen_1, k, COUNT)
    else:
        there = block * FAN < seen
    count = tl.minimum(seen, k)
    position, values, picked, place = pick_in_blocks(scores + row * stride, block, there, seen, count, ALIGNED)
    picked = picked & (count > 0)
    if MASK:
        tl.store(out + position, (values * 0 + 1).to(tl.uint8), mask=picked & (values > LOWEST))
    else:
        if LISTED > 0:
            listed = tl.load(lists + row * listed_most + position // LISTED, mask=picked, other=0)
            position = listed * LISTED + position % LISTED
        tl.store(out + place, position.to(tl.int64), mask=picked)
        column = tl.arange(0, COUNT)
        tl.store(out + column, tl.full([COUNT], -1, tl.int64), mask=(column >= count) & (column < k))
