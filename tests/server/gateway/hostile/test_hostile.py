"""Requests made to get past the gateway: none may reach an instance, every one is answered or closed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import orjson
import psutil
import pytest

from server.errors import BadRequest, BadUpstream, Forbidden
from server.gateway import Limits, UpstreamSettings
from server.gateway.access.keys import KeyRing
from server.gateway.cors import Origins
from server.gateway.routes import find, public_names
from server.gateway.wire.bodies import check_object
from server.gateway.wire.relay import MAX_HEAD, ResponseRelay
from tests.server.gateway.harness import ADMIN_KEY, RunningGateway, get, post, running_gateway
from tests.server.gateway.upstream import Upstream, read_answer, upstream
from tests.waiting import eventually, stays

ADMIN = f"Authorization: Bearer {ADMIN_KEY}\r\n"
LIMITS = Limits(
    max_body=1000,
    max_head=4096,
    max_headers=30,
    max_connections=40,
    max_buffered=2000,
)


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


def code(body: bytes) -> str:
    parsed = orjson.loads(body)["error"]
    assert parsed.keys() >= {"message", "type", "param", "code"}
    assert isinstance(parsed["code"], str)
    return str(parsed["code"])


CONTROL_PATHS = [
    "/pause",
    "/resume",
    "/is_paused",
    "/sleep",
    "/wake_up",
    "/collective_rpc",
    "/update_weights",
    "/init_weight_transfer_engine",
    "/reset_prefix_cache",
    "/server_info",
    "/invocations",
    "/inference/v1/generate",
    "/scale_elastic_ep",
    "/start_profile",
    "/v1/load_lora_adapter",
    "/v1/chat/completions/render",
    "/docs",
]


@pytest.mark.parametrize("path", CONTROL_PATHS)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_control_routes_do_not_exist(gateway: RunningGateway, method: str, path: str) -> None:
    async with upstream() as up:
        gateway.register(up)
        answer = await gateway.ask(post(path) if method == "POST" else get(path))
        assert (answer.status, code(answer.body)) == (404, "not_found")
        assert up.requests == []


TRICKS = [
    "/v1/completions/",
    "//v1/completions",
    "/v1//completions",
    "/v1/./completions",
    "/v1/../v1/completions",
    "/v1/completions/..",
    "/V1/completions",
    "/v1/Completions",
    "/v1/completions;x=1",
    "/v1%2fcompletions",
    "/v1%2Fcompletions",
    "/v1%5ccompletions",
    "/v1/completions%00",
    "/v1/completions%20",
    "/v1/completions%3f",
    "/v1/completions%23",
    "/v1/%2e%2e/pause",
    "/v1/%2e/completions",
    "/v1/%252e%252e/pause",
    "/v1/completions/%2e%2e/pause",
    "/generate/../pause",
    "/generate#/pause",
    "/v1/responses/../../pause",
    "/v1/responses/%2e%2e%2f%2e%2e%2fpause",
    "/v1/responses/a/b",
    "/v1/responses/a%2fcancel",
    "/v1/responses/" + "a" * 129,
    "/v1/responses/a/cancel/",
    "http://t/v1/completions",
    "http://t/pause",
    "https://t/v1/completions",
    "*",
    "/v1\\completions",
]


@pytest.mark.parametrize("target", TRICKS)
async def test_path_tricks_reach_nobody(gateway: RunningGateway, target: str) -> None:
    async with upstream() as up:
        gateway.register(up)
        answer = await gateway.ask(post(target))
        assert answer.status in (400, 404)
        code(answer.body)
        assert up.requests == []


def test_what_goes_upstream_comes_from_the_table() -> None:
    """An escaped letter is the same path (RFC 3986) and leaves in the table's spelling."""
    (target,) = find(b"/v1/%63ompletions?x=1")
    assert target.upstream == b"/v1/completions"
    assert "/v1/chat/completions" in public_names()


