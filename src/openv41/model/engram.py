"""Engram: memory looked up by n-gram, before two of the layers.

The last 2, 3 and 4 tokens before each position (ids compressed: tokens that spell the same text but for case, accents
and blanks share one) are hashed to rows of a large table, several hash functions ("heads") for each length. The rows
together are projected to a key per stream and one value; the agreement of each stream with its key decides how much of
the value is added to it.

An n-gram never reaches over the start of the sequence nor across an image: what lies beyond counts as padding.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from openv41.config import Config, engram_primes
from openv41.model.layers import Linear, empty_weight, stored_in
from openv41.ops import Ops
from openv41.state import Ring, Step


class Lookback(nn.Module):
    """Each token's compressed id and those of the tokens before it: ngrams [n, max n], newest first, pad where blocked.

    `token_map` [vocab] gives the compressed id of every token: it follows from the tokenizer.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.longest, self.pad = config.engram_max_ngram_size, config.engram_pad_id
        self.vocabulary = config.engram_compressed_vocab_size
        self.register_buffer("token_map", torch.zeros(config.vocab_size, dtype=torch.int64), persistent=False)
        self.token_map: Tensor

    def forward(self, step: Step, tail: Ring) -> Int[Tensor, "n order"]:
        """Puts the step's ids and image flags into the tail of each slot's history."""
        back = self.longest - 1
        table, rows = tail.push(step, torch.stack((step.ids, step.image.long()), 1), back)
        position = step.position.unsqueeze(1) - torch.arange(self.longest, device=step.device)
        at = rows(position.clamp_min(-1))
        ids, image = table[at.clamp_min(0)].unbind(-1)  # [n, order] each
        blocked = ((at < 0) | (image != 0)).cummax(1).values
        return torch.where(blocked, self.token_map[self.pad], self.token_map[ids])


class HashPlan(NamedTuple):
    """One layer's hash functions: primes and row offsets [orders, heads], a multiplier for each lookback [max n]."""

    primes: Int[Tensor, "orders heads"]
    offsets: Int[Tensor, "orders heads"]
    multipliers: Int[Tensor, "order"]

    def on(self, device: torch.device) -> "HashPlan":
        """The same numbers on a device."""
        return self if self.primes.device == device else HashPlan(*(part.to(device) for part in self))


def hash_plan(config: Config, layer: int) -> HashPlan:
    """Primes are drawn in order, none twice in the model; multipliers come from a generator seeded by the layer."""
    sizes = config.engram_max_ngram_size - 1
    at = config.engram_layer_ids.index(layer)
    drawn_primes = engram_primes(at + 1, sizes, config.engram_n_heads, config.engram_vocab_size)[at]
    primes = torch.tensor(drawn_primes, device="cpu")  # constants, also of a model that is built on the meta device
    ends = primes.flatten().cumsum(0)
    offsets = (ends - primes.flatten()).view_as(primes)
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
    return HashPlan(primes, offsets, torch.from_numpy(drawn * 2 + 1))


def hash_rows(ngrams: Int[Tensor, "n order"], plan: HashPlan) -> Int[Tensor, "n rows"]:
    """Table rows of each token's n-grams, by length, then by head: products XORed one lookback at a time, modulo."""
    mixed = ngrams * plan.multipliers
    totals = [mixed[:, 0]]
    for i in range(1, ngrams.shape[1]):
        totals.append(totals[-1] ^ mixed[:, i])
    return (torch.stack(totals[1:], 1).unsqueeze(2) % plan.primes + plan.offsets).flatten(1)


class Table(nn.Module):
    """Rows [rows, width] in e4m3, an e8m0 scale per 32 values. 94 GiB in the release: may be a memory-mapped file."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight, _ = empty_weight("fp8", rows, width)
        self.scale = nn.Parameter(torch.empty(rows, width // 32, dtype=torch.float8_e8m0fnu), requires_grad=False)


class Engram(nn.Module):
    """The memory of one layer: streams [n, m, dim] -> streams."""

    def __init__(self, config: Config, layer: int, ops: Ops) -> None:
        super().__init__()
        c = config
        self.ops, self.eps, self.m = ops, c.norm_eps, c.hc_mult
        self.hashes = hash_plan(c, layer)
        rows = (c.engram_max_ngram_size - 1) * c.engram_n_heads
        self.embed = Table(c.engram_num_embeddings[c.engram_layer_ids.index(layer)], c.engram_head_dim)
        self.wkv = Linear(rows * c.engram_head_dim, (c.hc_mult + 1) * c.dim, stored_in(c), ops)
        self.q_weight = nn.Parameter(torch.ones(c.hc_mult, c.dim, dtype=torch.bfloat16))
        self.k_weight = nn.Parameter(torch.ones(c.hc_mult, c.dim, dtype=torch.bfloat16))

    def forward(
        self, h: Float[Tensor, "n m dim"], ngrams: Int[Tensor, "n order"], image: Bool[Tensor, "n"]
    ) -> Float[Tensor, "n m dim"]:
        self.hashes = self.hashes.on(ngrams.device)  # once
        return self.recall(h, hash_rows(ngrams, self.hashes), ~image)

    def recall(
        self, h: Float[Tensor, "n m dim"], rows: Int[Tensor, "n rows"], open: Bool[Tensor, "n"]
    ) -> Float[Tensor, "n m dim"]:
        """Add what the table rows hold to the streams, each by its own gate; image tokens' gates are not `open`."""
        memory = self.ops.look_up_rows(self.embed.weight, self.embed.scale, rows).flatten(1)  # [n, rows * width]
        keys = self.wkv(memory).unflatten(1, (self.m + 1, -1))  # [n, m + 1, dim], the value last
        wide = torch.promote_types(h.dtype, torch.float32)
        weight = self.q_weight.to(wide) * self.k_weight.to(wide)
        return self.ops.engram_gate(h, keys[:, : self.m], keys[:, self.m], weight, open, self.eps)
