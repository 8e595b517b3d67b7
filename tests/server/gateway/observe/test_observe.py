"""Health, readiness, metrics and the view of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.simulation.clock import Clock, simulated
from loadtest.simulation.store import Client, ModelStore
from server.gateway import HealthSettings, UpstreamSettings
from server.gateway.fleet.instance import Signals, parse
from server.gateway.fleet.view import Fleet
from server.gateway.observe.stats import Histogram, Stats
from tests.server.gateway.harness import KEYS, RunningGateway, get, post, running_gateway
from tests.server.gateway.upstream import Link, Moody, Received, upstream
from tests.waiting import eventually
from weightsync.control.records import ActiveRecord, InstanceRecord, SwapRecord

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="toy"} 3.0
vllm:num_requests_running{engine="1",model_name="toy"} 2.0
vllm:num_requests_waiting{engine="0",model_name="toy"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:prefix_cache_queries_total{engine="0"} 1.0e+06
vllm:prefix_cache_queries_created{engine="0"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0"} 7.0
vllm:num_preemptions_total 1.0
vllm:num_preemptions_total{engine="1"} nonsense
python_info 1.0
"""
SIGNALS = Signals(5.0, 4.0, 0.5, 1e6, 7.0, 1.0)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    settings = UpstreamSettings(scrape_interval_s=0.05, scrape_timeout_s=10.0, max_idle_s=3600.0)
    # Without a coordinator: the swap records of these tests are their own.
    with running_gateway(tmp_path, upstream=settings, run_coordinator=False) as g:
        yield g


async def samples(gateway: RunningGateway) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values -> value, as Prometheus' own parser reads the page."""
    answer = await gateway.ask(get("/metrics"))
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            labels = tuple(value for name, value in sample.labels.items() if name != "model")
            found.setdefault(sample.name.removeprefix("hotswap_"), {})[labels] = sample.value
    return found


async def ready(gateway: RunningGateway) -> tuple[int, str]:
    answer = await gateway.ask(get("/readyz"))
    body = orjson.loads(answer.body)
    return answer.status, body["error"]["code"] if "error" in body else body["status"]


