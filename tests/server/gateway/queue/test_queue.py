"""The line in front of the instances, without sockets: bounds, order, shares, deadlines, over random schedules."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import HttpError
from server.gateway import QueueSettings
from server.gateway.access.costs import Cost
from server.gateway.fleet.instance import HEADROOM, UNKNOWN, Signals, Window
from server.gateway.fleet.routing import Need
from server.gateway.queue.flows import Class
from server.gateway.queue.line import (
    LONGEST_RETRY_S,
    MEMORY,
    TURN_FOR_ALL,
    AdmissionQueue,
    DrainRate,
    Ticket,
    retry_after,
)
from server.gateway.wire.bodies import Usage
from tests.server.refusals import refuses

Tickets = list[Ticket[int]]
numbers = itertools.count()


def ticket(key: str = "a", cost: int = 1, **fields: object) -> Ticket[int]:
    return Ticket(next(numbers), key.encode(), cost=cost, **fields)  # type: ignore[arg-type]


def queue(*tickets: Ticket[int], **settings: float) -> AdmissionQueue[int]:
    """A line in which these wait, in this order."""
    line = AdmissionQueue[int](QueueSettings(**{"max_wait_s": 1e9, **settings}))  # type: ignore[arg-type]
    for each in tickets:
        line.enter(each, 0.0)
    return line


def taking_turns(count: int) -> AdmissionQueue[int]:
    """A line in which so many of each of two keys wait, each at a cost of 10."""
    return queue(*(ticket(key, cost=10) for _ in range(count) for key in "ab"))


def drained(line: AdmissionQueue[int], now: float = 0.0) -> Tickets:
    return [line.pop(now) for _ in range(line.waiting)]


# order


def test_each_key_has_its_own_order_and_no_burst_passes_another_key() -> None:
    burst, late = [ticket("a") for _ in range(10)], [ticket("b") for _ in range(2)]
    out = drained(queue(*burst, *late))
    assert [t for t in out if t.key == b"a"] == burst
    assert [t for t in out if t.key == b"b"] == late
    assert {t.key for t in out[:2]} == {t.key for t in out[2:4]} == {b"a", b"b"}


def test_the_lowest_priority_number_goes_first_and_the_highest_is_not_forgotten() -> None:
    line = queue(max_entries=10_000)
    for _ in range(2 * TURN_FOR_ALL):
        line.enter(ticket("a", priority=-1), 0.0)
        line.enter(ticket("b", priority=5), 0.0)
    line.enter(ticket("c", priority=0), 0.0)
    out = drained(line)
    first = out[: 2 * TURN_FOR_ALL]
    assert Counter(t.priority for t in first) == {-1: 2 * TURN_FOR_ALL - 2, 5: 1, 0: 1}
    assert sorted(t.priority for t in out[2 * TURN_FOR_ALL + 2 :]) == [5] * (2 * TURN_FOR_ALL - 1)


def test_one_that_was_idle_has_saved_nothing_up() -> None:
    line = queue(*(ticket("a") for _ in range(100)))
    for _ in range(50):
        line.pop(0.0)
    for _ in range(50):
        line.enter(ticket("b"), 0.0)
    keys = Counter(line.pop(0.0).key for _ in range(20))
    assert abs(keys[b"a"] - keys[b"b"]) <= 2


def test_a_key_whose_line_is_empty_between_its_requests_pays_for_them_all_the_same() -> None:
    line = queue(*(ticket("a", cost=10) for _ in range(30)), ticket("one at a time", cost=10))
    served = Counter[bytes]()
    for _ in range(30):
        key = line.pop(0.0).key
        served[key] += 1
        if key == b"one at a time":
            line.enter(ticket("one at a time", cost=10), 0.0)
    assert abs(served[b"one at a time"] - served[b"a"]) <= 2


def test_all_that_requests_really_cost_is_charged_with_the_next() -> None:
    """Several answers may end before their key's turn comes again."""
    line = taking_turns(20)
    for more in (30, 30, 30):
        line.settle(b"a", 0, more)
    served = Counter(line.pop(0.0).key for _ in range(14))
    assert served[b"b"] - served[b"a"] in range(8, 11)  # 90 more than was thought, 10 a request


def test_who_always_hangs_up_gets_no_more_than_its_share() -> None:
    """Prompts of 25,000 tokens whose answers are cut, beside requests of 1,000 that are read to their end."""
    hung_up, read = Cost(25_000, 256), Cost(900, 100)
    line, served = queue(), Counter[bytes]()
    for _ in range(4):
        line.enter(ticket("hangs up", hung_up.total), 0.0)
        line.enter(ticket("reads", read.total), 0.0)
    for _ in range(2000):
        key = line.pop(0.0).key
        served[key] += 1
        cost, usage, status = (hung_up, Usage(0, 1, exact=False), 499)
        if key == b"reads":
            cost, usage, status = read, Usage(900, 100), 200
        line.settle(key, 0, cost.used(usage, status) - cost.total)
        line.enter(ticket(key.decode(), cost.total), 0.0)
    assert served[b"hangs up"] * 25_000 <= served[b"reads"] * 1000 + 2 * 25_256


