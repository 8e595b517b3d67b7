"""`hotswap up` without engines: a real store, real slots and copies, and doubles in the place of its processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from server.gateway.access.key_sources import KeyStore, NewKey
from server.gateway.access.keys import KeyRing
from server.gateway.access.records import INFER, By
from server.key_limits import KeyLimits
from server.up.config import UpConfig
from server.up.server import Server
from tests.weightsync.fleet import Engine
from tests.weightsync.tensors import model, read_back, save_safetensors
from weightsync import Coordinator, Participant, Publisher, Store, SyncStore, open_store
from weightsync.control import swap
from weightsync.control.records import ActiveRecord, CounterRecord, InstanceRecord, Keys, SwapRecord, VersionRecord
from weightsync.errors import WeightSyncError
from weightsync.persist.__main__ import Persister
from weightsync.persist.disk import Disk
from weightsync.push import push

STARTS = ()  # `up` starts nothing here
MODEL = "toy"
STARTING = (
    "server/up/server.py", "server/up/state.py", "server/up/resume.py", "server/files.py", "persist/restore.py",
    "persist/disk.py",
)  # fmt: skip
PERSISTING = ("weightsync/persist/",)
_CONTROL = ("swap", "agent", "agent_state", "coordinator", "history", "state")
SWAPPING = (*(f"weightsync/control/{name}.py" for name in _CONTROL), "store/sqlite_db.py")
STOPPING = ("server/up/server.py", "server/up/state.py", "weightsync/persist/", "server/up/resume.py")
KEYS = Keys(MODEL)


class Child:
    """In the place of a process: it runs until it is stopped. The one that copies to disk does so when it is."""

    persists = True

    def __init__(self, name: str, args: Sequence[str], _log: object, env: Mapping[str, str], *_: object) -> None:
        self.name, self.args, self.env, self.alive, self.process = name, list(args), env, True, self
        self.returncode: int | None = None
        self.calls: list[str] = []
        self.grace_s = 0.0

    def cause(self) -> str:
        return ""

    def start(self) -> None:
        self.calls.append("start")
        self.alive = True

    def stop(self, grace_s: float = 0.0) -> None:
        self.calls.append("stop")
        self.grace_s, self.alive, self.returncode = grace_s, False, -15
        if self.name.startswith("persist") and self.persists:
            with contextlib.suppress(WeightSyncError):
                self.returncode = 0 if run(self._copied()) else 1

    async def _copied(self) -> bool:
        options = dict(zip(self.args[1::2], self.args[2::2], strict=True))
        disk, stopped = Disk(Path(options["--dir"]), keep=int(options["--keep"])), asyncio.Event()
        stopped.set()
        async with opened(options["--store"]) as store:
            with disk.lock():
                return await Persister(store, Keys(options["--model"]), disk).run(stopped)


class Answers:
    """The gateway's answers about instances, one look after the other: the id of each, its error, whether it serves.
    The last look is said again and again."""

    def __init__(
        self, *looks: Sequence[tuple[str, str | None, bool]], asleep: Sequence[str] = (), readyz: int = 200
    ) -> None:
        self.looks, self.asleep, self.readyz = list(looks), asleep, readyz

    def get(self, url: str, **_: Any) -> httpx.Response:
        body: dict[str, Any] = {"asleep": [{"id": name} for name in self.asleep]}
        if url.endswith("/admin/instances"):
            look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
            errors = {name: {"code": "c", "message": error} if error is not None else None for name, error, _ in look}
            rows = [{"id": name, "error": errors[name], "eligible": ok, "state": "STAGING"} for name, _, ok in look]
            body = {"instances": rows}
        status = self.readyz if url.endswith("/readyz") else 200
        return httpx.Response(status, json=body, request=httpx.Request("GET", url))


@dataclass
class Up:
    """One state directory, and the servers that are started with it one after the other."""

    checkpoint: Path
    state_dir: Path
    options: dict[str, Any] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    server: Server | None = None

    def new(self, **options: Any) -> Server:
        options = {"model": str(self.checkpoint), "name": MODEL, "port": 0, **self.options, **options}
        return Server(UpConfig(state_dir=self.state_dir, **options))

    def start(self, **options: Any) -> Server:
        """Started, and its publication done; by a coordinator without instances, so its commit comes at once."""
        self.told.clear()
        self.server = server = self.new(**options)
        server.start(self.told.append)
        self.publish(server)
        return server

    def publish(self, server: Server) -> None:
        for child in [child for name, child in server.children.items() if name.startswith("publish")]:
            args = child.args  # type: ignore[attr-defined]
            at = args.index("--model") + 1
            served, given = args[at], args[at + 1 :]
            part = given[given.index("--part") + 1] if "--part" in given else ""
            parts = dict(pair.split("=", 1) for pair in [given[given.index("--with") + 1]]) if "--with" in given else {}
            directory = Path(given[-1] if part else given[0])
            more = {name: Path(path) for name, path in parts.items()}
            version = push(directory, part=part, parts=more, store=server.store, model=served, activate=False)
            run(committed(server.store, version, served))

    def trained(self, value: float, *, commit: bool = True) -> int:
        """A version from a trainer: all its tensors are `value`."""
        assert self.server is not None
        with Publisher(self.server.store, model=MODEL) as publisher:
            version = publisher.publish(model(value), activate=False)
        if commit:
            run(committed(self.server.store, version))
        return version

    def ran(self, value: float | None = None, **options: Any) -> Server:
        """Started, one version trained if there is a `value`, and stopped."""
        server = self.start(**options)
        if value is not None:
            self.trained(value)
        self.stop()
        return server

    def stop(self) -> None:
        assert self.server is not None
        self.told.clear()
        self.server.stop(self.told.append)

    def kill(self) -> None:
        """The remains after a SIGKILL of all processes: files, shared memory, records under leases; and no lock."""
        assert self.server is not None
        self.server.state.release()
        self.server = None

    def lose_power(self) -> None:
        """`kill`, and the memory is gone."""
        assert self.server is not None
        arena = self.server.arena
        self.kill()
        for path in arena.glob("*"):
            path.unlink()

    def forget(self, version: int) -> None:
        """As if it and its number had never been."""
        with contextlib.closing(SyncStore(f"sqlite://{self.state_dir}/store.db")) as store:
            store.delete(KEYS.version(version))
            store.put(KEYS.counter, CounterRecord(version - 1).to_json())

    # looks

    @property
    def slots(self) -> list[Path]:
        assert self.server is not None
        return sorted(self.server.arena.glob("slot-*"))

    def records(self) -> dict[str, bytes]:
        return run(_records(f"sqlite://{self.state_dir}/store.db"))

    def active(self, model: str = MODEL) -> ActiveRecord:
        return ActiveRecord.from_json(self.records()[Keys(model).active])

    def swap(self) -> SwapRecord:
        return SwapRecord.from_json(self.records()[KEYS.swap])

    def version(self, number: int, model: str = MODEL) -> VersionRecord:
        return VersionRecord.from_json(self.records()[Keys(model).version(number)])

    def served(self, model: str = MODEL) -> tuple[int, float]:
        """The active version and the value that its tensors have, every byte verified."""
        record = self.version(self.active(model).version, model)
        (value,) = {float(v) for tensor in read_back(record).values() for v in tensor.reshape(-1)}
        return record.version, value

    def make_key(self) -> str:
        assert self.server is not None
        return run(_made_key(self.server.store))

    def forget_keys(self) -> None:
        assert self.server is not None
        run(_forgotten(self.server.store))

    def door(self, key: str | None) -> str:
        """The identity that a gateway that starts now gives to the bearer of `key`. Raises HttpError."""
        return run(_asked(f"sqlite://{self.state_dir}/store.db", key))


def save_checkpoint(directory: Path, value: float) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    save_safetensors(directory / "model.safetensors", model(value))
    return directory


def run(work: Any) -> Any:
    """On a loop and a thread of its own, so that tests with a loop may call it too."""
    found: list[Any] = []

    def in_thread() -> None:
        try:
            found.append((True, asyncio.run(work)))
        except BaseException as error:
            found.append((False, error))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    done, result = found[0]
    if not done:
        raise result
    return result


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = open_store(url, create=False)
    try:
        yield store
    finally:
        await store.close()


async def committed(url: str, version: int, model: str = MODEL) -> None:
    async with coordinator(url, model) as leader:
        await leader.activate(version)


@contextlib.asynccontextmanager
async def coordinator(url: str, model: str = MODEL) -> AsyncIterator[Coordinator]:
    async with opened(url) as store:
        leader = Coordinator(store, model)
        leader.start()
        try:
            yield leader
        finally:
            await leader.stop()


async def swapped(url: str, version: int) -> None:
    """As `committed`, with an instance that stages and flips."""
    engine = Engine(running=version - 1)
    engine.staged.add(version - 1)
    record = InstanceRecord("instance-0", "http://h:1", active_version=version - 1, pid=os.getpid())
    async with opened(url) as store:
        instance = Participant(store, MODEL, record, engine.stage, engine.commit, drop=engine.drop, lease_ttl_s=60.0)
        async with coordinator(url) as leader:
            instance.start()
            await instance.serving()
            await leader.activate(version)
        await instance.stop()
        assert engine.running == version


async def swap_until(url: str, holds: Callable[[SwapRecord], bool], ask: int | None = None) -> None:
    """Let a coordinator lead until the swap is as is wanted; `ask`: for this version, first."""
    async with opened(url) as store, coordinator(url):
        if ask is not None:
            await swap.request(store, KEYS, swap.new_target(ask, "test", 60.0))
        async with asyncio.timeout(120), contextlib.aclosing(store.watch(KEYS.swap, 1)) as events:
            async for event in events:
                if event.kind == "put" and holds(SwapRecord.from_json(event.kv.value)):
                    return


async def _records(url: str) -> dict[str, bytes]:
    async with opened(url) as store:
        return {kv.key: kv.value for kv in (await store.list(""))[0]}


async def _made_key(url: str) -> str:
    async with opened(url) as store:
        new = NewKey("somebody", (INFER,), None, KeyLimits())
        return (await KeyStore(store, KeyRing({}, required=False)).create(new, By("test")))[1]


async def _forgotten(url: str) -> None:
    async with opened(url) as store:
        keys = KeyStore(store, KeyRing({}, required=False))
        for record in await keys.every():
            await keys.change(record.id, lambda known: replace(known, revoked_at=time.time()), By("test"))
            await keys.forget(record.id, By("test"))


async def _asked(url: str, key: str | None) -> str:
    ring = KeyRing({}, required=False)
    async with opened(url) as store:
        await KeyStore(store, ring).refresh()
        return ring.authorize(key.encode() if key else None, INFER).name


@contextlib.contextmanager
def frozen(directory: Path) -> Iterator[None]:
    """Nothing below `directory` changes meanwhile, but times of access."""
    before = _contents(directory)
    yield
    assert _contents(directory) == before


def _contents(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path): path.read_bytes() for path in files} | {str(directory): str(os.stat(directory).st_ino).encode()}


def killed_at(work: Callable[[], object], files: Sequence[str], lines: int) -> bool:
    """Do `work` in a process that is killed when it has run so many lines of `files`. False if it came to its end."""
    pid = os.fork()
    if pid == 0:
        left = itertools.count(lines, -1)

        def trace(frame: Any, event: str, _: object) -> Any:
            if not any(file in frame.f_code.co_filename for file in files):
                return None
            if event == "line" and next(left) <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            threading.settrace(trace)
            sys.settrace(trace)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def flip(path: Path, at: int = -4000) -> None:
    """Damage a byte of a file, counted from its end."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END)
        byte = file.read(1)
        file.seek(at, os.SEEK_END)
        file.write(bytes([byte[0] ^ 0xFF]))
