"""Traces: contexts taken from clients and passed on, spans that reach a collector, and nothing of it when it is off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import orjson
import pytest

from server.errors import ConfigError
from server.gateway.config import ObserveSettings, UpstreamSettings
from server.gateway.observe import context, logs
from server.gateway.observe.tracing import Span, SpanSender, traces_url
from tests.server.gateway.harness import KEYS, RunningGateway, post, running_gateway
from tests.server.gateway.observe.otlp_collector import Collector, collecting
from tests.server.gateway.upstream import Link, Received
from tests.waiting import eventually, wait_until
from weightsync.control.records import SwapPhase, SwapRecord

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"traceparent: 00-{TRACE}-{PARENT}-01\r\n"
UNSAMPLED = f"traceparent: 00-{TRACE}-{PARENT}-00\r\n"
USAGE = {"prompt_tokens": 5, "completion_tokens": 2}
SERVER, INTERNAL, ERROR = 2, 1, 2  # as OTLP numbers them
QUIET = UpstreamSettings(scrape_interval_s=3600.0)  # an instance gets the requests of the test alone


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as c:
        yield c


@pytest.fixture
def gateway(tmp_path: Path, collector: Collector) -> Iterator[RunningGateway]:
    settings = ObserveSettings(otlp_endpoint=collector.endpoint, trace_ratio=0.0)
    with running_gateway(tmp_path, upstream=QUIET, observe=settings, run_coordinator=False) as g:
        yield g


async def stream(link: Link, _: Received) -> None:
    """Two tokens, the second from other weights."""
    await link.send(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-hotswap-weight-version: 3\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    await link.chunk(b'data: {"choices":[{"text":"secret-answer"}],"weight_version":3}\n\n')
    last = {"choices": [{"text": "b", "finish_reason": "stop"}], "weight_version": 4, "hotswap_usage": USAGE}
    await link.chunk(b"data: " + orjson.dumps(last) + b"\n\ndata: [DONE]\n\n")
    await link.end()


def parent_of(received: Received) -> tuple[str, str, str]:
    """(trace id, span id, flags) that the instance was given."""
    version, trace_id, span_id, flags = received.headers["traceparent"].split("-")
    assert version == "00"
    return trace_id, span_id, flags


async def test_a_span_between_the_clients_and_the_instances(gateway: RunningGateway, collector: Collector) -> None:
    async with gateway.instance(stream) as up:
        headers = SAMPLED + "tracestate: vendor=1\r\nX-Request-Id: r-1\r\nAuthorization: Bearer secret-key-of-mine\r\n"
        await gateway.ask(post("/v1/chat/completions", {"messages": "secret-prompt"}, headers))
        await eventually(lambda: len(collector.spans) == 1)
    (span,) = collector.spans
    (received,) = up.requests
    assert parent_of(received) == (TRACE, span.span_id, "01")
    assert received.headers["tracestate"] == "vendor=1"
    assert (span.trace_id, span.parent_id, span.kind) == (TRACE, PARENT, SERVER)
    assert span.name == "POST /v1/chat/completions"
    assert span.resource["service.name"] == "hotswap-gateway"
    assert span.status != ERROR
    assert span.started <= span.ended
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "toy",
        "gen_ai.request.id": "r-1",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 2,
        "hotswap.instance.id": "i0",
        "hotswap.key.name": "anonymous",
        "hotswap.weight_version.first": 3,
        "hotswap.weight_version.last": 4,
    }
    assert expected.items() <= span.attributes.items()
    assert 0 <= span.attributes["gen_ai.latency.time_to_first_token"] <= span.attributes["gen_ai.latency.e2e"]
    assert not any(b"secret" in body for body in collector.bodies)


async def test_what_a_client_decided_holds(gateway: RunningGateway, collector: Collector) -> None:
    async with gateway.instance() as up:
        for headers in (UNSAMPLED, "", SAMPLED):
            await gateway.ask(post(headers=headers))
        await eventually(lambda: gateway.gateway.stats.spans["exported"] == 1)
    assert [parent_of(r)[2] for r in up.requests] == ["00", "00", "01"]
    assert parent_of(up.requests[0])[0] == parent_of(up.requests[2])[0] == TRACE
    assert parent_of(up.requests[0])[1] != PARENT
    assert collector.spans[0].span_id == parent_of(up.requests[2])[1]
    assert gateway.gateway.stats.spans == {"exported": 1, "dropped": 0, "failed": 0}


async def test_failures_are_spans_too(gateway: RunningGateway, collector: Collector) -> None:
    async def die(link: Link, _: Received) -> None:
        await link.sse_head()
        await link.chunk(b"data: {}\n\n")
        link.cut()

    async with gateway.instance(die):
        await gateway.ask(post(headers=SAMPLED))
        await eventually(lambda: len(collector.spans) == 1)
    (span,) = collector.spans
    assert (span.status, span.attributes["error.type"]) == (ERROR, "upstream_died")


async def test_a_collector_that_is_away_costs_spans_and_nothing_else(
    gateway: RunningGateway, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpanSender, "most", 3)
    collector.answer = 400  # not worth a retry, says OTLP
    collector.free.clear()
    spans = gateway.gateway.stats.spans
    async with gateway.instance():
        for _ in range(40):
            assert (await gateway.ask(post(headers=SAMPLED))).status == 200
        assert spans["dropped"] > 0
        collector.free.set()
        await eventually(lambda: spans["failed"] + spans["dropped"] == 40)
        collector.answer = 200
        await gateway.ask(post(headers=SAMPLED))
        await eventually(lambda: spans["exported"] == 1)
    assert len(collector.spans) == 1


async def test_without_an_endpoint_contexts_pass_as_they_came(tmp_path: Path) -> None:
    with running_gateway(tmp_path, upstream=QUIET) as gateway:
        async with gateway.instance() as up:
            await gateway.ask(post(headers=SAMPLED))
            await gateway.ask(post())
    assert up.requests[0].headers["traceparent"] == f"00-{TRACE}-{PARENT}-01"
    assert "traceparent" not in up.requests[1].headers
    assert gateway.gateway.stats.watchers == []


def test_swaps_are_spans_of_the_gateway_that_leads(
    gateway: RunningGateway, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SwapRecord(id="s1", target=4, phase="prepare", participants=("i0",), deadline=0.0, opened_at=1.0)
    swaps = gateway.gateway.default.stats.swaps

    def seen(swap_id: str, phase: str) -> bool:
        swap = gateway.gateway.default.fleet.swap
        return swap is not None and (swap.id, swap.phase) == (swap_id, phase)

    def carry_out(swap_id: str, last: SwapPhase) -> None:
        phases: tuple[SwapPhase, ...] = ("prepare", "commit", last)
        for phase in phases:
            gateway.store.put(KEYS.swap, replace(record, id=swap_id, phase=phase, reason="why").to_json())
            wait_until(partial(seen, swap_id, phase))

    carry_out("before", "done")
    carry_out("led by another", "done")
    gateway.register("http://127.0.0.1:1", state="TORN")  # seen when all is done that the last swap brings about
    monkeypatch.setattr(type(gateway.gateway.default.coordinator), "leads", property(lambda _: True))
    carry_out("s1", "aborted")
    wait_until(lambda: len(collector.spans) == 3)
    (swap,) = collector.named("swap")
    assert (swap.attributes["hotswap.swap.id"], swap.attributes["hotswap.weight_version"]) == ("s1", 4)
    assert (swap.kind, swap.status, swap.parent_id) == (INTERNAL, ERROR, "")
    assert swap.attributes["hotswap.swap.participants"] == ["i0"]
    children = [*collector.named("swap prepare"), *collector.named("swap commit")]
    assert {(c.trace_id, c.parent_id) for c in children} == {(swap.trace_id, swap.span_id)}
    assert swaps.ended == {"done": 2, "aborted": 1}
    assert sum(swaps.phases["prepare"].counts) == 2  # when the first one began nobody had looked yet


# the context


@pytest.mark.parametrize(
    "value",
    [
        "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1",
        "",
    ],
)
def test_an_invalid_parent_begins_a_trace(value: str) -> None:
    forward = f"accept: */*\r\ntraceparent: {value}\r\ntracestate: a=1\r\nuser-agent: u\r\n".encode()
    begun, lines = context.begin(forward, 1.0)
    assert (begun.parent_id, begun.sampled) == (0, True)
    assert begun.trace_id
    assert lines == b"accept: */*\r\nuser-agent: u\r\n" + begun.line


@pytest.mark.parametrize("version", ["01", "cc"])
def test_later_versions_are_read_as_far_as_they_are_known(version: str) -> None:
    begun, lines = context.begin(f"traceparent: {version}-{TRACE}-{PARENT}-03-what\r\n".encode(), 0.0)
    assert (f"{begun.trace_id:032x}", f"{begun.parent_id:016x}", begun.sampled) == (TRACE, PARENT, True)
    assert lines == begun.line
    assert begun.line == b"traceparent: 00-%b-%016x-01\r\n" % (TRACE.encode(), begun.span_id)


def test_two_parents_are_none() -> None:
    begun, lines = context.begin((SAMPLED + SAMPLED).encode(), 0.0)
    assert (begun.parent_id, begun.sampled) == (0, False)
    assert lines == begun.line


def test_a_share_of_traces_is_begun() -> None:
    begun = [context.begin(b"", 0.25)[0] for _ in range(4000)]
    assert 800 < sum(c.sampled for c in begun) < 1200
    assert len({c.trace_id for c in begun} | {c.span_id for c in begun}) == 8000


# the sender


def test_what_is_waiting_is_sent_at_the_end(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FLUSH_S", 60.0)
    counts = {"exported": 0, "dropped": 0, "failed": 0}
    sender = SpanSender(collector.endpoint, counts)
    for i in range(100):
        sender.put(i, lambda n: [Span(f"s{n}", n + 1, n + 1, 0, 1.0, 2.0, {"n": n})])
    sender.close()
    assert counts == {"exported": 100, "dropped": 0, "failed": 0}
    assert {span.name for span in collector.spans} == {f"s{i}" for i in range(100)}


def test_a_span_that_cannot_be_made_does_not_end_the_sender(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "FLUSH_S", 60.0)
    counts = {"exported": 0, "dropped": 0, "failed": 0}
    sender = SpanSender(collector.endpoint, counts)
    sender.put(0, lambda n: [Span("s", 1 // n, 1, 0, 1.0, 2.0, {})])
    wait_until(lambda: counts["failed"] == 1)
    sender.put(1, lambda n: [Span("s", 1 // n, 1, 0, 1.0, 2.0, {})])
    sender.close()
    assert counts == {"exported": 1, "dropped": 0, "failed": 1}


def test_the_url() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/own/path") == "https://c/own/path"


@pytest.mark.parametrize(
    "settings",
    [{"otlp_endpoint": "c:4318"}, {"otlp_endpoint": "grpc://c:4317"}, {"trace_ratio": 1.5}, {"access_log": -0.1}],
)
def test_wrong_settings(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--"):
        ObserveSettings(**settings)  # type: ignore[arg-type]
