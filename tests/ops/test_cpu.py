"""FastOps and CpuOps against the specification, on awkward sizes; the weights that they keep; how a set is chosen."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from openv41 import formats
from openv41.errors import OpsError
from openv41.formats import FORMATS, INDEX, LATENT, WINDOW
from openv41.ops import Ops, choose
from openv41.ops.cpu import CpuOps
from openv41.ops.fast import FastOps, by_expert, round_activation
from openv41.ops.reference import ReferenceOps

REFERENCE = ReferenceOps()
SIZES = (1, 3, 17, 65)
SETS: dict[str, FastOps] = {weights: CpuOps(weights=weights) for weights in ("stored", "cached", "fp32", "bf16")}
FAST = FastOps()
BOTH = pytest.mark.parametrize("cpu", [SETS["stored"], FAST], ids=["cpu", "fast"])
SETS |= {"fast": FAST, "fast fp32": FastOps(weights="fp32")}
CPU = pytest.mark.parametrize("cpu", SETS.values(), ids=SETS)
PACKS = {"fp8": formats.pack_fp8_weight, "fp4": formats.pack_fp4_weight}


def normal(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=rng).to(dtype)


class Tally:
    """Collects results of both sets: bf16 ones may differ in at most 1 % of the values, and there by 2 ulp; what is
    smaller than `cancelled` of the rest is given an ulp of that size."""

    def __init__(self) -> None:
        self.equal: list[Tensor] = []

    def add(self, fast: Tensor, slow: Tensor, cancelled: float = 1 / 64) -> None:
        assert fast.dtype == slow.dtype and fast.shape == slow.shape
        assert torch.equal(fast.isfinite(), slow.isfinite())
        a, b = fast.double(), slow.double()
        self.equal.append((a == b).flatten())
        if b.numel():
            size = torch.maximum(b.abs(), b.square().mean().sqrt() * cancelled)
            ulp = torch.exp2(size.clamp_min(1e-300).log2().floor()) * torch.finfo(torch.bfloat16).eps
            assert ((a - b).abs() <= 2 * ulp).all(), f"{((a - b).abs() / ulp).max():.1f} ulp apart"

    def close(self, share: float = 0.99) -> None:
        assert torch.cat(self.equal).double().mean() >= share


def close(fast: Tensor, slow: Tensor) -> None:
    """float32 results: equal but for the order of sums and the last bits of functions."""
    assert fast.dtype == slow.dtype == torch.float32
    torch.testing.assert_close(fast, slow, atol=5e-6, rtol=5e-6)


GROUPS = [[1], [17], [3, 3, 3, 1], [1, 1, 64, 65], [2, 9, 9, 2]]
"""Rows of each group of full attention: alone, alike, unlike."""


# Linear maps


@CPU
def test_linear_maps_agree(cpu: FastOps, rng: torch.Generator) -> None:
    tally = Tally()
    for outputs, inputs in ((45, 96), (1, 32), (130, 320)):
        weights = [pack(normal(rng, outputs, inputs, dtype=torch.float32)) for pack in PACKS.values()]
        weights += [(normal(rng, outputs, inputs), None), (normal(rng, outputs, inputs, dtype=torch.float32), None)]
        for weight, scale in weights:
            for n in SIZES:
                x = normal(rng, n, inputs)
                x[0] *= 100
                if scale is not None or weight.dtype == torch.bfloat16:
                    tally.add(cpu.linear(x, weight, scale), REFERENCE.linear(x, weight, scale))
                if scale is None:
                    fast, slow = cpu.linear_wide(x, weight), REFERENCE.linear_wide(x, weight)
                    assert fast.dtype == slow.dtype == torch.float32
                    assert ((fast - slow).abs() <= 1e-6 * (x.float().abs() @ weight.float().abs().T)).all()
    tally.close()


@CPU
def test_linear_maps_with_a_bias_agree(cpu: FastOps, rng: torch.Generator) -> None:
    tally = Tally()
    for outputs, inputs in ((45, 96), (1, 32), (130, 588)):
        weight, bias = normal(rng, outputs, inputs), normal(rng, outputs)
        for n in SIZES:
            x = normal(rng, n, inputs)
            tally.add(cpu.linear_bias(x, weight, bias), REFERENCE.linear_bias(x, weight, bias))
    tally.close()


@CPU
def test_grouped_linear_agrees(cpu: FastOps, rng: torch.Generator) -> None:
    tally = Tally()
    for stored in (formats.pack_fp8_weight(normal(rng, 3 * 32, 64, dtype=torch.float32)), (normal(rng, 96, 64), None)):
        for n in SIZES:
            x = normal(rng, n, 3, 64)
            tally.add(cpu.grouped_linear(x, *stored), REFERENCE.grouped_linear(x, *stored))
    tally.close()


@CPU
@pytest.mark.parametrize("stored", ["fp8", "fp4", "bf16"])
def test_experts_agree(cpu: FastOps, stored: str, rng: torch.Generator) -> None:
    """Sums of a token's experts, in float32. A last bit may flip an fp8 rounding before w2, and then shows in a row."""

    def weight(outputs: int, inputs: int) -> tuple[Tensor, Tensor | None]:
        values = normal(rng, 7, outputs, inputs, dtype=torch.float32) * inputs**-0.5
        return PACKS[stored](values) if stored in PACKS else (values.bfloat16(), None)

    w1, w3, w2 = weight(64, 96), weight(64, 96), weight(96, 64)
    equal, rows = 0.0, 0
    for n in SIZES:
        x, routing = normal(rng, n, 96) * 3, torch.rand(n, 3, generator=rng)
        chosen = torch.rand(n, 7, generator=rng).argsort(1)[:, :3]
        fast, slow = (ops.experts(x, routing, chosen, w1, w2, w3, 10.0) for ops in (cpu, REFERENCE))
        torch.testing.assert_close(fast, slow, atol=0.03 * float(slow.square().mean().sqrt()), rtol=0.02)
        equal, rows = equal + float(((fast - slow).abs() <= 1e-6).double().mean(1).sum()), rows + n
    assert equal / rows > 0.97


