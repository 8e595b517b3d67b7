"""Editions of adapters that are published, asked for and withdrawn over a store that flaps and loses answers.

The publisher's session, the gateways' and the instances' editions are those of production. An engine loads and drops
names; a request holds an edition for a while.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from loadtest.histories.rules import Violation, require
from loadtest.simulation.clock import Clock, Loop, determined
from loadtest.simulation.store import Client, ModelStore, Puts
from server.gateway.fleet import editions as gateway_editions
from server.instance import editions as instance_editions
from server.instance.inflight import Problem
from tests.simulation.rules import check_happened
from weightsync import Arena
from weightsync.control.editions import EditionRecord, prefix_of, split_name
from weightsync.control.parts import LORA
from weightsync.control.records import Keys, PartRecord, VersionRecord
from weightsync.errors import EngineError, PublishError, StoreError
from weightsync.publish import session
from weightsync.signing import Trust

KEYS = Keys("m")
NAMES = ("math", "code", "prose")
KEEP, MOST = 2, 3
LATENCY_S, LAG_S = 0.005, 0.5  # of a store that is well; the time after which everybody has heard of a change
SECONDS = 600.0


def flawed(number: int) -> bool:
    return number % 5 == 0


class Engine:
    """It loads each edition in some time, and refuses one that is flawed."""

    hosts = ("",)

    def __init__(self, chance: random.Random, seen: Counter[str]) -> None:
        self._chance, self._seen = chance, seen
        self.loaded, self.dropping = set[str](), set[str]()
        self.users: Counter[str] = Counter()

    async def load_edition(self, edition: EditionRecord, places: Mapping[str, str]) -> None:
        name = edition.full_name
        require(name not in self.loaded, f"{name} is loaded twice")
        require(name not in self.dropping, f"{name} is loaded while it is dropped")
        require(places == {"": edition.slot}, f"{name} is loaded from {places}")
        await asyncio.sleep(self._chance.choice((0.05, 0.3, 2.0)))
        if flawed(edition.number):
            raise EngineError(f"{name} is not finite", code="not_finite")
        self.loaded.add(name)
        self._seen["loaded"] += 1

    async def drop_edition(self, name: str) -> None:
        require(not self.users[name], f"{name} is dropped under a request")
        self.loaded.discard(name)
        self.dropping.add(name)
        await asyncio.sleep(self._chance.choice((0.02, 0.5)))
        self.dropping.discard(name)
        self._seen["dropped"] += 1

    def answers_to(self, name: str) -> bool:
        return name in self.loaded


class Gateway:
    """As the fleet's view: while the store is away, the editions of before."""

    def __init__(self, client: Client) -> None:
        self.editions, self._client = gateway_editions.Editions(), client

    async def run(self) -> None:
        prefix = prefix_of(KEYS)
        while True:
            try:
                found, revision = await self._client.list(prefix)
                self.editions.keep({kv.key for kv in found})
                for kv in found:
                    self.editions.put(kv.key, kv.value)
                async for event in self._client.watch(prefix, revision + 1):
                    if event.kind == "put":
                        self.editions.put(event.kv.key, event.kv.value)
                    else:
                        self.editions.drop(event.kv.key)
            except StoreError:
                await asyncio.sleep(0.1)


