"""An environment's interface: `reset` begins an episode, `step` takes an answer of the model and says what comes next.

    class Guess(Environment):
        def reset(self, task: Task) -> Observation:
            self.number = int(task.answer)
            return Observation([{"role": "user", "content": "Guess my number between 1 and 100."}])

        def step(self, answer: str) -> Observation:
            if answer.strip() == str(self.number):
                return Observation(reward=1.0, done=True)
            return Observation([{"role": "user", "content": "No. Try again."}])

One object plays one episode after the other. Both methods may be coroutine functions; those that are not run on a
thread each. They run in a process of their own (worker.py), which is killed when one takes too long.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CHARACTERS = 64  # of a token, at most: an observation is cut by them first, before it is sent and tokenised
Message = dict[str, Any]
"""A chat message, `{"role": ..., "content": ...}`, as the model's chat template takes it."""


@dataclass(frozen=True)
class Task:
    """The subject of an episode: a record's prompt as text and as messages (one of the user's if it was a text), the
    answer that rewards compare with, and the record's `extra`."""

    prompt: str
    messages: Sequence[Message]
    answer: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """The messages for the model to read. After `reset` they are the prompt; if there are none, the record's own is.
    After a `step` they follow the model's answer, `reward` is the worth of that answer, and `done` ends the episode."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False


class Environment(ABC):
    """Plays episodes. An exception fails the episode, which is played again or left out: nothing is trained on it."""

    @abstractmethod
    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Begin an episode. All episodes of one record must begin with the same messages."""

    @abstractmethod
    def step(self, answer: str) -> Observation | Awaitable[Observation]:
        """Take the model's answer, which is text without special tokens."""

    def close(self) -> Awaitable[None] | None:
        """Free what it holds. It is not used any more."""
        return None


def observation_to_json(value: object, most: int | None = None) -> dict[str, Any]:
    """The JSON of an observation, whose texts are cut after `most` characters. Raises ValueError, which says what is
    wrong, for a value that an environment must not return."""
    if not isinstance(value, Observation):
        raise ValueError(f"it returned {type(value).__name__} instead of an Observation.")
    for message in value.messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ValueError(f"it returned {message!r}, which is no message with a role and a text as content.")
    if not isinstance(value.reward, (int, float)) or not math.isfinite(value.reward):
        raise ValueError(f"it returned the reward {value.reward!r}, which is no finite number.")
    each = most // max(len(value.messages), 1) if most is not None else None
    messages = [{**message, "content": message["content"][:each]} for message in value.messages]
    return {"messages": messages, "reward": float(value.reward), "done": bool(value.done)}