@CPU
def test_no_token_at_all_gives_nothing(cpu: FastOps, rng: torch.Generator) -> None:
    weight = formats.pack_fp8_weight(normal(rng, 32, 64, dtype=torch.float32))
    experts = tuple(formats.pack_fp4_weight(normal(rng, 2, 32, 32, dtype=torch.float32)) for _ in range(3))
    for ops in (cpu, REFERENCE):
        x = normal(rng, 0, 64)
        assert ops.linear(x, *weight).shape == (0, 32)
        assert ops.linear_wide(x, normal(rng, 5, 64)).shape == (0, 5)
        out = ops.experts(x[:, :32], torch.zeros(0, 1), torch.zeros(0, 1, dtype=torch.int64), *experts, 10.0)
        assert out.shape == (0, 32)


# Norm, rotation, rounding, pooling


@BOTH
def test_norms_rotation_and_rounding_agree(cpu: FastOps, rng: torch.Generator) -> None:
    tally = Tally()
    for n in SIZES:
        x, weight = normal(rng, n, 3, 96) * 5, normal(rng, 96)
        tally.add(cpu.rms_norm(x, weight, 1e-20), REFERENCE.rms_norm(x, weight, 1e-20))
        tally.add(cpu.rms_norm(x * 0, weight, 1e-20), REFERENCE.rms_norm(x * 0, weight, 1e-20))
        angles = torch.rand(n, 16, generator=rng) * 9
        for inverse in (False, True):
            for heads in (x, x[:, 0]):
                turned = [ops.rotate(heads, angles.cos(), angles.sin(), inverse) for ops in (cpu, REFERENCE)]
                if cpu is FAST:  # complex products may round otherwise
                    tally.add(*turned)
                else:
                    assert torch.equal(*turned)
        for form in FORMATS.values():
            x = normal(rng, n, 2 * form.block)
            before = x.clone()
            assert torch.equal(cpu.quantise(x, form), REFERENCE.quantise(x, form))
            for packed in (False, True):
                kept = cpu.store(x, form, packed)
                assert torch.equal(kept, REFERENCE.store(x, form, packed))
                assert torch.equal(cpu.read(kept, form), REFERENCE.read(kept, form))
            assert torch.equal(x, before)
    tally.close()


