"""Packed storage, rewind, fork, save, restore: afterwards a slot is what a fresh run of its tokens would have made."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openv41.errors import CacheError, CacheFull
from openv41.formats import INDEX, LATENT, WINDOW
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Cache
from tests.small import readable, small_config, small_model, tokens

CONFIG = small_config()
STORES = ("wide", "packed")
PROGRAMS = int(os.environ.get("OPENV41_PROGRAMS", "80"))


@pytest.fixture(scope="module")
def model() -> Transformer:
    return small_model(CONFIG, choose("cpu", "reference"), 1)


@torch.no_grad()
def fresh(model: Transformer, ids: list[int], store: str = "wide") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of every token, and what is kept, of one run of these tokens."""
    cache = Cache(CONFIG, 1, max(1, len(ids)), store=store)
    slot = cache.open()
    if not ids:
        return torch.zeros(0, CONFIG.vocab_size), readable(cache, slot)
    return model(cache.step([(slot, ids)], "all"), cache).logits, readable(cache, slot)


def assert_stands_as_fresh(model: Transformer, cache: Cache, slot: int, ids: list[int]) -> None:
    assert cache.length(slot) == len(ids)
    for name, rows in fresh(model, ids)[1].items():
        assert torch.equal(readable(cache, slot)[name], rows), name


def test_records_have_the_published_sizes() -> None:
    released = 512, 512, 128
    assert [form.record_bytes(n) for form, n in zip((WINDOW, LATENT, INDEX), released, strict=True)] == [528, 288, 68]


@pytest.mark.parametrize("ops", ["reference", "cpu"])
@torch.no_grad()
def test_packed_and_wide_give_the_same_bits(ops: str, seed: int) -> None:
    model = small_model(CONFIG, choose("cpu", ops), seed)
    ids = tokens(CONFIG, 48, seed)
    results = []
    for store in STORES:
        cache = Cache(CONFIG, 1, 48, slack=2, store=store)
        slot = cache.open()
        cut = ids.split([21, 9, 1, 1, 2, 3, 5, 1, 1, 1, 1, 1, 1])
        logits = torch.cat([model(cache.step([(slot, part)], "all"), cache).logits for part in cut])
        results.append((logits, readable(cache, slot)))
    (wide, kept), (packed, records) = results
    assert torch.equal(wide, packed)
    assert all(torch.equal(kept[name], records[name]) for name in kept)


def test_packed_storage_of_the_released_model_is_890_bytes_a_token() -> None:
    config = small_config().released()
    per_token = sum(
        form.record_bytes(width) / config.compress_ratios[layer]
        for layer in config.kv_source_layers
        for form, width in ((LATENT, config.head_dim), (INDEX, config.index_head_dim))
    )
    assert per_token == 890
    small = {store: Cache(CONFIG, 2, 256, store=store).nbytes() for store in STORES}
    rows = 2 * CONFIG.window_size * CONFIG.n_layers
    assert small["packed"]["window"] == rows * WINDOW.record_bytes(CONFIG.head_dim)
    assert small["wide"]["window"] == rows * CONFIG.head_dim * 2


@pytest.mark.parametrize("store", STORES)
@torch.no_grad()
def test_rewind_restores_every_kind_of_state(store: str, model: Transformer, seed: int) -> None:
    """At odd and even lengths, at the ring's wrap, at page and block borders, and several times in a row."""
    ids, wrong = tokens(CONFIG, 70, seed).tolist(), tokens(CONFIG, 70, seed + 1).tolist()
    cache = Cache(CONFIG, 1, 80, slack=3, store=store)
    slot, now = cache.open(), 0
    for length in (3, 4, 5, 8, 9, 62, 63, 64, 65):
        model(cache.step([(slot, ids[now:length])]), cache)
        now = length
        model(cache.step([(slot, wrong[:3])]), cache)
        cache.rewind(slot, length + 2)
        cache.rewind(slot, length)
        with pytest.raises(CacheError, match=f"can go back to {length} at most"):
            cache.rewind(slot, length - 1)  # the rejected tokens have taken those rows
        assert_stands_as_fresh(model, cache, slot, ids[:length])


@pytest.mark.parametrize("store", STORES)
@torch.no_grad()
def test_a_fork_shares_full_pages_and_goes_its_own_way(store: str, model: Transformer, seed: int) -> None:
    ids, others = tokens(CONFIG, 140, seed).tolist(), tokens(CONFIG, 40, seed + 1).tolist()
    cache = Cache(CONFIG, 3, 300, store=store)
    slot = cache.open()
    model(cache.step([(slot, ids[:101])]), cache)
    twin = cache.fork(slot)
    assert cache.pages.held[twin] == cache.pages.held[slot]
    model(cache.step([(slot, ids[101:]), (twin, others)]), cache)
    assert cache.pages.held[twin][0] == cache.pages.held[slot][0]
    assert not set(cache.pages.held[twin][1:]) & set(cache.pages.held[slot][1:])
    assert_stands_as_fresh(model, cache, slot, ids)
    assert_stands_as_fresh(model, cache, twin, ids[:101] + others)
    cache.close(slot)
    assert_stands_as_fresh(model, cache, twin, ids[:101] + others)
    cache.close(twin)
    assert len(cache.pages.free) == cache.pages.count and not any(cache.pages.users)


