"""Backward through everything: the packed step with a fresh cache is the training path."""

import math

import pytest
import torch
from torch import Tensor

from openv41.config import Config
from openv41.errors import InputError, OpsError
from openv41.model.masters import make_masters
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Cache, Step
from tests.memory import told_by
from tests.small import drafting_config, picture_of, run_in_pieces, small_config, small_model, tokens

LENGTHS = (9, 1, 6)
SETS = [("plain", "reference"), ("published", "reference"), ("published", "cpu")]


def everything() -> Config:
    """A draft and a tower as well."""
    return drafting_config(vision_n_layers=1)


def trained(config: Config, seed: int, numerics: str = "plain", want: str = "reference", **options) -> Transformer:
    """A model with masters: in float64 and unrounded, or in float32 and rounded as published."""
    model = small_model(config, choose("cpu", want, numerics, training=True), seed)
    make_masters(model, model.ops, torch.float64 if numerics == "plain" else torch.float32)
    return model


def language_loss(model: Transformer, parts: list[Tensor], **options) -> Tensor:
    """The sum over all tokens but the last of each sequence."""
    step = Step.pack([(slot, 0, ids) for slot, ids in enumerate(parts)], "all")
    logits = model(step, **options).logits.split([len(ids) for ids in parts])
    return sum(
        (torch.nn.functional.cross_entropy(some[:-1], ids[1:], reduction="sum")
         for some, ids in zip(logits, parts, strict=True) if len(ids) > 1), logits[0].sum() * 0.0,
    )  # fmt: skip


def full_loss(model: Transformer, seed: int) -> Tensor:
    """One packed step of texts and a picture; the next tokens' losses, those of two drafted blocks, and confidences."""
    config = model.config
    picture = picture_of(config, 4, 6, seed)
    (span,) = model.see([picture])
    ids = torch.cat((tokens(config, 9, seed), torch.full((len(span),), 95), tokens(config, 11, seed + 1)))
    image = torch.zeros(len(ids) + 30, dtype=torch.bool)
    image[9 : 9 + len(span)] = True
    parts = [ids, tokens(config, 30, seed + 2)]
    step = Step.pack([(0, 0, parts[0]), (1, 0, parts[1])], "all", image, features=span)
    output = model(step)
    loss = torch.nn.functional.cross_entropy(output.logits[:-1], step.ids[1:], reduction="mean")

    draft, size = model.mtp, config.dspark_block_size
    assert draft is not None and output.taps is not None
    histories = draft.vectors(output.taps, step.position)
    starts = torch.tensor([5, len(ids) + 20])  # rows of the step where a block begins: both in the midst of a text
    at = (starts.unsqueeze(1) + torch.arange(size)).flatten()
    before = (starts.unsqueeze(1) - config.window_size + torch.arange(config.window_size)).repeat_interleave(size, 0)
    own = (len(step) + torch.arange(len(at))).view(-1, size).repeat_interleave(size, 0)
    hidden = draft(step.ids[at], step.position[at], histories, torch.cat((before, own), 1))
    last = draft.stages()[-1]
    embedding = last.markov_head.embedding(step.ids[at])
    logits = draft.logits(hidden) + last.markov_head.head(embedding)
    sure = last.confidence_head(hidden, embedding)
    return loss + torch.nn.functional.cross_entropy(logits, step.ids[at + 1]) + sure.sigmoid().mean()


def without_gradient(model: Transformer) -> set[str]:
    return {
        name for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.to_dense().count_nonzero()
    }  # fmt: skip


def learns_elsewhere(name: str) -> bool:
    """The language loss does not reach an indexer, which only chooses; a router's bias only takes part in choosing."""
    return ".indexer." in name or name.endswith(("gate.bias", "gate.bias_vl"))


