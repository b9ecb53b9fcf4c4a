"""Gradients of every operation: against finite differences in float64, and straight through the published roundings."""

import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from openv41 import formats
from openv41.errors import OpsError
from openv41.formats import FP4_ROWS, FP8_ROWS, FP8_TILES, INDEX, LATENT, WINDOW, WeightFormat
from openv41.ops import Compound, Ops, choose, pieces
from openv41.ops.training import TrainingOps

PLAIN = choose("cpu", "reference", "plain")
TRAINING = choose("cpu", "reference", "plain", training=True)
PUBLISHED = choose("cpu", "reference")
STRAIGHT = choose("cpu", "reference", training=True)
FAST = choose("cpu", "fast", "plain", training=True)
STRAIGHT_FAST, PUBLISHED_FAST = choose("cpu", "fast", training=True), choose("cpu", "fast")

Case = tuple[Callable[..., Tensor | tuple[Tensor, ...]], list[Tensor]]


def normal(rng: torch.Generator, *shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=rng, dtype=torch.float64) * std).requires_grad_()


def clear_of_corners(distance: Callable[..., Tensor], rng: torch.Generator, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Inputs drawn until none of the distances from where something is cut, clamped or rooted is small: there a slope
    is not that of a difference, and a rounding takes a value to the other side."""
    while True:
        inputs = [normal(rng, *shape) for shape in shapes]
        if distance(*inputs).abs().min() > 0.03:
            return inputs


def attention(ops: Ops, rng: torch.Generator) -> Case:
    """Sinks of +-30, a row whose list is empty, picks named twice, a row named by near and far alike."""
    near_rows = torch.tensor([[0, 1, -1], [-1, -1, -1], [2, 2, 2]])
    far_rows = torch.tensor([[3, 3, -1, 0], [-1, -1, -1, -1], [1, -1, 1, 2]])
    sink = torch.tensor([30.0, -30.0, 0.5], dtype=torch.float64).requires_grad_()
    return (
        lambda q, near, far, sink: ops.sparse_attention(q, near, near_rows, far, far_rows, sink, 0.4),
        [normal(rng, 3, 3, 5), normal(rng, 3, 5), normal(rng, 4, 5), sink],
    )


def near_attention(ops: Ops, rng: torch.Generator) -> Case:
    """One row against the sink, which is in the midst of the scores."""
    rows = torch.tensor([[0, -1], [-1, -1], [0, -1]])
    sink = torch.tensor([0.5], dtype=torch.float64).requires_grad_()
    return (
        lambda q, near, sink: ops.sparse_attention(q, near, rows, None, None, sink, 0.4),
        [normal(rng, 3, 1, 3), normal(rng, 1, 3), sink],
    )


def index_scores(ops: Ops, rng: torch.Generator) -> Case:
    def products(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        return torch.einsum("nic,pc->nip", q, keys)

    inputs = clear_of_corners(products, rng, (3, 2, 5), (3, 2), (4, 5))
    return lambda q, weights, keys: ops.index_scores(q, weights, keys), inputs


def full_attention(ops: Ops, rng: torch.Generator) -> Case:
    return (lambda q, k, v: ops.full_attention(q, k, v, [3, 1, 2], 0.4), [normal(rng, 6, 2, 3) for _ in range(3)])


def clamped(ops: Ops, rng: torch.Generator) -> Case:
    """Above, below and within the limit of 10; the gate is clamped from above only."""
    gate = torch.tensor([[12.0, 9.0, -12.0, 3.0, -9.5]], dtype=torch.float64).requires_grad_()
    up = torch.tensor([[1.0, 12.0, -9.0, -12.0, 9.5]], dtype=torch.float64).requires_grad_()
    return lambda gate, up, routing: ops.swiglu(gate, up, 10.0, routing), [gate, up, normal(rng, 1, 1)]


def experts(ops: Ops, rng: torch.Generator) -> Case:
    """One expert that nobody chose, one that all did, an odd inner width, clamped."""
    chosen = torch.tensor([[0, 3], [3, 1], [3, 0]])

    def clamped(x: Tensor, routing: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        gate, up = (torch.einsum("nd,eid->nei", x, w) for w in (w1, w3))
        return torch.cat((gate - 1, up - 1, up + 1))

    return (
        lambda x, routing, w1, w2, w3: ops.experts(x, routing, chosen, (w1, None), (w2, None), (w3, None), 1.0),
        clear_of_corners(clamped, rng, (3, 2), (3, 2), (4, 3, 2), (4, 2, 3), (4, 3, 2)),
    )


def routed(function: str, k: int, ops: Ops, rng: torch.Generator) -> Case:
    """Far from a tie: a score in bf16 might break one another way."""
    bias = torch.tensor([12.0, 0.0, 6.0, -9.0], dtype=torch.float64)
    return lambda logits: ops.route(logits, bias, k, 1.5, function)[0], [normal(rng, 3, 4)]


def mixed(size: float, ops: Ops, rng: torch.Generator) -> Case:
    """Sinkhorn logits of +-`size`, by way of the base."""
    signs = torch.randint(2, (4,), generator=rng) * 2.0 - 1
    base = torch.cat((normal(rng, 4), size * signs)).detach().requires_grad_()
    return (
        lambda streams, fn, base, scale: ops.mix(streams, fn, base, scale, 20, 1e-6, 1e-20),
        [normal(rng, 2, 2, 3), normal(rng, 8, 6, std=0.3), base, normal(rng, 3)],
    )


def look_up(ops: Ops, rng: torch.Generator) -> Case:
    """A row looked up twice, rows that nobody looks up."""
    rows = torch.tensor([[4, 1], [4, 0]])
    return lambda table: ops.look_up_rows(table, None, rows), [normal(rng, 6, 3)]


def gate(ops: Ops, rng: torch.Generator) -> Case:
    open = torch.tensor([True, False, True])

    def agreement(streams: Tensor, keys: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        return (streams * weight * keys).sum(-1)

    return (
        lambda streams, keys, value, weight: ops.engram_gate(streams, keys, value, weight, open, 1e-20),
        clear_of_corners(agreement, rng, (3, 2, 5), (3, 2, 5), (3, 5), (2, 5)),
    )


def rotated(inverse: bool, ops: Ops, rng: torch.Generator) -> Case:
    angles = torch.rand(3, 2, generator=rng)
    return lambda x: ops.rotate(x, angles.cos(), angles.sin(), inverse), [normal(rng, 3, 2, 7)]


def of_inputs(call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Callable[[Ops, torch.Generator], Case]:
    """An operation of float tensors alone."""
    return lambda ops, rng: (partial(call, ops), [normal(rng, *shape) for shape in shapes])


CASES: dict[str, Callable[[Ops, torch.Generator], Case]] = {
    "linear": of_inputs(lambda ops, x, w: ops.linear(x, w, None), (3, 5), (7, 5)),
    "linear one row": of_inputs(lambda ops, x, w: ops.linear(x, w, None), (1, 1), (3, 1)),
    "linear_wide": of_inputs(lambda ops, x, w: ops.linear_wide(x, w), (3, 5), (1, 5)),
    "linear_bias": of_inputs(lambda ops, x, w, b: ops.linear_bias(x, w, b), (3, 5), (2, 5), (2,)),
    "grouped_linear": of_inputs(lambda ops, x, w: ops.grouped_linear(x, w, None), (3, 2, 5), (6, 5)),
    "rms_norm": of_inputs(lambda ops, x, w: ops.rms_norm(x, w, 1e-20), (2, 3, 5), (5,)),
    "rotate": partial(rotated, False),
    "rotate back": partial(rotated, True),
    "quantise": of_inputs(lambda ops, x: ops.quantise(x, INDEX), (2, 32)),
    "store": of_inputs(lambda ops, x: ops.store(x, WINDOW, False), (2, 32)),
    "read": of_inputs(lambda ops, x: ops.read(x, LATENT), (2, 16)),
    "pool": of_inputs(lambda ops, kv, g: ops.pool(kv, g, torch.tensor([[0, 1], [3, 4]])), (5, 3), (5, 3)),
    "index_scores": index_scores,
    "sparse_attention": attention,
    "sparse_attention near": near_attention,
    "full_attention": full_attention,
    "mix": partial(mixed, 1.0),
    "mix of 80": partial(mixed, 80.0),
    "collapse": of_inputs(lambda ops, h, pre: ops.collapse(h, pre), (3, 2, 5), (3, 2)),
    "expand": of_inputs(lambda ops, y, h, a, b: ops.expand(y, h, a, b), (3, 5), (3, 2, 5), (3, 2), (3, 2, 2)),
    "route sqrtsoftplus": partial(routed, "sqrtsoftplus", 2),
    "route softmax": partial(routed, "softmax", 2),
    "route sigmoid": partial(routed, "sigmoid", 2),
    "route to one": partial(routed, "sqrtsoftplus", 1),
    "swiglu": clamped,
    "activate silu": of_inputs(lambda ops, x: ops.activate(x, "silu"), (3, 5)),
    "activate gelu": of_inputs(lambda ops, x: ops.activate(x, "gelu"), (3, 5)),
    "experts": experts,
    "look_up_rows": look_up,
    "engram_gate": gate,
}  # fmt: skip


def test_every_operation_has_a_case() -> None:
    """But those whose results are numbers, and those that are made of others."""
    operations, made = (
        {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
        for kind in (Ops, Compound)
    )
    assert operations - made - {"pick", "pick_blocks"} == {name.split()[0] for name in CASES}


@pytest.mark.parametrize("ops", [PLAIN, TRAINING, FAST], ids=["plain", "training", "fast"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gradients_are_those_of_finite_differences(ops: Ops, case, rng: torch.Generator) -> None:
    call, inputs = case(ops, rng)
    if case is look_up and ops is not PLAIN:  # whose gradient is sparse: below
        return
    assert torch.autograd.gradcheck(call, inputs)


def gradients_of(ops: Ops, case, rng: torch.Generator, values: list[Tensor], number: int) -> tuple[tuple, list[Tensor]]:
    """Results, and gradients of a random sum of them."""
    call, _ = case(ops, rng)
    leaves = [x.clone().requires_grad_() for x in values]
    out = call(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    if ops is PUBLISHED:
        return out, []
    weights = torch.Generator().manual_seed(number)
    sum((one * torch.randn(one.shape, generator=weights).to(one)).sum().double() for one in out).backward()
    return out, [x.grad.to_dense() for x in leaves]


@pytest.mark.parametrize("size", [1, 2000])
@pytest.mark.parametrize("case", [attention, near_attention, full_attention])
def test_gradients_in_pieces_are_the_same(
    case, size: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many queries as so many bytes hold: one, or some."""
    monkeypatch.setattr(pieces, "LAUNCH_BOUND", ("cpu",))
    monkeypatch.setattr(pieces, "BYTES", size)
    assert torch.autograd.gradcheck(*case(FAST, rng))


@pytest.mark.parametrize(
    ("straight", "own"), [(STRAIGHT, PUBLISHED), (STRAIGHT_FAST, PUBLISHED_FAST)], ids=["reference", "fast"]
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_straight_through_has_the_published_result_and_nearly_the_plain_gradient(
    case, straight: Ops, own: Ops, rng: torch.Generator
) -> None:
    """bf16 inputs: forward to the bit what the published operation gives, backward within bf16 of the plain one's.

    In one draw the terms of a gradient may cancel, and what is lost in rounding them is much beside the little that is
    left. So the largest gradient of many draws is the measure of all their errors."""
    errors, sizes = [], []
    for number in range(16):
        _, inputs = case(PLAIN, rng)
        half = [x.detach().bfloat16() for x in inputs]
        state = rng.get_state()

        def run(ops: Ops, values: list[Tensor], state=state, number=number) -> tuple[tuple, list[Tensor]]:
            return gradients_of(ops, case, rng.set_state(state), values, number)

        results, gradients = run(STRAIGHT, half)
        published, _ = run(PUBLISHED, half)
        _, plain = run(PLAIN, [x.double() for x in half])
        assert all(torch.equal(a, b) for a, b in zip(results, published, strict=True))
        assert all(got.dtype == torch.bfloat16 for got in gradients)
        errors.append([float((a - b).abs().max()) for a, b in zip(gradients, plain, strict=True)])
        sizes.append([float(b.abs().max()) for b in plain])
    for error, size in zip(zip(*errors, strict=True), zip(*sizes, strict=True), strict=True):
        assert max(error) <= 0.02 * max(size) + 1e-6


def test_a_look_ups_gradient_holds_the_rows_looked_up(rng: torch.Generator) -> None:
    call, (table,) = look_up(TRAINING, rng)
    other, (same,) = look_up(PLAIN, torch.Generator().manual_seed(0))
    weights = torch.randn(2, 2, 3, generator=rng, dtype=torch.float64)
    (call(table) * weights).sum().backward()
    (other(same) * weights).sum().backward()
    assert table.grad is not None and table.grad.is_sparse and table.grad.coalesce().indices().tolist() == [[0, 1, 4]]
    assert torch.equal(table.grad.to_dense(), same.grad)


def test_records_carry_no_gradient(rng: torch.Generator) -> None:
    x = torch.randn(2, 32, generator=rng).bfloat16().requires_grad_()
    with pytest.raises(OpsError, match="store='wide'"):
        STRAIGHT.store(x, WINDOW, True)
    with torch.no_grad():
        assert torch.equal(STRAIGHT.store(x, WINDOW, True), PUBLISHED.store(x, WINDOW, True))


@pytest.mark.parametrize("form", [WINDOW, INDEX, LATENT], ids=lambda form: form.name)
def test_rounding_passes_gradient_on_where_it_saturates_too(form: formats.BlockFormat, rng: torch.Generator) -> None:
    x = torch.randn(3, 32, generator=rng).bfloat16()
    x[1, 3] = 1e5  # beyond what a latent can hold
    x.requires_grad_()
    for rounded in (STRAIGHT.quantise(x, form), STRAIGHT.store(x, form, False)):
        assert torch.equal(rounded, form.round(x.detach()))
        (gradient,) = torch.autograd.grad(rounded, x, torch.full_like(rounded, 3.0))
        assert (gradient == 3).all()


# Masters


def on_grid(form: WeightFormat, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale = form.pack(weight)
    return codes, scale, form.unpack(codes, scale)


@pytest.mark.parametrize("want", ["reference", "fast", "cpu"])
@pytest.mark.parametrize("form", [FP8_TILES, FP4_ROWS], ids=lambda form: form.name)
def test_a_master_on_the_grid_is_its_stored_weight(form: WeightFormat, want: str, rng: torch.Generator) -> None:
    inner = choose("cpu", want)
    ops = TrainingOps(inner)
    x = torch.randn(5, 64, generator=rng).bfloat16()
    codes, scale, master = on_grid(form, torch.randn(40, 64, generator=rng) * torch.rand(40, 1, generator=rng) ** 4)
    assert torch.equal(ops.linear(x, master, form), inner.linear(x, codes, scale))
    off = (master * 1.01).requires_grad_()  # and off the grid that of its rounded values
    codes, scale, rounded = on_grid(form, off.detach())
    out = ops.linear(x, off, form)
    assert torch.equal(out, inner.linear(x, codes, scale))
    g = torch.randn(out.shape, generator=rng).bfloat16()
    (gradient,) = torch.autograd.grad(out, off, g)
    torch.testing.assert_close(gradient, g.float().mT @ WINDOW.round(x.float()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("want", ["reference", "fast"])
def test_a_master_is_packed_once_for_as_long_as_it_stays_as_it_is(want: str, rng: torch.Generator) -> None:
    packed = []

    def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
        packed.append(weight)
        return FP8_TILES.pack(weight)

    form = WeightFormat("counted", pack, FP8_TILES.unpack)
    ops = choose("cpu", want, training=True)
    x = torch.randn(3, 32, generator=rng).bfloat16().requires_grad_()
    master = torch.nn.Parameter(torch.randn(32, 32, generator=rng))

    def use() -> Tensor:
        out = ops.linear(x, master, form)
        out.sum().backward()
        return out.detach()

    first = use()
    assert torch.equal(use(), first) and len(packed) == 1
    with torch.no_grad():
        master.mul_(2)
    assert torch.equal(use(), first * 2) and len(packed) == 2
    master.data.mul_(2)  # does not count as a change
    ops.forget()
    assert torch.equal(use(), first * 4) and len(packed) == 3


@pytest.mark.parametrize(
    ("straight", "own"), [(STRAIGHT, PUBLISHED), (STRAIGHT_FAST, PUBLISHED_FAST)], ids=["reference", "fast"]
)
def test_masters_of_experts_groups_and_tables(straight: Ops, own: Ops, rng: torch.Generator) -> None:
    x, routing = torch.randn(5, 64, generator=rng).bfloat16(), torch.rand(5, 2, generator=rng)
    chosen = torch.tensor([[0, 2]] * 4 + [[2, 0]])
    stored = [on_grid(FP4_ROWS, torch.randn(3, 64, 64, generator=rng) / 8) for _ in range(3)]
    expected = own.experts(x, routing, chosen, *((codes, scale) for codes, scale, _ in stored), 10.0)
    leaves = [master.requires_grad_() for _, _, master in stored]
    got = straight.experts(x, routing, chosen, *((master, FP4_ROWS) for master in leaves), 10.0)
    assert torch.equal(got, expected)
    got.sum().backward()
    assert all(w.grad[0].count_nonzero() and w.grad[2].count_nonzero() and not w.grad[1].any() for w in leaves)

    codes, scale, master = on_grid(FP8_TILES, torch.randn(64, 32, generator=rng))
    groups = torch.randn(5, 2, 32, generator=rng).bfloat16()
    expected = own.grouped_linear(groups, codes, scale)
    assert torch.equal(straight.grouped_linear(groups, master, FP8_TILES), expected)

    codes, scale, master = on_grid(FP8_ROWS, torch.randn(9, 64, generator=rng))
    rows = torch.tensor([[3, 3], [0, 8]])
    got = straight.look_up_rows(master.requires_grad_(), FP8_ROWS, rows)
    assert torch.equal(got, own.look_up_rows(codes, scale, rows))
    got.sum().backward()
    assert master.grad.is_sparse and master.grad.coalesce().indices().tolist() == [[0, 3, 8]]
