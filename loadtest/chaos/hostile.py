"""Hostile clients: requests that must be refused, connections that end at any moment, and readers that hardly read.

`python -m loadtest.chaos.hostile VOCABULARY SEED CLIENTS FILE URL...` attacks until a line comes on standard
input. Every attack becomes a line of FILE. Nothing of it may reach other clients: an instance that ends by itself, an
answer that is late or wrong, or an error without a type counts against the promise, whoever provoked it.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Literal
from urllib.parse import urlsplit

import httpx
import orjson

from loadtest.chaos.models import ALIAS, FIRST, SECOND
from loadtest.chaos.verdict import RETRYABLE, Window, overlaps

Kind = Literal["ids", "grammar", "body", "framing", "disconnect", "slow reader"]
KINDS: tuple[Kind, ...] = ("ids", "grammar", "body", "framing", "disconnect", "slow reader")
MODELS = (FIRST, SECOND, ALIAS)
POSTED: tuple[Kind, ...] = ("ids", "grammar", "body")
REFUSED: tuple[Kind, ...] = ("ids", "body")  # a server that can compile a grammar after all may answer it, in time
TIMEOUT = httpx.Timeout(45.0, connect=3.0)
PAUSE_S = (0.2, 1.0)
LEAVES_S = (0.0, 0.4)
READS_S, EVERY_S, SLICE = 6.0, 0.1, 16  # how long a slow reader reads, how often, and how many bytes


@dataclass
class Attack:
    """The outcome of an attack; times are monotonic seconds. `left`: the client went, as it meant to."""

    kind: Kind
    route: str
    gateway: int
    began: float
    ended: float = 0.0
    outcome: Literal["refused", "answered", "untyped", "cut", "left"] = "left"
    status: int = 0
    code: str = ""
    message: str = ""

    def line(self) -> bytes:
        return orjson.dumps(asdict(self)) + b"\n"


def bodies(kind: Kind, model: str, vocabulary: int, chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A route and a body for it, of a kind that is posted whole."""
    return chance.choice(_BODIES[kind])(model, vocabulary, chance)


def _bad_id(vocabulary: int, chance: random.Random) -> int:
    return chance.choice((vocabulary, vocabulary + 1, 2 * vocabulary, 2**31 - 1, 2**31, 2**40, -1, -(2**31)))


def _prompt(vocabulary: int, chance: random.Random) -> list[int]:
    ids = [chance.randrange(3, 90) for _ in range(chance.randrange(1, 20))]
    ids.insert(chance.randrange(len(ids) + 1), _bad_id(vocabulary, chance))
    return ids


def _generate(model: str, vocabulary: int, chance: random.Random) -> tuple[str, dict[str, Any]]:
    return "/generate", {"model": model, "prompt_token_ids": _prompt(vocabulary, chance), "max_tokens": 4}


def _completion(model: str, vocabulary: int, chance: random.Random) -> tuple[str, dict[str, Any]]:
    prompt = _prompt(vocabulary, chance)
    return "/v1/completions", {"model": model, "prompt": chance.choice((prompt, [[5, 6], prompt])), "max_tokens": 4}


def _bias(model: str, vocabulary: int, chance: random.Random) -> tuple[str, dict[str, Any]]:
    bad = _bad_id(vocabulary, chance)
    field: dict[str, Any] = chance.choice(({"logit_bias": {str(bad): 5}}, {"allowed_token_ids": [bad]}))
    return "/v1/completions", {"model": model, "prompt": [5, 6], "max_tokens": 4, **field}


def _grammar(make: Callable[[random.Random], dict[str, Any]]) -> Callable[..., tuple[str, dict[str, Any]]]:
    def drawn(model: str, _: int, chance: random.Random) -> tuple[str, dict[str, Any]]:
        body = {"model": model, "max_tokens": 4, "structured_outputs": make(chance)}
        if chance.random() < 0.5:
            return "/v1/completions", {**body, "prompt": [5, 6]}
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "hi"}]}

    return drawn


def _endless_array(chance: random.Random) -> dict[str, Any]:
    return {"json": {"type": "array", "items": {"type": "integer"}, "minItems": chance.choice((10**7, 10**9))}}


