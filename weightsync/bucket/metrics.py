"""The metrics of who publishes into a bucket, in a registry of their own, and a port for such registries."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

from weightsync.transport.addresses import Address

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class PublisherMetrics:
    """`generate` gives them as /metrics does."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        kind = ["kind"]
        self._versions = Counter(
            "hotswap_bucket_versions", "Versions put into the bucket: full or delta", kind, registry=registry
        )
        self._bytes = Counter(
            "hotswap_bucket_sent_bytes", "Bytes of these versions in the bucket", kind, registry=registry
        )
        self._seconds = Histogram(
            "hotswap_bucket_publish_seconds", "Seconds until one was there", kind, buckets=SECONDS, registry=registry
        )
        self._failures = Counter(
            "hotswap_bucket_publish_failures", "Versions that could not be put there", ["code"], registry=registry
        )
        self._newest = Gauge("hotswap_bucket_newest_version", "Number of the newest version", registry=registry)
        self._lag = Gauge(
            "hotswap_bucket_lag_seconds", "Age of the oldest version that is on its way; 0 without", registry=registry
        )
        self._waiting_since = 0.0
        self._lag.set_function(lambda: time.monotonic() - self._waiting_since if self._waiting_since else 0.0)

    def began(self, since: float) -> None:
        """A version is on its way that was ready at `since`, of time.monotonic."""
        self._waiting_since = self._waiting_since or since

    def published(self, number: int, nbytes: int, seconds: float, *, full: bool) -> None:
        """It is there."""
        kind = "full" if full else "delta"
        self._versions.labels(kind).inc()
        self._bytes.labels(kind).inc(nbytes)
        self._seconds.labels(kind).observe(seconds)
        self._newest.set(number)
        self._waiting_since = 0.0

    def failed(self, code: str) -> None:
        """It is not there; `code` is the error's. It stays on its way until the next one is there."""
        self._failures.labels(code).inc()

    def generate(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


def serve(registry: CollectorRegistry, listen: str) -> int:
    """Serves /metrics at ADDRESS:PORT from a thread of its own, until the process ends; the port. Raises ValueError for
    what is no address, OSError."""
    address = Address.parse(listen)
    server, _ = start_http_server(address.port, address.host, registry)
    return int(server.server_port)
