"""Hosts on this machine, each with a name, an arena and processes of its own, and one store between them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from server.errors import CliError
from server.ports import free_port
from server.up.processes import BIND_ENV, THREADS_ENV, Child
from weightsync.control.records import ActiveRecord, CopyRecord, InstanceRecord, Keys
from weightsync.peer.copies import parsed
from weightsync.store import SyncStore

MODEL, SOURCE = "feeding", "source"
KEYS = Keys(MODEL)
START_S = 600.0
VLLM_ARGS = ("--max-model-len", "2048", "--max-num-seqs", "16")
SERVING_KV, JOINING_KV = 3 << 30, 256 << 20  # bytes; an engine fills its KV cache with zeros as it starts
ONE_THREAD = {BIND_ENV: "nobind", THREADS_ENV: "1"}  # the engine computes on one core; which one is said from outside


def vllm_args(kv_nbytes: int) -> list[str]:
    return [*VLLM_ARGS, "--kv-cache-memory-bytes", str(kv_nbytes)]


@dataclass(frozen=True)
class Host:
    """`variables` tell a process that it is on it."""

    name: str
    site: Site
    arena: Path

    @property
    def variables(self) -> dict[str, str]:
        return {"HOTSWAP_HOST": self.name, "HOTSWAP_ARENA": str(self.arena), "HOTSWAP_STORE": self.site.url}

    def child(self, name: str, args: list[str]) -> Child:
        log = self.site.directory / f"{self.name}-{name}.log"
        return Child(f"{name} of {self.name}", args, log, self.variables | ONE_THREAD)

    def peer(self) -> Child:
        return self.child("peer", ["weightsync.peer", "--model", MODEL, "--transport", "tcp"])

    def instance(self, port: int, kv_nbytes: int = SERVING_KV) -> Child:
        args = ["server.cli", "instance", "--model", str(self.site.model), "--name", MODEL, "--port", str(port)]
        return self.child("instance", [*args, "--instance-id", self.name, *vllm_args(kv_nbytes)])


class Site:
    """A store in a directory that ends with the context; `model` is the checkpoint that is served."""

    def __init__(self, model: Path) -> None:
        self.model = model

    @contextlib.contextmanager
    def open(self) -> Iterator[Site]:
        with tempfile.TemporaryDirectory(prefix="hotswap-feeding-") as directory:
            self.directory, self.url = Path(directory), f"sqlite://{directory}/store.db"
            with contextlib.closing(SyncStore(self.url)) as self._store:
                yield self

    @contextlib.contextmanager
    def host(self, name: str) -> Iterator[Host]:
        """A host that holds nothing."""
        arena = Path(tempfile.mkdtemp(prefix=f"hotswap-{name}-", dir="/dev/shm"))
        try:
            yield Host(name, self, arena)
        finally:
            shutil.rmtree(arena, ignore_errors=True)

    def active(self) -> ActiveRecord | None:
        found = self._store.get(KEYS.active)
        return ActiveRecord.from_json(found.value) if found is not None else None

    def copy(self, host: str) -> CopyRecord | None:
        """The record of a host's peer about the version there."""
        return next((c for c in parsed(KEYS, self._store.list(KEYS.copies)[0]) if c.host == host), None)

    def instance(self, host: str) -> InstanceRecord | None:
        found = self._store.get(KEYS.instance(host))
        return InstanceRecord.from_json(found.value) if found is not None else None


@dataclass(frozen=True)
class Serving:
    """The host that holds the version, and what runs there."""

    host: Host
    url: str
    peer: Child
    engine: Child
    engine_url: str
    gateway: Child


@contextlib.contextmanager
def serving(site: Site) -> Iterator[Serving]:
    """A gateway, which coordinates, a peer and an instance on one host, when the instance serves the version."""
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(site.host(SOURCE))
        ports = [free_port("127.0.0.1") for _ in range(3)]
        public, admin, engine = map(str, ports)
        gateway = ["server.gateway", "--model", MODEL, "--port", public, "--admin-port", admin]
        peer = started(stack, host.peer())
        front = started(stack, host.child("gateway", [*gateway, "--admin-key-file", str(site.directory / "admin.key")]))
        instance = started(stack, host.instance(ports[2]))
        started(stack, host.child("push", ["weightsync.push", "--model", MODEL, str(site.model)]))
        wait(lambda: _serves(site), instance)
        wait(lambda: (copy := site.copy(SOURCE)) is not None and copy.state == "ready", peer)
        yield Serving(host, f"http://127.0.0.1:{public}", peer, instance, f"http://127.0.0.1:{engine}", front)


def started(stack: contextlib.ExitStack, child: Child) -> Child:
    """A child that ends with `stack`."""
    stack.callback(child.stop)
    return child


def wait(holds: Callable[[], bool], child: Child, timeout_s: float = START_S, every_s: float = 0.05) -> None:
    """Until it holds. Raises CliError when `child` ends before, or the time is up."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if not child.alive or time.monotonic() > deadline:
            raise CliError(f"{child.name} does not get there; the end of its log:\n{child.tail()}")
        time.sleep(every_s)


def _serves(site: Site) -> bool:
    record, active = site.instance(SOURCE), site.active()
    return record is not None and active is not None and record.active_version == active.version