def _many_choices(chance: random.Random) -> dict[str, Any]:
    return {"choice": [f"{chance.random()}" for _ in range(100_000)]}


def _recursive(chance: random.Random) -> dict[str, Any]:
    """A rule that begins with itself, and a reference that only leads to itself."""
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    return chance.choice(({"grammar": 'root ::= root "a" | root root | "a"'}, {"json": loop}))


def _repeats(chance: random.Random) -> dict[str, Any]:
    return {"regex": chance.choice(("(a{1,1000}){1,1000}", "((a{1,100}){1,100}){1,100}", "[a-z]{100000000}"))}


def _malformed(model: str, _: int, chance: random.Random) -> tuple[str, dict[str, Any]]:
    field: dict[str, Any] = chance.choice(
        (
            {"max_tokens": -1},
            {"temperature": "hot"},
            {"n": 0},
            {"hotswap": {"policy": "never"}},
            {"top_p": 7},
            {"prompt": {"a": 1}},
        )
    )
    return "/v1/completions", {"model": model, "prompt": [5, 6], "max_tokens": 4, **field}


_BODIES: Mapping[Kind, tuple[Callable[..., tuple[str, dict[str, Any]]], ...]] = {
    "ids": (_generate, _completion, _bias),
    "grammar": tuple(_grammar(make) for make in (_endless_array, _many_choices, _recursive, _repeats)),
    "body": (_malformed,),
}


LONG = 2**20  # bytes of trailers, or of an extension of a chunk
PIECE = b'{"prompt":'
FRAMINGS: Mapping[str, bytes] = {  # what stands behind the first piece of a body in chunks
    "endless trailers": b"0\r\n" + b"x-filler: 1\r\n" * (LONG // 13),
    "one long trailer": b"0\r\nx-filler: " + b"x" * LONG,
    "trailers that frame": b"0\r\ncontent-length: 5\r\ntransfer-encoding: identity\r\nhost: elsewhere\r\n\r\n",
    "a long extension": b"1;" + b"x" * LONG + b"\r\n",
    "a negative size": b"-5\r\n",
    "a size beyond all": b"f" * 40 + b"\r\n",
    "no size": b"\r\n\r\n",
    "line feeds alone": b"0\n\n",
}


def framed(address: str, behind: bytes, chance: random.Random) -> bytes:
    """A request whose body in chunks is framed badly; now and then with a length beside."""
    lines = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    lines += "content-length: 10\r\n" if chance.random() < 0.2 else ""
    return f"{lines}transfer-encoding: chunked\r\n\r\n{len(PIECE):x}\r\n".encode() + PIECE + b"\r\n" + behind


@dataclass
class Attacker:
    """One attack after the other, each on a gateway and a model at random."""

    urls: list[str]
    vocabulary: int
    chance: random.Random
    file: BinaryIO

    async def run(self, stop: asyncio.Event) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT) as http:
            while not stop.is_set():
                gateway, kind = self.chance.randrange(len(self.urls)), self.chance.choice(KINDS)
                made = await self._made(http, kind, gateway)
                made.ended = time.monotonic()
                self.file.write(made.line())
                await asyncio.sleep(self.chance.uniform(*PAUSE_S))

    async def _made(self, http: httpx.AsyncClient, kind: Kind, gateway: int) -> Attack:
        if kind in POSTED:
            return await self._posted(http, kind, gateway)
        return await (self._framed(gateway) if kind == "framing" else self._left(kind, gateway))

    async def _framed(self, gateway: int) -> Attack:
        """The gateway may end the connection while this client still sends: then there is no answer to be read."""
        made, address = Attack("framing", "/v1/completions", gateway, time.monotonic()), urlsplit(self.urls[gateway])
        made.message = self.chance.choice(sorted(FRAMINGS))
        try:
            async with asyncio.timeout(TIMEOUT.read):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                writer.write(framed(address.netloc, FRAMINGS[made.message], self.chance))
                try:
                    head, _, content = (await reader.read()).partition(b"\r\n\r\n")
                finally:
                    writer.transport.abort()
            if head:
                made.status = int(head.split()[1])
                made.outcome, made.code, _ = told(made.status, content)
        except (OSError, TimeoutError) as error:
            made.code = type(error).__name__
            made.outcome = "cut" if isinstance(error, ConnectionRefusedError | TimeoutError) else "left"
        return made

    async def _posted(self, http: httpx.AsyncClient, kind: Kind, gateway: int) -> Attack:
        route, body = bodies(kind, self.chance.choice(MODELS), self.vocabulary, self.chance)
        made = Attack(kind, route, gateway, time.monotonic())
        try:
            response = await http.post(self.urls[gateway] + route, json=body)
        except httpx.TransportError as error:
            made.outcome, made.code, made.message = "cut", type(error).__name__, str(error)
            return made
        made.status = response.status_code
        made.outcome, made.code, made.message = told(response.status_code, response.content)
        return made

    async def _left(self, kind: Kind, gateway: int) -> Attack:
        """A streamed request whose client leaves: at once, in the middle of its body, or after reading a little."""
        made = Attack(kind, "/generate", gateway, time.monotonic())
        ids = [self.chance.randrange(3, 90) for _ in range(8)]
        asked = {"model": self.chance.choice(MODELS), "prompt_token_ids": ids}
        body = orjson.dumps({**asked, "max_tokens": 300, "ignore_eos": True})
        address = urlsplit(self.urls[gateway])
        head = f"POST {made.route} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        whole = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        try:
            await self._leave(kind, (address.hostname or "", address.port or 80), whole)
        except OSError as error:
            made.outcome, made.code, made.message = "cut", type(error).__name__, str(error)
        return made

    async def _leave(self, kind: Kind, address: tuple[str, int], request: bytes) -> None:
        plug = socket.socket()
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        plug.setblocking(False)
        with plug:
            async with asyncio.timeout(READS_S):
                await asyncio.get_running_loop().sock_connect(plug, address)
            reader, writer = await asyncio.open_connection(sock=plug, limit=SLICE)
            whole = kind == "slow reader" or self.chance.random() < 0.7
            writer.write(request if whole else request[: self.chance.randrange(1, len(request))])
            if kind == "slow reader":
                await _read_slowly(reader)
            else:
                await asyncio.sleep(self.chance.uniform(*LEAVES_S))
            writer.transport.abort()


