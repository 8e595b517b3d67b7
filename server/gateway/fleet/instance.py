"""One instance as a gateway sees it: its record, its connections, the work it has, and what it can be expected to have
in its prefix cache."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from xxhash import xxh3_64_intdigest

from server.gateway.config import UpstreamSettings
from server.gateway.fleet import affinity, routing
from server.gateway.fleet.affinity import Hint, PrefixTable
from server.gateway.fleet.health import Health
from server.gateway.fleet.signals import Signals
from server.gateway.queue.capacity import Window
from server.gateway.wire.pool import Pool
from weightsync.errors import RecordError, TlsUnavailable
from weightsync.records import InstanceRecord
from weightsync.tls import ClusterTls, is_loopback

PREFIXES: Final = 4096  # remembered per instance and version, at least; about 0.6 MB when twice as many are
VERSIONS: Final = 2  # whose prefixes are remembered: the active one, and the one a rollback returns to


class Instance:
    """What a gateway holds of one instance. A new address is a new `Instance`."""

    def __init__(self, record: InstanceRecord, settings: UpstreamSettings, tls: ClusterTls | None = None) -> None:
        """Raises RecordError for an address that is none, TlsUnavailable for one that must not be spoken to."""
        self.id = record.id
        self.record = record
        self.pool = _pool(record, settings, tls)
        self.pool.introduce(record.key)
        self.health = Health(settings.health)
        self.signals: Signals | None = None  # the last scrape, None when it failed
        self.inflight = 0
        self.working = 0  # of these, requests that occupy the engine
        self.window = Window(record.max_num_seqs, settings.max_in_flight)
        self._settings = settings
        self.connect_errors = 0
        self.refusals = 0  # requests it refused for the version it runs
        self.failed_at = 0.0
        self.picked_at = 0
        self.left_at = 0.0  # when its record went from the store (monotonic), 0.0 while it is there
        self._elsewhere = 0.0  # other gateways' requests there, and its pressure, as of the last scrape
        self._seed = xxh3_64_intdigest(record.id.encode())
        self._tables: dict[int | None, PrefixTable] = {}
        self.prefixes = self._table(record.active_version)

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
        if record.active_version != self.record.active_version:
            self.prefixes = self._table(record.active_version)
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
        """What its metrics say. `inflight_then`: requests from here when they were asked for, which it counts too."""
        self.signals = signals
        if signals is not None:
            self.window.adapt(signals, self.working)
        others = max(0.0, signals.load - inflight_then) if signals is not None else 0.0
        self._elsewhere = others + routing.pressure(signals)

    def _table(self, version: int | None) -> PrefixTable:
        table = self._tables.pop(version, None) or PrefixTable(PREFIXES)
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
