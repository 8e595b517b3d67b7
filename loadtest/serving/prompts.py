"""Prompts as people write them, made here: several tasks, sentences of many lengths, and beginnings that many share."""

from __future__ import annotations

import random

SYSTEMS = (
    "You are the assistant of a small bank. Answer in plain words, never give out account numbers, and say when a "
    "question needs a person. Amounts are in euros and dates are written day first. Be brief.",
    "You review pull requests. Point out bugs first, then unclear names, then style. Quote the line you mean and "
    "propose the change. If there is nothing to say, say so in one sentence and stop.",
    "You are a travel guide who knows trains better than planes. Give the times you are sure of, name the station, and "
    "warn of short changes. The traveller carries one bag and does not like to run.",
)
_TASKS = ("Summarise this:", "Translate into French:", "What is wrong here?", "Write a reply to:", "List the dates in:")
_SUBJECTS = (
    "the customer",
    "our second release",
    "a train from Basel",
    "the night shift",
    "this function",
    "her letter",
)
_VERBS = ("did not mention", "was moved to", "depends on", "came before", "costs less than", "will be sent with")
_OBJECTS = (
    "the invoice of 3 March",
    "another platform",
    "a missing test",
    "the old contract",
    "forty boxes",
    "the reply",
)
_ENDS = (".", ", as agreed.", " and nobody noticed.", ", which is odd.", " - please check!", "; more tomorrow.")


class Prompts:
    """An endless, repeatable supply. `shared`: how many of them begin with one of SYSTEMS (0..1)."""

    def __init__(self, seed: int, *, shared: float = 0.5, longest: int = 1500) -> None:
        self._random = random.Random(seed)
        self._shared, self._longest = shared, longest

    def prompt(self) -> str:
        """Text; its length is log-normal, about 200 characters at the median, after what is shared."""
        r = self._random
        system = r.choice(SYSTEMS) + "\n\n" if r.random() < self._shared else ""
        wanted = min(self._longest, int(r.lognormvariate(5.3, 0.7)))
        text = r.choice(_TASKS)
        while len(text) < wanted:
            text += f" {r.choice(_SUBJECTS).capitalize()} {r.choice(_VERBS)} {r.choice(_OBJECTS)}{r.choice(_ENDS)}"
        return system + text[: max(wanted, 24)]

    def answer_tokens(self) -> int:
        """How long the answer is to be: log-normal, 32 at the median, 4 to 128."""
        return max(4, min(128, int(self._random.lognormvariate(3.5, 0.6))))