def test_a_refund_lets_nobody_go_before_those_who_waited_longer() -> None:
    """It pays for the next request at most: with a tag in the past, one key would have the line for itself."""
    line = taking_turns(12)
    assert line.pop(0.0).key == b"a"
    line.settle(b"a", 0, -1000)
    served = [line.pop(0.0).key for _ in range(6)]
    assert served.count(b"b") >= 2


def test_a_new_key_waits_for_one_of_each_before_it() -> None:
    """As the wait is reckoned by which deadlines are refused: equal keys take turns, heavier ones more."""
    line: Class[Ticket[int]] = Class()
    for key in "aabbbbbbbbcccccccc":
        line.push(ticket(key))
    assert line.ahead(b"new", 1) == 3
    assert line.ahead(b"new", 3) == 1
    assert line.ahead(b"a", 1) == 2 + 3 * 2
    assert line.ahead(b"a", 6) == 2 + 1


# bounds


def test_the_longest_line_makes_room() -> None:
    longest = [ticket("a") for _ in range(3)]
    line = queue(*longest, max_entries=4)
    assert line.enter(ticket("b"), 0.0) is None
    with refuses(429) as refused:
        line.enter(ticket("a"), 0.0)
    assert (refused.value.code, refused.value.retry_after_s) == ("queue_full", 1)
    assert line.enter(ticket("c"), 0.0) is longest[-1]
    assert len(line) == 4


def test_weights_count_in_the_length_of_a_line() -> None:
    light = [ticket("light") for _ in range(2)]
    line = queue(*(ticket("heavy", weight=4) for _ in range(4)), *light, max_entries=6)
    assert line.enter(ticket("c"), 0.0) is light[-1]


def test_the_least_urgent_makes_room_and_has_none_when_all_are_more_urgent() -> None:
    patient = ticket("b", priority=1)
    line = queue(ticket("a", priority=-1), patient, max_entries=2)
    new = ticket("a", priority=-1)
    assert line.enter(new, 0.0) is patient
    assert line.displaced(patient, new, 0.0).code == "overloaded"
    with refuses(503) as refused:
        line.enter(ticket("c", priority=1), 0.0)
    assert refused.value.code == "overloaded"


def test_bytes_are_bounded() -> None:
    line = queue(first := ticket("a", size=60), max_bytes=100)
    with refuses(503):
        line.enter(ticket("b", size=41), 0.0)
    line.leave(first)
    line.enter(ticket("b", size=100), 0.0)
    assert (line.bytes, len(line)) == (100, 1)


def test_nothing_waits_where_nothing_may() -> None:
    with pytest.raises(HttpError):
        queue(max_entries=0).enter(ticket(), 0.0)


# deadlines


def test_those_whose_time_is_up_go() -> None:
    soon, plain = ticket("a", deadline=3.0), ticket("a")
    line = queue(soon, plain, max_wait_s=10.0)
    assert line.next_deadline() == 3.0
    assert line.expire(2.9) == []
    assert line.expire(3.0) == [soon]
    assert line.next_deadline() == 10.0
    assert (line.pop(5.0), line.next_deadline(), line.expire(99.0)) == (plain, math.inf, [])


def steady(line: AdmissionQueue[int], pace_s: float) -> float:
    """Teaches `line` its pace; returns the time."""
    now = 0.0
    line.enter(ticket("x"), now)
    for _ in range(MEMORY):
        line.enter(ticket("x"), now)
        now += pace_s
        line.pop(now)
    return now


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    line = queue()
    now = steady(line, 0.1)
    for _ in range(49):
        line.enter(ticket("x"), now)
    with refuses(503) as refused:
        line.enter(ticket("x", deadline=now + 2.0), now)
    assert (refused.value.code, refused.value.retry_after_s) == ("deadline_unmet", 4)  # 51 before it, 0.1 s each
    line.enter(ticket("fresh", deadline=now + 2.0), now)  # its share is not used up: it goes second
    line.enter(ticket("x", deadline=now + 2.0, priority=-1), now)
    assert line.waiting == 52


def test_who_would_be_next_may_always_try() -> None:
    line = queue()
    now = steady(line, 10.0)
    drained(line, now)
    line.enter(ticket("x", deadline=now + 1.0), now)
    with refuses(503):
        line.enter(ticket("x", deadline=now + 1.0), now)
    line.pop(now + 0.1)
    line.enter(ticket("x", deadline=now + 1.0), now + 0.1)


