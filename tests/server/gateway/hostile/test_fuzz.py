"""Arbitrary bytes from both sides: nothing crashes, nothing but the public routes goes up, answers stay well-formed."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httptools
import pytest
import uvicorn
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from server.errors import BadUpstream
from server.gateway import GatewayConfig, Limits
from server.gateway.access.key_sources import load_keys
from server.gateway.app import build_app
from server.gateway.connection import GatewayProtocol
from server.gateway.fleet.instance import Instance
from server.gateway.gateway import Gateway
from server.gateway.wire.journal import ReplayMemory
from server.gateway.wire.pool import Pool, UpstreamConnection
from server.gateway.wire.relay import ResponseRelay, whole_chunk
from server.resume import RESUMABLE
from weightsync.control.records import InstanceRecord
from weightsync.store import open_store

FUZZ = settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
ADMIN_KEY = "fuzz-admin-key-0123456789"


class MemoryTransport(asyncio.Transport):
    """Keeps what is written; nothing is ever sent."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def writelines(self, list_of_data: Any) -> None:
        self.written += b"".join(list_of_data)

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


# Questions of /readyz and /openapi.json, some turns of the loop later; and one that was called off.
OWN = (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1:1\r\n\r\n", b"")
OWN += (b"GET /hotswap/openapi.json HTTP/1.1\r\nhost: 127.0.0.1:1\r\n\r\n",)


class RecordingPool(Pool):
    """Lends connections to nowhere and keeps what is sent on them."""

    sent: list[MemoryTransport]

    def take(self) -> UpstreamConnection:
        link = UpstreamConnection(self)
        transport = MemoryTransport()
        self.sent.append(transport)
        link.connection_made(transport)
        return link


class Bench:
    """A gateway without sockets, and a loop to run it on."""

    def __init__(self, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        limits = Limits(max_body=5000, max_head=2000)
        config = GatewayConfig(f"sqlite://{directory}/store.db", "toy", admin_key=ADMIN_KEY, limits=limits)
        self.gateway = Gateway(config, open_store(config.store), load_keys(config))
        self.gateway.keys.use_records([])
        self.uvicorn = uvicorn.Config(build_app(config), access_log=False, log_config=None)
        self.uvicorn.load()
        instance = Instance(InstanceRecord("i0", "http://127.0.0.1:1", "SERVING", active_version=2), config.upstream)
        self.pool = RecordingPool("127.0.0.1", 1, config.upstream)
        instance.pool = self.pool
        self.gateway.default.fleet.instances["i0"] = instance
        self.gateway.default.fleet.serving = [instance]

    def feed(self, pieces: list[bytes], reply: bytes = b"") -> tuple[bytes, list[bytes]]:
        """A client sends these pieces; returns what it gets and what goes to the instance."""
        return self.loop.run_until_complete(self._feed(pieces, reply))

    async def _feed(self, pieces: list[bytes], reply: bytes) -> tuple[bytes, list[bytes]]:
        self.pool.sent = []
        transport = MemoryTransport()
        protocol = GatewayProtocol(self.uvicorn, ServerState(), {"gateway": self.gateway})
        protocol.connection_made(transport)
        for piece in pieces:
            if transport.closing:
                break
            protocol.data_received(piece)
            if reply and protocol.exchange is not None:
                protocol.exchange.upstream_data(reply)
            for _ in range(4):
                await asyncio.sleep(0)
        protocol.connection_lost(None)
        await asyncio.sleep(0)
        return transport.written, [sent.written for sent in self.pool.sent]

    def close(self) -> None:
        self.loop.run_until_complete(self.gateway.store.close())
        self.loop.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    it = Bench(tmp_path_factory.mktemp("fuzz"))
    yield it
    it.close()


class Messages:
    """Counts messages with llhttp at its strictest; anything it refuses raises."""

    def __init__(self) -> None:
        self.complete = 0
        self.begun = 0
        self.url = b""
        self.body = b""
        self.headers: list[tuple[bytes, bytes]] = []

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete += 1


def check_upstream(sent: list[bytes]) -> None:
    """Exactly one well-formed request for a public route on each connection."""
    for raw in sent:
        if raw in OWN:
            continue
        seen = Messages()
        parser = httptools.HttpRequestParser(seen)
        parser.feed_data(raw)
        assert (seen.begun, seen.complete) == (1, 1), raw
        method, path = parser.get_method(), seen.url.partition(b"?")[0]
        posts = (b"completions", b"chat/completions", b"responses", b"embeddings", b"messages")
        plain = [b"/v1/" + name for name in (posts if method == b"POST" else (b"models",))]
        plain += [b"/tokenize", b"/detokenize", b"/generate"] if method == b"POST" else []
        assert path in plain or path.startswith(b"/v1/responses/"), raw
        secret = {b"authorization", b"x-api-key", b"api-key", b"cookie"}
        assert not secret & {name.lower() for name, _ in seen.headers}
        ours = [(name, value) for name, value in seen.headers if name.lower().startswith(b"x-hotswap")]
        assert ours.count((b"x-hotswap-cache-scope", b"public")) == 1
        assert len({name for name, _ in ours}) == len(ours)
        assert all(INTERNAL.fullmatch(name + b": " + value) for name, value in ours), raw


INTERNAL = re.compile(
    rb"x-hotswap-(cache-scope: public|policy: (keep|recompute|finish|abort)|(min-)?version: [1-9]\d*|finish-s: [\d.e-]+"
    rb"|priority: [1-9]|resumable: 1)"
)


def check_client(written: bytes) -> None:
    """Zero or more responses, each of which llhttp can read (it cannot know which answer a HEAD)."""
    httptools.HttpResponseParser(Messages()).feed_data(written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b""))


def words(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(text.split())


targets = words(
    """/v1/completions /v1/chat/completions /v1/models /generate /v1/responses/r_1 /v1/responses/r_1/cancel /pause
    /v1/../pause /v1/%2e%2e/pause //generate /generate/ /generate;x /generate?x=1 /v1/responses/../pause /healthz
    /readyz /metrics /openapi.json /admin/weights /%61dmin/weights http://t/generate * /v1%2fcompletions /\xff
    /v1/responses/a%2fb"""
) | st.text("/v1.%2efcompltins;?#\\ ", max_size=20).map("/".__add__)
names = words(
    """Host Content-Length Transfer-Encoding Connection Expect Upgrade Authorization X-Request-Id Cookie Content-Type
    Keep-Alive TE Trailer content-length X-Hotswap-Version X-Hotswap-Min-Version X-Hotswap-Policy X-Hotswap-Finish-S
    X-Hotswap-Wait-S X-Hotswap-Cache-Scope X-Hotswap-Refused x-hotswap-version X-Hotswap-Priority X-Hotswap-Deadline-S
    X-Hotswap-Failover X-Hotswap-Resume X-Hotswap-Resumable X-Hotswap-Probe X-Session-Id Traceparent Tracestate"""
)
values = (
    words("t 2 3 0 chunked identity close keep-alive upgrade 100-continue websocket content-length 999999 -1")
    | words("1.5 keep finish abort public")
    | st.sampled_from(["gzip, chunked", "Bearer x", f"Bearer {ADMIN_KEY}", "a b", "", "\t", "2, 2"])
    | st.text("abc\r\n\t\0:,;=\xe9", max_size=8)
)
asked = st.tuples(
    words("Version Min-Version Policy Finish-S Wait-S").map("X-Hotswap-".__add__), words("1 2 abort keep")
)
bodies = st.sampled_from(
    [
        b"",
        b"{}",
        b"{}x",
        b'{"a":1}',
        b'{"hotswap":{"version":2}}',
        b'{"hotswap":{"policy":"abort"}}',
        b'{"hotswap":0}',
        b"2\r\n{}\r\n0\r\n\r\n",
        b"5\r\n{}\r\n",
        b"GET /pause HTTP/1.1\r\nHost: t\r\n\r\n",
    ]
) | st.binary(max_size=40)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    method = draw(words("GET POST PUT OPTIONS CONNECT DELETE get"))
    version = draw(words("HTTP/1.1 HTTP/1.1 HTTP/1.1 HTTP/1.0 HTTP/2.0 HTTP/1.9"))
    headers = draw(st.lists(st.tuples(names, values), max_size=5))
    body = draw(bodies)
    if draw(st.booleans()):
        headers = [("Host", "t"), ("Content-Length", str(len(body))), *draw(st.lists(asked, max_size=2))]
    head = f"{method} {draw(targets)} {version}\r\n" + "".join(f"{n}: {v}\r\n" for n, v in headers) + "\r\n"
    return head.encode("latin-1") + body


@st.composite
def pieces(draw: st.DrawFn) -> list[bytes]:
    raw = b"".join(draw(st.lists(requests() | st.binary(max_size=30), min_size=1, max_size=4)))
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    return [raw[a:b] for a, b in itertools.pairwise([0, *cuts, len(raw)]) if a < b]


def test_the_bench_forwards_what_is_public(bench: Bench) -> None:
    request = b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}"
    assert len(bench.feed([request % b"/generate"])[1]) == 1
    assert bench.feed([request % b"/pause"])[1] == []


REPLIES = st.sampled_from(
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok",
        b"HTTP/1.1 409 Conflict\r\nx-hotswap-refused: version\r\ncontent-length: 2\r\n\r\nno",
        b"nonsense",
    ]
)


