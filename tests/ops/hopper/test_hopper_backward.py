"""The gradient of sparse attention's kernels against float64's: 1e-5 in float32, 1e-2 in bf16, by the norm of each."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from openv41.errors import OpsError
from openv41.ops import ReferenceOps
from openv41.ops.hopper import attend as forward
from openv41.ops.hopper.attend import attend_with_log_sum
from openv41.ops.hopper.backward import MEMORY, Tiling, attend_backward, attention_gradients, choose_tiling
from openv41.ops.training import TrainingOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
JUDGE = TrainingOps(ReferenceOps("plain", torch.float64))
SMALL, SMALL_FORWARD = Tiling(16, 16, 32), forward.Tiling(16, 16, 1, 4, 1)
"""Small enough for several blocks, parts of the width and tiles of heads at small sizes."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
"""q, near, near_rows, far, far_rows, sink."""


def lists(rng: torch.Generator, n: int, places: int, rows: int) -> Tensor:
    """Row numbers, few enough that lists name rows twice, a quarter of them -1; the last query lists nothing, and
    nobody lists row 0."""
    listed = torch.randint(1, rows, (n, places), generator=rng)
    listed[torch.rand(n, places, generator=rng) < 0.25] = -1
    listed[-1] = -1
    return listed.to(DEVICE)


def made(rng: torch.Generator, n: int, h: int, d: int, w: int, k: int | None, dtype: torch.dtype) -> Inputs:
    """Sinks of 30 and -30 among others; `k` None: no far list."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(dtype).to(DEVICE)

    sink = torch.randn(h, generator=rng)
    sink[: min(h, 2)] = torch.tensor([30.0, -30.0])[: min(h, 2)]
    far, far_rows = (None, None) if k is None else (normal(23, d), lists(rng, n, k, 23))
    return normal(n, h, d), normal(9, d), lists(rng, n, w, 9), far, far_rows, sink.to(DEVICE)


def expected(inputs: Inputs, scale: float, grad: Tensor) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients of q, near, far and sink in float64, and sizes to measure their errors by: their norms, but for the
    sink's. That is a sum of g . out, whose terms may cancel; it is measured by the sum of their magnitudes."""
    q, near, near_rows, far, far_rows, sink = inputs
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in (q, near, far, sink)]
    out = JUDGE.sparse_attention(leaves[0], leaves[1], near_rows, leaves[2], far_rows, leaves[3], scale)
    found = iter(torch.autograd.grad(out, [x for x in leaves if x is not None], grad.double()))
    want = [None if x is None else next(found) for x in leaves]
    _, log_sum = attend_with_log_sum(*(None if x is None else x.detach() for x in inputs), scale, "ieee")
    terms = (sink.detach() - log_sum).double().exp() * (out * grad).abs().sum(-1)
    return want, [*(one.norm() for one in want[:-1] if one is not None), terms.sum(0).norm()]


def run(
    inputs: Inputs, grad: Tensor, scale: float = 0.2, memory: int = MEMORY, tiling: Tiling | None = SMALL,
    precision: forward.Precision = "ieee",
) -> tuple[Tensor | None, ...]:  # fmt: skip
    ahead = SMALL_FORWARD if tiling else None
    out, log_sum = attend_with_log_sum(*inputs, scale, precision, ahead)
    return attend_backward(*inputs, scale, out, log_sum, grad, precision, tiling, memory)


def distance(got: Sequence[Tensor | None], expected: tuple[list[Tensor | None], list[Tensor]]) -> float:
    """The largest error of a gradient for its size; where there is nothing to find, whether nothing was found."""
    want, sizes = expected
    assert [one is None for one in got] == [one is None for one in want]
    pairs = [(one, other) for one, other in zip(got, want, strict=True) if one is not None and other is not None]
    assert all(one.shape == other.shape for one, other in pairs)
    return max(
        ((one.double() - other).norm() / size.clamp_min(1e-30)).item()
        for (one, other), size in zip(pairs, sizes, strict=True)
    )


SIZES = {
    "blocks not full": (3, 3, 64, 19, 37),
    "two tiles of heads": (2, 20, 64, 5, 17),
    "one head, no far list": (3, 1, 64, 18, None),
    "far list of no places": (2, 3, 128, 7, 0),
    "near list of no places": (2, 3, 64, 0, 5),
}


