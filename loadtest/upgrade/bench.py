"""A rolling upgrade of two gateways and two instances under load, as the chart does it, with swaps in the middle.

Gateways: the new one first; then the old one gets SIGTERM, serves on for --leave seconds and lets its answers end.
Instances, as in a StatefulSet: the old one drains and ends, then the new one starts, and the next is taken when that is
ready. Clients keep their connections, and ask nothing twice.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

from loadtest.checkpoints import make_constant_checkpoint
from loadtest.gaps import Gaps, Window, summary
from loadtest.machine import machine
from loadtest.upgrade.pods import LEAVE_S, Pod, Site
from loadtest.upgrade.swaps import CHECKPOINTS, FIRST, Swaps
from server.cli import interrupts
from server.cli.errors import CliError

GATEWAYS, INSTANCES = 2, 2
CLIENTS = {"stream": 3, "long": 1, "whole": 2, "seldom": 2}
QUIET_S = 10.0
END_S = 180.0  # for the last answers


class Load:
    """The process of the clients."""

    def __init__(self, clients: dict[str, int]) -> None:
        counts = [f"{kind}={count}" for kind, count in clients.items()]
        command = [sys.executable, "-m", "loadtest.upgrade.clients", str(FIRST), str(CHECKPOINTS), *counts]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)

    def wait_running(self) -> None:
        """Raises CliError."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "running\n":
            raise CliError("the clients have ended early; their reason is above")

    def stop(self) -> dict[str, Any]:
        """What they saw, once their last answers have come. Raises CliError."""
        output, _ = self._process.communicate("stop\n", timeout=END_S)
        if self._process.returncode != 0:
            raise CliError(f"the clients ended with status {self._process.returncode}; their reason is above")
        return dict(orjson.loads(output))

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Step:
    """One replacement; `ended_s` is what the old process took to end, `ready_s` what the new one took to get ready."""

    what: str
    window: Window
    ended_s: float
    ready_s: float


@dataclass
class Upgrade:
    """Replaces pods. `quiet`: windows in which nothing was replaced or swapped."""

    site: Site
    load: Load
    swaps: Swaps
    steps: list[Step] = field(default_factory=list)
    quiet: list[Window] = field(default_factory=list)

    def run(self, gateways: list[Pod], instances: list[Pod]) -> float:
        """Returns the seconds it took, swaps included."""
        self._rest()
        started = time.monotonic()
        for number, old in enumerate(gateways):
            self._gateway(old, f"gateway-{number}-new", swap=number == 0)
        self.swaps.swap("rolling", "between gateways and instances")
        for number, old in reversed(list(enumerate(instances))):
            self._instance(old, number, swap=number == 0)
            if number:
                self.swaps.swap("rollback", "one instance new, one old")
        seconds = time.monotonic() - started
        self.swaps.swap("together", "after the upgrade")
        self._rest()
        return seconds

    def _gateway(self, old: Pod, name: str, *, swap: bool) -> None:
        started = time.monotonic()
        new = self.site.gateway(name)
        self.load.tell("add", new.name, new.port)
        ready_s = new.wait_ready()
        with self._meanwhile("together", "an old gateway leaves", wanted=swap):
            ended_s = old.end()
        self.load.tell("remove", old.name)
        self._note(old, started, ended_s, ready_s)

    def _instance(self, old: Pod, number: int, *, swap: bool) -> None:
        started = time.monotonic()
        ended_s = old.end()
        new = self.site.instance(number, f"{old.name}-new")
        with self._meanwhile("together", "a new instance starts", wanted=swap):
            ready_s = new.wait_ready()
        self._note(old, started, ended_s, ready_s)

    @contextlib.contextmanager
    def _meanwhile(self, kind: str, during: str, *, wanted: bool) -> Iterator[None]:
        """With a swap beside what is done inside, if it is wanted."""
        with ThreadPoolExecutor(1) as pool:
            swapping = pool.submit(self.swaps.swap, kind, during) if wanted else None
            yield
            if swapping is not None:
                swapping.result()

    def _note(self, old: Pod, started: float, ended_s: float, ready_s: float) -> None:
        self.steps.append(Step(old.name, (started, time.monotonic()), round(ended_s, 2), round(ready_s, 2)))

    def _rest(self) -> None:
        started = time.monotonic()
        time.sleep(QUIET_S)
        self.quiet.append((started, time.monotonic()))


