"""The draft: its arithmetic by hand, its rings however they came to be, and the same bits whatever runs beside it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from openv41.config import Config
from openv41.errors import CacheError, InputError
from openv41.formats import unpack_weight
from openv41.generate.prefix import PrefixStore
from openv41.model.draft import Draft, Proposal
from openv41.model.layers import Embedding, WideLinear
from openv41.model.streams import Streams
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Cache, Step
from openv41.weights.load import Checkpoint, load_into
from openv41.weights.names import place, published_tensors
from openv41.weights.tiny import write_tiny
from tests.small import drafting_config, fill_randomly, readable, small_config, small_model, tokens

CONFIG = drafting_config()
WIDE = drafting_config(window_size=70)
"""Lists of more than 64 entries: the softmax takes them in two blocks."""

ALL_EXPERTS = drafting_config(dspark_n_activated_experts=3)
"""No draft's expert is chosen, and none is by a hair."""

SINGLE = drafting_config(n_mtp_layers=1, compress_ratios=(0, 2, 2, 1, 1, 1, 0))


@pytest.fixture(scope="module")
def model() -> Transformer:
    return small_model(CONFIG, choose("cpu", "reference"), 3)


@pytest.fixture(scope="module")
def wide_model() -> Transformer:
    return small_model(WIDE, choose("cpu", "reference"), 4)


def draft_of(model: Transformer) -> Draft:
    assert model.mtp is not None
    return model.mtp


def draft_alone(config: Config) -> Draft:
    ops = choose("cpu", "reference")
    head = WideLinear(config.dim, config.vocab_size, "fp32", ops)
    return Draft(config, ops, Embedding(config.vocab_size, config.dim), head)


def cache_for(model: Transformer, slots: int = 1, room: int = 256, store: str = "wide", slack: int = 3) -> Cache:
    return Cache(model.config, slots, slots * room, slack, dtype=model.ops.dtype, store=store, draft=True)


@torch.no_grad()
def run(model: Transformer, cache: Cache, step: Step, prefill: str = "halo") -> None:
    """One call of the model, its taps remembered."""
    output = model(step, cache, prefill=prefill)
    draft_of(model).remember(output.taps, output.tapped, cache)


@torch.no_grad()
def propose(model: Transformer, cache: Cache, slots: Sequence[int], given: Sequence[int]) -> Proposal:
    return draft_of(model).greedy(torch.tensor(given), slots, cache)


def alone(model: Transformer, ids: Tensor, given: int, **how: object) -> Proposal:
    """The draft behind one sequence, read at once into a cache of its own."""
    cache = cache_for(model, **how)
    slot = cache.open()
    run(model, cache, cache.step([(slot, ids)]))
    return propose(model, cache, [slot], [given])


def assert_row(batch: Proposal, row: int, single: Proposal) -> None:
    for values, expected in zip(batch, single, strict=True):
        assert torch.equal(values[row], expected[0])


# Arithmetic


def dense(weight: Tensor, scale: Tensor | None) -> Tensor:
    return weight.double() if scale is None else unpack_weight(weight, scale).double()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-20).sqrt() * weight.double()


def turned(x: Tensor, positions: Tensor, config: Config, sign: int = 1) -> Tensor:
    """The tails of x [n, ..., d], by complex numbers."""
    width = config.rope_head_dim
    frequencies = config.rope_theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(positions.double(), frequencies) * sign
    factor = torch.polar(torch.ones_like(angles), angles).view(len(x), *[1] * (x.dim() - 2), -1)
    tail = torch.view_as_complex(x[..., -width:].unflatten(-1, (-1, 2)).contiguous()) * factor
    return torch.cat((x[..., :-width], torch.view_as_real(tail).flatten(-2)), -1)


