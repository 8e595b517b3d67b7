"""One trace from the client through the gateway into vLLM's engine, as a collector sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live import VLLM_ARGS, LiveServer
from tests.server.gateway.observe.otlp_collector import Collector, Seen, collecting
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.broad]

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "3+4=", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/generate": {"prompt": "3+4=", "max_tokens": 3, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as c:
        yield c


@pytest.fixture(scope="module")
def traced(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[LiveServer]:
    server = LiveServer(
        checkpoints["a"], tmp_path_factory.mktemp("traced"), VLLM_ARGS, otlp_endpoint=collector.endpoint
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms after which the engine sends its spans
        with server.running():
            yield server


@pytest.mark.parametrize("route", BODIES)
def test_the_engines_span_is_the_gateways_child(traced: LiveServer, collector: Collector, route: str) -> None:
    collector.spans.clear()
    ids = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "x-request-id": f"trace-{route.rpartition('/')[2]}"}
    with traced.client.stream("POST", route, json={"model": traced.name} | BODIES[route], headers=ids) as answer:
        answer.read()
    assert answer.status_code == 200, answer.text
    wait_until(lambda: engine_spans(collector) != [] and gateway_spans(collector, route) != [], 60)
    (engine,), (gateway,) = engine_spans(collector), gateway_spans(collector, route)
    assert (gateway.trace_id, gateway.parent_id) == (TRACE, CLIENT)
    assert (engine.trace_id, engine.parent_id) == (TRACE, gateway.span_id)
    assert (gateway.resource["service.name"], engine.resource["service.name"]) == (
        "hotswap-gateway",
        "hotswap-instance",
    )
    assert gateway.attributes["hotswap.instance.id"] == "instance-0"
    assert gateway.attributes["hotswap.weight_version.last"] == traced.active()
    for ours, theirs in (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")):
        assert gateway.attributes[f"gen_ai.usage.{ours}"] == engine.attributes[f"gen_ai.usage.{theirs}"]


def test_what_is_not_sampled_is_not_sampled_anywhere(traced: LiveServer, collector: Collector) -> None:
    collector.spans.clear()
    for flags in ("00", "01"):
        ids = {"traceparent": f"00-{TRACE}-{CLIENT}-{flags}"}
        answer = traced.client.post("/generate", json=BODIES["/generate"] | {"stream": False}, headers=ids)
        assert answer.status_code == 200
    wait_until(lambda: engine_spans(collector) != [] and gateway_spans(collector, "/generate") != [], 60)
    assert (len(engine_spans(collector)), len(gateway_spans(collector, "/generate"))) == (1, 1)


def engine_spans(collector: Collector) -> list[Seen]:
    """Of requests of these tests: an instance asks itself a few before it serves, in traces of their own."""
    return [span for span in collector.named("llm_request") if span.trace_id == TRACE]


def gateway_spans(collector: Collector, route: str) -> list[Seen]:
    return collector.named(f"POST {route}")
