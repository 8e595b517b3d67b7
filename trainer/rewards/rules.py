"""Rules: text in, number out."""

from __future__ import annotations

import re
from typing import Any

from trainer.config import FormatReward
from trainer.errors import ConfigError, RewardError
from trainer.rewards.scorer import Reward, RewardRequest


def known(expected: str) -> str:
    """A record's answer. Raises RewardError if it has none: what is compared with nothing would be wrong in silence."""
    if not expected.strip():
        raise RewardError("the record has no answer. Name its column in data.answer_key, or give the reward a `where`.")
    return expected


class ExactMatch(Reward):
    """1 when the answer is the expected text, surrounding white space aside."""

    compares = True

    async def __call__(self, request: RewardRequest, /) -> float:
        return float(request.answer.strip() == known(request.expected).strip())


class Format(Reward):
    """1 when the answer is the tags in order, each once, with something in each. Linear in the answer's length. The
    first tag may be opened by the prompt, as templates of thinking models do."""

    def __init__(self, config: FormatReward) -> None:
        self._tags = config.tags

    async def __call__(self, request: RewardRequest, /) -> float:
        rest = request.answer.strip()
        opened = f"<{self._tags[0]}>"
        if request.prompt.rstrip().endswith(opened) and not rest.startswith(opened):
            rest = opened + rest
        for tag in self._tags:
            inside, after = self._element(rest, tag)
            if not inside.strip() or any(f"<{t}>" in inside or f"</{t}>" in inside for t in self._tags):
                return 0.0
            rest = after.strip()
        return float(not rest)

    @staticmethod
    def _element(text: str, tag: str) -> tuple[str, str]:
        if not text.startswith(f"<{tag}>"):
            return "", ""
        inside, found, after = text[len(tag) + 2 :].partition(f"</{tag}>")
        return (inside, after) if found else ("", "")


class Regex:
    """1 when the pattern is found; if it has a group named `answer`, 1 when that group equals the expected text. In a
    worker, as an expression may take for ever."""

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError("rewards.pattern", f"{pattern!r}: {error}", "Correct the expression") from None

    def __call__(self, _prompt: str, answer: str, expected: str, _extra: dict[str, Any]) -> float:
        match = self._pattern.search(answer)
        if match is None:
            return 0.0
        return float("answer" not in match.groupdict() or (match["answer"] or "").strip() == known(expected).strip())


# The text says itself which part of it is mathematics. "$18 and $20" does not.
_MARKED = re.compile(r"\\boxed|\\\(|\\\[|(?<!\\)\$[^$]+\$(?!\d)|\$\$")
# A gold in words ("18 dollars"), and words behind a number in a box. The name of a function is no word.
_NAMED = r"(?!(?:arc)?(?:sin|cos|tan|log|exp|sqrt)(?![A-Za-z]))[A-Za-z]{3,}"
_WORD = re.compile(rf"(?<![A-Za-z\d]){_NAMED}")
_UNIT = re.compile(rf"(?<=\\boxed\{{)([^A-Za-z{{}}]*\d) +({_NAMED}(?: +[A-Za-z]+)*)(?=\}})")
# Stands before the result of an answer that marks no part.
_LEAD = re.compile(r"####|<answer>|\banswer(?: is|\W{0,4}:)", re.IGNORECASE)
_COMMAND = re.compile(r"\\[A-Za-z]+(?:\{[A-Za-z() ]*\})?")
_TH = r"(?:st|nd|rd|th)\}"
_ORDINAL = re.compile(rf"(?<=\d)\^(?:\{{(\\text|\\mathrm)?\{{?{_TH}(?(1)\}})|(?:\\text|\\mathrm)\{{{_TH})")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_MIXED = re.compile(r"(?<![\d.,/])(\d{1,9}) +([1-9]\d{0,8})/([1-9]\d{0,8})(?![\d/])")


