"""Health, readiness, the view of the fleet, and metrics from the bytes and records they are made of."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.simulation.clock import Clock, simulated
from loadtest.simulation.store import Client, ModelStore
from server.gateway import HealthSettings, UpstreamSettings
from server.gateway.fleet.instance import Signals, parse
from server.gateway.fleet.view import Fleet
from server.gateway.observe.stats import Histogram, Stats
from tests.server.gateway.harness import KEYS, RunningGateway, get, post
from tests.server.gateway.upstream import Link, Moody, Received, upstream
from tests.waiting import eventually, wait_until
from weightsync.control.records import ActiveRecord, DiskRecord, InstanceRecord, SwapPhase, SwapRecord

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
UPSTREAM = UpstreamSettings(scrape_interval_s=3600.0)
SCRAPING = UpstreamSettings(scrape_interval_s=0.05, scrape_timeout_s=10.0, max_idle_s=3600.0)
IMPATIENT = UpstreamSettings(scrape_interval_s=0.05, scrape_timeout_s=0.3, health=HealthSettings(probe_timeout_s=0.3))


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


@pytest.mark.parametrize("gateway", [SCRAPING], indirect=True)
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


@pytest.mark.parametrize("gateway", [SCRAPING], indirect=True)
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


@pytest.mark.parametrize("gateway", [IMPATIENT], indirect=True)
async def test_a_silent_instance_loses_its_signals(gateway: RunningGateway) -> None:
    vllm = Moody()
    async with gateway.instance(vllm):
        await eventually(lambda: gateway.gateway.default.fleet.instances["i0"].signals is not None)
        vllm.silent = True
        await eventually(lambda: gateway.gateway.default.fleet.instances["i0"].signals is None)
        assert (await samples(gateway))["instance_up"] == {("i0",): 0.0}


async def test_app_errors_have_the_shape_too(gateway: RunningGateway) -> None:
    for raw, refusal in ((get("/nothing"), (404, "not_found")), (post("/healthz"), (405, "method_not_allowed"))):
        answer = await gateway.ask(raw)
        assert answer.refusal == refusal
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
    async def handler(link: Link, _: Received) -> None:
        await link.json()
        link.writer.close()

    async with gateway.instance(handler):
        for _ in range(5):
            assert (await gateway.ask(post())).status == 200
        await eventually(lambda: gateway.gateway.default.fleet.instances["i0"].pool.idle == 0)


async def test_an_instance_that_moves_is_followed(gateway: RunningGateway) -> None:
    async with gateway.instance(), upstream() as new:
        assert (await gateway.ask(post())).status == 200
        gateway.register(new)
        assert (await gateway.ask(post())).status == 200
    assert [r.target for r in new.requests] == ["/v1/completions"]


# counts of streams, swaps and disks


class Stepwise:
    """Sends a piece, and the next one when it is told that the client has this one."""

    def __init__(self, *pieces: bytes, cut: bool = False) -> None:
        self.pieces, self.cut = pieces, cut
        self.taken = asyncio.Semaphore(0)

    async def __call__(self, link: Link, _: Received) -> None:
        await link.sse_head()
        for piece in self.pieces:
            await link.chunk(piece)
            await self.taken.acquire()
        if self.cut:
            link.cut()
        else:
            await link.end()


async def read_stepwise(gateway: RunningGateway, instance: Stepwise, path: str) -> None:
    """Asks `path`, and takes the answer piece by piece."""
    reader, writer = await gateway.connect()
    writer.write(post(path))
    for piece in instance.pieces:
        await asyncio.wait_for(reader.readuntil(piece), 60)
        instance.taken.release()
    await asyncio.wait_for(reader.read(16), 60)
    writer.close()
    await eventually(lambda: gateway.gateway.default.stats.inflight == 0)


async def test_a_stream_is_counted_token_by_token(gateway: RunningGateway) -> None:
    last = orjson.dumps({"choices": [], "hotswap_usage": {"prompt_tokens": 11, "completion_tokens": 3}})
    instance = Stepwise(b"data: 1\n\n", b"data: 2\n\n", b"data: " + last + b"\n\n")
    async with gateway.instance(instance):
        await read_stepwise(gateway, instance, "/v1/completions")
    found = await samples(gateway)
    assert found["gateway_time_to_first_token_seconds_count"][()] == 1
    assert found["gateway_time_to_first_byte_seconds_count"][()] == 1
    # The end of the body, too, where it came by itself.
    assert found["gateway_inter_token_latency_seconds_count"][()] in (2, 3)
    assert found["gateway_request_duration_seconds_count"][()] == 1
    route = ("/v1/completions",)
    assert found["gateway_prompt_tokens_total"] == {route: 11}
    assert found["gateway_completion_tokens_total"] == {route: 3}
    assert found["gateway_estimated_completion_tokens_total"] == {route: 0}


async def test_tokens_of_a_broken_stream_stand_apart(gateway: RunningGateway) -> None:
    instance = Stepwise(*(b"data: %d\n\n" % i for i in range(4)), cut=True)
    async with gateway.instance(instance):
        await read_stepwise(gateway, instance, "/v1/chat/completions")
    found = await samples(gateway)
    assert found["gateway_completion_tokens_total"] == {("/v1/chat/completions",): 0}
    assert found["gateway_estimated_completion_tokens_total"] == {("/v1/chat/completions",): 4}


async def test_a_whole_answer_has_no_gaps_and_no_first_token(gateway: RunningGateway) -> None:
    async def whole(link: Link, received: Received) -> None:
        await link.json(orjson.dumps({"usage": {"prompt_tokens": 2, "completion_tokens": 1}, "data": received.target}))

    async with gateway.instance(whole):
        for raw in (post(), post("/v1/embeddings"), get("/v1/models"), get("/v1/responses/r1")):
            await gateway.ask(raw)
    found = await samples(gateway)
    assert found["gateway_time_to_first_byte_seconds_count"][()] == 4
    assert found["gateway_time_to_first_token_seconds_count"][()] == 0
    assert found["gateway_inter_token_latency_seconds_count"][()] == 0
    # A fetch does not count the tokens of an earlier generation a second time.
    assert found["gateway_prompt_tokens_total"] == {("/v1/completions",): 2, ("/v1/embeddings",): 2}


async def test_phases_and_stalls_of_swaps(gateway: RunningGateway) -> None:
    record = SwapRecord(id="s0", target=2, phase="done", participants=("i0",), deadline=0.0, opened_at=0.0)

    def seen(swap: SwapRecord) -> bool:
        return gateway.gateway.default.fleet.swap == swap

    def put(swap_id: str, phase: SwapPhase) -> None:
        swap = replace(record, id=swap_id, phase=phase)
        gateway.store.put(KEYS.swap, swap.to_json())
        wait_until(lambda: seen(swap))

    put("s0", "done")  # before anybody looked
    gateway.register("http://127.0.0.1:9", "i0", commit_ms=90.0)
    put("s1", "prepare")
    put("s1", "canary")
    put("s1", "commit")
    gateway.register("http://127.0.0.1:9", "i0", commit_ms=4.0, active_epoch=2, active_version=2)
    gateway.register("http://127.0.0.1:9", "i0", commit_ms=4.0, active_epoch=2, active_version=2, state="STAGING")
    put("s1", "done")
    put("s2", "prepare")
    put("s2", "aborted")
    found = await samples(gateway)
    assert found["swap_phase_duration_seconds_count"] == {("prepare",): 2, ("canary",): 1, ("commit",): 1}
    assert found["swaps_total"] == {("done",): 1, ("aborted",): 1}
    assert found["swap_duration_seconds_count"][()] == 2
    assert found["swap_stall_seconds_count"][()] == 1
    assert found["swap_stall_seconds_sum"][()] == pytest.approx(0.004)


async def test_what_hosts_have_on_disk(gateway: RunningGateway) -> None:
    gateway.store.put(KEYS.active, ActiveRecord(3, 1, None, "swap", 0.0).to_json())
    disks = gateway.gateway.default.fleet.disks
    for versions, current in (((1, 2), 0.0), ((2, 3), 1.0)):
        record = DiskRecord("", "/copies", versions, 4096, 0.0, wanted=3, failures=1)
        gateway.store.put(KEYS.disk(""), record.to_json())
        await eventually(lambda record=record: disks.get("-") == record)  # type: ignore[misc]
        found = await samples(gateway)
        wanted = {"disk_current": current, "disk_bytes": 4096.0, "disk_failures_total": 1.0}
        assert {name: found[name]["-",] for name in wanted} == wanted


async def test_the_page_says_what_runs(gateway: RunningGateway) -> None:
    page = (await gateway.ask(get("/metrics"))).body.decode()
    assert re.search(r'^hotswap_build_info\{python="[^"]+",version="(\d[^"]*|unknown)"\} 1\.0$', page, re.MULTILINE)
