"""What was never written is never read: caches and fresh memory full of rubbish change no bit.

Rows of a ring before it is full, pages that a slot has just taken, the room behind a list's last pick, scratch of any
operation: none of it may reach a result, in whatever order sequences, drafts and rejected tokens come.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Cache
from tests.drafts import DRAFTING
from tests.small import small_config, small_model, tokens


@contextmanager
def rubbish_in_fresh_memory() -> Iterator[None]:
    """Memory that torch hands out unset holds NaN, or the largest integer."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def spoil(cache: Cache) -> None:
    """NaN in every table, also as codes and scales of records; in the tail of ids, an id that no sequence has."""
    for ring in cache.rings().values():
        rubbish = 95 if ring is cache.tail else 0xFF if ring.packed else torch.nan
        ring.table.fill_(rubbish)
    for source in cache.sources.values():
        for table in (source.latents.table, source.keys.table):
            table.fill_(0xFF if table.dtype == torch.uint8 else torch.nan)


def run(model: Transformer, cache: Cache, seed: int) -> list[Tensor]:
    """Prompts of 1, 5 and 10 tokens; then each of them two rounds of a draft, of which some tokens are rejected.
    The first slot holds nothing: its row 0 is what a place without a row would read."""
    slots = [cache.open() for _ in range(4)][1:]
    prompts = [tokens(model.config, length, seed + length) for length in (1, 5, 10)]
    step = cache.step(list(zip(slots, prompts, strict=True)), "all")
    results = []
    for turn in range(3):
        output = model(step, cache)
        assert model.mtp is not None
        model.mtp.remember(output.taps, output.tapped, cache)
        if turn:
            for slot in slots:
                cache.rewind(slot, cache.length(slot) - (slot + turn) % 3)
        proposal = model.mtp.greedy(torch.arange(3) + turn, slots, cache)
        results += [output.logits, *proposal]
        step = cache.step([(slot, proposal.ids[row, :3]) for row, slot in enumerate(slots)], "all")
    return results


@pytest.mark.parametrize(
    ("ops", "store"),
    [("reference", "packed"), ("fast", "wide"), ("fast", "packed"), ("cpu", "wide"), ("cpu", "packed")],
)
@torch.no_grad()
def test_rubbish_changes_no_bit(ops: str, store: str, seed: int) -> None:
    config = small_config(**DRAFTING)
    model = small_model(config, choose("cpu", ops), seed)
    clean, spoilt = (Cache(config, 4, 256, slack=3, store=store, draft=True) for _ in range(2))
    expected = run(model, clean, seed)
    spoil(spoilt)
    with rubbish_in_fresh_memory():
        got = run(model, spoilt, seed)
    assert all(values.isfinite().all() for values in expected)
    assert len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
