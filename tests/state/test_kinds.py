"""The table of state, its page, and the tensors that a cache really has."""

from pathlib import Path

import pytest

from openv41.config import Config
from openv41.state import Cache
from openv41.state.kinds import KINDS, bytes_of_slot, state_table
from tests.small import drafting_config, small_config


def test_the_page_prints_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "state.md").read_text()
    assert state_table(Config.released()) in page


def test_the_released_model_keeps_890_bytes_a_token() -> None:
    sizes = bytes_of_slot(Config.released())
    assert sizes.per_token == {"latents": 720, "keys": 170}
    assert sum(sizes.per_token.values()) * 1048576 == 933232640
    assert sizes.fixed["window"] == 2703360
    assert sizes.fixed["draft"] == 3 * 128 * 528 == 202752


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("slack", [0, 5])
@pytest.mark.parametrize("draft", [False, True])
def test_sizes_are_those_of_the_tensors(packed: bool, slack: int, draft: bool) -> None:
    config = drafting_config() if draft else small_config()
    cache = Cache(config, 3, 500, slack, store="packed" if packed else "wide", draft=draft)
    sizes, held = bytes_of_slot(config, slack, packed), cache.nbytes()
    tables = {*(kind.name for kind in KINDS), "pages"}
    assert set(held) == tables
    for name, size in sizes.fixed.items():
        assert held[name] == 3 * size
    room = cache.pages.count * cache.pages.tokens
    for name, size in sizes.per_token.items():
        assert held[name] == room * size
    tensors = [ring.table for ring in cache.rings().values()]
    tensors += [table.table for source in cache.sources.values() for table in (source.latents, source.keys)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == sum(held.values()) - held["pages"]


def test_rings_for_drafts_are_there_only_where_asked_for() -> None:
    for cache in (Cache(drafting_config()), Cache(small_config(), draft=True)):
        assert cache.drafts == {} and cache.nbytes()["draft"] == 0
        assert not any(name.startswith("draft") for name in cache.rings())