@pytest.mark.parametrize("memory", [MEMORY, 1], ids=["at once", "a query at a time"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_float32_is_the_gradient(size: tuple, memory: int, rng: torch.Generator) -> None:
    inputs = made(rng, *size, torch.float32)
    grad = torch.randn(inputs[0].shape, generator=rng).to(DEVICE)
    assert distance(run(inputs, grad, memory=memory), expected(inputs, 0.2, grad)) < 1e-5


def test_bf16_is_the_gradient_rounded(rng: torch.Generator) -> None:
    inputs = made(rng, 3, 3, 64, 19, 37, torch.bfloat16)
    grad = torch.randn(inputs[0].shape, generator=rng).bfloat16().to(DEVICE)
    got = run(inputs, grad)
    assert [one.dtype for one in got if one is not None] == [torch.bfloat16] * 3 + [torch.float32]
    want, sizes = expected(inputs, 0.2, grad)
    sizes[-1] = 3 * sizes[-1]  # three heads, two queries: the rounding of few results is what it is
    assert distance(got, (want, sizes)) < 1e-2


def test_a_row_that_all_list_many_times(rng: torch.Generator) -> None:
    q, near, near_rows, far, far_rows, sink = made(rng, 4, 3, 64, 6, 5, torch.float32)
    inputs = (q, near, near_rows.clamp_min(-1) * 0 + 3, far, far_rows, sink)
    grad = torch.randn(q.shape, generator=rng).to(DEVICE)
    assert distance(run(inputs, grad), expected(inputs, 0.2, grad)) < 1e-5


def test_the_same_bits_again(rng: torch.Generator) -> None:
    """With other things in the memory that it is given, and 32-bit row numbers."""
    q, near, near_rows, far, far_rows, sink = made(rng, 3, 3, 64, 19, 37, torch.bfloat16)
    grad = torch.randn(q.shape, generator=rng).bfloat16().to(DEVICE)
    first = run((q, near, near_rows, far, far_rows, sink), grad)
    spoilt = torch.full((1 << 20,), torch.nan, device=DEVICE)
    del spoilt
    again = run((q, near, near_rows.int(), far, far_rows.int(), sink), grad)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_gradients_as_training_asks_for_them(rng: torch.Generator) -> None:
    """Of the inputs that want one, by autograd; the forward is made anew at the launch's own tiling."""
    q, near, near_rows, far, far_rows, sink = made(rng, 2, 3, 64, 5, 7, torch.float32)
    grad = torch.randn(q.shape, generator=rng).to(DEVICE)
    ops, leaves = TrainingOps(ReferenceOps("plain", torch.float32)), [x.requires_grad_() for x in (q, far, sink)]
    out = ops._through(forward.attend, attention_gradients, q, near, near_rows, far, far_rows, sink, 0.2)
    got = torch.autograd.grad(out, leaves, grad)
    want, sizes = expected((q, near, near_rows, far, far_rows, sink), 0.2, grad)
    those = (0, 2, 3)
    assert distance(got, ([want[i] for i in those], [sizes[i] for i in those])) < (5e-3 if DEVICE == "cuda" else 1e-5)


def test_nothing_gives_nothing(rng: torch.Generator) -> None:
    """No queries; lists that name nothing, beside a sink of minus infinity too."""
    q, near, near_rows, far, far_rows, sink = made(rng, 2, 3, 64, 5, 7, torch.float32)
    sink[2] = -torch.inf
    grad = torch.ones_like(q)
    inputs = (q, near, torch.full_like(near_rows, -1), far, torch.full_like(far_rows, -1), sink)
    for given, by in ((inputs, grad), ((q[:0], near, near_rows[:0], far, far_rows[:0], sink), grad[:0])):
        for one, like in zip(run(given, by), (given[0], near, far, sink), strict=True):
            assert torch.equal(one, torch.zeros_like(like))


def test_tables_that_carry_no_gradient_are_refused(rng: torch.Generator) -> None:
    q, near, near_rows, far, far_rows, sink = made(rng, 2, 3, 64, 5, 7, torch.bfloat16)
    out, log_sum = torch.zeros_like(q), torch.zeros(2, 3, device=DEVICE)
    records = torch.zeros(9, 66, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(OpsError, match="records of bytes carry no gradient.*store='wide'"):
        attend_backward(q, records, near_rows, far, far_rows, sink, 0.2, out, log_sum, out)
    with pytest.raises(OpsError, match=r"out and grad must be torch.bfloat16 \[2, 3, 64\]"):
        attend_backward(q, near, near_rows, far, far_rows, sink, 0.2, out, log_sum, out.float())
    with pytest.raises(OpsError, match=r"log_sum must be float32 \[2, 3\]"):
        attend_backward(q, near, near_rows, far, far_rows, sink, 0.2, out, log_sum[:1], out)


def test_compiled_for_hopper() -> None:
    """No spills, and products on the tensor cores."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "openv41.ops.hopper.compiled", "backward ", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert len(found) == 6
    for name, one in found.items():
        assert one["stack"] == 0 and one["shared"] <= 227 * 1024, one
        products = "LDG" if "rows" in name else "HMMA" if name == "backward mini, queries" else "HGMMA"
        assert one["instructions"].get(products, 0) > 0, one


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size, dtype, precision, bound",
    [
        ((48, 64, 512, 128, 512), torch.bfloat16, "tf32", 1e-2),
        ((200, 8, 64, 128, 64), torch.float32, "tf32", 5e-3),
        ((200, 8, 64, 128, 64), torch.float32, "ieee", 1e-5),
        ((5, 128, 256, 128, 100), torch.bfloat16, "tf32", 1e-2),
        ((5, 64, 512, 128, 100), torch.float32, "ieee", 1e-5),
    ],
)
def test_gradients_on_a_gpu(
    size: tuple, dtype: torch.dtype, precision: forward.Precision, bound: float, rng: torch.Generator
) -> None:
    """At the launches' own tilings, in chunks too; twice the same bits."""
    inputs = made(rng, *size, dtype)
    scale = size[2] ** -0.5
    grad = torch.randn(inputs[0].shape, generator=rng).to(dtype).to(DEVICE)
    want = expected(inputs, scale, grad)
    for memory in (MEMORY, 7 * (size[3] + size[4]) * size[2] * grad.element_size()):
        got = run(inputs, grad, scale, memory, None, precision)
        again = run(inputs, grad, scale, memory, None, precision)
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
        assert distance(got, want) < bound


def test_heads_that_fill_a_matrix_instruction_take_128_keys() -> None:
    assert choose_tiling(64, 512) == Tiling(64, 128, 64)
    assert choose_tiling(128, 512) == Tiling(64, 128, 64)
    assert choose_tiling(8, 64) == Tiling(16, 64, 64)