class World:
    """One publisher, two gateways, two instances."""

    def __init__(self, clock: Clock, directory: Path, chance: random.Random) -> None:
        self.clock, self.chance, self.store, self.arena = clock, chance, ModelStore(clock), Arena(directory)
        self.seen: Counter[str] = Counter()
        self.session = session.PublishSession(Client(self.store, LATENCY_S), KEYS, "trainer", 5.0, keep=2)
        self.followers = [Client(self.store, LATENCY_S) for _ in range(4)]
        self.gateways = [Gateway(client) for client in self.followers[:2]]
        self.engines = [Engine(chance, self.seen) for _ in range(2)]
        self.instances = [instance_editions.Editions(engine, KEYS.model, Trust(), MOST) for engine in self.engines]
        self.published: dict[str, float] = {}
        self.withdrawn: dict[str, float] = {}
        self.well_since = clock.now  # when the store was last back
        self.store.on_write = self._written

    @property
    def well(self) -> bool:
        return self.store.up and not any(client.away for client in self.followers)

    def _written(self, puts: Puts) -> None:
        for key, value in puts.items():
            if key.startswith(prefix_of(KEYS)):
                name, number = key.removeprefix(prefix_of(KEYS)).split("/")
                said = self.published if value is not None else self.withdrawn
                said[f"{name}@{int(number)}"] = self.clock.now

    def there(self, full_name: str) -> bool:
        return full_name in self.published and full_name not in self.withdrawn

    def known(self, full_name: str) -> bool:
        """Whether each gateway and instance must know by now that it is there."""
        heard = max(self.published.get(full_name, 0.0), self.well_since) + LAG_S
        return self.there(full_name) and self.well and heard < self.clock.now

    def gone(self, full_name: str) -> bool:
        """Whether each gateway must know by now that it is not there any more."""
        left = self.withdrawn.get(full_name)
        return left is not None and self.well and max(left, self.well_since) + LAG_S < self.clock.now

    async def publish(self, name: str, percent: float) -> int:
        part = LORA + name
        claimed = VersionRecord(0, "publishing", "", 16, "", None, None, "trainer", 0, time.time(), "", 1)
        record, revision, locks = await self.session.claim(self.arena, claimed, {part: 4096})
        try:
            number = record.version
            made = PartRecord(part, number, str(locks[part].path), f"manifest {number}", 16)
            await self.session.make_edition(record, revision, made, percent=percent, keep=KEEP, age_s=None)
        except BaseException:
            await self.session.forget(record.version, revision)
            raise
        finally:
            locks[part].release()
        return number

    async def trainer(self) -> None:
        while True:
            name = self.chance.choice(NAMES)
            try:
                if self.chance.random() < 0.8:
                    number = await self.publish(name, self.chance.choice((100.0, 100.0, 30.0, 0.0)))
                    self.seen["published"] += 1
                    if self.chance.random() < 0.5:  # a publisher reads its own write
                        await self.ask(f"{name}@{number}")
                elif found := await self.session.editions(name):
                    await self.session.withdraw(name, self.chance.choice([*(e.number for e in found), None]))
                    self.seen["withdrawn"] += 1
            except (StoreError, PublishError) as error:
                self.seen[type(error).__name__] += 1
            await asyncio.sleep(self.chance.uniform(0.0, 4.0))

    async def client(self) -> None:
        while True:
            name = self.chance.choice(NAMES)
            if self.chance.random() < 0.4 and self.published:
                name = self.chance.choice(list(self.published)[-12:])
            await self.ask(name)
            await asyncio.sleep(self.chance.uniform(0.0, 1.0))

    async def ask(self, asked: str) -> None:
        """One request, from a gateway to an instance, held to the rules."""
        editions = self.chance.choice(self.gateways).editions
        place = self.chance.randrange(len(self.instances))
        if not editions.concern(asked) or (name := editions.find(asked)) is None:
            self.seen["not found"] += 1
            return require(not self.known(asked), f"{asked} is there, and a gateway does not find it")
        base, number = split_name(name)
        require(asked in (name, base), f"{name} in an answer to {asked}")
        require(name == asked or not self.gone(name), f"{name} has gone, and is chosen for {asked}")
        must = self.known(name)
        engine = self.engines[place]
        try:
            async with self.instances[place].using(name):
                engine.users[name] += 1
                try:
                    require(number is not None and not flawed(number), f"{name} is served, which is flawed")
                    self.seen["by number" if asked == name else "by name"] += 1
                    self.seen["while the store is away"] += not self.store.up
                    until = self.clock.now + self.chance.choice((0.1, 1.0, 20.0))
                    while self.clock.now < until:
                        require(name in engine.loaded, f"a request runs through {name}, which is not loaded")
                        await asyncio.sleep(0.1)
                    self.seen["to the end of one that has gone"] += name in self.withdrawn
                finally:
                    engine.users[name] -= 1
        except Problem as problem:
            self.seen[f"status {problem.status}"] += 1
            refused = number is not None and flawed(number)
            require(problem.status != 422 or refused, f"{name} is refused, which is not flawed: {problem}")
            require(not must or not self.there(name) or refused, f"{name} is there: {problem.status} {problem}")
        return None

    async def flap(self) -> None:
        """Outages, for all or for one follower, some longer than leases, and answers that are lost."""
        while True:
            await asyncio.sleep(self.chance.uniform(5.0, 30.0))
            self.store.lose_answer = self.chance.random() < 0.3
            cut = self.chance.choice((None, *self.followers))
            if cut is not None:
                cut.away = True
            else:
                self.store.up = False
            await asyncio.sleep(self.chance.choice((0.1, 1.0, 7.0, 20.0)))
            if cut is not None:
                cut.away = False
            self.store.up, self.well_since = True, self.clock.now


