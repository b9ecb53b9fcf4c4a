"""The set that training runs on, against the fast one: streams, rounding, attention, and steps of a whole model."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from openv41.config import Config
from openv41.errors import OpsError
from openv41.formats import FP4_ROWS, FP8_ROWS, FP8_TILES, INDEX, LATENT, WINDOW, BlockFormat, WeightFormat
from openv41.model.masters import change_ops
from openv41.model.transformer import Transformer
from openv41.ops.fast import FastOps
from openv41.ops.hopper import TrainedOps
from openv41.ops.hopper.gated import gated
from openv41.ops.hopper.rotate import rotated
from openv41.ops.hopper.rounding import round_master, round_rows
from openv41.ops.hopper.streams import collapsed, expanded
from openv41.ops.training import TrainingOps
from openv41.state import Step
from openv41.train.language import language_loss, run_headless
from openv41.train.trainable import build
from tests.train.test_launches import mini_shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = FastOps("plain", torch.float32)
EXACT_BLOCKS = {FP8_TILES.name: (70, 45), FP4_ROWS.name: (3, 5, 64), FP8_ROWS.name: (7, 96)}
"""Shapes of a master in each format: partial tiles, a stack of experts, rows of a table."""


def gradients(run: Callable[..., Tensor], inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """The result, and the gradients of its weighted sum."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    out = run(*leaves)
    return [out, *torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "m", "dim"), [(5, 4, 96), (2, 1, 32), (0, 4, 32)])
