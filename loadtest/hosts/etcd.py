"""An etcd with a member on each host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as in weightsync/store/etcd_members.py: we start processes

import grpc
from aetcd import rpc

from loadtest.hosts.namespaces import Hosts, reaches, until

CLIENTS, PEERS = 2379, 2380
MISSING = "no etcd: run `make setup`, or install Debian's etcd-server"


def binary() -> str | None:
    """etcd from PATH, or where scripts/debian.sh unpacks it."""
    unpacked = Path(sys.prefix) / "etcd/usr/bin/etcd"
    return shutil.which("etcd") or (str(unpacked) if unpacked.exists() else None)


class Members:
    """A member on each of the hosts `on`; who starts them is somebody else's affair. Their data are in `directory`."""

    def __init__(self, hosts: Hosts, binary: str, directory: Path, on: Sequence[int] = (0, 1, 2)) -> None:
        self.hosts, self.on, self._binary, self._directory = hosts, list(on), binary, directory

    def url(self, namespace: str, *, first: int | None = None, last: int | None = None) -> str:
        """Names all members; a client asks them in this order, the ones on `first` and `last` before and after the
        others."""
        order = sorted(self.on, key=lambda host: (host == last, host != first))
        return f"etcd://{','.join(f'{self.hosts.address(h)}:{CLIENTS}' for h in order)}/{namespace}"

    def command(self, host: int) -> list[str]:
        """What starts the member of a host, the first time and again. A write does not wait for a disk."""
        peers = {h: f"http://{self.hosts.address(h)}:{PEERS}" for h in self.on}
        client = f"http://{self.hosts.address(host)}:{CLIENTS}"
        arguments = {
            "name": f"m{host}", "data-dir": str(self._directory / f"m{host}"), "listen-client-urls": client,
            "advertise-client-urls": client, "listen-peer-urls": peers[host],
            "initial-advertise-peer-urls": peers[host], "logger": "zap", "log-level": "error",
            "initial-cluster": ",".join(f"m{h}={peer}" for h, peer in peers.items()),
        }  # fmt: skip
        return [self._binary, "--unsafe-no-fsync", *(f"--{name}={value}" for name, value in arguments.items())]

    def listen(self) -> bool:
        return all(reaches(self.hosts.address(host), CLIENTS) for host in self.on)

    def agreed(self) -> bool:
        """Whether all members follow one leader: one that was cut off brings about an election when it is back."""
        return len(views := {self._view(host) for host in self.on}) == 1 and all(views.pop())

    def _view(self, host: int) -> tuple[int, int]:
        """The leader and the term, as a member sees them; (0, 0) if it does not say."""
        with grpc.insecure_channel(f"{self.hosts.address(host)}:{CLIENTS}") as channel:
            try:
                status = rpc.MaintenanceStub(channel).Status(rpc.StatusRequest(), timeout=5)
            except grpc.RpcError:
                return 0, 0
            return status.leader, status.raftTerm


class Etcd(Members):
    """Members that run until `close`; their data are in memory."""

    def __init__(self, hosts: Hosts, binary: str, on: Sequence[int] = (0, 1, 2)) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="hotswap-etcd-", dir="/dev/shm"))
        super().__init__(hosts, binary, self.directory, on)
        self._processes: list[subprocess.Popen[Any]] = []
        try:
            self._processes += [self._start(host) for host in self.on]
            until(self.listen)
        except BaseException:
            self.close()
            raise

    def settle(self) -> None:
        """Waits until all members agree."""
        until(self.agreed)

    def _start(self, host: int) -> subprocess.Popen[Any]:
        with (self.directory / "log").open("ab") as log:
            return self.hosts.run(host, self.command(host), stdout=log, stderr=log)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.directory)