def attend_by_hand(stage: torch.nn.Module, x: Tensor, main: Tensor, at: Tensor, config: Config) -> Tensor:
    """Softmax over the keys of all main tokens with a mask, the block's own keys, and a sink. `main` [t, dim] are all
    tokens from position 0; `at` the positions of the block."""
    attn, length = stage.attn, len(main)
    before = torch.arange(length)

    def linear(x: Tensor, layer: torch.nn.Module) -> Tensor:
        return x @ dense(layer.weight, layer.scale).T

    q = linear(norm(linear(x, attn.wq_a), attn.q_norm.weight), attn.wq_b).unflatten(-1, (config.n_heads, -1))
    q = turned(q, at, config)
    keys = norm(linear(torch.cat((main, x)), attn.wkv), attn.kv_norm.weight)
    keys = turned(keys, torch.cat((before, at)), config)
    scores = torch.einsum("nhd,td->nht", q, keys) / config.head_dim**0.5
    hidden = before < length - config.window_size  # of the block nothing is hidden
    scores[:, :, :length] = scores[:, :, :length].masked_fill(hidden, -torch.inf)
    weights = scores.exp()
    weights = weights / (weights.sum(-1, keepdim=True) + attn.attn_sink.double().exp().view(1, -1, 1))
    out = turned(torch.einsum("nht,td->nhd", weights, keys), at, config, -1)
    groups = out.flatten(1).unflatten(1, (config.o_groups, -1))  # [n, g, h * d / g]
    by_group = dense(attn.wo_a.weight, attn.wo_a.scale).unflatten(0, (config.o_groups, -1))
    low = torch.einsum("ngi,goi->ngo", groups, by_group)
    return linear(low.flatten(1), attn.wo_b)


