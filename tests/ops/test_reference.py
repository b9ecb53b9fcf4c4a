"""The specification against float64 formulas and values worked out by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from openv41 import formats
from openv41.errors import OpsError
from openv41.formats import INDEX, LATENT, WINDOW
from openv41.model.layers import Rotary
from openv41.ops import choose
from openv41.ops.reference import ReferenceOps

OPS = ReferenceOps()
PLAIN = ReferenceOps("plain")


def normal(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=rng).to(dtype)


def rows_of(rng: torch.Generator, table: int, *shape: int) -> Tensor:
    return torch.randint(table, shape, generator=rng)


# Sparse attention


def dense_attention(q: Tensor, table: Tensor, rows: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Softmax over the rows listed and a sink column, all in float64, one query and head at a time."""
    result = torch.zeros_like(q.double())
    for n in range(q.shape[0]):
        listed = table.double()[rows[n][rows[n] >= 0]]
        for h in range(q.shape[1]):
            scores = torch.cat((listed @ q[n, h].double() * scale, sink[h].double()[None]))
            result[n, h] = scores.softmax(0)[:-1] @ listed
    return result


def attend(q: Tensor, table: Tensor, rows: Tensor, sink: Tensor, ops: ReferenceOps = OPS, scale: float = 0.2) -> Tensor:
    return ops.sparse_attention(q, table, rows, None, None, sink, scale)


