"""Peers as real processes, each with an arena and a host name of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.up.forks import Forked
from tests.waiting import eventually, wait_until
from tests.warm import SYNC, warm
from tests.weightsync.fleet import Engine
from weightsync import Publisher, SlotReader, StageResult, Store, SyncStore
from weightsync.control.hosts import local_path
from weightsync.control.records import CopyRecord, InstanceRecord, Keys, VersionRecord
from weightsync.memory.arena import SlotLock
from weightsync.peer.copies import parsed, wait_for_slots

MODEL = "demo"
KEYS = Keys(MODEL)
CHUNK = 64 << 10
SLOW = ("--limit-gbps", 0.004)  # 0.5 MB/s: time to do something while it fetches
T = TypeVar("T")


class Hosts:
    """`start` a peer on a host, `publisher` one on it, and look at what becomes of versions."""

    def __init__(self, store_url: str, directory: Path, monkeypatch: pytest.MonkeyPatch, model: str = MODEL) -> None:
        self.model, self._keys = model, Keys(model)
        self.store_url, self._logs, self._monkeypatch = store_url, directory, monkeypatch
        self.peers: dict[str, Forked] = {}
        self.arenas: dict[str, Path] = {}
        self._publishers: list[Publisher] = []
        self._of: dict[str, Publisher] = {}
        self.store = SyncStore(store_url)

    def arena(self, host: str) -> Path:
        if host not in self.arenas:
            self.arenas[host] = Path(tempfile.mkdtemp(prefix=f"hotswap-test-{host}-", dir="/dev/shm"))
        return self.arenas[host]

    def environment(self, host: str) -> dict[str, str]:
        return {"HOTSWAP_HOST": host, "HOTSWAP_ARENA": str(self.arena(host)), "HOTSWAP_STORE": self.store_url}

    def start(self, names: str, *options: object) -> Forked:
        """A peer on each host, whose names are letters; the process of the last one."""
        for host in names:
            arguments = ["tests.weightsync.peer.hurried", "--model", self.model, "--transport", "tcp"]
            arguments += ["--lease-ttl", "2", "--chunk", str(CHUNK), "--read-timeout", "5", *map(str, options)]
            environment = {**os.environ, **self.environment(host), "OMP_NUM_THREADS": "1"}
            self.peers[host] = warm(SYNC).start(arguments, environment, self._logs / f"{host}.log")
        return self.peers[names[-1]]

    def kill(self, host: str) -> None:
        self.peers[host].kill()
        self.peers[host].wait()

    def log(self, host: str) -> str:
        return (self._logs / f"{host}.log").read_text()

    def publisher(
        self, host: str, lineage: str = "trainer", keep: int = 2, chunk: int = CHUNK, ttl_s: float = 5.0
    ) -> Publisher:
        for name, value in self.environment(host).items():
            self._monkeypatch.setenv(name, value)
        self._monkeypatch.setattr("weightsync.format.manifest.CHUNK", chunk)
        publisher = Publisher(self.store_url, model=self.model, lineage=lineage, keep=keep, lease_ttl_s=ttl_s)
        self._publishers.append(publisher)
        return publisher

    def publish(self, host: str, tensors: Mapping[str, np.ndarray] | None = None) -> VersionRecord:
        """The next version of the publisher on this host."""
        if host not in self._of:
            self._of[host] = self.publisher(host)
        self._of[host].publish(random_model(1) if tensors is None else tensors, wait=False)
        return newest(self._of[host])

    def published(self, host: str, tensors: Mapping[str, np.ndarray] | None = None) -> str:
        """The digest of such a version."""
        return self.publish(host, tensors).manifest_digest

    def copies(self, digest: str) -> dict[str, CopyRecord]:
        return {c.host: c for c in parsed(self._keys, self.store.list(self._keys.copies)[0]) if c.digest == digest}

    def wait_copy(self, host: str, digest: str, state: str = "ready", timeout_s: float = 60.0) -> CopyRecord:
        def found() -> CopyRecord | None:
            record = self.copies(digest).get(host)
            return record if record is not None and record.state == state else None

        return self.wait_for(found, host, digest, timeout_s)

    def wait_for(self, found: Callable[[], T | None], host: str, digest: str, timeout_s: float = 60.0) -> T:
        """The state that the peer of this host is to bring about with a version."""
        try:
            return wait_until(found, timeout_s)
        except AssertionError:
            pytest.fail(f"{host} has {self.copies(digest).get(host)}; its log ends\n{self.log(host)[-3000:]}")

    def arrived(self, host: str, digest: str, like: str = "a") -> CopyRecord:
        """Waits for a copy that is, byte for byte, as the one on another host."""
        copy = self.wait_copy(host, digest)
        assert bytes_of(copy) == bytes_of(self.wait_copy(like, digest))
        return copy

    def received(self, host: str, **labels: str) -> float:
        return self.metric(host, "hotswap_peer_received_bytes_total", **labels)

    def metric(self, host: str, name: str, /, **labels: str) -> float:
        """The sum over all labels that are not given."""
        text = wait_until(lambda: self._metrics(host), 60)
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def _metrics(self, host: str) -> str | None:
        """None while its records are away with its lease, or still those of a peer that was killed."""
        for copy in parsed(self._keys, self.store.list(self._keys.copies)[0]):
            if copy.host == host:
                with contextlib.suppress(httpx.ConnectError):
                    return httpx.get(f"http://{copy.address}/metrics", timeout=60).raise_for_status().text
        return None

    def close(self) -> None:
        for process in self.peers.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self.peers.values():
            process.wait()
        for publisher in self._publishers:
            publisher.close()
        self.store.close()
        for arena in self.arenas.values():
            shutil.rmtree(arena, ignore_errors=True)


class Fetching(Engine):
    """The engine of an instance on `host`, which opens what the peer there brings."""

    def __init__(self, store: Store, host: str) -> None:
        super().__init__()
        self._store, self._host = store, host
        self.opened: VersionRecord | None = None

    async def stage(self, version: VersionRecord) -> StageResult:
        self.opened = await wait_for_slots(self._store, KEYS, version, self._host, 60.0)
        return await super().stage(self.opened)


def random_model(seed: int, nbytes: int = 2 << 20) -> dict[str, np.ndarray]:
    """Tensors of about `nbytes` in which no two chunks are alike."""
    rng = np.random.default_rng(seed)
    return {f"layer.{i}": rng.standard_normal(nbytes // 16, np.float32) for i in range(4)}


def newest(publisher: Publisher) -> VersionRecord:
    return max((v for v in publisher.versions() if v.state == "ready"), key=lambda v: v.version)


def bytes_of(copy: CopyRecord) -> bytes:
    """All of a copy's slot, which must be a sound one."""
    path = path_of(copy)
    with SlotReader.open(path, manifest_digest=copy.digest) as reader:
        reader.verify_all()
    return path.read_bytes()


def path_of(copy: CopyRecord) -> Path:
    path = local_path(copy.slot, copy.host)
    assert path is not None
    return path


def is_free(path: Path) -> bool:
    """Whether no process holds the slot."""
    lock = SlotLock.try_exclusive(path)
    if lock is not None:
        lock.release()
    return lock is not None


async def serving(store: Store, version: int, instance: str, wait_s: float) -> InstanceRecord:
    """The record of an instance, once it serves that version."""

    async def serving() -> InstanceRecord | None:
        found = await store.get(KEYS.instance(instance))
        record = InstanceRecord.from_json(found.value) if found else None
        return record if record and (record.state, record.active_version) == ("SERVING", version) else None

    return await eventually(serving, wait_s)