@pytest.mark.parametrize("store", STORES)
@torch.no_grad()
def test_a_slot_survives_a_file_at_any_position(store: str, model: Transformer, tmp_path: Path, seed: int) -> None:
    ids = tokens(CONFIG, 75, seed).tolist()
    for length in (1, 2, 7, 64, 65):  # with an open group and without
        cache = Cache(CONFIG, 1, 80, slack=2, store=store)
        slot = cache.open()
        model(cache.step([(slot, ids[:length])]), cache)
        cache.save(slot, tmp_path / "slot")
        assert [path.name for path in tmp_path.iterdir()] == ["slot"]
        other = Cache(CONFIG, 2, 160, slack=2, store=store)
        other.open()
        restored = other.restore(tmp_path / "slot")
        assert_stands_as_fresh(model, other, restored, ids[:length])
        more = [
            model(one.step([(place, ids[length : length + 5])], "all"), one).logits
            for one, place in ((cache, slot), (other, restored))
        ]
        assert torch.equal(*more)


@torch.no_grad()
def test_a_foreign_truncated_or_corrupt_file_is_refused(model: Transformer, tmp_path: Path, seed: int) -> None:
    cache = Cache(CONFIG, 2, 64)
    slot = cache.open()
    model(cache.step([(slot, tokens(CONFIG, 9, seed))]), cache)
    path = tmp_path / "slot"
    cache.save(slot, path)
    good = path.read_bytes()
    cases = {
        "cannot read": [good[: len(good) // 2], b"", b"not a file of tensors"],
        "damaged": [good[:-1] + bytes([good[-1] ^ 1])],
    }
    for complaint, contents in cases.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(CacheError, match=complaint):
                cache.restore(path)
    path.write_bytes(good)
    for foreign in (Cache(CONFIG, 1, 64, store="packed"), Cache(small_config(hc_sinkhorn_iters=3), 1, 64)):
        with pytest.raises(CacheError, match="no slot for this cache"):
            foreign.restore(path)
        assert foreign.lengths == [None]
    with pytest.raises(CacheError, match="cannot read"):
        cache.restore(tmp_path / "missing")
    with pytest.raises(CacheError, match="cannot write"):
        cache.save(slot, tmp_path / "missing" / "slot")
    assert cache.restore(path) == 1


class Program:
    """A random interleaving of verbs over a few slots, beside what each slot's tokens and logits should be."""

    def __init__(self, model: Transformer, data: st.DataObject, folder: Path) -> None:
        self.model, self.data, self.folder = model, data, folder
        self.cache = Cache(CONFIG, 3, 260, slack=3, store=data.draw(st.sampled_from(STORES)))
        self.ids: dict[int, list[int]] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}

    def run(self) -> None:
        self.open()
        for _ in range(self.data.draw(st.integers(3, 9))):
            verbs = [self.extend, self.extend, self.decode, self.rewind, self.fork, self.save, self.close, self.open]
            self.data.draw(st.sampled_from(verbs))()
        for slot in self.ids:
            expected, _ = fresh(self.model, self.ids[slot])
            assert torch.equal(torch.stack(self.logits[slot]) if self.ids[slot] else expected, expected)
            assert_stands_as_fresh(self.model, self.cache, slot, self.ids[slot])

    def any_slot(self) -> int | None:
        return self.data.draw(st.sampled_from(sorted(self.ids))) if self.ids else None

    def open(self) -> None:
        if len(self.ids) < self.cache.slots:
            self.take(self.cache.open(), [], [])

    def take(self, slot: int, ids: list[int], logits: list[torch.Tensor]) -> None:
        self.ids[slot], self.logits[slot] = list(ids), list(logits)

    def extend(self, longest: int = 70) -> None:
        draw = self.data.draw
        slots = draw(st.lists(st.sampled_from(sorted(self.ids)), unique=True, min_size=1)) if self.ids else []
        counts = st.one_of(st.integers(1, 6), st.integers(1, longest)) if longest > 1 else st.just(1)
        parts = [(slot, tokens(CONFIG, draw(counts), draw(st.integers(0, 99))).tolist()) for slot in slots]
        if not parts:
            return
        before = (list(self.cache.lengths), len(self.cache.pages.free))
        try:
            logits = self.model(self.cache.step(parts, "all"), self.cache).logits
        except CacheFull:
            assert (list(self.cache.lengths), len(self.cache.pages.free)) == before
            return
        for (slot, ids), some in zip(parts, logits.split([len(ids) for _, ids in parts]), strict=True):
            self.ids[slot] += ids
            self.logits[slot] += some.unbind()

    def decode(self) -> None:
        self.extend(longest=1)

    def rewind(self) -> None:
        slot = self.any_slot()
        if slot is None:
            return
        lowest = max(0, self.cache.highest[slot] - self.cache.slack)
        length = self.data.draw(st.integers(lowest, len(self.ids[slot])))
        self.cache.rewind(slot, length)
        del self.ids[slot][length:], self.logits[slot][length:]

    def fork(self) -> None:
        slot = self.any_slot()
        if slot is not None and len(self.ids) < self.cache.slots:
            self.take(self.cache.fork(slot), self.ids[slot], self.logits[slot])

    def save(self) -> None:
        """Through a file and back, into whichever slot is free."""
        slot = self.any_slot()
        if slot is None:
            return
        self.cache.save(slot, self.folder / "slot")
        ids, logits = self.ids.pop(slot), self.logits.pop(slot)
        self.cache.close(slot)
        self.take(self.cache.restore(self.folder / "slot"), ids, logits)

    def close(self) -> None:
        slot = self.any_slot()
        if slot is not None:
            self.cache.close(slot)
            del self.ids[slot], self.logits[slot]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@settings(max_examples=PROGRAMS, deadline=None)
@given(data=st.data())
@torch.no_grad()
def test_any_program_of_verbs_leaves_every_slot_as_a_fresh_run(
    model: Transformer, folder: Path, data: st.DataObject
) -> None:
    """OPENV41_PROGRAMS=2000 runs more of them."""
    Program(model, data, folder).run()