@pytest.fixture
def scene(rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries [5, 3, 32], a table of 90 rows, lists of 150 with holes and duplicates, sinks."""
    rows = rows_of(rng, 90, 5, 150)
    rows[torch.rand(5, 150, generator=rng) < 0.3] = -1
    return normal(rng, 5, 3, 32), normal(rng, 90, 32), rows, normal(rng, 3, dtype=torch.float32)


def test_sparse_attention_is_a_dense_softmax_with_a_sink_column(scene) -> None:
    q, table, rows, sink = scene
    expected = dense_attention(q, table, rows, sink, 0.2)
    torch.testing.assert_close(attend(q, table, rows, sink).double(), expected, atol=6e-3, rtol=4e-3)
    plain = attend(q.double(), table.double(), rows, sink.double(), PLAIN)
    torch.testing.assert_close(plain, expected, atol=1e-12, rtol=0)


def test_the_maximum_may_come_in_any_block(scene) -> None:
    """Scores of up to 1000, rising and falling from block to block: only the largest entries count."""
    q, table, rows, sink = scene
    for one in (q * 40, -q * 40):
        expected = dense_attention(one, table, rows, sink, 0.2)
        torch.testing.assert_close(attend(one, table, rows, sink).double(), expected, atol=2e-2, rtol=1e-2)


def test_probabilities_are_rounded_to_bf16_but_not_in_the_denominator() -> None:
    """One entry of weight 1 and value 0, and 62 of weight 0.5018 and value 1: bf16 has 0.5."""
    q, table = torch.zeros(1, 1, 32), torch.zeros(2, 32)
    q[0, 0, 0], table[1, 0], table[1, 1] = 1.0, -1.0, 1.0
    out = OPS.sparse_attention(
        q.bfloat16(), table.bfloat16(), torch.tensor([[0] + [1] * 62]), None, None, torch.tensor([-torch.inf]),
        -math.log(0.5018),
    )  # fmt: skip
    right, both, neither = 62 * 0.5 / (1 + 62 * 0.5018), 62 * 0.5 / (1 + 62 * 0.5), 62 * 0.5018 / (1 + 62 * 0.5018)
    short = torch.tensor([right, both, neither]).bfloat16().tolist()
    assert out[0, 0, 1].item() == short[0] and short[0] not in short[1:]


@pytest.mark.parametrize("numerics", ["published", "plain"])
def test_a_list_of_nothing_gives_exact_zero(numerics: str, rng: torch.Generator) -> None:
    ops = choose("cpu", "reference", numerics)
    q, table = normal(rng, 2, 3, 32, dtype=ops.dtype), normal(rng, 9, 32, dtype=ops.dtype)
    for width in (1, 64, 130):
        rows = torch.full((2, width), -1)
        rows[1, -1] = 4
        out = ops.sparse_attention(q, table, rows, None, None, torch.zeros(3), 0.2)
        assert torch.equal(out[0], torch.zeros(3, 32, dtype=ops.dtype)) and out[1].any()


def test_a_sink_of_minus_infinity_is_no_sink(scene) -> None:
    q, table, rows, _ = scene
    none = torch.full((3,), -torch.inf)
    expected = dense_attention(q, table, rows, none, 0.2)
    torch.testing.assert_close(attend(q, table, rows, none).double(), expected, atol=6e-3, rtol=4e-3)
    one = attend(q, table, rows[:, :1].clamp_min(0), none)
    assert torch.equal(one, table[rows[:, :1].clamp_min(0)].expand(-1, 3, -1))


def test_the_sink_is_not_scaled_and_joins_once() -> None:
    """Scores 0 and a sink of ln 3: each of 65 rows has 1 / 68, in one block or two."""
    q, table = torch.zeros(1, 1, 32), torch.ones(65, 32)
    out = attend(q.bfloat16(), table.bfloat16(), torch.arange(65).unsqueeze(0), torch.tensor([math.log(3)]))
    assert (out.float() - 65 / 68).abs().max() < 2.0**-8


def test_duplicates_count_each_time() -> None:
    table = torch.stack((torch.ones(32), -torch.ones(32))).bfloat16()
    rows, q = torch.tensor([[0, 1, 0, 0]]), torch.zeros(1, 1, 32).bfloat16()
    assert (attend(q, table, rows, torch.tensor([-torch.inf])) == 0.5).all()


def test_trailing_columns_of_nothing_change_no_bit(scene) -> None:
    q, table, rows, sink = scene
    usual = attend(q, table, rows, sink)
    for more in (1, 42, 64, 200):
        assert torch.equal(attend(q, table, torch.cat((rows, torch.full((5, more), -1)), 1), sink), usual)


def test_empty_blocks_change_no_bit(scene) -> None:
    """Blocks of 64 entries without a row, before, between and behind."""
    q, table, rows, sink = scene
    hole = torch.full((5, 64), -1)
    a, b, c = rows.split(64, 1)
    longer = torch.cat((hole, a, hole, hole, b, hole, c), 1)
    assert torch.equal(attend(q, table, longer, sink), attend(q, table, rows, sink))


@pytest.mark.parametrize("cut", [0, 1, 64, 100, 150])
def test_near_and_far_lists_are_one_list(cut: int, scene) -> None:
    q, table, rows, sink = scene
    near, far = table, table.flip(0)
    far_rows = torch.where(rows[:, cut:] >= 0, 89 - rows[:, cut:], -1)
    out = OPS.sparse_attention(q, near, rows[:, :cut], far, far_rows, sink, 0.2)
    assert torch.equal(out, attend(q, table, rows, sink))


def test_tables_of_records_give_the_bits_of_rounded_rows(rng: torch.Generator) -> None:
    q, sink = normal(rng, 40, 2, 64), torch.zeros(2)
    near, far = normal(rng, 30, 64), normal(rng, 20, 64)
    lists = rows_of(rng, 30, 40, 17) - 1, rows_of(rng, 20, 40, 9) - 1
    tables = [
        (OPS.store(near, WINDOW, packed), OPS.store(far, LATENT, packed)) for packed in (False, True)
    ]  # fmt: skip
    wide, packed = (OPS.sparse_attention(q, a, lists[0], b, lists[1], sink, 0.2) for a, b in tables)
    assert tables[1][0].dtype == torch.uint8 and torch.equal(wide, packed)


def test_a_query_does_not_depend_on_the_others(scene) -> None:
    q, table, rows, sink = scene
    many, lists = q.repeat(8, 1, 1), rows.repeat(8, 1)
    together = attend(many, table, lists, sink)
    assert all(torch.equal(attend(q[i : i + 1], table, rows[i : i + 1], sink)[0], together[35 + i]) for i in range(5))
    assert attend(q[:0], table, rows[:0], sink).shape == (0, 3, 32)


@pytest.mark.parametrize(
    "name, poison",
    [
        ("reference", 1e4),
        ("reference", 3e38),
        ("reference", torch.nan),
        ("fast", 1e4),
        ("fast", 3e38),
        ("fast", torch.nan),
        ("cpu", 1e4),
        ("cpu", 3e38),
        ("cpu", torch.nan),
    ],
)
def test_row_minus_one_does_not_read_row_zero(name: str, poison: float, scene) -> None:
    """Row 0 belongs to slot 0: whatever that conversation holds, the others' holes must not read it."""
    q, table, rows, sink = scene
    ops = choose("cpu", name)
    rows = torch.where(rows == 0, 1, rows)
    usual = attend(q, table, rows, sink, ops)
    table = table.clone()
    table[0] = poison
    assert torch.equal(attend(q, table, rows, sink, ops), usual)


# Rotation


def test_rotation_turns_adjacent_pairs_of_the_tail() -> None:
    angle = torch.tensor([[math.pi / 2, 0.3]])
    x = torch.tensor([[9.0, 8.0, 1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    turned = PLAIN.rotate(x, angle.cos(), angle.sin())[0]
    c, s = math.cos(0.3), math.sin(0.3)
    expected = torch.tensor([9.0, 8.0, -2.0, 1.0, 3 * c - 4 * s, 3 * s + 4 * c], dtype=torch.float64)
    torch.testing.assert_close(turned, expected, atol=1e-6, rtol=0)
    first, second = x[:, 2:4], x[:, 4:6]  # half-split: entries i and i + half make a pair
    halves = torch.cat((first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()), 1)
    assert (halves[0] - turned[2:]).abs().max() > 0.9


@pytest.mark.parametrize("ops", [OPS, PLAIN], ids=["published", "plain"])
def test_the_inverse_turns_back(ops: ReferenceOps, rng: torch.Generator) -> None:
    x = normal(rng, 7, 3, 24, dtype=ops.dtype)
    angles = Rotary(8, 10000.0).at(torch.tensor([0, 1, 5, 99, 1000, 65535, 7]))
    back = ops.rotate(ops.rotate(x, *angles, inverse=False), *angles, inverse=True)
    torch.testing.assert_close(back, x, atol=1e-6 if ops.plain else 4e-2, rtol=0)
    assert torch.equal(back[..., :16], x[..., :16]) and torch.equal(ops.rotate(x, *angles)[0], x[0])


def half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    head, a, b = x.split((x.shape[-1] - 2 * half, half, half), -1)
    return torch.cat((head, a * cos - b * sin, a * sin + b * cos), -1)


def test_an_index_score_depends_on_the_distance_alone(rng: torch.Generator) -> None:
    """And on the layout of pairs: one side turned half-split gives another score, that depends on the position too."""
    rotary = Rotary(16, 10000.0)
    q, k = (normal(rng, 1, 24, dtype=torch.float64) for _ in range(2))
    q, k = q * 5 / q.norm(), k * 5 / k.norm()  # angles of float32 then cost 1e-4 at most
    weights = torch.ones(1, 1, dtype=torch.float64)

    def score(i: int, j: int, turn: Callable[..., Tensor] = half_split) -> float:
        turned_q = PLAIN.rotate(q, *rotary.at(torch.tensor([i])))
        turned_k = turn(k, *rotary.at(torch.tensor([j])))
        signed = [PLAIN.index_scores(sign * turned_q.unsqueeze(1), weights, turned_k).item() for sign in (1, -1)]
        return signed[0] - signed[1]  # relu hides negative products: take both signs

    for distance in (0, 1, 7, -3):
        right = [score(j + distance, j, PLAIN.rotate) for j in (3, 4, 20, 63, 64, 90)]
        assert max(right) - min(right) < 1e-4
    right = [score(j + 7, j, PLAIN.rotate) for j in (3, 20)]
    wrong = [score(j + 7, j) for j in (3, 20, 40, 63)]
    assert max(wrong) - min(wrong) > 1e-2
    assert max(abs(one - right[0]) for one in wrong) > 1e-2
    others = [score(3 + distance, 3, PLAIN.rotate) for distance in range(8)]
    assert max(others) - min(others) > 1e-2


# Index: scores, picks, blocks


@pytest.mark.parametrize("ops", [OPS, PLAIN], ids=["published", "plain"])
def test_negative_products_are_cut_before_they_are_weighted(ops: ReferenceOps) -> None:
    q = torch.tensor([[[1.0] * 32, [-1.0] * 32, [0.5] * 32]], dtype=ops.dtype)
    keys = torch.tensor([[1.0] * 32, [-1.0] * 32], dtype=ops.dtype)
    weights = torch.tensor([[2.0, -3.0, -1.0]], dtype=ops.dtype)
    # key 0: 32 * 2 + 0 - 16; key 1: 0 - 3 * 32 + 0
    assert ops.index_scores(q, weights, keys).tolist() == [[48.0, -96.0]]


def test_index_scores_round_each_share_to_bf16_and_the_sum_once() -> None:
    """Three shares of 48 x 1.0078125 = 48.375, which is 48.5 in bf16; 145.5 is 146, where 145.125 would be 145."""
    q, keys = torch.ones(1, 3, 32).bfloat16(), torch.full((1, 32), 1.5).bfloat16()
    weights = torch.full((1, 3), 1.0078125).bfloat16()
    assert OPS.index_scores(q, weights, keys).item() == 146.0


def test_index_scores_are_near_the_float64_formula(rng: torch.Generator) -> None:
    q, keys, weights = INDEX.round(normal(rng, 6, 4, 64)), INDEX.round(normal(rng, 50, 64)), normal(rng, 6, 4)
    products = torch.einsum("nic,pc->nip", q.double(), keys.double()).relu() * weights.double().unsqueeze(-1)
    error = (OPS.index_scores(q, weights, keys).double() - products.sum(1)).abs()
    assert (error <= products.abs().sum(1) * 3.1 * 2.0**-8).all()  # three roundings to bf16
    assert OPS.index_scores(q, weights, keys[:0]).shape == (6, 0)


def test_picks_are_the_best_in_order_of_position() -> None:
    scores = torch.tensor([[5.0, 1.0, 9.0, 7.0, 8.0, 0.0]] * 4).bfloat16()
    visible = torch.tensor([6, 4, 2, 0])
    assert OPS.pick(scores, visible, 3).tolist() == [[2, 3, 4], [0, 2, 3], [0, 1, -1], [-1, -1, -1]]


def test_equal_scores_go_to_the_lower_position() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0], [0.0, -0.0, 0.0, -0.0, 0.0, 0.0]]).bfloat16()
    assert OPS.pick(scores, torch.tensor([6, 6]), 3).tolist() == [[0, 1, 3], [0, 1, 2]]
    many = torch.ones(1, 3000).bfloat16()
    assert OPS.pick(many, torch.tensor([2999]), 512)[0].tolist() == list(range(512))


def test_more_picks_than_positions_are_filled_with_nothing() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]]).bfloat16()
    assert OPS.pick(scores, torch.tensor([3, 1]), 5).tolist() == [[0, 1, 2, -1, -1], [0, -1, -1, -1, -1]]
    assert OPS.pick(scores[:, :0], torch.tensor([0, 0]), 2).tolist() == [[-1, -1], [-1, -1]]


