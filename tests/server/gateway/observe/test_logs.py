"""Log lines: one a request, with ids and counts, and nowhere a key, a prompt or an answer, whatever goes wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from server.errors import HttpError
from server.gateway.observe import logs
from server.gateway.observe.logs import AccessLog, JsonFormatter, LineWriter, json_line, text_line
from server.gateway.observe.stats import Finished, of_refusal
from server.gateway.wire.bodies import Usage
from tests.server.gateway.harness import KEYS, GatewayProcess, gateway_process, get, post, private
from tests.server.gateway.observe.otlp_collector import Collector, collecting
from tests.server.gateway.upstream import Link, Received, upstream
from tests.waiting import eventually, wait_until
from weightsync.control.records import InstanceRecord

# Secrets that must not be found anywhere but on their way through.
KEY, OTHER_KEY, ADMIN_KEY = "sk-planted-inference-key", "sk-planted-key-nobody-issued", "planted-admin-key-0123"
PROMPT, REPLY, COOKIE, QUERY = "planted prompt words", "planted reply words", "planted-cookie", "planted-query"
PLANTED = (KEY, OTHER_KEY, ADMIN_KEY, PROMPT, REPLY, COOKIE, QUERY, "planted")


def access(gateway: GatewayProcess, route: str | None = None) -> list[dict[str, Any]]:
    written, _, _ = gateway.log.read_text().rpartition("\n")  # the last line may not be whole yet
    lines = [orjson.loads(line) for line in written.splitlines()]
    found = [line for line in lines if line["logger"] == "hotswap.access"]
    return [line for line in found if route is None or line["route"] == route]


@contextmanager
def process(directory: Path, *options: str) -> Iterator[GatewayProcess]:
    keys = private(directory / "api.keys", KEY + " team-a\n")
    given = ("--api-key-file", str(keys), "--hold", "0", "--read-timeout", "2", *options)
    with gateway_process(directory, *given, key=ADMIN_KEY) as running:
        yield running


async def behave(link: Link, received: Received) -> None:
    """An instance that does what the prompt's last word says."""
    how = received.headers.get("x-session-id", "")
    if received.target in ("/metrics", "/health") or received.method == "GET":
        await link.json()
    elif how == "stream":
        await link.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-hotswap-weight-version: 3\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        chunk = {"text": REPLY, "weight_version": 4, "hotswap_usage": {"prompt_tokens": 5, "completion_tokens": 2}}
        await link.chunk(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await link.end()
    elif how == "break":
        await link.sse_head()
        await link.chunk(b"data: " + REPLY.encode() + b"\n\n")
        link.cut()
    elif how == "nonsense":
        await link.send(REPLY.encode() + b"\r\n\r\n")
    elif how == "silent":
        await link.gone()
    elif how == "error":
        await link.json(orjson.dumps({"error": {"message": REPLY}}), b"500 Internal Server Error")
    else:
        await link.json(orjson.dumps({"text": REPLY, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}))


HOWS = ("whole", "stream", "break", "nonsense", "silent", "error")


def hostile() -> Iterator[bytes]:
    """Requests that come to nothing in as many ways as there are."""
    body = orjson.dumps({"prompt": PROMPT})
    good = f"Authorization: Bearer {KEY}\r\nCookie: {COOKIE}\r\n"
    yield post(body=body, headers=f"Authorization: Bearer {OTHER_KEY}\r\n")
    yield post(body=body, headers=f"x-api-key: {OTHER_KEY}\r\n")
    yield post(body=body, headers=f"Authorization: {OTHER_KEY}\r\n")
    yield post(body=body)
    yield post(body=body[:-3], headers=good)
    yield post(body=PROMPT.encode(), headers=good)
    yield post(body=orjson.dumps({"prompt": PROMPT, "hotswap": {PROMPT: PROMPT}}), headers=good)
    yield post(body=body, headers=good + f"x-hotswap-policy: {QUERY}\r\n")
    yield post(body=body, headers=good + f"x-hotswap-min-version: 99\r\nX-Nonsense: {QUERY}\r\n")
    yield post(body=body, headers=good + "Transfer-Encoding: chunked\r\n")
    yield post(f"/v1/{QUERY}", body, good)
    yield post(f"/v1/completions?key={QUERY}", body, good)
    yield get(f"/{QUERY}?api_key={QUERY}", good)
    yield get("/v1/completions", good)
    yield f"GET /{QUERY} {QUERY}\r\n\r\n".encode()
    yield f"{QUERY.upper()} / HTTP/1.1\r\nHost: t\r\n\r\n".encode()
    yield get("/v1/models", f"Authorization: Bearer {KEY}\r\nConnection: {QUERY}\r\n")


def hostile_to_admin() -> Iterator[bytes]:
    body = orjson.dumps({"path": f"/{QUERY}", "prompt": PROMPT})
    good = f"Authorization: Bearer {ADMIN_KEY}\r\n"
    yield post("/admin/weights", body, good)
    yield post("/admin/weights", body, f"Authorization: Bearer {OTHER_KEY}\r\n")
    yield post(f"/admin/{QUERY}", body, good)
    yield post("/admin/weights/activate", orjson.dumps({QUERY: PROMPT}), good)
    yield get("/admin/instances", good)


async def everything(gateway: GatewayProcess) -> None:
    """All paths; each ends in an answer or a closed connection."""
    async with upstream(behave) as up:
        record = InstanceRecord("i0", up.address, "SERVING", active_version=3, active_epoch=1)
        gateway.store.put(KEYS.instance("i0"), record.to_json())
        headers = f"Authorization: Bearer {KEY}\r\nCookie: {COOKIE}\r\n"

        async def is_ready() -> bool:
            return (await gateway.ask(post(headers=headers + "X-Session-Id: whole\r\n"))).status == 200

        async def ask(how: str) -> None:
            body = orjson.dumps({"prompt": f"{PROMPT} {how}"})
            wishes = f"X-Request-Id: r-{how}\r\nX-Session-Id: {how}\r\n"
            await gateway.ask(post("/v1/completions", body, headers + wishes))

        await eventually(is_ready)
        silent = asyncio.create_task(ask("silent"))  # the others take place while it waits
        for how in HOWS:
            if how != "silent":
                await ask(how)
        for raw in hostile():
            await gateway.ask(raw)
        await silent
        for raw in hostile_to_admin():
            await gateway.ask(raw, admin=True)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as c:
        yield c


async def test_json_lines_say_what_became_of_every_request(tmp_path: Path, collector: Collector) -> None:
    options = ("--log-format", "json", "--log-level", "debug", "--otlp-endpoint", collector.endpoint)
    with process(tmp_path, *options) as gateway:
        await everything(gateway)
        metrics = (await gateway.ask(get("/metrics"))).body.decode()
        wait_until(lambda: len(access(gateway, "/admin/instances")) == 1)
        lines = {line["request_id"]: line for line in access(gateway)}
        statuses = {how: lines[f"r-{how}"]["status"] for how in HOWS}
        assert statuses == {"whole": 200, "stream": 200, "break": 200, "nonsense": 502, "silent": 504, "error": 500}
        streamed = lines["r-stream"]
        expected = {
            "level": "INFO", "method": "POST", "route": "/v1/completions", "key": "team-a", "instance": "i0",
            "weight_version_first": 3, "weight_version_last": 4, "stream": True, "prompt_tokens": 5,
            "completion_tokens": 2, "tokens_exact": True,
        }  # fmt: skip
        assert expected.items() <= streamed.items()
        assert 0 <= streamed["ttft_s"] <= streamed["duration_s"]
        wait_until(lambda: any(s.trace_id == streamed["trace_id"] for s in collector.spans))
        assert lines["r-break"]["code"] == "upstream_died"
        assert lines["r-silent"]["code"] == "upstream_timeout"
        assert "-" in {line["route"] for line in access(gateway) if line["status"] == 404}
        codes = {line.get("code") for line in access(gateway)}
        assert codes >= {"invalid_api_key", "missing_api_key", "invalid_json", "malformed_request"}
    assert_clean(gateway.log.read_text(), metrics, *(body.decode("latin-1") for body in collector.bodies))
    assert [json.loads(line) for line in gateway.log.read_text().splitlines()]


async def test_text_lines_do_too(tmp_path: Path) -> None:
    with process(tmp_path, "--access-log", "1", "--log-level", "debug") as gateway:
        await everything(gateway)
        wait_until(lambda: "route=/admin/instances" in gateway.log.read_text())
    assert re.search(
        r"INFO hotswap.access: request_id=r-stream method=POST route=/v1/completions .*", gateway.log.read_text()
    )
    assert_clean(gateway.log.read_text())


async def test_without_an_access_log_only_faults_are_told(tmp_path: Path) -> None:
    with process(tmp_path) as gateway:
        await everything(gateway)
    assert "hotswap.access" not in gateway.log.read_text()
    assert "r-nonsense" in gateway.log.read_text()
    assert_clean(gateway.log.read_text())


def assert_clean(*pages: str) -> None:
    for page in pages:
        found = [secret for secret in PLANTED if secret in page]
        assert not found, next(line for line in page.splitlines() if found[0] in line)


# lines


FINISHED = Finished(
    "r1", "POST", "/v1/completions", 200, None, 'team "a"', 1.5, 0.25, ttft_s=0.1, usage=Usage(0, 7, exact=False),
    model="org/small",
)  # fmt: skip


def test_both_kinds_of_line_say_the_same() -> None:
    line = orjson.loads(json_line(FINISHED))
    assert line["time"] == "1970-01-01T00:00:01.500Z"
    assert (line["completion_tokens"], line["tokens_exact"], "prompt_tokens" in line) == (7, False, False)
    words = text_line(FINISHED).decode()
    assert words.startswith("1970-01-01T00:00:01.500Z INFO hotswap.access: request_id=r1 method=POST")
    assert r'key="team \"a\""' in words
    assert (line["model"], " model=org/small " in words) == ("org/small", True)
    refused = orjson.loads(json_line(of_refusal(b"r2", b"GET", "-", "-", HttpError(400, "No.", code="bad_head"))))
    assert "model" not in refused


def test_a_record_as_json() -> None:
    try:
        raise ValueError("x\ny")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "it %s", ("failed",), sys.exc_info())
    line = orjson.loads(JsonFormatter().format(record))
    assert (line["level"], line["logger"], line["message"]) == ("ERROR", "a", "it failed")
    assert line["exception"].endswith("ValueError: x\ny")


