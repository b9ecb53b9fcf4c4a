"""Lists of the blocks of neighbouring positions that are kept."""

import triton
import triton.language as tl


@triton.jit
def count_kept(within, counts, stride, blocks, WAYS: tl.constexpr, TILE: tl.constexpr):
    """How many blocks of each chunk of a row are kept."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = chunk * TILE + tl.arange(0, TILE)
    kept = tl.load(within + row * stride + block, mask=block < blocks, other=0) != 0
    tl.store(counts + row * WAYS + chunk, tl.sum(kept.to(tl.int32), 0))


@triton.jit
def list_kept(
    within, visible, counts, lists, listed, stride, blocks, most,
    WAYS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kept blocks of each row in order, `most` at most, and how many visible positions they hold."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = chunk * TILE + tl.arange(0, TILE)
    kept = tl.load(within + row * stride + block, mask=block < blocks, other=0) != 0
    way = tl.arange(0, WAYS)
    counted = tl.load(counts + row * WAYS + way)
    base = tl.sum(tl.where(way < chunk, counted, 0), 0)
    place = base + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(lists + row * most + place, block, mask=kept & (place < most))
    total = tl.sum(counted, 0)
    seen = tl.load(visible + row).to(tl.int32)
    last = kept & (place == total - 1)  # the newest block is kept, and may be visible in part
    missing = tl.sum(tl.where(last, tl.maximum((block + 1) * BLOCK - seen, 0), 0), 0)
    if tl.sum(last.to(tl.int32), 0) > 0:
        tl.store(listed + row, (total * BLOCK - missing).to(tl.int64))
    if (total == 0) & (chunk == 0):
        tl.store(listed + row, total.to(tl.int64))
