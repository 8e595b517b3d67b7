"""How gateways divide limits: whatever happens when, together they never use more, and one alone uses all of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.gateway.access.keys import Principal
from server.gateway.access.limits import Limits, Meter, Quota, Window
from server.gateway.access.records import USAGE_PREFIX, USAGE_ROUND
from server.gateway.access.sharing import Division, Other, Plan, Share, Sharing, State, UsageRecord, Use, divide
from server.gateway.observe.stats import ProcessStats
from server.key_limits import KeyLimits
from tests.etcd import Etcd
from tests.server.gateway.harness import ADMIN_KEY, KEYS
from tests.server.gateway.upstream import Link, Received, Upstream, upstream
from tests.waiting import eventually, stays
from weightsync.control.records import InstanceRecord
from weightsync.errors import LeaseLost, StoreUnavailable
from weightsync.store import Store, open_store

# the arithmetic

NAMES = st.text("abcdef", min_size=1, max_size=2)


@given(st.integers(0, 10_000), st.dictionaries(NAMES, st.integers(0, 1000), min_size=1, max_size=6))
def test_all_units_are_given_out(units: int, demands: dict[str, int]) -> None:
    parts = divide(units, demands)
    assert sum(parts.values()) == units
    assert all(part >= 0 for part in parts.values())


def test_units_go_where_they_are_asked_for() -> None:
    assert divide(100, {"a": 0, "b": 0, "c": 0, "d": 0}) == dict.fromkeys("abcd", 25)
    assert divide(1000, {"a": 30, "b": 10}) == {"a": 25 + 712, "b": 25 + 238}
    assert divide(1, {"a": 0, "b": 5}) == {"a": 0, "b": 1}


# a store and gateways without sockets, in any order of things


@dataclass
class Told:
    """What the store has told of: (revision, gateway, record); a change of the round has no gateway."""

    limit: int
    now: int = 1000
    revision: int = 0
    round: int = 0
    records: dict[str, UsageRecord] = field(default_factory=dict)
    events: list[tuple[int, str, UsageRecord | None]] = field(default_factory=list)

    def write(self, gateway: str, record: UsageRecord | None, *, grows: bool = False) -> None:
        self.revision += 1
        self.records.pop(gateway, None)
        if record is not None:
            self.records[gateway] = record
        self.events.append((self.revision, gateway, record))
        if grows:
            self.round = self.revision
            self.events.append((self.revision, "", None))


class Replica:
    """A gateway: what it knows lags behind, and what it writes arrives later than it was made."""

    def __init__(self, name: str, told: Told) -> None:
        self.name, self.told = name, told
        self.division = Division(name)
        self.window = Window(told.limit, told.now)
        self.demand = self.revision = self.round = 0
        self.writing: tuple[Plan, UsageRecord, int] | None = None
        told.write(name, self.division.record(None, {}))
        self.revision, self.round = told.revision, told.round
        for other, record in told.records.items():
            if other != name:
                self.division.seen(record, self.uses())

    def uses(self) -> dict[str, Use]:
        self.window.advance(self.told.now)
        return {"k/requests": Use(self.told.limit, self.window.used, self.demand)}

    @property
    def held(self) -> int:
        return self.division.held("k/requests", self.told.limit)

    def hear(self, until: int) -> None:
        if self.writing is not None:
            return
        for revision, gateway, record in [e for e in self.told.events if self.revision < e[0] <= until]:
            self.revision = revision
            if not gateway:
                self.round = revision
            elif gateway != self.name and record is None:
                self.division.gone(gateway)
            elif gateway != self.name and record is not None:
                self.division.seen(record, self.uses())

    def begin_writing(self) -> None:
        if self.writing is None:
            self.demand = max(self.window.asked, self.demand * 3 // 4)
            self.window.asked = 0
            uses = self.uses()
            plan = self.division.plan(uses)
            self.writing = (plan, self.division.record(plan, uses), self.round)

    def end_writing(self) -> None:
        if self.writing is None:
            return
        (plan, record, seen), self.writing = self.writing, None
        if not plan.grows or seen == self.told.round:
            self.told.write(self.name, record, grows=plan.grows)
            self.division.adopt(plan)
            self.round = self.told.round if plan.grows else self.round

    def ask(self, units: int) -> bool:
        self.window.advance(self.told.now)
        self.window.asked += units
        if self.window.used + units > self.held:
            return False
        self.window.take(units)
        return True


def play(seed: int, steps: int) -> float:
    """One random schedule; the share of the limit that was in use at its height."""
    r = random.Random(seed)
    told = Told(r.choice([1, 2, 3, 5, 10, 60, 1000]))
    replicas: list[Replica] = []
    left: list[tuple[int, str]] = []
    taken: list[tuple[int, int]] = []
    most = 0
    for step in range(steps):
        choice = r.random()
        for since, name in [entry for entry in left if told.now - entry[0] > 61]:
            told.write(name, None)
            left.remove((since, name))
        if not replicas or (choice < 0.01 and len(replicas) < 5):
            replicas.append(Replica(f"g{step}", told))
        elif choice < 0.018 and len(replicas) > 1:
            gone = replicas.pop(r.randrange(len(replicas)))
            told.write(gone.name, gone.division.farewell(gone.uses()))
            left.append((told.now, gone.name))
        elif choice < 0.2:
            told.now += r.choice([0, 1, 1, 2, 10])
        one = replicas[int(r.random() ** 2 * len(replicas))]  # some are asked more than others
        if 0.2 <= choice < 0.4:
            one.hear(r.randint(one.revision, told.revision) if r.random() < 0.4 else told.revision)
        elif 0.4 <= choice < 0.6:
            one.begin_writing()
        elif 0.6 <= choice < 0.8:
            one.end_writing()
        elif choice >= 0.8:
            units = r.randint(1, max(1, told.limit // 5))
            if one.ask(units):
                taken.append((told.now, units))
        used = sum(units for at, units in taken if at > told.now - 60)
        most = max(most, used)
        assert used <= told.limit, f"seed {seed}, step {step}: {used} of {told.limit} were used in a minute"
        assert sum(replica.held for replica in replicas) <= told.limit, f"seed {seed}, step {step}"
    return most / told.limit


def test_together_they_never_use_more_whatever_the_order_of_things() -> None:
    heights = [play(seed, 1200) for seed in range(120)]
    assert sum(heights) / len(heights) > 0.95  # and the limit is put to use


def test_the_check_would_notice_a_lost_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same schedules, but shares grow without asking whether others have grown."""

    def blindly(self: Replica) -> None:
        if self.writing is not None:
            (plan, record, _), self.writing = self.writing, None
            self.told.write(self.name, record, grows=plan.grows)
            self.division.adopt(plan)

    monkeypatch.setattr(Replica, "end_writing", blindly)
    with pytest.raises(AssertionError, match="seed"):
        any(play(seed, 1200) > 1 for seed in range(120))