async def _read_slowly(reader: asyncio.StreamReader) -> None:
    for _ in range(int(READS_S / EVERY_S)):
        if not await reader.read(SLICE):
            return
        await asyncio.sleep(EVERY_S)


def told(status: int, content: bytes) -> tuple[Literal["refused", "answered", "untyped"], str, str]:
    """Outcome, code and message of a complete answer to a posted attack."""
    if status == 200:
        return "answered", "", content[:300].decode(errors="replace")
    try:
        error = orjson.loads(content)["error"]
        message, code = error["message"], error["code"]
        typed = isinstance(message, str) and isinstance(error["type"], str)
    except (ValueError, TypeError, LookupError):
        return "untyped", "", content[:300].decode(errors="replace")
    return ("refused" if typed else "untyped"), str(code), str(message)[:300]


def complaints(attacks: Iterable[Mapping[str, Any]], windows: Iterable[Window]) -> list[str]:
    """Complaints about the server, in words: a request let in, an error without a type or that blames the
    server for good, a connection that broke while nothing was wrong with its gateway."""
    windows, said = list(windows), []
    for attack in attacks:
        excused = any(window.host == attack["gateway"] and overlaps(window, attack) for window in windows)
        let_in = attack["outcome"] == "answered" and attack["kind"] in REFUSED
        mistaken = attack["status"] >= 500 and attack["code"] not in RETRYABLE
        broken = attack["outcome"] == "cut" and not excused
        if let_in or mistaken or broken or attack["outcome"] == "untyped":
            said.append(f"{attack['kind']}: {dict(attack)}")
    return said


async def main(vocabulary: int, seed: int, count: int, path: str, urls: list[str]) -> None:
    stop = asyncio.Event()
    with open(path, "wb", buffering=0) as file:  # noqa: ASYNC230 - a line at a time, into the page cache
        attackers = [Attacker(urls, vocabulary, random.Random(f"{seed} hostile {n}"), file) for n in range(count)]
        tasks = [asyncio.create_task(attacker.run(stop)) for attacker in attackers]
        await asyncio.to_thread(sys.stdin.readline)
        stop.set()
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]))