class MathAnswer:
    """1 when the answer's last result means the same as the expected one. math-verify
    (https://github.com/huggingface/Math-Verify) compares them by meaning, in a worker: an expression can be too much
    for any solver. `boxed_only` concerns answers alone. Of an answer with thoughts, which `</think>` ends, only what
    stands behind them counts: a guess in a box is no result.

    Of an expected text with `####`, only the part behind it counts. One with `$...$`, `\\(`, `\\[` or `\\boxed` is read
    as an answer is. Any other is one expression, as if it were in a box. If it has words ("18 dollars"), or no meaning
    as LaTeX, its number counts too, but only a sole number: one of several is not the expected answer."""

    def __init__(self, *, boxed_only: bool, precision: int) -> None:
        import math_verify

        self._math, self._boxed_only, self._precision = math_verify, boxed_only, precision
        self._latex = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
        self._any = [*self._latex, math_verify.ExprExtractionConfig()]

    def __call__(self, _prompt: str, answer: str, expected: str, _extra: dict[str, Any]) -> float:
        answer = answer.rpartition("</think>")[2]
        if self._boxed_only and "\\boxed" not in answer:
            return 0.0
        gold = self._gold(_plain(expected.rpartition("####")[2].strip()))
        if not gold:
            raise ValueError(f"the expected answer {expected!r} is not one expression. Write one number, or LaTeX")
        found = self._found(_plain(answer))
        return float(self._math.verify(gold, found, float_rounding=self._precision, timeout_seconds=None))

    def _found(self, text: str) -> list[Any]:
        """The result of an answer. If no part is marked, its end may be an expression: (3/2, 13) is not 13."""
        if _MARKED.search(text):
            return self._parse(text, self._latex if self._boxed_only else self._any)
        end = _LEAD.split(text.strip().removesuffix("</answer>"))[-1].strip(" \n*:").rstrip(". *")
        told = "\n" in end or len(end) > 200 or (re.search(r"\d", end) and _WORD.search(_COMMAND.sub("", end)))
        boxed = [] if told else self._parse(f"\\boxed{{{end}}}", self._latex)
        number = self._parse(text, self._any)
        if not boxed or _digits(boxed[-1]) != _digits(end):
            return number
        return boxed + (number if number and ("=" in end or _digits(number[-1]) == _digits(end)) else [])

    def _gold(self, text: str) -> list[Any]:
        """The expected result, in each of its readings."""
        if _MARKED.search(text):
            return self._parse(text, self._any)
        boxed = self._parse(f"\\boxed{{{text}}}", self._latex)
        whole = len(boxed) > 1 and _digits(boxed[-1]) == _digits(text)
        found = boxed if whole else []
        if not whole or ("\\" not in text and _WORD.search(text)):
            number = self._parse(text, self._any)
            found += number if number and _digits(number[-1]) == _digits(text) else []
        return found or (boxed if len(boxed) == 1 else [])

    def _parse(self, text: str, configs: list[Any]) -> list[Any]:
        """The last result in `text`, as an expression and as text; as text alone if it has no meaning; or nothing."""
        # The worker has a deadline of its own; math-verify's would need signals.
        return list(self._math.parse(text, configs, parsing_timeout=None))


def _plain(text: str) -> str:
    """In the form that math-verify reads: 1 1/2 as 3/2 (it adds 1 and 1), 12^{th} as 12, words behind a number in a box
    as \\text, pi as \\pi."""
    text = _PI.sub(r"\\pi ", _ORDINAL.sub("", text)).replace("−", "-")
    text = _UNIT.sub(r"\1\\text{ \2}", text)
    return _MIXED.sub(lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}" if int(m[2]) < int(m[3]) else m[0], text)


def _digits(text: str) -> str:
    """All digits of a result, and signs that math-verify cannot read; no leading zeros, nor the exponent of a unit."""
    return re.sub(r"(?<=\})\^\{?\d\}?$|[^0-9√∞]", "", text).lstrip("0")
