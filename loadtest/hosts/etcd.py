"""An etcd with a member on each host, or of one member on this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as in weightsync/store/etcd_members.py: we start processes

import grpc
from aetcd import rpc

from loadtest.hosts.namespaces import Hosts, reaches, until
from server.ports import free_port
from weightsync.errors import StoreUnavailable
from weightsync.store import open_store

CLIENTS, PEERS = 2379, 2380
MISSING = "no etcd: run `make setup`, or install Debian's etcd-server"
START_TIMEOUT_S = 30.0
NO_CLIENT = "no etcdctl: run `make setup`, or install Debian's etcd-client"


def binary() -> str | None:
    """etcd from PATH, or where scripts/debian.sh unpacks it."""
    return _found("etcd")


def client() -> str | None:
    """etcdctl, likewise."""
    return _found("etcdctl")


def _found(program: str) -> str | None:
    unpacked = Path(sys.prefix) / f"etcd/usr/bin/{program}"
    return shutil.which(program) or (str(unpacked) if unpacked.exists() else None)


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
        """The command that starts the member of a host, the first time and again. A write does not wait for a disk."""
        client = f"http://{self.hosts.address(host)}:{CLIENTS}"
        arguments = {
            "listen-client-urls": client, "advertise-client-urls": client, "listen-peer-urls": self._peer(host),
            "logger": "zap", "log-level": "error", **self._membership(host),
        }  # fmt: skip
        return [self._binary, "--unsafe-no-fsync", *_words(arguments)]

    def save(self, snapshot: Path) -> None:
        """Write the data that the members agree on to `snapshot`. Raises CalledProcessError."""
        endpoint = f"--endpoints=http://{self.hosts.address(self.on[0])}:{CLIENTS}"
        _etcdctl(endpoint, "snapshot", "save", str(snapshot))

    def restore(self, snapshot: Path) -> None:
        """Members that are not running begin with the snapshot, as another cluster. Raises CalledProcessError."""
        token = secrets.token_hex(4)
        for host in self.on:
            shutil.rmtree(self._directory / f"m{host}")
            arguments = self._membership(host) | {"initial-cluster-token": token}
            _etcdctl("snapshot", "restore", str(snapshot), *_words(arguments))

    def _membership(self, host: int) -> dict[str, str]:
        cluster = ",".join(f"m{h}={self._peer(h)}" for h in self.on)
        return {
            "name": f"m{host}", "data-dir": str(self._directory / f"m{host}"),
            "initial-advertise-peer-urls": self._peer(host), "initial-cluster": cluster,
        }  # fmt: skip

    def _peer(self, host: int) -> str:
        return f"http://{self.hosts.address(host)}:{PEERS}"

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


def _words(arguments: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in arguments.items()]


def _etcdctl(*words: str) -> None:
    program = client()
    assert program is not None, NO_CLIENT
    environment = {**os.environ, "ETCDCTL_API": "3"}
    subprocess.run([program, *words], check=True, env=environment, capture_output=True, timeout=60)


class Etcd(Members):
    """Members that run until `close`; their data are in memory."""

    def __init__(self, hosts: Hosts, binary: str, on: Sequence[int] = (0, 1, 2)) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="hotswap-etcd-", dir="/dev/shm"))
        super().__init__(hosts, binary, self.directory, on)
        self._processes: list[subprocess.Popen[Any]] = []
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Waits until all members listen."""
        self._processes = [self._start(host) for host in self.on]
        until(self.listen)

    def stop(self) -> None:
        """The data stay."""
        for process in self._processes:
            process.kill()
            process.wait()

    def settle(self) -> None:
        """Waits until all members agree."""
        until(self.agreed)

    def _start(self, host: int) -> subprocess.Popen[Any]:
        with (self.directory / "log").open("ab") as log:
            return self.hosts.run(host, self.command(host), stdout=log, stderr=log)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.directory)


@contextlib.contextmanager
def alone(binary: str, directory: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """An etcd of one member on loopback: the store's URL, and the process id. Raises TimeoutError."""
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    arguments = {
        "data-dir": str(directory / "etcd"), "listen-client-urls": client, "advertise-client-urls": client,
        "listen-peer-urls": peer, "initial-advertise-peer-urls": peer, "initial-cluster": f"default={peer}",
        "log-level": "error",
    }  # fmt: skip
    url = f"etcd://{client.removeprefix('http://')}/bench"
    with (directory / "etcd.log").open("ab") as log:
        process = subprocess.Popen([binary, *_words(arguments), *flags], stdout=log, stderr=log)
    try:
        asyncio.run(_until_open(url))
        yield url, process.pid
    finally:
        process.kill()
        process.wait()


async def _until_open(url: str) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            with contextlib.suppress(StoreUnavailable):
                return await open_store(url).close()
            await asyncio.sleep(0.05)