def test_hidden_positions_are_never_picked_however_high(rng: torch.Generator) -> None:
    scores, visible = normal(rng, 30, 40), torch.arange(30)
    scores[torch.arange(40) >= visible.unsqueeze(1)] = 1e30
    picks = OPS.pick(scores, visible, 8)
    for row, seen in zip(range(30), visible.tolist(), strict=True):
        best = sorted(range(seen), key=lambda j, row=row: (-float(scores[row, j]), j))[:8]
        assert picks[row].tolist() == sorted(best) + [-1] * (8 - len(best))


def test_kept_blocks_are_the_best_with_the_newest_pinned() -> None:
    """Blocks of 2: 0-1, 2-3, 4-5, and 6 alone."""
    scores = torch.tensor([[0.0, 9.0, 8.0, 1.0, 2.0, 3.0, -5.0]] * 5).bfloat16()
    visible = torch.tensor([7, 6, 3, 1, 0])
    assert OPS.pick_blocks(scores, visible, 2, 2).int().tolist() == [
        [1, 0, 0, 1],  # position 6, the lowest score, lies in the newest block
        [1, 0, 1, 0],
        [1, 1, 0, 0],  # the newest block is visible in part
        [1, 0, 0, 0],  # position 1, the best, is hidden
        [0, 0, 0, 0],
    ]


