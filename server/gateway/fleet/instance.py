"""One instance as a gateway sees it: its record, its connections, the work it has, what its prefix cache likely holds,
what its metrics say (`Signals`), how much it may be sent (`Window`) and whether it is well (`Health`)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, fields
from typing import Final
from urllib.parse import urlsplit

from xxhash import xxh3_64_intdigest

from server.gateway.access.costs import Pace
from server.gateway.config import HealthSettings, UpstreamSettings
from server.gateway.fleet import affinity
from server.gateway.fleet.affinity import Hint, PrefixTable
from server.gateway.wire.pool import Pool
from server.prefixes import Report
from weightsync.control.records import InstanceRecord
from weightsync.errors import RecordError, TlsUnavailable
from weightsync.tls import ClusterTls, is_loopback

PREFIXES: Final = 4096  # remembered per instance and version, at least; about 0.6 MB when twice as many are
VERSIONS: Final = 2  # whose prefixes are remembered: the active one, and the one a rollback returns to

UNKNOWN: Final = 1024
SHRINK: Final = 0.8
GROWTH, FAST_GROWTH = 16, 4  # steps from nothing to the most
HEADROOM: Final = 8  # one place ahead for so many that run

FAULTS: Final = frozenset({500, 502, 503, 504})
STATES: Final = ("closed", "half_open", "open")

_FULL_FROM: Final = 0.8  # of the KV cache: from here on vLLM may have to preempt
_FULL_COST: Final = 8.0  # requests that a full KV cache counts for


class Instance:
    """One instance, as a gateway knows it. A new address is a new `Instance`."""

    def __init__(
        self,
        record: InstanceRecord,
        settings: UpstreamSettings,
        tls: ClusterTls | None = None,
        pool: Pool | None = None,
    ) -> None:
        """`pool`: its connections, where they are not those that the record leads to.

        Raises RecordError for an address that is none, TlsUnavailable for one that must not be spoken to.
        """
        self.id = record.id
        self.record = record
        self.pool = pool if pool is not None else _pool(record, settings, tls)
        self.pool.introduce(record.key)
        self.health = Health(settings.health)
        self.signals: Signals | None = None  # the last scrape, None when it failed
        self.inflight = 0
        self.working = 0  # of these, requests that occupy the engine
        self.shadowed = 0  # repetitions of requests (shadow.py), which are not among these
        self.window = Window(record.max_num_seqs, settings.max_in_flight)
        self._settings = settings
        self.connect_errors = 0
        self.refusals = 0  # requests it refused for the version it runs
        self.pace = Pace()
        self.failed_at = 0.0
        self.picked_at = 0
        self.left_at = 0.0  # when its record went from the store (monotonic), 0.0 while it is there
        self._elsewhere = 0.0  # other gateways' requests there, and its pressure, as of the last scrape
        self._seed = xxh3_64_intdigest(record.id.encode())
        self._tables: dict[int, PrefixTable] = {}
        self.reports = True  # whether it may say what its prefix cache holds; older releases do not
        self.cursor = ""  # of its last report; empty: the next one is to tell all
        self.dropped = 0  # prefixes that it has told of, and no longer holds
        self.prefixes = self._table(record.active_version or 0)

    @property
    def state(self) -> str:
        return self.record.state

    @property
    def load(self) -> float:
        """Requests there now: from here exactly, from others as of the last scrape, and what its state adds."""
        return self.inflight + self._elsewhere

    def cached(self, hint: Hint) -> float:
        """How much of the prompt it likely has in its cache, 0 to 1."""
        return 1.0 if hint.home == self.id else self.prefixes.share(hint)

    def tie_break(self, hint: Hint) -> int:
        """Its number for this prompt or session; the highest one's turn it is."""
        return affinity.tie_break(hint.key, self._seed)

    def renewed(self, record: InstanceRecord) -> None:
        """Its record has changed."""
        if record.key != self.record.key:  # of each process its own, and so is what is cached
            self._tables.clear()
            self.reports, self.cursor = True, ""
            self.prefixes = self._table(record.active_version or 0)
        elif record.active_version != self.record.active_version:
            self.prefixes = self._table(record.active_version or 0)
        if record.max_num_seqs != self.record.max_num_seqs:
            self.window = Window(record.max_num_seqs, self._settings.max_in_flight)
        self.pool.introduce(record.key)
        self.record = record

    def left(self, now: float) -> None:
        """Its record has gone from the store: what it has of this gateway's goes on."""
        self.left_at = now
        self.pool.close()

    def returned(self) -> None:
        """Its record is there again."""
        self.left_at = 0.0
        self.pool.reopen()

    def scraped(self, signals: Signals | None, inflight_then: int) -> None:
        """Takes the instance's metrics. `inflight_then`: requests from here when they were asked for, counted too."""
        self.signals = signals
        if signals is not None:
            self.window.adapt(signals, self.working)
        others = max(0.0, signals.load - inflight_then) if signals is not None else 0.0
        self._elsewhere = others + pressure(signals)

    def reported(self, report: Report | None, now: float) -> None:
        """Takes a report of the instance's prefix cache. None: it makes none, and requests sent there have to do."""
        if report is None:
            self.reports = False
            return
        self.cursor = report.cursor
        for version, table in self._tables.items():
            held, dropped = report.held.get(version, ()), report.dropped.get(version, ())
            self.dropped += table.reported(held, dropped, now, whole=report.whole)

    def _table(self, version: int) -> PrefixTable:
        table = self._tables.pop(version, None)
        if table is None:
            table, self.cursor = PrefixTable(PREFIXES), ""
        self._tables[version] = table  # the newest last
        while len(self._tables) > VERSIONS:
            del self._tables[next(iter(self._tables))]
        return table


