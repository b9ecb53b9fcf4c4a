"""A paged table as the step reads it that wrote to it just now: the cache's rows, and its own, which carry gradient."""

import torch

from openv41.state import Cache, Joined
from tests.small import small_config


def test_a_joined_table_has_the_caches_rows_and_the_steps_own_carry_gradient(rng: torch.Generator) -> None:
    """Three slots of a ratio-2 source, in the midst of a group, new, and one that completes none; then pages apart."""
    config = small_config()
    cache = Cache(config, 3, 600, dtype=torch.float64)
    slots = [cache.open() for _ in range(3)]
    table = cache.sources[1].latents

    def push(counts: list[int], grad: bool):
        step = cache.step([(slot, [1] * n) for slot, n in zip(slots, counts, strict=True) if n])
        cache.admit(step)
        groups = step.groups(2)
        values = torch.randn(len(groups.token), config.head_dim, generator=rng, dtype=torch.float64)
        cache.extend(step)
        return step, values.requires_grad_(grad), table.push(groups, values)

    _, _, plain = push([5, 0, 8], grad=False)
    assert plain is table
    push([0, 130, 0], grad=False)  # pages of the slots no longer lie side by side
    step, own, joined = push([138, 3, 1], grad=True)
    assert isinstance(joined, Joined) and joined.paged is table and not table.table.requires_grad
    slot = torch.arange(3)
    index = torch.arange(71).expand(3, 71)
    index = index.where(index < torch.tensor([71, 66, 4]).unsqueeze(1), -1)
    rows, expected = joined.rows(slot, index), table.rows(slot, index)
    assert torch.equal(rows < 0, index < 0) and torch.equal(expected < 0, index < 0)
    assert torch.equal(joined.table[rows], table.table[expected].where((expected >= 0).unsqueeze(2), joined.table[-1]))
    joined.table[rows[rows >= 0]].sum().backward()
    assert own.grad is not None and (own.grad == 1).all() and len(own) == 69 + 1 + 0
    assert ((rows >= len(table.table)).sum(1) == torch.tensor([69, 1, 0])).all()