# the same over a real store


class Gateway:
    """As much of one as dividing limits takes."""

    def __init__(self, store: Store, limits: KeyLimits) -> None:
        self.store = store
        self.key_limits = {"k": limits}
        self.limits = Limits(ProcessStats().limited)
        self.sharing = Sharing(store, self.limits, lambda: self.key_limits)
        self.task: asyncio.Task[None] | None = None

    @property
    def quota(self) -> Quota:
        return self.meter.quotas()["k/requests"]

    @property
    def meter(self) -> Meter:
        self.limits.head(Principal("k", frozenset(), id="k", limits=self.key_limits["k"]))
        return next(meter for meter in self.limits.meters() if meter.key == "k")

    def take(self, units: int) -> int:
        """As many of `units` as it may, one after the other."""
        window = self.quota
        window.advance(int(time.monotonic()))
        taken = 0
        for _ in range(units):
            window.asked += 1
            if window.used < window.allotted:
                window.take(1)
                taken += 1
        return taken


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    server = Etcd()
    yield server
    server.close()


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store: a SQLite file, or etcd where a test asks for it."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite://{tmp_path}/store.db"
    server: Etcd = request.getfixturevalue("etcd")
    return server.url(f"test-{uuid.uuid4().hex}")


on_both_stores = pytest.mark.parametrize("url", ["sqlite", "etcd"], indirect=True)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.gateway.access.sharing.INTERVAL_S", 0.02)
    monkeypatch.setattr("server.gateway.access.sharing.RETRY_STORE_S", 0.02)


