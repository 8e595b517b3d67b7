"""The verifier of a reasoning-gym task: partial credit where the task gives it."""

from __future__ import annotations

import re
from typing import Any

from trainer.data.gym import KEY, maker, package, problem_of


class GymAnswer:
    """The score of the task's own verifier for the answer, 0 to 1. In a worker: a verifier may take for ever."""

    def __init__(self, *, tag: str) -> None:
        """Raises ConfigError when the package is missing. Its import takes long, and is no answer's fault."""
        package()
        self._tag = re.compile(f"<{tag}>(.*?)</{tag}>", re.DOTALL) if tag else None

    def __call__(self, _prompt: str, answer: str, _expected: str, extra: dict[str, Any]) -> float:
        place = extra.get(KEY)
        if place is None:
            raise ValueError("the record is of no reasoning-gym task. Set data.kind to reasoning_gym")
        entry = problem_of(place, place)
        return float(maker(place, place["seed"], place["number"]).score_answer(self._in(answer), entry))

    def _in(self, answer: str) -> str | None:
        if self._tag is None:
            return answer.strip()
        found = self._tag.findall(answer)
        return found[-1].strip() if found else None
