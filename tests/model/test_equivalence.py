"""However a sequence is cut and whatever else is in the call, it is the same computation.

Under `ReferenceOps` with published numerics: the same bits. With plain numerics in float64: the same picks, and logits
within 1e-9 of the largest. Under `CpuOps`: layer by layer from recorded inputs, nearly all values.
"""

from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch

from openv41.model.attention import Attention
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Cache, Step
from tests.small import run_in_pieces, small_config, small_model, tokens

SPLITS = [tuple(len(part) for part in "".join(cut).split()) for cut in (
    [("x" + (" " if mask >> i & 1 else "")) for i in range(8)] + ["x"] for mask in range(256)
)]  # fmt: skip
"""All 256 ways to cut 9 tokens into pieces."""


class Picks:
    """The picks of every layer, for every slot and position that went through the model."""

    def __init__(self, model: Transformer) -> None:
        self.seen: dict[tuple[int, int, int], list[int]] = {}
        self.hooks = [
            module.register_forward_hook(self._note) for module in model.modules() if isinstance(module, Attention)
        ]

    def _note(self, attention: Attention, arguments: tuple, result: tuple) -> None:
        step, sight = arguments[1], result[1]
        if attention.far is not None:
            places = zip(step.slot.tolist(), step.position.tolist(), sight.picks.tolist(), strict=True)
            for slot, position, picks in places:
                self.seen[attention.layer, slot, position] = [pick for pick in picks if pick >= 0]


@pytest.fixture(params=["published", "plain"])
def model(request, seed: int) -> Transformer:
    return small_model(small_config(), choose("cpu", "reference", request.param), seed)


@torch.no_grad()
def run_packed(
    model: Transformer, sequences: Sequence[torch.Tensor], pieces: Sequence[Sequence[int]], slack: int = 0
) -> tuple[list[torch.Tensor], Picks]:
    """Logits of every token of several sequences, all fed in one cache: call r holds the r-th piece of each."""
    cache = Cache(model.config, len(sequences), sum(map(len, sequences)), slack, dtype=model.ops.dtype)
    slots = [cache.open() for _ in sequences]
    picks = Picks(model)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for turn in range(max(map(len, pieces))):
        parts = []
        for i, lengths in enumerate(pieces):
            if turn < len(lengths):
                first = sum(lengths[:turn])
                parts.append((i, sequences[i][first : first + lengths[turn]]))
        step = cache.step([(slots[i], ids) for i, ids in parts], wanted="all")
        for (i, _), some in zip(parts, model(step, cache).logits.split([len(ids) for _, ids in parts]), strict=True):
            logits[i].append(some)
    for hook in picks.hooks:
        hook.remove()
    return [torch.cat(parts) for parts in logits], picks


def assert_same(model: Transformer, a: torch.Tensor, b: torch.Tensor) -> None:
    if model.ops.numerics == "published":
        assert torch.equal(a, b)
    else:
        assert (a - b).abs().max() <= 1e-9 * b.abs().max()


def assert_same_picks(got: Picks, slot: int, expected: Picks, expected_slot: int, length: int) -> None:
    layers = {layer for layer, _, _ in expected.seen}
    for layer in layers:
        for position in range(length):
            assert got.seen[layer, slot, position] == expected.seen[layer, expected_slot, position]


def test_all_256_splits_of_nine_tokens(model: Transformer, seed: int) -> None:
    ids = tokens(model.config, 9, seed)
    (whole,), picks = run_packed(model, [ids], [[9]])
    assert len(set(SPLITS)) == 256 and all(sum(lengths) == 9 for lengths in SPLITS)
    cut, cut_picks = run_packed(model, [ids] * 256, SPLITS)
    for slot, logits in enumerate(cut):
        assert_same(model, logits, whole)
        assert_same_picks(cut_picks, slot, picks, 0, 9)


@torch.no_grad()
def test_splits_alone(model: Transformer, seed: int) -> None:
    """The same without the company of other sequences, for some of the splits."""
    ids = tokens(model.config, 9, seed)
    (whole,), _ = run_packed(model, [ids], [[9]])
    for lengths in SPLITS[5::51]:
        assert_same(model, run_in_pieces(model, ids, lengths), whole)


def test_a_prompt_equals_a_shorter_prompt_and_one_token(model: Transformer, seed: int) -> None:
    """For n odd and even, with picks that truly select, blocks that truly drop, and the ring wrapping."""
    longest = 34
    ids = tokens(model.config, longest, seed)
    (whole,), picks = run_packed(model, [ids], [[longest]])
    lengths = range(2, longest + 1)
    pieced, pieced_picks = run_packed(model, [ids[:n] for n in lengths], [[n - 1, 1] for n in lengths])
    for slot, (n, logits) in enumerate(zip(lengths, pieced, strict=True)):
        assert_same(model, logits, whole[:n])
        assert_same_picks(pieced_picks, slot, picks, 0, n)
    config = model.config
    assert longest // 2 > config.index_topk and longest > config.candidate_topk_blocks * config.candidate_block_size


def test_decoding_token_by_token_through_many_wraps_of_the_ring(model: Transformer, seed: int) -> None:
    ids = tokens(model.config, 22, seed)
    (whole,), picks = run_packed(model, [ids], [[22]])
    for slack in (0, 3):
        (single,), single_picks = run_packed(model, [ids], [[1] * 22], slack)
        assert_same(model, single, whole)
        assert_same_picks(single_picks, 0, picks, 0, 22)