async def test_ready_means_a_committed_version_that_answers(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.gateway.app.PROBE_TIMEOUT_S", 10.0)
    monkeypatch.setattr("server.gateway.fleet.scrape.HOLDS_S", 0.0)
    vllm = Moody()
    assert (await gateway.ask(get("/healthz"))).status == 200
    assert await ready(gateway) == (503, "no_instance")
    async with gateway.instance(vllm, state="STARTING") as up:
        assert await ready(gateway) == (503, "no_instance")
        gateway.register(up, active_version=None)  # dummy weights
        assert await ready(gateway) == (503, "no_instance")
        gateway.register(up)
        assert await ready(gateway) == (200, "ready")
        vllm.health = b"503 Service Unavailable"
        assert await ready(gateway) == (503, "not_answering")
        vllm.health, vllm.silent = b"200 OK", True
        monkeypatch.setattr("server.gateway.app.PROBE_TIMEOUT_S", 0.2)
        assert await ready(gateway) == (503, "not_answering")
        vllm.silent = False
        gateway.register(up, state="TORN")
        assert await ready(gateway) == (503, "no_instance")
        assert (await gateway.ask(get("/healthz"))).status == 200


ALSO = {
    "gateway_requests_in_flight", "gateway_request_duration_seconds_count", "gateway_upstream_connect_errors_total",
    "gateway_stale_retries_total", "gateway_store_up", "swap_duration_seconds_sum", "instance_in_flight",
    "instance_num_requests_waiting", "instance_prefix_cache_queries_total", "instance_prefix_cache_hits_total",
    "instance_num_preemptions_total", "process_resident_memory_bytes",
}  # fmt: skip


async def test_metrics_count_what_happens(gateway: RunningGateway) -> None:
    active = ActiveRecord(version=4, epoch=9, previous=3, swap_id="s", committed_at=0.0)
    swap = SwapRecord(id="s", target=4, phase="prepare", participants=("i0",), deadline=0.0, opened_at=0.0)
    async with gateway.instance(Moody(page=PAGE), active_version=4, active_epoch=9):
        gateway.register("http://127.0.0.1:1", "dead", state="TORN")
        gateway.store.put(KEYS.active, active.to_json())
        for phase in ("prepare", "commit", "done"):
            gateway.store.put(KEYS.swap, replace(swap, phase=phase).to_json())
        for _ in range(3):
            await gateway.ask(post(body={"prompt": "x"}))
        await gateway.ask(post(body=b"{"))
        await eventually(lambda: gateway.gateway.default.fleet.instances["i0"].signals == SIGNALS)
        await eventually(lambda: gateway.gateway.default.stats.swaps.ended["done"] == 1)
        found = await samples(gateway)
    assert found.keys() >= ALSO
    assert found["gateway_time_to_first_byte_seconds_bucket"]["+Inf",] == 3.0
    assert found["instance_state"].items() >= {("i0", "SERVING"): 1.0, ("dead", "TORN"): 1.0}.items()
    assert sum(found["instance_state"].values()) == 2.0
    assert found["instance_active_version"]["i0",] == 4.0
    expected = {
        "gateway_requests_total": {("/v1/completions", "200"): 3.0},
        "gateway_refused_total": {("invalid_json",): 1.0},
        "gateway_received_bytes_total": {(): 3.0 * len(b'{"prompt":"x"}')},
        "gateway_sent_bytes_total": {(): 3.0 * len(b'{"ok":true}')},
        "active_version": {(): 4.0},
        "active_epoch": {(): 9.0},
        "swaps_total": {("done",): 1.0, ("aborted",): 0.0},
        "instance_up": {("i0",): 1.0, ("dead",): 0.0},
        "instance_num_requests_running": {("i0",): 5.0},
        "instance_kv_cache_usage": {("i0",): 0.5},
    }
    assert {name: found[name] for name in expected} == expected


async def test_a_silent_instance_loses_its_signals(tmp_path: Path) -> None:
    vllm = Moody()
    health = HealthSettings(probe_timeout_s=0.3)
    settings = UpstreamSettings(scrape_interval_s=0.05, scrape_timeout_s=0.3, health=health)
    with running_gateway(tmp_path, upstream=settings) as gateway:
        async with gateway.instance(vllm):
            await eventually(lambda: gateway.gateway.default.fleet.instances["i0"].signals is not None)
            vllm.silent = True
            await eventually(lambda: gateway.gateway.default.fleet.instances["i0"].signals is None)
            assert (await samples(gateway))["instance_up"] == {("i0",): 0.0}


async def test_app_errors_have_the_shape_too(gateway: RunningGateway) -> None:
    for raw, status, code in (
        (get("/nothing"), 404, "not_found"),
        (post("/healthz"), 405, "method_not_allowed"),
        (get("/docs"), 404, "not_found"),
    ):
        answer = await gateway.ask(raw)
        error = orjson.loads(answer.body)["error"]
        assert (answer.status, error["code"]) == (status, code)
        assert answer.headers["x-request-id"]
    assert (await gateway.ask(get("/healthz", "X-Request-Id: mine\r\n"))).headers["x-request-id"] == "mine"


def test_signals_of_a_page() -> None:
    assert parse(PAGE) == SIGNALS
    assert parse(b"") == Signals()
    assert parse(b"vllm:num_requests_running\nvllm:\n\xff\xfe") == Signals()


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.sum == 12.0


# the view of the fleet


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@simulated
async def test_the_last_view_serves_while_the_store_is_away(clock: Clock) -> None:
    store, stats = ModelStore(clock), Stats()
    client = Client(store)
    fleet = Fleet(client, "toy", UpstreamSettings(), stats)
    run = asyncio.create_task(fleet.run())
    a, b = (InstanceRecord(name, "http://127.0.0.1:9", "SERVING", active_version=1) for name in "ab")
    store.put(KEYS.instance("a"), a.to_json())
    await eventually(lambda: fleet.pick() is not None)
    client.away = True
    store.txn({}, {KEYS.instance("b"): b.to_json(), KEYS.instance("a"): None})
    await eventually(lambda: not stats.store_up)
    assert [i.id for i in fleet.serving] == ["a"]
    client.away = False
    await eventually(lambda: [i.id for i in fleet.serving] == ["b"])
    assert stats.store_up
    run.cancel()


async def test_a_record_that_cannot_be_read_is_ignored(gateway: RunningGateway) -> None:
    async with gateway.instance(instance_id="good") as up:
        for key, value in (
            ("x1", b"{"),
            ("x2", orjson.dumps({"id": "x2"})),
            ("x3", InstanceRecord("x3", "unix:/tmp/x", "SERVING").to_json()),
            ("x4", InstanceRecord("x4", "http://h:99999", "SERVING").to_json()),
        ):
            gateway.store.put(KEYS.instance(key), value)
        gateway.register(up, "last")
        assert set(gateway.gateway.default.fleet.instances) == {"good", "last"}
        assert (await gateway.ask(post())).status == 200


async def test_connections_an_instance_closes_leave_the_pool(gateway: RunningGateway) -> None:
    async def handler(link: Link, received: Received) -> None:
        await link.json()
        if received.method == "POST":
            link.writer.close()

    async with gateway.instance(handler) as up:
        pool = gateway.gateway.default.fleet.instances["i0"].pool
        for _ in range(5):
            assert (await gateway.ask(post())).status == 200
        gateway.register(up, state="DRAINING")  # no scrapes from here on
        await eventually(lambda: all(not link.closed for link in pool._idle))


async def test_an_instance_that_moves_is_followed(gateway: RunningGateway) -> None:
    async with gateway.instance(), upstream() as new:
        assert (await gateway.ask(post())).status == 200
        gateway.register(new)
        assert (await gateway.ask(post())).status == 200
    assert [r.target for r in new.requests if r.method == "POST"] == ["/v1/completions"]


async def test_a_lease_that_ends_takes_its_instance_out(gateway: RunningGateway) -> None:
    record = InstanceRecord("leased", "http://127.0.0.1:9", "SERVING")
    lease = gateway.store.grant_lease(0.3)
    gateway.store.put(KEYS.instance("leased"), record.to_json(), lease)
    await eventually(lambda: "leased" in gateway.gateway.default.fleet.instances)
    await eventually(lambda: "leased" not in gateway.gateway.default.fleet.instances)
