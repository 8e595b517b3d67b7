"""Clients' view while every pod is replaced, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

from loadtest.measure.gaps import Gaps, Window, summary
from loadtest.measure.run import saying, with_machine
from loadtest.upgrade.clients import MODEL
from server.errors import CliError
from server.ports import free_port
from server.up.processes import Child, share_of_cores
from weightsync import Publisher, ensure_arena, open_store
from weightsync.control.records import SwapMode
from weightsync.errors import WeightSyncError

CHART = Path(__file__).parent.parent.parent / "k8s" / "hotswap"
PROBE = CHART / "files" / "probe.py"
LEAVE_S = 15.0  # gateway.leave in values.yaml
GRACE_S = {"gateway": LEAVE_S + 45.0, "instance": 90.0, "peer": 30.0}  # terminationGracePeriodSeconds
SETTLED_S = {"gateway": 5.0, "instance": 10.0, "peer": 0.0}  # minReadySeconds
START_S = 600.0
VLLM_ARGS = ("--max-model-len", "2048", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(64 << 20))


class Pod:
    """One process; `ready` is its readiness probe."""

    def __init__(self, name: str, kind: str, port: int, child: Child, ready: Callable[[int], bool]) -> None:
        self.name, self.kind, self.port, self._child, self._ready = name, kind, port, child, ready

    def wait_ready(self) -> float:
        """Return when its probe has said yes for as long as its workload asks for; the seconds until it first did.

        Raises CliError when it ended, or is not ready in time.
        """
        started = time.monotonic()
        while not self._ready(self.port):
            if not self._child.alive or time.monotonic() - started > START_S:
                raise CliError(f"{self._child.name} does not get ready; the end of its log:\n{self._child.tail()}")
            time.sleep(0.2)
        seconds = time.monotonic() - started
        time.sleep(SETTLED_S[self.kind])
        return seconds

    def end(self) -> float:
        """SIGTERM; the seconds until it ended. Raises CliError if it had to be killed after its grace period."""
        started = time.monotonic()
        self._child.stop(GRACE_S[self.kind])
        seconds = time.monotonic() - started
        if seconds >= GRACE_S[self.kind]:
            raise CliError(f"{self._child.name} did not end in {GRACE_S[self.kind]:g} s and was killed")
        return seconds

    def tell_to_end(self) -> None:
        """SIGTERM alone; `end` waits for it."""
        self._child.process.terminate()

    def kill(self) -> None:
        """At once, if it still runs."""
        self._child.stop(0.0)


class Site:
    """A store, an arena, and whatever pods were started. Use as a context: they are ended with it."""

    def __init__(self, work: Path, model: Path, instances: int) -> None:
        self._state, self._model, self._instances = work / "state", model, instances
        self.store = f"sqlite://{(self._state / 'store.db').resolve()}"
        self._arena = Path(f"/dev/shm/hotswap-upgrade-{os.getpid()}")  # noqa: S108 - directory of the slots
        self._pods: list[Pod] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[Site]:
        shutil.rmtree(self._state, ignore_errors=True)
        self._state.mkdir(parents=True)
        asyncio.run(_settle_arena(self.store, self._arena))
        try:
            yield self
        finally:
            for pod in reversed(self._pods):
                pod.kill()
            shutil.rmtree(self._arena, ignore_errors=True)

    def gateway(self, name: str) -> Pod:
        port, admin = free_port("127.0.0.1"), free_port("127.0.0.1")
        args = ["server.gateway", "--store", self.store, "--model", MODEL, "--port", str(port)]
        args += ["--admin-port", str(admin), "--admin-key-file", str(self._state / "admin.key")]
        return self._started(name, "gateway", port, [*args, "--leave", str(LEAVE_S)], {}, gateway_ready)

    def instance(self, number: int, name: str) -> Pod:
        """`name` is for its log; its id has the number alone, as pods of a StatefulSet keep their names."""
        port = free_port("127.0.0.1")
        args = ["server.cli", "instance", "--model", str(self._model), "--name", MODEL, "--store", self.store]
        args += ["--instance-id", f"rollout-{number}", "--port", str(port), *VLLM_ARGS]
        cores = share_of_cores(number, self._instances, VLLM_ARGS, os.environ)
        return self._started(name, "instance", port, args, cores, instance_ready)

    def _started(
        self, name: str, kind: str, port: int, args: list[str], env: dict[str, str], ready: Callable[[int], bool]
    ) -> Pod:
        pod = Pod(name, kind, port, Child(name, args, self._state / f"{name}.log", env), ready)
        self._pods.append(pod)
        return pod


async def _settle_arena(url: str, directory: Path) -> None:
    store = open_store(url)
    await ensure_arena(store, directory)
    await store.close()


def gateway_ready(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=3.0).status_code == 200
    return False


def instance_ready(port: int) -> bool:
    """By the chart's own probe."""
    command = [sys.executable, "-I", str(PROBE), "ready", str(port), "/health"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


FIRST, CHECKPOINTS = 100, 4
TIMEOUT_S = 90.0
DRAIN_S = 3.0  # what a rolling swap waits for streams


@dataclass(frozen=True)
class Swap:
    """One that was asked for; `outcome` is empty if it was committed."""

    kind: str
    during: str
    window: Window
    outcome: str


class Swaps:
    """Publishes versions from the process that benchmarks. Use as a context."""

    def __init__(self, store: str, models: list[Path]) -> None:
        from safetensors.torch import load_file

        self._weights = [load_file(model / "model.safetensors") for model in models]
        self._publisher = Publisher(store, model=MODEL)
        self.done: list[Swap] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[Swaps]:
        """The first version is published, and becomes active with the first instance."""
        with self._publisher:
            self._publisher.activate(self._publish(), wait=False, timeout_s=600.0)
            yield self

    def swap(self, kind: str, during: str) -> None:
        """ "together" and "rolling" bring a new version, "rollback" the one before; returns when it has ended."""
        started, outcome = time.monotonic(), ""
        try:
            if kind == "rollback":
                self._publisher.rollback(timeout_s=TIMEOUT_S)
            else:
                mode: SwapMode = "rolling" if kind == "rolling" else "together"
                self._publisher.activate(self._publish(), mode=mode, drain_s=DRAIN_S, timeout_s=TIMEOUT_S)
        except WeightSyncError as error:
            outcome = str(error)
        self.done.append(Swap(kind, during, (started, time.monotonic()), outcome))

    def _publish(self) -> int:
        schema: Any = [(name, t.dtype, t.shape) for name, t in self._weights[0].items()]
        with self._publisher.begin(schema) as draft:
            for name, tensor in self._weights[draft.version % CHECKPOINTS].items():
                draft.write(name, tensor)
            return draft.commit(activate=False)


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
        """The clients' report, once their last answers have come. Raises CliError."""
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
    models = saying(work, range(FIRST, FIRST + CHECKPOINTS))
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
    report = with_machine(summed_up(seen, upgrade, seconds) | {"clients": clients}, json)
    show(report)
    return report


def summed_up(seen: dict[str, Any], upgrade: Upgrade, seconds: float) -> dict[str, Any]:
    """The report, of what the clients saw and when what was done."""
    gaps = Gaps.of(seen["arrivals"])
    windows = {"nothing": upgrade.quiet, "swaps": [swap.window for swap in upgrade.swaps.done]}
    for tier in ("gateway", "instance"):
        windows[f"{tier}s replaced"] = [step.window for step in upgrade.steps if step.what.startswith(tier)]
    begun = upgrade.quiet[0][0]
    return of_clients(seen, begun) | {
        "seconds": round(seconds, 1),
        "leave_s": LEAVE_S,
        "connections": seen["connections"],
        "versions": seen["versions"],
        "gap_ms": {name: rounded(gaps.within(found)) for name, found in windows.items()},
        "steps": [timed(step, begun) for step in upgrade.steps],
        "swaps": [timed(swap, begun) for swap in upgrade.swaps.done],
    }


def of_clients(seen: Mapping[str, Any], begun: float) -> dict[str, Any]:
    """The figures of a report about requests, whatever was upgraded."""
    tally = seen["tally"]
    return {
        "requests": sum(seen["requests"].values()),
        "by_kind": seen["requests"],
        "continued_elsewhere": seen["resumed"],
        "checked": {name: tally[name] for name in ("answers", "tokens", "crossed", "wrong", "mislabelled")},
        "failed": tally["failed"],
        "failures": [{"at_s": round(at - begun, 2), "kind": kind, "what": what} for at, kind, what in seen["failures"]],
    }


def rounded(lengths: np.ndarray) -> dict[str, float]:
    """p50, p99 and max in milliseconds."""
    return {name: round(float(value), 1) for name, value in summary(lengths).items()}


def timed(what: Any, begun: float) -> dict[str, Any]:
    """As JSON, with `window` as seconds since the beginning."""
    return asdict(what) | {"window": [round(at - begun, 2) for at in what.window]}


def failures(report: Mapping[str, Any]) -> int:
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
    show_failures(report, console)


def show_failures(report: Mapping[str, Any], console: Console) -> None:
    """The first twenty."""
    for failure in report["failures"][:20]:
        console.print(f"{failure['at_s']:.1f} s, {failure['kind']}: {failure['what']}", highlight=False)