def _pool(record: InstanceRecord, settings: UpstreamSettings, tls: ClusterTls | None) -> Pool:
    try:
        url = urlsplit(record.address)
        if url.scheme not in ("http", "https") or url.hostname is None or url.port is None:
            raise ValueError("expected http://HOST:PORT or https://HOST:PORT")
    except ValueError as exc:
        raise RecordError("InstanceRecord", f"address {record.address!r}: {exc}") from exc
    if url.scheme == "https":
        if tls is None:
            reason = f"instance {record.id} at {record.address} asks for this gateway's"
            raise TlsUnavailable("", reason, "Start the gateway with --cluster-tls DIR")
        return Pool(url.hostname, url.port, settings, tls.client_context())
    if tls is not None and not is_loopback(url.hostname):
        reason = f"instance {record.id} at {record.address} does without, beyond loopback"
        raise TlsUnavailable(str(tls.directory), reason, "Start it with --cluster-tls DIR")
    return Pool(url.hostname, url.port, settings)


# what its metrics say


@dataclass(frozen=True)
class Signals:
    """One scrape. Sums over the engines of an instance, `kv_cache_usage` is the fullest one's (0..1)."""

    num_requests_running: float = 0.0
    num_requests_waiting: float = 0.0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: float = 0.0
    prefix_cache_hits: float = 0.0
    num_preemptions: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    read_at: float = field(default=0.0, compare=False)  # monotonic

    @property
    def load(self) -> float:
        """Requests the instance has, queued ones included."""
        return self.num_requests_running + self.num_requests_waiting


# Field of Signals by vLLM's metric name, which is followed by labels or a space.
_SOURCES: Final = {
    b"vllm:num_requests_running": "num_requests_running",
    b"vllm:num_requests_waiting": "num_requests_waiting",
    b"vllm:kv_cache_usage_perc": "kv_cache_usage",
    b"vllm:prefix_cache_queries_total": "prefix_cache_queries",
    b"vllm:prefix_cache_hits_total": "prefix_cache_hits",
    b"vllm:num_preemptions_total": "num_preemptions",
    b"vllm:prompt_tokens_total": "prompt_tokens",
    b"vllm:generation_tokens_total": "generation_tokens",
}
FIELDS: Final = tuple(f.name for f in fields(Signals) if f.name != "read_at")


def parse(page: bytes) -> Signals:
    """Signals from a page in Prometheus text format; what is missing or not a number counts as 0."""
    values = dict.fromkeys(FIELDS, 0.0)
    for line in page.splitlines():
        if not line.startswith(b"vllm:"):
            continue
        name = _SOURCES.get(line.partition(b"{")[0].partition(b" ")[0])
        if name is None:
            continue
        try:
            value = float(line.rpartition(b" ")[2])
        except ValueError:
            continue
        values[name] = max(values[name], value) if name == "kv_cache_usage" else values[name] + value
    return Signals(**values, read_at=time.monotonic())


def pressure(signals: Signals | None) -> float:
    """The load of an instance's own state, in requests: a request that queues there waits for a whole answer."""
    if signals is None:
        return 0.0
    full = max(0.0, signals.kv_cache_usage - _FULL_FROM) / (1.0 - _FULL_FROM)
    return signals.num_requests_waiting + _FULL_COST * full


# how much it may be sent


