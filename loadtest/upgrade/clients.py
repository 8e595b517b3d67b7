"""Clients behind one address, as a service of Kubernetes gives it."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp.abc import AbstractResolver, ResolveResult

from loadtest.workload.checker import Tally, check

PERIOD_S, TIMEOUT_S, FAILURES = 3.0, 3.0, 2  # the gateway's readinessProbe (k8s/hotswap/templates/gateway.yaml)
SPREAD_S = 1.0  # until every node has heard of a change
NAME = "gateway"  # what clients connect to


@dataclass
class Endpoint:
    """One gateway, as the kubelet sees it."""

    port: int
    ready: bool = False
    failures: int = 0

    def probed(self, well: bool) -> None:
        """One success makes it ready, FAILURES in a row make it unready."""
        self.failures = 0 if well else self.failures + 1
        if well or self.failures >= FAILURES:
            self.ready = well


class Service(AbstractResolver):
    """Resolves NAME to one of those that are ready, another one each time. `connections` counts how often it did."""

    def __init__(self) -> None:
        self._shown: dict[str, int] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._chosen = random.Random(0)
        self.connections = 0

    @property
    def has_ready(self) -> bool:
        return bool(self._shown)

    def add(self, name: str, port: int) -> None:
        """A gateway was started: it gets connections once it is ready."""
        self._probes[name] = asyncio.create_task(self._follow(name, Endpoint(port)))

    def remove(self, name: str) -> None:
        """Its process has ended."""
        self._probes.pop(name).cancel()
        self.show(name, None)

    def show(self, name: str, port: int | None) -> None:
        """From now on connections go there, or (None) not there any more."""
        if port is None:
            self._shown.pop(name, None)
        else:
            self._shown[name] = port

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises OSError where no gateway is ready."""
        if not self._shown:
            raise OSError("no gateway is ready")
        self.connections += 1
        chosen = self._chosen.choice(list(self._shown.values()))
        return [
            ResolveResult(
                hostname=host,
                host="127.0.0.1",
                port=chosen,
                family=socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
        ]

    async def close(self) -> None:
        """Sessions close their resolver; this one is shared, and ends with the process."""

    async def _follow(self, name: str, endpoint: Endpoint) -> None:
        loop, timeout = asyncio.get_running_loop(), aiohttp.ClientTimeout(TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while True:
                before = endpoint.ready
                endpoint.probed(await _well(session, endpoint.port))
                if endpoint.ready != before:
                    loop.call_later(SPREAD_S, self.show, name, endpoint.port if endpoint.ready else None)
                await asyncio.sleep(PERIOD_S)


async def _well(session: aiohttp.ClientSession, port: int) -> bool:
    try:
        async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


MODEL = "upgrade"
ANSWER_S = 120.0
AFTER_FAILURE_S = 0.2


@dataclass(frozen=True)
class Kind:
    """Requests of one client, for `least` to `most` tokens. The client waits up to `pause_s` between two."""

    path: str
    least: int
    most: int
    stream: bool = False
    pause_s: float = 0.0


KINDS = {
    "stream": Kind("/v1/completions", 16, 128, stream=True),
    "long": Kind("/generate", 1200, 1800, stream=True),  # outlasts what a gateway or an instance waits before it stops
    "whole": Kind("/generate", 8, 64),
    "seldom": Kind("/v1/completions", 8, 32, pause_s=8.0),  # its connection is idle most of the time
}


class Failed(Exception):
    """A request that did not come to its end."""


@dataclass
class Answer:
    """One answer so far: its tokens, the spans of the versions that wrote them, and where another instance went on."""

    tokens: list[int] = field(default_factory=list)
    spans: list[dict[str, int]] = field(default_factory=list)
    resumed_at: list[int] = field(default_factory=list)
    over: bool = False

    def line(self, line: bytes) -> bool:
        """Take a line of a stream; whether it brought tokens. Raises Failed."""
        data = line.removeprefix(b"data: ").strip()
        if not line.startswith(b"data: "):
            return False
        if data == b"[DONE]":
            self.over = True
            return False
        return self.event(orjson.loads(data))

    def event(self, payload: dict[str, Any]) -> bool:
        """Take an event, or a whole answer, of either route; whether it brought tokens. Raises Failed."""
        if payload.get("error") is not None:
            raise Failed(payload["error"].get("code") or payload["error"])
        for part in payload.get("choices", [payload]):
            new = part.get("token_ids") or []
            self.tokens += new
            self.spans = part.get("weight_versions") or self.spans  # the last ones cover all
            self.resumed_at = part.get("resumed_at") or self.resumed_at
        self.over = self.over or ("choices" in payload and "object" not in payload)  # /generate's last event
        return "choices" not in payload or any(part.get("token_ids") for part in payload["choices"])


@dataclass
class Seen:
    """Results of all clients. `arrivals`: monotonic seconds of events with tokens, None before each answer's first."""

    tally: Tally = field(default_factory=Tally)
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    failures: list[tuple[float, str, str]] = field(default_factory=list)
    resumed: int = 0
    versions: set[int] = field(default_factory=set)
    arrivals: list[list[float | None]] = field(default_factory=list)
    connections: int = 0

    def failed(self, kind: str, error: BaseException) -> None:
        self.failures.append((time.monotonic(), kind, repr(error)))
        self.tally.note("failed", f"{kind}: {error!r}")


class Client:
    """Asks one kind of request again and again."""

    def __init__(self, name: str, number: int, seen: Seen, first: int, checkpoints: int) -> None:
        self._name, self._kind, self._seen, self._expected = name, KINDS[name], seen, (first, checkpoints)
        self._random = random.Random(f"{name} {number}")
        self.answered = asyncio.Event()
        self._arrivals: list[float | None] = []
        seen.arrivals.append(self._arrivals)

    async def run(self, service: Service, stop: asyncio.Event) -> None:
        """Until it is told to stop; the last request is waited for."""
        connector = aiohttp.TCPConnector(resolver=service, use_dns_cache=False, keepalive_timeout=3600, limit=0)
        timeout = aiohttp.ClientTimeout(ANSWER_S)
        async with aiohttp.ClientSession(f"http://{NAME}", connector=connector, timeout=timeout) as session:
            while not stop.is_set():
                self._seen.requests[self._name] += 1
                try:
                    await self._ask(session)
                except (aiohttp.ClientError, OSError, TimeoutError, Failed, ValueError) as error:
                    self._seen.failed(self._name, error)
                    await asyncio.sleep(AFTER_FAILURE_S)
                self.answered.set()
                await asyncio.sleep(self._random.uniform(0.0, self._kind.pause_s))

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        """Raises Failed, aiohttp.ClientError, OSError, TimeoutError."""
        kind, length = self._kind, self._random.randint(self._kind.least, self._kind.most)
        prompt = [self._random.randint(3, 90) for _ in range(8)]
        body: dict[str, Any] = {"max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": kind.stream}
        if kind.path == "/generate":
            body["prompt_token_ids"] = prompt
        else:
            body |= {"model": MODEL, "prompt": prompt, "return_token_ids": True}
        answer = Answer()
        async with session.post(kind.path, json=body) as response:
            if response.status != 200:
                raise Failed(f"{response.status} {(await response.read())[:300]!r}")
            await self._read(response, answer)
        choice = {"token_ids": answer.tokens, "weight_versions": answer.spans}
        check(choice, length, self._seen.tally, self._seen.versions, *self._expected)
        self._seen.resumed += bool(answer.resumed_at)

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        """Raises Failed."""
        if not self._kind.stream:
            answer.event(orjson.loads(await response.read()))
            return
        self._arrivals.append(None)
        async for line in response.content:
            if answer.line(line):
                self._arrivals.append(time.monotonic())
                self.answered.set()
        if not answer.over:
            raise Failed(f"the stream ended after {len(answer.tokens)} tokens")


async def main(first: int, checkpoints: int, counts: dict[str, int]) -> None:
    service, seen, stop = Service(), Seen(), asyncio.Event()
    told = asyncio.create_task(_follow_orders(service, stop))
    while not service.has_ready:  # noqa: ASYNC110 - a benchmark's start
        await asyncio.sleep(0.05)
    clients = [Client(name, n, seen, first, checkpoints) for name, count in counts.items() for n in range(count)]
    tasks = [asyncio.create_task(client.run(service, stop)) for client in clients]
    for client in clients:
        await client.answered.wait()
    print("running", flush=True)
    await asyncio.gather(told, *tasks)
    seen.tally.versions, seen.connections = len(seen.versions), service.connections
    print(orjson.dumps(asdict(seen) | {"versions": sorted(seen.versions)}).decode(), flush=True)


async def _follow_orders(service: Service, stop: asyncio.Event) -> None:
    while (words := (await asyncio.to_thread(sys.stdin.readline)).split()) and words[0] != "stop":
        if words[0] == "add":
            service.add(words[1], int(words[2]))
        else:
            service.remove(words[1])
    stop.set()


if __name__ == "__main__":
    pairs = (word.split("=") for word in sys.argv[3:])
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), {name: int(count) for name, count in pairs}))
