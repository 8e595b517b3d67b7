"""The history of swaps: on every store, from real swaps of a small fleet."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.waiting import eventually
from tests.weightsync.fleet import KEYS, Engine, Fleet
from weightsync.control import activation, history
from weightsync.control.history import History, past_swaps
from weightsync.control.records import Keys, PastSwapRecord
from weightsync.control.state import ProbeResult
from weightsync.errors import DigestMismatch

STORES = ("sqlite", "etcd")
OLD = PastSwapRecord("x", 1, "done", "together", 1.0, 2.0)


async def test_a_swap_is_kept_with_its_times_and_what_it_came_to(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    await fleet.instances("ab")
    first = await coordinator.activate(await fleet.publish(1.0))
    await coordinator.activate(await fleet.publish(2.0))
    second, oldest = await past_swaps(fleet.store(), KEYS)
    assert (oldest.id, oldest.outcome, oldest.version, oldest.previous, oldest.epoch) == (first.id, "done", 1, None, 1)
    assert (second.version, second.previous, second.epoch, second.mode) == (2, 1, 2, "together")
    assert second.committed_at is not None
    assert second.opened_at <= second.committed_at <= second.ended_at
    assert (second.verified, second.probe, second.reason, second.requested_by) == (True, None, None, "coordinator")
    assert second.fingerprint
    assert [(f.instance, f.version, f.stall_ms) for f in second.flips] == [("a", 2, 0.5), ("b", 2, 0.5)]
    assert {f.fingerprint for f in second.flips} == {second.fingerprint}


async def test_an_aborted_swap_is_kept_with_its_reason_and_tensor(fleet: Fleet) -> None:
    def refuse(_: object) -> None:
        raise DigestMismatch("model.norm.weight", "aa", "bb")

    coordinator = await fleet.serving("a")
    engine = fleet.engines["a"]
    engine.on_stage = refuse
    assert not (await coordinator.activate(await fleet.publish(2.0))).ok
    last = (await past_swaps(fleet.store(), KEYS))[0]
    assert (last.outcome, last.version, last.previous, last.tensor) == ("aborted", 2, 1, "model.norm.weight")
    assert (last.epoch, last.committed_at, last.verified) == (None, None, None)
    assert "instance a" in (last.reason or "")
    assert [(f.version, f.stall_ms) for f in last.flips] == [(1, None)]


async def test_weights_that_were_not_published_are_kept_as_not_verified(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    await fleet.instance("a", Engine(builds="ffff"))
    assert not (await coordinator.activate(await fleet.publish())).ok
    (last,) = await past_swaps(fleet.store(), KEYS)
    assert (last.outcome, last.verified) == ("aborted", False)


async def test_a_request_for_what_is_not_ready_any_more_is_kept(fleet: Fleet) -> None:
    version = await fleet.publish()
    store = fleet.store()
    await activation.request(store, KEYS, activation.new_target(version, "somebody", 5.0))
    await store.delete(KEYS.version(version))
    fleet.coordinator()
    kept = await eventually(lambda: past_swaps(store, KEYS), 20)
    assert (kept[0].outcome, kept[0].requested_by, kept[0].flips) == ("aborted", "somebody", ())
    assert "does not exist" in (kept[0].reason or "")


async def test_what_the_probe_of_a_canary_came_to_is_kept(fleet: Fleet) -> None:
    async def probe(*_: object) -> ProbeResult:
        return ProbeResult(ok=False)

    coordinator = await fleet.serving("ab", probe=probe)
    report = await coordinator.activate(await fleet.publish(2.0), mode="rolling", drain_s=0.0)
    assert not report.ok
    last = (await past_swaps(fleet.store(), KEYS))[0]
    assert (last.mode, last.canary, last.probe, last.outcome) == ("rolling", "a", "failed", "aborted")


async def test_the_next_leader_goes_on_where_the_last_one_stopped(fleet: Fleet) -> None:
    first = await fleet.serving("a")
    await first.stop()
    second = fleet.coordinator()
    await second.activate(await fleet.publish(2.0))
    store = fleet.store()
    assert [s.version for s in await past_swaps(store, KEYS)] == [2, 1]
    assert [kv.key for kv in (await store.list(KEYS.history))[0]] == [KEYS.past_swap(1), KEYS.past_swap(2)]


async def test_the_oldest_make_way(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT", 3)
    coordinator = fleet.coordinator()
    engine = await fleet.instance("a")
    for value in (1.0, 2.0):
        await coordinator.activate(await fleet.publish(value))
    for _ in range(4):
        await coordinator.rollback()
    await eventually(lambda: engine.running == 2)
    assert [s.epoch for s in await past_swaps(fleet.store(), KEYS)] == [6, 5, 4]


async def test_a_history_that_was_kept_longer_is_shortened(fleet: Fleet) -> None:
    store = fleet.store()
    for number in range(1, history.KEPT + 30):
        await store.put(KEYS.past_swap(number), OLD.to_json())
    await fleet.serving("a")
    kept = await past_swaps(store, KEYS)
    assert (len(kept), kept[0].epoch) == (history.KEPT, 1)


async def test_one_that_cannot_be_read_hides_no_other(fleet: Fleet) -> None:
    store = fleet.store()
    await store.put(KEYS.past_swap(1), b"{}")
    await store.put(KEYS.past_swap(2), OLD.to_json())
    assert [s.id for s in await past_swaps(store, KEYS)] == ["x"]


async def test_a_conflict_moves_nothing_on() -> None:
    """What was not written is written again under the same number."""
    past = History(KEYS, [1, 2])
    first: Mapping[str, bytes | None] = past.additions(OLD)
    assert past.additions(OLD) == first == {KEYS.past_swap(3): OLD.to_json()}
    past.added()
    assert past.additions(OLD) == {KEYS.past_swap(4): OLD.to_json()}


async def test_a_name_that_begins_like_another_ones_is_no_trouble(fleet: Fleet) -> None:
    store, other = fleet.store(), Keys("demo/7")
    await store.put(other.past_swap(41), PastSwapRecord("x", 9, "done", "together", 1.0, 2.0).to_json())
    await fleet.serving("a")
    assert [s.version for s in await past_swaps(store, KEYS)] == [1]
