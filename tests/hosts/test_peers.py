"""A version published on one host comes to the others, over slow links, and while one is cut."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from loadtest.hosts.etcd import Etcd
from loadtest.hosts.namespaces import Hosts
from tests.cluster_tls import Authority
from tests.waiting import eventually
from tests.weightsync.fleet import KEYS, MODEL, Fleet, running_fleet
from weightsync import SlotReader
from weightsync.control.hosts import local_path
from weightsync.control.records import CopyRecord, VersionRecord
from weightsync.errors import StoreUnavailable

WAIT_S = 120.0
MEBIBYTES = 24
SLOW_MBIT = 40.0  # 5 s for a version
GONE = "gone"


class Peers:
    """An arena and a peer process on each host."""

    def __init__(self, hosts: Hosts, url: str, certificates: Path) -> None:
        self._hosts, self._url, self._certificates = hosts, url, certificates
        self.root = Path(tempfile.mkdtemp(prefix="hotswap-test-", dir="/dev/shm"))
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, host: int, *, read_timeout_s: float = 30.0) -> None:
        listen = f"{self._hosts.address(host)}:0"
        command = [sys.executable, "-m", "weightsync.peer", "--model", MODEL, "--listen", listen, "--transport", "tcp"]
        command += ["--cluster-tls", str(self._certificates), "--chunk", str(1 << 20)]
        command += ["--read-timeout", str(read_timeout_s)]
        with (self.root / f"h{host}.log").open("ab") as log:
            process = self._hosts.run(host, command, env=self._environment(host), stdout=log, stderr=log)
        self._processes.append(process)

    def publish(self, host: int, value: float) -> int:
        command = [sys.executable, "-m", "tests.hosts.programs", "publish", self._url, str(MEBIBYTES), str(value)]
        process = self._hosts.run(host, command, env=self._environment(host), stdout=subprocess.PIPE)
        said, _ = process.communicate(timeout=WAIT_S)
        return int(said)

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.root.glob("*.log")))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.root)

    def _environment(self, host: int) -> dict[str, str]:
        arena = str(self.root / f"arena{host}")
        return {"HOTSWAP_STORE": self._url, "HOTSWAP_HOST": f"h{host}", "HOTSWAP_ARENA": arena}


Made = Callable[..., Awaitable[tuple[Peers, str, int]]]


@pytest.fixture
def made(hosts: Hosts, etcd: Etcd, tmp_path: Path) -> Iterator[Made]:
    """Peers that are not started, their store in that namespace, and a version of `value` that host 0 has published."""
    certificates = Authority(tmp_path / "authority").mount(tmp_path / "tls")
    with contextlib.ExitStack() as closing:

        async def make(namespace: str, value: float, **options: int) -> tuple[Peers, str, int]:
            url = etcd.url(namespace, **options)
            peers = closing.enter_context(contextlib.closing(Peers(hosts, url, certificates)))
            return peers, url, await asyncio.to_thread(peers.publish, 0, value)

        yield make


@contextlib.asynccontextmanager
async def activated(url: str, version: int) -> AsyncIterator[Fleet]:
    """Active from here on, with a coordinator and no instances: peers fetch what is active."""
    async with running_fleet(url) as fleet:
        assert (await fleet.coordinator().activate(version)).ok
        yield fleet


async def copy(fleet: Fleet, peers: Peers, version: int, host: int, state: str) -> Path:
    """Where the copy on a host is, once it is in that state; GONE: without a record."""
    store = fleet.store()

    async def place() -> Path | None:
        with contextlib.suppress(StoreUnavailable):
            found = await store.get(KEYS.version(version))
            assert found is not None
            digest = VersionRecord.from_json(found.value).manifest_digest
            said = await store.get(KEYS.copy(digest, f"h{host}"))
            record = CopyRecord.from_json(said.value) if said is not None else None
            if (record.state if record is not None else GONE) == state:
                return (local_path(record.slot, f"h{host}") if record is not None else None) or peers.root
        return None

    return await eventually(place, WAIT_S, lambda: f"version {version} {state} on h{host}:\n{peers.logs()}")


def check(peers: Peers, path: Path, host: int, value: float) -> None:
    """The copy is the host's own, and every byte is as it was published."""
    assert path.is_relative_to(peers.root / f"arena{host}")
    with SlotReader.open(path) as reader:
        reader.verify_all()
        assert np.frombuffer(bytes(reader.buffer("b.value")), np.float32)[0] == value


@pytest.mark.broad
async def test_a_version_comes_to_all_hosts_over_links_that_delay_and_lose(hosts: Hosts, made: Made) -> None:
    there, url, version = await made("peers", 1.0)
    for host in range(3):
        hosts.shape(host, delay_ms=5, loss=0.002, mbit=800)
        there.start(host)
    async with activated(url, version) as fleet:
        for host in (1, 2):
            check(there, await copy(fleet, there, version, host, "ready"), host, 1.0)


async def test_a_host_whose_source_is_cut_off_reads_on_from_another(hosts: Hosts, made: Made) -> None:
    there, url, version = await made("peers-source", 2.0, last=0)
    async with activated(url, version) as fleet:
        there.start(0)
        there.start(1)
        await copy(fleet, there, version, 1, "ready")
        hosts.shape(2, mbit=SLOW_MBIT)
        there.start(2, read_timeout_s=10)  # what is asked for at once takes 3 s on that link
        await copy(fleet, there, version, 2, "fetching")
        hosts.cut(0)
        check(there, await copy(fleet, there, version, 2, "ready"), 2, 2.0)


@pytest.mark.broad
async def test_a_host_that_is_cut_off_while_it_reads_goes_on_when_it_is_back(hosts: Hosts, made: Made) -> None:
    there, url, version = await made("peers-reader", 3.0, last=2)
    async with activated(url, version) as fleet:
        there.start(0)
        hosts.shape(2, mbit=SLOW_MBIT)
        there.start(2)
        await copy(fleet, there, version, 2, "fetching")
        hosts.cut(2)
        await copy(fleet, there, version, 2, GONE)
        hosts.heal(2)
        check(there, await copy(fleet, there, version, 2, "ready"), 2, 3.0)
