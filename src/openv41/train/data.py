"""Texts to packs: sequences of any length, packed to exactly as many tokens as a step has. No padding.

    files -> documents (each: begin id, text, end id) -> pieces of at most `context` tokens -> packs

Every token is an input once an epoch and a target once, but for the first of a document and the last. A piece that
does not fit into the rest of a pack is cut there, and what is left of it begins the next pack: as a sequence of its
own, which sees nothing of its beginning. The order is a permutation of the pieces, drawn anew for each epoch from the
seed, so a place in the data is three numbers.

A `.bin` file is token ids as little-endian numbers of 16 bits (of 32, in a vocabulary of more than 65,536), a document
from each begin id to the next; a `.bin.xz` file is one packed by xz. See `write_tokens`.
"""

import glob
import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from openv41.errors import InputError
from openv41.inputs.tokenizer import Tokenizer
from openv41.state import Step

# Documents


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents, or pieces of them: number i is `ids[first[i] : end[i]]`."""

    ids: np.ndarray
    first: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, documents: Iterable[Sequence[int] | np.ndarray]) -> "Corpus":
        parts = [np.asarray(document, dtype=np.int64) for document in documents]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        ids = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return cls(ids, np.concatenate(([0], ends[:-1])).astype(np.int64)[: len(parts)], ends)

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.ids[self.first[number] : self.end[number]]

    @property
    def targets(self) -> int:
        """Tokens that are predicted: all but the first of each document."""
        return int((self.end - self.first - 1).clip(0).sum())

    def pieces(self, context: int) -> "Corpus":
        """Each document cut into pieces of at most `context` inputs. A piece begins with the last token of the piece
        before it: as a target there, as an input here. Documents without a target are left out."""
        counts = -(-(self.end - self.first - 1).clip(0) // context)
        which = np.repeat(np.arange(len(self)), counts)
        place = np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)
        first = self.first[which] + place * context
        return Corpus(self.ids, first, np.minimum(first + context + 1, self.end[which]))

    def split(self, share: float) -> tuple["Corpus", "Corpus"]:
        """Documents for training and for validation. A document's hash decides, so it keeps its side whatever else is
        in the files; and copies of it are on the same side. Of several documents one at least is for validation."""
        fractions = np.array([_fraction(document) for document in self])
        held = fractions < share
        if len(self) > 1 and not held.any():
            held = fractions == fractions.min()
        train, validation = (Corpus(self.ids, self.first[side], self.end[side]) for side in (~held, held))
        return train, validation

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[number] for number in range(len(self)))


def _fraction(document: np.ndarray) -> float:
    """A number from 0 to 1 that follows from the document's ids alone."""
    digest = blake2b(document.astype("<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


# Files

XZ = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20, "lc": 3, "lp": 1, "pb": 1}]
"""How token files are packed: numbers of two bytes, looked for over the last 64 MiB."""
MOST_UNPACKED = 1 << 30
"""Bytes that a packed token file may have inside."""
MOST_MEMORY = 256 << 20
"""Bytes of memory that unpacking one may take beside what is inside."""


def read_files(patterns: Sequence[str], tokenizer: Tokenizer, vocab_size: int, text_key: str = "text") -> Corpus:
    """The documents of all files that the patterns name, in the order of the patterns and of the names within one.

    Raises `InputError` for a pattern that names no file, a file that is not what its ending says, and ids that are
    not below `vocab_size`.
    """
    corpora = [_read(Path(path), tokenizer, vocab_size, text_key) for path in _paths(patterns)]
    if len(corpora) == 1:
        return corpora[0]
    return Corpus.of(document for corpus in corpora for document in corpus)


def write_tokens(path: str | Path, documents: Iterable[Sequence[int]], vocab_size: int) -> None:
    """A `.bin` or `.bin.xz` file of documents, each of which must begin with the begin id and hold it nowhere else."""
    path = Path(path)
    with lzma.open(path, "wb", filters=XZ) if path.suffix == ".xz" else path.open("wb") as file:
        for document in documents:
            file.write(np.asarray(document, dtype=_width(vocab_size)).tobytes())


