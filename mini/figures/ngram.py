"""An n-gram model for comparison: interpolated Kneser-Ney over the same vocabulary, of the same training tokens.

    P_k(w | h) = max(c - D, 0) / C(h) + D T(h) / C(h) * P_(k-1)(w | h without its oldest token)

h is the k - 1 tokens before w. Of the highest order c counts how often h w occurs; of the lower ones, how many
different tokens stand before h w. C(h) adds c up over all w, T(h) counts the w with c > 0, and D is the order's
discount n1 / (n1 + 2 n2), where n1 and n2 n-grams have the count 1 and 2. P_0 is even. An h that never occurred leaves
all to the order below. Before a document's begin id stand more of the same.

An n-gram is one number of 64 bits, oldest token in front, so counting is sorting, and nothing is hashed or cut off.
"""

import math
from dataclasses import dataclass

import numpy as np

from openv41.errors import InputError
from openv41.train.data import Corpus

ORDER = 5


@dataclass(frozen=True, eq=False)
class Table:
    """One order: its n-grams, ascending, with their counts; contexts, ascending, with count and number of types."""

    codes: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    types: np.ndarray
    discount: float

    @classmethod
    def of(cls, codes: np.ndarray, counts: np.ndarray, bits: int) -> "Table":
        contexts, first = np.unique(codes >> np.uint64(bits), return_index=True)
        totals = np.add.reduceat(counts, first)
        types = np.diff(np.append(first, len(codes)))
        ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
        return cls(codes, counts, contexts, totals, types, ones / (ones + 2 * twos) if ones else 0.5)

    def interpolate(self, wanted: np.ndarray, bits: int, below: np.ndarray) -> np.ndarray:
        """The probabilities of n-grams' last tokens, from those that the order below gives."""
        count = found(self.codes, self.counts, wanted)
        context = wanted >> np.uint64(bits)
        total = found(self.contexts, self.totals, context)
        types = found(self.contexts, self.types, context)
        own = np.maximum(count - self.discount, 0) + self.discount * types * below
        return np.where(total > 0, own / np.maximum(total, 1), below)


def found(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Values of the keys that are there, else 0."""
    at = np.searchsorted(keys, wanted).clip(0, len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def codes_of(corpus: Corpus, order: int, bits: int, bos: int) -> np.ndarray:
    """The n-gram that ends at each token but the first of its document."""
    lengths = corpus.end - corpus.first
    ids = np.concatenate(list(corpus)).astype(np.uint64)
    place = np.arange(len(ids)) - np.repeat(lengths.cumsum() - lengths, lengths)
    codes = ids.copy()
    for lag in range(1, order):
        before = np.concatenate((np.full(lag, bos, np.uint64), ids[:-lag]))
        codes |= np.where(place >= lag, before, np.uint64(bos)) << np.uint64(bits * lag)
    return codes[place > 0]


def tables(train: Corpus, vocabulary: int, bos: int, order: int = ORDER):
    """The table of each order from 1 on, one at a time: only one is ever held."""
    bits = bits_of(vocabulary, order)
    for k in range(1, order + 1):
        if k == order:
            codes, counts = np.unique(codes_of(train, k, bits, bos), return_counts=True)
        else:
            longer = np.unique(codes_of(train, k + 1, bits, bos))
            codes, counts = np.unique(longer & np.uint64((1 << bits * k) - 1), return_counts=True)
        yield k, Table.of(codes, counts, bits)


def bits_of(vocabulary: int, order: int) -> int:
    bits = max(1, (vocabulary - 1).bit_length())
    if bits * order > 64:
        raise InputError(f"order must be at most {64 // bits} with a vocabulary of {vocabulary}, got {order}; lower it")
    return bits


def nats(train: Corpus, test: Corpus, vocabulary: int, bos: int, order: int = ORDER) -> np.ndarray:
    """The negative log-probability of every token of `test` but each document's first."""
    bits = bits_of(vocabulary, order)
    p = np.full(test.targets, 1 / vocabulary)
    for k, table in tables(train, vocabulary, bos, order):
        p = table.interpolate(codes_of(test, k, bits, bos), bits, p)
    return -np.log(p)


def measure(train: Corpus, test: Corpus, size: int, vocabulary: int, bos: int, order: int = ORDER) -> dict[str, float]:
    """Bits per byte of `test`, whose text has `size` bytes."""
    total = float(nats(train, test, vocabulary, bos, order).sum())
    return {
        "order": order, "training_tokens": len(train.ids), "tokens": test.targets, "bytes": size,
        "bits_per_byte": total / math.log(2) / size,
    }  # fmt: skip


def row(result: dict[str, float]) -> str:
    return f"| Kneser-Ney, {result['order']} tokens, of the same training tokens | {result['bits_per_byte']:.3f} |"