class Window:
    """The number of requests that this gateway may have at one instance. `limit`: now; infinity where there is no
    limit.

    The most is what the engine runs at once (`max_num_seqs`, which the instance says in its record) plus a little
    headroom, so that a place that falls free is filled in the engine's next step and not after a round trip. Below that
    the window follows vLLM's own figures at each scrape, additive increase and multiplicative decrease (Chiu and Jain,
    1989):

        more wait inside than the headroom, or requests were preempted  ->  four fifths, of what is used; at least 1
        some wait inside                                                ->  a sixteenth of the most more
        none waits inside                                               ->  a quarter of the most more: there is room

    Requests wait inside when the KV cache is full before `max_num_seqs` is reached, when one request asks for many
    samples, or when other gateways send there too: all see the same figures, so their windows come to equal shares, and
    none has to know of the others. A window that is not used is believed to be half as large at best (so does TCP,
    RFC 7661). An instance that does not say what it can run gets `UNKNOWN` at most.
    """

    __slots__ = ("_headroom", "_preemptions", "_size", "limit", "most")

    def __init__(self, max_num_seqs: int | None, configured: int | None) -> None:
        """`configured`: --max-in-flight, which overrides what the instance says; 0: no limit."""
        runs = configured if configured is not None else max_num_seqs
        self._headroom = -(-max_num_seqs // HEADROOM) if configured is None and max_num_seqs is not None else 0
        self.most: float = math.inf if runs == 0 else (runs or UNKNOWN) + self._headroom
        self.limit = self._size = self.most
        self._preemptions: float | None = None

    def adapt(self, signals: Signals, in_flight: int) -> None:
        """Takes in a scrape. `in_flight`: what this gateway has there now."""
        preempted = self._preemptions is not None and signals.num_preemptions > self._preemptions
        self._preemptions = signals.num_preemptions
        if self.most == math.inf:
            return
        if preempted or signals.num_requests_waiting > max(self._headroom, 1):
            self._size = max(1.0, min(self._size, max(in_flight, self._size / 2)) * SHRINK)
        else:
            steps = GROWTH if signals.num_requests_waiting else FAST_GROWTH
            self._size = min(self.most, self._size + max(1.0, self.most / steps))
        self.limit = math.floor(self._size)


# whether it is well


class Health:
    """Whether an instance is well, judged by its answers to clients, and by those to the gateway's own probes.

        closed --EJECT_AFTER failures in a row, or too many of the last ones--> open, for a time that grows
        open --the time is up--> half_open: one request a second tries it
        half_open --TRIALS answers--> closed        half_open --a failure--> open, for twice as long

    A failure is a connection that is refused or breaks, silence for too long, or a status of FAULTS. Faults of
    clients (4xx, 501) and a refusal for the version that runs there say nothing against an instance. Plain state:
    `now` (monotonic seconds) is handed in, and who may be ejected at all is for the fleet to say (view.py).
    """

    __slots__ = (
        "_answers", "_failures", "_in_a_row", "_next_trial", "_settings", "_window_from", "ejections", "opened_at",
        "probe_failures", "recovered_at", "strikes", "trials", "until",
    )  # fmt: skip

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._in_a_row = 0
        self._window_from = 0.0
        self._answers = self._failures = 0  # in the window
        self._next_trial = 0.0
        self.until = 0.0  # when an ejection ends; 0.0: closed
        self.opened_at = 0.0
        self.recovered_at = 0.0
        self.strikes = 0  # ejections without a long good time between them: each is twice as long
        self.trials = 0  # answers since half open
        self.ejections = 0
        self.probe_failures = 0  # in a row

    @property
    def closed(self) -> bool:
        """Whether it is asked like any other, as far as clients' answers go."""
        return self.until == 0.0

    @property
    def answering(self) -> bool:
        """Whether its probes say it is up."""
        return self.probe_failures < self._settings.unhealthy_after

    @property
    def well(self) -> bool:
        """Whether nothing speaks against it."""
        return self.until == 0.0 and self.answering

    def state(self, now: float) -> str:
        """One of STATES."""
        if self.closed:
            return "closed"
        return "half_open" if now >= self.until else "open"

    def admits(self, now: float) -> bool:
        """Whether it may be asked now: always when well, once in a while when half open."""
        if not self.answering:
            return False
        return self.closed or (now >= self.until and now >= self._next_trial)

    def asked(self, now: float) -> None:
        """A request goes there; the next trial has to wait."""
        if not self.closed:
            self._next_trial = now + self._settings.trial_interval_s

    def success(self, now: float) -> bool:
        """It has answered; True if that closes the circuit."""
        self._answers += 1
        self._in_a_row = 0
        if self.closed or now < self.until:  # an answer to what was asked before the ejection proves nothing
            return False
        self.trials += 1
        if self.trials < self._settings.trials:
            return False
        self.until, self.recovered_at, self._window_from = 0.0, now, now
        self._answers = self._failures = 0
        return True

    def failure(self, now: float) -> bool:
        """It has failed; True if it should be ejected for that."""
        s = self._settings
        if now - self._window_from > s.window_s:
            self._window_from, self._answers, self._failures = now, 0, 0
        self._in_a_row += 1
        self._failures += 1
        if not self.closed:
            return now >= self.until
        asked = self._answers + self._failures
        often = asked >= s.min_requests and self._failures >= s.max_failure_share * asked
        return often or self._in_a_row >= s.eject_after

    def eject(self, now: float) -> float:
        """Out for a time that doubles with each ejection; seconds."""
        s = self._settings
        if self.closed and now - self.recovered_at > s.forgive_s:
            self.strikes = 0
        seconds = min(s.ejection_s * 2.0**self.strikes, s.max_ejection_s)
        self.strikes += 1
        self.ejections += 1
        self.opened_at, self.until = now, now + seconds
        self.trials = self._in_a_row = 0
        self._next_trial = 0.0
        return seconds

    def probed(self, *, well: bool) -> None:
        """Takes the outcome of a request to /health."""
        self.probe_failures = 0 if well else self.probe_failures + 1
