"""Freedoms that HTTP leaves to clients change nothing: every forwarded route gives the answer of its plain request."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

import pytest

from server import api
from server.gateway.middleware import FEEDBACK, OPEN
from tests.server.gateway.harness import ADMIN, RunningGateway, get, post, request, running_gateway
from tests.server.gateway.upstream import Answer, answering
from tests.server.gateway.wire.test_proxy import PATIENT

OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
BODY = b'{"model": "toy"}'
ROUTES = [pytest.param(route, id=f"{route.method} {route.path}") for route in api.ROUTES]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), upstream=PATIENT) as running:
        yield running


def raw(route: api.Forwarded, *, headers: str = "", slash: str = "", body: bytes = BODY) -> bytes:
    path = route.path.replace("{id}", "resp_1") + slash
    headers += ADMIN if route.admin else ""
    return post(path, body if route.body else b"", headers) if route.method == "POST" else get(path, headers)


def chunked(head_and_body: bytes) -> bytes:
    head, _, body = head_and_body.partition(b"\r\n\r\n")
    head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
    return b"%b\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (head, len(body), body)


def is_dated(answer: Answer) -> bool:
    return parsedate_to_datetime(answer.headers["date"]).tzinfo is not None


@pytest.mark.parametrize("route", ROUTES)
async def test_every_route_forwards_the_same_request(gateway: RunningGateway, route: api.Forwarded) -> None:
    ways = {
        "an offer of HTTP/2": raw(route, headers=OFFER),
        "an offer of websockets": raw(route, headers="Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"),
        "an offer in HTTP/1.0": raw(route, headers=OFFER).replace(b"HTTP/1.1", b"HTTP/1.0"),
        "a slash at the end": raw(route, slash="/"),
        "a slash before a query": raw(route, slash="/?x=1"),
    }
    if route.method == "POST" and route.body:
        ways["an offer before chunks"] = chunked(raw(route, headers=OFFER))
        ways["a byte order mark"] = raw(route, body=BOM_UTF8 + BODY)
    async with gateway.instance(answering()) as up:
        for way, sent in {"": raw(route), **ways}.items():
            async with gateway.client(admin=route.admin) as client:
                client.writer.write(sent[:-1])  # its body comes later
                await client.writer.drain()
                client.writer.write(sent[-1:])
                answer = await client.answer()
                assert (answer.status, answer.body) == (200, b'{"ok":true}'), way
                assert is_dated(answer), way
                if "1.0" not in way:  # the connection goes on with the next request
                    client.writer.write(raw(route, headers=OFFER))
                    assert (await client.answer()).status == 200
        path = up.requests[0].target
        plain = BODY if route.method == "POST" and route.body else b""
        expected = {"?x=1": path + "?x=1"} if route.query else {}
        for seen in up.requests:
            assert seen.target in (path, *expected.values())
            assert (seen.method, seen.body) == (route.method, plain)
            assert not {"upgrade", "http2-settings", "connection"} & seen.headers.keys()


async def test_what_connection_names_is_not_forwarded(gateway: RunningGateway) -> None:
    """RFC 9110, 7.6.1. Their own spelling, in several lines, and the ones that the gateway adds by itself stay."""
    lines = "Traceparent: 00-1\r\nBaggage: a=1\r\nX-Session-Id: s\r\nAccept: x/y\r\nUser-Agent: u\r\n"
    options = "Connection: keep-alive, Traceparent\r\nConnection: BAGGAGE,x-session-id, host, content-length\r\n"
    async with gateway.instance(answering()) as up:
        assert (await gateway.ask(post(body=BODY, headers=lines + options))).status == 200
        assert (await gateway.ask(post(body=BODY, headers=lines))).status == 200
    seen, plain = (one.headers for one in up.requests)
    assert plain.keys() - seen.keys() == {"traceparent", "baggage", "x-session-id"}
    assert (seen["accept"], seen["user-agent"]) == ("x/y", "u")


@pytest.mark.parametrize("path", sorted(OPEN))
async def test_head_is_answered_as_get_without_its_body(gateway: RunningGateway, path: str) -> None:
    async with gateway.instance(answering()):
        async with gateway.client(get(path)) as client:
            plain = await client.answer()
        asked = f"HEAD {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n".encode()
        async with gateway.client(asked) as client:
            head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert (int(head.split()[1]), body) == (plain.status, b"")
    assert plain.status == 200


@pytest.mark.parametrize(
    "sent",
    [get("/healthz"), get("/healthz/"), get("/healthz", OFFER), get("/no/such"), get("/v1/completions"), b"\0\r\n\r\n"],
    ids=["app", "slash", "offer", "not found", "wrong method", "not HTTP"],
)
async def test_every_answer_has_a_date(gateway: RunningGateway, sent: bytes) -> None:
    assert is_dated(await gateway.ask(sent))


async def test_an_instance_without_a_clock_gets_one_date_and_one_with_keeps_its_own(gateway: RunningGateway) -> None:
    theirs = "Thu, 01 Jan 2026 00:00:00 GMT"
    sent = post(body=BODY, headers="Connection: close\r\n")
    async with (
        gateway.instance(answering(extra=f"Date: {theirs}\r\n".encode())),
        gateway.client(sent) as client,
    ):
        head = (await client.rest()).partition(b"\r\n\r\n")[0].lower()
    assert head.count(b"\r\ndate:") == 1
    assert theirs.lower().encode() in head


async def test_the_app_takes_them_too(gateway: RunningGateway) -> None:
    for headers, slash, mark in ((OFFER, "", b""), ("", "/", b""), ("", "", BOM_UTF8)):
        body = mark + b'{"id": "none", "rating": "up"}'
        assert (await gateway.ask(post(FEEDBACK + slash, body, headers))).refusal == (404, "unknown_answer")
        body = mark + b'{"name": "x", "scopes": ["viewer"]}'
        made = await gateway.ask(request("POST", "/admin/keys" + slash, body, ADMIN + headers), admin=True)
        assert made.status == 200


async def test_a_tunnel_is_refused(gateway: RunningGateway) -> None:
    assert (await gateway.ask(b"CONNECT t:80 HTTP/1.1\r\nHost: t\r\n\r\n")).refusal == (400, "connect_refused")
