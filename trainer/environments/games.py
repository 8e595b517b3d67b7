"""Games of several turns that need nothing but this file: to try a run with, and as examples of an environment.

`environment: {kind: callable, target: trainer.environments.games:GuessNumber, options: {highest: 50}}`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainer.environments.base import Environment, Message, Observation, Task


class GuessNumber(Environment):
    """Guess the record's answer, a number from 1 to `highest`. Each guess is told whether it is too low or too high.
    The right one is worth 1 and ends the game; every guess before it costs `cost`, and so does an answer without one.
    """

    def __init__(self, highest: int = 100, cost: float = 0.05) -> None:
        self.highest, self.cost = highest, cost

    def reset(self, task: Task) -> Observation:
        self.number = int(task.answer)
        if not 1 <= self.number <= self.highest:
            raise ValueError(f"the record's answer is {self.number}: outside of 1 to {self.highest}")
        return Observation([_user(f"Guess my number, 1 to {self.highest}.")])

    def step(self, answer: str) -> Observation:
        guess = re.search(r"\d+", answer)
        if guess is None:
            return Observation([_user("Write a number.")], reward=-self.cost)
        if int(guess[0]) == self.number:
            return Observation(reward=1.0, done=True)
        hint = "Too low." if int(guess[0]) < self.number else "Too high."
        return Observation([_user(hint)], reward=-self.cost)


PLACES: Mapping[str, Mapping[str, str]] = {
    "hall": {"north": "library", "east": "kitchen"},
    "library": {"south": "hall", "up": "attic"},
    "kitchen": {"west": "hall", "down": "cellar"},
    "attic": {"down": "library"},
    "cellar": {"up": "kitchen"},
}


class FindKey(Environment):
    """A text game: walk through a house (`go north`), take the key where the record's answer says it lies (`take key`),
    and bring it to the hall (`open door`). A command that gets the player on for the first time is worth a third:
    taking the key, coming back to the hall with it, opening the door. `places` replaces the house.
    """

    def __init__(self, places: Mapping[str, Mapping[str, str]] = PLACES, start: str = "hall") -> None:
        self.places, self.start = places, start

    def reset(self, task: Task) -> Observation:
        self.key_at: str | None = task.answer.strip()
        if self.key_at not in self.places:
            raise ValueError(f"the record's answer is {self.key_at!r}: none of {', '.join(self.places)}")
        self.here, self.brought = self.start, False
        rules = "Find the key and open the door of the hall. Commands: go DIRECTION, take key, open door."
        return Observation([_user(f"{rules}\n{self._seen()}")])

    def step(self, answer: str) -> Observation:
        verb, _, noun = answer.strip().lower().partition(" ")
        if verb == "go" and noun in self.places[self.here]:
            self.here = self.places[self.here][noun]
            return Observation([_user(self._seen())], reward=self._brings())
        if (verb, noun) == ("take", "key") and self.key_at == self.here:
            self.key_at = None
            return Observation([_user("You have the key.")], reward=1 / 3 + self._brings())
        if (verb, noun) == ("open", "door") and self.here == self.start and self.key_at is None:
            return Observation(reward=1 / 3, done=True)
        return Observation([_user(f"That does not work. {self._seen()}")])

    def _brings(self) -> float:
        if self.brought or self.key_at is not None or self.here != self.start:
            return 0.0
        self.brought = True
        return 1 / 3

    def _seen(self) -> str:
        key = " A key lies here." if self.key_at == self.here else ""
        return f"You are in the {self.here}.{key} You can go {', '.join(self.places[self.here])}."


def _user(text: str) -> Message:
    message: dict[str, Any] = {"role": "user", "content": text}
    return message