def test_kept_blocks_equal_a_search_by_hand(rng: torch.Generator) -> None:
    scores = torch.randint(-3, 4, (41, 37), generator=rng).bfloat16()  # many are equal
    visible = torch.arange(41).clamp_max(37)
    kept = OPS.pick_blocks(scores, visible, 4, 3)
    assert kept.shape == (41, 10)
    for row, seen in enumerate(visible.tolist()):
        blocks = [range(first, min(first + 4, seen)) for first in range(0, seen, 4)]
        highest = [max(scores[row, block].tolist()) for block in blocks]
        best = sorted(range(len(blocks)), key=lambda b, high=highest: (b != len(high) - 1, -high[b], b))
        assert kept[row].nonzero().flatten().tolist() == sorted(best[:3])


# Hyper-connections


def sinkhorn64(logits: Tensor, rounds: int, eps: float) -> Tensor:
    comb = logits.double().softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


@pytest.mark.parametrize("spread", [1.0, 5.0, 80.0])
def test_sinkhorn_equals_the_formula_and_its_columns_sum_to_one(spread: float, rng: torch.Generator) -> None:
    logits = normal(rng, 50, 4, 4, dtype=torch.float32) * spread
    comb = OPS.sinkhorn(logits, 20, 1e-6)
    assert comb.isfinite().all() and (comb >= 0).all()
    assert (comb.sum(1) - 1).abs().max() < 1e-5
    torch.testing.assert_close(comb.double(), sinkhorn64(logits, 20, 1e-6), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "ops", [OPS, PLAIN, choose("cpu", "fast"), choose("cpu", "fast", "plain")],
    ids=["published", "plain", "fast", "fast plain"],
)  # fmt: skip
def test_sinkhorn_of_logits_of_plus_and_minus_80_is_finite(ops: ReferenceOps) -> None:
    """unsloth-zoo#859: and so is its gradient."""
    wide = torch.float64 if ops.plain else torch.float32
    signs = torch.tensor([[1, -1, 1, -1], [-1, -1, -1, -1], [1, 1, 1, 1], [1, -1, -1, -1]], dtype=wide)
    logits = (80 * signs.unsqueeze(0)).requires_grad_()
    comb = ops.sinkhorn(logits, 20, 1e-6)
    assert comb.isfinite().all() and (comb.sum(1) - 1).abs().max() < 1e-5
    (comb * torch.arange(16.0, dtype=wide).view(1, 4, 4)).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_the_mix_equals_its_formula(rng: torch.Generator) -> None:
    streams, fn, base = normal(rng, 5, 4, 32), normal(rng, 24, 128, dtype=torch.float32), normal(rng, 24)
    scale = torch.tensor([0.5, 0.7, 0.9])
    pre, post, comb = OPS.mix(streams, fn, base, scale, 20, 1e-6, 1e-20)
    flat = streams.double().flatten(1)
    logits = flat @ fn.double().T / flat.square().mean(1, keepdim=True).sqrt()
    a, b, c = logits.split((4, 4, 16), 1)
    x, y, z = base.double().split((4, 4, 16))
    torch.testing.assert_close(pre.double(), (a * 0.5 + x).sigmoid() + 1e-6, atol=2e-6, rtol=0)
    torch.testing.assert_close(post.double(), 2 * (b * 0.7 + y).sigmoid(), atol=4e-6, rtol=0)
    expected = sinkhorn64((c * 0.9 + z).unflatten(1, (4, 4)), 20, 1e-6)
    torch.testing.assert_close(comb.double(), expected, atol=1e-5, rtol=1e-4)
    assert pre.dtype == post.dtype == comb.dtype == torch.float32


