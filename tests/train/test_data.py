"""Documents, their split, and packs: nothing lost, nothing twice, the same order from the same seed."""

import json
import lzma

import numpy as np
import pytest

from openv41.errors import InputError
from openv41.inputs.tokenizer import Tokenizer
from openv41.train import data
from openv41.train.data import Corpus, Packs, Place, once, read_files, write_tokens
from openv41.weights.tiny import SPECIAL, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_tokenizer(320), SPECIAL)


def corpus_of(lengths):
    """Documents whose ids are all different, so that a token tells where it is from."""
    starts = np.cumsum([0, *lengths])
    return Corpus.of([list(range(start, start + length)) for start, length in zip(starts, lengths, strict=False)])


def pairs(packs):
    """Every (input, target) that the packs hold."""
    return [(int(a), int(b)) for pack in packs for ids in pack.sequences for a, b in zip(ids, ids[1:], strict=False)]


def test_a_long_document_is_cut_and_none_of_its_targets_is_lost():
    corpus = corpus_of([11, 1, 2, 0, 5])
    pieces = [list(piece) for piece in corpus.pieces(4)]
    assert pieces == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10], [12, 13], [14, 15, 16, 17, 18]]
    assert corpus.targets == sum(len(piece) - 1 for piece in pieces)


@pytest.mark.parametrize("tokens", [3, 7, 50])
def test_an_epoch_has_every_target_once_and_every_pack_is_full(tokens):
    corpus = corpus_of([9, 2, 30, 1, 4, 17])
    stream = Packs(corpus, context=8, tokens=tokens, seed=3)
    packs = []
    while stream.place.epoch < tokens:  # so many epochs are a whole number of packs
        packs.append(stream.next())
    assert all(len(pack) == tokens for pack in packs)
    assert all(len(ids) <= 9 for pack in packs for ids in pack.sequences)
    expected = [(i, i + 1) for document in corpus for i in document[:-1]]
    assert sorted(pairs(packs)) == sorted(expected * tokens)


def test_the_seed_decides_the_order_and_a_place_resumes_it():
    corpus = corpus_of([9, 2, 30, 1, 4, 17])

    def stream(seed, place=None):
        return Packs(corpus, 8, 5, seed, place)

    one, other = stream(1), stream(1)
    first = [one.next() for _ in range(40)]
    assert pairs(first) == pairs([other.next() for _ in range(40)])
    assert pairs(first) != pairs([packs.next() for packs in [stream(2)] for _ in range(40)])
    for cut in (1, 7, 23):
        begun = stream(1)
        for _ in range(cut):
            begun.next()
        resumed = stream(1, Place(**vars(begun.place)))
        assert pairs(first[cut:]) == pairs([resumed.next() for _ in range(40 - cut)])


def test_epochs_differ_in_order():
    stream = Packs(corpus_of([4] * 20), 8, 60, 0)
    first, second = stream.next(), stream.next()
    assert pairs([first]) != pairs([second]) and sorted(pairs([first])) == sorted(pairs([second]))


def test_a_step_and_its_targets_line_up():
    pack = Packs(corpus_of([9, 2, 30]), 8, 12, 0).next()
    step, targets = pack.step(), pack.targets()
    assert len(step) == len(targets) == len(step.wanted) == 12
    assert (targets == step.ids + 1).all()
    assert [run.length for run in step.runs] == [len(ids) - 1 for ids in pack.sequences]


def test_validation_is_read_once_in_order_up_to_a_limit():
    corpus = corpus_of([9, 2, 30])
    packs = once(corpus, 8, 12, 100)
    assert pairs(packs) == [(i, i + 1) for document in corpus for i in document[:-1]]
    assert [len(pack) for pack in packs] == [12, 12, 12, 2]
    assert [len(pack) for pack in once(corpus, 8, 12, 20)] == [12, 8]


def test_the_split_follows_from_the_document_alone():
    documents = [np.random.default_rng(i).integers(0, 50, 20).tolist() for i in range(400)]
    train, held = Corpus.of(documents).split(0.25)
    assert len(train) + len(held) == 400 and 60 < len(held) < 140
    chosen = {tuple(document) for document in held}
    backwards = Corpus.of([*documents[::-1], [1, 2, 3]]).split(0.25)[1]
    assert {tuple(document) for document in backwards} - {(1, 2, 3)} == chosen
    assert not chosen & {tuple(document) for document in train}
    assert [len(side) for side in Corpus.of(documents[:5]).split(1e-9)] == [4, 1]


def test_files_of_every_kind_give_the_same_documents(tmp_path, tokenizer):
    texts = ["one text", "another\n\ntext <think>", "日本"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    lines = "\n".join(json.dumps({"body": text}) for text in texts) + "\n\n"
    (tmp_path / "lines.jsonl").write_text(lines, encoding="utf-8")
    documents = [[*tokenizer.encode(text, markers=False), SPECIAL.eos] for text in texts]
    write_tokens(tmp_path / "ids.bin", documents, 320)
    write_tokens(tmp_path / "ids.bin.xz", documents, 320)
    for pattern in ("*.txt", "lines.jsonl", "ids.bin", "ids.bin.xz"):
        read = read_files([str(tmp_path / pattern)], tokenizer, 320, "body")
        assert [list(document) for document in read] == documents, pattern
    together = read_files([str(tmp_path / "ids.bin"), str(tmp_path / "*.txt")], tokenizer, 320)
    assert [list(document) for document in together] == documents * 2


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"txt": 1}\n', "a.jsonl:2: a line must be an object with a text under 'text'"),
        ("a.jsonl", b"{", "a.jsonl:1: this line is no JSON"),
        ("a.txt", b"\xff\xfe", "cannot be read as UTF-8"),
        ("a.bin", b"\0\0\0", "has 3 bytes"),
        ("a.bin", b"\0\0\x40\x01", "holds the id 320"),
        ("a.bin", b"\x05\0\0\0", "must begin with the begin id 0"),
        ("b.txt", b"", "no file at"),
        ("a.bin.xz", b"this is no xz file", "is no xz file that can be read"),
        ("a.bin.xz", lzma.compress(b"\0\0" * 500)[:-30], "is cut off"),
        ("a.bin.xz", lzma.compress(b"\0\0\0"), "has 3 bytes"),
    ],
)
def test_bad_files_are_told_in_one_line(tmp_path, tokenizer, name, data, message):
    if name != "b.txt":
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_files([str(tmp_path / name)], tokenizer, 320)


def test_a_packed_file_is_not_unpacked_beyond_its_bound(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(data, "MOST_UNPACKED", 1000)
    for count in (500, 501):
        (tmp_path / f"{count}.bin.xz").write_bytes(lzma.compress(b"\0\0" * count))
    assert len(read_files([str(tmp_path / "500.bin.xz")], tokenizer, 320)) == 500
    with pytest.raises(InputError, match="holds more than 1000 bytes"):
        read_files([str(tmp_path / "501.bin.xz")], tokenizer, 320)


def test_texts_without_a_target_are_refused():
    with pytest.raises(InputError, match="no two tokens in a row"):
        Packs(corpus_of([1, 0, 1]), 8, 4, 0)
