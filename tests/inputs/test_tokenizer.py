"""Text to ids and back, ids to text as they come, and the token map by hand."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from openv41.config import Config, SpecialIds
from openv41.errors import ConfigError, InputError
from openv41.inputs import tokenizer as module
from openv41.inputs.tokenizer import Tokenizer, compress_vocabulary
from openv41.weights.tiny import SPECIAL, train_tokenizer

TINY = Tokenizer(train_tokenizer(1024), SPECIAL)
IDS = st.lists(st.integers(0, 1023), max_size=12)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def spelled(text: str | bytes) -> str:
    """A text or some bytes in the characters that a byte-level vocabulary writes them in."""
    data = text.encode() if isinstance(text, str) else text
    written = {byte: character for character, byte in module._BYTE_OF.items()}
    return "".join(written[byte] for byte in data)


def vocabulary(*tokens: str | bytes) -> Tokenizer:
    """A tokenizer of just these tokens after begin, end and padding."""
    first = ["<begin>", "<end>", "<pad>"]
    ids = {token: id for id, token in enumerate([*first, *map(spelled, tokens)])}
    assert len(ids) == len(tokens) + 3
    backend = Backend(models.BPE(vocab=ids, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, SPECIAL)


# Encoding and decoding


def test_begin():
    assert TINY.encode("") == [0]
    assert TINY.encode("", bos=False) == []
    assert TINY.encode("Hello")[0] == 0 and TINY.encode("Hello")[1:] == TINY.encode("Hello", bos=False)


def test_markers():
    think = TINY.token_id("<think>")
    assert TINY.encode("<think>", bos=False) == [think]
    plain = TINY.encode("<think>", bos=False, markers=False)
    assert think not in plain and TINY.decode(plain) == "<think>"
    assert TINY.decode([0, think, 1, 2], special=False) == "<think>"
    assert TINY.decode([0, think]) == "<｜begin▁of▁sentence｜><think>"


def test_someone_elses_text_cannot_end_a_turn():
    text = "".join(TINY.token(id) for id in (0, 1, 2, *range(1010, 1024)))
    ids = TINY.encode(text, bos=False, markers=False)
    assert TINY.decode(ids) == text
    assert all(3 <= id < 1010 for id in ids)


@given(TEXT)
def test_decoding_undoes_encoding(text):
    assert TINY.decode(TINY.encode(text, bos=False)) == text
    assert TINY.decode(TINY.encode(text, bos=False, markers=False)) == text


@given(IDS)
def test_decoding_agrees_with_the_library(ids):
    assert TINY.decode(ids) == TINY.backend.decode(ids, skip_special_tokens=False)


def test_the_alphabet_is_the_library_s():
    assert set(module._BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(module._BYTE_OF.values()) == list(range(256))


# Streaming


@given(IDS)
def test_a_stream_adds_up_to_the_text(ids):
    stream = TINY.stream()
    pieces = [stream.put(id) for id in ids]
    assert "".join(pieces) + stream.finish() == TINY.decode(ids)
    assert stream.finish() == ""


@given(TEXT)
def test_a_stream_of_whole_text_never_shows_a_broken_character(text):
    stream = TINY.stream()
    pieces = [stream.put(id) for id in TINY.encode(text, bos=False)]
    assert "".join(pieces) == text and stream.finish() == ""


def test_a_character_waits_until_it_is_whole():
    tokens = vocabulary("a", b"\xf0\x9f", b"\x99\x82", b"\xc3")
    stream = tokens.stream()
    assert [stream.put(id) for id in (3, 4, 5, 3)] == ["a", "", "🙂", "a"]
    assert [stream.put(4), stream.put(3)] == ["", "\ufffda"]
    assert [stream.put(6), stream.finish()] == ["", "\ufffd"]
    assert [stream.put(5), stream.put(3)] == ["\ufffd\ufffd", "a"]


# The token map


def test_the_token_map_by_hand():
    rows = [
        ("the", 3), (" The", 3), ("THE", 3), ("the ", 3),
        ("e", 4), ("é", 4), ("É", 4), (" È", 4), ("e\u0301", 4),
        (" ", 5), ("\n\n", 5), (" \t\r\n", 5), (" \u0301", 5),  # blanks, with or without an accent on them
        (b"\xc3", 6), (b"\xa9", 7), (b"\xe6\xb5", 8),  # parts of characters
        ("©", 7),  # its text is how byte A9 is spelled
        ("ﬁ", 9), ("fi", 9), ("Ｆｉ", 9),
        ("\u0301", 10), ("\u0300", 11),  # nothing is left of them
        ("①", 12), ("1", 12), ("x²", 13), ("x2", 13),
        ("a b", 14), ("A\n\t b", 14), ("ab", 15),
        ("海", 16), ("İ", 17), ("i", 17), ("ß", 18), ("ss", 19), ("Σ", 20), ("ς", 21), ("σ", 20),
        ("\u3000", 5), ("\u00a0", 5),  # wide and unbreakable blanks are compatible with a blank
        ("\u2028", 22),  # a line separator is stripped, so it stays itself
    ]  # fmt: skip
    tokens = vocabulary(*(token for token, _ in rows))
    assert compress_vocabulary(tokens, len(rows) + 3).tolist() == [0, 1, 2, *(new for _, new in rows)]


def test_a_partial_character_beside_text_is_keyed_whole():
    tokens = vocabulary(b"a\xc3", b"A\xc3", "a")
    assert compress_vocabulary(tokens, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_real_replacement_character_is_kept_raw():
    tokens = vocabulary("\ufffd", " \ufffd")
    assert compress_vocabulary(tokens, 5).tolist() == [0, 1, 2, 3, 4]


def test_new_ids_count_up():
    token_map = compress_vocabulary(TINY, 1024).tolist()
    seen: list[int] = []
    for new in token_map:
        if new not in seen:
            seen.append(new)
    assert seen == list(range(len(seen))) and len(seen) < 1000
    assert token_map[0] == 0 and token_map[2] == 2


def test_another_vocabulary_is_noticed():
    found = int(compress_vocabulary(TINY, 1024).max()) + 1
    compress_vocabulary(TINY, 1024, compressed=found)
    with pytest.raises(ConfigError, match=f"engram_compressed_vocab_size is 99092 but .* compresses to {found} ids"):
        compress_vocabulary(TINY, 1024, compressed=99092)
    with pytest.raises(ConfigError, match="vocab_size is 1023 but tokenizer.json has 1024 ids"):
        compress_vocabulary(TINY, 1023)


# Errors


def test_opening(tmp_path):
    (tmp_path / "tokenizer.json").write_text(TINY.backend.to_str())
    text = "Größe 42, café"
    assert Tokenizer.open(tmp_path, SPECIAL).encode(text) == TINY.encode(text)
    assert Tokenizer.open(tmp_path / "tokenizer.json", SPECIAL).vocab_size == 1024
    with pytest.raises(ConfigError):
        Tokenizer.open(tmp_path)  # there is no config.json to take the special ids from
    (tmp_path / "config.json").write_text(json.dumps(Config.tiny().to_hf(SpecialIds(5, 6, 7))))
    assert Tokenizer.open(tmp_path).special == SpecialIds(5, 6, 7)


def test_no_file(tmp_path):
    with pytest.raises(InputError, match=r"no tokenizer at .*tokenizer\.json"):
        Tokenizer.open(tmp_path, SPECIAL)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"{", "is no tokenizer.json"), (b"{}", "is no tokenizer.json"), (b"\xff\xfe", "cannot be read as text")],
)
def test_a_bad_file(tmp_path: Path, data, message):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(InputError, match=message):
        Tokenizer.open(tmp_path, SPECIAL)


def test_a_vocabulary_of_another_kind():
    words = Backend(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    with pytest.raises(InputError, match="must be byte-level"):
        Tokenizer(words, SPECIAL)


def test_special_ids_outside():
    with pytest.raises(ConfigError, match=r"\{'eos': 9000\} are outside the vocabulary of 1024 ids"):
        Tokenizer(TINY.backend, SpecialIds(0, 9000, 2))


@pytest.mark.parametrize("id", [-1, 1024, 2**40])
def test_ids_outside(id):
    message = f"token id {id} is not in the vocabulary: ids run from 0 to 1023"
    for use in (TINY.token, TINY.token_bytes, TINY.stream().put, lambda id: TINY.decode([0, id])):
        with pytest.raises(InputError, match=message):
            use(id)


def test_an_unknown_token():
    with pytest.raises(InputError, match="no token '<nonsense>'"):
        TINY.token_id("<nonsense>")


def test_half_a_character():
    with pytest.raises(InputError, match="half a surrogate pair"):
        TINY.encode("\ud83d")