def test_collapse_and_expand_by_hand() -> None:
    """comb[i, j] carries stream i to stream j, not the other way round."""
    streams = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]]).bfloat16()
    assert OPS.collapse(streams, torch.tensor([[2.0, 0.5]])).tolist() == [[7.0, 14.0]]
    comb = torch.tensor([[[0.0, 1.0], [0.5, 0.0]]])
    out = OPS.expand(torch.tensor([[3.0, 4.0]]).bfloat16(), streams, torch.tensor([[1.0, 2.0]]), comb)
    assert out.tolist() == [[[3.0 + 5.0, 4.0 + 10.0], [6.0 + 1.0, 8.0 + 2.0]]]


# Experts


def scores_by_hand(logits: list[float], function: str) -> list[float]:
    if function == "softmax":
        return [math.exp(x) / sum(map(math.exp, logits)) for x in logits]
    if function == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in logits]
    return [math.sqrt(math.log1p(math.exp(x))) for x in logits]


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("ops", [OPS, PLAIN], ids=["published", "plain"])
def test_the_router_chooses_by_biased_scores_and_weighs_by_unbiased_ones(ops: ReferenceOps, function: str) -> None:
    row = [0.5, 2.0, -1.0, 1.5, 0.0]
    logits = torch.tensor([row], dtype=torch.float64 if ops.plain else torch.float32)
    scores = scores_by_hand(row, function)
    for bias, best in (([0.0] * 5, [1, 3]), ([0.0, 0.0, 9.0, 0.0, 7.0], [2, 4]), ([0.0, -9.0, 0.0, 0.0, 0.0], [3, 0])):
        weights, chosen = ops.route(logits, torch.tensor(bias), 2, 1.5, function)
        assert chosen.tolist() == [best]
        total = sum(scores[e] for e in best)
        torch.testing.assert_close(weights[0].double(), torch.tensor([1.5 * scores[e] / total for e in best]).double(),
                                   atol=1e-6, rtol=0)  # fmt: skip


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_experts_of_equal_score_go_to_the_lower_number(function: str) -> None:
    logits = torch.zeros(3, 40)
    logits[1, [7, 30]] = 1.0
    weights, chosen = OPS.route(logits, torch.zeros(40), 3, 1.0, function)
    assert chosen.tolist() == [[0, 1, 2], [7, 30, 0], [0, 1, 2]]
    torch.testing.assert_close(weights[0], torch.full((3,), 1 / 3))