@BOTH
def test_pooling_agrees(cpu: FastOps, rng: torch.Generator) -> None:
    tally = Tally()
    for groups in (0, *SIZES):
        kv, gate = (normal(rng, 140, 48, dtype=torch.float32) * 4 for _ in range(2))
        for ratio in (1, 2, 5):
            rows = torch.randint(140, (groups, ratio), generator=rng)
            tally.add(cpu.pool(kv, gate, rows), REFERENCE.pool(kv, gate, rows))
    tally.close()


# Index


@CPU
@pytest.mark.parametrize("n", SIZES)
def test_index_scores_are_equal(cpu: FastOps, n: int, rng: torch.Generator) -> None:
    """Weights of one size, so that the sum over the heads is exact in any order."""
    for heads, width, positions in ((1, 32, 1), (2, 64, 63), (5, 128, 64), (8, 32, 65), (3, 96, 640)):
        q, keys = INDEX.round(normal(rng, n, heads, width)), INDEX.round(normal(rng, positions, width))
        weights = torch.randint(-12, 13, (n, heads), generator=rng).bfloat16() / 8
        before = [x.clone() for x in (q, weights, keys)]
        assert torch.equal(cpu.index_scores(q, weights, keys), REFERENCE.index_scores(q, weights, keys))
        assert all(torch.equal(a, b) for a, b in zip(before, (q, weights, keys), strict=True))


def test_index_scores_of_any_weights_agree(rng: torch.Generator) -> None:
    tally = Tally()
    for cpu in SETS.values():
        q, keys = INDEX.round(normal(rng, 17, 8, 64)), INDEX.round(normal(rng, 640, 64))
        weights = normal(rng, 17, 8)
        tally.add(cpu.index_scores(q, weights, keys), REFERENCE.index_scores(q, weights, keys))
    tally.close(0.999)


def score_rows(rng: torch.Generator, n: int, positions: int) -> dict[str, Tensor]:
    """bf16 scores with many equal ones: zeros of both signs, all equal, few values, parts that are -inf."""
    signs = torch.rand(n, positions, generator=rng) < 0.5
    some = normal(rng, n, positions)
    return {
        "any": some,
        "zeros of both signs": torch.where(signs, 0.0, -0.0).bfloat16(),
        "all equal": torch.full((n, positions), -3.0).bfloat16(),
        "few values": torch.randint(-2, 3, (n, positions), generator=rng).bfloat16() * -0.5,
        "outside the candidates": some.masked_fill(signs, -torch.inf),
        "all outside": torch.full((n, positions), -torch.inf).bfloat16(),
        "huge and tiny": (some.float() * torch.where(signs, 1e38, 1e-39)).bfloat16(),
    }


@pytest.mark.parametrize("positions", [1, 2, 63, 64, 65, 640])
@BOTH
def test_picks_are_equal(cpu: FastOps, positions: int, rng: torch.Generator) -> None:
    for n in (1, 17):
        for name, scores in score_rows(rng, n, positions).items():
            visible = torch.randint(positions + 1, (n,), generator=rng)
            visible[0], visible[-1] = 0, positions
            for k in {1, max(1, positions // 3), positions - 1, positions} - {0}:
                picks = cpu.pick(scores, visible, k)
                assert torch.equal(picks, REFERENCE.pick(scores, visible, k)), (name, k)
                assert picks.shape == (n, k)
            for block, k in ((1, 3), (8, 1), (8, 3), (8, 1000)):
                kept = cpu.pick_blocks(scores, visible, block, k)
                assert torch.equal(kept, REFERENCE.pick_blocks(scores, visible, block, k)), (name, block, k)


def test_a_zero_counts_as_zero_whatever_its_sign() -> None:
    scores = torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0, 0.5]]).bfloat16()
    for ops in (REFERENCE, SETS["stored"], FAST):
        assert ops.pick(scores, torch.tensor([6]), 3).tolist() == [[0, 1, 5]]
        assert ops.pick(scores, torch.tensor([5]), 3).tolist() == [[0, 1, 3]]


