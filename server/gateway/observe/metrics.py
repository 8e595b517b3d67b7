"""`/metrics`: the gateway's own counts and, per instance, what a router needs of vLLM's, in Prometheus text format."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from server.gateway.fleet.signals import FIELDS
from server.gateway.fleet.view import Fleet
from server.gateway.observe import logs
from server.gateway.observe.histogram import Histogram
from server.gateway.observe.queue_metrics import QueueCollector
from server.gateway.observe.routing_metrics import routing_metrics
from server.gateway.observe.stats import Stats
from server.gateway.queue.gate import Gate
from weightsync.records import InstanceState

STATES = get_args(InstanceState)
_VLLM_COUNTERS = frozenset(
    {"prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens"}
)
_HELP = {
    "num_requests_running": "Requests the instance is running",
    "num_requests_waiting": "Requests waiting in the instance",
    "kv_cache_usage": "Share of the KV cache in use (0..1)",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache",
    "num_preemptions": "Requests preempted for lack of KV blocks",
    "prompt_tokens": "Prompt tokens the engine has taken in",
    "generation_tokens": "Tokens the engine has generated",
}


class GatewayCollector(Collector):  # type: ignore[misc]
    """Turns plain counts into families at scrape time, so that the hot path touches no metric object."""

    def __init__(self, stats: Stats, fleet: Fleet) -> None:
        self._stats = stats
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        yield from self._traffic()
        yield from self._swaps()
        yield from self._disks()
        yield from self._instances()
        yield from self._signals()
        yield from routing_metrics(self._fleet)

    def _traffic(self) -> Iterator[Metric]:
        s = self._stats
        requests = CounterMetricFamily(
            "hotswap_gateway_requests", "Forwarded requests (status 499: the client left)", labels=["route", "status"]
        )
        for (route, status), count in s.requests.items():
            requests.add_metric([route, str(status)], count)
        yield requests
        yield _labelled("hotswap_gateway_refused", "Requests answered by the gateway itself", "code", s.refused)
        yield _labelled("hotswap_gateway_limited", "Requests over a limit of their key", "limit", s.limited)
        yield GaugeMetricFamily("hotswap_gateway_requests_in_flight", "Requests being forwarded", value=s.inflight)
        yield from self._latency()
        yield from self._tokens()
        yield _labelled("hotswap_gateway_disconnects", "Clients that left before the end", "phase", s.disconnects)
        failed = {i.id: i.connect_errors for i in self._fleet.instances.values()}
        yield _labelled("hotswap_gateway_upstream_connect_errors", "Failed connects", "instance_id", failed)
        yield _labelled("hotswap_gateway_upstream_failures", "Answers an instance broke", "code", s.upstream_failures)
        yield CounterMetricFamily("hotswap_gateway_stale_retries", "Pooled connections found closed", s.stale_retries)
        yield from self._holds()
        yield CounterMetricFamily("hotswap_gateway_received_bytes", "Request body bytes from clients", s.bytes_in)
        yield CounterMetricFamily("hotswap_gateway_sent_bytes", "Answer body bytes to clients", s.bytes_out)
        yield GaugeMetricFamily("hotswap_gateway_store_up", "1 if the store answered last time", value=int(s.store_up))
        yield _labelled("hotswap_gateway_trace_spans", "Spans, by what became of them", "outcome", s.spans)
        lost = logs.lines_dropped()
        yield CounterMetricFamily("hotswap_gateway_log_lines_dropped", "Log lines nobody took in time", lost)
        build = GaugeMetricFamily("hotswap_build_info", "1; what runs here", labels=["version", "python"])
        build.add_metric([release(), platform.python_version()], 1)
        yield build

    def _latency(self) -> Iterator[Metric]:
        s = self._stats
        of = "hotswap_gateway_"
        yield _histogram(f"{of}time_to_first_byte_seconds", "Request complete to first body byte", s.first_byte)
        yield _histogram(f"{of}time_to_first_token_seconds", "The same, of streamed answers", s.first_token)
        yield _histogram(f"{of}inter_token_latency_seconds", "Between pieces of streams from instances", s.gaps)
        yield _histogram(f"{of}request_duration_seconds", "Request complete to end of answer", s.duration)

    def _tokens(self) -> Iterator[Metric]:
        prompt = CounterMetricFamily("hotswap_gateway_prompt_tokens", "Tokens of prompts answered", labels=["route"])
        completion = CounterMetricFamily("hotswap_gateway_completion_tokens", "Tokens of answers", labels=["route"])
        estimated = CounterMetricFamily(
            "hotswap_gateway_estimated_completion_tokens", "Of answers cut before they were counted", labels=["route"]
        )
        for route, tokens in self._stats.tokens.items():
            prompt.add_metric([route], tokens.prompt)
            completion.add_metric([route], tokens.completion)
            estimated.add_metric([route], tokens.estimated)
        yield from (prompt, completion, estimated)

    def _holds(self) -> Iterator[Metric]:
        s = self._stats
        holds = CounterMetricFamily(
            "hotswap_gateway_holds", "Requests that waited for an instance", labels=["for", "outcome"]
        )
        for (kind, outcome), count in s.holds.items():
            holds.add_metric([kind, outcome], count)
        yield holds
        yield GaugeMetricFamily("hotswap_gateway_held", "Requests waiting for an instance", value=len(self._fleet.room))
        yield _histogram("hotswap_gateway_hold_seconds", "How long they waited", s.hold_seconds)
        refusals = {i.id: i.refusals for i in self._fleet.instances.values()}
        yield _labelled("hotswap_gateway_version_refusals", "Refused for the version it runs", "instance_id", refusals)
        yield CounterMetricFamily(
            "hotswap_gateway_refusal_retries", "Refused requests sent on to another instance", s.refusal_retries
        )
        yield _labelled("hotswap_gateway_failovers", "Streams whose instance died", "outcome", s.failovers)
        kept = self._fleet.replay.used
        yield GaugeMetricFamily("hotswap_gateway_replay_bytes", "Kept so that streams can go on elsewhere", value=kept)

    def _swaps(self) -> Iterator[Metric]:
        active = self._fleet.active
        swaps = self._stats.swaps
        yield _labelled("hotswap_swaps", "Weight swaps seen to their end", "outcome", swaps.ended)
        yield _histogram("hotswap_swap_duration_seconds", "Swap opened to its outcome", swaps.duration)
        phases = HistogramMetricFamily("hotswap_swap_phase_duration_seconds", "How long a phase took", labels=["phase"])
        for phase, taken in swaps.phases.items():
            phases.add_metric([phase], buckets=taken.cumulative(), sum_value=taken.sum)
        yield phases
        yield _histogram("hotswap_swap_stall_seconds", "Engines standing still for a flip, each instance", swaps.stall)
        yield GaugeMetricFamily(
            "hotswap_active_version", "The committed weight version, 0 if none", value=active.version if active else 0
        )
        yield GaugeMetricFamily("hotswap_active_epoch", "Commits so far", value=active.epoch if active else 0)

    def _disks(self) -> Iterator[Metric]:
        current = GaugeMetricFamily("hotswap_disk_current", "1 if the active version is on disk there", labels=["host"])
        nbytes = GaugeMetricFamily("hotswap_disk_bytes", "What the versions on disk take", labels=["host"])
        failures = CounterMetricFamily("hotswap_disk_failures", "Copies that could not be written", labels=["host"])
        active = self._fleet.active.version if self._fleet.active is not None else None
        for host, record in self._fleet.disks.items():
            current.add_metric([host], float(active in record.versions))
            nbytes.add_metric([host], record.nbytes)
            failures.add_metric([host], record.failures)
        yield from (current, nbytes, failures)

    def _instances(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("hotswap_instance_state", "1 for the state it is in", labels=["instance_id", "state"])
        version = GaugeMetricFamily("hotswap_instance_active_version", "Version it serves", labels=["instance_id"])
        epoch = GaugeMetricFamily("hotswap_instance_active_epoch", "Commit it has carried out", labels=["instance_id"])
        fresh = GaugeMetricFamily(
            "hotswap_instance_fresh", "1 if it runs the committed weights", labels=["instance_id"]
        )
        asked = GaugeMetricFamily("hotswap_instance_eligible", "1 if requests are routed to it", labels=["instance_id"])
        inflight = GaugeMetricFamily("hotswap_instance_in_flight", "Requests there from here", labels=["instance_id"])
        idle = GaugeMetricFamily("hotswap_instance_idle_connections", "Pooled connections", labels=["instance_id"])
        up = GaugeMetricFamily("hotswap_instance_up", "1 if its last scrape worked", labels=["instance_id"])
        for i in self._fleet.instances.values():
            for name in STATES:
                state.add_metric([i.id, name], float(i.state == name))
            version.add_metric([i.id], i.record.active_version or 0)
            epoch.add_metric([i.id], i.record.active_epoch)
            fresh.add_metric([i.id], float(self._fleet.is_fresh(i)))
            asked.add_metric([i.id], float(i in self._fleet.serving))
            inflight.add_metric([i.id], i.inflight)
            idle.add_metric([i.id], i.pool.idle)
            up.add_metric([i.id], float(i.signals is not None))
        yield from (state, version, epoch, fresh, asked, inflight, idle, up)

    def _signals(self) -> Iterator[Metric]:
        for field in FIELDS:
            kind = CounterMetricFamily if field in _VLLM_COUNTERS else GaugeMetricFamily
            family = kind(f"hotswap_instance_{field}", _HELP[field], labels=["instance_id"])
            for i in self._fleet.instances.values():
                if i.signals is not None:
                    family.add_metric([i.id], getattr(i.signals, field))
            yield family


def build_registry(stats: Stats, fleet: Fleet, gate: Gate) -> CollectorRegistry:
    """A registry of this gateway alone (several may live in one process, in tests)."""
    registry = CollectorRegistry()
    registry.register(GatewayCollector(stats, fleet))
    registry.register(QueueCollector(gate, fleet))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class _Alone:
    """One family as a registry of its own."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        """The family."""
        yield self._family


async def render(registry: CollectorRegistry) -> bytes:
    """The page. It takes tens of milliseconds where instances are many, so streams go on after each family."""
    parts: list[bytes] = []
    for family in registry.collect():
        parts.append(generate_latest(_Alone(family)))
        await asyncio.sleep(0)
    return b"".join(parts)


@cache
def release() -> str:
    """The version of this package, "unknown" where it runs from a directory without being installed."""
    try:
        return version("hotswap")
    except PackageNotFoundError:
        return "unknown"


def _labelled(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text)
    family.add_metric([], buckets=histogram.cumulative(), sum_value=histogram.sum)
    return family