def test_a_share_of_requests_and_all_that_failed() -> None:
    taken: list[Finished] = []
    writer = SimpleNamespace(put=lambda record, _: taken.append(record))
    log = AccessLog(writer, 0.25, "json")  # type: ignore[arg-type]
    for _ in range(4000):
        log.end(FINISHED)
    assert 800 < len(taken) < 1200
    failed = Finished("r2", "POST", "/generate", 503, "no_instance", "k", 1.0, 0.0)
    log.end(failed)
    assert taken[-1] is failed


def test_a_line_that_cannot_be_made_does_not_end_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FLUSH_S", 60.0)
    reading, writing = os.pipe()
    writer = LineWriter(writing)
    for record in (b"before", 7, b"after"):
        writer.put(record, bytes.upper)  # type: ignore[arg-type]
    writer.flush()
    first, broken, last = os.read(reading, 2**16).splitlines()
    assert (first, last) == (b"BEFORE", b"AFTER")
    assert broken.startswith(b"a log line could not be made: TypeError")
    writer.close()
    os.close(reading)
    os.close(writing)


def test_a_reader_that_stands_still_costs_lines_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineWriter, "most", 100)
    reading, writing = os.pipe()
    writer = LineWriter(writing)
    big = b"x" * 10_000
    for _ in range(1000):
        writer.put(big, bytes)
    assert writer.dropped >= 1000 - 100 - 64 - 2**16 // len(big)
    kept = 1000 - writer.dropped
    read = threading.Thread(target=writer.close)
    read.start()
    data = b""
    while data.count(b"\n") < kept:
        data += os.read(reading, 2**16)
    read.join()
    assert data == (big + b"\n") * kept
    os.close(reading)
    os.close(writing)
