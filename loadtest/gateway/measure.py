"""One run of the load client against one contender, and the figures that follow from it."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from loadtest.gateway.contenders import KEY, Cores, Load, Running, compiled, cpu_s, machine_cpu_s, pinned

Figures = dict[str, float]


@dataclass(frozen=True)
class Seen:
    """Measurements of one run: of the client, of the contender (`cpu_s`, all its threads) and of the machine."""

    client: Mapping[str, float]
    quantiles: Mapping[str, list[float]]  # of latency_us, ttft_us, gap_us: p50, p90, p99, max
    wall_s: float
    cpu_s: float
    busy_cores: float
    steal: float  # share of one core that the host took away


def run_load(load: Load, contender: Running, cores: Cores) -> Seen:
    """Asks `contender` as `load` says. Raises CalledProcessError if the client cannot."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(load.body)
        file.flush()
        options = [contender.port, load.clients, load.warm_s, load.seconds, load.stagger_ms, file.name, KEY]
        core = cores.client if contender.pid is not None else cores.proxy
        command = pinned(core, [str(compiled("client")), *map(str, options)])
        busy, steal = machine_cpu_s()
        used, begun = cpu_s(contender.pid) if contender.pid else 0.0, time.monotonic()
        output = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120).stdout
        wall = time.monotonic() - begun
        used = (cpu_s(contender.pid) if contender.pid else 0.0) - used
    after = machine_cpu_s()
    answer = orjson.loads(output)
    quantiles = {name: value for name, value in answer.items() if isinstance(value, list)}
    counts = {name: value for name, value in answer.items() if not isinstance(value, list)}
    return Seen(counts, quantiles, wall, used, (after[0] - busy) / wall, (after[1] - steal) / wall)


def figures(load: str, seen: Seen, direct: Seen) -> Figures:
    """The figures of a run of `load`; what is added is over `direct`, the same on the upstream itself just before."""
    count = seen.client
    rate = count["requests"] / count["seconds"]
    found: Figures = {"errors": count["errors"]}
    if load == "many":
        per_request = seen.cpu_s / max(1, count["all_requests"])
        found |= {"requests_per_s": rate, "cpu_us_per_request": per_request * 1e6}
        found["requests_per_core_s"] = 1 / per_request if per_request else 0.0
    elif load == "one":
        found |= _latency("latency", seen, direct)
    elif load == "paced":
        # The last event shares its write with the one before.
        chunks = max(1, count["all_events"] - count["all_requests"])
        found |= {"cpu_us_per_chunk": seen.cpu_s / chunks * 1e6, "core_share": seen.cpu_s / seen.wall_s}
        found |= {"chunks_per_s": count["events"] / count["seconds"]}
        found |= _latency("ttft", seen, direct) | _latency("gap", seen, direct)
    else:
        found |= {"large_requests_per_s": rate, "large_cpu_us": seen.cpu_s / max(1, count["all_requests"]) * 1e6}
    return found


def _latency(name: str, seen: Seen, direct: Seen) -> Figures:
    found: Figures = {}
    for at, label in ((0, "p50"), (2, "p99")):
        value = seen.quantiles[f"{name}_us"][at]
        found[f"{name}_us_{label}"] = value
        found[f"added_{name}_us_{label}"] = value - direct.quantiles[f"{name}_us"][at]
    return found
