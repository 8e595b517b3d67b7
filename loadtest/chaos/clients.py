"""The load: clients that ask one question after the other, and repeat each until it is answered.

`python -m loadtest.chaos.clients MODEL SEED CLIENTS FILE URL...` asks until a line comes on standard input. Every
attempt becomes a line of FILE. A client whose connection breaks goes on at the next gateway, as behind a load balancer.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import dataclass, field, replace
from typing import BinaryIO

import httpx

from loadtest.chaos.answers import Wish
from loadtest.chaos.attempts import Attempt, Question, attempt, drawn

TIMEOUT = httpx.Timeout(45.0, connect=3.0)  # longer than a gateway lets an instance be silent
THINK_S = (0.05, 0.4)
LONGEST_PAUSE_S = 2.0


@dataclass
class Client:
    """One at a time. `urls` are the gateways, one on each host."""

    urls: list[str]
    model: str
    chance: random.Random
    file: BinaryIO
    at: int
    newest: int | None = None
    connections: dict[int, httpx.AsyncClient] = field(default_factory=dict)

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._until_answered(drawn(self.chance, self.newest), stop)
            await asyncio.sleep(self.chance.uniform(*THINK_S))
        for http in self.connections.values():
            await http.aclose()

    async def _until_answered(self, question: Question, stop: asyncio.Event) -> None:
        asked = time.monotonic()
        while True:
            made = await attempt(self._http(), self.at, self.model, question, asked)
            self.file.write(made.line())
            self.newest = made.version if made.version is not None else self.newest
            if made.outcome == "answered" or stop.is_set():
                return
            question = self._next(question, made)
            await asyncio.sleep(min(LONGEST_PAUSE_S, made.retry_after or 0.2))

    def _next(self, question: Question, made: Attempt) -> Question:
        """The same question; what was bound to a version that may be gone for ever is bound to none."""
        if made.outcome == "cut":
            self.at = (self.at + 1) % len(self.urls)
        gone = made.code in ("version_unavailable", "version_wait_timeout")
        return replace(question, wish=Wish(question.wish.policy)) if gone else question

    def _http(self) -> httpx.AsyncClient:
        if self.at not in self.connections:
            self.connections[self.at] = httpx.AsyncClient(base_url=self.urls[self.at], timeout=TIMEOUT)
        return self.connections[self.at]


async def main(model: str, seed: int, count: int, path: str, urls: list[str]) -> None:
    stop = asyncio.Event()
    with open(path, "wb", buffering=0) as file:  # noqa: ASYNC230 - a line at a time, into the page cache
        clients = [Client(urls, model, random.Random(f"{seed} {n}"), file, n % len(urls)) for n in range(count)]
        tasks = [asyncio.create_task(client.run(stop)) for client in clients]
        await asyncio.to_thread(sys.stdin.readline)
        stop.set()
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]))
