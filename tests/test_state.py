"""Step, rings, pages and cache: row numbers against what a dictionary of the past says. No model runs here."""

import random

import pytest
import torch
from torch import Tensor

from openv41.config import Config
from openv41.errors import CacheError, CacheFull, InputError, OpenV41Error
from openv41.state import Cache, Groups, Paged, Pages, Ring, Sight, Step
from tests.small import small_config

CONFIG = small_config()


def step_of(*parts: tuple[int, int, int]) -> Step:
    """A step of (slot, start, length) parts."""
    return Step.pack([(slot, start, list(range(length))) for slot, start, length in parts])


# Step


def test_a_step_packs_runs_one_behind_another() -> None:
    step = Step.pack([(2, 5, [7, 8, 9]), (0, 0, torch.tensor([4])), (1, 63, [1, 2])])
    assert step.ids.tolist() == [7, 8, 9, 4, 1, 2]
    assert step.slot.tolist() == [2, 2, 2, 0, 1, 1]
    assert step.position.tolist() == [5, 6, 7, 0, 63, 64]
    assert step.start.tolist() == [5, 5, 5, 0, 63, 63]
    assert [(r.slot, r.start, r.length, r.first, r.end) for r in step.runs] == [
        (2, 5, 3, 0, 8), (0, 0, 1, 3, 1), (1, 63, 2, 4, 65)
    ]  # fmt: skip
    assert len(step) == 6 and step.longest == 3 and not step.image.any()
    assert {x.dtype for x in (step.ids, step.slot, step.position, step.start, step.wanted)} == {torch.int64}


@pytest.mark.parametrize("wanted, rows", [("last", [2, 3, 5]), ("all", [0, 1, 2, 3, 4, 5]), ("none", [])])
def test_wanted_rows(wanted: str, rows: list[int]) -> None:
    assert Step.pack([(2, 5, [7, 8, 9]), (0, 0, [4]), (1, 63, [1, 2])], wanted).wanted.tolist() == rows


def test_a_piece_of_a_prompt_that_goes_on_wants_no_last_token() -> None:
    step = Step.pack([(0, 0, [1, 2]), (1, 4, [3, 4])], prompts={0: 9, 1: 6})
    assert step.wanted.tolist() == [3]


