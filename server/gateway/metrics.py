"""`/metrics`: every metric of the gateway in one table, and the page that is made of it, in Prometheus text format.

A row of METRICS says what a metric is called, what it tells, what its labels are, and where its value comes from when
somebody asks. The hot path counts plain numbers (stats.py) and touches no metric object. The table in docs/api.md is
made of the same rows (`make tables`), and a test reads the dashboard's and the alerts' queries against the page.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any, Literal, get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from server.gateway.fleet.instance import STATES as CIRCUIT_STATES
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.view import Fleet
from server.gateway.models.directory import Directory
from server.gateway.observe import logs
from server.gateway.observe.stats import Histogram, ProcessStats, Stats, Tokens
from server.gateway.queue.gate import Gate
from server.gateway.release.records import State as ReleaseState
from server.key_limits import NAMED
from weightsync.control.records import InstanceState

Value = float | Histogram
RELEASE_STATES = ("none", *get_args(ReleaseState))
_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


@cache
def release() -> str:
    """The version of this package, "unknown" where it runs from a directory without being installed."""
    try:
        return version("hotswap")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class Counted:
    """The source of values: what one gateway counts and knows, of all models (`process`) and of each."""

    process: ProcessStats
    directory: Directory

    @property
    def models(self) -> Iterator[CountedModel]:
        """Each model's part."""
        return (CountedModel(m.name, m.stats, m.fleet, m.gate) for m in self.directory.models.values())


@dataclass(frozen=True)
class CountedModel:
    """The same of one model."""

    name: str
    stats: Stats
    fleet: Fleet
    gate: Gate

    @property
    def instances(self) -> Iterator[Instance]:
        """Those that are registered."""
        return iter(self.fleet.instances.values())


@dataclass(frozen=True)
class Declared:
    """One metric. `of` gives its value, or values by label (a tuple of them where there are several).

    `labels` says what the values of each may be, where that needs saying; `more` is for the documentation alone. `of`
    is given each CountedModel in turn, and the label `model` goes before the others; of what is `shared`, the Counted.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    of: Callable[[Any], Value | Mapping[Any, Value]]
    labels: Mapping[str, str] = field(default_factory=dict)
    more: str = ""
    shared: bool = False

    @property
    def every_label(self) -> Mapping[str, str]:
        """Its labels, `model` among them where each model has its own value."""
        return self.labels if self.shared else {"model": "", **self.labels}

    def family(self, counted: Counted) -> Metric:
        """The metric as it stands."""
        made = _KINDS[self.kind](self.name, self.help, labels=list(self.every_label))
        if self.shared:
            self._add(made, (), self.of(counted))
        else:
            for model in counted.models:
                self._add(made, (model.name,), self.of(model))
        return made

    @staticmethod
    def _add(made: Any, before: tuple[str, ...], found: Value | Mapping[Any, Value]) -> None:
        for label, value in found.items() if isinstance(found, Mapping) else [((), found)]:
            labels = [*before, *(str(part) for part in (label if isinstance(label, tuple) else (label,)))]
            if isinstance(value, Histogram):
                made.add_metric(labels, buckets=value.cumulative(), sum_value=value.sum)
            else:
                made.add_metric(labels, float(value))

    def row(self) -> str:
        """Its row in docs/api.md."""
        labels = ", ".join(
            f"`{name}`" + (f" ({values})" if values else "") for name, values in self.every_label.items()
        )
        name = self.name + ("_total" if self.kind == "counter" else "")
        what = self.help[0].lower() + self.help[1:] if self.help[1:2].islower() else self.help
        return f"| `{name}` | {self.kind} | {labels}{' ' if labels else ''}| {what}{self.more} |"


def _each(of: Callable[[Instance], float]) -> Callable[[CountedModel], Mapping[Any, Value]]:
    """A value for each instance."""
    return lambda g: {i.id: of(i) for i in g.instances}


def _devices(g: CountedModel) -> Mapping[Any, Value]:
    """By instance, rank, UUID, index and host."""
    ranks = ((i.id, rank, device) for i in g.instances for rank, device in enumerate(i.record.devices))
    return {(i, rank, d.uuid, "" if d.index is None else d.index, d.host): 1 for i, rank, d in ranks}


def _tokens(of: Callable[[Tokens], int]) -> Callable[[CountedModel], Mapping[Any, Value]]:
    """A count of tokens for each route."""
    return lambda g: {route: of(tokens) for route, tokens in g.stats.tokens.items()}


def _signal(name: str) -> Callable[[CountedModel], Mapping[Any, Value]]:
    """The signal `name` of each instance, from its last scrape if that worked."""
    return lambda g: {i.id: getattr(i.signals, name) for i in g.instances if i.signals is not None}


def _states(states: tuple[str, ...], of: Callable[[Instance], str]) -> Callable[[CountedModel], Mapping[Any, Value]]:
    """1 for the state that an instance is in, 0 for the others."""
    return lambda g: {(i.id, state): of(i) == state for i in g.instances for state in states}


def _disks(of: Callable[[Any, int | None], float]) -> Callable[[CountedModel], Mapping[Any, Value]]:
    """A value for each host's copies on disk, from their record and the active version."""
    return lambda g: {
        host: of(record, g.fleet.active.version if g.fleet.active else None) for host, record in g.fleet.disks.items()
    }