@FUZZ
@given(pieces(), REPLIES)
@example([b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}" * 3], b"")
@example([b"\0"], b"")
@example(
    [b"POST /generate HTTP/1.1\r\nHost: t\r\nX-Hotswap-Version: 2\r\n", b'Content-Length: 14\r\n\r\n{"hotswap":{}}'],
    b"HTTP/1.1 409 Conflict\r\nx-hotswap-refused: version\r\ncontent-length: 2\r\n\r\nno",
)
def test_any_bytes_from_a_client(bench: Bench, raw: list[bytes], reply: bytes) -> None:
    written, sent = bench.feed(raw, reply)
    check_upstream(sent)
    check_client(written)
    assert bench.gateway.default.stats.inflight == 0
    assert bench.gateway.stats.refused["internal_error"] == 0  # a fault in a callback of ours
    assert not bench.gateway.clients
    assert bench.gateway.buffered == 0


@FUZZ
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_from_an_instance(raw: list[bytes]) -> None:
    relay = ResponseRelay(b"id", http10=False, keep_alive=True)
    written = b""
    try:
        for piece in raw:
            written += relay.feed(piece)
            if relay.complete:
                break
        written += relay.eof() if not relay.complete else b""
    except BadUpstream as error:
        written += relay.error_event(error, "/v1/completions") if relay.status else b""
    check_client(written)


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, bytes, list[int]]:
    """A valid response, its body, and where to cut it."""
    parts = draw(st.lists(st.binary(min_size=1, max_size=50), max_size=5))
    body = b"".join(parts)
    head = draw(st.sampled_from([b"", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"])) + b"HTTP/1.1 200 OK\r\n"
    if draw(st.booleans()):
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts)
        trailer = draw(st.sampled_from([b"", b"x-digest: 7\r\n"]))
        raw = head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"
    else:
        raw = head + b"content-length: %d\r\n\r\n" % len(body) + body
    return raw, body, sorted(draw(st.lists(st.integers(0, len(raw)), max_size=6)))


@FUZZ
@given(answers(), st.booleans())
def test_a_valid_answer_arrives_whole_however_it_is_cut(answer: tuple[bytes, bytes, list[int]], http10: bool) -> None:
    raw, body, cuts = answer
    relay = ResponseRelay(b"id", http10=http10, keep_alive=not http10)
    written = b"".join(relay.feed(raw[a:b]) for a, b in itertools.pairwise([0, *cuts, len(raw)]) if a < b)
    assert relay.complete
    assert relay.reusable
    seen = Messages()
    httptools.HttpResponseParser(seen).feed_data(written)
    assert seen.body == body
    assert (b"x-request-id", b"id") in seen.headers
    assert http10 or seen.complete == 1


CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n%b: 1\r\ntransfer-encoding: chunked\r\n\r\n" % RESUMABLE
)
FRAGMENTS = st.sampled_from(
    [b"5\r\nhello\r\n", b"c\r\ndata: {...}\n\n\r\n", b"a\r\n0123456789\r\n", b"5\r\nhello\r\n1", b"1", b"0",
     b"\r\n", b"\r", b"\n", b"a", b"A\r\n0123456789\r\n", b"05\r\nhello\r\n", b"5;x=1\r\nhello\r\n", b"5\r\nhello",
     b"+5\r\nhello\r\n", b"1\r\n\r\r\n", b"0\r\n", b"0\r\n\r\n", b"x: y\r\n",
     b"10\r\n5\r\nhello\r\n12345\r\n\r\n", b"4\r\nhello\r\n"]
)  # fmt: skip


def relayed(pieces: list[bytes], *, continued: bool) -> tuple[bytes, bool, bool]:
    """The body a client has after `pieces`, whether it is complete, and whether the relay refused one of them."""
    relay = ResponseRelay(b"id", http10=False, keep_alive=True)
    if continued:
        relay.memory = ReplayMemory(2**20, 2**18)
    written, refused = relay.feed(CHUNKED), False
    assert (relay.journal is not None) == continued
    try:
        for piece in pieces:
            if not relay.complete:  # what comes after the end costs the connection, and is not written
                written += relay.feed(piece)
    except BadUpstream:
        refused = True
    seen = Messages()
    httptools.HttpResponseParser(seen).feed_data(written)
    return seen.body, relay.complete, refused


@FUZZ
@given(st.lists(FRAGMENTS | st.binary(max_size=8), max_size=8), st.booleans())
def test_a_chunk_that_goes_through_as_it_is_means_what_the_parser_reads(pieces: list[bytes], continued: bool) -> None:
    found = relayed(pieces, continued=continued)
    with mock.patch("server.gateway.wire.relay.whole_chunk", return_value=0):
        assert relayed(pieces, continued=continued) == found


WHOLE = {b"5\r\nhello\r\n": 3, b"10\r\n" + b"x" * 16 + b"\r\n": 4, b"1\r\n\n\r\n": 3}
NOT_WHOLE = [
    b"", b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"5\r\nhello", b"4\r\nhello\r\n", b"6\r\nhello\r\n",
    b"A\r\n0123456789\r\n", b"05\r\nhello\r\n", b"+5\r\nhello\r\n", b" 5\r\nhello\r\n", b"5 \r\nhello\r\n",
    b"5\r\nhello\r\n0\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize(("data", "size"), [*WHOLE.items(), *((data, 0) for data in NOT_WHOLE)])
def test_exactly_one_chunk_is_known_by_its_line_and_others_are_left_to_the_parser(data: bytes, size: int) -> None:
    assert whole_chunk(data) == size
