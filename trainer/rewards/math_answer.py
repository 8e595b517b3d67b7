"""Mathematical answers compared by meaning, with math-verify (https://github.com/huggingface/Math-Verify)."""

from __future__ import annotations

from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify


class MathAnswer:
    """1 when the answer's last result means the same as the expected one. The expected text may be plain (`1/2`) or
    LaTeX (`$\\frac{1}{2}$`, `\\boxed{...}`). Runs in a worker: an expression can be too much for any solver."""

    def __init__(self, *, boxed_only: bool, precision: int) -> None:
        self._boxed_only, self._precision = boxed_only, precision

    def __call__(self, _prompt: str, answer: str, expected: str, _extra: dict[str, Any]) -> float:
        if self._boxed_only and "\\boxed" not in answer:
            return 0.0
        gold = self._parse(expected) or self._parse(f"${expected}$")
        if not gold:
            raise ValueError(f"the expected answer {expected!r} is no mathematical expression")
        return float(verify(gold, self._parse(answer), float_rounding=self._precision, timeout_seconds=None))

    def _parse(self, text: str) -> Any:
        configs = [LatexExtractionConfig(boxed_match_priority=0)]
        if not self._boxed_only:
            configs.append(ExprExtractionConfig())
        # The worker has a deadline of its own; math-verify's would need signals.
        return parse(text, configs, parsing_timeout=None)
