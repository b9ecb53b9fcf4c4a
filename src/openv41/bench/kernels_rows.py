"""The writers and readers of rows at the released sizes: heads of 512, index keys of 128, 32 index heads."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openv41.bench.case import Case
from openv41.formats import INDEX, LATENT, WINDOW, BlockFormat
from openv41.ops import ReferenceOps
from openv41.ops.hopper.rows import (
    Into,
    Norm,
    decode_table,
    latent_store,
    pool_store,
    query_window,
    rms_norm_rounded,
    rotate,
    rotate_quantise,
    rotate_store,
)

JUDGE = ReferenceOps()
DECODE, CHUNK = (1, 16, 128), 4096
TABLES = {32_768: 14.7, 131_072: 46.5, 1_048_576: 349.0}
"""Latents decoded at once, and the microseconds that a forerunner took."""
SOME = 64
"""Rows that are compared with the reference."""
EPS = 1e-20

Pair = Callable[[], tuple[Tensor, Tensor]]
"""What a kernel made, and what the reference makes of the same."""


def cases(sizes: tuple[int, ...] = (*DECODE, CHUNK), device: str = "cuda") -> Iterator[Case]:
    """Everything is bit-equal to the reference."""
    for n in sizes:
        yield from Writers(n, device).cases()
    for count, aim in TABLES.items() if device == "cuda" else ():
        records = LATENT.to_records(_draw(count, device)(4096, 512)).repeat(count // 4096, 1)
        pair = partial(_decoded, records)
        run = partial(decode_table, records, LATENT)
        yield Case(
            "decode latents", f"{count:,} rows", run, partial(_unequal, pair), 0, count * (288 + 1024.0), aim_us=aim
        )


def _decoded(records: Tensor) -> tuple[Tensor, Tensor]:
    return decode_table(records[:SOME], LATENT), JUDGE.read(records[:SOME], LATENT)


class Writers:
    """All that n tokens put into tables, or turn."""

    def __init__(self, n: int, device: str) -> None:
        self.n, self.device, self.randn = n, device, _draw(n, device)
        turned = torch.rand(n, 32, device=device) * 6.28
        self.cos, self.sin = turned.cos(), turned.sin()
        self.rows = torch.randperm(2 * n, device=device)[:n]

    def cases(self) -> Iterator[Case]:
        angles = self.cos, self.sin
        yield self.query_and_window()
        yield self.latent()
        yield self.index_key()
        yield self.pooled()
        heads, q, x = self.randn(self.n, 64, 512), self.randn(self.n, 32, 128), self.randn(self.n, 5120)
        run: Callable[[], Any] = partial(rotate, heads, *angles, True, True)
        pair: Pair = lambda: (rotate(q, *angles, True), JUDGE.rotate(q, *angles, True))  # noqa: E731
        yield self.case("turn heads in place", run, pair, 64 * 64 * 4 + 256.0)
        run = partial(rotate_quantise, q, *angles)
        pair = lambda: (rotate_quantise(q, *angles), JUDGE.quantise(JUDGE.rotate(q, *angles), INDEX))  # noqa: E731
        yield self.case("rotate and round index queries", run, pair, 32 * 128 * 4 + 256.0)
        norm = self.norm(5120)
        rounded = partial(rms_norm_rounded, x, norm)
        pair = lambda: (rounded()[1][:SOME], WINDOW.round(self.normed(x, norm)))  # noqa: E731
        yield self.case("norm, and rounded beside it", rounded, pair, 5120 * 6.0)

    def query_and_window(self) -> Case:
        y, low, kv, into = self.randn(self.n, 1792), self.norm(1280), self.norm(512), self.into(WINDOW, 512)
        run = partial(query_window, y, self.cos, self.sin, low, kv, into)
        pair = partial(self.stored, run, into, WINDOW, y[:, 1280:], kv)
        return self.case("query and window", run, pair, 1792 * 2 + 1280 * 2 + 528 + 256.0)

    def latent(self) -> Case:
        x, norm, into = self.randn(self.n, 512), self.norm(512), self.into(LATENT, 512)
        run = partial(latent_store, x, self.cos, self.sin, norm, into)
        pair = partial(self.stored, run, into, LATENT, x, norm)
        return self.case("norm, rotate, store a latent", run, pair, 1024 + 1024 + 288 + 256.0)

    def index_key(self) -> Case:
        x, norm, into = self.randn(self.n, 128), self.norm(128), self.into(INDEX, 128)
        run = partial(rotate_store, x, self.cos, self.sin, INDEX, into=into, norm=norm)
        pair = partial(self.stored, run, into, INDEX, x, norm)
        return self.case("norm, rotate, store an index key", run, pair, 256 + 68 + 256.0)

    def pooled(self) -> Case:
        """As many groups as tokens: each token of a decoding batch may complete one."""
        wide, norm = torch.randn(2 * self.n, 1024, device=self.device), self.norm(512)
        members = torch.arange(2 * self.n, device=self.device).view(-1, 2)
        kv, gate = wide.chunk(2, 1)
        run = partial(pool_store, kv, gate, members, self.cos, self.sin, norm, self.into(LATENT, 512))
        pair: Pair = lambda: (run()[:SOME], self.normed(JUDGE.pool(kv, gate, members[:SOME]), norm))  # noqa: E731
        return self.case("pool, norm, rotate, store a latent", run, pair, 2 * 4096 + 1024 + 288 + 256.0)

    def case(self, op: str, run: Callable[[], Any], pair: Pair, each: float) -> Case:
        """`each`: bytes that a token needs, angles among them."""
        name = f"prefill {self.n:,}" if self.n == CHUNK else f"decode, batch {self.n}"
        return Case(op, name, run, partial(_unequal, pair), 0, self.n * each)

    def stored(
        self, run: Callable[[], Any], into: Into, form: BlockFormat, x: Tensor, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        run()
        turned = JUDGE.rotate(self.normed(x, norm), self.cos[:SOME], self.sin[:SOME])
        return into.table[into.rows[:SOME]], JUDGE.store(turned, form, True)

    def normed(self, x: Tensor, norm: Norm) -> Tensor:
        return JUDGE.rms_norm(x[:SOME], norm.weight, EPS)

    def norm(self, width: int) -> Norm:
        return Norm(self.randn(width), EPS)

    def into(self, form: BlockFormat, width: int) -> Into:
        size = form.record_bytes(width)
        return Into(torch.zeros(2 * self.n, size, dtype=torch.uint8, device=self.device), self.rows)


def _draw(seed: int, device: str) -> Callable[..., Tensor]:
    return partial(_randn, torch.Generator(device).manual_seed(seed))


def _randn(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw, device=draw.device).bfloat16()


def _unequal(pair: Pair) -> float:
    """The share of values that differ."""
    got, wanted = pair()
    return (got != wanted).double().mean().item()