def test_a_wait_over_the_longest_is_refused_at_once() -> None:
    line = queue(max_wait_s=2.0)
    now = steady(line, 0.1)
    while line.waiting < 20:  # 21 before it would be 2.1 s
        line.enter(ticket("x"), now)
    with refuses(503) as refused:
        line.enter(ticket("x"), now)
    assert refused.value.code == "overloaded"
    line.pop(now)
    line.enter(ticket("x"), now)


def test_a_line_that_was_empty_for_long_has_not_been_slow() -> None:
    line = queue(max_wait_s=2.0)
    now = steady(line, 0.1)
    drained(line, now)
    line.enter(ticket("x", deadline=now + 86_400.2), now + 86_400.0)
    assert line.waiting == 1


def test_the_pace() -> None:
    pace = DrainRate()
    assert pace.wait_s(1000, 5.0) == 0.0
    pace.began(0.0)
    for second in range(1, 200):
        pace.departed(float(second))
    assert pace.wait_s(9, 199.0) == pytest.approx(10.0)
    assert pace.wait_s(9, 199.0 + 10 * MEMORY) == pytest.approx(100.0)  # it stands still
    pace.began(10_000.0)  # nobody waited for long: that says nothing of the pace
    assert pace.wait_s(9, 10_000.0) == pytest.approx(10.0)
    assert (retry_after(0.0), retry_after(1.2), retry_after(1e9)) == (1, 2, LONGEST_RETRY_S)


# those whose version is busy


def test_who_steps_aside_holds_up_nobody_and_counts() -> None:
    need = Need(7, None, 0.0)
    bound, plain = ticket("a", need=need, size=5), ticket("a")
    line = queue(bound, plain, max_entries=3, max_wait_s=10.0)
    assert line.pop(0.0) is bound
    line.put_aside(bound)
    assert (line.pop(0.0), line.waiting, len(line), line.bytes) == (plain, 0, 1, 5)
    assert (line.needs(), line.first_aside(need)) == ([need], bound)
    assert line.expire(10.0) == [bound]
    assert (len(line), line.bytes, line.needs()) == (0, 0, [])


# random schedules


@dataclass
class World:
    """A queue and what it should hold."""

    line: AdmissionQueue[int] = field(default_factory=lambda: queue(max_entries=12, max_bytes=60, max_wait_s=20.0))
    now: float = 0.0
    inside: Tickets = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    refusals: list[HttpError] = field(default_factory=list)

    def enter(self, key: str, cost: int, priority: int, deadline_s: float, size: int) -> None:
        new = ticket(key, cost, priority=priority, weight=1 + len(key), deadline=self.now + deadline_s, size=size)
        self.ended["offered"] += 1
        try:
            out = self.line.enter(new, self.now)
        except HttpError as error:
            self.ended["refused"] += 1
            self.refusals.append(error)
            return
        self.inside.append(new)
        if out is not None:
            assert (out.priority, not out.waits) >= (new.priority, True)
            self.gone(out, "displaced")

    def pop(self) -> None:
        if self.line.waiting:
            out = self.line.pop(self.now)
            first = next(t for t in self.inside if (t.key, t.priority) == (out.key, out.priority))
            assert out is first, "first come, first served within a key's line"
            self.gone(out, "served")

    def leave(self, index: int) -> None:
        if self.inside:
            out = self.inside[index % len(self.inside)]
            self.line.leave(out)
            self.gone(out, "left")

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for out in self.line.expire(self.now):
            assert out.deadline <= self.now
            self.gone(out, "expired")
        assert all(t.deadline > self.now for t in self.inside)

    def gone(self, out: Ticket[int], how: str) -> None:
        assert not out.waits
        self.inside.remove(out)
        self.ended[how] += 1

    def check(self) -> None:
        assert all(error.retry_after_s for error in self.refusals)
        assert len(self.line) == len(self.inside) == sum(self.line.depths().values()) <= 12
        assert self.line.bytes == sum(t.size for t in self.inside) <= 60
        assert all(t.waits for t in self.inside)
        assert self.ended["offered"] == len(self.inside) + self.ended.total() - self.ended["offered"]


entering = st.tuples(
    st.just("enter"),
    st.sampled_from(["a", "b", "cc", "ddd"]),
    st.integers(1, 50),
    st.integers(-1, 1),
    st.sampled_from([1.0, 5.0, math.inf]),
    st.integers(0, 20),
)
steps = st.one_of(
    entering,
    entering,
    st.tuples(st.just("pop")),
    st.tuples(st.just("leave"), st.integers(0, 11)),
    st.tuples(st.just("wait"), st.floats(0.0, 4.0)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=120))
