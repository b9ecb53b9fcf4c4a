"""Sparse attention with specialised warps: a prompt's chunk and decoding at the released sizes, with variants."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from openv41.bench import peers
from openv41.bench.case import Case
from openv41.bench.kernels_attend import BATCHES, SOME, Inputs, inputs
from openv41.ops import ReferenceOps
from openv41.ops.hopper.attend_gluon import Plan, attend_gluon

Attend = Callable[..., Tensor]

AIMS = {
    "prefill 4,096, P 32,768": 600.0, "decode, batch 1, bf16 rows": 13.5, "decode, batch 16, bf16 rows": 16.0,
    "decode, batch 64, bf16 rows": 30.0, "decode, batch 128, bf16 rows": 40.0, "decode, batch 1, records": 13.5,
    "decode, batch 16, records": 16.0, "decode, batch 64, records": 30.0, "decode, batch 128, records": 40.0,
}  # fmt: skip
"""Microseconds."""

VARIANTS = {
    "halves": Plan("halves", 64, 4092, 5), "blocks of 32, ahead": Plan("deep", 32, 4092, 10),
    "last round whole": Plan("ring", 64, 4096, 1),
}  # fmt: skip
"""What is not chosen, beside it."""


def cases() -> Iterator[Case]:
    """Inputs are made when a case is asked for."""
    for name, latents in (("P 32,768", 32768), ("P 131,072", 131072)):
        chunk = inputs(4096, decode=False, latents=latents)
        yield _case(f"prefill 4,096, {name}", chunk, attend_gluon)
        for variant, plan in VARIANTS.items():
            yield _case(f"prefill 4,096, {name}, {variant}", chunk, partial(attend_gluon, plan=plan))
    yield _case("prefill 4,096, P 32,768, records", inputs(4096, decode=False, packed=True), attend_gluon)
    for batch in BATCHES:
        yield _case(f"decode, batch {batch}, bf16 rows", inputs(batch, decode=True), attend_gluon)
        yield _case(f"decode, batch {batch}, records", inputs(batch, decode=True, packed=True), attend_gluon)


def _case(name: str, made: Inputs, call: Attend) -> Case:
    return Case(
        "sparse attention, Gluon", name, partial(call, *made.given(), made.scale), partial(_error, made, call), 1e-2,
        made.bytes(), 2 * made.products(), aim_us=AIMS.get(name),
        peers=peers.of_attention(*made.given(), made.scale),
    )  # fmt: skip


def _error(made: Inputs, call: Attend) -> float:
    """Of some queries, from float64."""
    judge = ReferenceOps("plain", torch.float64)
    q, near, near_rows, far, far_rows, sink = made.some()
    want = judge.sparse_attention(q.double(), near.double(), near_rows, far.double(), far_rows, sink, made.scale)
    got = call(*made.given(), made.scale)[:SOME].double()
    return float((got - want).norm() / want.norm())
