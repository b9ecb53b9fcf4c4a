"""What the trained model's parts are worth to it: the same documents with one of them switched off.

That is not an ablation: the model has learned with the part, and nothing else has learned to stand in for it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from figures.likelihood import long_ones, nats, per_byte
from figures.texts import bytes_of
from openv41.inputs.tokenizer import Tokenizer
from openv41.model.attention import Attention
from openv41.model.engram import Engram
from openv41.model.transformer import Transformer
from openv41.train.data import Corpus

EDGES = (0, 128, 512, 2048)
PARTS = ("nothing", "far", "memory")
"""What is switched off: nothing; compressed positions, so that layers see their windows; n-gram memory."""


class Without:
    """Operations with one part of the model switched off."""

    def __init__(self, ops: Any, part: str) -> None:
        self.ops, self.part = ops, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def rotated_attention(
        self, q: Tensor, near: Tensor, near_rows: Tensor, far: Tensor | None, far_rows: Tensor | None, *rest: Any
    ) -> Any:
        if far_rows is not None and self.part == "far":
            far_rows = torch.full_like(far_rows, -1)
        return self.ops.rotated_attention(q, near, near_rows, far, far_rows, *rest)

    def engram_gate(
        self, streams: Tensor, keys: Tensor, value: Tensor, weight: Tensor, is_open: Tensor, eps: float
    ) -> Any:
        if self.part == "memory":
            is_open = torch.zeros_like(is_open)
        return self.ops.engram_gate(streams, keys, value, weight, is_open, eps)


@contextmanager
def switched_off(model: Transformer, part: str) -> Iterator[None]:
    """Inside, the model runs without the part."""
    touched = [module for module in model.modules() if isinstance(module, Attention | Engram)]
    held = [module.ops for module in touched]
    for module in touched:
        module.ops = Without(module.ops, part)
    try:
        yield
    finally:
        for module, ops in zip(touched, held, strict=True):
            module.ops = ops


def measure(
    model: Transformer, tokenizer: Tokenizer, corpus: Corpus, count: int, edges: Sequence[int] = EDGES
) -> dict[str, Any]:
    """Bits per byte by position, of the first `count` documents that reach the last edge, without each part."""
    pieces = long_ones(corpus, edges[-1], count)
    sizes = np.array([bytes_of(tokenizer, id) for id in range(tokenizer.vocab_size)])
    lengths = np.stack([sizes[piece[1:]] for piece in pieces])
    rows = []
    for part in PARTS:
        with switched_off(model, part):
            values = np.stack(nats(model, pieces, edges[-1]))
        spans = zip(edges, edges[1:], strict=False)
        bits = [per_byte(values[:, low:high], lengths[:, low:high]) for low, high in spans]
        rows.append({"without": part, "bits_per_byte": bits})
    return {"documents": len(pieces), "edges": list(edges), "rows": rows}


def table(found: dict[str, Any]) -> str:
    edges = found["edges"]
    spans = " | ".join(f"{low:,} to {high:,}" for low, high in zip(edges, edges[1:], strict=False))
    rows = [f"| {row['without']} | {' | '.join(f'{one:.3f}' for one in row['bits_per_byte'])} |"
            for row in found["rows"]]  # fmt: skip
    head = f"| switched off ({found['documents']} documents), bits per byte by position | {spans} |"
    return "\n".join([head, "|---" * len(edges) + "|", *rows])