async def test_wrong_method_on_a_public_path(gateway: RunningGateway) -> None:
    answer = await gateway.ask(get("/v1/completions"))
    assert (answer.status, code(answer.body), answer.headers["allow"]) == (405, "method_not_allowed", "POST")
    assert (await gateway.ask(post("/healthz"))).status == 405


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
async def test_head_gets_no_body(gateway: RunningGateway, path: str) -> None:
    reader, writer = await gateway.connect()
    writer.write(f"HEAD {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode())
    raw = await asyncio.wait_for(reader.read(), 10)
    assert raw.startswith(b"HTTP/1.1 40")
    assert raw.endswith(b"\r\n\r\n")
    writer.close()


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
    "connection names a header": "Connection: close, content-type\r\nContent-Length: 2\r\n\r\n{}",
    "upgrade": "Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\n{}",
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\nContent-Length: 2\r\n\r\n{}",
    "strange expectation": "Expect: 200-ok\r\nContent-Length: 2\r\n\r\n{}",
    "bad chunk size": "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "negative chunk size": "Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
    "two hosts": "Host: u\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("name", SMUGGLING)
async def test_smuggling_is_refused(gateway: RunningGateway, name: str) -> None:
    async with upstream() as up:
        gateway.register(up)
        reader, writer = await gateway.connect()
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: t\r\n{SMUGGLING[name]}".encode())
        answer = await asyncio.wait_for(read_answer(reader), 10)
        assert answer.status == 400
        code(answer.body)
        assert answer.headers["connection"] == "close"
        assert await asyncio.wait_for(reader.read(), 10) == b""  # one answer, then closed
        writer.close()
        assert up.requests == []


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/2.0\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.0\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"CONNECT t:80 HTTP/1.1\r\nHost: t\r\n\r\n",
        b"POST /v1/completions\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /\xff HTTP/1.1\r\nHost: t\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_400(gateway: RunningGateway, raw: bytes) -> None:
    answer = await gateway.ask(raw)
    assert answer.status == 400
    code(answer.body)


# limits


@pytest.mark.parametrize("path", ["/v1/completions", "/healthz", "/admin/weights"])
async def test_a_body_over_the_limit_is_413(gateway: RunningGateway, path: str) -> None:
    async with upstream() as up:
        gateway.register(up)
        answer = await gateway.ask(post(path, b" " * 1001))
        assert (answer.status, code(answer.body)) == (413, "request_too_large")
        assert up.requests == []


async def test_a_long_chunked_body_is_413_and_read_no_further(gateway: RunningGateway) -> None:
    async with upstream() as up:
        gateway.register(up)
        reader, writer = await gateway.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(50):
            writer.write(b"ff\r\n" + b"x" * 255 + b"\r\n")
        answer = await read_answer(reader)
        assert (answer.status, code(answer.body)) == (413, "request_too_large")
        writer.close()
        assert up.requests == []


async def test_bodies_held_at_one_time_are_bounded(gateway: RunningGateway) -> None:
    async with upstream() as up:
        gateway.register(up)
        held = []
        for _ in range(2):
            _, writer = await gateway.connect()
            writer.write(post(body=b" " * 900)[:-1])
            held.append(writer)
        await eventually(lambda: gateway.gateway.buffered == 2 * 899)
        answer = await gateway.ask(post(body=b'{"a":"' + b"x" * 800 + b'"}'))
        assert (answer.status, code(answer.body)) == (503, "overloaded")
        for writer in held:
            writer.close()
        await eventually(lambda: gateway.gateway.buffered == 0)
        assert (await gateway.ask(post(body=b'{"a":"' + b"x" * 800 + b'"}'))).status == 200
    assert gateway.gateway.buffered == 0


async def test_a_body_that_nobody_waited_for_is_not_counted(gateway: RunningGateway) -> None:
    """The app answers 404 before the body is there; clients that then rest must not use up what all may send."""
    reader, writer = await gateway.connect()
    body = b'{"a": "' + b"x" * 600 + b'"}'
    for _ in range(3):  # together over --max-body
        raw = post("/no/such/route", body)
        writer.write(raw[:-600])
        assert (await asyncio.wait_for(read_answer(reader), 5)).status == 404
        writer.write(raw[-600:])
        await stays(lambda: gateway.gateway.buffered == 0, 0.05)
    writer.write(get("/healthz"))
    assert (await asyncio.wait_for(read_answer(reader), 5)).status == 200
    writer.close()


async def test_nothing_follows_an_answer_that_did_not_wait(hasty: RunningGateway) -> None:
    """A body that never comes to its end after its answer ends the connection, and gets no second answer."""
    reader, writer = await hasty.connect()
    writer.write(post("/no/such/route", b"x" * 100)[:-50])
    assert (await asyncio.wait_for(read_answer(reader), 5)).status == 404
    writer.write(b"x")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_connections_are_bounded(gateway: RunningGateway) -> None:
    await eventually(lambda: not gateway.gateway.clients)
    links = [await gateway.connect() for _ in range(LIMITS.max_connections + 1)]
    answer = await read_answer(links[-1][0])
    assert (answer.status, code(answer.body)) == (503, "overloaded")
    for _, writer in links:
        writer.close()


async def test_an_announced_long_body_is_refused_before_it_is_sent(gateway: RunningGateway) -> None:
    reader, writer = await gateway.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 9999\r\n\r\n")
    assert (await read_answer(reader)).status == 413  # and no 100 before it: read_answer would have skipped one
    writer.close()


@pytest.mark.parametrize(
    "headers",
    ["X: " + "a" * 5000 + "\r\n", "".join(f"X-{i}: 1\r\n" for i in range(40)), "X: " + "a" * 300_000 + "\r\n"],
)
async def test_long_heads_are_431(gateway: RunningGateway, headers: str) -> None:
    answer = await gateway.ask(post(headers=headers))
    assert (answer.status, code(answer.body)) == (431, "headers_too_large")


NO_END = {
    "one trailer": (b"2\r\n{}\r\n0\r\nx: ", b"a" * 64),
    "many trailers": (b"2\r\n{}\r\n0\r\n", b"x: " + b"a" * 59 + b"\r\n"),
    "a chunk extension": (b"2;", b"x" * 64),
    "zeros of a chunk size": (b"", b"0" * 64),
}
A_READ = 256 * 2**10  # the most that the gateway's loop reads at a time


@pytest.mark.parametrize("path", ["/v1/completions", "/admin/weights", "/no/such/route"])
@pytest.mark.parametrize("name", NO_END)
async def test_framing_without_an_end_is_431(gateway: RunningGateway, path: str, name: str) -> None:
    """Before the gateway forwards the request, while the app waits for the body, and after the app has answered."""
    begin, more = NO_END[name]
    reader, writer = await gateway.connect(admin="/admin" in path)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: t\r\n{ADMIN}Transfer-Encoding: chunked\r\n\r\n".encode())
    answered = path == "/no/such/route"
    if answered:
        assert (await asyncio.wait_for(read_answer(reader), 10)).status == 404
    writer.write(begin + more * (4 * A_READ // len(more)))
    if not answered:
        answer = await asyncio.wait_for(read_answer(reader), 10)
        assert (answer.status, code(answer.body)) == (431, "headers_too_large")
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


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


async def test_a_head_without_an_end_is_431(gateway: RunningGateway) -> None:
    reader, writer = await gateway.connect()
    writer.write(b"GET /healthz HTTP/1.1\r\n")
    for _ in range(30):
        writer.write(b"X-A: " + b"a" * 200 + b"\r\n")
        await asyncio.sleep(0)
    assert (await read_answer(reader)).status == 431
    writer.close()


async def test_a_long_path_is_431(gateway: RunningGateway) -> None:
    assert (await gateway.ask(get("/" + "a" * 5000))).status == 431


@pytest.mark.parametrize(
    "part",
    [b"POST /v1/comp", post(body=b"{}")[:-1], post("/admin/weights", b"{}", ADMIN)[:-1]],
    ids=["head", "body", "admin"],
)
async def test_a_request_that_never_ends_is_408(hasty: RunningGateway, part: bytes) -> None:
    answer = await hasty.ask(part, admin=b"/admin" in part)
    assert (answer.status, code(answer.body)) == (408, "request_timeout")


async def test_idle_connections_are_closed(hasty: RunningGateway) -> None:
    silent, silent_writer = await hasty.connect()
    reader, writer = await hasty.connect()
    writer.write(get("/healthz"))
    await read_answer(reader)
    for stream in (reader, silent):
        assert await asyncio.wait_for(stream.read(), 10) == b""
    writer.close()
    silent_writer.close()
    await eventually(lambda: not hasty.gateway.clients)


# bodies


@pytest.mark.parametrize(
    "body", [b"", b"{", b"{}x", b"[1]", b'"a"', b"null", b"\xff\xfe", b'{"a":NaN}', b'{"a":1,}', b'{"a":"\xff"}']
)
async def test_malformed_json_is_400_and_goes_nowhere(gateway: RunningGateway, body: bytes) -> None:
    async with upstream() as up:
        gateway.register(up)
        answer = await gateway.ask(post("/v1/chat/completions", body))
        assert (answer.status, code(answer.body)) == (400, "invalid_json")
        assert up.requests == []


@pytest.mark.parametrize("body", [b'{"a":' + b"[" * 990, b'{"a":' + b"[" * 490 + b"]" * 490 + b"}x"])
async def test_deep_json_does_not_hurt(gateway: RunningGateway, body: bytes) -> None:
    answer = await gateway.ask(post("/v1/chat/completions", body))
    assert (answer.status, code(answer.body)) == (400, "invalid_json")


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
    with pytest.raises(BadRequest):
        check_object(b'{"a":' + deep + b"}")


async def test_a_body_on_a_get_goes_nowhere(gateway: RunningGateway) -> None:
    async with upstream() as up:
        gateway.register(up)
        assert (await gateway.ask(get("/v1/models", "Content-Length: 2\r\n") + b"{}")).status == 200
    assert up.requests[0].body == b""


async def test_a_refused_body_leaves_the_connection_usable(gateway: RunningGateway) -> None:
    async with upstream() as up:
        gateway.register(up)
        reader, writer = await gateway.connect()
        writer.write(post(body=b"{"))
        assert (await read_answer(reader)).status == 400
        writer.write(post())
        assert (await read_answer(reader)).status == 200
        writer.close()


async def test_the_log_holds_neither_keys_nor_prompts(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async def die(link: object, _: object) -> None:
        raise ConnectionError

    caplog.set_level("DEBUG")
    async with upstream() as up:
        dying: Upstream = up
        dying.handler = die
        gateway.register(up)
        await gateway.ask(post(body={"prompt": "PROMPT-IN-CLEAR"}, headers="Authorization: Bearer KEY-IN-CLEAR\r\n"))
        await gateway.ask(post(body=b'{"prompt": "PROMPT-IN-CLEAR', headers="X-Api-Key: KEY-IN-CLEAR\r\n"))
    assert "IN-CLEAR" not in caplog.text
    assert caplog.records  # the broken answer itself is logged


async def test_a_body_in_tiny_chunks_takes_the_memory_of_its_bytes(tmp_path: Path) -> None:
    """Of as many objects as chunks, each would take 20 times its bytes."""
    size = 2 * 2**20
    data = random.Random(0).randbytes(size)  # not one byte again and again, which Python would keep once
    framed = b"".join(b"2\r\n%b\r\n" % data[at : at + 2] for at in range(0, size, 2))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
    with running_gateway(tmp_path, run_coordinator=False) as gateway:
        before = psutil.Process().memory_info().rss
        reader, writer = await gateway.connect()
        writer.write(head)
        for at in range(0, len(framed), 65_536):
            writer.write(framed[at : at + 65_536])
            await writer.drain()
        await eventually(lambda: gateway.gateway.buffered == size)
        assert psutil.Process().memory_info().rss - before < 8 * size
        writer.close()
        await eventually(lambda: gateway.gateway.buffered == 0)
        del reader


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
        async with upstream() as up:
            gateway.register(up)
            for (origin, status), path in itertools.product(ORIGINS.items(), ("/generate", "/v1/chat/completions")):
                headers = f"Origin: {origin}\r\n" if origin is not None else ""
                got = await gateway.ask(post(path, headers=headers))
                assert got.status == status, origin
                if status == 403:
                    assert orjson.loads(got.body)["error"]["code"] == "origin_not_allowed"


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
    with contextlib.nullcontext() if passes else pytest.raises(Forbidden, match="--allow-origin"):
        origins.check(origin.encode(), host.encode(), LAN)
