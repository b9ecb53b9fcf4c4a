"""The figures of the card: each against another way of working it out."""

import gzip
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from openv41.errors import InputError
from openv41.generate.scoring import score
from openv41.inputs.tokenizer import Tokenizer
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.train.data import Corpus
from openv41.train.trainable import build
from openv41.weights.tiny import SPECIAL, train_tokenizer
from tests.mini.scripts import code
from tests.train.runs import config_of_runs, plain_ops

from figures import compressors, copying, indexers, likelihood, ngram, validity, without  # isort: skip  (scripts puts them in reach)

# n-grams


def documents(seed, count, most=30, vocabulary=7):
    draw = np.random.default_rng(seed)
    return Corpus.of([[0, *draw.integers(1, vocabulary, draw.integers(1, most))] for _ in range(count)])


def by_hand(train, order, vocabulary):
    """Interpolated Kneser-Ney with dictionaries, from its formula: p(next token | tokens before)."""
    grams = {k: Counter() for k in range(1, order + 1)}
    for document in train:
        padded = [0] * order + [int(id) for id in document]
        for at, k in itertools.product(range(order + 1, len(padded)), grams):
            grams[k][tuple(padded[at - k + 1 : at + 1])] += 1
    counts = {k: Counter(gram[1:] for gram in grams[k + 1]) for k in range(1, order)} | {order: grams[order]}

    def probability(before, id):
        p = 1 / vocabulary
        for k, own in counts.items():
            ones, twos = (sum(count == n for count in own.values()) for n in (1, 2))
            discount = ones / (ones + 2 * twos) if ones else 0.5
            history = tuple(before[len(before) - k + 1 :])
            of_history = {gram[-1]: count for gram, count in own.items() if gram[:-1] == history}
            if of_history:
                kept = max(of_history.get(id, 0) - discount, 0)
                p = (kept + discount * len(of_history) * p) / sum(of_history.values())
        return p

    return probability


@pytest.mark.parametrize("order", [1, 2, 4])
def test_the_ngram_model_is_kneser_ney(seed, order):
    train, test = documents(seed, 40), documents(seed + 1, 6)
    probability = by_hand(train, order, 7)
    wanted = []
    for document in test:
        padded = [0] * order + document.tolist()
        wanted += [probability(padded[:at], padded[at]) for at in range(order + 1, len(padded))]
    assert np.exp(-ngram.nats(train, test, 7, 0, order)) == pytest.approx(wanted, rel=1e-9)


def test_the_ngram_model_gives_probabilities(seed):
    """Behind any history, known or not, all ids of the vocabulary together have 1."""
    train = documents(seed, 30)
    for history in ([0], [0, 3], [0, 1, 2, 3], [0, 6, 6, 6, 6]):
        test = Corpus.of([*history, id] for id in range(7))
        last = ngram.nats(train, test, 7, 0, 3).reshape(7, len(history))[:, -1]
        assert np.exp(-last).sum() == pytest.approx(1)
    found = ngram.measure(train, train, 100, 7, 0, 3)
    assert found["bits_per_byte"] < train.targets * math.log2(7) / 100
    with pytest.raises(InputError, match="order must be at most 5 with a vocabulary of 4096, got 6"):
        ngram.bits_of(4096, 6)


# Compressors


def test_compressors_measure_bytes():
    texts = [code(1), code(2)]
    found = compressors.measure(texts)
    size = sum(len(text.encode()) for text in texts)
    assert found["bytes"] == size and found["documents"] == 2
    together = 8 * len(gzip.compress("".join(texts).encode(), 9)) / size
    assert found["bits_per_byte"]["gzip -9"]["together"] == pytest.approx(together, abs=0.05)
    assert all(one["each"] > one["together"] for one in found["bits_per_byte"].values())
    assert len(compressors.rows(found)) == 6


# Likelihood and recall


@pytest.fixture(scope="module")
def model(seed) -> Transformer:
    return build(config_of_runs(), plain_ops(), seed)


