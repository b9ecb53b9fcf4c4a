"""Scores against the log-softmax of the whole text's logits at once."""

import pytest
import torch
from small import run_at_once, small_config, small_model, tokens

from openv41.errors import InputError
from openv41.generate.scoring import score
from openv41.model.transformer import Transformer
from openv41.ops import choose


@pytest.fixture(scope="module")
def model() -> Transformer:
    return small_model(small_config(), choose("cpu", "reference", "plain"))


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_scores_are_the_log_softmax_of_the_whole(model: Transformer, chunk: int) -> None:
    ids = tokens(model.config, 11, seed=3)
    with torch.no_grad():
        expected = run_at_once(model, ids[:-1]).log_softmax(1)
    scored = list(score(model, ids.tolist(), top=3, chunk=chunk))
    assert [one.id for one in scored] == ids[1:].tolist()
    for one, row in zip(scored, expected, strict=True):
        assert one.logprob == pytest.approx(float(row[one.id]), rel=1e-9)
        assert [value for _, value in one.likeliest] == pytest.approx(row.topk(3).values.tolist(), rel=1e-9)
        assert [float(row[id]) for id, _ in one.likeliest] == row.topk(3).values.tolist()


def test_more_alternatives_than_tokens_are_all_of_them(model: Transformer) -> None:
    [one] = score(model, [1, 2], top=10_000)
    assert sorted(id for id, _ in one.likeliest) == list(range(model.config.vocab_size))


def test_the_whole_context_can_be_scored() -> None:
    model = small_model(small_config(original_seq_len=8, rope_factor=1), choose("cpu", "reference", "plain"))
    assert len(list(score(model, [1] * 9))) == 8
    with pytest.raises(InputError, match="must fit the context of 8 tokens, got 9"):
        list(score(model, [1] * 10))


@pytest.mark.parametrize(
    ("ids", "options", "complaint"),
    [
        ([1], {}, "at least 1 token after the begin id, got 1"),
        ([1, 96], {}, "must lie in 0 to 95, got 96"),
        ([1, 2], {"top": -1}, "top must be 0 or more"),
        ([1, 2], {"chunk": 0}, "chunk 1 or more"),
    ],
)
def test_what_cannot_be_scored_is_refused(model: Transformer, ids: list[int], options: dict, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        list(score(model, ids, **options))
