"""The numbers of one answer."""

from __future__ import annotations

from typing import Any

import pytest

from server.answers.measures import OPENING, measure, repetition
from server.answers.parse import FORMAT, Answer, Choice
from server.gateway.release.policy import METRICS, REFUSALS, searched
from tests.server.answers.test_parse import about

REFUSES = searched(REFUSALS)


def answer(*choices: Choice, tokens: int | None = 5, error: dict[str, Any] | None = None, **more: Any) -> Answer:
    known = about("/generate", **{"streamed": True, "first_byte_s": 0.1, **more})
    return Answer(FORMAT, "a", known, choices=list(choices), completion_tokens=tokens, error=error)


def said(text: str = "one two", reason: str | None = "stop", **more: Any) -> Choice:
    return Choice(0, text, finish_reason=reason, **more)


def test_every_metric_of_an_answer_by_itself() -> None:
    found = measure(answer(said(logprobs=[-1.0, -2.0])), REFUSES)
    assert found == {
        "errors": 0.0, "duration_s": 0.5, "first_token_s": 0.1, "tokens": 5.0, "token_s": pytest.approx(0.1),
        "cut": 0.0, "repetition": 0.0, "refusals": 0.0, "logprob": -1.5,
    }  # fmt: skip
    assert found.keys() == METRICS.keys() - {"feedback"}


def test_what_the_server_failed_has_no_other_metric() -> None:
    for failed in (
        answer(status=503, code="no_instance"),
        answer(said(reason=None)),
        answer(said(), code="upstream_died"),
        answer(said(), error={"message": "x"}),
    ):
        assert measure(failed) == {"errors": 1.0}


@pytest.mark.parametrize("status", [400, 404, 409, 429, 499])
def test_what_the_client_did_says_nothing(status: int) -> None:
    assert measure(answer(status=status)) == {}


def test_several_samples_have_their_mean() -> None:
    found = measure(answer(said("I cannot do that"), said(reason="length"), tokens=6), REFUSES)
    assert (found["cut"], found["refusals"], found["tokens"]) == (0.5, 0.5, 6.0)
    assert found["token_s"] == pytest.approx(0.4 / 2)


def test_what_was_not_streamed_or_counted_has_no_times_of_tokens() -> None:
    assert "token_s" not in measure(answer(said(), streamed=False))
    assert "token_s" not in measure(answer(said(), tokens=1))
    assert "tokens" not in measure(answer(said(), tokens=None))
    assert "logprob" not in measure(answer(said()))


def test_only_the_opening_declines() -> None:
    assert measure(answer(said("x" * 195 + " I cannot do that")), REFUSES)["refusals"] == 0.0
    assert measure(answer(said("As you like. I won't.")), REFUSES)["refusals"] == 1.0


@pytest.mark.parametrize(
    ("text", "share"), [("", 0.0), ("a b c", 0.0), ("a b c d", 0.0), ("a a a a a", 0.5), ("a b c d a b c d", 0.2)]
)
def test_repetition(text: str, share: float) -> None:
    assert repetition(text) == pytest.approx(share)


def test_no_pattern_takes_long() -> None:
    """`re` would try each of the 2 ** 199 ways to divide the text between the two repetitions."""
    patterns = searched((r"(\w+)+!", "I CANNOT", r"\bnie\b"))
    cases = {"a" * OPENING: 0.0, "a" * 100 + "!": 1.0, "I cannot": 1.0, "Nie.": 1.0, "I can": 0.0}
    for text, declines in cases.items():
        assert measure(answer(said(text)), patterns)["refusals"] == declines
    assert searched(()) == ()