def test_every_token_may_have_a_bias_of_its_own() -> None:
    """Image tokens have another one: it must count (tokenspeed#1473)."""
    bias = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 99.0]])
    weights, chosen = OPS.route(torch.tensor([[3.0, 2.0, 1.0]] * 2), bias, 1, 1.5, "sqrtsoftplus")
    assert chosen.tolist() == [[0], [2]]
    expected = [1.5 * scores_by_hand([3.0, 2.0, 1.0], "sqrtsoftplus")[best] for best in (0, 2)]
    torch.testing.assert_close(weights.flatten(), torch.tensor(expected))


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("ops", [OPS, PLAIN], ids=["published", "plain"])
def test_a_single_expert_is_weighed_by_its_score(ops: ReferenceOps, function: str) -> None:
    """Not by 1, its score over itself: recorded drafts, of one active expert, say so."""
    row = [0.5, 2.0, -1.0]
    logits = torch.tensor([row], dtype=torch.float64 if ops.plain else torch.float32)
    weights, chosen = ops.route(logits, torch.zeros(3), 1, 1.5, function)
    assert chosen.tolist() == [[1]]
    torch.testing.assert_close(weights.item(), 1.5 * scores_by_hand(row, function)[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("ops", [OPS, PLAIN], ids=["published", "plain"])
def test_swiglu_clamps_the_gate_above_and_up_on_both_sides(ops: ReferenceOps) -> None:
    gate = torch.tensor([[50.0, 50.0, 50.0, -50.0, -20.0, 1.0]], dtype=ops.dtype)
    up = torch.tensor([[50.0, -50.0, 0.5, 50.0, -50.0, 2.0]], dtype=ops.dtype)

    def silu(x: float) -> float:
        return x / (1 + math.exp(-x))

    def expect(values: list[float], limit: float, routing: Tensor | None = None) -> None:
        result = ops.swiglu(gate, up, limit, routing)
        assert result.dtype == ops.dtype
        expected = torch.tensor([values], dtype=torch.float64)
        torch.testing.assert_close(result.double(), expected, atol=0, rtol=1e-9 if ops.plain else 2.0**-8)

    ten = silu(10)
    expect([10 * ten, -10 * ten, 0.5 * ten, 10 * silu(-50), -10 * silu(-20), 2 * silu(1)], 10.0)
    expect([2500.0, -2500.0, 25.0, 50 * silu(-50), -50 * silu(-20), 2 * silu(1)], 0.0)
    half = torch.full((1, 1), 0.5, dtype=torch.float64 if ops.plain else torch.float32)
    expect([5 * ten, -5 * ten, 0.25 * ten, 5 * silu(-50), -5 * silu(-20), silu(1)], 10.0, half)


def test_swiglus_gradient_stops_at_the_clamps() -> None:
    """hyper-parallel#856: gradients above, below and between the clamps, against differences."""
    gate = torch.tensor([[12.0, 9.0, -12.0, 3.0]], dtype=torch.float64, requires_grad=True)
    up = torch.tensor([[1.0, 12.0, -9.0, -12.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g, u: PLAIN.swiglu(g, u, 10.0, None), (gate, up))
    PLAIN.swiglu(gate, up, 10.0, None).sum().backward()
    assert gate.grad is not None and up.grad is not None
    assert (gate.grad != 0).tolist() == [[False, True, True, True]]
    assert (up.grad != 0).tolist() == [[True, False, True, False]]


def test_the_routing_weight_goes_through_the_quantiser_of_w2(rng: torch.Generator) -> None:
    """The sum of the chosen experts, each worked out alone: weight first, then the second product."""
    x = normal(rng, 3, 64)
    w1, w3, w2 = (formats.pack_fp4_weight(normal(rng, 4, o, i) * 0.2) for o, i in ((32, 64), (32, 64), (64, 32)))
    chosen, routing = torch.tensor([[3, 0], [1, 3], [2, 1]]), torch.rand(3, 2, generator=rng)
    out = OPS.experts(x, routing, chosen, w1, w2, w3, 10.0)
    for token in range(3):
        total = torch.zeros(64)
        for expert, weight in sorted(zip(chosen[token].tolist(), routing[token], strict=True)):
            gate, up = (OPS.linear(x[token : token + 1], w[0][expert], w[1][expert]) for w in (w1, w3))
            hidden = OPS.swiglu(gate, up, 10.0, weight.view(1, 1))
            total = total + OPS.linear(hidden, w2[0][expert], w2[1][expert])[0].float()
        assert torch.equal(out[token], total)
    assert out.dtype == torch.float32


# Linear maps, norms, pooling


@pytest.mark.parametrize("pack", [formats.pack_fp8_weight, formats.pack_fp4_weight], ids=["fp8", "fp4"])
@pytest.mark.parametrize("size", [0.02, 30.0])
def test_a_quantised_product_is_that_of_the_dequantised_values(pack, size: float, rng: torch.Generator) -> None:
    x, (codes, scale) = normal(rng, 33, 160) * size, pack(normal(rng, 77, 160, dtype=torch.float32))
    expected = WINDOW.round(x).double() @ formats.unpack_weight(codes, scale).double().T
    out = OPS.linear(x, codes, scale)
    assert out.dtype == torch.bfloat16
    assert (out == expected.bfloat16()).double().mean() > 0.99
    torch.testing.assert_close(out.double(), expected, rtol=2.0**-8, atol=1e-5 * size)
    assert (out != (x.double() @ formats.unpack_weight(codes, scale).double().T).bfloat16()).any()


def test_a_plain_weight_leaves_the_activation_alone(rng: torch.Generator) -> None:
    x, weight = normal(rng, 9, 50), normal(rng, 20, 50)
    expected = x.double() @ weight.double().T
    assert (OPS.linear(x, weight, None) == expected.bfloat16()).double().mean() > 0.98
    wide = OPS.linear_wide(x, weight.float())
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), expected, atol=3e-6, rtol=0)


def test_groups_meet_their_own_rows_and_are_not_quantised(rng: torch.Generator) -> None:
    x, (codes, scale) = normal(rng, 5, 2, 64), formats.pack_fp8_weight(normal(rng, 64, 64, dtype=torch.float32))
    values = formats.unpack_weight(codes, scale).double()
    out = OPS.grouped_linear(x, codes, scale)
    for group in range(2):
        expected = x[:, group].double() @ values[32 * group : 32 * group + 32].T
        torch.testing.assert_close(out[:, group].double(), expected, rtol=2.0**-8, atol=1e-5)
        assert (out[:, group] == expected.bfloat16()).double().mean() > 0.98


def test_rms_norm_equals_its_formula_and_keeps_zero(rng: torch.Generator) -> None:
    x, weight = normal(rng, 6, 3, 48), normal(rng, 48)
    x[2] = 0
    out = OPS.rms_norm(x, weight, 1e-20)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-20).sqrt() * weight.double()
    torch.testing.assert_close(out.double(), expected, rtol=2.0**-8, atol=0)
    assert not out[2].any() and (out == expected.bfloat16()).double().mean() > 0.99


def test_pooling_is_a_softmax_of_the_gates_by_channel(rng: torch.Generator) -> None:
    kv, gate = (normal(rng, 9, 5, dtype=torch.float32) * 3 for _ in range(2))
    rows = torch.tensor([[0, 1], [7, 3], [8, 8]])
    out = OPS.pool(kv, gate, rows)
    assert out.shape == (3, 5) and out.dtype == torch.bfloat16
    for group, (a, b) in enumerate(rows.tolist()):
        for channel in range(5):
            share = torch.stack((gate[a, channel], gate[b, channel])).double().softmax(0)
            expected = share[0] * kv[a, channel].double() + share[1] * kv[b, channel].double()
            assert abs(out[group, channel].double() - expected) <= abs(expected) * 2.0**-8 + 1e-6
    assert torch.equal(OPS.pool(kv, gate + 1000, rows)[2], kv[8].bfloat16())


# Engram


def test_looked_up_rows_are_codes_times_scales(rng: torch.Generator) -> None:
    values = normal(rng, 50, 64) * 2.0 ** torch.randint(-9, 9, (50, 1), generator=rng)
    table, scale = WINDOW.pack(values)
    rows = rows_of(rng, 50, 3, 7)
    out = OPS.look_up_rows(table, scale, rows)
    assert out.shape == (3, 7, 64) and out.dtype == torch.bfloat16
    assert torch.equal(out, WINDOW.round(values)[rows])
    plain = PLAIN.look_up_rows(table, scale, rows)
    assert plain.dtype == torch.float64 and torch.equal(plain, out.double())
    assert torch.equal(OPS.look_up_rows(values, None, rows), values[rows])
    assert OPS.look_up_rows(table, scale, rows[:0]).shape == (0, 7, 64)


@pytest.mark.parametrize("ops", [OPS, PLAIN], ids=["published", "plain"])
def test_an_agreement_of_zero_opens_the_gate_by_the_root_of_a_millionth(ops: ReferenceOps) -> None:
    streams, keys = torch.full((1, 2, 32), 2048.0, dtype=ops.dtype), torch.zeros(1, 2, 32, dtype=ops.dtype)
    value, weight = torch.full((1, 32), -4096.0, dtype=ops.dtype), torch.ones(2, 32, dtype=ops.dtype)
    out = ops.engram_gate(streams, keys, value, weight, torch.tensor([True]), 1e-20)
    expected = 2048 - 4096 / (1 + math.exp(-1e-3))  # -1.024; a gate of -sqrt(1e-6) would give +1.024
    torch.testing.assert_close(out.double(), torch.full((1, 2, 32), expected).double(), rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("ops", [OPS, PLAIN], ids=["published", "plain"])
def test_no_agreement_is_positive_under_negative_streams_too(ops: ReferenceOps) -> None:
    """The products with zero keys are all -0; their sum is +0, as torch has it."""
    streams, keys = torch.full((1, 2, 32), -2048.0, dtype=ops.dtype), torch.zeros(1, 2, 32, dtype=ops.dtype)
    value, weight = torch.full((1, 32), 4096.0, dtype=ops.dtype), torch.ones(2, 32, dtype=ops.dtype)
    out = ops.engram_gate(streams, keys, value, weight, torch.tensor([True]), 1e-20)
    expected = -2048 + 4096 / (1 + math.exp(-1e-3))
    torch.testing.assert_close(out.double(), torch.full((1, 2, 32), expected).double(), rtol=2.0**-8, atol=0)


def test_the_engram_gate_equals_its_formula(rng: torch.Generator) -> None:
    streams, keys = normal(rng, 40, 4, 64), normal(rng, 40, 4, 64)
    value, weight, eps = normal(rng, 40, 64), normal(rng, 4, 64, dtype=torch.float32), 1e-20
    out = OPS.engram_gate(streams, keys, value, weight, torch.ones(40, dtype=torch.bool), eps)
    h, key = streams.double(), keys.double()
    d = (h * weight.double() * key).sum(-1) / h.square().mean(-1).sqrt() / key.square().mean(-1).sqrt() / 8
    gate = (d.sign() * d.abs().clamp_min(1e-6).sqrt()).sigmoid()
    expected = h + gate.unsqueeze(-1) * value.double().unsqueeze(1)
    torch.testing.assert_close(out.double(), expected, rtol=2.0**-8, atol=1e-5)
    assert (d < 0).any() and (out == expected.bfloat16()).double().mean() > 0.99


def test_a_closed_gate_leaves_the_streams_alone(rng: torch.Generator) -> None:
    streams, keys, value = normal(rng, 4, 2, 32), normal(rng, 4, 2, 32), normal(rng, 4, 32)
    opened = torch.tensor([True, False, True, False])
    out = OPS.engram_gate(streams, keys, value, torch.ones(2, 32), opened, 1e-20)
    assert torch.equal(out[~opened], streams[~opened])
    assert (out[opened] != streams[opened]).any(-1).all()


# Numerics


def test_plain_numerics_stay_in_float64_and_round_nothing(rng: torch.Generator) -> None:
    def x(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    fp8 = formats.pack_fp8_weight(torch.randn(64, 64, generator=rng))
    fp4 = [formats.pack_fp4_weight(torch.randn(3, 64, 64, generator=rng)) for _ in range(3)]
    a, cos = x(5, 64), torch.rand(5, 4, generator=rng)
    rows = rows_of(rng, 5, 5, 2)
    results = {
        "linear": PLAIN.linear(a, *fp8),
        "bf16 linear": PLAIN.linear(a, x(7, 64).bfloat16(), None),
        "linear_wide": PLAIN.linear_wide(a, x(7, 64).float()),
        "grouped_linear": PLAIN.grouped_linear(x(5, 2, 64), *fp8),
        "rms_norm": PLAIN.rms_norm(a, torch.ones(64).bfloat16(), 1e-20),
        "rotate": PLAIN.rotate(a, cos, cos),
        "quantise": PLAIN.quantise(a, WINDOW),
        "store": PLAIN.store(a, LATENT, False),
        "read": PLAIN.read(a, LATENT),
        "pool": PLAIN.pool(a, a, rows),
        "index_scores": PLAIN.index_scores(x(5, 2, 32), x(5, 2), x(9, 32)),
        "sparse_attention": PLAIN.sparse_attention(x(5, 2, 64), a, rows, a, rows, torch.zeros(2), 0.125),
        "collapse": PLAIN.collapse(x(5, 2, 8), x(5, 2)),
        "expand": PLAIN.expand(x(5, 8), x(5, 2, 8), x(5, 2), x(5, 2, 2)),
        "route": PLAIN.route(x(5, 6), torch.zeros(6), 2, 1.0, "sigmoid")[0],
        "swiglu": PLAIN.swiglu(a, a, 10.0, x(5, 1)),
        "experts": PLAIN.experts(a, x(5, 2), torch.tensor([[0, 1]] * 5), *fp4, 10.0),
        "engram_gate": PLAIN.engram_gate(x(5, 2, 8), x(5, 2, 8), x(5, 8), x(2, 8), torch.ones(5).bool(), 1e-20),
    }
    fn, base, scale = x(8, 16).float(), x(8).float(), torch.ones(3)
    results |= dict(zip(("pre", "post", "comb"), PLAIN.mix(x(5, 2, 8), fn, base, scale, 20, 1e-6, 1e-20), strict=True))
    assert {name for name, value in results.items() if value.dtype != torch.float64} == set()
    held = {name for name, value in results.items() if torch.equal(value.float().double(), value)}
    assert held == set(), "these are float32 numbers in float64"
    exact = a @ formats.unpack_weight(*fp8).double().T
    torch.testing.assert_close(results["linear"], exact, atol=1e-12, rtol=0)
    assert all(torch.equal(results[name], a) for name in ("quantise", "store", "read"))


def test_numerics_that_do_not_exist_are_refused() -> None:
    for numerics, dtype, complaint in (
        ("published", torch.float32, "choose numerics='plain'"),
        ("published", torch.float64, "bf16"),
    ):
        with pytest.raises(OpsError, match=complaint):
            ReferenceOps(numerics, dtype)
    assert ReferenceOps("plain", torch.float32).dtype == torch.float32
    assert (ReferenceOps().dtype, PLAIN.dtype) == (torch.bfloat16, torch.float64)