@pytest.mark.parametrize(
    "parts, complaint",
    [
        ([], "at least one part"),
        ([(0, 0, [])], "at least one token"),
        ([(0, 0, torch.zeros(2, 2, dtype=torch.int64))], r"\(2, 2\)"),
        ([(0, -1, [1])], "got -1"),
        ([(0, 0, [3]), (1, 0, [1, -1, 2])], "id must be 0 or more, got -1"),
        ([(3, 0, [1]), (1, 0, [1]), (3, 1, [1])], "slot 3 has two parts"),
    ],
)
def test_parts_that_make_no_step_are_refused(parts: list, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Step.pack(parts)


def test_a_step_is_frozen() -> None:
    with pytest.raises(AttributeError):
        step_of((0, 0, 1)).runs = ()


@pytest.mark.parametrize("width", [1, 2, 4, 128])
def test_a_window_is_the_token_and_those_before_it_oldest_first(width: int) -> None:
    step = step_of((0, 0, 7), (1, 126, 5), (2, 3, 1))
    window = step.window(width)
    assert window.shape == (13, width)
    for position, row in zip(step.position.tolist(), window.tolist(), strict=True):
        seen = list(range(max(0, position - width + 1), position + 1))
        assert row == seen + [-1] * (width - len(seen))


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_groups_are_those_whose_last_token_is_in_the_step(ratio: int) -> None:
    """Runs that start and end inside a group, at odd and even places (sglang#38848, HF/12)."""
    for start in range(5):
        for length in range(1, 6):
            step = step_of((4, 9, 2), (1, start, length))
            groups = step.groups(ratio)
            expected = [
                (slot, p // ratio, list(range(p - ratio + 1, p + 1)), row)
                for row, (slot, p) in enumerate(zip(step.slot.tolist(), step.position.tolist(), strict=True))
                if p % ratio == ratio - 1
            ]
            found = (groups.slot.tolist(), groups.index.tolist(), groups.position.tolist(), groups.token.tolist())
            assert list(zip(*found, strict=True)) == expected
            assert groups.position.shape == (len(expected), ratio)


@pytest.mark.parametrize("ratio", [1, 2])
def test_a_position_is_visible_once_its_whole_group_is(ratio: int) -> None:
    step = step_of((0, 0, 40))
    for t, visible in enumerate(step.visible(ratio).tolist()):
        assert visible == sum((j + 1) * ratio <= t + 1 for j in range(50))


def test_a_runs_pieces_cover_it() -> None:
    step = step_of((0, 0, 3), (1, 5, 7))
    for size in (1, 3, 7, 100):
        rows = [row for piece in step.runs[1].pieces(size) for row in range(piece.start, piece.stop)]
        assert rows == list(range(3, 10))


# Rings


class Past:
    """What was pushed, by slot and position, and a ring that should give it back."""

    def __init__(self, slots: int, window: int, slack: int, joined: bool) -> None:
        self.window, self.slack, self.joined = window, slack, joined
        self.ring = Ring(slots, window + slack, 2, torch.float64, "cpu")
        self.ring.table.fill_(torch.nan)  # what was never written must never be read
        self.values: dict[tuple[int, int], float] = {}
        self.length, self.highest = [0] * slots, [0] * slots

    def push(self, lengths: dict[int, int], rng: random.Random) -> list[list[float]]:
        """Push runs of these lengths; the values that each token's window reads."""
        step = step_of(*((slot, self.length[slot], count) for slot, count in lengths.items()))
        own = torch.tensor([[rng.random(), 0.0] for _ in range(len(step))], dtype=torch.float64)
        for slot, position, value in zip(step.slot.tolist(), step.position.tolist(), own[:, 0].tolist(), strict=True):
            self.values[slot, position] = value
        table, rows = self.ring.push(step, own.requires_grad_(self.joined), self.window - 1)
        for run in step.runs:
            self.length[run.slot] = run.end
            self.highest[run.slot] = max(self.highest[run.slot], run.end)
        table, positions = table.detach(), step.window(self.window)
        numbers = rows(positions)
        assert torch.equal(numbers < 0, positions < 0)
        read = [[float(table[i, 0]) for i in row if i >= 0] for row in numbers.tolist()]
        expected = [
            [self.values[slot, p] for p in row if p >= 0]
            for slot, row in zip(step.slot.tolist(), positions.tolist(), strict=True)
        ]
        assert read == expected
        return read

    def rewind(self, slot: int, count: int) -> None:
        self.length[slot] = max(0, self.highest[slot] - self.slack, self.length[slot] - count)


@pytest.mark.parametrize("slack", [0, 3])
def test_both_ways_through_a_ring_read_the_same_past(slack: int, seed: int) -> None:
    """Runs of 1 to twice the ring over three slots, wraps and rewinds; the same program by way of the joined table."""
    for program in range(12):
        rng = random.Random(f"{seed} {program}")
        window = rng.choice([1, 2, 4, 5])
        short, joined = (Past(3, window, slack, joined) for joined in (False, True))
        for _ in range(25):
            slots = rng.sample(range(3), rng.randint(1, 3))
            lengths = {slot: rng.choice([1, 1, 2, rng.randint(1, 2 * (window + slack))]) for slot in slots}
            draw = rng.random()
            reads = [past.push(lengths, random.Random(draw)) for past in (short, joined)]
            assert reads[0] == reads[1]
            if rng.random() < 0.5:
                slot, count = rng.randrange(3), rng.randint(1, 3)
                for past in (short, joined):
                    past.rewind(slot, count)
            for slot in range(3):  # and what both hold, from the oldest that a later call may need
                held = range(max(0, short.length[slot] - window + 1), short.length[slot])
                for past in (short, joined):
                    assert past.ring.rows_of(slot, held)[:, 0].tolist() == [past.values[slot, p] for p in held]


def test_a_short_run_is_read_from_the_ring_and_a_long_one_from_a_joined_table() -> None:
    ring = Ring(2, 7, 1, torch.float32, "cpu")  # window 4, slack 3
    for start, length, from_ring in ((0, 4, True), (4, 1, True), (5, 5, False), (10, 4, True)):
        table, _ = ring.push(step_of((1, start, length)), torch.ones(length, 1), 3)
        assert (table.data_ptr() == ring.table.data_ptr()) == from_ring
        assert table.shape[0] == (14 if from_ring else 3 + length)


def test_without_slack_a_window_of_one_token_at_a_time_is_read_from_the_ring() -> None:
    ring = Ring(1, 4, 1, torch.float32, "cpu")
    for start, length, from_ring in ((0, 1, True), (1, 2, False), (3, 1, True)):
        table, _ = ring.push(step_of((0, start, length)), torch.ones(length, 1), 3)
        assert (table.data_ptr() == ring.table.data_ptr()) == from_ring


def test_gradients_flow_through_a_steps_own_rows_and_not_into_the_ring() -> None:
    ring = Ring(1, 6, 1, torch.float64, "cpu")
    ring.push(step_of((0, 0, 3)), torch.ones(3, 1, dtype=torch.float64), 3)
    own = torch.full((2, 1), 5.0, dtype=torch.float64, requires_grad=True)
    step = step_of((0, 3, 2))
    table, rows = ring.push(step, own, 3)
    table[rows(step.window(4))].sum().backward()
    assert own.grad is not None and own.grad.flatten().tolist() == [2.0, 1.0]
    assert not ring.table.requires_grad and ring.rows_of(0, range(5)).flatten().tolist() == [1, 1, 1, 5, 5]


def test_a_push_writes_its_own_slots_only() -> None:
    ring = Ring(3, 4, 1, torch.float32, "cpu")
    ring.table.fill_(-7)
    for length in (1, 3, 9):
        ring.push(step_of((1, 0, length)), torch.ones(length, 1), 3)
        assert (ring.table[[0, 2]] == -7).all()


def test_rows_put_into_a_ring_stand_at_the_latest_positions() -> None:
    ring = Ring(2, 5, 1, torch.float32, "cpu")
    ring.put(1, 13, torch.arange(9.0, 13.0).unsqueeze(1))
    assert ring.rows_of(1, range(9, 13)).flatten().tolist() == [9, 10, 11, 12]
    assert not ring.table[0].any()


# Pages


def test_pages_are_taken_one_by_one_as_a_sequence_grows() -> None:
    pages = Pages(5, 64, 2, "cpu")
    held = []
    for end in range(1, 200):
        assert pages.reserve([(0, end - 1, end)]) == []
        held.append(len(pages.held[0]))
    assert held == [-(-end // 64) for end in range(1, 200)]
    assert len(set(pages.held[0])) == 4 and len(pages.free) == 1
    assert pages.numbers[0].tolist() == pages.held[0] + [-1] and (pages.numbers[1] == -1).all()


def test_full_pages_are_said_before_anything_is_taken() -> None:
    pages = Pages(4, 64, 3, "cpu")
    pages.reserve([(0, 0, 65)])
    before = (list(pages.free), [list(held) for held in pages.held], pages.numbers.clone())
    with pytest.raises(CacheFull, match="needs 3 more pages of 64 tokens, 2 of 4 are free"):
        pages.reserve([(1, 0, 64), (2, 0, 65)])
    assert (pages.free, pages.held) == before[:2] and torch.equal(pages.numbers, before[2])
    pages.reserve([(1, 0, 64), (2, 0, 64)])
    assert pages.free == [] and issubclass(CacheFull, CacheError) and issubclass(CacheError, OpenV41Error)


def test_released_pages_are_free_again_and_no_longer_named() -> None:
    pages = Pages(6, 64, 2, "cpu")
    for _ in range(20):
        pages.reserve([(0, 0, 130), (1, 0, 100)])
        pages.release(0)
        pages.reserve([(1, 100, 192)])
        pages.release(1)
        assert sorted(pages.free) == list(range(6)) and not any(pages.users) and (pages.numbers == -1).all()


def fill(table: Paged, slot: int, first: int, values: Tensor) -> None:
    index = torch.arange(first, first + values.shape[0])
    place = torch.full_like(index, slot)
    table.write(Groups(place, index, index.unsqueeze(1), index), values)


@pytest.mark.parametrize("ratio", [1, 2])
def test_first_positions_are_the_same_from_scattered_pages(ratio: int, rng: torch.Generator) -> None:
    """Two slots take pages in turn; a third one's are released in between."""
    pages = Pages(12, 8, 4, "cpu")
    table = Paged(pages, ratio, 3, torch.float32, "cpu")
    per_page = 8 // ratio
    assert table.per_page == per_page and table.table.shape == (12 * per_page, 3)
    values = {slot: torch.randn(4 * per_page, 3, generator=rng) for slot in (0, 1, 3)}
    pages.reserve([(2, 0, 8)])
    pages.reserve([(3, 0, 32)])
    fill(table, 3, 0, values[3])
    for page in range(4):
        if page == 2:
            pages.release(2)
        for slot in (0, 1):
            pages.reserve([(slot, page * 8, page * 8 + 8)])
            fill(table, slot, page * per_page, values[slot][page * per_page : (page + 1) * per_page])
    side_by_side = [held == list(range(held[0], held[0] + 4)) for held in (pages.held[slot] for slot in (0, 1, 3))]
    assert side_by_side == [False, False, True]
    for slot, expected in values.items():
        for count in range(4 * per_page + 1):
            assert torch.equal(table.first(slot, count), expected[:count])
        index = torch.tensor([[0, -1, per_page], [3 * per_page, 1, -1]])
        rows = table.rows(torch.tensor([slot, slot]), index)
        assert torch.equal(rows < 0, index < 0)
        assert torch.equal(table.table[rows[index >= 0]], expected[index[index >= 0]])
    shared = table.first(3, 2 * per_page)
    assert shared.data_ptr() == table.table[pages.held[3][0] * per_page :].data_ptr()


def test_rows_of_two_slots_never_meet(rng: torch.Generator) -> None:
    pages = Pages(9, 8, 3, "cpu")
    table = Paged(pages, 2, 1, torch.float32, "cpu")
    for length in (8, 16, 24):
        pages.reserve([(slot, length - 8, length) for slot in range(3)])
    every = table.rows(torch.arange(3), torch.arange(12).expand(3, 12))
    assert every.unique().tolist() == list(range(36))


def test_nothing_written_is_nothing_read() -> None:
    table = Paged(Pages(2, 8, 1, "cpu"), 2, 3, torch.float32, "cpu")
    assert table.first(0, 0).shape == (0, 3)
    table.write(step_of((0, 0, 1)).groups(2), torch.zeros(0, 3))
    assert not table.table.any()


# Cache


def run(cache: Cache, *parts: tuple[int, int]) -> Step:
    """Admit and extend (slot, length) parts, as a model would."""
    step = cache.step([(slot, list(range(length))) for slot, length in parts])
    cache.admit(step)
    cache.extend(step)
    return step


def tensors(cache: Cache) -> list[Tensor]:
    tables = [ring.table for ring in cache.windows.values()] + [cache.tail.table, cache.pages.numbers]
    for source in cache.sources.values():
        tables += [source.latents.table, source.keys.table]
        tables += [] if source.group is None else [source.group.table]
    return tables


def test_a_slot_is_opened_grows_and_is_closed() -> None:
    cache = Cache(CONFIG, 2, 128)
    first, second = cache.open(), cache.open()
    assert (first, second) == (0, 1) and cache.length(0) == 0
    with pytest.raises(CacheFull, match="all 2 slots are in use"):
        cache.open()
    assert run(cache, (1, 5), (0, 3)).position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert run(cache, (0, 2)).position.tolist() == [3, 4]
    assert (cache.length(0), cache.length(1)) == (5, 5)
    cache.close(0)
    assert cache.open() == 0 and cache.length(0) == 0 and cache.length(1) == 5


@pytest.mark.parametrize("slot", [1, 5, -1])
def test_a_slot_that_is_not_open_is_refused_by_every_verb(slot: int) -> None:
    cache = Cache(CONFIG, 3, 128)
    cache.open()
    verbs = (
        lambda: cache.length(slot),
        lambda: cache.close(slot),
        lambda: cache.rewind(slot, 0),
        lambda: cache.view("window", 0, slot),
        lambda: cache.step([(slot, [1])]),
        lambda: cache.admit(step_of((slot, 0, 1))),
        lambda: cache.fork(slot),
    )
    for verb in verbs:
        with pytest.raises(CacheError, match=rf"slot {slot} is not open: open slots are \[0\]"):
            verb()
    cache.close(0)
    with pytest.raises(CacheError, match="slot 0 is not open"):
        cache.close(0)


@pytest.mark.parametrize("changes", [{"slots": 0}, {"slack": -1}, {"tokens": 0}])
def test_a_cache_of_nothing_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(CacheError, match=f"{next(iter(changes))}={next(iter(changes.values()))}"):
        Cache(CONFIG, **changes)


def test_a_step_must_continue_its_slots() -> None:
    cache = Cache(CONFIG, 2, 256)
    cache.open(), cache.open()
    run(cache, (0, 5))
    free = list(cache.pages.free)
    for start in (0, 4, 6):
        with pytest.raises(CacheError, match=f"continues slot 0 at position {start}, which stands at 5"):
            cache.admit(step_of((1, 0, 100), (0, start, 1)))
    assert cache.pages.free == free and cache.lengths == [5, 0]


def test_a_step_must_not_leave_the_context() -> None:
    context = CONFIG.context
    cache = Cache(CONFIG, 1, 2 * context)
    slot = cache.open()
    with pytest.raises(CacheError, match=f"would hold {context + 1} tokens, the context is {context}"):
        cache.admit(step_of((slot, 0, context + 1)))
    assert cache.pages.held[slot] == []
    run(cache, (slot, context))
    with pytest.raises(CacheError, match=f"the context is {context}"):
        cache.admit(cache.step([(slot, [1])]))


def test_a_cache_that_is_full_says_so_before_anything_changes() -> None:
    cache = Cache(CONFIG, 2, 128)
    cache.open(), cache.open()
    run(cache, (0, 100))
    for table in tensors(cache)[:-1]:
        table.fill_(9)
    kept = [table.clone() for table in tensors(cache)]
    count, free = cache.pages.count, len(cache.pages.free)
    with pytest.raises(CacheFull, match=f"needs 7 more pages of 64 tokens, {free} of {count} are free"):
        cache.admit(cache.step([(1, list(range(6 * 64 + 1)))]))
    assert all(torch.equal(a, b) for a, b in zip(kept, tensors(cache), strict=True))
    assert cache.lengths == [100, 0] and len(cache.pages.free) == free


def test_long_short_long_takes_no_more_memory() -> None:
    cache = Cache(CONFIG, 2, 512)
    places = [table.data_ptr() for table in tensors(cache)]
    size = cache.nbytes()
    for length in (500, 3, 500, 64, 511):
        slot = cache.open()
        run(cache, (slot, length))
        assert len(cache.pages.held[slot]) == -(-length // 64)
        cache.close(slot)
        assert len(cache.pages.free) == cache.pages.count
    assert cache.nbytes() == size and [table.data_ptr() for table in tensors(cache)] == places


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_a_rewind_reaches_as_far_as_the_slack(slack: int) -> None:
    cache = Cache(CONFIG, 1, 256, slack=slack)
    slot = cache.open()
    run(cache, (slot, 20))
    with pytest.raises(CacheError, match=f"holds 20 tokens .* back to {20 - slack} at most, not to {19 - slack}"):
        cache.rewind(slot, 19 - slack)
    with pytest.raises(CacheError, match="not to 21"):
        cache.rewind(slot, 21)
    cache.rewind(slot, 20)
    cache.rewind(slot, 20 - slack)
    assert cache.length(slot) == 20 - slack
    assert run(cache, (slot, 1)).position.tolist() == [20 - slack]


def test_rewinds_do_not_add_up_beyond_the_slack() -> None:
    """The rows of rejected tokens have overwritten what an earlier position would need."""
    cache = Cache(CONFIG, 1, 256, slack=3)
    slot = cache.open()
    run(cache, (slot, 20))
    cache.rewind(slot, 18)
    with pytest.raises(CacheError, match="back to 17 at most"):
        cache.rewind(slot, 16)
    run(cache, (slot, 1))
    cache.rewind(slot, 17)
    run(cache, (slot, 5))
    assert cache.length(slot) == 22
    with pytest.raises(CacheError, match="back to 19 at most"):
        cache.rewind(slot, 18)


def test_a_fresh_slot_forgets_how_far_the_last_sequence_went() -> None:
    cache = Cache(CONFIG, 1, 256, slack=2)
    run(cache, (cache.open(), 50))
    cache.close(0)
    run(cache, (cache.open(), 2))
    cache.rewind(0, 0)
    assert cache.length(0) == 0


def test_views_show_each_kind_by_position(rng: torch.Generator) -> None:
    """11 tokens in two steps: window of 4, ratio 2 (layer 1) with an open group, ratio 1 (layer 3)."""
    cache = Cache(CONFIG, 2, 128, slack=2, dtype=torch.float64)
    cache.open()
    slot = cache.open()
    rows = {name: torch.randn(11, ring.table.shape[-1], generator=rng).double() for name, ring in cache.rings().items()}
    rows |= {f"{kind}.{layer}": torch.randn(11, 32, generator=rng).double() for kind in ("latents", "keys")
             for layer in (1, 3)}  # fmt: skip
    for first, count in ((0, 8), (8, 3)):
        step = cache.step([(slot, list(range(count)))])
        cache.admit(step)
        for name, ring in cache.rings().items():
            ring.push(step, rows[name][first : first + count], 1)
        for layer, source in cache.sources.items():
            groups = step.groups(source.latents.ratio)
            for kind, table in (("latents", source.latents), ("keys", source.keys)):
                table.write(groups, rows[f"{kind}.{layer}"][groups.index])
        cache.extend(step)
    for layer in range(CONFIG.n_layers):
        assert torch.equal(cache.view("window", layer, slot), rows[f"window.{layer}"][7:11])
    for kind in ("latents", "keys"):
        assert torch.equal(cache.view(kind, 1, slot), rows[f"{kind}.1"][:5])
        assert torch.equal(cache.view(kind, 3, slot), rows[f"{kind}.3"][:11])
    assert torch.equal(cache.view("group", 1, slot), rows["group.1"][10:11])
    cache.rewind(slot, 10)
    assert cache.view("group", 1, slot).shape == (0, 64)
    assert torch.equal(cache.view("window", 0, slot), rows["window.0"][6:10])
    assert torch.equal(cache.view("latents", 3, slot), rows["latents.3"][:10])
    assert cache.view("latents", 1, 0).shape == (0, 32) and cache.view("window", 0, 0).shape == (0, 32)


@pytest.mark.parametrize(
    "kind, layer",
    [("window", 6), ("window", -1), ("latents", 0), ("keys", 5), ("group", 3), ("group", 2), ("tails", 1)],
)
def test_a_kind_that_a_layer_does_not_keep_is_refused(kind: str, layer: int) -> None:
    cache = Cache(CONFIG, 1, 64)
    with pytest.raises(CacheError, match=f"layer {layer} keeps no '{kind}'"):
        cache.view(kind, layer, cache.open())


@pytest.mark.parametrize("store", ["wide", "packed"])
def test_bytes_are_those_of_the_tensors(store: str) -> None:
    cache = Cache(CONFIG, 3, 500, slack=2, store=store)
    assert sum(cache.nbytes().values()) == sum(table.untyped_storage().nbytes() for table in tensors(cache))
    assert all(size for kind, size in cache.nbytes().items() if kind != "draft")  # not asked for


def test_without_slack_a_window_holds_window_size_rows() -> None:
    small = Cache(CONFIG, 2, 64)
    assert {ring.table.shape for ring in small.windows.values()} == {(2, CONFIG.window_size, CONFIG.head_dim)}
    assert {source.group.size for source in small.sources.values() if source.group is not None} == {1}
    slack = Cache(CONFIG, 2, 64, slack=5)
    assert {ring.size for ring in slack.windows.values()} == {CONFIG.window_size + 5}
    released = Cache(Config.released(), 1, 64, device="meta")
    assert {ring.table.numel() for ring in released.windows.values()} == {65536}
    assert len(released.windows) == Config.released().n_layers


def test_only_sources_keep_latents_and_only_ratio_2_keeps_a_group() -> None:
    cache = Cache(CONFIG, 1, 64)
    kept = {layer: (s.latents.ratio, s.keys.ratio, s.group is not None) for layer, s in cache.sources.items()}
    assert kept == {1: (2, 2, True), 3: (1, 1, False)}
    assert cache.sources[1].group is not None and cache.sources[1].group.table.dtype == torch.float32
    precise = Cache(CONFIG, 1, 64, dtype=torch.float64)
    assert precise.sources[1].group is not None and precise.sources[1].group.table.dtype == torch.float64


def test_two_caches_know_nothing_of_each_other() -> None:
    one, other = Cache(CONFIG, 1, 128), Cache(CONFIG, 1, 128)
    one.open(), other.open()
    before = [table.clone() for table in tensors(other)]
    step = run(one, (0, 70))
    for ring in one.rings().values():
        ring.push(step, torch.ones(70, ring.table.shape[-1], dtype=ring.table.dtype), 1)
    for source in one.sources.values():
        groups = step.groups(source.latents.ratio)
        source.latents.write(groups, torch.ones(len(groups.token), CONFIG.head_dim))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(other), strict=True))
    assert other.lengths == [0] and other.pages.held == [[]]
    assert not {table.data_ptr() for table in tensors(one)} & {table.data_ptr() for table in tensors(other)}


# Sight


def test_a_sight_is_replaced_and_says_what_is_missing() -> None:
    sight = Sight()
    for ask in (sight.far, sight.source):
        with pytest.raises(CacheError, match="run the layers in order"):
            ask()
    table = Cache(CONFIG, 1, 64).sources[1].latents
    rows = torch.tensor([[0, -1]])
    richer = sight.having(latents=table, rows=rows)
    assert sight.latents is None and richer.far() == (table.table, rows)
    with pytest.raises(CacheError):
        richer.source()
