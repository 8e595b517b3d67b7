"""Clients that ask a server again and again while something is done to it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Self

import httpx

BODY = {"temperature": 0, "ignore_eos": True, "stream": False}


class Asking(ABC):
    """As long as the context is open, `count` clients ask `route`. `failures` has what was no answer."""

    route = "/generate"

    def __init__(self, url: str, count: int) -> None:
        self.url = url
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]

    @abstractmethod
    def question(self, client: int) -> dict[str, Any]:
        """The prompt and what else the body has over BODY."""

    @abstractmethod
    def take(self, client: int, choice: dict[str, Any]) -> None:
        """An answer to it."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _ask(self, client: int) -> None:
        with httpx.Client(base_url=self.url, timeout=120) as http:
            while not self._stop.is_set():
                try:
                    answer = http.post(self.route, json=BODY | self.question(client))
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    continue
                if answer.status_code != 200:
                    self.failures.append(answer.text)
                    continue
                (choice,) = answer.json()["choices"]
                self.take(client, choice)


class Labelled(Asking):
    """Three clients; what came back, `labelled` as (version, token), and how many answers each version began."""

    def __init__(self, url: str, count: int = 3, tokens: int = 12) -> None:
        super().__init__(url, count)
        self.tokens = tokens
        self.labelled: set[tuple[int, int]] = set()
        self.answers: Counter[int] = Counter()

    def question(self, client: int) -> dict[str, Any]:
        return {"prompt_token_ids": [client + 3, 7, 9], "max_tokens": self.tokens}

    def take(self, client: int, choice: dict[str, Any]) -> None:
        spans = choice["weight_versions"]
        for span in spans:
            self.labelled |= {(span["version"], t) for t in choice["token_ids"][span["start"] : span["end"]]}
        self.answers[spans[0]["version"]] += 1