def test_likelihood_is_what_scoring_says(model, seed):
    draw = np.random.default_rng(seed)
    pieces = [draw.integers(0, model.config.vocab_size, length) for length in (30, 2, 45, 17)]
    found = likelihood.nats(model, pieces, 50)
    for piece, nats in zip(pieces, found, strict=True):
        wanted = [-one.logprob for one in score(model, piece.tolist())]
        assert nats == pytest.approx(wanted, abs=1e-4)


def test_a_table_by_position_adds_up_to_the_whole(model, seed):
    tokenizer = Tokenizer(train_tokenizer(320), SPECIAL)
    corpus = Corpus.of([0, *tokenizer.encode(code(seed + n), bos=False)[:60]] for n in range(3))
    found = likelihood.positions(model, tokenizer, corpus, 9, (0, 8, 24, 48))
    assert found["documents"] == 3 and [row["to"] for row in found["rows"]] == [8, 24, 48]
    pieces = [document[:49] for document in corpus]
    sizes = [sum(len(tokenizer.token_bytes(int(id))) for id in piece[1:]) for piece in pieces]
    bits = sum(float(one.sum()) for one in likelihood.nats(model, pieces)) / math.log(2)
    lengths = [
        sum(len(tokenizer.token_bytes(int(id))) for piece in pieces for id in piece[1:][row["from"] : row["to"]])
        for row in found["rows"]
    ]
    assert sum(lengths) == sum(sizes)
    weighed = sum(row["bits_per_byte"] * length for row, length in zip(found["rows"], lengths, strict=True))
    assert weighed == pytest.approx(bits)
    by_context = likelihood.contexts(model, tokenizer, corpus, 2, (4, 16, 40), predicted=8)
    assert len(by_context["rows"]) == 3 and by_context["documents"] == 2
    longest = likelihood.nats(model, [document[:49][-49:] for document in corpus][:2])
    told = sum(len(tokenizer.token_bytes(int(id))) for piece in pieces[:2] for id in piece[-8:])
    wanted = sum(float(one[-8:].sum()) for one in longest) / math.log(2) / told
    assert by_context["rows"][-1]["bits_per_byte"] == pytest.approx(wanted)
    assert "| 8 to 24 |" in likelihood.table({"positions": found, "contexts": by_context})


def test_recall_of_picks_that_are_all_there_is(model, seed):
    """Where a layer may pick more than there is, nothing is to be found; else recall is a share, and chance is one."""
    piece = np.random.default_rng(seed).integers(0, model.config.vocab_size, 41)
    found = indexers.measure(model, [piece])
    assert found["tokens"] == 40 and found["picks"] == model.config.index_topk
    for row in found["rows"]:
        assert 0 <= row["recall"] <= 1 and 0 < row["chance"] < 1
    assert all(row["recall"] is None for row in indexers.measure(model, [piece[:3]])["rows"])
    assert indexers.chance(6, 1, 4) == pytest.approx((4 / 5 + 4 / 6) / 2) and indexers.chance(4, 1, 4) is None
    assert "| - | - |" in indexers.table(indexers.measure(model, [piece[:3]]))


# Validity

PROMPT = "import os\n\n\ndef f(a):\n"


@pytest.mark.parametrize(
    ("completion", "complete", "valid", "ended"),
    [
        ("    return a\n\n\ndef g(b):\n    return (b +", False, True, True),
        ("    return a\n\n\n@cached\n# now g\ndef g(b):\n    return (b +", False, True, True),
        ("    return a\n", True, True, True),
        ("    return a\n    b = (", False, True, False),
        ("    return (a\n\n\ndef g(b):\n    return b", False, False, True),
        ("    x = [\n        1,\n    ", False, False, False),
        ("\n\ndef g(b):\n    return b\n", True, False, True),
        ("    # nothing but a comment\n", True, False, True),
        ("    try:\n        pass\nexcept E:\n    pass\nx = 1\n", False, False, True),
        ("", True, False, True),
    ],
)
def test_what_counts_as_valid(completion, complete, valid, ended):
    assert validity.judge(PROMPT, completion, complete) == validity.Verdict(valid, ended)


