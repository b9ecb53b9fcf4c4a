"""Sparse attention in portable Triton and its gradient: a prompt's chunk, decoding, training, at the released sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from openv41.bench.case import Case
from openv41.formats import LATENT, WINDOW
from openv41.ops import ReferenceOps
from openv41.ops.hopper.attend import attend, attend_with_log_sum
from openv41.ops.hopper.backward import attend_backward
from openv41.ops.training import TrainingOps

SOME = 32
"""Queries that are compared with float64."""
BATCHES = (1, 16, 64, 128)

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, near, near_rows, far, far_rows, sink."""


@dataclass(frozen=True)
class Inputs:
    """Of one call. `near` and `far` as the call reads them, `wide` the same as rows of q's dtype."""

    q: Tensor
    near: Tensor
    near_rows: Tensor
    far: Tensor
    far_rows: Tensor
    sink: Tensor
    wide: tuple[Tensor, Tensor]

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def given(self) -> Tensors:
        return self.q, self.near, self.near_rows, self.far, self.far_rows, self.sink

    def some(self) -> Tensors:
        """The first queries and their rows."""
        return self.q[:SOME], self.wide[0], self.near_rows[:SOME], self.wide[1], self.far_rows[:SOME], self.sink

    def products(self) -> float:
        """Operations of one matrix product: every head's query with every row."""
        n, h, d = self.q.shape
        return 2.0 * n * h * d * (self.near_rows.shape[1] + self.far_rows.shape[1])

    def bytes(self) -> float:
        """Queries and results, row numbers, and every row that is listed, once."""
        rows = 0.0
        for table, numbers in ((self.near, self.near_rows), (self.far, self.far_rows)):
            rows += min(numbers.numel(), table.shape[0]) * table[0].nbytes + numbers.nbytes
        return 2.0 * self.q.nbytes + rows


def cases() -> Iterator[Case]:
    """Inputs are made when a case is asked for."""
    chunk = inputs(4096, decode=False)
    yield _forward("prefill 4,096, P 32,768", chunk)
    yield _backward("gradient, 4,096 queries, P 32,768", chunk)
    for packed in (False, True):
        for batch in BATCHES:
            name = f"decode, batch {batch}, {'records' if packed else 'bf16 rows'}"
            yield _forward(name, inputs(batch, decode=True, packed=packed))
    mini = inputs(16384, decode=False, sizes=(8, 64), picks=64, latents=8192, dtype=torch.float32)
    yield _forward("mini model, 16,384 tokens", mini)
    yield _backward("gradient, mini model, 16,384 tokens", mini)


def inputs(
    n: int,
    decode: bool,
    packed: bool = False,
    sizes: tuple[int, int] = (64, 512),
    picks: int = 512,
    latents: int = 32768,
    dtype: torch.dtype = torch.bfloat16,
) -> Inputs:
    """Decoding queries have a window each, a prompt's share theirs with their neighbours; picks are random."""
    rng = torch.Generator("cuda").manual_seed(n)
    h, d = sizes
    window = torch.arange(128, device="cuda")
    first = torch.arange(n, device="cuda").unsqueeze(1)
    near_rows = first * 128 + window if decode else first + window
    far_rows = torch.randint(latents, (n, picks), generator=rng, device="cuda").sort(1).values
    near = WINDOW.to_records(torch.randn(int(near_rows.max()) + 1, d, generator=rng, device="cuda"))
    far = LATENT.to_records(torch.randn(latents, d, generator=rng, device="cuda"))
    wide = WINDOW.from_records(near).to(dtype), LATENT.from_records(far).to(dtype)
    q = torch.randn(n, h, d, generator=rng, device="cuda").to(dtype)
    sink = torch.randn(h, generator=rng, device="cuda")
    tables = (near, far) if packed else wide
    return Inputs(q, tables[0], near_rows, tables[1], far_rows, sink, wide)


def _forward(name: str, made: Inputs) -> Case:
    return Case(
        "sparse attention, Triton", name, partial(attend, *made.given(), made.scale), partial(_forward_error, made),
        1e-2, made.bytes(), 2 * made.products(),
    )  # fmt: skip


def _backward(name: str, made: Inputs) -> Case:
    out, log_sum = attend_with_log_sum(*made.given(), made.scale)
    run = partial(attend_backward, *made.given(), made.scale, out, log_sum, torch.randn_like(made.q))
    moved = 2 * made.bytes()  # q, out, grad and what is found; the rows and their gradients
    return Case("sparse attention, Triton", name, run, partial(_backward_error, made), 1e-2, moved, 5 * made.products())


def _forward_error(made: Inputs) -> float:
    judge = ReferenceOps("plain", torch.float64)
    q, near, near_rows, far, far_rows, sink = made.some()
    want = judge.sparse_attention(q.double(), near.double(), near_rows, far.double(), far_rows, sink, made.scale)
    return _distance(attend(*made.given(), made.scale)[:SOME], want)


def _backward_error(made: Inputs) -> float:
    """Of all four gradients of some queries, the largest."""
    judge = TrainingOps(ReferenceOps("plain", torch.float64))
    q, near, near_rows, far, far_rows, sink = made.some()
    leaves = [x.double().requires_grad_() for x in (q, near, far, sink)]
    result = judge.sparse_attention(leaves[0], leaves[1], near_rows, leaves[2], far_rows, leaves[3], made.scale)
    grad = torch.randn_like(q)
    want = torch.autograd.grad(result, leaves, grad.double())
    out, log_sum = attend_with_log_sum(*made.some(), made.scale)
    got = attend_backward(*made.some(), made.scale, out, log_sum, grad)
    return max(_distance(one, other) for one, other in zip(got, want, strict=True) if one is not None)


def _distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())
