"""What runs on the hosts: etcd, one member on each, and programs of the tests that are asked over their stdin."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from aetcd import rpc

from tests.etcd import require as require_etcd
from tests.hosts.namespaces import Hosts, reaches, until

CLIENTS, PEERS = 2379, 2380


class Etcd:
    """A member on each of the hosts `on`. Its data are in memory, so that a write does not wait for a disk."""

    def __init__(self, hosts: Hosts, on: Sequence[int] = (0, 1, 2)) -> None:
        self._hosts, self._on = hosts, list(on)
        self._binary = require_etcd()
        self._directory = Path(tempfile.mkdtemp(prefix="hotswap-etcd-", dir="/dev/shm"))
        self._processes = [self._start(host) for host in self._on]
        until(lambda: all(reaches(hosts.address(host), CLIENTS) for host in self._on))

    def url(self, namespace: str, *, last: int | None = None) -> str:
        """Names all members; a client asks them in this order, the one on host `last` after the others."""
        order = sorted(self._on, key=lambda host: host == last)
        return f"etcd://{','.join(f'{self._hosts.address(h)}:{CLIENTS}' for h in order)}/{namespace}"

    def settle(self) -> None:
        """Waits until all members follow one leader: one that was cut off brings about an election when it is back."""
        until(lambda: len(views := {self._view(host) for host in self._on}) == 1 and all(views.pop()))

    def _view(self, host: int) -> tuple[int, int]:
        """The leader and the term, as a member sees them; (0, 0) if it does not say."""
        with grpc.insecure_channel(f"{self._hosts.address(host)}:{CLIENTS}") as channel:
            try:
                status = rpc.MaintenanceStub(channel).Status(rpc.StatusRequest(), timeout=5)
            except grpc.RpcError:
                return 0, 0
            return status.leader, status.raftTerm

    def _start(self, host: int) -> subprocess.Popen[Any]:
        peers = {h: f"http://{self._hosts.address(h)}:{PEERS}" for h in self._on}
        client = f"http://{self._hosts.address(host)}:{CLIENTS}"
        arguments = {
            "name": f"m{host}", "data-dir": str(self._directory / f"m{host}"), "listen-client-urls": client,
            "advertise-client-urls": client, "listen-peer-urls": peers[host],
            "initial-advertise-peer-urls": peers[host], "logger": "zap", "log-level": "error",
            "initial-cluster": ",".join(f"m{h}={peer}" for h, peer in peers.items()),
        }  # fmt: skip
        flags = [f"--{name}={value}" for name, value in arguments.items()]
        with (self._directory / "log").open("ab") as log:
            return self._hosts.run(host, [self._binary, "--unsafe-no-fsync", *flags], stdout=log, stderr=log)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._directory)


class Program:
    """A `python -m MODULE` of the tests on a host, that prints lines and may be asked."""

    def __init__(self, hosts: Hosts, host: int, module: str, *arguments: object) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self.process = hosts.run(host, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """What it says next, "" when it has ended."""
        assert self.process.stdout is not None
        return str(self.process.stdout.readline()).strip()

    def ask(self, question: str) -> Any:
        print(question, file=self.process.stdin, flush=True)
        return json.loads(self.line())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
