"""Rules: text in, number out."""

from __future__ import annotations

import re
from typing import Any

from trainer.config import FormatReward
from trainer.errors import ConfigError
from trainer.rewards.scorer import Reward, RewardRequest


class ExactMatch(Reward):
    """1 when the answer is the expected text, surrounding white space aside."""

    async def __call__(self, request: RewardRequest, /) -> float:
        return float(request.answer.strip() == request.expected.strip())


class Format(Reward):
    """1 when the answer is the tags in order, each once, with something in each. Linear in the answer's length."""

    def __init__(self, config: FormatReward) -> None:
        self._tags = config.tags

    async def __call__(self, request: RewardRequest, /) -> float:
        rest = request.answer.strip()
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
        return float("answer" not in match.groupdict() or (match["answer"] or "").strip() == expected.strip())


class MathAnswer:
    """1 when the answer's last result means the same as the expected one. The expected text may be plain (`1/2`) or
    LaTeX (`$\\frac{1}{2}$`, `\\boxed{...}`). math-verify (https://github.com/huggingface/Math-Verify) compares them by
    meaning, in a worker: an expression can be too much for any solver."""

    def __init__(self, *, boxed_only: bool, precision: int) -> None:
        import math_verify

        self._math, self._boxed_only, self._precision = math_verify, boxed_only, precision

    def __call__(self, _prompt: str, answer: str, expected: str, _extra: dict[str, Any]) -> float:
        if self._boxed_only and "\\boxed" not in answer:
            return 0.0
        gold = self._parse(expected) or self._parse(f"${expected}$")
        if not gold:
            raise ValueError(f"the expected answer {expected!r} is no mathematical expression")
        return float(self._math.verify(gold, self._parse(answer), float_rounding=self._precision, timeout_seconds=None))

    def _parse(self, text: str) -> Any:
        configs = [self._math.LatexExtractionConfig(boxed_match_priority=0)]
        if not self._boxed_only:
            configs.append(self._math.ExprExtractionConfig())
        # The worker has a deadline of its own; math-verify's would need signals.
        return self._math.parse(text, configs, parsing_timeout=None)