def test_chunk_borders_inside_groups_rings_and_blocks(model: Transformer, seed: int) -> None:
    ids = tokens(model.config, 60, seed)
    (whole,), _ = run_packed(model, [ids], [[60]])
    cuts = ([7, 1, 1, 13, 2, 3, 5, 28], [3, 4, 5, 4, 3, 2, 1, 38], [59, 1], [1, 59], [30, 30], [5] * 12)
    cut, _ = run_packed(model, [ids] * len(cuts), cuts)
    for logits in cut:
        assert_same(model, logits, whole)


@pytest.mark.parametrize("numerics", ["published", "plain"])
def test_a_ragged_batch_equals_each_sequence_alone(numerics: str, seed: int) -> None:
    model = small_model(small_config(), choose("cpu", "reference", numerics), seed)
    lengths = (1, 2, 127, 128, 129, 513)
    sequences = [tokens(model.config, n, seed + n) for n in lengths]
    packed, packed_picks = run_packed(model, sequences, [[n] for n in lengths])
    for slot, ids in enumerate(sequences):
        (alone,), picks = run_packed(model, [ids], [[len(ids)]])
        assert_same(model, packed[slot], alone)
        assert_same_picks(packed_picks, slot, picks, 0, len(ids))


def test_chunks_decoded_tokens_and_prompts_in_one_call(model: Transformer, seed: int) -> None:
    """One sequence's prompt beside another's chunk and a third's decoded tokens, at different positions."""
    sequences = [tokens(model.config, n, seed + n) for n in (21, 30, 24)]
    alone = [run_packed(model, [ids], [[len(ids)]])[0][0] for ids in sequences]
    mixed, _ = run_packed(model, sequences, [[20, 1], [9, 11, 10], [10, *[1] * 14]])
    for logits, expected in zip(mixed, alone, strict=True):
        assert_same(model, logits, expected)


@torch.no_grad()
def test_images_in_the_history_cut_anywhere(seed: int) -> None:
    """N-grams stop at images, and image tokens have a router bias of their own, wherever the chunk border lies."""
    model = small_model(small_config(vision_n_layers=1), choose("cpu", "reference"), seed)
    ids = tokens(model.config, 16, seed)
    image = torch.zeros(16, dtype=torch.bool)
    image[4:9] = True
    whole = model(Step.pack([(0, 0, ids)], "all", image)).logits
    assert not torch.equal(whole, model(Step.pack([(0, 0, ids)], "all")).logits)
    for border in (3, 4, 5, 6, 9, 10, 11, 12):
        cache = Cache(model.config, 1, 16)
        slot = cache.open()
        pieces = [
            model(cache.step([(slot, ids[part])], "all", image[part]), cache).logits
            for part in (slice(0, border), slice(border, 16))
        ]
        assert torch.equal(torch.cat(pieces), whole)


@torch.no_grad()
def test_rewinding_is_as_if_the_tokens_had_never_been(model: Transformer, seed: int) -> None:
    ids, wrong = tokens(model.config, 19, seed), tokens(model.config, 30, seed + 1)
    (whole,), _ = run_packed(model, [ids], [[19]])
    cache = Cache(model.config, 1, 40, slack=5, dtype=model.ops.dtype)
    slot = cache.open()
    logits = [model(cache.step([(slot, ids[:7])], "all"), cache).logits]
    for position, rejected in zip(range(7, 19), [1, 2, 3, 4, 5, 0] * 2, strict=True):
        if rejected:
            model(cache.step([(slot, wrong[position : position + rejected])]), cache)
            cache.rewind(slot, position)
        logits.append(model(cache.step([(slot, ids[position : position + 1])], "all"), cache).logits)
    assert_same(model, torch.cat(logits), whole)


@pytest.mark.parametrize("weights", ["stored", "fp32", "bf16"])
@torch.no_grad()
def test_cpu_ops_agree_layer_by_layer_from_recorded_inputs(weights: str, seed: int) -> None:
    """Each block gets what the reference's block got. Rows whose picks differ (a tie, or a score that a flipped
    rounding moved) are few and are left out.

    Of a layer's 120 rows some two differ in a value or two. Once in fifteen layers the last bit of a sum flips a
    rounding to fp8, and the product behind it carries that through the row: so values are counted in all layers
    together, where a few such rows do not matter, and rows in each."""
    config = small_config()
    reference = small_model(config, choose("cpu", "reference"), seed)
    fast = small_model(config, choose("cpu", "cpu", weights=weights), seed)
    ids = tokens(config, 120, seed)
    cache, other = Cache(config, 1, 120), Cache(config, 1, 120)
    cache.open(), other.open()
    equal: dict[int, list[torch.Tensor]] = defaultdict(list)
    picked: list[torch.Tensor] = []
    for part in (ids[:112], *ids[112:].split(1)):
        step = cache.step([(0, part)])
        cache.admit(step), other.admit(step)
        streams, sight = reference.begin(step, cache)
        fast.begin(step, other)
        for layer, (block, twin) in enumerate(zip(reference.blocks(), fast.blocks(), strict=True)):
            streams = block.recall(streams, step, sight)
            expected, below = block(streams, step, sight, cache)
            got, twin_below = twin(streams, step, sight, other)
            same = torch.ones(len(step), dtype=torch.bool)
            if below.picks is not None:
                same = (below.picks == twin_below.picks).all(1)
                picked.append(same)
            equal[layer].append((got.h == expected.h)[same].flatten(1))
            streams, sight = expected, below
        cache.extend(step), other.extend(step)
    assert torch.cat(picked).float().mean() >= 0.98
    layers = [torch.cat(parts).float() for parts in equal.values()]
    assert torch.cat(layers).mean() >= 0.99
    for rows in layers:
        assert rows.mean() >= 0.96 and (rows == 1).all(1).float().mean() >= 0.85
