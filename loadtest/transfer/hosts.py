"""A version on its way to 1 to 8 hosts, by real peers on this machine, each with an arena of its own.

All on loopback, or each in a network namespace with a link of its own that carries so much and no more.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from loadtest.hosts.certificates import self_signed
from loadtest.hosts.namespaces import Hosts
from weightsync.control.records import CopyRecord, Keys
from weightsync.format import manifest
from weightsync.format.slices import Slices
from weightsync.peer.copies import parsed
from weightsync.peer.shelf import Regions
from weightsync.peer.slices import SlicesRecord, part_copy_key, slices_prefix
from weightsync.publish.publisher import Publisher
from weightsync.publish.spread import Gatherer, HostShare
from weightsync.publish.writer import join
from weightsync.store import SyncStore
from weightsync.tls import ClusterTls
from weightsync.transport import open_transport

MODEL = "transfer"
SOURCE = "source"
CHUNK = 4 << 20  # smaller than in service, as the versions are: a receiver that has one gives it on
KEYS = Keys(MODEL)
PATIENCE_S = 120.0
RACK = 4
TENSORS = 32  # of a version
Begin = Callable[[list[str], dict[str, str], Any], "subprocess.Popen[bytes]"]


class Fleet:
    """A source and receivers, all ready. Use as a context; only one at a time."""

    def __init__(
        self,
        receivers: int,
        *,
        gbit: float | None = None,
        chunk: int = CHUNK,
        places: int = 1,
        writers: int = 1,
        nbytes: int = 0,
    ) -> None:
        """`gbit` is what the link of each host carries; None: they are all on loopback. With several `places`, each
        host needs one of as many equal slices of a version of `nbytes`, as where instances span so many hosts. With
        several `writers` the source and so many receivers but one write equal shares of a version."""
        self._writers = [f"receiver-{number}" for number in range(writers - 1)]
        self._receivers, self._gbit, self._chunk, self._stack = receivers, gbit, chunk, contextlib.ExitStack()
        self._slices = _slices(places, nbytes) if places > 1 else ()
        self._tls: ClusterTls | None = None

    def __enter__(self) -> Fleet:
        with self._stack as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotswap-hosts-")))
            url = f"sqlite://{directory}/store.db"
            self._store = stack.enter_context(contextlib.closing(SyncStore(url)))
            begins: list[Begin] = [_on_loopback] * (self._receivers + 1)
            if self._gbit is not None:
                begins = self._on_links(stack, directory)
            for number in range(self._receivers if self._slices else 0):
                self._say(f"receiver-{number}", self._slices[number % len(self._slices)])
            if self._slices and self._writers:
                self._say(SOURCE, self._slices[0])  # it need not have what others wrote
            for number in range(self._receivers):
                stack.enter_context(_peer(f"receiver-{number}", url, directory, self._chunk, begins[number + 1]))
            environment = stack.enter_context(_peer(SOURCE, url, directory, self._chunk, begins[0]))
            stack.enter_context(_variables(environment))
            stack.enter_context(_chunks_of(self._chunk))
            self._publisher = stack.enter_context(contextlib.closing(Publisher(url, model=MODEL)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _on_links(self, stack: contextlib.ExitStack, directory: Path) -> list[Begin]:
        """Functions that start a peer on each host; every RACK receivers are a rack."""
        assert self._gbit is not None
        certificates = self_signed(directory / "tls")
        self._tls = ClusterTls(certificates)
        hosts = stack.enter_context(Hosts(self._receivers + 1))
        for number in range(self._receivers + 1):
            hosts.limit(number, self._gbit)

        def begin(number: int, command: list[str], environment: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
            own = ["--listen", f"{hosts.address(number)}:0", "--cluster-tls", str(certificates)]
            own += ["--rack", f"rack-{(number - 1) // RACK}"]
            return hosts.run(number, [*command, *own], env=environment, stdout=log, stderr=log)

        return [partial(begin, number) for number in range(self._receivers + 1)]

    def distribute(self, nbytes: int, seed: int) -> float:
        """Publish new weights of as many bytes; seconds from the commit until the last host has announced its copy."""
        tensors = _tensors(np.random.default_rng(seed).standard_normal(nbytes // 4, np.float32))
        with contextlib.ExitStack() as shares:
            return self._distributed(self._publish(tensors, shares))

    def _publish(self, tensors: dict[str, np.ndarray[Any, Any]], shares: contextlib.ExitStack) -> int:
        """Returns the version. The tensors lie one after the other on the writers, as stages of a pipeline do."""
        if not self._writers:
            return self._publisher.publish(tensors, wait=False)
        while not set(self._writers) <= (directories := self._publisher.share_hosts()).keys():
            time.sleep(0.005)
        transport = shares.enter_context(open_transport("tcp", listen="127.0.0.1", tls=None))
        regions = Regions(transport)
        schema = manifest.schema_of((name, "float32", array.shape) for name, array in tensors.items())
        draft = shares.enter_context(self._publisher.begin(schema))
        mine, *others = np.array_split(np.array(sorted(tensors)), 1 + len(self._writers))
        for name in mine:
            draft.write(str(name), tensors[str(name)])
        parts, written = {}, []
        for rank, (host, names) in enumerate(zip(self._writers, others, strict=True), 1):
            share = HostShare(directories[host], MODEL, draft.version, schema, self._publisher.kept())
            shares.callback(share.close)
            writer = join(share.ticket, rank)
            for name in names:
                writer.write(str(name), tensors[str(name)])
            parts[host], offer = share.settle([writer.seal()], regions, transport.endpoint)
            Gatherer(transport, regions).gather(offer, draft)
            written.append(share)
        raw = draft.spread([], parts)
        for share in written:
            share.accept(raw)
        return draft.commit(activate=True)

    def _distributed(self, version: int) -> float:
        started = time.monotonic()
        digest = next(v.manifest_digest for v in self._publisher.versions() if v.version == version)
        while len(self._ready(digest)) <= self._receivers:
            if time.monotonic() - started > PATIENCE_S:
                raise SystemExit(f"not all hosts have version {version} after {PATIENCE_S:g} s")
            time.sleep(0.005)
        return time.monotonic() - started

    def from_source(self) -> float:
        """The share of what the receivers have read so far that came from the source itself."""
        read = [_received(copy.address, self._tls) for copy in self._addresses().values()]
        return sum(found.get(SOURCE, 0.0) for found in read) / sum(sum(found.values()) for found in read)

    def received(self) -> float:
        """The bytes that all receivers have read so far."""
        return sum(sum(_received(copy.address, self._tls).values()) for copy in self._addresses().values())

    def _say(self, host: str, slices: Slices) -> None:
        """As an instance on that host does."""
        record = SlicesRecord(host, "bench", slices.to_text())
        self._store.put(slices_prefix(KEYS, host) + "bench", record.to_json())

    def _ready(self, digest: str) -> list[str]:
        """The hosts that have all of it, or all that they need."""
        parts = (kv.key.rpartition("/") for kv in self._store.list(part_copy_key(KEYS, digest, ""))[0])
        return [c.host for c in self._copies() if c.digest == digest and c.state == "ready"] + [h for *_, h in parts]

    def _addresses(self) -> dict[str, CopyRecord]:
        """Of the receivers."""
        return {copy.host: copy for copy in self._copies() if copy.host != SOURCE}

    def _copies(self) -> list[CopyRecord]:
        return parsed(KEYS, self._store.list(KEYS.copies)[0])


def _on_loopback(command: list[str], environment: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})


@contextlib.contextmanager
def _peer(host: str, store: str, directory: Path, chunk: int, begin: Begin) -> Iterator[dict[str, str]]:
    """A peer; gives the variables by which others know that they are on its host."""
    arena = tempfile.mkdtemp(prefix=f"hotswap-{host}-", dir="/dev/shm")
    variables = {"HOTSWAP_HOST": host, "HOTSWAP_ARENA": arena, "HOTSWAP_STORE": store, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "weightsync.peer", "--model", MODEL, "--transport", "tcp"]
    with (directory / f"{host}.log").open("wb") as log:
        process = begin([*command, "--chunk", str(chunk)], variables, log)
    try:
        yield variables
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(arena, ignore_errors=True)


@contextlib.contextmanager
def _chunks_of(nbytes: int) -> Iterator[None]:
    """Versions that are published here meanwhile are cut into chunks of that size, as small as these versions are."""
    before, manifest.CHUNK = manifest.CHUNK, nbytes
    try:
        yield
    finally:
        manifest.CHUNK = before


@contextlib.contextmanager
def _variables(wanted: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _received(address: str, tls: ClusterTls | None) -> dict[str, float]:
    """Bytes by the host that they were read from."""
    scheme, verify = ("https", tls.client_context()) if tls is not None else ("http", True)
    text = httpx.get(f"{scheme}://{address}/metrics", timeout=30.0, verify=verify).raise_for_status().text
    found = re.findall(r'^hotswap_peer_received_bytes_total\{holder="([^"]+)"\} (\S+)$', text, re.MULTILINE)
    return {holder: float(value) for holder, value in found}


def _tensors(weights: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The weights as tensors that can be needed one by one."""
    return {f"weights.{number:02d}": part for number, part in enumerate(np.array_split(weights, TENSORS))}


