"""Re-scorers far from the start score their candidates alone, and pick the same as if they had scored everything."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch

from openv41.model.transformer import Transformer
from openv41.ops import Ops, choose
from openv41.plan import Role, plan_layers
from openv41.state import Cache
from tests.small import small_config, small_model, tokens


def picks_of(model: Transformer, cache: Cache, ids: torch.Tensor, cuts: list[int]) -> dict[int, list[torch.Tensor]]:
    """Each re-scorer's picks, call by call."""
    seen: dict[int, list[torch.Tensor]] = {}

    def listen(layer: int) -> Callable[..., None]:
        return lambda _, inputs, result: seen.setdefault(layer, []).append(result.positions.clone())

    hooks = []
    for block in model.blocks():
        if block.attn.plan.role is Role.RESCORER:
            hooks.append(block.attn.indexer.register_forward_hook(listen(block.layer)))
    slot = cache.open()
    for piece in ids.split(cuts):
        model(cache.step([(slot, piece)]), cache, prefill="full")
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("store", ["wide", "packed"])
@pytest.mark.parametrize("ops", ["reference", "cpu"])
@torch.no_grad()
def test_gathered_candidates_give_the_same_picks(ops: str, store: Literal["wide", "packed"], seed: int) -> None:
    config = small_config(candidate_topk_blocks=2, candidate_block_size=8, index_topk=9)
    model = small_model(config, choose("cpu", ops), seed)
    ids = tokens(config, 75, seed)
    cuts = [40, 1, 1, 30, 1, 1, 1]
    from_how_many = {block.attn.indexer.gathers_from for block in model.blocks() if block.attn.indexer is not None}
    assert from_how_many == {32}, "the sequence must reach past the crossover"
    gathered = picks_of(model, Cache(config, 1, 80, store=store), ids, cuts)
    for block in model.blocks():
        if block.attn.indexer is not None:
            block.attn.indexer.gathers_from = 10**9
    dense = picks_of(model, Cache(config, 1, 80, store=store), ids, cuts)
    assert gathered.keys() == dense.keys() == {row.layer for row in plan_layers(config) if row.role is Role.RESCORER}, (
        "every re-scorer was heard"
    )
    for layer, calls in gathered.items():
        for call, (got, wanted) in enumerate(zip(calls, dense[layer], strict=True)):
            assert torch.equal(got, wanted), f"layer {layer}, call {call}"


@torch.no_grad()
def test_far_from_the_start_only_candidates_are_scored(seed: int) -> None:
    config = small_config(candidate_topk_blocks=2, candidate_block_size=8, index_topk=9)
    model = small_model(config, choose("cpu", "reference"), seed)
    rescorers = [block for block in model.blocks() if block.attn.plan.role is Role.RESCORER]
    scored: list[int] = []

    class Counting:
        def __init__(self, ops: Ops) -> None:
            self.ops = ops

        def __getattr__(self, name: str) -> object:
            return getattr(self.ops, name)

        def index_scores(self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            scored.append(keys.shape[0])
            return self.ops.index_scores(q, weights, keys)

    for block in rescorers:
        block.attn.indexer.ops = Counting(model.ops)
    cache = Cache(config, 1, 80)
    slot = cache.open()
    ids = tokens(config, 61, seed)
    model(cache.step([(slot, ids[:60])]), cache)
    scored.clear()
    model(cache.step([(slot, ids[60:])]), cache)
    assert len(scored) == len(rescorers) and max(scored) <= 16
