"""Bits per byte of held-out text: as a whole, by position in a document, and by how much of the past may be seen.

By position all documents are the same ones in every row, but a file's beginning is other text than its middle. By
length of context the very same tokens are predicted in every row, from the last so many tokens before them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from figures.texts import bytes_of
from openv41.errors import InputError
from openv41.inputs.tokenizer import Tokenizer
from openv41.model.transformer import Transformer
from openv41.train.data import Corpus, Pack
from openv41.train.language import run_headless

CONTEXT = 8192
"""Tokens of a sequence, at most: what the model was trained on."""
EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PREDICTED = 256
"""Tokens that are predicted from contexts of different lengths, the last ones of the context."""
CONTEXTS = (64, 256, 1024, 4096, 7936)
ROWS = 1024


def packs(pieces: Sequence[np.ndarray], tokens: int) -> Iterator[list[np.ndarray]]:
    """Pieces side by side, at most `tokens` inputs together, in order; a longer one alone."""
    held: list[np.ndarray] = []
    for piece in pieces:
        if held and sum(len(one) - 1 for one in held) + len(piece) - 1 > tokens:
            yield held
            held = []
        held.append(piece)
    if held:
        yield held


@torch.no_grad()
def nats(model: Transformer, pieces: Sequence[np.ndarray], tokens: int = CONTEXT) -> list[np.ndarray]:
    """Of each piece the negative log-probabilities of its tokens but the first."""
    device, found = model.embed.weight.device, []
    for some in packs(pieces, tokens):
        pack = Pack(tuple(some))
        hidden, _ = run_headless(model, pack.step(device))
        pairs = zip(hidden.split(ROWS), pack.targets(device).split(ROWS), strict=True)
        values = torch.cat([F.cross_entropy(model.head(h).float(), t, reduction="none") for h, t in pairs])
        found += np.split(values.double().cpu().numpy(), np.cumsum([len(piece) - 1 for piece in some])[:-1])
    return found


def whole(model: Transformer, corpus: Corpus, size: int, context: int = CONTEXT) -> dict[str, Any]:
    """All documents, cut into pieces of `context` as in training; their text has `size` bytes."""
    pieces = list(corpus.pieces(context))
    total = sum(float(one.sum()) for one in nats(model, pieces, context))
    return {
        "documents": len(corpus), "bytes": size, "tokens": corpus.targets, "context": context,
        "bits_per_byte": total / math.log(2) / size,
    }  # fmt: skip


def positions(
    model: Transformer, tokenizer: Tokenizer, corpus: Corpus, count: int, edges: Sequence[int] = EDGES
) -> dict[str, Any]:
    """Bits per byte by position, of the first `count` documents that reach the last edge."""
    pieces = long_ones(corpus, edges[-1], count)
    sizes = np.array([bytes_of(tokenizer, id) for id in range(tokenizer.vocab_size)])
    values = np.stack(nats(model, pieces, edges[-1]))
    lengths = np.stack([sizes[piece[1:]] for piece in pieces])
    rows = [
        {"from": low, "to": high, "bits_per_byte": per_byte(values[:, low:high], lengths[:, low:high])}
        for low, high in zip(edges, edges[1:], strict=False)
    ]
    return {"documents": len(pieces), "rows": rows}


def contexts(
    model: Transformer, tokenizer: Tokenizer, corpus: Corpus, count: int, lengths: Sequence[int] = CONTEXTS,
    predicted: int = PREDICTED,
) -> dict[str, Any]:  # fmt: skip
    """Bits per byte of the same `predicted` tokens of each document, from the last so many tokens before each block."""
    most = lengths[-1] + predicted
    pieces = long_ones(corpus, most, count)
    sizes = np.array([bytes_of(tokenizer, id) for id in range(tokenizer.vocab_size)])
    told = np.stack([sizes[piece[-predicted:]] for piece in pieces])
    rows = []
    for length in lengths:
        values = nats(model, [piece[-(length + predicted) - 1 :] for piece in pieces], most)
        own = np.stack([one[-predicted:] for one in values])
        rows.append({"context": length, "bits_per_byte": per_byte(own, told)})
    return {"documents": len(pieces), "predicted": predicted, "rows": rows}


def long_ones(corpus: Corpus, tokens: int, count: int) -> list[np.ndarray]:
    """The first `tokens` inputs, and one id more, of documents that have as many."""
    pieces = [document[: tokens + 1] for document in corpus if len(document) > tokens][:count]
    if not pieces:
        raise InputError(f"no held-out document has more than {tokens} tokens: build the corpus anew")
    return pieces


def per_byte(values: np.ndarray, lengths: np.ndarray) -> float:
    return float(values.sum() / math.log(2) / max(1, lengths.sum()))


def table(found: dict[str, Any]) -> str:
    """Both tables in Markdown."""
    by_position = [f"| {row['from']:,} to {row['to']:,} | {row['bits_per_byte']:.3f} |"
                   for row in found["positions"]["rows"]]  # fmt: skip
    by_context = [f"| {row['context']:,} | {row['bits_per_byte']:.3f} |" for row in found["contexts"]["rows"]]
    return "\n".join(
        [
            f"| tokens before ({found['positions']['documents']} documents) | bits per byte |", "|---|---|",
            *by_position, "",
            f"| context seen (the same {found['contexts']['predicted']} tokens of {found['contexts']['documents']} "
            "documents) | bits per byte |", "|---|---|",
            *by_context,
        ]
    )  # fmt: skip


def draw(found: dict[str, Any], path: Any) -> None:
    """The two tables as curves, SVG and PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = found["positions"]["rows"]
    axes.plot([row["to"] for row in rows], [row["bits_per_byte"] for row in rows], "o-", label="by position")
    rows = found["contexts"]["rows"]
    label = "the same tokens, by length of context"
    axes.plot([row["context"] for row in rows], [row["bits_per_byte"] for row in rows], "s--", label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens before", ylabel="bits per byte")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "openv41"}):
        figure.savefig(path.with_suffix(".png"), dpi=150, metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
