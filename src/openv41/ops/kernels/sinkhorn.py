"""Sinkhorn's rounds on small matrices, one token's [M, M] in the registers of a few threads, and their gradient.

`ops.smooth` has the same in steps of the library, two a division; here all rounds are one kernel, and the gradient
another. That one goes through the rounds once more, notes what each division gave, and comes back: with G the gradient
by the logarithm of what went into a division, and y what came out, G <- G - y * sum(G).
"""

import triton
import triton.language as tl


@triton.jit
def places(count, TOKENS: tl.constexpr, M: tl.constexpr):
    """Where a program's matrices lie [TOKENS, M, M], and which of them there are."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    side = tl.arange(0, M)
    place = token[:, None, None] * (M * M) + side[None, :, None] * M + side[None, None, :]
    return place, (token < count)[:, None, None]


@triton.jit
def softmax_of_rows(x):
    x = tl.exp(x - tl.max(x, 2)[:, :, None])
    return x / tl.sum(x, 2)[:, :, None]


@triton.jit
def rows_divided(x, eps):
    return x / (tl.sum(x, 2)[:, :, None] + eps)


@triton.jit
def columns_divided(x, eps):
    return x / (tl.sum(x, 1)[:, None, :] + eps)


@triton.jit(do_not_specialize=["count"])
def balanced(logits, out, count, eps, ROUNDS: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr):
    place, wanted = places(count, TOKENS, M)
    x = columns_divided(softmax_of_rows(tl.load(logits + place, mask=wanted, other=0.0)) + eps, eps)
    for _ in range(ROUNDS - 1):
        x = columns_divided(rows_divided(x, eps), eps)
    tl.store(out + place, x, mask=wanted)


@triton.jit(do_not_specialize=["count"])
def balanced_gradient(
    logits, gradient, made, out, count, eps, ROUNDS: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr
):
    """`made` [2 * ROUNDS - 1, count, M, M]: room for what the divisions give. A program reads there what it wrote."""
    place, wanted = places(count, TOKENS, M)
    size = count.to(tl.int64) * (M * M)
    first = softmax_of_rows(tl.load(logits + place, mask=wanted, other=0.0))
    x = columns_divided(first + eps, eps)
    tl.store(made + place, x, mask=wanted)
    at = made + place + size
    for _ in range(ROUNDS - 1):
        x = rows_divided(x, eps)
        tl.store(at, x, mask=wanted)
        x = columns_divided(x, eps)
        tl.store(at + size, x, mask=wanted)
        at += 2 * size
    tl.debug_barrier()  # another thread may read what one has written
    by_log = tl.load(gradient + place, mask=wanted, other=0.0) * x
    for _ in range(ROUNDS - 1):
        at -= 2 * size
        y = tl.load(at + size, mask=wanted, other=0.0)
        by_log -= y * tl.sum(by_log, 1)[:, None, :]
        y = tl.load(at, mask=wanted, other=0.0)
        by_log -= y * tl.sum(by_log, 2)[:, :, None]
    y = tl.load(made + place, mask=wanted, other=0.0)
    by_log -= y * tl.sum(by_log, 1)[:, None, :]
    by_first = by_log / (first + eps)
    found = first * (by_first - tl.sum(first * by_first, 2)[:, :, None])
    tl.store(out + place, found, mask=wanted)