# Attention

FLIPPED = 1.0
"""A probability that is rounded the other way is an ulp of what it weighs, though the sum be small."""


def lists(rng: torch.Generator, table: int, n: int, width: int) -> Tensor:
    rows = torch.randint(table, (n, width), generator=rng)
    rows[torch.rand(n, width, generator=rng) < 0.3] = -1
    return rows


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("packed", [False, True])
@BOTH
def test_sparse_attention_agrees(cpu: FastOps, packed: bool, n: int, rng: torch.Generator) -> None:
    tally = Tally()
    sink = normal(rng, 3, dtype=torch.float32)
    near, far = (REFERENCE.store(normal(rng, 200, 64), form, packed) for form in (WINDOW, LATENT))
    for near_width, far_width in ((1, None), (63, 0), (64, 1), (65, 63), (1, 64), (128, 640), (640, None), (3, 65)):
        if n == 65 and near_width + (far_width or 0) > 200:
            continue  # the reference takes its time
        q = normal(rng, n, 3, 64) * 2
        near_rows = lists(rng, 200, n, near_width)
        far_rows = None if far_width is None else lists(rng, 200, n, far_width)
        arguments = (q, near, near_rows, None if far_rows is None else far, far_rows, sink, 0.125)
        tally.add(cpu.sparse_attention(*arguments), REFERENCE.sparse_attention(*arguments), FLIPPED)
    tally.close()


@pytest.mark.parametrize("lengths", GROUPS, ids=str)
@BOTH
def test_full_attention_agrees(cpu: FastOps, lengths: list[int], rng: torch.Generator) -> None:
    q, k, v = (normal(rng, sum(lengths), 3, 16) for _ in range(3))
    fast, slow = (ops.full_attention(q, k, v, lengths, 0.25) for ops in (cpu, REFERENCE))
    tally = Tally()
    tally.add(fast, slow)
    tally.close()


@pytest.mark.parametrize("ops", [SETS["stored"], FAST, REFERENCE], ids=["cpu", "fast", "reference"])
def test_full_attention_is_each_groups_softmax(ops: ReferenceOps, rng: torch.Generator) -> None:
    for lengths in GROUPS:
        q, k, v = (normal(rng, sum(lengths), 2, 8) for _ in range(3))
        out = ops.full_attention(q, k, v, lengths, 0.5).double()
        for group in torch.arange(sum(lengths)).split(lengths):
            scores = torch.einsum("ihd,jhd->hij", q[group].double(), k[group].double()) * 0.5
            wanted = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[group].double())
            torch.testing.assert_close(out[group], wanted, atol=2e-2, rtol=1e-2)


def test_full_attention_is_row_stable(rng: torch.Generator) -> None:
    lengths = [5, 40, 33, 1]
    q, k, v = (normal(rng, sum(lengths), 2, 8) for _ in range(3))
    together = REFERENCE.full_attention(q, k, v, lengths, 0.5).split(lengths)
    for one, part in zip(together, zip(*(x.split(lengths) for x in (q, k, v)), strict=True), strict=True):
        assert torch.equal(one, REFERENCE.full_attention(*part, [len(one)], 0.5))
    assert REFERENCE.full_attention(q[:0], k[:0], v[:0], [], 0.5).shape == (0, 2, 8)


