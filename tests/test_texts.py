"""Stop texts are found however the text was cut, and prompts refuse what cannot be run."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openv41.errors import InputError
from openv41.texts import Prompt, Score, StopTexts, TokenScore


def cut(text: str, stops: list[str]) -> str:
    """The plainest way: look at every beginning of the text in turn."""
    for end in range(len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: end - max(map(len, ends))]
    return text


LETTERS = st.text("ab", max_size=12)


@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    filter = StopTexts(stops)
    shown = ""
    for piece in pieces:
        shown += filter.put(piece)
        assert cut("".join(pieces), stops).startswith(shown), "what is shown is never taken back"
    assert shown + filter.finish() == cut("".join(pieces), stops)
    assert filter.found == (cut("".join(pieces), stops) != "".join(pieces))


def test_only_what_may_begin_a_stop_text_is_held_back() -> None:
    filter = StopTexts(["END"])
    shown = [filter.put(piece) for piece in ("a", "bE", "N", "x", "EEN", "D", "more")]
    assert shown == ["a", "b", "", "ENx", "E", "", ""]
    assert filter.found


def test_a_partial_match_at_the_end_is_kept() -> None:
    filter = StopTexts(["\n\n"])
    assert filter.put("line\n") == "line"
    assert filter.finish() == "\n" and not filter.found


def test_a_prompt_has_its_stop_texts_as_a_tuple() -> None:
    assert Prompt("x", stop="ab").stop == ("ab",)
    assert Prompt("x", stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (dict(text=""), "the prompt must not be empty"),
        (dict(text="x\ud83d"), "half a surrogate pair"),
        (dict(stop=""), "a stop text must not be empty"),
        (dict(stop=["a", ""]), "a stop text must not be empty"),
        (dict(max_new_tokens=0), "max_new_tokens must be"),
        (dict(temperature=math.nan), "temperature must be"),
        (dict(top_p=0.0), "top_p must be"),
        (dict(top_k=-2), "top_k must be"),
        (dict(seed=-1), "seed must be"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused(options: dict, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Prompt(**{"text": "x", **options})


def test_a_score_adds_up() -> None:
    tokens = tuple(TokenScore(0, "x", math.log(0.25)) for _ in range(6))
    score = Score(tokens, bytes=12)
    assert score.perplexity == pytest.approx(4)
    assert score.bits_per_byte == pytest.approx(1)
    assert Score((TokenScore(0, "x", -1e4),), bytes=1).perplexity == math.inf