@pytest.mark.parametrize(("numerics", "want"), SETS)
def test_every_parameter_has_a_gradient(numerics: str, want: str, seed: int) -> None:
    model = trained(everything(), seed, numerics, want)
    full_loss(model, seed).backward()
    names = {name for name, _ in model.named_parameters()}
    assert without_gradient(model) == {name for name in names if learns_elsewhere(name)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.to_dense().isfinite().all(), name
        assert parameter.grad is None or parameter.grad.is_sparse == (".engram.embed." in name), name


def slopes(seed: int) -> tuple[float, float, float]:
    """Of a model's loss along one direction of all weights at once: by backward, and by differences, long and short."""
    model = trained(everything(), seed)
    full_loss(model, seed).backward()
    generator = torch.Generator().manual_seed(seed)
    slope, moves = 0.0, []
    for parameter in model.parameters():
        if parameter.grad is not None:
            move = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * parameter.abs().mean()
            moves.append((parameter, move))
            slope += float((parameter.grad.to_dense() * move).sum().detach())

    @torch.no_grad()
    def loss(by: float) -> float:
        for parameter, move in moves:
            parameter += by * move
        value = float(full_loss(model, seed))
        for parameter, move in moves:
            parameter -= by * move
        return value

    long, short = ((loss(step) - loss(-step)) / (2 * step) for step in (6e-7, 3e-7))
    return slope, long, short


def test_a_slope_is_that_of_finite_differences(seed: int) -> None:
    """The loss jumps where another pick is made or another expert chosen, and bends where a gate is about to open: the
    first point is taken where two differences agree. They do at nearly every one."""
    points = (slopes(seed + number) for number in range(8))
    slope, _, short = next(point for point in points if math.isclose(*point[1:], rel_tol=1e-6))
    assert math.isclose(slope, short, rel_tol=1e-5, abs_tol=1e-7)


def test_a_ragged_batchs_gradient_is_the_sum_of_each_alone(seed: int) -> None:
    model = trained(small_config(), seed)
    parts = [tokens(model.config, length, seed + i) for i, length in enumerate(LENGTHS)]
    language_loss(model, parts).backward()
    packed = {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for ids in parts:
        language_loss(model, [ids]).backward()
    for name, parameter in model.named_parameters():
        if name in packed:
            alone = parameter.grad.to_dense()
            assert (packed[name] - alone).abs().max() <= 1e-9 * max(1.0, float(alone.abs().max())), name


def test_plain_bf16_has_nearly_the_gradients_of_plain_float32(seed: int) -> None:
    """Where a rounding cannot decide anything: all latents are picked, all experts chosen, and no gate of n-gram memory
    is near the root that it begins with."""
    changes = {"index_topk": 63, "candidate_topk_blocks": 32, "engram_layer_ids": (), "engram_num_embeddings": ()}
    config = small_config(n_activated_experts=small_config().n_routed_experts, **changes)
    parts = [tokens(config, length, seed + i) for i, length in enumerate(LENGTHS)]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = small_model(config, choose("cpu", "reference", "plain", dtype=dtype, training=True), seed)
        make_masters(model, model.ops, torch.float32)
        language_loss(model, parts).backward()
        assert without_gradient(model) == {name for name, _ in model.named_parameters() if learns_elsewhere(name)}
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    wide, narrow = found
    assert not torch.equal(wide, narrow) and (narrow - wide).norm() < 0.06 * wide.norm()


@pytest.mark.parametrize(("numerics", "want"), SETS[1:])
def test_with_checkpoints_gradients_are_the_same_bits(numerics: str, want: str, seed: int) -> None:
    model = trained(small_config(), seed, numerics, want)
    parts = [tokens(model.config, length, seed + i) for i, length in enumerate(LENGTHS)]
    found = []
    for checkpoint in (False, True):
        model.zero_grad()
        loss = language_loss(model, parts, checkpoint=checkpoint)
        loss.backward()
        found.append([loss] + [p.grad.to_dense() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 50
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_checkpoints_need_a_fresh_cache(seed: int) -> None:
    model = trained(small_config(), seed)
    cache = Cache(model.config, 1, 8, dtype=model.ops.dtype)
    slot = cache.open()
    with pytest.raises(InputError, match="give none"):
        model(cache.step([(slot, [1, 2])]), cache, checkpoint=True)


@pytest.mark.parametrize("want", ["reference", "fast", "cpu"])
def test_masters_on_the_grid_give_the_stored_weights_bits(want: str, seed: int) -> None:
    config = everything()
    stored = small_model(config, choose("cpu", want), seed)
    ids = tokens(config, 11, seed)
    with torch.no_grad():
        expected = run_in_pieces(stored, ids, [11])
        (seen,) = stored.see([picture_of(config, 4, 6, seed)])
    model = trained(config, seed, "published", want)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert torch.equal(run_in_pieces(model, ids, [11]), expected)
    assert torch.equal(model.see([picture_of(config, 4, 6, seed)])[0], seen)


def test_with_gradients_a_step_reads_the_cache_as_without(seed: int) -> None:
    """Pieces of a sequence: latents of earlier steps lie in the cache, the step's own in a table that has gradient."""
    model = trained(small_config(), seed, "published")
    ids = tokens(model.config, 8, seed)
    with torch.no_grad():
        expected = run_in_pieces(model, ids, [5, 1, 2])
    assert torch.equal(run_in_pieces(model, ids, [5, 1, 2]), expected)


def test_latents_carry_gradient(seed: int) -> None:
    """Far attention alone: a token that is out of every window has a gradient from the last one's logits."""
    config = small_config(engram_layer_ids=(), engram_num_embeddings=(), index_topk=63, candidate_topk_blocks=32)
    model = trained(config, seed)
    ids = torch.arange(20)
    model(Step.pack([(0, 0, ids)])).logits.sum().backward()
    rows = model.embed.weight.grad.abs().sum(1)
    assert (rows[:20] > 0).all() and not rows[20:].any()


def test_published_operations_without_training_take_no_masters(seed: int) -> None:
    with pytest.raises(OpsError, match="training=True"):
        Transformer(small_config(), choose("cpu", "reference"), master=torch.float32)
    with torch.device("meta"):
        model = Transformer(small_config(), choose("cpu", "reference", training=True), master=torch.float32)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())


# Memory


def kept_bytes(model: Transformer, count: int, checkpoint: bool) -> tuple[int, int]:
    """Bytes that a step of `count` tokens keeps for its backward: all together, and the largest tensor's."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = tokens(model.config, count, 0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = language_loss(model, [ids], checkpoint=checkpoint)
    weights = sum(p.nbytes for p in model.parameters())
    assert loss.requires_grad and weights
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    own = [size for place, size in kept.items() if place not in parameters]
    return sum(own), max(own)


def test_what_is_kept_for_the_backward_is_linear_in_tokens(seed: int) -> None:
    """And with checkpoints several times less of it."""
    model = trained(small_config(), seed, "published", "cpu")
    (few, largest), (many, larger) = (kept_bytes(model, count, checkpoint=False) for count in (160, 320))
    assert many < 2.1 * few and larger < 2.1 * largest
    sparse, _ = kept_bytes(model, 320, checkpoint=True)
    print(f"{many // 320} bytes a token, {sparse // 320} with checkpoints")
    assert sparse < many / 4


ALLOWED = 900 << 20
"""Bytes above the process before the step. In this model of two layers the scores of all tokens at once would take
512 MiB in float32 for each of 2 heads; the streams and what a layer makes of them, about 40 KiB a token."""

PROGRAM = """
import torch
from openv41.config import engram_primes
from openv41.model.indexer import Indexer
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Step
from tests.memory import peak as held
from tests.small import fill_randomly, small_config, tokens

torch.set_num_threads(1)
config = small_config(
    original_seq_len=4096, index_topk=32, n_layers=2, compress_ratios=(0, 2), kv_source_layers=(1,),
    index_source_layers=(1,), candidate_source_layer=-1, engram_layer_ids=(0,),
    engram_num_embeddings=(sum(map(sum, engram_primes(1, 2, 2, 50)[0])),),
)
model = Transformer(config, choose("cpu", "cpu", training=True), master=torch.float32)
fill_randomly(model, 0)
for module in model.modules():
    if isinstance(module, Indexer):
        module.score_bytes = 32 << 20

def peak(count):
    ids = tokens(config, count, 1)
    logits = model(Step.pack([(0, 0, ids)], "all"), checkpoint=True).logits
    torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).backward()
    return held()

before = peak(256)
print(peak(16384) - before)
"""


def test_forward_and_backward_of_16384_tokens_stay_within_their_budget() -> None:
    peak = told_by(PROGRAM)
    print(f"{peak >> 20} MiB above the start")
    assert 0 < peak < ALLOWED