@contextlib.asynccontextmanager
async def gateways(url: str, number: int, limit: int) -> AsyncIterator[list[Gateway]]:
    async with contextlib.AsyncExitStack() as stack:
        every = []
        for _ in range(number):
            store = open_store(url)
            stack.push_async_callback(store.close)
            one = Gateway(store, KeyLimits(requests_per_min=limit))
            await one.sharing.enter()
            one.task = asyncio.create_task(one.sharing.run())
            stack.push_async_callback(ended, one.task)
            await asyncio.wait_for(one.sharing.entered.wait(), 20)
            every.append(one)
        yield every


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def taken(gateway: Gateway, units: int) -> int:
    """What it lets through, asked again and again, until it is so much."""
    passed = 0

    def enough() -> bool:
        nonlocal passed
        passed += gateway.take(50)
        return passed >= units

    await eventually(enough)
    return passed


@on_both_stores
@pytest.mark.usefixtures("fast")
async def test_alone_it_has_the_whole_limit_and_writes_nothing(url: str) -> None:
    async with gateways(url, 1, 60) as (one,):
        assert one.take(100) == 60
        _, before = await one.store.list("")

        async def unchanged() -> bool:
            return (await one.store.list(""))[1] == before

        await stays(unchanged, 0.3)  # many intervals


