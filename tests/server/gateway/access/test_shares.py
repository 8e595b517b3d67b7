"""How gateways divide limits: whatever happens when, together they never use more, and one alone uses all of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulation.clock import Clock, simulated
from loadtest.simulation.store import Client, ModelStore, Puts
from server.gateway.access.keys import Principal
from server.gateway.access.limits import Limits, Meter, Quota
from server.gateway.access.records import USAGE_PREFIX, USAGE_ROUND
from server.gateway.access.sharing import TTL_S, Division, Other, Plan, Share, Sharing, State, UsageRecord, Use, divide
from server.gateway.observe.stats import ProcessStats
from server.key_limits import KeyLimits
from tests.etcd import Etcd
from tests.waiting import eventually, stays
from weightsync.errors import Conflict
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


# several gateways on one store, in simulated time where a test asks for no real one


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
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def store(clock: Clock) -> ModelStore:
    return ModelStore(clock)


@contextlib.asynccontextmanager
async def gateways(connect: Callable[[], Store], number: int, limit: int) -> AsyncIterator[list[Gateway]]:
    async with contextlib.AsyncExitStack() as stack:
        every = []
        for _ in range(number):
            store = connect()
            stack.push_async_callback(store.close)
            one = Gateway(store, KeyLimits(requests_per_min=limit))
            await one.sharing.enter()
            one.task = asyncio.create_task(one.sharing.run())
            stack.push_async_callback(ended, one.task)
            await asyncio.wait_for(one.sharing.entered.wait(), 120)
            every.append(one)
        yield every


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def taken(gateway: Gateway, units: int) -> int:
    """The units that the gateway lets through, asked again and again, until they are so many."""
    passed = 0

    def enough() -> bool:
        nonlocal passed
        passed += gateway.take(50)
        return passed >= units

    await eventually(enough)
    return passed


@simulated
async def test_alone_it_has_the_whole_limit_and_writes_nothing(clock: Clock, store: ModelStore) -> None:
    async with gateways(lambda: Client(store), 1, 60) as (one,):
        assert one.take(100) == 60
        before = store.revision
        await stays(lambda: store.revision == before, 30)  # many intervals


@simulated
async def test_one_that_enters_as_another_comes_to_hold_more_enters_anew(clock: Clock, store: ModelStore) -> None:
    one = Gateway(Client(store), KeyLimits(requests_per_min=60))

    def another(puts: Puts) -> None:
        if USAGE_ROUND in puts:
            store.on_write = lambda puts: None
            store.put(USAGE_ROUND, b"another")
            raise Conflict(USAGE_ROUND, 0, store.revision)

    store.on_write = another
    await one.sharing.enter()
    assert not one.sharing.entered.is_set()
    one.task = asyncio.create_task(one.sharing.run())
    await asyncio.wait_for(one.sharing.entered.wait(), 60)
    await ended(one.task)


@on_both_stores
async def test_units_come_to_where_they_are_asked_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a real store shows that its leases, watches and transactions are those that the division relies upon."""
    for name in ("INTERVAL_S", "RETRY_STORE_S"):
        monkeypatch.setattr(f"server.gateway.access.sharing.{name}", 0.02)
    async with gateways(lambda: open_store(url), 3, 90) as (one, two, three):
        assert [g.quota.allotted for g in (one, two, three)] == [30, 30, 30]
        assert two.take(5) == 5
        assert one.take(200) == 30
        assert await taken(one, 55) == 55
        assert one.take(1) == two.take(1) == three.take(1) == 0
        await eventually(lambda: one.quota.elsewhere == 5)
        assert one.quota.remaining() == 0


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


@simulated
async def test_the_last_part_stays_in_force_without_the_store(clock: Clock, store: ModelStore) -> None:
    cut_off = Client(store)
    async with gateways(lambda: cut_off, 1, 60) as (one,), gateways(lambda: Client(store), 1, 60) as (two,):
        await eventually(lambda: one.quota.allotted == two.quota.allotted == 30)
        assert two.take(30) == 30
        cut_off.away = True
        await asyncio.sleep(TTL_S / 2)
        part = one.quota.allotted
        assert one.take(100) == part > 0
        await eventually(lambda: two.quota.allotted == 60)  # longer than the lease: others take the part over
        keeper, cut_off.away = one.sharing._keeper, False
        await eventually(lambda: one.sharing._keeper is not keeper and one.sharing._division.active)
        assert one.take(100) == 0
        await eventually(lambda: two.quota.elsewhere == part)
        await eventually(lambda: two.quota.allotted <= 60 - part)
        assert two.take(100) <= 30 - part


@simulated
async def test_a_lower_limit_holds_everywhere(clock: Clock, store: ModelStore) -> None:
    async with gateways(lambda: Client(store), 2, 100) as (one, two):
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


@simulated
async def test_records_of_no_known_form_are_left_alone(clock: Clock, store: ModelStore) -> None:
    async with gateways(lambda: Client(store), 1, 60) as (one,):
        store.put(USAGE_PREFIX + "stranger", b"nonsense")
        async with gateways(lambda: Client(store), 1, 60) as (two,):
            await eventually(lambda: one.quota.allotted == two.quota.allotted == 30)
            assert store.get(USAGE_ROUND) is not None