def test_nobody_is_lost_or_counted_twice(schedule: list[tuple]) -> None:  # type: ignore[type-arg]
    world = World()
    for name, *arguments in schedule:
        getattr(world, name)(*arguments)
        world.check()
    while world.line.waiting:
        world.pop()
    assert not world.inside
    assert world.line.bytes == 0


flows = st.dictionaries(
    st.sampled_from("abcde"), st.tuples(st.integers(1, 8), st.lists(st.integers(1, 500), min_size=60, max_size=60)),
    min_size=2,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(flows)
def test_shares_follow_weights_while_all_wait(of: dict[str, tuple[int, list[int]]]) -> None:
    """Goyal et al., theorem 1, after every departure."""
    line = queue()
    costs = {key: iter(costs) for key, (_, costs) in of.items()}
    for key, (weight, _) in of.items():
        for _ in range(3):
            line.enter(ticket(key, next(costs[key]), weight=weight), 0.0)
    given_ = dict.fromkeys(of, 0.0)
    most = {key: max(costs) / weight for key, (weight, costs) in of.items()}
    for _ in range(50):
        out = line.pop(0.0)
        key = out.key.decode()
        given_[key] += out.cost / of[key][0]
        line.enter(ticket(key, next(costs[key]), weight=of[key][0]), 0.0)
        for a, b in itertools.combinations(of, 2):
            assert abs(given_[a] - given_[b]) <= most[a] + most[b] + 1e-6


@settings(max_examples=100, deadline=None)
@given(st.integers(-9, 9), st.integers(1, 500), st.lists(st.integers(-9, 9), min_size=1, max_size=5))
def test_nobody_starves(priority: int, cost: int, others: list[int]) -> None:
    """However much more urgent work of other keys keeps coming, and however dear one's own request is."""
    mine = ticket("mine", cost, priority=priority)
    line = queue(mine, max_entries=1000)
    turns = 0
    while mine.waits:
        turns += 1
        assert turns <= TURN_FOR_ALL * (len(set(others)) + 1) * (len(others) + 1)
        for i, p in enumerate(others):
            if line.waiting < 200:
                line.enter(ticket(f"k{i}", 1, priority=p), 0.0)
        line.pop(0.0)


# capacity and cost


def test_a_window_is_what_runs_and_a_little_more() -> None:
    assert Window(2, None).limit == 3
    assert Window(256, None).limit == 256 + 256 // HEADROOM
    assert Window(None, None).limit == UNKNOWN
    assert Window(256, 10).limit == Window(None, 10).limit == 10
    assert Window(256, 0).limit == math.inf


def test_a_window_shrinks_when_requests_wait_inside_and_grows_back() -> None:
    window = Window(64, None)
    window.adapt(Signals(num_requests_waiting=8), 72)
    assert window.limit == window.most == 72  # the headroom
    window.adapt(Signals(num_requests_waiting=9), 72)
    assert window.limit == 57
    window.adapt(Signals(num_preemptions=1), 40)
    assert window.limit == 32
    window.adapt(Signals(num_preemptions=2), 0)
    assert window.limit == 12  # of what is not used, half is believed
    window.adapt(Signals(num_requests_waiting=1, num_preemptions=2), 12)
    assert window.limit == 17
    for _ in range(40):
        window.adapt(Signals(num_requests_waiting=99, num_preemptions=2), 0)
    assert window.limit == 1
    for _ in range(4):
        window.adapt(Signals(num_preemptions=2), 1)
    assert window.limit == 72


def test_windows_of_two_gateways_come_to_equal_shares() -> None:
    """Both see what waits inside; neither knows of the other. One has it all when the other comes."""
    first, second = Window(64, None), Window(64, None)
    second._size = second.limit = 1
    history = []
    for _ in range(200):
        inside = first.limit + second.limit
        signals = Signals(num_requests_running=min(inside, 64), num_requests_waiting=max(0, inside - 64))
        first.adapt(signals, int(first.limit))
        second.adapt(signals, int(second.limit))
        history.append((first.limit, second.limit))
    a, b = (sum(x) / 50 for x in zip(*history[-50:], strict=True))
    assert abs(a - b) < 0.1 * (a + b)
    assert 0.75 * 72 < a + b < 1.25 * 72


def test_an_unlimited_window_stays_so() -> None:
    window = Window(8, 0)
    window.adapt(Signals(num_requests_waiting=1000, num_preemptions=5), 1000)
    window.adapt(Signals(num_requests_waiting=1000, num_preemptions=9), 1000)
    assert window.limit == math.inf
