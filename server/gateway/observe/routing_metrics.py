"""How requests were routed, and how the instances fared, for `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from server.gateway.fleet.health import STATES
from server.gateway.fleet.view import Fleet


def routing_metrics(fleet: Fleet) -> Iterator[Metric]:
    """Labels are bounded by the number of instances."""
    yield from _choices(fleet)
    yield from _health(fleet)


def _choices(fleet: Fleet) -> Iterator[Metric]:
    picks = CounterMetricFamily("hotswap_gateway_picks", "Choices of an instance, by what decided", labels=["by"])
    for by, count in fleet.picks.items():
        picks.add_metric([by], count)
    retries = CounterMetricFamily("hotswap_gateway_retries", "Requests sent on to another instance", labels=["reason"])
    for reason, count in fleet.retries.items():
        retries.add_metric([reason], count)
    exhausted = fleet.budget.exhausted
    yield from (picks, retries)
    yield CounterMetricFamily("hotswap_gateway_retries_over_budget", "Retries that were not made", value=exhausted)


def _health(fleet: Fleet) -> Iterator[Metric]:
    circuit = GaugeMetricFamily(
        "hotswap_instance_circuit_state", "1 for the state of its circuit", labels=["instance_id", "state"]
    )
    ejections = CounterMetricFamily("hotswap_instance_ejections", "Times it was ejected", labels=["instance_id"])
    answering = GaugeMetricFamily("hotswap_instance_answering", "1 if it answers health checks", labels=["instance_id"])
    draining = GaugeMetricFamily("hotswap_instance_draining", "1 if it takes nothing new", labels=["instance_id"])
    load = GaugeMetricFamily("hotswap_instance_load", "Load as the routing policy counts it", labels=["instance_id"])
    now = time.monotonic()
    for i in fleet.instances.values():
        for state in STATES:
            circuit.add_metric([i.id, state], float(i.health.state(now) == state))
        ejections.add_metric([i.id], i.health.ejections)
        answering.add_metric([i.id], float(i.health.answering))
        draining.add_metric([i.id], float(fleet.is_draining(i)))
        load.add_metric([i.id], i.load)
    yield from (circuit, ejections, answering, draining, load)
