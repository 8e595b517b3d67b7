"""Open-loop load, a process of its own: requests come when they come, whatever became of those before.

`python -m loadtest.serving.arrivals` reads a `Plan` as JSON and prints a list of `Seen` as JSON. Arrivals of each
stream are a Poisson process; or, with `clients`, so many ask one after the other. Times are seconds on the monotonic
clock.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from random import Random
from urllib.parse import urlsplit

import msgspec
import orjson
import uvloop

from loadtest.serving.prompts import Prompts

CUT = -1  # the status of a request that was not over when the time was


@dataclass(frozen=True)
class Stream:
    """Requests of one kind. `rate`: per second, on average."""

    name: str
    rate: float
    headers: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """`seconds` of arrivals; what is not over `grace_s` later is cut."""

    url: str
    model: str
    seconds: float
    grace_s: float
    seed: int
    streams: list[Stream]
    clients: int = 0


@dataclass
class Seen:
    """The outcome of one request. `first`: seconds to the first token; `gap`: mean seconds between tokens."""

    name: str
    at: float
    status: int = CUT
    first: float | None = None
    gap: float | None = None
    tokens: int = 0  # of a complete answer
    seconds: float | None = None


class Load:
    """Carries out one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        url = urlsplit(plan.url)
        self._host, self._port = url.hostname or "", url.port or 80
        self.seen: list[Seen] = []

    async def run(self) -> None:
        """Returns when everything is over or cut."""
        self._end = time.monotonic() + self._plan.seconds
        plan, tasks = self._plan, set[asyncio.Task[None]]()
        for number, stream in enumerate(plan.streams):
            seeds = range(plan.clients) if plan.clients else (0,)
            drive = self._one_by_one if plan.clients else self._open
            tasks |= {asyncio.create_task(drive(stream, f"{plan.seed}-{number}-{i}")) for i in seeds}
        _, late = await asyncio.wait(tasks, timeout=plan.seconds + plan.grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _one_by_one(self, stream: Stream, seed: str) -> None:
        async for body, tokens in self._bodies(seed):
            if time.monotonic() >= self._end:
                return
            await self._ask(stream, body, tokens)

    async def _open(self, stream: Stream, seed: str) -> None:
        random, at = Random(seed), time.monotonic()
        async with asyncio.TaskGroup() as group:
            async for body, tokens in self._bodies(seed):
                at += random.expovariate(stream.rate)
                if at >= self._end:
                    return
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                group.create_task(self._ask(stream, body, tokens))

    async def _bodies(self, seed: str) -> AsyncIterator[tuple[bytes, int]]:
        prompts = Prompts(Random(seed).getrandbits(32))
        while True:
            tokens = prompts.answer_tokens()
            body = {"model": self._plan.model, "prompt": prompts.prompt(), "max_tokens": tokens, "temperature": 0}
            yield orjson.dumps(body | {"stream": True, "ignore_eos": True}), tokens

    async def _ask(self, stream: Stream, body: bytes, tokens: int) -> None:
        seen = Seen(stream.name, time.monotonic())
        self.seen.append(seen)
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            seen.status = 0
            return
        try:
            head = "".join(f"{k}: {v}\r\n" for k, v in stream.headers.items())
            head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n{head}"
            head += f"content-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await self._read(reader, seen, tokens)
        finally:
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, seen: Seen, tokens: int) -> None:
        try:
            status = int((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])
            if status != 200:
                seen.status = status
                return
            tail, last = b"", 0.0
            while not tail.endswith(b"\r\n0\r\n\r\n"):  # the last chunk of HTTP's framing
                data = await reader.read(65536)
                if not data or b'data: {"error"' in data:
                    seen.status = 0  # the stream broke
                    return
                last, tail = time.monotonic(), (tail + data)[-7:]
                seen.first = seen.first or last - seen.at
        except (OSError, asyncio.IncompleteReadError):
            seen.status = 0
            return
        assert seen.first is not None
        seen.status, seen.tokens, seen.seconds = 200, tokens, last - seen.at
        seen.gap = (seen.seconds - seen.first) / (tokens - 1)


def main() -> None:
    load = Load(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan))
    uvloop.run(load.run())
    sys.stdout.buffer.write(orjson.dumps([asdict(seen) for seen in load.seen]))


if __name__ == "__main__":
    main()
