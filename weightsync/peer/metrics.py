"""The peer's metrics, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class PeerMetrics:
    """`generate` gives them as /metrics does."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.received = Counter(
            "hotswap_peer_received_bytes", "Bytes read from other hosts, checked", ["holder"], registry=registry
        )
        self.sent = Counter(
            "hotswap_peer_sent_bytes", "Bytes that other hosts say they read here", ["reader"], registry=registry
        )
        self.fetch_seconds = Histogram(
            "hotswap_peer_fetch_seconds", "Duration of a fetch", buckets=SECONDS, registry=registry
        )
        self.refetched = Counter(
            "hotswap_peer_chunks_refetched",
            "Chunks read again: digest (wrong bytes), failed, timeout",
            ["reason", "holder"],
            registry=registry,
        )
        self.resumed = Counter(
            "hotswap_peer_chunks_resumed", "Chunks taken over from an earlier attempt", registry=registry
        )
        self.failures = Counter("hotswap_peer_fetch_failures", "Fetches that failed", ["code"], registry=registry)
        self.readers = Gauge("hotswap_peer_readers", "Readers that hold a ticket now", registry=registry)
        self.refused = Counter(
            "hotswap_peer_refused_readers",
            "Readers turned away, by the code they were given",
            ["code"],
            registry=registry,
        )
        self.copies = Gauge("hotswap_peer_copies", "Slots of this host by state", ["state"], registry=registry)

    def generate(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