_INSTANCE = {"instance_id": ""}
# Of vLLM's metrics (fleet/instance.py): field of Signals -> kind and help.
SIGNALS: dict[str, tuple[Literal["counter", "gauge"], str]] = {
    "num_requests_running": ("gauge", "Requests the instance is running"),
    "num_requests_waiting": ("gauge", "Requests waiting in the instance"),
    "kv_cache_usage": ("gauge", "Share of the KV cache in use (0..1)"),
    "prefix_cache_queries": ("counter", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("counter", "Prompt tokens found in the prefix cache"),
    "num_preemptions": ("counter", "Requests preempted for lack of KV blocks"),
    "prompt_tokens": ("counter", "Prompt tokens the engine has taken in"),
    "generation_tokens": ("counter", "Tokens the engine has generated"),
}

# The order is that of the page and of the documentation.
METRICS: tuple[Declared, ...] = (
    # Requests
    Declared(
        "counter", "hotswap_gateway_requests", "Forwarded requests (status 499: the client left)",
        lambda g: g.stats.requests, {"route": "", "status": ""},
    ),
    Declared(
        "counter", "hotswap_gateway_refused", "Requests answered by the gateway itself",
        lambda g: g.process.refused, {"code": ""},
        shared=True,
    ),
    Declared(
        "counter", "hotswap_gateway_limited", "Requests over a limit of their key",
        lambda g: g.process.limited, {"limit": ", ".join(NAMED)},
        shared=True,
    ),
    Declared(
        "gauge", "hotswap_gateway_requests_in_flight", "Requests being forwarded", lambda g: g.stats.inflight
    ),
    Declared(
        "histogram", "hotswap_gateway_time_to_first_byte_seconds", "Request complete to first body byte",
        lambda g: g.stats.first_byte,
    ),
    Declared(
        "histogram", "hotswap_gateway_time_to_first_token_seconds", "The same, of streamed answers",
        lambda g: g.stats.first_token,
    ),
    Declared(
        "histogram", "hotswap_gateway_inter_token_latency_seconds", "Between pieces of streams from instances",
        lambda g: g.stats.gaps, more="; a piece is one token, as a rule",
    ),
    Declared(
        "histogram", "hotswap_gateway_request_duration_seconds", "Request complete to end of answer",
        lambda g: g.stats.duration,
    ),
    Declared(
        "counter", "hotswap_gateway_prompt_tokens", "Tokens of prompts answered",
        _tokens(lambda tokens: tokens.prompt), {"route": ""},
    ),
    Declared(
        "counter", "hotswap_gateway_completion_tokens", "Tokens of answers",
        _tokens(lambda tokens: tokens.completion), {"route": ""},
    ),
    Declared(
        "counter", "hotswap_gateway_estimated_completion_tokens", "Of answers cut before they were counted",
        _tokens(lambda tokens: tokens.estimated), {"route": ""},
    ),
    Declared(
        "counter", "hotswap_gateway_disconnects", "Clients that left before the end",
        lambda g: g.stats.disconnects, {"phase": "queued, held, connecting, waiting, streaming, stalled"},
    ),
    Declared(
        "counter", "hotswap_gateway_received_bytes", "Request body bytes from clients", lambda g: g.stats.bytes_in
    ),
    Declared("counter", "hotswap_gateway_sent_bytes", "Answer body bytes to clients", lambda g: g.stats.bytes_out),
    # The queue, and waiting for an instance
    Declared(
        "gauge", "hotswap_gateway_queue_depth", "Requests waiting for room",
        lambda g: g.gate.queue.depths(), {"priority": "at most 19"},
    ),
    Declared(
        "gauge", "hotswap_gateway_queue_aside", "Of a version whose instances are busy",
        lambda g: g.gate.queue.set_aside, more="; their turn had come",
    ),
    Declared("gauge", "hotswap_gateway_queue_bytes", "Bytes of the bodies that wait", lambda g: g.gate.queue.bytes),
    Declared(
        "counter", "hotswap_gateway_queue_outcomes", "Requests that had to wait", lambda g: g.gate.outcomes,
        {"priority": "", "outcome": "served, refused: 429 or 503, displaced: 429 or 503, timed_out: 504, left"},
    ),
    Declared(
        "histogram", "hotswap_gateway_queue_wait_seconds", "How long",
        lambda g: g.gate.wait_seconds, {"priority": ""}, " those waited that had to",
    ),
    Declared(
        "counter", "hotswap_gateway_holds", "Requests that waited for an instance", lambda g: g.stats.holds,
        {"for": "fleet: no instance to ask, version", "outcome": "served, queued, refused, left"},
    ),
    Declared("gauge", "hotswap_gateway_held", "Requests waiting for an instance", lambda g: len(g.fleet.room)),
    Declared("histogram", "hotswap_gateway_hold_seconds", "How long they waited", lambda g: g.stats.hold_seconds),
    Declared(
        "counter", "hotswap_gateway_fallbacks", "Requests of an alias that another model took over",
        lambda g: g.stats.fallbacks, {"to": "", "code": "of the error that was not answered"},
    ),
    # Routing, and instances that fail
    Declared(
        "counter", "hotswap_gateway_picks", "Choices of an instance, by what decided",
        lambda g: g.fleet.picks, {"by": "only: there was one candidate, load, prefix, session"},
    ),
    Declared(
        "counter", "hotswap_gateway_routed_prompt_bytes", "Bytes of prompts that had a choice of instances",
        lambda g: {"likely": g.fleet.cached_bytes, "no": g.fleet.prompt_bytes - g.fleet.cached_bytes},
        {"cached": "likely: by what is known of the prefix cache of the one that was chosen, no"},
        ", of each the first 48 KiB",
    ),
    Declared(
        "counter", "hotswap_gateway_retries", "Requests sent on to another instance",
        lambda g: g.fleet.retries, {"reason": "not_sent, lost"}, " before the first byte",
    ),
    Declared(
        "counter", "hotswap_gateway_retries_over_budget", "Retries that were not made",
        lambda g: g.fleet.budget.exhausted,
    ),
    Declared(
        "counter", "hotswap_gateway_upstream_connect_errors", "Failed connects",
        _each(lambda i: i.connect_errors), _INSTANCE,
    ),
    Declared(
        "counter", "hotswap_gateway_upstream_failures", "Answers an instance broke",
        lambda g: g.stats.upstream_failures, {"code": ""},
    ),
    Declared(
        "counter", "hotswap_gateway_stale_retries", "Pooled connections found closed", lambda g: g.stats.stale_retries
    ),
    Declared(
        "counter", "hotswap_gateway_version_refusals", "Refused for the version it runs",
        _each(lambda i: i.refusals), _INSTANCE,
    ),
    Declared(
        "counter", "hotswap_gateway_refusal_retries", "Refused requests sent on to another instance",
        lambda g: g.stats.refusal_retries,
    ),
    Declared(
        "counter", "hotswap_gateway_failovers", "Streams whose instance died", lambda g: g.stats.failovers,
        {
            "outcome": "resumed, complete: only the end was missing, nobody: no instance could continue in time, "
            "given_up: it happened too often, not_resumable"
        },
    ),
    Declared(
        "gauge", "hotswap_gateway_replay_bytes", "Kept so that streams can go on elsewhere",
        lambda g: g.fleet.replay.used,
    ),
    # The gateway itself
    Declared(
        "gauge", "hotswap_gateway_store_up", "1 if the store answered last time", lambda g: int(g.stats.store_up)
    ),
    Declared(
        "counter", "hotswap_gateway_trace_spans", "Spans, by what became of them", lambda g: g.process.spans,
        {"outcome": "exported, dropped: the queue was full, failed: the collector did not take them"},
        shared=True,
    ),
    Declared(
        "counter", "hotswap_gateway_log_lines_dropped", "Log lines nobody took in time",
        lambda _: logs.lines_dropped(), more=": they found the queue to stderr full",
        shared=True,
    ),
    Declared(
        "counter", "hotswap_answers_written", "Records written to the log of answers",
        lambda g: g.process.answers_written, {"record": "answer, feedback"},
        shared=True,
    ),
    Declared(
        "counter", "hotswap_answers_dropped", "Answers that somebody wanted and did not get",
        lambda g: g.process.answers_dropped,
        {
            "consumer": "log, release: who judges one",
            "cause": "memory: too large, or too many at once, busy, unreadable, failed, redaction, "
            "store: it could not be written to for too long",
        },
        shared=True,
    ),
    Declared(
        "gauge", "hotswap_answers_captured_bytes", "Bytes of answers that wait to be read whole",
        lambda g: g.process.captured.used,
        shared=True,
    ),
    Declared(
        "gauge", "hotswap_build_info", "1; what runs here",
        lambda _: {(release(), platform.python_version()): 1}, {"version": "", "python": ""},
        shared=True,
    ),
    # Swaps
    Declared(
        "counter", "hotswap_swaps", "Weight swaps seen to their end",
        lambda g: g.stats.swaps.ended, {"outcome": "done, aborted"},
    ),
    Declared(
        "histogram", "hotswap_swap_duration_seconds", "Swap opened to its outcome", lambda g: g.stats.swaps.duration
    ),
    Declared(
        "histogram", "hotswap_swap_phase_duration_seconds", "How long a phase took",
        lambda g: g.stats.swaps.phases, {"phase": "prepare, canary, commit"},
    ),
    Declared(
        "histogram", "hotswap_swap_stall_seconds", "Engines standing still for a flip, each instance",
        lambda g: g.stats.swaps.stall,
    ),
    Declared(
        "gauge", "hotswap_active_version", "The committed weight version, 0 if none",
        lambda g: g.fleet.active.version if g.fleet.active else 0,
    ),
    Declared(
        "gauge", "hotswap_split_percent", "Share of the requests that a version is to have, while versions share them",
        lambda g: g.fleet.splits.percents, {"version": ""},
    ),
    Declared(
        "counter", "hotswap_split_elsewhere", "Requests that other versions answered, as nobody ran theirs",
        lambda g: g.fleet.splits.elsewhere, {"version": "theirs"},
    ),
    Declared(
        "counter", "hotswap_split_requests", "Requests while versions share them, by the version that answered",
        lambda g: {(v, s): n for v, seen in g.stats.of_version.items() for s, n in seen.requests.items()},
        {"version": "0: nobody answered", "status": ""},
    ),
    Declared(
        "histogram", "hotswap_split_request_duration_seconds", "Such a request, from start to end",
        lambda g: {v: seen.duration for v, seen in g.stats.of_version.items()}, {"version": ""},
    ),
    Declared(
        "histogram", "hotswap_split_first_byte_seconds", "Such a request, until the first byte of its answer",
        lambda g: {v: seen.first_byte for v, seen in g.stats.of_version.items()}, {"version": ""},
    ),
    Declared(
        "counter", "hotswap_shadow_requests", "Requests that were repeated on a version that is tried out",
        lambda g: g.fleet.shadows.outcomes,
        {"version": "", "outcome": "answered, failed, no_room: not begun, cut: for a request, late, too_large"},
    ),
    Declared(
        "histogram", "hotswap_shadow_duration_seconds", "A repetition that was answered, from start to end",
        lambda g: g.fleet.shadows.seconds, {"version": ""},
    ),
    Declared(
        "counter", "hotswap_shadow_dropped", "Answers to repetitions that were dropped, as their judge was too slow",
        lambda g: g.fleet.shadows.dropped,
    ),
    Declared(
        "gauge", "hotswap_release_state", "State of the release under way, or of the last one",
        lambda g: {state: g.stats.release == state for state in RELEASE_STATES}, {"state": ", ".join(RELEASE_STATES)},
    ),
    Declared(
        "counter", "hotswap_webhook_deliveries", "Attempts to post an entry of the ledger",
        lambda g: {(url, outcome): n for url, c in g.process.webhooks.items() for outcome, n in c.outcomes.items()},
        {"url": "", "outcome": "delivered, failed: tried again, lost: given up, or gone from the store"},
        " ([webhooks](security.md#webhooks))",
        shared=True,
    ),
    Declared(
        "gauge", "hotswap_webhook_behind", "Entries of the ledger that a URL has not got, in the gateway that leads",
        lambda g: {url: c.behind for url, c in g.process.webhooks.items()}, {"url": ""},
        shared=True,
    ),
    Declared(
        "gauge", "hotswap_active_epoch", "Commits so far", lambda g: g.fleet.active.epoch if g.fleet.active else 0
    ),
    # Copies on disk
    Declared(
        "gauge", "hotswap_disk_current", "1 if the active version is on disk there",
        _disks(lambda record, active: active in record.versions), {"host": "`-`: the one host"},
        " ([copies on disk](weights.md#copies-on-disk))",
    ),
    Declared(
        "gauge", "hotswap_disk_bytes", "What the versions on disk take",
        _disks(lambda record, _: record.nbytes), {"host": ""},
    ),
    Declared(
        "counter", "hotswap_disk_failures", "Copies that could not be written",
        _disks(lambda record, _: record.failures), {"host": ""},
    ),
    # Instances
    Declared(
        "gauge", "hotswap_instance_state", "1 for the state it is in",
        _states(get_args(InstanceState), lambda i: i.state), _INSTANCE | {"state": ""},
    ),
    Declared(
        "gauge", "hotswap_instance_device", "1 for the GPU of each rank", _devices,
        _INSTANCE | {"rank": "", "uuid": "", "device": "the index on its host", "host": ""},
    ),
    Declared(
        "gauge", "hotswap_instance_active_version", "Version it serves",
        _each(lambda i: i.record.active_version or 0), _INSTANCE,
    ),
    Declared(
        "gauge", "hotswap_instance_active_epoch", "Commit it has carried out",
        _each(lambda i: i.record.active_epoch), _INSTANCE,
    ),
    Declared(
        "gauge", "hotswap_instance_device_copies", "Versions that have room on each of its GPUs",
        lambda g: {i.id: n for i in g.instances if (n := i.record.device_copies) is not None}, _INSTANCE,
        " ([copies](weights.md#copies))",
    ),
    Declared(
        "gauge", "hotswap_instance_fresh", "1 if it runs the committed weights",
        lambda g: {i.id: g.fleet.is_fresh(i) for i in g.instances}, _INSTANCE,
    ),
    Declared(
        "gauge", "hotswap_instance_eligible", "1 if requests are routed to it",
        lambda g: {i.id: i in g.fleet.serving for i in g.instances}, _INSTANCE,
    ),
    Declared(
        "gauge", "hotswap_instance_in_flight", "Requests there from here", _each(lambda i: i.inflight), _INSTANCE
    ),
    Declared(
        "gauge", "hotswap_instance_in_flight_limit", "Requests this gateway lets in at a time",
        _each(lambda i: i.window.limit), _INSTANCE,
    ),
    Declared(
        "gauge", "hotswap_instance_idle_connections", "Pooled connections", _each(lambda i: i.pool.idle), _INSTANCE
    ),
    Declared(
        "gauge", "hotswap_instance_up", "1 if its last scrape worked", _each(lambda i: i.signals is not None), _INSTANCE
    ),
    Declared(
        "gauge", "hotswap_instance_circuit_state", "1 for the state of its circuit",
        _states(CIRCUIT_STATES, lambda i: i.health.state(time.monotonic())),
        _INSTANCE | {"state": "closed, half_open, open"},
    ),
    Declared(
        "counter", "hotswap_instance_ejections", "Times it was ejected", _each(lambda i: i.health.ejections), _INSTANCE
    ),
    Declared(
        "gauge", "hotswap_instance_answering", "1 if it answers health checks",
        _each(lambda i: i.health.answering), _INSTANCE,
    ),
    Declared(
        "gauge", "hotswap_instance_draining", "1 if it takes nothing new",
        lambda g: {i.id: g.fleet.is_draining(i) for i in g.instances}, _INSTANCE,
    ),
    Declared(
        "gauge", "hotswap_instance_load", "Load as the routing policy counts it", _each(lambda i: i.load), _INSTANCE
    ),
    Declared(
        "gauge", "hotswap_instance_prefixes", "Prefixes of prompts that its cache holds, as it reports",
        _each(lambda i: i.prefixes.held), _INSTANCE, " ([affinity](gateway.md#routing))",
    ),
    Declared(
        "counter", "hotswap_instance_prefixes_dropped", "Prefixes that it has reported, and no longer holds",
        _each(lambda i: i.dropped), _INSTANCE,
    ),
    *(
        Declared(kind, f"hotswap_instance_{name}", text, _signal(name), _INSTANCE)
        for name, (kind, text) in SIGNALS.items()
    ),
)  # fmt: skip


def table() -> str:
    """The metrics as docs/api.md lists them."""
    return "\n".join(["| metric | kind | labels | what |", "|---|---|---|---|", *(metric.row() for metric in METRICS)])


_OF_PROCESS = (ProcessCollector(registry=None), PlatformCollector(registry=None))


def families(counted: Counted) -> Iterator[Metric]:
    """The metrics of one gateway as they stand, and those of its process."""
    yield from (metric.family(counted) for metric in METRICS)
    yield from (family for collector in _OF_PROCESS for family in collector.collect())


async def render(counted: Counted) -> bytes:
    """The page. It takes tens of milliseconds where instances are many, so streams go on after each family."""
    parts: list[bytes] = []
    for family in families(counted):
        parts.append(generate_latest(SimpleNamespace(collect=[family].__iter__)))
        await asyncio.sleep(0)
    return b"".join(parts)
