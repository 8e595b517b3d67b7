"""Gateways and instances as processes of this machine, started, probed and ended as the chart in k8s/ has it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from loadtest.upgrade.clients import MODEL
from server.cli.errors import ProcessFailed
from server.cli.processes import Child, share_of_cores
from server.cli.up import free_port
from weightsync import ensure_arena, open_store

CHART = Path(__file__).parent.parent.parent / "k8s" / "hotswap"
PROBE = CHART / "files" / "probe.py"
LEAVE_S = 15.0  # gateway.leave in values.yaml
GRACE_S = {"gateway": LEAVE_S + 45.0, "instance": 90.0}  # terminationGracePeriodSeconds
SETTLED_S = {"gateway": 5.0, "instance": 10.0}  # minReadySeconds
START_S = 600.0
VLLM_ARGS = ("--max-model-len", "2048", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(64 << 20))


class Pod:
    """One process; `ready` is its readiness probe."""

    def __init__(self, name: str, kind: str, port: int, child: Child, ready: Callable[[int], bool]) -> None:
        self.name, self.kind, self.port, self._child, self._ready = name, kind, port, child, ready

    def wait_ready(self) -> float:
        """Return when its probe has said yes for as long as its workload asks for; the seconds until it first did.

        Raises ProcessFailed when it ended, or is not ready in time.
        """
        started = time.monotonic()
        while not self._ready(self.port):
            if not self._child.alive or time.monotonic() - started > START_S:
                raise ProcessFailed(f"{self._child.name} does not get ready; the end of its log:\n{self._child.tail()}")
            time.sleep(0.2)
        seconds = time.monotonic() - started
        time.sleep(SETTLED_S[self.kind])
        return seconds

    def end(self) -> float:
        """SIGTERM; the seconds until it ended. Raises ProcessFailed if it had to be killed after its grace period."""
        started = time.monotonic()
        self._child.stop(GRACE_S[self.kind])
        seconds = time.monotonic() - started
        if seconds >= GRACE_S[self.kind]:
            raise ProcessFailed(f"{self._child.name} did not end in {GRACE_S[self.kind]:g} s and was killed")
        return seconds

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
        return self._started(name, "gateway", port, [*args, "--leave", str(LEAVE_S)], {}, _gateway_ready)

    def instance(self, number: int, name: str) -> Pod:
        """`name` is for its log; its id has the number alone, as pods of a StatefulSet keep their names."""
        port = free_port("127.0.0.1")
        args = ["server.cli", "instance", "--model", str(self._model), "--name", MODEL, "--store", self.store]
        args += ["--instance-id", f"rollout-{number}", "--port", str(port), *VLLM_ARGS]
        cores = share_of_cores(number, self._instances, VLLM_ARGS, os.environ)
        return self._started(name, "instance", port, args, cores, _instance_ready)

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


def _gateway_ready(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=3.0).status_code == 200
    return False


def _instance_ready(port: int) -> bool:
    """By the chart's own probe."""
    command = [sys.executable, "-I", str(PROBE), "ready", str(port), "/health"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
