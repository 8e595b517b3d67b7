"""This gateway beside the routers on PyPI, in front of the same fast upstream, in one run and one core each.

All contenders are started first and stay up; then, in each round and for each way of asking (loads.py), one after the
other is asked, the upstream itself first. So a slow moment of the machine meets all of them, and figures of one round
can be compared; read the medians, and the range beside them. CPU is what the scheduler has charged to the contender's
threads. Everything is on loopback. With three rounds it takes five minutes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest.gateway.cancel import STATES, disconnect_ms, observing
from loadtest.gateway.contenders import (
    CONTENDERS,
    LOADS,
    CannotStart,
    Cores,
    Load,
    Running,
    compiled,
    machine_cpu_s,
    pinned,
    rss_mb,
    running,
    started,
)
from loadtest.gateway.markdown import tables
from loadtest.gateway.measure import figures, run_load
from loadtest.gateway.report import Result, as_json
from loadtest.measure.machine import machine
from loadtest.measure.run import write
from server.ports import free_port

DIRECT = "direct"
ROUNDS = 3
CANCELS = 5

console = Console(stderr=True)


def run(
    json: Path | None = None, *, rounds: int = ROUNDS, only: Sequence[str] = (), loads: Sequence[Load] = LOADS
) -> dict[str, Result]:
    """Measures, prints a table, writes `json` if given. `only`: contenders whose name contains one of these."""
    compiled("client")
    begun, before = time.monotonic(), machine_cpu_s()
    host = machine() | {"load_average_before": os.getloadavg(), "rounds": rounds}
    results = _measure(rounds, only, loads)
    host |= _disturbance(begun, before) | {"load_average_after": os.getloadavg()}
    report = as_json(results, host)
    print(tables(report))
    for name in (name for name, result in results.items() if result.failed is not None):
        console.print(f"{name} was not measured: {results[name].failed}", markup=False)
    write(report, json)
    return results


def _measure(rounds: int, only: Sequence[str], loads: Sequence[Load]) -> dict[str, Result]:
    cores, upstream = Cores.available(), free_port()
    results: dict[str, Result] = {DIRECT: Result("the upstream itself")}
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "upstream.log"
        mock = stack.enter_context(contextlib.ExitStack())
        mock.enter_context(running(pinned(cores.upstream, [str(compiled("upstream")), str(upstream)]), log))
        contenders = [Running(DIRECT, upstream, None, ""), *_start_all(stack, upstream, cores, only, results)]
        for number in range(rounds):
            for load in loads:
                console.print(f"round {number + 1} of {rounds}: {load.name}")
                _ask_all(contenders, load, cores, results)
        for contender in contenders[1:]:
            if contender.pid is not None:
                results[contender.name].rounds.append({"rss_mb": rss_mb(contender.pid)})
        mock.close()
        _leave_all(contenders[1:], upstream, results)
    return results


def _start_all(
    stack: contextlib.ExitStack, upstream: int, cores: Cores, only: Sequence[str], results: dict[str, Result]
) -> list[Running]:
    ready = []
    for contender in CONTENDERS:
        if only and not any(word in contender.name for word in only):
            continue
        console.print(f"starting {contender.name}")
        results[contender.name] = Result(contender.requirement or "this checkout")
        try:
            ready.append(stack.enter_context(started(contender, upstream, cores)))
        except CannotStart as exc:
            results[contender.name].failed = str(exc)
    return ready


def _ask_all(contenders: Sequence[Running], load: Load, cores: Cores, results: dict[str, Result]) -> None:
    """One after the other; the first is the upstream itself."""
    direct = run_load(load, contenders[0], cores)
    for contender in contenders:
        seen = direct if contender.pid is None else run_load(load, contender, cores)
        results[contender.name].rounds.append(figures(load.name, seen, direct))


def _leave_all(contenders: Sequence[Running], upstream: int, results: dict[str, Result]) -> None:
    with observing(upstream) as observer:
        for state in reversed(STATES):  # connecting last: it closes every pooled connection
            for contender in contenders:
                console.print(f"leaving {contender.name}: {state}")
                times = [disconnect_ms(state, contender, observer, upstream) for _ in range(CANCELS)]
                results[contender.name].cancel_ms[state] = times


def _disturbance(begun: float, before: tuple[float, float]) -> dict[str, Any]:
    elapsed, after = time.monotonic() - begun, machine_cpu_s()
    return {
        "seconds": elapsed,
        "busy_cores": (after[0] - before[0]) / elapsed,
        "steal": (after[1] - before[1]) / elapsed,
    }
