"""Numbers that one answer gives by itself: metrics of a release (server/gateway/release/policy.py). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from server.answers.parse import CUT, Answer

WORDS: Final = 4
OPENING: Final = 200  # characters in which an answer that declines does so


class Pattern(Protocol):
    """A compiled regular expression, of RE2 where it is of a policy."""

    def search(self, text: str, /) -> object | None: ...


def measure(answer: Answer, refusals: Sequence[Pattern] = ()) -> dict[str, float]:
    """Each metric that can be told of this answer, by its name; of several choices the mean.

    An answer that the client left, or that it got for a request of its own that cannot be served (400 to 499), says
    nothing of the weights: it has no metric at all. One that the server failed has `errors` alone.
    """
    about = answer.about
    if 400 <= about.status < 500:
        return {}
    if about.status >= 500 or about.code is not None or not answer.whole:
        return {"errors": 1.0}
    found = {"errors": 0.0, "duration_s": about.duration_s}
    if about.first_byte_s is not None:
        found["first_token_s"] = about.first_byte_s
    tokens = answer.completion_tokens
    if tokens is not None:
        found["tokens"] = float(tokens)
        if about.streamed and about.first_byte_s is not None and tokens > len(answer.choices):
            found["token_s"] = (about.duration_s - about.first_byte_s) / (tokens / len(answer.choices) - 1)
    texts = [choice.text for choice in answer.choices]
    found["cut"] = _mean(choice.finish_reason in CUT for choice in answer.choices)
    found["repetition"] = _mean(repetition(text) for text in texts)
    found["refusals"] = _mean(any(pattern.search(text[:OPENING]) for pattern in refusals) for text in texts)
    scores = [score for choice in answer.choices for score in choice.logprobs]
    if scores:
        found["logprob"] = _mean(scores)
    return found


def repetition(text: str) -> float:
    """The share of the text's sequences of four words that it has had before; 0 for one that has no such sequence."""
    words = text.split()
    sequences = [tuple(words[at : at + WORDS]) for at in range(len(words) - WORDS + 1)]
    return 1.0 - len(set(sequences)) / len(sequences) if sequences else 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