def _slices(places: int, nbytes: int) -> tuple[Slices, ...]:
    """Slices that the hosts of each place need: tensors one after the other, as a stage of a pipeline does."""
    tensors = _tensors(np.empty(nbytes // 4, np.float32))
    schema = manifest.schema_of((name, "float32", array.shape) for name, array in tensors.items())
    parts = np.array_split(np.array(sorted(tensors)), places)
    return tuple(Slices.of(schema, [(str(n), 0, tensors[str(n)].nbytes) for n in names]) for names in parts)


def by_hosts(nbytes: int, rounds: int, counts: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """By the number of receiving hosts. The first two versions allocate the slots and are not counted."""
    figures = {}
    for count in counts:
        with Fleet(count) as fleet:
            taken = [fleet.distribute(nbytes, seed) for seed in range(rounds + 2)][2:]
            seconds = statistics.median(taken)
            figures[str(count)] = {
                "seconds": round(seconds, 3),
                "gbps": round(count * nbytes / seconds / 1e9, 2),
                "from_source": round(fleet.from_source(), 2),
            }
    return figures


def by_links(
    nbytes: int, rounds: int, counts: tuple[tuple[int, int, int], ...], gbit: float, chunk: int
) -> dict[str, Any]:
    """Each host behind a link of `gbit`. `of_a_link`: the seconds by those that all bytes take over one link.

    `counts`: (hosts, places, writers). With several places each host needs its place's slice alone: "8 of 2 places".
    With several writers some of the hosts have written a share of it: "8 from 2 writers".
    """
    link_s = nbytes * 8 / gbit / 1e9
    figures: dict[str, Any] = {"nbytes": nbytes, "chunk_nbytes": chunk, "link_gbit": gbit, "link_s": round(link_s, 3)}
    for count, places, writers in counts:
        with Fleet(count, gbit=gbit, chunk=chunk, places=places, writers=writers, nbytes=nbytes) as fleet:
            fleet.distribute(nbytes, 0)
            before, received = _cpu_s(), fleet.received()
            taken = [fleet.distribute(nbytes, seed) for seed in range(1, rounds + 1)]
            of, by = f" of {places} places" if places > 1 else "", f" from {writers} writers" if writers > 1 else ""
            figures[f"{count}{of}{by}"] = {
                "seconds": [round(seconds, 2) for seconds in taken],
                "of_a_link": round(statistics.median(taken) / link_s, 3),
                "read_by_each": round((fleet.received() - received) / count / rounds / nbytes, 3),
                "copies_from_source": round(fleet.from_source() * count / places, 2),
                "cores": round((_cpu_s() - before) / sum(taken), 2),
            }
    return figures


def _cpu_s() -> float:
    """Of all processes of this machine, the kernel's part with it, since it started."""
    busy = psutil.cpu_times()
    return float(busy.user + busy.system + busy.softirq + busy.irq)