def test_tasks_are_beginnings_of_functions():
    documents = [
        {"path": "a.md", "text": code(1)}, {"path": "b.py", "text": "x = 1\n"}, {"path": "c.py", "text": "def (:\n"},
        {"path": "d.py", "text": code(2)}, {"path": "e.py", "text": code(3)},
    ]  # fmt: skip
    found = validity.tasks(documents, 9)
    assert [task.prompt + task.rest for task in found] == [code(2), code(3)]
    assert all(task.prompt.endswith("):\n") and task.rest.startswith("    ") for task in found)
    assert validity.judge(found[0].prompt, found[0].rest, True) == validity.Verdict(True, True)
    assert len(validity.tasks(documents, 1)) == 1


def test_published_numerics_are_measured_as_well(seed):
    """The card's model runs on other operations than a run's: the figures take both."""
    config = config_of_runs()
    ops = choose("cpu", numerics="published", training=True)
    model = build(config, ops, seed)
    piece = np.random.default_rng(seed).integers(0, config.vocab_size, 33)
    [nats] = likelihood.nats(model, [piece])
    assert nats.shape == (32,) and np.isfinite(nats).all()
    assert torch.is_grad_enabled()


# Copying


def test_who_finds_a_passage_again_knows_it_and_who_sees_too_little_does_not(monkeypatch):
    """A reader who recognises three tokens within so many before, and knows nothing else."""

    def reads(sight):
        def nats(model, pieces):
            return [np.array([0.0 if known(piece, place, sight) else 8.0 for place in range(len(piece) - 1)])
                    for piece in pieces]  # fmt: skip

        return nats

    def known(piece, place, sight):
        told = piece[max(0, place - 2) : place + 1]
        before = range(max(2, place - sight), place)
        return len(told) == 3 and any((piece[at - 2 : at + 1] == told).all() for at in before)

    for sight, finds in ((10_000, [True, True]), (100, [True, False])):
        monkeypatch.setattr(copying, "nats", reads(sight))
        found = copying.measure(None, range(3, 4000), 128, 3, (0, 300))
        assert [row["first"] for row in found["rows"]] == [8.0, 8.0]
        assert [row["again"] == 0.0 for row in found["rows"]] == finds
        assert found["rows"][-1]["again"] in (0.0, 8.0)
        assert copying.table(found).count("\n") == 3


# Parts switched off


def test_with_the_far_part_off_nothing_comes_from_further_than_windows_reach(model, seed):
    """Four windows of 8 tokens on one another, and the hash of a few tokens, reach less than 40 back."""
    draw = np.random.default_rng(seed)
    told = draw.integers(3, 300, 90)
    other = np.concatenate((draw.integers(3, 300, 20), told[20:]))

    def late():
        return [values[60:] for values in likelihood.nats(model, [told, other], 90)]

    one, another = late()
    assert np.abs(one - another).max() > 1e-5
    with without.switched_off(model, "far"):
        one, another = late()
    assert one == pytest.approx(another, abs=1e-6)
    with without.switched_off(model, "nothing"):
        assert late()[0] == pytest.approx(likelihood.nats(model, [told], 90)[0][60:], abs=1e-6)
    assert not any(isinstance(module.ops, without.Without) for module in model.modules() if hasattr(module, "ops"))


def test_with_memory_off_its_tables_do_not_matter(model, seed):
    told = np.random.default_rng(seed).integers(3, 300, 60)
    tables = [parameter for name, parameter in model.named_parameters() if name.endswith("engram.embed.weight")]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("engram.wkv.weight"):  # before training no value comes out
                parameter.normal_(generator=torch.Generator().manual_seed(seed))
    assert tables

    def shifted(part):
        with without.switched_off(model, part):
            before = likelihood.nats(model, [told], 60)[0]
            with torch.no_grad():
                for table in tables:
                    table += 1
            after = likelihood.nats(model, [told], 60)[0]
            with torch.no_grad():
                for table in tables:
                    table -= 1
        return np.abs(after - before).max()

    assert shifted("memory") < 1e-6 < 1e-4 < shifted("nothing")