async def storm(world: World) -> None:
    """All of it for SECONDS; then what is left is held to what there may be. Raises Violation."""
    every = [world.trainer(), world.flap(), *(gateway.run() for gateway in world.gateways)]
    every += [i.follow(client) for i, client in zip(world.instances, world.followers[2:], strict=True)]
    tasks = [asyncio.create_task(each) for each in every]
    clients = [asyncio.create_task(world.client()) for _ in range(6)]
    done, _ = await asyncio.wait([*tasks, *clients], timeout=SECONDS, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()
    for task in (*clients, *tasks[:2]):
        task.cancel()
    world.store.up, world.store.lose_answer, world.well_since = True, False, world.clock.now
    for client in world.followers:
        client.away = False
    await asyncio.sleep(60.0)  # leases end, requests too
    for name in NAMES:  # a request makes room
        await world.publish(name, 100.0)
    for instance in world.instances:
        newest = next(full for full in reversed(world.published) if world.there(full))
        await asyncio.sleep(5.0)
        try:
            async with instance.using(newest):
                pass
        except Problem as problem:
            require(problem.status == 422, f"at rest, {newest} is refused: {problem}")
    check_rest(world)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, *clients, return_exceptions=True)


def check_rest(world: World) -> None:
    records = [EditionRecord.from_json(kv.value) for kv in world.store.list(prefix_of(KEYS))[0]]
    there = {record.full_name for record in records}
    for name in NAMES:
        counted = sum(record.name == name and record.percent > 0 for record in records)
        require(1 <= counted <= KEEP, f"{counted} editions of {name} are kept, not {KEEP}")
    for gateway in world.gateways:
        require({record.full_name for record in gateway.editions.records} == there, "a gateway knows others")
    for engine in world.engines:
        require(engine.loaded <= there, f"{engine.loaded - there} have gone, and are loaded")
        require(len(engine.loaded) <= MOST, f"{len(engine.loaded)} are loaded, and no request uses any")


def run(seed: int, directory: Path) -> Counter[str]:
    clock = Clock(1e3)
    with determined(clock, seed), asyncio.Runner(loop_factory=lambda: Loop(clock)) as runner:
        world = World(clock, directory, random.Random(seed))
        try:
            runner.run(storm(world))
        except Violation as violation:
            violation.add_note(f"seed {seed}")
            raise
    return world.seen


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("seeds", [range(1, 3), pytest.param(range(3, 40), marks=pytest.mark.broad)], ids=str)
def test_editions_over_a_store_that_flaps_keep_the_rules(seeds: Sequence[int], tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += run(seed, tmp_path / str(seed))
    each = {
        "published": 60, "withdrawn": 10, "by name": 100, "by number": 30, "loaded": 60, "dropped": 50,
        "status 422": 20, "while the store is away": 5, "to the end of one that has gone": 20, "StoreUnavailable": 5,
    }  # fmt: skip
    check_happened(seen, {what: least * len(seeds) for what, least in each.items()})
