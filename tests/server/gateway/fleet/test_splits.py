"""Requests are divided between versions: exactly, by what they stick by, and with whoever can answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from server.gateway import UpstreamSettings
from server.gateway.access.keys import ANONYMOUS, Principal
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.routing import Need, fresh
from server.gateway.fleet.splits import Splits
from server.gateway.wire.head import RequestHead
from tests.server.gateway.harness import KEYS, RunningGateway, get, post
from tests.server.gateway.upstream import Link, Received, Upstream, answering, cut
from tests.waiting import eventually
from weightsync.control.records import ActiveRecord, InstanceRecord, ShareRecord, SplitRecord, SwapRecord

MANY = 10_000
UPSTREAM = UpstreamSettings()


@dataclass
class Asks:
    """A request, as a split sees it."""

    head: RequestHead = field(default_factory=lambda: RequestHead(b"", b""))
    principal: Principal = ANONYMOUS
    need: Need | None = None
    share: int | None = None
    drawn: int | None = None
    cluster: int = -1
    lost: bool = False


def asks(session: bytes | None = None, sticky: dict[bytes, bytes] | None = None) -> Asks:
    head = RequestHead(b"", b"")
    head.session, head.sticky = session, sticky
    return Asks(head)


def instance(name: str, version: int) -> Instance:
    return Instance(InstanceRecord(name, "http://127.0.0.1:9", "SERVING", version, 1), UpstreamSettings())


def committed(sticky: str = "", **percents: float) -> ActiveRecord:
    """`v12=90.0, v13=10.0`: version 12 is active."""
    versions = {int(name[1:]): percent for name, percent in percents.items()}
    active, *others = versions
    shares = tuple(ShareRecord(v, versions[v], (f"i{v}",)) for v in others)
    return ActiveRecord(active, 1, None, "s", 0.0, split=SplitRecord(shares, sticky))


def split(sticky: str = "", *, lost: tuple[int, ...] = (), **percents: float) -> Splits:
    found = Splits()
    active = committed(sticky, **percents)
    assert active.split is not None
    found.follow(active, [instance(f"i{v}", v) for v in active.split.percents(active.version) if v not in lost])
    return found


def chosen(splits: Splits, request: Asks) -> int | None:
    need = splits.need(request)
    return need.version if need is not None else None


def test_without_a_split_there_is_nothing_to_ask() -> None:
    found = Splits()
    found.follow(ActiveRecord(12, 1, None, "s", 0.0), [instance("a", 12)])
    assert (found.on, found.percents, found.header) == (False, {}, b"")


@pytest.mark.parametrize(
    "percents", [{"v12": 90.0, "v13": 10.0}, {"v1": 50.0, "v2": 50.0}, {"v1": 33.3, "v2": 33.3, "v3": 33.4}]
)
def test_requests_take_turns_exactly(percents: dict[str, float]) -> None:
    splits, found = split(**percents), Counter[int | None]()
    for count in range(1, MANY + 1):
        found[chosen(splits, Asks())] += 1
        off = [abs(found[v] - count * p / 100) for v, p in splits.percents.items()]
        assert max(off) <= 1.0, "at no time has a version had more than one too many"


@pytest.mark.parametrize("sticky", ["session", "key", "header:x-user"])
def test_what_sticks_is_divided_within_one_percent(sticky: str) -> None:
    splits = split(sticky, v12=90.0, v13=10.0)

    def by(n: int) -> Asks:
        value = b"user-%d" % n
        return replace(asks(session=value, sticky={b"x-user": value}), principal=replace(ANONYMOUS, digest=value))

    found = Counter(chosen(splits, by(n)) for n in range(MANY))
    assert abs(found[13] - MANY * 0.1) <= MANY * 0.01
    other_gateway = split(sticky, v12=90.0, v13=10.0)
    assert [chosen(splits, by(n)) for n in range(99)] == [chosen(other_gateway, by(n)) for n in range(99)]


def test_a_version_that_grows_only_gains() -> None:
    users = [b"user-%d" % n for n in range(2000)]
    before: set[bytes] = set()
    for percent in (0.0, 1.0, 5.0, 20.0, 50.0, 90.0, 100.0):
        splits = split("session", v12=100.0 - percent, v13=percent)
        has = {user for user in users if chosen(splits, asks(session=user)) == 13}
        assert before <= has
        before = has
    assert before == set(users)
    three = split("session", v12=80.0, v13=10.0, v14=10.0)
    grown = split("session", v12=60.0, v13=30.0, v14=10.0)
    had = {user for user in users if chosen(three, asks(session=user)) == 13}
    assert had <= {user for user in users if chosen(grown, asks(session=user)) == 13}


def test_who_has_nothing_to_stick_by_takes_turns() -> None:
    for sticky in ("session", "key", "header:x-user"):
        splits = split(sticky, v1=50.0, v2=50.0)
        assert Counter(chosen(splits, Asks()) for _ in range(100)) == {1: 50, 2: 50}


def test_constraints_come_first_and_the_rest_is_divided() -> None:
    splits = split(v1=50.0, v2=30.0, v3=20.0)
    pin = Need(7, None, 1.0)
    assert splits.need(Asks(need=pin)) is pin
    least = Counter(chosen(splits, Asks(need=Need(None, 2, 0.0))) for _ in range(100))
    assert least == {2: 60, 3: 40}
    assert Counter(chosen(splits, Asks()) for _ in range(100)) == {1: 50, 2: 30, 3: 20}, "and takes no turn of others"
    late = Need(None, 4, 2.0)
    assert splits.need(Asks(need=late)) is late, "none of them: it waits as it would without a split"
    nothing = split(v1=100.0, v2=0.0)
    assert Counter(chosen(nothing, Asks()) for _ in range(50)) == {1: 50}
    least_2 = Need(None, 2, 0.0)
    assert splits.need(Asks(need=least_2)) != least_2
    assert nothing.need(Asks(need=least_2)) is least_2, "the one that meets it has no share, but is asked for"


def test_a_request_stays_with_its_version() -> None:
    splits, request = split(v1=50.0, v2=50.0), Asks()
    assert len({chosen(splits, request) for _ in range(10)}) == 1


def test_others_answer_for_a_version_that_nobody_runs() -> None:
    splits = split(lost=(13,), v12=90.0, v13=10.0)
    assert Counter(chosen(splits, Asks()) for _ in range(100)) == {12: 100}
    assert splits.elsewhere == {13: 10}
    sticks = split("session", lost=(13,), v11=60.0, v12=30.0, v13=10.0)
    whole = split("session", v11=60.0, v12=30.0, v13=10.0)
    for n in range(300):
        user = b"user-%d" % n
        before, after = chosen(whole, asks(session=user)), chosen(sticks, asks(session=user))
        assert after == before or before == 13, "nobody else moves"


def test_one_that_was_ejected_is_tried_once_in_a_while() -> None:
    splits, ill = Splits(), instance("i13", 13)
    ill.health.eject(0.0)
    splits.follow(committed(v12=50.0, v13=50.0), [instance("i12", 12), ill])
    assert 13 in {chosen(splits, Asks()) for _ in range(4)}, "its time is up"
    ill.health.eject(1e9)
    assert {chosen(splits, Asks()) for _ in range(4)} == {12}


def test_turns_go_on_when_a_version_is_placed_anew_and_begin_anew_with_other_percentages() -> None:
    splits, found = split(v1=90.0, v2=10.0), []
    for n in range(20):
        moved = committed(v1=90.0, v2=10.0)
        assert moved.split is not None
        share = replace(moved.split.shares[0], instances=(f"j{n}",))
        splits.follow(replace(moved, split=replace(moved.split, shares=(share,))), [instance("a", 1), instance("b", 2)])
        found.append(chosen(splits, Asks()))
    assert Counter(found) == {1: 18, 2: 2}
    splits.follow(committed(v1=10.0, v2=90.0), [instance("a", 1), instance("b", 2)])
    assert Counter(chosen(splits, Asks()) for _ in range(10)) == {1: 1, 2: 9}


def test_each_instance_is_fresh_with_the_version_of_its_share() -> None:
    active = committed(v12=90.0, v13=10.0)
    runs = InstanceRecord("i13", "x", "SERVING", 13, 1)
    assert fresh(runs, active, None)
    assert not fresh(replace(runs, active_version=12), active, None)
    assert fresh(replace(runs, id="i12", active_version=12), active, None)
    assert not fresh(replace(runs, id="i12"), active, None)
    assert not fresh(replace(runs, active_epoch=0), active, None)
    assert fresh(replace(runs, active_epoch=0), active, SwapRecord("s", 12, "commit", (), 0.0, 0.0))


# through a gateway


@dataclass
class Instances:
    """Two upstreams that say which version they run, registered as the instances of a split."""

    gateway: RunningGateway
    upstreams: dict[int, Upstream] = field(default_factory=dict)

    async def commit(self, sticky: str = "", **percents: float) -> None:
        active, fleet = committed(sticky, **percents), self.gateway.gateway.default.fleet
        self.gateway.store.put(KEYS.active, active.to_json())
        await eventually(lambda: fleet.active == active and len(fleet.serving) == len(percents))

    async def ask(self, count: int, headers: str = "") -> Counter[str]:
        """Requests one after the other on one connection: by version, and by status where there is none."""
        found: Counter[str] = Counter()
        async with self.gateway.client() as client:
            for _ in range(count):
                client.writer.write(post(headers=headers))
                answer = await client.answer()
                found[answer.headers.get("x-hotswap-weight-version", str(answer.status))] += 1
        return found


@pytest.fixture
async def instances(gateway: RunningGateway) -> AsyncIterator[Instances]:
    async with contextlib.AsyncExitStack() as stack:
        found = Instances(gateway)
        for version in (12, 13):
            says_version = answering(extra=b"x-hotswap-weight-version: %d\r\n" % version)
            instance = gateway.instance(says_version, f"i{version}", active_version=version)
            found.upstreams[version] = await stack.enter_async_context(instance)
        yield found


async def test_a_gateway_divides_requests(instances: Instances) -> None:
    await instances.commit(v12=90.0, v13=10.0)
    assert await instances.ask(500) == {"12": 450, "13": 50}
    assert await instances.ask(20, "x-hotswap-version: 13\r\n") == {"13": 20}
    assert await instances.ask(20, "x-hotswap-min-version: 13\r\n") == {"13": 20}
    assert await instances.ask(100) == {"12": 90, "13": 10}
    page = (await instances.gateway.ask(get("/metrics"), admin=True)).body.decode()
    assert 'hotswap_split_requests_total{model="toy",status="200",version="13"} 100.0' in page
    assert 'hotswap_split_percent{model="toy",version="12"} 90.0' in page
    assert 'hotswap_split_request_duration_seconds_count{model="toy",version="12"} 540.0' in page


async def test_a_header_sticks(instances: Instances) -> None:
    await instances.commit("header:x-user", v12=50.0, v13=50.0)
    seen = [await instances.ask(5, f"X-User: user-{n}\r\n") for n in range(40)]
    assert all(len(found) == 1 for found in seen)
    assert {next(iter(found)) for found in seen} == {"12", "13"}
    pure = split("header:x-user", v12=50.0, v13=50.0)
    assert [next(iter(found)) for found in seen] == [
        str(chosen(pure, asks(sticky={b"x-user": b"user-%d" % n}))) for n in range(40)
    ]


async def test_shares_change_and_end_without_a_failed_request(instances: Instances) -> None:
    await instances.commit(v12=50.0, v13=50.0)
    load = [asyncio.create_task(instances.ask(150)) for _ in range(4)]
    for percent in (90.0, 20.0, 60.0):
        await instances.commit(v12=percent, v13=100.0 - percent)
    found = sum(await asyncio.gather(*load), Counter[str]())
    assert set(found) == {"12", "13"}
    assert found.total() == 600


async def test_others_answer_when_a_version_has_nobody_left(instances: Instances) -> None:
    await instances.commit("session", v12=50.0, v13=50.0)
    instances.upstreams[13].handler = cut  # its engine dies with each request
    for _ in range(3):
        assert set(await instances.ask(2, "x-session-id: s-1\r\n")) <= {"12", "13"}
    instances.gateway.unregister("i13")
    assert await instances.ask(60) == {"12": 60}
    assert instances.gateway.gateway.default.fleet.splits.elsewhere[13] >= 30


@pytest.mark.parametrize("gateway", [UpstreamSettings(max_in_flight=1)], indirect=True)
async def test_a_full_version_holds_up_nobody_elses_requests(instances: Instances) -> None:
    """Its requests wait for it, and go when there is room; they are not sent where they do not belong."""
    go_on, says_version = asyncio.Event(), instances.upstreams[13].handler

    async def slowly(link: Link, received: Received) -> None:
        await go_on.wait()
        await says_version(link, received)

    instances.upstreams[13].handler = slowly
    await instances.commit(v12=50.0, v13=50.0)
    asked = [asyncio.create_task(instances.ask(1)) for _ in range(8)]
    await eventually(lambda: sum(task.done() for task in asked) == 4)
    assert sum((task.result() for task in asked if task.done()), Counter[str]()) == {"12": 4}
    go_on.set()
    assert sum(await asyncio.gather(*asked), Counter[str]()) == {"12": 4, "13": 4}
