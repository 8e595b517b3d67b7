"""The file of `--probes`: what a canary is asked before a rolling swap is committed.

A list in YAML (.yaml, .yml), or one JSON object a line (.jsonl). Each entry:

    prompt            text, or a list of token ids
    max_tokens        1 to 1024, default 8; the answer is greedy
    name              for messages; default "#1", "#2", ...
    expect            text that the answer must contain, or {regex: PATTERN} that must be found in it
    min_mean_logprob  what the mean log-probability of the answer's tokens must reach (0 or less)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from server.errors import ConfigError

MAX_TOKENS = 1024
_KEYS = frozenset({"prompt", "max_tokens", "name", "expect", "min_mean_logprob"})


@dataclass(frozen=True)
class ProbePrompt:
    """One question and what its answer must be like."""

    name: str
    prompt: str | tuple[int, ...]
    max_tokens: int = 8
    expect: str | re.Pattern[str] | None = None
    min_mean_logprob: float | None = None

    def objection(self, text: str, logprobs: list[float]) -> str | None:
        """What is wrong with this answer, if anything is."""
        if isinstance(self.expect, re.Pattern) and self.expect.search(text) is None:
            return f"answered {_short(text)}, in which {self.expect.pattern!r} is not found"
        if isinstance(self.expect, str) and self.expect not in text:
            return f"answered {_short(text)}, which does not contain {self.expect!r}"
        mean = sum(logprobs) / len(logprobs)
        if self.min_mean_logprob is not None and mean < self.min_mean_logprob:
            return f"has a mean log-probability of {mean:.3f}, asked for were {self.min_mean_logprob:g} or more"
        return None


DEFAULT_PROMPTS = tuple(
    ProbePrompt(f"default {number}", tokens, max_tokens=4)
    for number, tokens in enumerate(((1,), (1, 2, 3), (5, 4, 3, 2)), 1)
)


def load_probes(path: Path | None) -> tuple[ProbePrompt, ...]:
    """The prompts of the file, or the default ones. Raises ConfigError, which names the entry."""
    if path is None:
        return DEFAULT_PROMPTS
    entries = _entries(path)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"--probes {path}: must hold a list of at least one probe.")
    prompts = tuple(_prompt(f"--probes {path}, entry {n}", n, entry) for n, entry in enumerate(entries, 1))
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise ConfigError(f"--probes {path}: two probes have the same name; a failure could not be told apart.")
    return prompts


def _entries(path: Path) -> Any:
    try:
        text = path.read_text()
        if path.suffix in (".yaml", ".yml"):
            return yaml.safe_load(text)
        if path.suffix == ".jsonl":
            return [orjson.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, orjson.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"--probes {path}: cannot be read: {error}.") from error
    raise ConfigError(f"--probes {path}: must end in .yaml, .yml or .jsonl.")


def _prompt(where: str, number: int, entry: Any) -> ProbePrompt:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be an object with `prompt`.")
    if unknown := sorted(str(key) for key in entry.keys() - _KEYS):
        raise ConfigError(f"{where}: {unknown[0]!r} is not known; there are {', '.join(sorted(_KEYS))}.")
    prompt, tokens = entry.get("prompt"), entry.get("max_tokens", 8)
    if isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple) or not prompt:
        raise ConfigError(f"{where}: `prompt` must be text or a list of token ids, and not empty.")
    if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
        raise ConfigError(f"{where}: `max_tokens` must be between 1 and {MAX_TOKENS}.")
    name, least = entry.get("name", f"#{number}"), entry.get("min_mean_logprob")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: `name` must be text.")
    if least is not None and (type(least) not in (int, float) or not least <= 0):
        raise ConfigError(f"{where}: `min_mean_logprob` must be a number, 0 or less.")
    return ProbePrompt(name, prompt, tokens, _expectation(where, entry.get("expect")), least)


def _expectation(where: str, expect: Any) -> str | re.Pattern[str] | None:
    match expect:
        case None:
            return None
        case str() if expect:
            return expect
        case {"regex": str(pattern), **rest} if not rest:
            try:
                return re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"{where}: `expect.regex` is not a regular expression: {error}.") from error
    raise ConfigError(f"{where}: `expect` must be text, or an object with `regex`.")


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