def _paths(patterns: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for pattern in patterns:
        paths = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
        if not paths:
            raise InputError(f"no file at {pattern}: correct the path or the pattern")
        found |= dict.fromkeys(paths)
    return list(found)


def _width(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _read(path: Path, tokenizer: Tokenizer, vocab_size: int, text_key: str) -> Corpus:
    if path.name.endswith((".bin", ".bin.xz")):
        return _read_tokens(path, tokenizer.special.bos, vocab_size)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}") from error
    texts = list(_json_lines(path, text, text_key)) if path.suffix == ".jsonl" else [text]
    # Markers that a text spells are letters like others: nobody meant them.
    return Corpus.of([*tokenizer.encode(one, markers=False), tokenizer.special.eos] for one in texts if one)


def _json_lines(path: Path, text: str, key: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: this line is no JSON: {error}") from None
        if not isinstance(value, dict) or not isinstance(value.get(key), str):
            raise InputError(f"{path}:{number}: a line must be an object with a text under {key!r}: see data.text_key")
        yield value[key]


def _read_tokens(path: Path, bos: int, vocab_size: int) -> Corpus:
    """A plain file stays where it is, mapped; a packed one is unpacked to memory."""
    kind = np.dtype(_width(vocab_size))
    unpacked = _unpack(path) if path.suffix == ".xz" else None
    if not (size := path.stat().st_size if unpacked is None else len(unpacked)) or size % kind.itemsize:
        raise InputError(
            f"{path} has {size} bytes: token ids of this vocabulary have {kind.itemsize} each, at least one"
        )
    ids = np.memmap(path, kind, "r") if unpacked is None else np.frombuffer(unpacked, kind)
    if (largest := int(ids.max())) >= vocab_size:
        raise InputError(
            f"{path} holds the id {largest}: the vocabulary has {vocab_size}, take the files of its tokenizer"
        )
    first = np.flatnonzero(ids == bos)
    if not len(first) or first[0]:
        raise InputError(f"{path} must begin with the begin id {bos}, got {int(ids[0])}: write it with write_tokens")
    return Corpus(ids, first, np.append(first[1:], len(ids)))


def _unpack(path: Path) -> bytes:
    """What is in an xz file, which is believed to be no larger than `MOST_UNPACKED`, and not beyond."""
    reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_MEMORY)
    try:
        data = reader.decompress(path.read_bytes(), MOST_UNPACKED + 1)
    except lzma.LZMAError as error:
        raise InputError(f"{path} is no xz file that can be read: {error}; write it with write_tokens") from None
    if len(data) > MOST_UNPACKED or not reader.eof:
        what = "is cut off" if len(data) <= MOST_UNPACKED else f"holds more than {MOST_UNPACKED} bytes"
        raise InputError(f"{path} {what}: write it anew, or in several files")
    return data


# Packs


@dataclass(frozen=True, eq=False)
class Pack:
    """Sequences whose inputs are `tokens` together: each is its inputs and one more id, the last target."""

    sequences: tuple[np.ndarray, ...]

    def step(self, device: str | torch.device = "cpu") -> Step:
        """All inputs, a slot each, every token wanting logits."""
        parts = [(slot, 0, torch.from_numpy(ids[:-1].astype(np.int64))) for slot, ids in enumerate(self.sequences)]
        return Step.pack(parts, "all", device=device)  # brought to the device together

    def targets(self, device: str | torch.device = "cpu") -> Tensor:
        """[n] the id behind each input."""
        return torch.from_numpy(np.concatenate([ids[1:] for ids in self.sequences]).astype(np.int64)).to(device)

    def __len__(self) -> int:
        return sum(len(ids) - 1 for ids in self.sequences)


@dataclass(frozen=True)
class Place:
    """Where a stream stands: the epoch, how many of its pieces are used up, and tokens used of the next."""

    epoch: int = 0
    piece: int = 0
    token: int = 0


class Packs:
    """An endless stream of packs of `tokens` inputs, in an order that follows from `seed`. `place` may be set."""

    def __init__(self, corpus: Corpus, context: int, tokens: int, seed: int, place: Place | None = None) -> None:
        self.pieces, self.tokens, self.seed = corpus.pieces(context), tokens, seed
        self.place = place or Place()
        self._order: tuple[int, np.ndarray] | None = None
        if not len(self.pieces):
            raise InputError("the texts hold no two tokens in a row: give more of them")

    def next(self) -> Pack:
        sequences: list[np.ndarray] = []
        room = self.tokens
        while room:
            number = int(self._order_of(self.place.epoch)[self.place.piece])
            ids = self.pieces[number][self.place.token :]
            taken = min(room, len(ids) - 1)
            sequences.append(ids[: taken + 1])
            room -= taken
            self.place = self._after(taken, len(ids) - 1)
        return Pack(tuple(sequences))

    def _after(self, taken: int, length: int) -> Place:
        here = self.place
        if taken < length:
            return Place(here.epoch, here.piece, here.token + taken)
        if here.piece + 1 < len(self.pieces):
            return Place(here.epoch, here.piece + 1)
        return Place(here.epoch + 1)

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.pieces))
        return self._order[1]


def once(corpus: Corpus, context: int, tokens: int, most: int) -> list[Pack]:
    """The first `most` targets of a corpus in packs of at most `tokens`, in file order; the last may be shorter."""
    packs: list[Pack] = []
    held: list[np.ndarray] = []
    left = min(most, corpus.targets)
    for ids in corpus.pieces(context):
        while len(ids) > 1 and left:
            taken = min(len(ids) - 1, tokens - sum(len(one) - 1 for one in held), left)
            held.append(ids[: taken + 1])
            ids, left = ids[taken:], left - taken
            if not left or sum(len(one) - 1 for one in held) == tokens:
                packs.append(Pack(tuple(held)))
                held = []
    return packs
