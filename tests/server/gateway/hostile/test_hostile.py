"""Requests made to get past the gateway: none may reach an instance, every one is answered or closed."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from server.errors import BadUpstream
from server.gateway import Limits, UpstreamSettings, connection
from server.gateway.access.keys import KeyRing
from server.gateway.cors import Origins
from server.gateway.routes import find, public_names
from server.gateway.wire.bodies import check_object
from server.gateway.wire.relay import MAX_HEAD, ResponseRelay
from tests.server.gateway.harness import ADMIN, RunningGateway, get, post, running_gateway
from tests.server.gateway.upstream import read_answer
from tests.server.refusals import refuses
from tests.waiting import eventually, stays

LIMITS = Limits(max_body=1000, max_head=4096, max_headers=30, max_connections=40, max_buffered=2000)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    settings = UpstreamSettings(scrape_interval_s=3600.0)
    with running_gateway(tmp_path_factory.mktemp("gateway"), upstream=settings, limits=LIMITS) as g:
        yield g


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway without patience, for what it ends by itself."""
    settings, limits = UpstreamSettings(scrape_interval_s=3600.0), Limits(request_timeout_s=0.5, keep_alive_s=0.4)
    with running_gateway(tmp_path_factory.mktemp("hasty"), upstream=settings, limits=limits) as g:
        yield g


@pytest.fixture
def long_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client has the time to send what the gateway throws away."""
    monkeypatch.setattr(connection, "LINGER_S", 60.0)


TRICKS = r"""
/v1/completions// //v1/completions /v1//completions /v1/./completions /v1/../v1/completions /v1/completions/..
/V1/completions /v1/Completions /v1/completions;x=1 /v1%2fcompletions /v1%2Fcompletions /v1%5ccompletions
/v1/completions%00 /v1/completions%20 /v1/completions%3f /v1/completions%23 /v1/%2e%2e/pause /v1/%2e/completions
/v1/%252e%252e/pause /v1/completions/%2e%2e/pause /generate/../pause /generate#/pause /v1/responses/../../pause
/v1/responses/%2e%2e%2f%2e%2e%2fpause /v1/responses/a/b /v1/responses/a%2fcancel /v1/responses/a/cancel//
http://t/v1/completions http://t/pause https://t/v1/completions * /v1\completions /admin%2fweights
"""


@pytest.mark.parametrize("target", [*TRICKS.split(), "/v1/responses/" + "a" * 129])
async def test_path_tricks_reach_nobody(gateway: RunningGateway, target: str) -> None:
    async with gateway.instance() as up:
        assert (await gateway.ask(post(target))).refusal in ((400, "bad_request"), (404, "not_found"))
        assert up.requests == []


def test_what_goes_upstream_comes_from_the_table() -> None:
    """An escaped letter is the same path (RFC 3986) and leaves in the table's spelling."""
    (target,) = find(b"/v1/%63ompletions?x=1")
    assert target.upstream == b"/v1/completions"
    assert "/v1/chat/completions" in public_names()


