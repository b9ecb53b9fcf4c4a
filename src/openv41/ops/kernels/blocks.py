"""Lists of the blocks of neighbouring positions that are kept."""

import triton
import triton.language as tl

from openv41.ops.kernels.interpreted import bound

WIDE = tl.constexpr(4096)
"""Words of four flags that are counted at a time."""


@triton.jit
def flags_before(flags, end):
    """How many of a row's first `end` flags are set; `end` and the row's place are multiples of four."""
    total, words = 0, flags.to(tl.pointer_type(tl.int32), bitcast=True)
    for first in range(0, bound(end // 4), WIDE):
        place = first + tl.arange(0, WIDE)
        word = tl.load(words + place, mask=place < end // 4, other=0)
        word = (word & 0x00FF00FF) + ((word >> 8) & 0x00FF00FF)
        total += tl.sum((word & 0xFFFF) + (word >> 16), 0)
    return total


@triton.jit
def list_kept(
    within, visible, slots, pages, lists, starts, listed,
    stride, blocks, most, pages_held,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PER_PAGE: tl.constexpr,
):  # fmt: skip
    """The kept blocks of each row in order, `most` at most, and how many visible positions they hold, the newest one
    among them. With `PER_PAGE` also where they start: the row of a block's first record in a table of pages, divided by
    eight.

    Program (i, j) lists what tile j of row i has; it counts what lies before by itself, and the last one has counted
    all of the row."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tile * TILE + tl.arange(0, TILE)
    kept = (tl.load(within + row * stride + block, mask=block < blocks, other=0) != 0).to(tl.int32)
    seen = tl.load(visible + row).to(tl.int32)
    start = block
    if PER_PAGE > 0:
        position = block * BLOCK  # of those past the slot's pages, none is kept
        page = tl.load(pages + tl.load(slots + row) * pages_held + tl.minimum(position // PER_PAGE, pages_held - 1))
        start = page.to(tl.int32) * (PER_PAGE // 8) + position % PER_PAGE // 8
    before = flags_before(within + row * stride, tile * TILE)
    place = before + tl.cumsum(kept, 0) - 1
    mask = (kept != 0) & (place < most)
    tl.store(lists + row * most + place, block, mask=mask)
    if PER_PAGE > 0:
        tl.store(starts + row * most + place, start, mask=mask)
    if tile == tl.num_programs(1) - 1:
        newest = (seen + BLOCK - 1) // BLOCK * BLOCK  # may be visible in part
        total = (before + tl.sum(kept, 0)) * BLOCK
        tl.store(listed + row, tl.maximum(total - (newest - seen), 0).to(tl.int64))