@pytest.mark.parametrize("function", ["silu", "gelu"])
@BOTH
def test_activations_agree(cpu: FastOps, function: str, rng: torch.Generator) -> None:
    x = torch.cat((normal(rng, 65, 33) * 4, torch.tensor([[0.0, 1e30, -1e30, 100.0, -100.0] * 7])[:, :33].bfloat16()))
    tally = Tally()
    slow = REFERENCE.activate(x, function)
    tally.add(cpu.activate(x, function), slow)
    tally.close()
    wanted = torch.nn.functional.silu(x.double()) if function == "silu" else torch.nn.functional.gelu(x.double())
    torch.testing.assert_close(slow.double(), wanted, atol=1e-6, rtol=2**-8)


@BOTH
def test_attention_over_few_rows_of_long_tables_agrees(cpu: FastOps, rng: torch.Generator) -> None:
    """Where a table is much longer than the lists, rows are decoded as they come."""
    tally = Tally()
    near, far = (normal(rng, rows, 64) for rows in (3000, 4000))
    for packed in (False, True):
        tables = REFERENCE.store(near, WINDOW, packed), REFERENCE.store(far, LATENT, packed)
        for n in (1, 17):
            rows = lists(rng, 3000, n, 40), lists(rng, 4000, n, 70)
            rows[1][:, 60:] = -1
            arguments = (normal(rng, n, 2, 64), tables[0], rows[0], tables[1], rows[1], torch.zeros(2), 0.125)
            tally.add(cpu.sparse_attention(*arguments), REFERENCE.sparse_attention(*arguments), FLIPPED)
    tally.close()


@pytest.mark.parametrize("ops", [SETS["stored"], FAST, REFERENCE], ids=["cpu", "fast", "reference"])
def test_attention_over_nothing_is_zero(ops: ReferenceOps, rng: torch.Generator) -> None:
    table = normal(rng, 10, 32)
    for near_width, far_width in ((0, None), (0, 0), (1, None), (70, None), (3, 65), (0, 2)):
        far_rows = None if far_width is None else torch.full((18, far_width), -1)
        far, near_rows = None if far_width is None else table, torch.full((18, near_width), -1)
        out = ops.sparse_attention(normal(rng, 18, 2, 32), table, near_rows, far, far_rows, torch.zeros(2), 0.2)
        assert out.shape == (18, 2, 32) and not out.any()


@BOTH
def test_a_maximum_that_rises_or_falls_is_no_matter(cpu: FastOps, rng: torch.Generator) -> None:
    """Scores of hundreds, the largest in the first block, in the last, or everywhere; and no sink."""
    tally = Tally()
    table = normal(rng, 200, 32)
    rising = (table.float() * torch.linspace(0, 8, 200).unsqueeze(1)).bfloat16()
    rows = torch.arange(200).expand(5, 200)
    for some in (rising, rising.flip(0), table * 8):
        for sink in (torch.zeros(2), torch.full((2,), -torch.inf), torch.full((2,), 300.0)):
            arguments = (normal(rng, 5, 2, 32) * 8, some, rows, None, None, sink, 1.0)
            tally.add(cpu.sparse_attention(*arguments), REFERENCE.sparse_attention(*arguments), FLIPPED)
    tally.close(0.98)


# Streams, router, gates


@CPU
def test_streams_agree(cpu: FastOps, rng: torch.Generator) -> None:
    tally = Tally()
    fn, base, scale = normal(rng, 24, 4 * 48, dtype=torch.float32), normal(rng, 24), torch.tensor([0.5, 0.7, 0.9])
    for n in SIZES:
        streams, y = normal(rng, n, 4, 48), normal(rng, n, 48)
        fast, slow = (ops.mix(streams, fn, base, scale, 20, 1e-6, 1e-20) for ops in (cpu, REFERENCE))
        for a, b in zip(fast, slow, strict=True):
            assert a.dtype == b.dtype == torch.float32
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
        pre, post, comb = slow
        tally.add(cpu.collapse(streams, pre), REFERENCE.collapse(streams, pre))
        tally.add(cpu.expand(y, streams, post, comb), REFERENCE.expand(y, streams, post, comb))
    tally.close()


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@BOTH
def test_routers_agree(cpu: FastOps, function: str, rng: torch.Generator) -> None:
    for n in SIZES:
        logits = normal(rng, n, 40, dtype=torch.float32) * 3
        logits[:, 7] = logits[:, 30] = 4.0  # equal scores
        for bias in (torch.zeros(40), normal(rng, n, 40, dtype=torch.float32)):
            (fast, chosen), (slow, expected) = (ops.route(logits, bias, 6, 1.5, function) for ops in (cpu, REFERENCE))
            assert torch.equal(chosen, expected)
            close(fast, slow)


