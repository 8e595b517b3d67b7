"""A coordinator and instances with toy engines, all real but for the engine, each on a store connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tests.weightsync.tensors import model
from weightsync import CommitResult, Coordinator, Participant, Publisher, SlotReader, StageResult, Store, open_store
from weightsync.control.coordinator import Probe
from weightsync.control.lease import LeaseKeeper
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, VersionRecord
from weightsync.control.strict_json import Record
from weightsync.publish.publisher import Version

if TYPE_CHECKING:  # child processes import this module
    import pytest

MODEL = "demo"
KEYS = Keys(MODEL)
TTL_S = 60.0  # of leases, which a process keeps that the machine holds up for a while
R = TypeVar("R", bound=Record)


@dataclass
class Engine:
    """An engine as an instance runs it, and the faults a test gives it."""

    running: int | None = None
    staged: set[int] = field(default_factory=set)
    calls: list[tuple[str, int]] = field(default_factory=list)
    on_stage: Callable[[VersionRecord], object] | None = None
    on_commit: Callable[[], object] | None = None
    hang: asyncio.Event | None = None
    stopping: asyncio.Event | None = None  # set when a staging that is cancelled may end
    builds: str | None = None  # a fingerprint other than the published one
    streams: asyncio.Event | None = None  # set when the last of its streams has ended
    paused: bool = False

    async def stage(self, version: VersionRecord) -> StageResult:
        self.calls.append(("stage", version.version))
        if self.hang is not None:
            try:
                await self.hang.wait()
            except asyncio.CancelledError:
                if self.stopping is not None:
                    await self.stopping.wait()
                self.calls.append(("cancelled", version.version))
                raise
        if self.on_stage is not None:
            self.on_stage(version)
        with SlotReader.open(version.slot, manifest_digest=version.manifest_digest, version=version.version) as reader:
            reader.verify_all()
        self.staged.add(version.version)
        built = self.builds or version.fingerprint or version.manifest_digest
        return StageResult(fingerprint=built, path="toy")

    def go_on(self) -> None:
        """End what `hang` holds up."""
        assert self.hang is not None
        self.hang.set()

    async def commit(self, active: ActiveRecord, version: VersionRecord) -> CommitResult:
        self.calls.append(("commit", version.version))
        assert version.version == active.version
        assert version.version in self.staged
        assert version.state == "ready"
        if self.on_commit is not None:
            self.on_commit()
        self.running = version.version
        return CommitResult(commit_ms=0.5)

    async def drop(self, version: VersionRecord) -> None:
        self.calls.append(("drop", version.version))
        self.staged.discard(version.version)

    async def drain(self, seconds: float) -> None:
        self.calls.append(("drain", int(seconds)))
        if self.streams is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.streams.wait(), seconds)

    async def pause(self) -> None:
        self.calls.append(("pause", 0))
        self.paused = True

    async def resume(self) -> None:
        self.calls.append(("resume", 0))
        self.paused = False


class Fleet:
    """Started by `running_fleet`; `engines` and `participants` by instance id."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self._url, self._stack = url, stack
        self.engines: dict[str, Engine] = {}
        self.participants: dict[str, Participant] = {}

    def store(self) -> Store:
        store = open_store(self._url)
        self._stack.push_async_callback(store.close)
        return store

    @functools.cached_property
    def publisher(self) -> Publisher:
        publisher = Publisher(self._url, model=MODEL, lease_ttl_s=TTL_S)
        self._stack.callback(publisher.close)
        return publisher

    async def publish(self, value: float = 0.0, **options: Any) -> Version:
        """A version whose tensors all have this value; nobody asks for it, unless `options` say so."""
        return await asyncio.to_thread(self.publisher.publish, model(value), **{"activate": False, **options})

    def lease(self, name: str) -> LeaseKeeper:
        found = self.participants[name]._lease
        assert found is not None
        return found

    async def read(self, key: str, kind: type[R]) -> R:
        found = await self._records.get(key)
        assert found is not None, key
        return kind.from_json(found.value)

    async def active(self) -> ActiveRecord:
        return await self.read(KEYS.active, ActiveRecord)

    @functools.cached_property
    def _records(self) -> Store:
        return self.store()

    def coordinator(self, *, keep: int = 2, probe: Probe | None = None, leader_ttl_s: float = TTL_S) -> Coordinator:
        coordinator = Coordinator(self.store(), MODEL, keep=keep, probe=probe, leader_ttl_s=leader_ttl_s)
        coordinator.start()
        self._stack.push_async_callback(coordinator.stop)
        return coordinator

    async def instance(
        self, name: str, engine: Engine | None = None, *, wait: bool = True, ttl_s: float = TTL_S
    ) -> Engine:
        engine = engine or Engine()
        record = InstanceRecord(name, f"http://{name}", active_version=engine.running)
        participant = Participant(
            self.store(),
            MODEL,
            record,
            engine.stage,
            engine.commit,
            drop=engine.drop,
            drain=engine.drain,
            pause=engine.pause,
            resume=engine.resume,
            lease_ttl_s=ttl_s,
        )
        participant.start()
        self._stack.push_async_callback(participant.stop)
        self.engines[name], self.participants[name] = engine, participant
        if wait:
            await asyncio.wait_for(participant.serving(), 60)
        return engine

    async def instances(self, names: str) -> list[Engine]:
        """One for each letter of `names`."""
        return [await self.instance(name) for name in names]

    async def serving(self, names: str, **options: Any) -> Coordinator:
        """A coordinator, and instances that serve the first version."""
        coordinator = self.coordinator(**options)
        await self.instances(names)
        assert (await coordinator.activate(await self.publish())).ok
        return coordinator


@asynccontextmanager
async def running_fleet(url: str) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(url, stack)


def before_the_commit(store: Store, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[object]]) -> None:
    """It happens once, after the leader, whose store this is, has decided to commit and before it writes that."""
    real, once = store.txn, [happens]

    async def txn(compares: Mapping[str, int], puts: Mapping[str, bytes | None], *leases: Any) -> int:
        if KEYS.active in puts and once:
            await once.pop()()
        return await real(compares, puts, *leases)

    monkeypatch.setattr(store, "txn", txn)
