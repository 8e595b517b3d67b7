"""Rule-based rewards: text in, number out."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from trainer.config import CallableReward, RegexReward
from trainer.errors import ConfigError


def exact_match(_prompt: str, answer: str, expected: str) -> float:
    """1 when the answer is the expected text, surrounding white space aside."""
    return float(answer.strip() == expected.strip())


class Regex:
    """1 when the pattern is found; if it has a group named `answer`, 1 when that group equals the expected text."""

    def __init__(self, config: RegexReward) -> None:
        try:
            self._pattern = re.compile(config.pattern)
        except re.error as error:
            raise ConfigError("rewards.pattern", f"{config.pattern!r}: {error}", "Correct the expression") from None

    def __call__(self, _prompt: str, answer: str, expected: str) -> float:
        match = self._pattern.search(answer)
        if match is None:
            return 0.0
        return float("answer" not in match.groupdict() or (match["answer"] or "").strip() == expected.strip())


class UserFunction:
    """A user's function of (prompt, answer, expected), sync or async. Sync ones run in a thread, as they may block."""

    def __init__(self, config: CallableReward) -> None:
        self._function = _import(config.target)

    async def __call__(self, prompt: str, answer: str, expected: str) -> float:
        if inspect.iscoroutinefunction(self._function):
            return float(await self._function(prompt, answer, expected))
        return float(await asyncio.to_thread(self._function, prompt, answer, expected))


def _import(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError("rewards.target", f"cannot import {target} ({error})", "Put it on PYTHONPATH") from None
    return function