@BOTH
def test_gates_agree(cpu: FastOps, rng: torch.Generator) -> None:
    tally = Tally()
    for n in SIZES:
        gate, up = normal(rng, n, 96) * 8, normal(rng, n, 96) * 8
        routing = torch.rand(n, 1, generator=rng)
        for limit in (0.0, 10.0):
            for weight in (None, routing):
                tally.add(cpu.swiglu(gate, up, limit, weight), REFERENCE.swiglu(gate, up, limit, weight))
        streams, keys, value = normal(rng, n, 4, 64), normal(rng, n, 4, 64), normal(rng, n, 64)
        opened, weight = torch.rand(n, generator=rng) < 0.7, normal(rng, 4, 64, dtype=torch.float32)
        arguments = (streams, keys, value, weight, opened, 1e-20)
        tally.add(cpu.engram_gate(*arguments), REFERENCE.engram_gate(*arguments))
        table, rows = WINDOW.pack(normal(rng, 30, 64)), torch.randint(30, (n, 3), generator=rng)
        assert torch.equal(cpu.look_up_rows(*table, rows), REFERENCE.look_up_rows(*table, rows))
    tally.close()


@pytest.mark.parametrize("kind", [CpuOps, FastOps])
def test_plain_numerics_agree_to_the_last_digits(kind: type[FastOps], rng: torch.Generator) -> None:
    def x(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    plain, cpu = ReferenceOps("plain"), kind("plain", weights="cached")
    weight = formats.pack_fp8_weight(torch.randn(45, 64, generator=rng))
    stacked = tuple(formats.pack_fp4_weight(torch.randn(3, 64, 64, generator=rng)) for _ in range(3))
    a, rows, angles = x(17, 64), lists(rng, 17, 17, 70), torch.rand(17, 4, generator=rng)
    chosen = torch.tensor([[0, 2]] * 17)
    calls = {
        "linear": (a, *weight),
        "linear_wide": (a, x(9, 64).float()),
        "experts": (a, x(17, 2), chosen, *stacked, 10.0),
        "index_scores": (x(17, 3, 8), x(17, 3), x(40, 8)),
        "sparse_attention": (x(17, 2, 64), a, rows, a, rows, torch.zeros(2), 0.125),
        "rms_norm": (a, torch.ones(64), 1e-20),
        "linear_bias": (a, x(9, 64).float(), x(9).float()),
        "full_attention": (x(17, 2, 8), x(17, 2, 8), x(17, 2, 8), [5, 5, 7], 0.5),
        "activate": (a, "gelu"),
        "grouped_linear": (x(17, 3, 8), x(12, 8), None),
        "rotate": (x(17, 2, 9), angles.cos(), angles.sin(), True),
        "mix": (x(17, 3, 8), x(15, 24), x(15) * 30, x(3), 20, 1e-6, 1e-20),
        "collapse": (x(17, 3, 8), x(17, 3)),
        "expand": (x(17, 8), x(17, 3, 8), x(17, 3), x(17, 3, 3)),
        "swiglu": (a, x(17, 64), 0.7, x(17, 1)),
        "pool": (a, x(17, 64), torch.tensor([[0, 1], [15, 16]])),
        "route": (x(17, 8), x(17, 8), 3, 1.5, "sqrtsoftplus"),
    }
    for name, arguments in calls.items():
        for fast, slow in zip(*(listed(getattr(ops, name)(*arguments)) for ops in (cpu, plain)), strict=True):
            assert fast.dtype == slow.dtype, name
            torch.testing.assert_close(fast, slow, atol=1e-10, rtol=1e-12, msg=name)


def listed(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def test_a_rounding_in_few_steps_is_the_formats(rng: torch.Generator) -> None:
    """Of all sizes that occur, powers of two and their neighbours, zeros."""
    size = torch.randint(-40, 40, (200, 4, 1), generator=rng).double().exp2()
    edges = torch.nextafter(2.0 ** torch.arange(-12, 20.0), torch.tensor([[-torch.inf], [0.0], [torch.inf]]))
    some = [torch.randn(200, 4, 32, generator=rng).double() * size, torch.zeros(1, 32), edges, 448 * edges]
    for x in some:
        for dtype in (torch.bfloat16, torch.float32):
            assert torch.equal(round_activation(x.to(dtype)), WINDOW.round(x.to(dtype)))


@pytest.mark.parametrize("experts", [3, 40])
def test_experts_that_take_all_tokens_and_each_its_own_agree(experts: int, rng: torch.Generator) -> None:
    """Few experts take all tokens at once, many are gone through one by one."""
    w1, w3, w2 = (torch.randn(experts, *shape, generator=rng) for shape in ((6, 8), (6, 8), (8, 6)))
    x, routing = torch.randn(17, 8, generator=rng), torch.rand(17, 2, generator=rng)
    chosen = torch.rand(17, experts, generator=rng).argsort(1)[:, :2]
    arguments = (x, routing, chosen, (w1, None), (w2, None), (w3, None), 1.0)
    fast, slow = (kind("plain", torch.float32).experts(*arguments) for kind in (FastOps, ReferenceOps))
    torch.testing.assert_close(fast, slow, atol=1e-4, rtol=1e-4)
    for expert, token, place in by_expert(chosen, experts):
        assert (chosen == expert).nonzero().tolist() == torch.stack((token, place), 1).tolist()


# Weights that are kept


KEEPING = pytest.mark.parametrize("weights", ["cached", "fp32", "bf16"])


def parameters(rng: torch.Generator, stored: str) -> tuple[nn.Parameter, nn.Parameter]:
    codes, scale = PACKS[stored](normal(rng, 32, 64, dtype=torch.float32))
    return nn.Parameter(codes, requires_grad=False), nn.Parameter(scale, requires_grad=False)


@KEEPING
@pytest.mark.parametrize("stored", ["fp8", "fp4"])
def test_a_kept_weight_is_made_once_and_anew_when_it_changes(weights: str, stored: str, rng: torch.Generator) -> None:
    ops, x = CpuOps(weights=weights), normal(rng, 65, 64)
    weight, scale = parameters(rng, stored)
    first = ops.values(weight, scale)
    assert ops.values(weight, scale) is first
    codes, other = parameters(rng, stored)
    with torch.no_grad():
        weight.copy_(codes)
        scale.copy_(other)
    assert torch.equal(ops.values(weight, scale), formats.unpack_weight(codes, other).to(first.dtype))
    tally = Tally()
    tally.add(ops.linear(x, weight, scale), REFERENCE.linear(x, codes, other))
    tally.close()


@KEEPING
def test_a_kept_weight_is_made_anew_when_only_its_scale_changes(weights: str, rng: torch.Generator) -> None:
    ops = CpuOps(weights=weights)
    weight, scale = parameters(rng, "fp4")
    before = ops.values(weight, scale).clone()
    with torch.no_grad():
        scale.copy_((scale.float() * 4).to(scale.dtype))
    assert torch.equal(ops.values(weight, scale), before * 4)


@KEEPING
def test_a_plain_weight_that_is_trained_is_not_stale(weights: str, rng: torch.Generator) -> None:
    ops, x = CpuOps(weights=weights), normal(rng, 3, 64)
    for dtype in (torch.bfloat16, torch.float32):
        weight = nn.Parameter(normal(rng, 5, 64, dtype=dtype))
        before = ops.linear_wide(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        torch.testing.assert_close(ops.linear_wide(x, weight), before * 2)


@KEEPING
def test_a_kept_weight_goes_with_its_parameter(weights: str, rng: torch.Generator) -> None:
    ops = CpuOps(weights=weights)
    weight, scale = parameters(rng, "fp8")
    held = weakref.ref(ops.values(weight, scale))
    gone = weakref.ref(weight)
    assert len(ops.held) == 1 and held() is not None
    del weight
    gc.collect()
    assert gone() is None and held() is None and len(ops.held) == 0


def test_nothing_is_kept_where_weights_stay_stored(rng: torch.Generator) -> None:
    ops = CpuOps(weights="stored")
    weight, scale = parameters(rng, "fp8")
    ops.linear(normal(rng, 3, 64), weight, scale)
    assert len(ops.held) == 0


def test_two_sets_keep_weights_of_their_own(rng: torch.Generator) -> None:
    weight, scale = parameters(rng, "fp8")
    short, long = CpuOps(weights="bf16"), CpuOps(weights="fp32")
    assert short.values(weight, scale).dtype == torch.bfloat16
    assert long.values(weight, scale).dtype == torch.float32
    assert torch.equal(short.values(weight, scale).float(), long.values(weight, scale))
    assert CpuOps("plain", weights="bf16").values(weight, scale).dtype == torch.float64


@KEEPING
def test_weights_made_in_inference_mode_can_be_kept(weights: str, rng: torch.Generator) -> None:
    with torch.inference_mode():
        weight, scale = (nn.Parameter(x.data.clone(), requires_grad=False) for x in parameters(rng, "fp8"))
        ops = CpuOps(weights=weights)
        assert ops.linear(normal(rng, 3, 64), weight, scale).shape == (3, 32)


# Choosing


def test_a_set_is_chosen_by_name_or_by_device() -> None:
    assert choose().name == "cpu" and type(choose("cpu", "cpu")) is CpuOps
    assert type(choose("cpu", "reference")) is ReferenceOps
    assert type(choose("cuda", "auto")) is FastOps and type(choose("cuda:1", "reference")) is ReferenceOps
    assert type(choose("cpu", "fast")) is FastOps
    assert all(isinstance(choose("cpu", name), Ops) for name in ("reference", "fast", "cpu", "auto"))


def test_options_reach_the_set() -> None:
    ops = choose("cpu", "cpu", "plain", dtype=torch.float32, weights="fp32")
    assert (ops.numerics, ops.dtype) == ("plain", torch.float32) and isinstance(ops, CpuOps) and ops.caches
    assert choose("cpu", "reference", "plain").dtype == torch.float64
    assert choose("cpu", "auto").dtype == torch.bfloat16


def test_a_set_that_does_not_exist_or_does_not_fit_is_refused() -> None:
    with pytest.raises(OpsError, match="'swift': use one of reference, fast, cpu.*, or auto"):
        choose("cpu", "swift")
    with pytest.raises(OpsError, match="not on cuda"):
        choose("cuda", "cpu")
    for name in ("reference", "fast", "cpu"):
        with pytest.raises(OpsError, match="numerics='plain'"):
            choose("cpu", name, "published", dtype=torch.float32)


def test_a_word_that_does_not_exist_is_refused_even_where_types_are_not_checked() -> None:
    """Called unwrapped: under test the shape checks refuse the word first."""
    refused = (OpsError, TypeError)
    try:
        import jaxtyping

        refused += (jaxtyping.TypeCheckError,)
    except ImportError:
        pass
    with pytest.raises(refused, match="numerics"):
        ReferenceOps("exact")
    with pytest.raises(refused, match="weights"):
        CpuOps(weights="fp16")
