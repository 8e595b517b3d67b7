"""Publications with parts that come and go, over a store that flaps and loses answers: afterwards nothing is left.

Publisher's session, arena, coordinators and instances are those of production. Weights are not written: only slots,
records and leases matter here.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.simulation.clock import Clock, simulated
from loadtest.simulation.store import Client, ModelStore
from weightsync import Arena, CommitResult, Coordinator, Participant, StageResult
from weightsync.control import outcome, parts, swap
from weightsync.control.parts import BASE
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, PartRecord, VersionRecord
from weightsync.errors import PublishError, StoreError
from weightsync.format.manifest import Schema, TensorSpec
from weightsync.publish.session import PublishSession

KEYS = Keys("m")
SCHEMA = Schema({"w": TensorSpec("float32", (4,))})
NBYTES = 4096
CALM = 12
PASSING = (StoreError, PublishError)


class World:
    """One trainer, two gateways, two instances."""

    def __init__(self, clock: Clock, directory: Path) -> None:
        self.clock, self.store, self.arena = clock, ModelStore(clock), Arena(directory)
        self.session = PublishSession(self._client(), KEYS, "trainer", 5.0, keep=2)
        self.coordinators = [Coordinator(self._client(), KEYS.model) for _ in range(2)]
        self.instances = [
            Participant(self._client(), KEYS.model, InstanceRecord(name, f"http://{name}"), self._stage, self._commit)
            for name in "ab"
        ]
        self.done: Counter[str] = Counter()

    def _client(self) -> Client:
        return Client(self.store, 0.005)

    async def _stage(self, version: VersionRecord) -> StageResult:
        await asyncio.sleep(0.2)
        return StageResult(fingerprint=version.fingerprint, path="toy")

    async def _commit(self, active: ActiveRecord, version: VersionRecord) -> CommitResult:
        return CommitResult(commit_ms=0.5)

    async def publish(self, brought: Collection[str], without: Collection[str]) -> None:
        """One publication, its swap and the wait for that. Raises one of PASSING."""
        blank = VersionRecord(0, "publishing", "", 16, "", None, None, "trainer", 0, time.time(), "", 1)
        await self.session.check_without(without, brought, None)
        record, revision, locks = await self.session.claim(self.arena, blank, dict.fromkeys(brought, NBYTES))
        try:
            version = record.version
            schemas = dict.fromkeys(brought, SCHEMA)
            written = [PartRecord(p, version, str(lock.path), f"{version}{p}", 16) for p, lock in locks.items()]
            target = swap.new_target(version, "trainer", 20.0)
            await self.session.make_ready(record, revision, written, schemas, target, None, without)
        except BaseException:
            await self.session.forget(record.version, revision)
            raise
        finally:
            for lock in locks.values():
                lock.release()
        (await outcome.of_request(self.session.store, KEYS, target)).checked()

    async def there(self) -> list[str]:
        """The parts that the next version carries on."""
        basis, _ = await self.session._basis(None)
        return [part.name for part in basis.parts] if basis is not None else []

    async def flap(self, chance: random.Random) -> None:
        """Outages, some longer than leases, and answers that are lost."""
        while True:
            await asyncio.sleep(chance.uniform(0.0, 6.0))
            self.store.lose_answer = chance.random() < 0.5
            self.store.up = chance.random() < 0.7
            await asyncio.sleep(chance.choice((0.1, 1.0, 7.0)))
            self.store.up = True

    def left(self) -> dict[str, Any]:
        """The holdings of this world: files, descriptors, tasks, leases, records and their bytes."""
        kept = [kv for kv in self.store.list("")[0] if not kv.key.startswith(("ledger/", KEYS.history))]
        kinds = Counter("".join(c for c in kv.key if not c.isdigit()) for kv in kept)
        return {
            "slots of adapters": len(set(self.arena.directory.iterdir()) - set(self.arena.slots(KEYS.model))),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "tasks": sorted(task.get_name().rstrip("0123456789-") for task in asyncio.all_tasks()),
            "leases": len(self.store._leases),
            "records": kinds,
            "kilobytes": sum(len(kv.value) for kv in kept) // 1024,
        }


@pytest.fixture(autouse=True)
def alone(no_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots have no weights."""
    monkeypatch.setattr(parts, "_is_held", lambda part, host: Path(part.slot).exists())
    monkeypatch.setattr(swap, "TOMBSTONES_KEPT", 4)


@pytest.fixture
def clock() -> Clock:
    return Clock(1e3)


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.broad)])
@simulated
async def test_publications_over_a_store_that_flaps_leave_nothing(clock: Clock, tmp_path: Path, count: int) -> None:
    world, chance = World(clock, tmp_path), random.Random(count)
    for each in (*world.coordinators, *world.instances):
        each.start()
    names = (f"lora/{number}" for number in range(10**6))
    await calm(world, names)
    before, began = world.left(), clock.now
    flapping = asyncio.create_task(world.flap(chance))
    for _ in range(count):
        try:
            await storm(world, chance, names)
            world.done["ok"] += 1
        except PASSING as error:
            world.done[type(error).__name__] += 1
        await asyncio.sleep(chance.uniform(0.0, 7.0))
    flapping.cancel()
    world.store.up, world.store.lose_answer = True, False
    assert clock.now - began > 3.6 * count, "an hour of a thousand"
    assert world.done["ok"] > count / 3, world.done
    assert world.done["StoreUnavailable"] > count / 5, world.done
    await asyncio.sleep(30.0)
    await calm(world, names)
    left = world.left()
    assert left.pop("descriptors") <= before.pop("descriptors")  # those that tests before have left may go meanwhile
    assert left == before
    assert len(world.arena.slots(KEYS.model)) <= 4, "one more, while a lost claim had one until its lease ended"
    for each in (*world.coordinators, *world.instances):
        await each.stop()
    await world.session.close()


async def calm(world: World, names: Iterator[str]) -> None:
    """Publications of a base and two adapters, whatever was there before."""
    for _ in range(CALM):
        await world.publish([BASE, next(names), next(names)], await world.there())
    await asyncio.sleep(30.0)


async def storm(world: World, chance: random.Random, names: Iterator[str]) -> None:
    """One publication, or a way back."""
    if chance.random() < 0.1:
        version = await swap.previous_version(world.session.store, KEYS)
        target = swap.new_target(version, "trainer", 20.0)
        await world.session.ask_for(target)
        (await outcome.of_request(world.session.store, KEYS, target)).checked()
        return
    there = await world.there()
    brought = [next(names) for _ in range(chance.randint(0, 2))] + [BASE] * chance.randint(0, 1)
    brought += [name for name in there if chance.random() < 0.2]
    without = [name for name in there if name not in brought and chance.random() < 0.5]
    await world.publish(brought, without)