async def test_wrong_method_on_a_public_path(gateway: RunningGateway) -> None:
    answer = await gateway.ask(get("/v1/completions"))
    assert (answer.refusal, answer.headers["allow"]) == ((405, "method_not_allowed"), "POST")
    assert (await gateway.ask(post("/healthz"))).status == 405


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
async def test_head_gets_no_body(gateway: RunningGateway, path: str) -> None:
    async with gateway.client(f"HEAD {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode()) as client:
        raw = await client.rest()
        assert raw.startswith(b"HTTP/1.1 40")
        assert raw.endswith(b"\r\n\r\n")


SMUGGLING = {
    "length and chunked": "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "two lengths": "Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "different lengths": "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "list of lengths": "Content-Length: 2, 2\r\n\r\n{}",
    "signed length": "Content-Length: +2\r\n\r\n{}",
    "hex length": "Content-Length: 0x2\r\n\r\n{}",
    "huge length": "Content-Length: 99999999999999999999999\r\n\r\n{}",
    "gzip then chunked": "Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunked then identity": "Transfer-Encoding: chunked, identity\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunked twice": "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "x-chunked": "Transfer-Encoding: xchunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "space before colon": "Transfer-Encoding : chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "folded header": "X: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "nul in a value": "X: a\0b\r\nContent-Length: 2\r\n\r\n{}",
    "bare line feed": "X: a\nContent-Length: 2\r\n\r\n{}",
    "strange expectation": "Expect: 200-ok\r\nContent-Length: 2\r\n\r\n{}",
    "bad chunk size": "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "negative chunk size": "Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
    "two hosts": "Host: u\r\nContent-Length: 2\r\n\r\n{}",
}


FRAMINGS = (
    "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    "Content-Length: 5\r\nTransfer-Encoding: identity\r\n",
    "Content-Length: 5\r\nContent-Length : 50\r\n",
    "Content-Length: 5\r\n Content-Length: 50\r\n",
    "Content-Length: 5 5\r\n",
    "Content-Length: 5,50\r\n",
    "Content-Length: -5\r\n",
    "Content-Length: 5\0\r\n",
    "Content-Length: \x0b5\r\n",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
    "Transfer-Encoding: chunked, chunked\r\n",
    "Transfer-Encoding: \x0bchunked\r\n",
    "Transfer-Encoding: chunked\x0b\r\n",
    'Transfer-Encoding: "chunked"\r\n',
    "Transfer-Encoding: chunked;q=1\r\n",
    "Transfer-Encoding:\r\n chunked\r\n",
    "Transfer-Encoding\t: chunked\r\n",
    "Transfer-Encoding\r\n: chunked\r\n",
    "X: y\rTransfer-Encoding: chunked\r\n",
    "X: y\nTransfer-Encoding: chunked\n",
    "X: y\r\n\tTransfer-Encoding: chunked\r\n",
    ": chunked\r\n",
    "Transfer_Encoding chunked\r\n",
)
HIDDEN = "0\r\n\r\nPOST /pause HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n"
NOT_HTTP = {
    "no host": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
    "a version of HTTP/2": b"POST /v1/completions HTTP/2.0\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\x04\0\0\0\0\0",
    "1.0 in chunks": b"POST /generate HTTP/1.0\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "0.9": b"GET /v1/models\r\n\r\n",
    "connect": b"CONNECT t:80 HTTP/1.1\r\nHost: t\r\n\r\n",
    "a path with a byte beyond ASCII": b"GET /\xff HTTP/1.1\r\nHost: t\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
    "SSH": b"SSH-2.0-x\r\n",
    "zeros": b"\0" * 5000,
    "only line ends, then no method": b"\r\n" * 200 + b" / HTTP/1.1\r\n\r\n",
}


def framed(rest: str) -> bytes:
    return f"POST /v1/completions HTTP/1.1\r\nHost: t\r\n{rest}".encode("latin-1")


@pytest.mark.parametrize(
    "raw",
    [
        *(pytest.param(framed(rest), id=name) for name, rest in SMUGGLING.items()),
        *(pytest.param(framed(f"{framing}\r\n{HIDDEN}"), id=repr(framing)) for framing in FRAMINGS),
        *(pytest.param(raw, id=name) for name, raw in NOT_HTTP.items()),
    ],
)
async def test_what_is_not_one_plain_request_is_refused(gateway: RunningGateway, raw: bytes) -> None:
    async with gateway.instance() as up, gateway.client(raw) as client:
        answer = await client.answer()
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert answer.headers["connection"] == "close"
        assert await client.rest() == b"", "one answer, then closed"
        assert up.requests == []


# limits


@pytest.mark.parametrize("path", ["/v1/completions", "/healthz", "/admin/weights"])
async def test_a_body_over_the_limit_is_413(gateway: RunningGateway, path: str) -> None:
    async with gateway.instance() as up:
        assert (await gateway.ask(post(path, b" " * 1001))).refusal == (413, "request_too_large")
        assert up.requests == []


async def test_a_long_chunked_body_is_413_and_read_no_further(gateway: RunningGateway) -> None:
    async with gateway.instance() as up:
        raw = framed("Transfer-Encoding: chunked\r\n\r\n") + 50 * (b"ff\r\n" + b"x" * 255 + b"\r\n")
        assert (await gateway.ask(raw)).refusal == (413, "request_too_large")
        assert up.requests == []


async def test_bodies_held_at_one_time_are_bounded(gateway: RunningGateway) -> None:
    part, whole = post(body=b" " * 900)[:-1], post(body=b'{"a":"' + b"x" * 800 + b'"}')
    async with gateway.instance():
        async with gateway.client(part), gateway.client(part):
            await eventually(lambda: gateway.gateway.buffered == 2 * 899)
            assert (await gateway.ask(whole)).refusal == (503, "overloaded")
        await eventually(lambda: gateway.gateway.buffered == 0)
        assert (await gateway.ask(whole)).status == 200
    assert gateway.gateway.buffered == 0


@pytest.mark.usefixtures("long_linger")
async def test_a_body_that_nobody_waited_for_is_not_counted(gateway: RunningGateway) -> None:
    """The app answers 404 before the body is there; clients that then rest must not use up what all may send."""
    raw = post("/no/such/route", b'{"a": "' + b"x" * 600 + b'"}')
    async with gateway.client() as client:
        for _ in range(3):  # together over --max-body
            client.writer.write(raw[:-600])
            assert (await client.answer()).status == 404
            await eventually(lambda: gateway.gateway.buffered == 0)  # the answer goes out before the count goes down
            client.writer.write(raw[-600:])
            await stays(lambda: gateway.gateway.buffered == 0, 0.05)
        client.writer.write(get("/healthz"))
        assert (await client.answer()).status == 200


async def test_nothing_follows_an_answer_that_did_not_wait(gateway: RunningGateway) -> None:
    """A body that never comes to its end after its answer ends the connection, and gets no second answer."""
    async with gateway.client(post("/no/such/route", b"x" * 100)[:-50]) as client:
        assert (await client.answer()).status == 404
        client.writer.write(b"x")
        assert await client.rest() == b""


async def test_connections_are_bounded(gateway: RunningGateway) -> None:
    await eventually(lambda: not gateway.gateway.clients)
    links = [await gateway.connect() for _ in range(LIMITS.max_connections + 1)]
    assert (await read_answer(links[-1][0])).refusal == (503, "overloaded")
    for _, writer in links:
        writer.close()


async def test_an_announced_long_body_is_refused_before_it_is_sent(gateway: RunningGateway) -> None:
    async with gateway.client(framed("Expect: 100-continue\r\nContent-Length: 9999\r\n\r\n")) as client:
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 413"), "and no 100 before it"


@pytest.mark.parametrize(
    "raw",
    [
        post(headers="X: " + "a" * 5000 + "\r\n"),
        post(headers="".join(f"X-{i}: 1\r\n" for i in range(40))),
        post(headers="X: " + "a" * 300_000 + "\r\n"),
        get("/" + "a" * 5000),
    ],
    ids=["a long line", "many lines", "a longer line", "a long path"],
)
async def test_long_heads_are_431(gateway: RunningGateway, raw: bytes) -> None:
    assert (await gateway.ask(raw)).refusal == (431, "headers_too_large")


async def test_a_head_without_an_end_is_431(gateway: RunningGateway) -> None:
    async with gateway.client(b"GET /healthz HTTP/1.1\r\n") as client:
        for _ in range(30):
            client.writer.write(b"X-A: " + b"a" * 200 + b"\r\n")
            await asyncio.sleep(0)
        assert (await client.answer()).status == 431


NO_END = {
    "one trailer": (b"2\r\n{}\r\n0\r\nx: ", b"a" * 64),
    "many trailers": (b"2\r\n{}\r\n0\r\n", b"x: " + b"a" * 59 + b"\r\n"),
    "a chunk extension": (b"2;", b"x" * 64),
    "zeros of a chunk size": (b"", b"0" * 64),
}
A_READ = 256 * 2**10  # the most that the gateway's loop reads at a time


@pytest.mark.usefixtures("long_linger")
@pytest.mark.parametrize("path", ["/v1/completions", "/admin/weights", "/no/such/route"])
@pytest.mark.parametrize("name", NO_END)
async def test_framing_without_an_end_is_431(gateway: RunningGateway, path: str, name: str) -> None:
    """Before the gateway forwards the request, while the app waits for the body, and after the app has answered."""
    begin, more = NO_END[name]
    head = f"POST {path} HTTP/1.1\r\nHost: t\r\n{ADMIN}Transfer-Encoding: chunked\r\n\r\n".encode()
    async with gateway.client(head, admin="/admin" in path) as client:
        answered = path == "/no/such/route"
        if answered:
            assert (await client.answer()).status == 404
        client.writer.write(begin + more * (4 * A_READ // len(more)))
        if not answered:
            assert (await client.answer()).refusal == (431, "headers_too_large")
        assert await client.rest() == b""


@pytest.mark.parametrize("name", NO_END)
def test_framing_without_an_end_is_no_answer_of_an_instance(name: str) -> None:
    begin, more = NO_END[name]
    relay = ResponseRelay(b"id", http10=False, keep_alive=True)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    assert relay.feed(head + begin)
    for _ in range(MAX_HEAD // len(more)):
        relay.feed(more)
    with pytest.raises(BadUpstream, match=f"more than {MAX_HEAD} bytes"):
        relay.feed(more)


def test_answers_have_any_number_of_small_chunks() -> None:
    relay = ResponseRelay(b"id", http10=False, keep_alive=True)
    relay.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(MAX_HEAD // 8):
        for piece in (b"1;x=y\r\n", b"a", b"\r\n1\r\na\r\n", b"2\r\nab\r\n"):
            relay.feed(piece)
    relay.feed(b"0\r\n\r\n")
    assert relay.complete


@pytest.mark.parametrize(
    "part",
    [b"POST /v1/comp", post(body=b"{}")[:-1], post("/admin/weights", b"{}", ADMIN)[:-1]],
    ids=["head", "body", "admin"],
)
async def test_a_request_that_never_ends_is_408(hasty: RunningGateway, part: bytes) -> None:
    assert (await hasty.ask(part, admin=b"/admin" in part)).refusal == (408, "request_timeout")


async def test_idle_connections_are_closed(hasty: RunningGateway) -> None:
    async with hasty.client() as silent, hasty.client(get("/healthz")) as client:
        await client.answer()
        for each in (client, silent):
            assert await each.rest() == b""
    await eventually(lambda: not hasty.gateway.clients)


# bodies


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"{}x", b"[1]", b'"a"', b"null", b"\xff\xfe", b'{"a":NaN}', b'{"a":1,}', b'{"a":"\xff"}',
     b'{"a":' + b"[" * 990, b'{"a":' + b"[" * 490 + b"]" * 490 + b"}x", '{"a": 1}'.encode("utf-16"),
     b'{"a": "\xc0\xaf"}', b'{"a": "\xed\xa0\x80"}', gzip.compress(b'{"a": 1}', mtime=0)],
)  # fmt: skip
async def test_malformed_json_is_400_and_goes_nowhere(gateway: RunningGateway, body: bytes) -> None:
    """The coding that the request names changes nothing."""
    raw = post("/v1/chat/completions", body, "Content-Encoding: gzip\r\n")
    async with gateway.instance() as up:
        assert (await gateway.ask(raw)).refusal == (400, "invalid_json")
        assert up.requests == []


def test_json_is_checked_without_being_built() -> None:
    """Turned into objects this body takes over 300 MB."""
    body = b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"
    tracemalloc.start()
    check_object(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize("deep", [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000])
def test_json_without_a_bottom_is_refused(deep: bytes) -> None:
    with refuses(400):
        check_object(b'{"a":' + deep + b"}")


async def test_a_body_on_a_get_goes_nowhere(gateway: RunningGateway) -> None:
    async with gateway.instance() as up:
        assert (await gateway.ask(get("/v1/models", "Content-Length: 2\r\n") + b"{}")).status == 200
    assert up.requests[0].body == b""


async def test_a_refused_body_leaves_the_connection_usable(gateway: RunningGateway) -> None:
    async with gateway.instance(), gateway.client(post(body=b"{")) as client:
        assert (await client.answer()).status == 400
        client.writer.write(post())
        assert (await client.answer()).status == 200


async def test_a_body_in_tiny_chunks_takes_the_memory_of_its_bytes(tmp_path: Path) -> None:
    """Of as many objects as chunks, each would take 20 times its bytes."""
    size = 2 * 2**20
    data = random.Random(0).randbytes(size)  # not one byte again and again, which Python would keep once
    chunks = b"".join(b"2\r\n%b\r\n" % data[at : at + 2] for at in range(0, size, 2))
    limits = Limits(request_timeout_s=600.0)
    with running_gateway(tmp_path, run_coordinator=False, limits=limits) as gateway:
        before = psutil.Process().memory_info().rss
        async with gateway.client(framed("Transfer-Encoding: chunked\r\n\r\n")) as client:
            for at in range(0, len(chunks), 65_536):
                client.writer.write(chunks[at : at + 65_536])
                await client.writer.drain()
            await eventually(lambda: gateway.gateway.buffered == size, 120)
            assert psutil.Process().memory_info().rss - before < 8 * size
        await eventually(lambda: gateway.gateway.buffered == 0)


ORIGINS = {
    None: 200,
    "http://localhost:3000": 200,
    "http://127.0.0.1:8001": 200,
    "http://[::1]": 200,
    "https://console.example": 200,
    "https://evil.example": 403,
    "http://t": 403,  # what it takes for its own name: one that was made to lead here
    "http://127.0.0.1.evil.example": 403,
    "http://[": 403,
    "null": 403,
    "": 403,
}


async def test_foreign_pages_may_not_ask_while_no_key_is_needed(tmp_path: Path) -> None:
    settings = UpstreamSettings(scrape_interval_s=3600.0)
    allowed = ("https://console.example",)
    with running_gateway(tmp_path, upstream=settings, run_coordinator=False, allowed_origins=allowed) as gateway:
        async with gateway.instance():
            for (origin, status), path in itertools.product(ORIGINS.items(), ("/generate", "/v1/chat/completions")):
                headers = f"Origin: {origin}\r\n" if origin is not None else ""
                got = await gateway.ask(post(path, headers=headers))
                assert got.status == status, origin
                assert status == 200 or got.error["code"] == "origin_not_allowed"


LAN = "192.168.1.20"


@pytest.mark.parametrize(
    ("origin", "host", "passes"),
    [
        ("http://192.168.1.20:8000", "192.168.1.20:8000", True),
        ("http://[fd00::2]:8000", "[fd00::2]:8000", True),
        ("http://Chat.example:8000", "Chat.example:8000", True),  # what it was told to listen on
        ("https://console.example", "192.168.1.20:8000", True),  # allowed
        ("http://evil.example:8000", "evil.example:8000", False),  # a name that was made to lead here
        ("http://192.168.1.20.evil.example:8000", "192.168.1.20.evil.example:8000", False),
        ("http://chat.example.evil.example", "chat.example.evil.example", False),
        ("http://evil.example", "192.168.1.20", False),
        ("http://192.168.1.21", "192.168.1.20", False),
    ],
)
def test_a_name_that_leads_here_is_not_ours(origin: str, host: str, passes: bool) -> None:
    """Beyond loopback, where a page of the gateway's own address may ask without a key."""
    origins = Origins(KeyRing({}, required=False), "chat.Example")
    origins.use(["https://console.example"])
    with contextlib.nullcontext() if passes else refuses(403, match="--allow-origin"):
        origins.check(origin.encode(), host.encode(), LAN)
