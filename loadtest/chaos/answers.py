"""What is wrong with an answer: each version answers one token, so every token says which weights wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FIRST_TOKEN, CHECKPOINTS = 100, 4
BAD_EVERY = 8
Bad = Literal["nan", "inf", "overflow"]
REFUSED: tuple[Bad, ...] = ("nan", "inf")  # what staging must refuse; the third kind shows only while it runs
Problem = Literal["wrong", "mixed", "mislabelled"]


def token_of(version: int) -> int:
    """What a good version answers, whatever it is asked."""
    return FIRST_TOKEN + version % CHECKPOINTS


def badness(version: int) -> Bad | None:
    """What is wrong with the weights of a version, by its number. What a bad one answers is anybody's guess."""
    kinds: tuple[Bad, ...] = (*REFUSED, "overflow")
    return kinds[version // BAD_EVERY % len(kinds)] if version % BAD_EVERY == BAD_EVERY - 1 else None


@dataclass(frozen=True)
class Wish:
    """What a request asks of swaps, in the words of the API."""

    policy: str = "keep"
    version: int | None = None
    min_version: int | None = None

    @property
    def of_one_version(self) -> bool:
        return self.policy in ("finish", "abort") or self.version is not None

    def body(self, finish_s: float, wait_s: float) -> dict[str, Any]:
        """The field `hotswap` of a request."""
        asked: dict[str, Any] = {} if self.policy == "keep" else {"policy": self.policy}
        asked |= {"finish_s": finish_s} if self.policy == "finish" else {}
        asked |= {"version": self.version} if self.version is not None else {}
        asked |= {"min_version": self.min_version} if self.min_version is not None else {}
        return asked | ({"wait_s": wait_s} if self.version is not None or self.min_version is not None else {})


@dataclass
class Answer:
    """As much of an answer as arrived. `pieces` are its events: the version of the last token, and the tokens.

    `spans` and `prompt_spans` are those at its end; without them it is not complete.
    """

    tokens: list[int] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)
    spans: list[dict[str, int]] | None = None
    prompt_spans: list[dict[str, int]] | None = None
    resumed: int = 0

    def take(self, tokens: Iterable[int], version: int | None) -> None:
        """An event of a stream."""
        before = len(self.tokens)
        self.tokens += tokens
        if version is not None and len(self.tokens) > before:
            self.pieces.append((version, len(self.tokens) - before))

    def take_end(self, choice: Mapping[str, Any]) -> None:
        """The choice that says which versions wrote it all."""
        self.spans = choice["weight_versions"]
        self.prompt_spans = choice.get("prompt_weight_versions", self.prompt_spans)
        self.resumed = len(choice.get("resumed_at", ()))

    @property
    def versions(self) -> list[int]:
        """In the order of their tokens."""
        return [v["version"] for v in self.spans] if self.spans is not None else [v for v, _ in self.pieces]


def problems(answer: Answer, length: int, wish: Wish) -> list[tuple[Problem, str]]:
    """What is wrong with the whole of it if it is complete, or with the part that arrived."""
    return [*_wrong(answer, wish), *_mixed(answer, wish), *_mislabelled(answer, length)]


def _wrong(answer: Answer, wish: Wish) -> Iterable[tuple[Problem, str]]:
    """Tokens that the weights they are labelled with do not answer.

    After a bad version's, those of a newer one are anybody's guess, too: the KV cache of the answer is the bad one's
    still. It is computed anew on the way back to an older version, and on any way with the policy `recompute`.
    """
    prompt = (span["version"] for span in answer.prompt_spans or ())
    spoilt = max((version for version in prompt if badness(version)), default=None)
    for version, token in _labelled(answer):
        if badness(version):
            spoilt = version
            continue
        if spoilt is not None and (version < spoilt or wish.policy == "recompute"):
            spoilt = None
        if spoilt is None and token != token_of(version):
            yield "wrong", f"token {token} under version {version}, which answers {token_of(version)}"


def _labelled(answer: Answer) -> Iterable[tuple[int, int]]:
    """(version, token), as far as it is known: of an event with several tokens it is the last one's version."""
    if answer.spans is not None:
        for span in answer.spans:
            for token in answer.tokens[span["start"] : span["end"]]:
                yield span["version"], token
        return
    at = 0
    for version, count in answer.pieces:
        at += count
        yield version, answer.tokens[at - 1]


def _mixed(answer: Answer, wish: Wish) -> Iterable[tuple[Problem, str]]:
    found = set(answer.versions)
    if wish.of_one_version:
        found |= {span["version"] for span in answer.prompt_spans or ()}
        found |= {wish.version} if wish.version is not None else set()
        if len(found) > 1:
            yield "mixed", f"versions {sorted(found)} in an answer to a request with {wish}"
    elif wish.min_version is not None and found and min(found) < wish.min_version:
        yield "mixed", f"version {min(found)} in an answer to a request with {wish}"


def _mislabelled(answer: Answer, length: int) -> Iterable[tuple[Problem, str]]:
    """A complete answer is as long as it was asked to be, and its spans cover it."""
    if answer.spans is None:
        return
    edges = [0, *(span["end"] for span in answer.spans)]
    contiguous = all(edge == span["start"] for edge, span in zip(edges, answer.spans, strict=False))
    if len(answer.tokens) != length or edges[-1] != length or not contiguous:
        yield "mislabelled", f"{len(answer.tokens)} tokens of {length}, labelled {answer.spans}"
