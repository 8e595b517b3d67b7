"""Differences between versions: when they are worth it, and that they arrive."""

from __future__ import annotations

import numpy as np
import pytest

from tests.waiting import wait_until
from tests.weightsync.peer.hosts import Hosts, random_model
from weightsync.errors import PeerError
from weightsync.peer.deltas import MOST_READERS, Speed, Speeds
from weightsync.peer.messages import Key
from weightsync.peer.service import Turns
from weightsync.peer.settings import Deltas

GB = 10**9


def test_a_speed_is_of_late_and_of_many_bytes_rather_than_few() -> None:
    speed = Speed()
    assert speed.per_s is None
    speed.learn(10 * GB, 10)
    assert speed.per_s == GB
    speed.learn(GB // 1000, 1)  # a thousandth of it in a second: little is known by that
    assert speed.per_s == pytest.approx(0.9 * GB, rel=0.02)
    for _ in range(20):
        speed.learn(10 * GB, 100)
    assert speed.per_s == pytest.approx(0.1 * GB, rel=0.01)
    speed.learn(0, 5)
    speed.learn(5, 0)
    assert speed.per_s == pytest.approx(0.1 * GB, rel=0.01)


@pytest.mark.parametrize(
    ("link", "delta", "pays"),
    [
        (1.25 * GB, GB // 100, False),  # 10 Gbit/s: applying takes longer than reading all of it
        (0.1 * GB, GB // 100, True),
        (0.1 * GB, GB - GB // 100, False),  # hardly smaller
        (0.001 * GB, GB, False),  # a peer says that it is as large as the slot, or larger
        (None, GB // 100, False),  # the first fetch from there is in full, and tells
    ],
)
def test_a_difference_is_read_where_it_is_sooner_there(link: float | None, delta: int, pays: bool) -> None:
    speeds = Speeds()
    speeds.apply.learn(GB, 1.0)
    speeds.fetched(["other"], GB, 1000.0)
    if link is not None:
        speeds.fetched(["a", "b"], GB, GB / link)
    assert speeds.is_worth_reading(delta, GB, ["a", "never seen"]) == pays


def test_a_slow_host_does_not_apply_differences() -> None:
    speeds = Speeds()
    speeds.fetched(["a"], GB, 5.0)
    assert speeds.is_worth_reading(GB // 100, GB, ["a"])  # as fast as is guessed
    speeds.apply.learn(GB, 6.0)
    assert not speeds.is_worth_reading(GB // 100, GB, ["a"])


@pytest.mark.parametrize(("deltas", "used"), [("always", True), ("never", False)])
def test_what_was_asked_for_goes_before_what_was_measured(deltas: Deltas, used: bool) -> None:
    speeds = Speeds(deltas)
    assert speeds.is_worth_making(GB) == used
    assert speeds.is_worth_reading(GB // 100, GB, []) == used
    assert not speeds.is_worth_reading(GB, GB, [])


def test_a_difference_is_made_when_most_readers_are_slow() -> None:
    speeds = Speeds()
    assert not speeds.is_worth_making(GB)  # nobody has said how fast it reads
    for reader, rate in (("a", 0.01 * GB), ("b", 0.02 * GB), ("c", 10.0 * GB)):
        speeds.told(reader, rate)
    assert speeds.is_worth_making(GB)
    speeds.told("b", 10.0 * GB)
    assert not speeds.is_worth_making(GB)
    speeds.told("b", 0.02 * GB)
    speeds.make.learn(GB, 1000.0)
    assert not speeds.is_worth_making(GB)


def test_what_readers_say_is_bounded_and_must_be_a_rate() -> None:
    speeds = Speeds()
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        speeds.told("a", rate)
    assert not speeds.is_worth_making(GB)
    for n in range(2 * MOST_READERS):
        speeds.told(f"h{n}", 10.0 * GB)
    for n in range(MOST_READERS):
        speeds.told(f"slow{n}", 1.0)
    assert speeds.is_worth_making(GB)  # those of before are forgotten


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("weightsync.peer.service.time.monotonic", lambda: self.now)


A, B = Key("a" * 32), Key("b" * 32)


def test_what_waits_for_a_holder_stands_back_for_another_but_not_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turn = Clock(monkeypatch), Turns()
    assert turn.next([]) is None
    assert turn.next([A, B]) == A
    turn.waits(A, PeerError("nobody has it"))
    assert (turn.next([A, B]), turn.next([A])) == (B, A)
    assert turn.problems[A].code == "peer_error"
    assert A not in turn.failed
    clock.now += 5
    assert turn.next([A, B]) == A  # tried again
    turn.waits(A, PeerError("still"))
    clock.now += 5
    assert turn.next([A, B]) == B  # for longer each time, as B would come to nothing otherwise
    turn.goes_on(A)
    assert turn.next([A, B]) == A
    assert not turn.problems


def test_what_failed_is_tried_again_later_and_stays_failed_until_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turn = Clock(monkeypatch), Turns()
    turn.ended(A, PeerError("no"), failed=True)
    assert turn.next([A]) is None
    clock.now += 5
    assert turn.next([A]) == A
    turn.goes_on(A)
    turn.waits(A, PeerError("nobody"))
    assert turn.failed == {A}
    assert turn.problems[A].message == "no"
    turn.done(A)
    assert (turn.failed, turn.problems) == (set(), {})
    turn.ended(A, PeerError("no"), failed=False)
    clock.now += 0.5
    assert turn.next([A]) == A
    turn.ended(B, ValueError("broken"), failed=True)
    assert turn.problems[B].code == "internal_error"
    turn.keep_to({A})
    assert (set(turn.problems), turn.failed) == ({A}, set())


ALWAYS = ("--deltas", "always")


def stepped(tensors: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """A few elements of each tensor changed a little."""
    rng = np.random.default_rng(seed)
    changed = {name: tensor.copy() for name, tensor in tensors.items()}
    for tensor in changed.values():
        places = rng.integers(0, len(tensor), len(tensor) // 200)
        tensor[places] *= np.float32(1.0001)
    return changed


def test_a_small_step_travels_as_a_difference(hosts: Hosts) -> None:
    """b has the version of before; c, which comes later, has none; all end with the same bytes. b is slow enough for
    a difference to pay, says so to a, and a makes one.
    """
    hosts.start("a")
    hosts.start("b", "--limit-gbps", 0.02)
    first = random_model(1)
    base = hosts.wait_copy("b", hosts.published("a", first))
    wait_until(
        lambda: hosts.metric("a", "hotswap_peer_sent_bytes_total", reader="b") == base.nbytes
    )  # told when it leaves
    before = hosts.received("b")
    copy = hosts.arrived("b", hosts.published("a", stepped(first, 2)))
    wait_until(lambda: hosts.metric("b", "hotswap_peer_fetch_seconds_count", how="delta") == 1)
    assert hosts.received("b") - before < copy.nbytes / 10
    wait_until(lambda: hosts.wait_copy("b", copy.digest).delta_of == base.digest)  # and b passes it on
    hosts.start("c")
    hosts.arrived("c", copy.digest, like="b")
    assert hosts.metric("c", "hotswap_peer_fetch_seconds_count", how="delta") == 0


def test_another_model_travels_in_full(hosts: Hosts) -> None:
    """The difference would be no smaller."""
    hosts.start("ab", *ALWAYS)
    hosts.wait_copy("b", hosts.published("a"))
    copy = hosts.arrived("b", hosts.published("a", random_model(2)))
    assert hosts.wait_copy("a", copy.digest).delta_of is None
    wait_until(lambda: hosts.metric("b", "hotswap_peer_fetch_seconds_count", how="full") == 2)


def test_a_damaged_difference_is_not_applied(hosts: Hosts) -> None:
    """The base at b has changed since it was fetched: the version comes in full."""
    hosts.start("ab", *ALWAYS)
    first = random_model(1)
    base = hosts.wait_copy("b", hosts.published("a", first))
    with open(base.slot.removeprefix("//b"), "r+b") as slot:
        slot.seek(base.nbytes - 8192)
        slot.write(b"\x01\x02\x03\x04")
    hosts.arrived("b", hosts.published("a", stepped(first, 2)))
    assert "does not come as a delta" in hosts.log("b")
    wait_until(lambda: hosts.metric("b", "hotswap_peer_fetch_seconds_count", how="full") == 2)
