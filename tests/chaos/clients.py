"""Clients of a fleet under fault: they stream without end, and every token they get is kept with its version."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from tests.waiting import comes_true

TOKENS = 120


@dataclass
class Seen:
    """What the clients got: (version, token) pairs, whole answers, and every fault by its code."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    answers: int = 0
    faults: list[str] = field(default_factory=list)

    def wrong(self, version_of: dict[int, int]) -> list[tuple[int, int]]:
        """Tokens that the weights of their version do not answer; `version_of` says which checkpoint each was."""
        return [(v, t) for v, t in self.tokens if v in version_of and t != 100 + version_of[v]]


class Clients:
    """Threads that ask the public port until told to stop. Retryable faults are noted and the question asked again."""

    def __init__(self, urls: list[str], count: int = 4, tokens: int = TOKENS) -> None:
        self.seen, self._tokens = Seen(), tokens
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(urls[i % len(urls)],), daemon=True) for i in range(count)
        ]

    @contextlib.contextmanager
    def streaming(self) -> Iterator[Seen]:
        for thread in self._threads:
            thread.start()
        try:
            self._wait_for_load(60)
            yield self.seen
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(60)

    def _wait_for_load(self, seconds: float) -> None:
        """What the caller breaks next, it breaks under load: every client has had an answer's beginning or a fault."""
        comes_true(lambda: len(self.seen.tokens) + len(self.seen.faults) >= len(self._threads), seconds)

    def _run(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=httpx.Timeout(60, connect=5)) as http:
            while not self._stop.is_set():
                try:
                    self._ask(http)
                except httpx.HTTPError as error:
                    self.seen.faults.append(type(error).__name__)
                    self._stop.wait(0.1)

    def _ask(self, http: httpx.Client) -> None:
        body = {"prompt_token_ids": [5, 6, 7], "max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        got = 0
        with http.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != 200:
                self.seen.faults.append(str(orjson.loads(answer.read())["error"]["code"]))
                self._stop.wait(0.1)
                return
            event = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    got += self._take(event, orjson.loads(line.removeprefix("data: ")))
        self.seen.answers += got == self._tokens

    def _take(self, event: str, data: dict[str, Any]) -> int:
        if event == "error":
            self.seen.faults.append(str(data["error"]["code"]))
        if event != "token":
            return 0
        if len(data["token_ids"]) == 1:  # more in one event may come from two versions
            self.seen.tokens.append((data["weight_version"], data["token_ids"][0]))
        return len(data["token_ids"])