async def test_who_enters_as_another_comes_to_hold_more_enters_anew(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with contextlib.AsyncExitStack() as stack:
        store = open_store(url)
        stack.push_async_callback(store.close)
        one = Gateway(store, KeyLimits(requests_per_min=60))
        write = store.txn

        async def after_another(compares: Any, puts: Any, leases: Any = None) -> int:
            if USAGE_ROUND in puts:
                monkeypatch.undo()
                await store.put(USAGE_ROUND, b"another")
            return await write(compares, puts, leases)

        monkeypatch.setattr(store, "txn", after_another)
        await one.sharing.enter()
        assert not one.sharing.entered.is_set()
        one.task = asyncio.create_task(one.sharing.run())
        stack.push_async_callback(ended, one.task)
        await asyncio.wait_for(one.sharing.entered.wait(), 60)


@on_both_stores
@pytest.mark.usefixtures("fast")
async def test_units_come_to_where_they_are_asked_for(url: str) -> None:
    async with gateways(url, 3, 90) as (one, two, three):
        assert [g.quota.allotted for g in (one, two, three)] == [30, 30, 30]
        assert two.take(5) == 5
        assert one.take(200) == 30
        assert await taken(one, 55) == 55
        assert one.take(1) == two.take(1) == three.take(1) == 0
        await eventually(lambda: one.quota.elsewhere == 5)
        assert one.quota.remaining() == 0


@on_both_stores
@pytest.mark.usefixtures("fast")
async def test_who_comes_later_gets_what_is_left(url: str) -> None:
    async with gateways(url, 1, 60) as (one,):
        assert one.take(50) == 50
        async with gateways(url, 1, 60) as (two,):
            assert (await taken(two, 10), one.take(5)) == (10, 0)


@on_both_stores
@pytest.mark.usefixtures("fast")
async def test_what_a_gateway_used_counts_after_its_end(url: str) -> None:
    async with gateways(url, 2, 60) as (one, two):
        assert one.take(30) == 30
        assert one.task is not None
        await ended(one.task)
        await one.sharing.leave()
        assert await taken(two, 30) == 30
        await stays(lambda: two.take(50) == 0, 0.2)


def test_what_was_used_before_another_came_is_not_given_to_it() -> None:
    one = Division("one")
    one.adopt(one.plan({}))
    one.seen(UsageRecord("two", "entering", ("two",)), {"much": Use(60, 50, 0), "little": Use(60, 20, 0)})
    assert (one.held("much", 60), one.held("little", 60)) == (50, 30)


def test_a_limit_that_changes_while_a_plan_is_written_bounds_the_plan() -> None:
    """More than an equal part waits until the other gateway, too, has told what it holds of the new limit."""
    one = Division("one")
    one.adopt(Plan("active", frozenset({"one", "two"}), {"k/requests": 50}, grows=False))
    one.seen(UsageRecord("two", "active", ("one", "two"), (Share("k/requests", 2, 0, 0),)), {})
    plan = one.plan({"k/requests": Use(100, 10, 10)})
    assert plan.held["k/requests"] > 20
    one.limit_changed("k/requests", 20)
    one.adopt(plan)
    assert one.held("k/requests", 20) == 10


@pytest.mark.parametrize(("state", "held"), [("entering", 0), ("active", 30), ("left", 0)])
def test_only_who_is_active_holds_a_part_of_what_it_does_not_name(state: State, held: int) -> None:
    other = Other(UsageRecord("two", state, ("one", "two"), (Share("named", 7, 5, 0),)))
    assert (other.held("unnamed", 60), other.held("named", 60)) == (held, 7)


def test_requests_that_end_with_their_gateway_hold_no_place() -> None:
    """Streams that outlast the grace of a stop are cut: their clients ask the next gateway at once."""
    uses = {"k/concurrency": Use(4, 4, 1), "k/requests": Use(60, 7, 1), "k/tokens": Use(60, 0, 1)}
    assert Division("g").farewell(uses).shares == (Share("k/requests", 7, 7, 0),)


@on_both_stores
@pytest.mark.usefixtures("fast")
async def test_one_that_was_killed_leaves_its_part_when_its_lease_ends(url: str) -> None:
    async with gateways(url, 2, 60) as (one, two):
        assert one.task is not None
        await ended(one.task)
        keeper = one.sharing._keeper
        assert keeper is not None
        await keeper.stop()
        await one.store.revoke(keeper.id)
        await eventually(lambda: two.quota.allotted == 60)


@pytest.mark.usefixtures("fast")
async def test_the_last_part_stays_in_force_without_the_store(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateways(url, 2, 60) as (one, two):
        assert two.take(30) == 30
        outage = Outage(one.store, monkeypatch)
        await eventually(lambda: outage.refused > 3)
        part = one.quota.allotted
        before = outage.refused
        await eventually(lambda: outage.refused > before + 3)
        assert one.take(100) == part > 0
        keeper = one.sharing._keeper
        assert keeper is not None
        await two.store.revoke(keeper.id)  # an outage longer than the lease: others take the part over
        await eventually(lambda: two.quota.allotted == 60)
        outage.over = True
        await eventually(lambda: one.sharing._keeper is not keeper and one.sharing._division.active)
        assert one.take(100) == 0
        await eventually(lambda: two.quota.elsewhere == part)
        await eventually(lambda: two.quota.allotted <= 60 - part)
        assert two.take(100) <= 30 - part


class Outage:
    """A store that does not answer until it is `over`."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over = False
        self.refused = 0
        for name in ("put", "txn", "list", "grant_lease", "keep_alive"):
            monkeypatch.setattr(store, name, self._away(getattr(store, name)))

    def _away(self, method: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def call(*args: object, **kwargs: object) -> object:
            if self.over:
                return await method(*args, **kwargs)
            self.refused += 1
            raise StoreUnavailable("/x/store.db", "gone", "Wait")

        return call


@pytest.mark.usefixtures("fast")
async def test_a_lost_lease_is_taken_up_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateways(url, 2, 60) as (one, two):
        keeper = one.sharing._keeper
        assert keeper is not None
        put = one.store.put

        async def lost(key: str, value: bytes, lease: int | None = None) -> int:
            if lease == keeper.id:
                raise LeaseLost(keeper.id)
            return await put(key, value, lease)

        monkeypatch.setattr(one.store, "put", lost)
        await two.store.revoke(keeper.id)
        one.take(1)
        await eventually(lambda: one.sharing._keeper is not keeper and one.sharing._division.active)
        await eventually(lambda: one.quota.allotted + two.quota.allotted == 60)


@on_both_stores
@pytest.mark.usefixtures("fast")
async def test_a_lower_limit_holds_everywhere(url: str) -> None:
    async with gateways(url, 2, 100) as (one, two):
        assert one.take(10) == 10
        await eventually(lambda: two.quota.elsewhere == 10)
        for g in (one, two):
            g.key_limits = {"k": KeyLimits(requests_per_min=20)}
        assert one.take(100) + two.take(100) <= 10

        def all_is_used() -> bool:
            one.take(3)
            two.take(3)
            return one.quota.used + two.quota.used == 20

        await eventually(all_is_used)
        assert one.take(5) + two.take(5) == 0


@pytest.mark.usefixtures("fast")
async def test_records_of_no_known_form_are_left_alone(url: str) -> None:
    async with gateways(url, 1, 60) as (one,):
        await one.store.put(USAGE_PREFIX + "stranger", b"nonsense")
        async with gateways(url, 1, 60) as (two,):
            await eventually(lambda: one.quota.allotted == two.quota.allotted == 30)
            found = await one.store.get(USAGE_ROUND)
            assert found is not None


# two gateways as they are run


@contextlib.contextmanager
def processes(directory: Path, number: int) -> Iterator[list[tuple[str, str]]]:
    """Gateway processes on one store: (public URL, admin URL) of each."""
    command = [sys.executable, "-m", "tests.server.gateway.process", str(directory)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(number)]
    try:
        urls = []
        for process in running:
            assert process.stdout is not None
            port, admin_port = process.stdout.readline().split()
            urls.append((f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"))
        yield urls
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.communicate(timeout=60)


async def register(store: Store, up: Upstream) -> None:
    record = InstanceRecord(id="i0", address=up.address, state="SERVING", active_version=1, active_epoch=1)
    await store.put(KEYS.instance("i0"), record.to_json())


async def answer(link: Link, _: Received) -> None:
    await link.json(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}')


async def test_two_processes_keep_one_limit(tmp_path: Path) -> None:
    store = open_store(f"sqlite://{tmp_path}/store.db")
    passed: list[tuple[float, float]] = []  # asked and answered at
    limit = 40

    async def ask(url: str) -> None:
        begun = time.monotonic()
        reply = await client.post(f"{url}/v1/completions", json={}, headers=headers)
        assert reply.status_code in (200, 401, 429, 503)  # 401, 503: key and instance are not known yet
        if reply.status_code == 200:
            passed.append((begun, time.monotonic()))
        else:
            await asyncio.sleep(0.02)

    try:
        with processes(tmp_path, 2) as urls:
            async with upstream(answer) as up, httpx.AsyncClient(timeout=60) as client:
                await register(store, up)
                body = {"name": "shared", "limits": {"requests_per_min": limit}}
                made = await client.post(f"{urls[0][1]}/admin/keys", json=body, headers=bearer(ADMIN_KEY))
                headers = bearer(made.json()["key"])
                turn = 0
                while len(passed) < limit:  # three in four at the one
                    turn += 1
                    await ask(urls[0 if turn % 4 else 1][0])
                for url, _ in urls * 10:
                    await ask(url)
    finally:
        await store.close()
    for _, end in passed:
        assert sum(end - 60 < begun and answered <= end for begun, answered in passed) <= limit


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