def run(json: Path | None, *, clients: dict[str, int] | None = None) -> dict[str, Any]:
    """Upgrade under load, print the outcome, write it to `json`; returns it. `failures` counts what went wrong."""
    work, clients = Path("runs") / "upgrade", clients or CLIENTS
    models = [_checkpoint(work / f"say-{number}", FIRST + number) for number in range(CHECKPOINTS)]
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(Site(work, models[0], INSTANCES).open())
        instances = [site.instance(number, f"instance-{number}") for number in range(INSTANCES)]
        gateways = [site.gateway(f"gateway-{number}") for number in range(GATEWAYS)]
        swaps = stack.enter_context(Swaps(site.store, models).open())
        load = Load(clients)
        stack.callback(load.kill)
        for pod in gateways:
            load.tell("add", pod.name, pod.port)
        for pod in (*instances, *gateways):
            pod.wait_ready()
        load.wait_running()
        upgrade = Upgrade(site, load, swaps)
        seconds = upgrade.run(gateways, instances)
        seen = load.stop()
    report = summed_up(seen, upgrade, seconds) | {"clients": clients, "machine": machine()}
    show(report)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
    return report


def _checkpoint(path: Path, token: int) -> Path:
    return path if (path / "config.json").exists() else make_constant_checkpoint(path, token=token)


def summed_up(seen: dict[str, Any], upgrade: Upgrade, seconds: float) -> dict[str, Any]:
    """The report, of what the clients saw and when what was done."""
    gaps, tally = Gaps.of(seen["arrivals"]), seen["tally"]
    windows = {"nothing": upgrade.quiet, "swaps": [swap.window for swap in upgrade.swaps.done]}
    for tier in ("gateway", "instance"):
        windows[f"{tier}s replaced"] = [step.window for step in upgrade.steps if step.what.startswith(tier)]
    begun = upgrade.quiet[0][0]
    return {
        "seconds": round(seconds, 1),
        "leave_s": LEAVE_S,
        "requests": sum(seen["requests"].values()),
        "by_kind": seen["requests"],
        "connections": seen["connections"],
        "continued_elsewhere": seen["resumed"],
        "versions": seen["versions"],
        "checked": {name: tally[name] for name in ("answers", "tokens", "crossed", "wrong", "mislabelled")},
        "failed": tally["failed"],
        "failures": [{"at_s": round(at - begun, 2), "kind": kind, "what": what} for at, kind, what in seen["failures"]],
        "gap_ms": {name: rounded(gaps.within(found)) for name, found in windows.items()},
        "steps": [_timed(step, begun) for step in upgrade.steps],
        "swaps": [_timed(swap, begun) for swap in upgrade.swaps.done],
    }


def rounded(lengths: np.ndarray) -> dict[str, float]:
    """p50, p99 and max in milliseconds."""
    return {name: round(float(value), 1) for name, value in summary(lengths).items()}


def _timed(what: Any, begun: float) -> dict[str, Any]:
    """As JSON, with `window` as seconds since the beginning."""
    return asdict(what) | {"window": [round(at - begun, 2) for at in what.window]}


def failures(report: dict[str, Any]) -> int:
    """Requests that failed, tokens of other weights than their label says, and labels that do not fit."""
    return int(report["failed"] + report["checked"]["wrong"] + report["checked"]["mislabelled"])


def show(report: dict[str, Any]) -> None:
    checked, console = report["checked"], Console()
    table = Table("", "", title="rolling upgrade under load")
    table.add_row("seconds", f"{report['seconds']:g}")
    table.add_row("requests", f"{report['requests']:,}, on {report['connections']:,} connections")
    table.add_row("failed", f"{report['failed']}")
    table.add_row("tokens checked", f"{checked['tokens']:,}")
    table.add_row("of other weights than their label; wrong labels", f"{checked['wrong']}; {checked['mislabelled']}")
    table.add_row("answers over a swap", f"{checked['crossed']:,}")
    table.add_row("went on at another instance", f"{report['continued_elsewhere']:,}")
    console.print(table)
    table = Table("token gap, ms", "p50", "p99", "max")
    for name, found in report["gap_ms"].items():
        table.add_row(name, *(f"{found[p]:.0f}" for p in ("p50", "p99", "max")))
    console.print(table)
    table = Table("replaced", "seconds", "old ended in", "new ready in")
    for step in report["steps"]:
        start, end = step["window"]
        table.add_row(step["what"], f"{end - start:.0f}", f"{step['ended_s']:.1f}", f"{step['ready_s']:.1f}")
    console.print(table)
    table = Table("swap", "while", "seconds", "outcome")
    for swap in report["swaps"]:
        start, end = swap["window"]
        table.add_row(swap["kind"], swap["during"], f"{end - start:.1f}", swap["outcome"] or "committed")
    console.print(table)
    for failure in report["failures"][:20]:
        console.print(f"{failure['at_s']:.1f} s, {failure['kind']}: {failure['what']}")


def main() -> None:
    interrupts.install()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the report to this file as well")
    sys.exit(1 if failures(run(parser.parse_args().json)) else 0)


if __name__ == "__main__":
    main()
