"""How likely a model holds the ids that are there: one log-probability a token, in bounded memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.errors import InputError
from openv41.model.transformer import Transformer
from openv41.state import Cache

CHUNK = 256
"""Tokens in one step. Their logits are the memory that scoring takes: 256 x 129,280 x 4 bytes are 126 MiB."""


@dataclass(frozen=True)
class Scored:
    """An id with its natural log-probability after all ids before it, and the likeliest (id, log-probability) there."""

    id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


def score(transformer: Transformer, ids: Sequence[int], top: int = 0, chunk: int = CHUNK) -> Iterator[Scored]:
    """Every id but the first, which is only read. `top` of the likeliest ids come with each.

    Raises `InputError` for fewer than two ids, ids outside the vocabulary, more than the context holds, or numbers out
    of range. The cache is closed when the iterator ends or is closed.
    """
    config = transformer.config
    _check(ids, top, chunk, config.vocab_size, config.context)
    read = len(ids) - 1
    cache = Cache(config, 1, read, dtype=transformer.ops.dtype, device=transformer.embed.weight.device)
    slot = cache.open()
    try:
        for first in range(0, read, chunk):
            last = min(first + chunk, read)
            step = cache.step([(slot, ids[first:last])], wanted="all")
            with torch.no_grad():
                logits = transformer(step, cache).logits
            yield from _score_rows(logits, ids[first + 1 : last + 1], top)
    finally:
        cache.close(slot)


def _score_rows(logits: Float[Tensor, "j v"], ids: Sequence[int], top: int) -> Iterator[Scored]:
    logprobs = logits.log_softmax(1)
    own = logprobs.gather(1, torch.tensor(ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    best, at = logprobs.topk(min(top, logits.shape[1]), 1)
    for id, logprob, places, values in zip(ids, own, at.tolist(), best.tolist(), strict=True):
        yield Scored(id, logprob, tuple(zip(places, values, strict=True)))


def _check(ids: Sequence[int], top: int, chunk: int, vocabulary: int, context: int) -> None:
    if len(ids) < 2:
        raise InputError(f"a text to score must hold at least 1 token after the begin id, got {len(ids)} ids in all")
    if len(ids) - 1 > context:
        raise InputError(f"the text must fit the context of {context} tokens, got {len(ids) - 1}; score it in parts")
    if outside := [id for id in ids if not 0 <= id < vocabulary]:
        raise InputError(f"ids must lie in 0 to {vocabulary - 1}, got {outside[0]}; use the model's own tokenizer")
    if top < 0 or chunk < 1:
        raise InputError(f"top must be 0 or more and chunk 1 or more, got {top} and {chunk}; top 0 shows none")
