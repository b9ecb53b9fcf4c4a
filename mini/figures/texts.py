"""Held-out documents: which ones a figure is about. Always the same ones, in the order of a hash of their paths."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prepare import place

from openv41.inputs.tokenizer import Tokenizer
from openv41.train.data import Corpus

CORPUS = Path(".corpus")


def held_out(folder: Path = CORPUS) -> list[dict[str, Any]]:
    """All held-out documents: package, path, text."""
    with (folder / "validation.jsonl").open(encoding="utf-8") as lines:
        return sorted(map(json.loads, lines), key=place)


def some(documents: Sequence[dict[str, Any]], size: int) -> list[str]:
    """Texts of the first documents, whole ones, together at least `size` bytes if there are as many."""
    texts: list[str] = []
    for one in documents:
        if sum(len(text.encode()) for text in texts) >= size:
            break
        texts.append(one["text"])
    return texts


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> Corpus:
    """As a run reads them: begin id, text, end id."""
    return Corpus.of([*tokenizer.encode(text, markers=False), tokenizer.special.eos] for text in texts)


def bytes_of(tokenizer: Tokenizer, id: int) -> int:
    """Bytes of text that an id stands for; begin, end and padding stand for none."""
    special = tokenizer.special
    return 0 if id in (special.bos, special.eos, special.pad) else len(tokenizer.token_bytes(id))
