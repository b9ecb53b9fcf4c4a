"""Hyper-connections on the streams: what a sublayer reads of them, what it writes back, and the gradients of both.

A program does one token, all of whose streams [M, WIDTH] it holds; `SPACE`, a power of two, is WIDTH or more. The
library makes a tensor of M x M x WIDTH values a token for the one, and reads it again to add it up. Sums are float32,
in a fixed order.
"""

import triton
import triton.language as tl

from openv41.ops.kernels.interpreted import rounded


@triton.jit
def streams_at(tensor, token, M: tl.constexpr, WIDTH: tl.constexpr, SPACE: tl.constexpr):
    """Where a token's streams lie [M, SPACE], and which of these places there are."""
    column = tl.arange(0, SPACE)
    place = token * (M * WIDTH) + tl.arange(0, M)[:, None] * WIDTH + column[None, :]
    return tensor + place, (column < WIDTH)[None, :]


@triton.jit
def row_at(tensor, token, WIDTH: tl.constexpr, SPACE: tl.constexpr):
    """Where a token's row lies [SPACE], and which of these places there are."""
    column = tl.arange(0, SPACE)
    return tensor + token * WIDTH + column, column < WIDTH


@triton.jit
def collapse(streams, pre, out, M: tl.constexpr, WIDTH: tl.constexpr, SPACE: tl.constexpr):
    """`out` [n, WIDTH] = sum over the streams of `pre` [n, M] times `streams` [n, M, WIDTH]. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    at, inside = streams_at(streams, token, M, WIDTH, SPACE)
    h = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(pre + token * M + tl.arange(0, M)).to(tl.float32)
    to, wanted = row_at(out, token, WIDTH, SPACE)
    tl.store(to, rounded(tl.sum(weight[:, None] * h, 0), out.dtype.element_ty), mask=wanted)


@triton.jit
def collapse_gradient(
    streams, pre, gradient, by_streams, by_pre, M: tl.constexpr, WIDTH: tl.constexpr, SPACE: tl.constexpr
):
    """Of `collapse`, from its result's gradient. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    at, inside = streams_at(streams, token, M, WIDTH, SPACE)
    h = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    of_token = token * M + tl.arange(0, M)
    weight = tl.load(pre + of_token).to(tl.float32)
    given, wanted = row_at(gradient, token, WIDTH, SPACE)
    g = tl.load(given, mask=wanted, other=0.0).to(tl.float32)
    to, _ = streams_at(by_streams, token, M, WIDTH, SPACE)
    tl.store(to, rounded(weight[:, None] * g[None, :], by_streams.dtype.element_ty), mask=inside)
    tl.store(by_pre + of_token, tl.sum(h * g[None, :], 1))


@triton.jit
def expand(y, streams, post, comb, out, M: tl.constexpr, WIDTH: tl.constexpr, SPACE: tl.constexpr):
    """Stream j of `out` = `post`[j] y + sum over i of `comb`[i, j] stream i. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    side = tl.arange(0, M)
    column = tl.arange(0, SPACE)
    given, wanted = row_at(y, token, WIDTH, SPACE)
    result = (
        tl.load(post + token * M + side).to(tl.float32)[:, None]
        * tl.load(given, mask=wanted, other=0.0).to(tl.float32)[None, :]
    )
    for i in tl.static_range(M):
        row = streams + (token * M + i) * WIDTH + column
        h = tl.load(row, mask=wanted, other=0.0).to(tl.float32)
        share = tl.load(comb + (token * M + i) * M + side).to(tl.float32)  # what each stream takes of stream i
        result += share[:, None] * h[None, :]
    to, inside = streams_at(out, token, M, WIDTH, SPACE)
    tl.store(to, rounded(result, out.dtype.element_ty), mask=inside)


@triton.jit
def expand_gradient(
    y, streams, post, comb, gradient, by_y, by_streams, by_post, by_comb,
    M: tl.constexpr, WIDTH: tl.constexpr, SPACE: tl.constexpr,
):  # fmt: skip
    """Of `expand`, from its result's gradient. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    side = tl.arange(0, M)
    column = tl.arange(0, SPACE)
    at, inside = streams_at(gradient, token, M, WIDTH, SPACE)
    g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    given, wanted = row_at(y, token, WIDTH, SPACE)
    value = tl.load(given, mask=wanted, other=0.0).to(tl.float32)
    weight = tl.load(post + token * M + side).to(tl.float32)
    tl.store(by_post + token * M + side, tl.sum(g * value[None, :], 1))
    to, _ = row_at(by_y, token, WIDTH, SPACE)
    tl.store(to, rounded(tl.sum(weight[:, None] * g, 0), by_y.dtype.element_ty), mask=wanted)
    for i in tl.static_range(M):
        row = (token * M + i) * WIDTH + column
        h = tl.load(streams + row, mask=wanted, other=0.0).to(tl.float32)
        share = tl.load(comb + (token * M + i) * M + side).to(tl.float32)
        tl.store(by_comb + (token * M + i) * M + side, tl.sum(g * h[None, :], 1))
        carried = rounded(tl.sum(share[:, None] * g, 0), by_streams.dtype.element_ty)
        tl.store(by_streams + row, carried, mask=wanted)