def draft_by_hand(model: Transformer, taps: Tensor, drafted: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits and confidences of a block, told the id before it and those that were drafted."""
    config, stages = model.config, draft_of(model).stages()
    length, block = len(taps), config.dspark_block_size
    at = torch.arange(length, length + block)
    first, last = stages[0], stages[-1]
    main = norm(taps @ dense(first.main_proj.weight, first.main_proj.scale).T, first.main_norm.weight)
    ids = torch.tensor([drafted[0]] + [config.dspark_noise_token_id] * (block - 1))
    streams = Streams.start(model.embed.weight[ids].double(), config.hc_mult)
    for stage in stages:
        y = attend_by_hand(stage, norm(stage.hc_attn.read(streams), stage.attn_norm.weight), main, at, config)
        streams = stage.hc_attn.write(y, streams)
        y = stage.ffn(norm(stage.hc_ffn.read(streams), stage.ffn_norm.weight), torch.zeros(block, dtype=torch.bool))
        streams = stage.hc_ffn.write(y, streams)
    hidden = (streams.pre.unsqueeze(-1) * streams.h).sum(1)
    base = norm(hidden, last.norm.weight) @ model.head.weight.double().T
    logits, confidence = [], []
    for row in range(block):
        embedding = last.markov_head.embed.weight[drafted[row]].double()
        logits.append(base[row] + last.markov_head.head.weight.double() @ embedding)
        confidence.append(last.confidence_head.proj.weight[0].double() @ torch.cat((hidden[row], embedding)))
    return torch.stack(logits), torch.stack(confidence)


@torch.no_grad()
@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 23])
def test_a_draft_is_what_a_dense_softmax_by_hand_says(name: str, length: int, seed: int) -> None:
    """Before the ring is full, when it is just full, and after it has wrapped around."""
    model = small_model(ALL_EXPERTS, choose("cpu", name, "plain"), seed % 1000)
    ids = tokens(model.config, length, seed)
    output = model(Step.pack([(0, 0, ids)]), prefill="full")
    assert output.taps is not None and len(output.taps) == length
    cache = cache_for(model)
    slot = cache.open()
    run(model, cache, cache.step([(slot, ids)]))
    ours = propose(model, cache, [slot], [7])
    drafted = ours.ids[0].tolist()
    logits, confidence = draft_by_hand(model, output.taps, drafted)
    torch.testing.assert_close(ours.logits[0], logits, atol=1e-5, rtol=1e-5)  # angles are those of float32
    torch.testing.assert_close(ours.confidence[0], confidence, atol=1e-5, rtol=1e-5)
    assert drafted[0] == 7
    assert (logits.amax(1) - logits.gather(1, ours.ids[0, 1:, None]).squeeze(1) <= 2e-5).all(), "the likeliest"


def test_a_drafted_token_sees_the_window_before_its_block_and_all_of_its_block() -> None:
    step = Step.pack([(0, 2, [5, 6, 6]), (4, 9, [7, 6, 6])])
    assert step.around(4).tolist() == [[0, 1, -1, -1, 2, 3, 4]] * 3 + [[5, 6, 7, 8, 9, 10, 11]] * 3


@torch.no_grad()
def test_a_block_is_not_causal(model: Transformer, seed: int) -> None:
    """Through the stages: another token at the last place changes the first place's hidden state."""
    draft = draft_of(model)
    history = draft.vectors(torch.randn(4, 3 * CONFIG.dim, generator=torch.Generator().manual_seed(seed)).bfloat16(),
                            torch.arange(4))  # fmt: skip
    rows = torch.arange(4 + 3).repeat(3, 1)
    results = [draft(torch.tensor(ids), torch.arange(4, 7), history, rows) for ids in ([5, 94, 94], [5, 94, 93])]
    assert not torch.equal(results[0][0], results[1][0])


@torch.no_grad()
def test_image_tokens_bias_is_not_the_drafts(seed: int) -> None:
    """A draft is text, whatever it stands behind."""
    config = drafting_config(vision_n_layers=1)
    draft = draft_alone(config)
    fill_randomly(draft, seed)
    torch.nn.init.normal_(draft.shared[0].weight)
    arguments = (torch.tensor([5, 94, 94]), torch.arange(3), [torch.zeros(0, config.head_dim).bfloat16()] * 2,
                 torch.arange(3).repeat(3, 1))  # fmt: skip
    before = draft(*arguments)
    for stage in draft.stages():
        assert stage.ffn.gate.bias_vl is not None
        stage.ffn.gate.bias_vl.copy_(torch.tensor([50.0, -50.0, 0.0]))
    assert before.isfinite().all() and torch.equal(draft(*arguments), before)


# The same bits


@pytest.mark.parametrize("which", ["model", "wide_model"])
@pytest.mark.parametrize("store", ["wide", "packed"])
def test_a_draft_is_the_same_alone_and_in_a_ragged_batch(
    which: str, store: str, seed: int, request: pytest.FixtureRequest
) -> None:
    """Before the ring is full, after, and after it has wrapped; whatever stands in the other slots."""
    model = request.getfixturevalue(which)
    lengths = [1, 3, 4, 5, 15] if model.config is CONFIG else [3, 75]
    prompts = [tokens(model.config, n, seed + n) for n in lengths]
    cache = cache_for(model, len(prompts), store=store)
    slots = [cache.open() for _ in prompts]
    run(model, cache, cache.step(zip(slots, prompts, strict=True)))
    batch = propose(model, cache, slots, list(range(10, 10 + len(slots))))
    backwards = propose(model, cache, slots[::-1], list(range(10, 10 + len(slots)))[::-1])
    for row, ids in enumerate(prompts):
        single = alone(model, ids, 10 + row)
        assert_row(batch, row, single)
        assert_row(backwards, len(slots) - 1 - row, single)


@pytest.mark.parametrize("which", ["model", "wide_model"])
def test_a_draft_is_the_same_after_a_prompt_and_after_single_tokens(
    which: str, seed: int, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(which)
    length = 11 if model.config is CONFIG else 73
    ids = tokens(model.config, length, seed)
    cache = cache_for(model)
    slot = cache.open()
    start = length - 5
    run(model, cache, cache.step([(slot, ids[:start])]))
    for count in range(start + 1, length + 1):
        run(model, cache, cache.step([(slot, ids[count - 1 : count])]))
        if count in (start + 1, length):
            assert_row(propose(model, cache, [slot], [5]), 0, alone(model, ids[:count], 5))


@pytest.mark.parametrize(("store", "slack"), [("wide", 0), ("packed", 3)])
def test_half_depth_prefill_in_chunks_seeds_the_rings_of_the_full_pass(
    model: Transformer, slack: int, store: str, seed: int
) -> None:
    prompts = [tokens(CONFIG, n, seed + n) for n in (40, 23, 5, 2)]

    def seeded(pieces: Sequence[Sequence[int]], prefill: str) -> tuple[list[dict[str, Tensor]], Proposal]:
        cache = cache_for(model, len(prompts), 128, store, slack)
        slots = [cache.open() for _ in prompts]
        ends = {slot: len(ids) for slot, ids in zip(slots, prompts, strict=True)}
        for turn in range(max(map(len, pieces))):
            parts = [
                (slot, ids[sum(lengths[:turn]) : sum(lengths[: turn + 1])])
                for slot, ids, lengths in zip(slots, prompts, pieces, strict=True)
                if turn < len(lengths)
            ]
            run(model, cache, cache.step(parts, prompts=ends), prefill)
        return [readable(cache, slot) for slot in slots], propose(model, cache, slots, [9] * len(slots))

    whole = [[40], [23], [5], [2]]
    kept, proposal = seeded(whole, "full")
    assert {name for name in kept[0] if name.startswith("draft")} == {"draft.6", "draft.7"}
    for pieces in (whole, [[10, 20, 10], [22, 1], [5], [1, 1]], [[34, 6], [6, 6, 6, 5], [2, 3], [2]]):
        others, again = seeded(pieces, "halo")
        for one, other in zip(kept, others, strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        assert all(torch.equal(a, b) for a, b in zip(proposal, again, strict=True))


@pytest.mark.parametrize("length", [1, 4, 10])
def test_rejected_tokens_leave_no_trace(model: Transformer, length: int, seed: int) -> None:
    """A block is verified, remembered, and partly taken back, at every border of the ring."""
    ids = tokens(CONFIG, length, seed)
    cache = cache_for(model)
    slot = cache.open()
    run(model, cache, cache.step([(slot, ids)]))
    for turn in range(3):
        block = tokens(CONFIG, 4, seed + turn)
        run(model, cache, cache.step([(slot, block)], "all"))
        accepted = 1 + turn
        cache.rewind(slot, len(ids) + accepted)
        ids = torch.cat((ids, block[:accepted]))
        assert_row(propose(model, cache, [slot], [3]), 0, alone(model, ids, 3))


def test_drafting_changes_nothing_in_the_cache(model: Transformer, seed: int) -> None:
    cache = cache_for(model, 2)
    slots = [cache.open(), cache.open()]
    run(model, cache, cache.step([(slot, tokens(CONFIG, 9 + slot, seed)) for slot in slots]))
    before = {name: ring.table.clone() for name, ring in cache.rings().items()}
    propose(model, cache, slots, [1, 2])
    assert all(torch.equal(ring.table, before[name]) for name, ring in cache.rings().items())
    assert [cache.length(slot) for slot in slots] == [9, 10]


def test_forks_and_files_keep_the_drafts_rings(model: Transformer, seed: int, tmp_path: Path) -> None:
    ids = tokens(CONFIG, 14, seed)
    expected = alone(model, ids, 8)
    for store in ("wide", "packed"):
        cache = cache_for(model, 3, store=store)
        slot = cache.open()
        run(model, cache, cache.step([(slot, ids)]))
        cache.save(slot, tmp_path / store)
        twin, restored = cache.fork(slot), cache.restore(tmp_path / store)
        run(model, cache, cache.step([(slot, [1, 2, 3])]))
        assert_row(propose(model, cache, [twin], [8]), 0, expected)
        assert_row(propose(model, cache, [restored], [8]), 0, expected)
        with pytest.raises(CacheError, match="its draft is 'yes', here it is 'no'"):
            Cache(CONFIG, slack=3, store=store).restore(tmp_path / store)


def test_a_replayed_prefix_has_its_rings_again(model: Transformer, seed: int) -> None:
    ids = tokens(CONFIG, 60, seed)
    cache = cache_for(model, 3)
    store = PrefixStore(model, cache, 1)
    slot = cache.open()
    run(model, cache, cache.step([(slot, ids)]))
    store.keep(slot, ids.tolist())
    shared = torch.cat((ids[:50], tokens(CONFIG, 3, seed + 1)))
    twin, held = store.begin(shared.tolist())
    assert held >= 50
    run(model, cache, cache.step([(twin, shared[held:])]))
    assert_row(propose(model, cache, [twin], [4]), 0, alone(model, shared, 4))


# How it is called


@torch.no_grad()
def test_fewer_places_give_the_same_tokens(model: Transformer, seed: int) -> None:
    cache = cache_for(model)
    slot = cache.open()
    run(model, cache, cache.step([(slot, tokens(CONFIG, 12, seed))]))
    whole = propose(model, cache, [slot], [6])
    for count in (1, 2, 3):
        drafting = draft_of(model).begin(torch.tensor([6]), [slot], cache, count)
        assert drafting.hidden.shape == (1, 3, CONFIG.dim) and drafting.logits.shape == (1, count, CONFIG.vocab_size)
        for row in range(count):
            logits, confidence = drafting.next(whole.ids[:, row])
            assert torch.equal(logits, whole.logits[:, row])
            assert torch.equal(confidence, whole.confidence[:, row])
        with pytest.raises(InputError, match=f"all {count} places"):
            drafting.next(whole.ids[:, 0])


def test_what_cannot_be_drafted_is_refused(model: Transformer) -> None:
    cache, one = cache_for(model), torch.tensor([5])
    slot, draft = cache.open(), draft_of(model)
    run(model, cache, cache.step([(slot, [1, 2])]))
    for count in (0, 4):
        with pytest.raises(InputError, match="count must be 1 to 3"):
            draft.begin(one, [slot], cache, count)
    with pytest.raises(InputError, match="one id a slot, got 1 ids for 2 slots"):
        draft.begin(one, [slot, slot], cache)
    with pytest.raises(InputError, match="two parts"):
        draft.begin(torch.tensor([5, 6]), [slot, slot], cache)
    plain = Cache(CONFIG, 2, 20)
    output = model(plain.step([(plain.open(), [1, 2])]), plain)
    with pytest.raises(CacheError, match="draft=True"):
        draft.remember(output.taps, output.tapped, plain)
    with pytest.raises(CacheError, match="draft=True"):
        draft.begin(one, [0], plain)
    with pytest.raises(CacheError, match="not open"):
        draft.begin(one, [1], plain)


def test_a_model_without_a_draft_taps_nothing() -> None:
    model = small_model(small_config(), choose("cpu", "reference"))
    output = model(Step.pack([(0, 0, [1, 2])]))
    assert model.mtp is None and output.taps is None and output.tapped is None


def test_gradients_reach_every_parameter_and_the_taps(seed: int) -> None:
    """And are those of finite differences, along one direction of each."""
    config = drafting_config(dtype="bf16", expert_dtype=None, dspark_n_activated_experts=3)
    model = small_model(config, choose("cpu", "reference", "plain"), seed % 1000).double()
    draft = draft_of(model)
    generator = torch.Generator().manual_seed(seed)
    print(f"seed {seed}")
    length, block = 6, config.dspark_block_size
    taps = torch.randn(length, 3 * config.dim, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([5, 94, 94])
    rows = torch.cat((torch.arange(length - config.window_size, length), length + torch.arange(block))).repeat(block, 1)
    weights = torch.randn(block, config.vocab_size + 1, generator=generator, dtype=torch.float64)

    def loss() -> Tensor:
        histories = draft.vectors(taps, torch.arange(length))
        hidden = draft(ids, torch.arange(length, length + block), histories, rows)
        last = draft.stages()[-1]
        assert last.markov_head is not None and last.confidence_head is not None
        embedding = last.markov_head.embedding(torch.tensor([5, 6, 7]))
        logits = draft.logits(hidden) + last.markov_head.head(embedding)
        return (torch.cat((logits, last.confidence_head(hidden, embedding).unsqueeze(1)), 1) * weights).sum()

    loss().backward()
    inputs = {"taps": taps, **dict(draft.named_parameters())}
    for name, value in inputs.items():
        if name.endswith("gate.bias") or name.endswith("gate.bias_vl"):
            assert value.grad is None, "the bias takes part in a choice only"
            continue
        assert value.grad is not None and value.grad.abs().max() > 0, name
        direction = torch.randn(value.shape, generator=generator, dtype=torch.float64) * 1e-6
        with torch.no_grad():
            value += direction
            higher = loss()
            value -= 2 * direction
            lower = loss()
            value += direction
        expected = (value.grad * direction).sum()
        difference = (higher - lower) / 2
        assert torch.isclose(difference, expected, rtol=1e-3, atol=1e-9), f"{name}: {difference}, not {expected}"


# Names


@pytest.mark.parametrize("config", [CONFIG, SINGLE, Config.tiny(), Config.released()])
def test_parameters_are_the_published_tensors(config: Config) -> None:
    with torch.device("meta"):
        draft = draft_alone(config)
    published = {place(name).parameter for name in published_tensors(config) if name.startswith("mtp.")}
    assert {f"mtp.{name}" for name, _ in draft.named_parameters()} == published


def test_a_checkpoint_loads_with_its_draft_or_without(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny")
    checkpoint = Checkpoint.open(tmp_path / "tiny")
    config, ops = checkpoint.config, choose("cpu", "reference")
    model = Transformer(config, ops)
    load_into(model, checkpoint)
    last = draft_of(model).stages()[-1]
    assert last.markov_head is not None and last.markov_head.head.weight.dtype == torch.float32
    name = f"mtp.{config.n_mtp_layers - 1}.markov_head.head.weight"
    assert torch.equal(last.markov_head.head.weight, checkpoint.tensor(name).float())
    without = Transformer(config, ops, draft=False)
    assert without.mtp is None
    load_into(without, checkpoint, without=("mtp.",))