def test_streams_are_read_and_written_as_the_fast_ops_do(
    n: int, m: int, dim: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    """bf16 results and gradients are rounded once from float32, so they may differ by one rounding."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(DEVICE)

    streams, y, pre, comb = normal(n, m, dim).to(dtype), normal(n, dim).to(dtype), normal(n, m), normal(n, m, m)
    for fast, kernel, inputs, weights in (
        (PLAIN.collapse, collapsed, [streams, pre], normal(n, dim).to(dtype)),
        (PLAIN.expand, expanded, [y, streams, pre, comb], normal(n, m, dim).to(dtype)),
    ):
        tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 2e-2}
        for one, other in zip(gradients(kernel, inputs, weights), gradients(fast, inputs, weights), strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_is_that_of_the_fast_ops(dtype: torch.dtype, inverse: bool, rng: torch.Generator) -> None:
    angle = torch.randn(5, 6, generator=rng).to(DEVICE) * 100
    cos, sin = angle.cos(), angle.sin()
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    for shape in ((5, 3, 20), (5, 64), (5, 1, 12), (5, 40, 64)):
        x, weights = (torch.randn(shape, generator=rng).to(DEVICE).to(dtype) for _ in range(2))
        found = gradients(lambda x: rotated(x, cos, sin, inverse), [x], weights)
        expected = gradients(lambda x: PLAIN.rotate(x, cos, sin, inverse), [x], weights)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_gates_are_those_of_the_fast_ops(limit: float, dtype: torch.dtype, rng: torch.Generator) -> None:
    """A limit that cuts off a third of the values; with routing weights and without."""
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 2e-2}
    for shape in ((7, 3, 40), (1, 64), (0, 3, 8)):
        gate, up, weights = ((torch.randn(shape, generator=rng) * 2).to(DEVICE).to(dtype) for _ in range(3))
        routing = torch.randn(*shape[:-1], 1, generator=rng).to(DEVICE)
        for inputs in ([gate, up], [gate, up, routing]):
            found, expected = (
                gradients(lambda a, b, *c, ops=ops: ops(a, b, limit, *(c or (None,))), inputs, weights)
                for ops in (gated, PLAIN.gated)
            )
            for one, other in zip(found, expected, strict=True):
                assert one.dtype == other.dtype
                torch.testing.assert_close(one, other, **tolerance)


def test_streams_that_it_cannot_hold_are_refused() -> None:
    with pytest.raises(OpsError, match="collapse by kernel takes .* use the fast ops"):
        collapsed(torch.zeros(1, 3, 32), torch.zeros(1, 3))
    with pytest.raises(OpsError, match="expand by kernel takes .* use the fast ops"):
        expanded(torch.zeros(1, 32).double(), torch.zeros(1, 4, 32).double(), torch.zeros(1, 4), torch.zeros(1, 4, 4))


def test_scores_and_picks_are_those_of_the_fast_ops(rng: torch.Generator) -> None:
    """Among equal scores, which are many, the lower position."""
    ops = TrainedOps("plain")
    q, weights, keys = (torch.randn(size, generator=rng).to(DEVICE) for size in ((70, 3, 24), (70, 3), (150, 24)))
    torch.testing.assert_close(
        ops.index_scores(q, weights, keys), PLAIN.index_scores(q, weights, keys), atol=1e-4, rtol=1e-4
    )
    scores = torch.randn(70, 1100, generator=rng).round() * 0.5
    scores = scores.masked_fill(torch.rand(scores.shape, generator=rng) < 0.2, -torch.inf).to(DEVICE)
    visible = torch.randint(0, 1101, (70,), generator=rng).to(DEVICE)
    for some in (scores, -scores, scores.bfloat16(), scores[:, :9]):
        seen = visible.clamp_max(some.shape[1])
        assert torch.equal(ops.pick(some, seen, 16), PLAIN.pick(some, seen, 16))


def values(rng: torch.Generator, *shape: int) -> Tensor:
    """Of all sizes: zeros, some that saturate nothing, some below the smallest step of a block."""
    size = torch.exp2(torch.randint(-40, 12, shape, generator=rng).float())
    some = torch.randn(shape, generator=rng) * torch.where(torch.rand(shape, generator=rng) < 0.5, 1.0, size)
    return some.masked_fill(torch.rand(shape, generator=rng) < 0.1, 0).to(DEVICE)


@pytest.mark.parametrize("form", [WINDOW, LATENT, INDEX], ids=lambda form: form.name)
def test_rows_are_rounded_to_the_bit(form: BlockFormat, rng: torch.Generator) -> None:
    x = values(rng, 3, 50, 64).bfloat16()
    assert torch.equal(round_rows(x, form), form.round(x))
    if form is not LATENT:  # whose scales are no powers of two
        wide = values(rng, 70, 64)
        assert torch.equal(round_rows(wide, form), form.round(wide))


@pytest.mark.parametrize("form", [FP8_TILES, FP4_ROWS, FP8_ROWS], ids=lambda form: form.name)
def test_masters_are_rounded_to_the_bit(form: WeightFormat, rng: torch.Generator) -> None:
    for shape in (EXACT_BLOCKS[form.name], (2, 32, 32)):
        weight = values(rng, *shape)
        expected = form.unpack(*form.pack(weight)).bfloat16()
        assert torch.equal(round_master(weight, form, torch.bfloat16), expected)


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(OpsError, match="rows of whole blocks"):
        round_rows(torch.zeros(2, 40), WINDOW)
    with pytest.raises(OpsError, match="takes bf16 for fp4_16_e4m3"):
        round_rows(torch.zeros(2, 32), LATENT)
    with pytest.raises(OpsError, match="train in float32"):
        TrainedOps("plain", torch.float64)


# Steps of a whole model


def shape() -> Config:
    """A source of each ratio, a re-scorer, a reader, n-gram memory, and heads as wide as the kernels have them."""
    return mini_shape().replace(
        n_layers=3, n_mtp_layers=0, dspark_target_layer_ids=(), head_dim=64, compress_ratios=(2, 1, 1),
        kv_source_layers=(0, 1), index_source_layers=(0, 1, 2), candidate_source_layer=1, engram_layer_ids=(0, 2),
        hc_sinkhorn_iters=3, index_topk=4, window_size=8, n_heads=2, candidate_block_size=2, candidate_topk_blocks=4,
    )  # fmt: skip


def step_of(model: Transformer, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The language loss of two sequences, and every parameter's gradient."""
    ids = torch.randint(3, 90, (12,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    step = Step.pack([(0, 0, ids[:9]), (1, 0, ids[9:])], "all")
    hidden, _ = run_headless(model, step)
    loss = language_loss(model.head, hidden, ids, 2048)
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            parameter.grad = None
    return loss.detach(), found


def test_a_plain_step_has_the_gradients_of_the_fast_ops(seed: int) -> None:
    """The norm of every parameter's difference against its gradient's."""
    model = build(shape(), TrainingOps(PLAIN), seed).to(DEVICE)
    loss, expected = step_of(model, seed)
    change_ops(model, TrainingOps(TrainedOps("plain")))
    found_loss, found = step_of(model, seed)
    torch.testing.assert_close(found_loss, loss, atol=0, rtol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 1e-3 * expected[name].norm() + 1e-7, name


class RoundedAlone(TrainedOps):
    """Of the kernels, those that round: all others add up in another order, and a last bit at a rounding's border makes
    another number behind it."""

    sinkhorn, collapse, expand, rotate = FastOps.sinkhorn, FastOps.collapse, FastOps.expand, FastOps.rotate
    gated = FastOps.gated
    sparse_attention, attention_gradients = FastOps.sparse_attention, None


def test_a_published_step_is_rounded_as_the_fast_ops_do(seed: int) -> None:
    """To the bit, losses and gradients; also after the masters have changed."""
    model = build(shape(), TrainingOps(FastOps()), seed).to(DEVICE)
    rounded = TrainingOps(RoundedAlone())
    for _ in range(2):
        change_ops(model, TrainingOps(FastOps()))
        loss, expected = step_of(model, seed)
        change_ops(model, rounded)
        found_loss, found = step_of(model, seed)
        assert torch.equal(found_loss, loss) and found.keys() == expected.keys()
        assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in found:
                    parameter.add_(found[name], alpha=-1.0)


def test_attention_of_bf16_has_the_gradient_of_its_values_in_float32(rng: torch.Generator) -> None:
    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=rng).bfloat16().to(DEVICE)

    near_rows, far_rows = (torch.randint(-1, rows, (6, k), generator=rng).to(DEVICE) for rows, k in ((7, 9), (5, 4)))
    sink = torch.randn(2, generator=rng).to(DEVICE)
    inputs, weights = [normal(6, 2, 64), normal(7, 64), normal(5, 64), sink], normal(6, 2, 64)
    sets = TrainingOps(TrainedOps()), TrainingOps(FastOps())
    (out, *found), (fast, *expected) = (
        gradients(
            lambda q, near, far, sink, ops=ops: ops.sparse_attention(q, near, near_rows, far, far_rows, sink, 0.1),
            inputs, weights,
        )
        for ops in sets
    )  # fmt: skip
    torch.testing.assert_close(out, fast, atol=2e-2, rtol=2e-2)
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()
