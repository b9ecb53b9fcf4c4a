"""Text to ids and back, ids to text while they arrive, and the token map that Engram hashes over.

The vocabulary is the published `tokenizer.json`: a byte-level BPE, so every token stands for some bytes, and one
character may be spread over several tokens.
"""

import codecs
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from openv41.config import SpecialIds
from openv41.errors import ConfigError, InputError

REPLACEMENT = "\ufffd"
"""What decoders print for bytes that are no UTF-8."""


class Tokenizer:
    """A byte-level vocabulary with its three special ids.

    `vocab_size` counts all ids, the added markers included; `special` names begin, end and padding.
    """

    def __init__(self, backend: Backend, special: SpecialIds) -> None:
        self.backend = backend
        self.special = special
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        _check(backend, special, self.vocab_size)

    @classmethod
    def open(cls, path: str | Path, special: SpecialIds | None = None) -> "Tokenizer":
        """Reads `tokenizer.json`; `path` is that file or the folder it lies in.

        Without `special` the ids come from the `config.json` beside it. Raises `InputError` when the file is missing,
        is no tokenizer, or is not byte-level; `ConfigError` when `config.json` does not name the special ids.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise InputError(f"no tokenizer at {file}: pass a tokenizer.json or the folder that holds it") from None
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} cannot be read as text: {error}") from error
        try:
            backend = Backend.from_str(text)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise InputError(f"{file} is no tokenizer.json that the tokenizers library reads: {error}") from error
        return cls(backend, special or SpecialIds.from_json(file.with_name("config.json")))

    def encode(self, text: str, bos: bool = True, markers: bool = True) -> list[int]:
        """The ids of `text`, after the begin id unless `bos` is false.

        With `markers=False` the spelling of a marker such as `<think>` is text like any other: use it for text that
        somebody else wrote, so that it cannot end a turn or open another.
        """
        backend = self.backend if markers else self._plain
        try:
            ids = backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise InputError("the text holds half a surrogate pair, which is no character: remove it") from error
        return [self.special.bos, *ids] if bos else ids

    def decode(self, ids: Iterable[int], special: bool = True) -> str:
        """The text of `ids`, without begin, end and padding if `special` is false. Broken UTF-8 shows as U+FFFD."""
        kept = [id for id in ids if special or id not in (self.special.bos, self.special.eos, self.special.pad)]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def stream(self) -> "TextStream":
        """A decoder for ids that arrive one by one."""
        return TextStream(self)

    def token(self, id: int) -> str:
        """The token as the vocabulary spells it: one character a byte, or a marker's own text."""
        token = self.backend.id_to_token(id) if 0 <= id < self.vocab_size else None
        if token is None:
            raise InputError(f"token id {id} is not in the vocabulary: ids run from 0 to {self.vocab_size - 1}")
        return token

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for."""
        token = self.token(id)
        if all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return token.encode()  # a marker, spelled in characters that no byte is written as

    def token_id(self, token: str) -> int:
        """The id of a token as the vocabulary spells it, for example `<think>`."""
        id = self.backend.token_to_id(token)
        if id is None:
            raise InputError(f"the vocabulary has no token {token!r}")
        return id

    @cached_property
    def _plain(self) -> Backend:
        """The same vocabulary without its added markers."""
        return Backend.from_str(json.dumps(json.loads(self.backend.to_str()) | {"added_tokens": []}))


class TextStream:
    """Turns ids into text as they come, never emitting half a character.

    The pieces that `put` and `finish` return add up to `Tokenizer.decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, id: int) -> str:
        """The text that became certain with this id; empty while a character is incomplete."""
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def finish(self) -> str:
        """What is left: empty, or U+FFFD for a character that never completed. The stream then starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def compress_vocabulary(tokenizer: Tokenizer, vocab_size: int, compressed: int | None = None) -> Tensor:
    """Engram's token map: int64 [vocab_size], from a token id to a smaller vocabulary in which look-alikes coincide.

    ` The`, `the` and `THE` get one id: two tokens coincide when their texts agree after compatibility normalisation,
    without accents, case and outer blanks. A token of blanks counts as one blank. A token that is only part of a
    character is itself, and so is a text of which nothing is left. New ids count up in the order of first appearance.

    Every hash multiplier derives from the number of new ids, so a foreign vocabulary would read other rows of the
    tables without a sign: pass the configured `engram_compressed_vocab_size` as `compressed` to have it checked.

    Raises `ConfigError` when the vocabulary has not `vocab_size` ids or not `compressed` new ids.

    Source: inference/engram.py, build_compressed_token_map.
    """
    if tokenizer.vocab_size != vocab_size:
        raise ConfigError(
            f"vocab_size is {vocab_size} but tokenizer.json has {tokenizer.vocab_size} ids: take both from one release"
        )
    numbers: dict[str, int] = {}
    token_map = [numbers.setdefault(_key(tokenizer, id), len(numbers)) for id in range(vocab_size)]
    if compressed not in (None, len(numbers)):
        raise ConfigError(
            f"engram_compressed_vocab_size is {compressed} but this tokenizer.json compresses to {len(numbers)} ids: "
            "Engram would look up other rows than it was trained on; use the tokenizer of the same release"
        )
    return torch.tensor(token_map, dtype=torch.int64)


# The library's own normalizers rather than unicodedata: the two differ in Unicode version and in lowercasing.
_FOLD = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex("[ \\t\\r\\n]+"), " "),
    ]
)
_STRIP = normalizers.Strip()


def _key(tokenizer: Tokenizer, id: int) -> str:
    """What two tokens must share to coincide."""
    text = tokenizer.decode([id])
    if REPLACEMENT in text:
        return tokenizer.token(id)
    folded = _FOLD.normalize_str(text)
    return folded if folded == " " else _STRIP.normalize_str(folded) or text


def _check(backend: Backend, special: SpecialIds, vocab_size: int) -> None:
    decoder = json.loads(backend.to_str())["decoder"]
    if (decoder or {}).get("type") != "ByteLevel":
        raise InputError(f"tokenizer.json must be byte-level (decoder type ByteLevel), got the decoder {decoder}")
    ids = {"bos": special.bos, "eos": special.eos, "pad": special.pad}
    if outside := {name: id for name, id in ids.items() if not 0 <= id < vocab_size}:
        raise ConfigError(f"special ids {outside} are outside the vocabulary of {vocab_size} ids in tokenizer.json")


def _byte_alphabet() -> dict[str, int]:
    """The character that a byte-level vocabulary writes for each byte, inverted.

    Printable Latin-1 bytes are written as themselves, the others as the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
