"""The queue and the instances' in-flight limits, for Prometheus. Classes are the label: there are at most 19."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from server.gateway.fleet.view import Fleet
from server.gateway.queue.gate import Gate


class QueueCollector(Collector):  # type: ignore[misc]
    """Made from the gate's plain counts at scrape time."""

    def __init__(self, gate: Gate, fleet: Fleet) -> None:
        self._gate = gate
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        queue = self._gate.queue
        depth = GaugeMetricFamily("hotswap_gateway_queue_depth", "Requests waiting for room", labels=["priority"])
        for priority, count in queue.depths().items():
            depth.add_metric([str(priority)], count)
        yield depth
        yield GaugeMetricFamily(
            "hotswap_gateway_queue_aside", "Of a version whose instances are busy", value=queue.set_aside
        )
        yield GaugeMetricFamily("hotswap_gateway_queue_bytes", "Bytes of the bodies that wait", value=queue.bytes)
        outcomes = CounterMetricFamily(
            "hotswap_gateway_queue_outcomes", "Requests that had to wait", labels=["priority", "outcome"]
        )
        for (priority, outcome), count in self._gate.outcomes.items():
            outcomes.add_metric([str(priority), outcome], count)
        yield outcomes
        wait = HistogramMetricFamily("hotswap_gateway_queue_wait_seconds", "How long", labels=["priority"])
        for priority, histogram in self._gate.wait_seconds.items():
            wait.add_metric([str(priority)], buckets=histogram.cumulative(), sum_value=histogram.sum)
        yield wait
        limit = GaugeMetricFamily(
            "hotswap_instance_in_flight_limit", "Requests this gateway lets in at a time", labels=["instance_id"]
        )
        for instance in self._fleet.instances.values():
            limit.add_metric([instance.id], instance.window.limit)
        yield limit
