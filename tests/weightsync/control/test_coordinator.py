"""Swaps of a small fleet: real store, slots, coordinator and participants; only the engines are toys. Some on etcd."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from tests.etcd import Etcd
from tests.waiting import eventually, stays
from tests.weightsync.codes import refused
from tests.weightsync.fleet import KEYS, Engine, Fleet, before_the_commit, running_fleet
from weightsync import CommitResult, SwapReport
from weightsync.control import chain, outcome, swap
from weightsync.control.board import Board
from weightsync.control.history import past_swaps
from weightsync.control.records import ActiveRecord, InstanceRecord, SwapMode, SwapRecord, TargetRecord, VersionRecord
from weightsync.control.state import Ask, Step, View, Wait, decide, in_flight
from weightsync.errors import StoreRefused, StoreUnavailable, WatchCompacted, digest_mismatch
from weightsync.store.protocol import Event, KeyValue


def refuse(version: object) -> None:
    raise digest_mismatch("model.norm.weight", "aa", "bb")


async def test_a_version_is_committed_on_all_instances(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    engines = await fleet.instances("abc")
    version = await fleet.publish()
    report = await coordinator.activate(version)
    assert (report.ok, report.version, report.previous, report.epoch, report.reason) == (True, version, None, 1, None)
    assert report.prepare_ms > 0
    assert {i.active_version for i in report.instances.values()} == {version}
    assert {(i.state, i.active_epoch, i.path) for i in report.instances.values()} == {("SERVING", 1, "toy")}
    assert all(i.stage_ms and i.staging_gbps for i in report.instances.values())
    swap, record = await fleet.read(KEYS.swap, SwapRecord), await fleet.read(KEYS.version(1), VersionRecord)
    assert {i.swap_id for i in report.instances.values()} == {swap.id}
    assert {i.fingerprint for i in report.instances.values()} == {record.fingerprint or record.manifest_digest}
    assert [e.running for e in engines] == [version] * 3
    assert [e.calls for e in engines] == [[("stage", 1), ("commit", 1)]] * 3


async def test_one_record_that_cannot_be_read_does_not_end_the_swaps(fleet: Fleet) -> None:
    coordinator, engine, store = fleet.coordinator(), await fleet.instance("a"), fleet.store()
    assert (await coordinator.activate(await fleet.publish())).ok
    bad = await fleet.publish()
    found = await store.get(KEYS.version(bad))
    assert found is not None
    await store.put(KEYS.version(bad), found.value.replace(b'"step":null', b'"step":"8"'))
    wish = TargetRecord(1, "bad", "x", 60.0).to_json().replace(b'"x"', b"4")
    await store.put(KEYS.target, wish)
    assert (await coordinator.activate(await fleet.publish(2.0))).ok
    assert engine.running == bad + 1
    with refused("unknown_version"):
        await coordinator.activate(bad)


async def test_rollback_needs_no_new_bytes_and_loses_no_epoch(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    engine = await fleet.instance("a")
    for value in (1.0, 2.0):
        await coordinator.activate(await fleet.publish(value))
    back = await coordinator.rollback()
    assert (back.ok, back.version, back.previous, back.epoch) == (True, 1, 2, 3)
    forth = await coordinator.rollback()
    assert (forth.version, forth.previous, forth.epoch) == (2, 1, 4)
    assert engine.running == 2
    assert engine.calls == [(call, version) for version in (1, 2, 1, 2) for call in ("stage", "commit")]


async def test_one_refusal_aborts_for_all_and_names_the_tensor(fleet: Fleet) -> None:
    coordinator = await fleet.serving("ab")
    good, bad = fleet.engines.values()
    bad.on_stage, bad.hang = refuse, asyncio.Event()
    swap = asyncio.create_task(coordinator.activate(await fleet.publish()))
    await eventually(lambda: 2 in good.staged)
    bad.go_on()
    report = await swap
    assert (report.ok, report.tensor, report.epoch) == (False, "model.norm.weight", 1)
    assert "instance b" in (report.reason or "")
    assert "digest aa" not in (report.reason or "")
    assert [good.running, bad.running] == [1, 1]
    await eventually(lambda: ("drop", 2) in good.calls and fleet.participants["a"].record.state == "SERVING")
    assert fleet.participants["b"].record.error is not None
    bad.on_stage = None
    assert (await coordinator.activate(2)).ok
    assert fleet.participants["b"].record.error is None
    assert [good.running, bad.running] == [2, 2]


async def test_the_publisher_of_a_bad_version_hears_why_and_the_history_keeps_it(fleet: Fleet) -> None:
    await fleet.serving("a")
    engine = fleet.engines["a"]
    engine.on_stage = refuse
    with refused("swap_aborted", match=r"instance a: tensor 'model\.norm\.weight'") as aborted:
        await fleet.publish(activate=True, timeout_s=60)
    assert aborted.value.tensor == "model.norm.weight"
    assert (engine.running, (await fleet.active()).version) == (1, 1)
    last = (await past_swaps(fleet.store(), KEYS))[0]
    assert (last.outcome, last.version, last.previous, last.tensor) == ("aborted", 2, 1, "model.norm.weight")
    assert (last.epoch, last.committed_at, last.verified) == (None, None, None)
    assert "instance a" in (last.reason or "")
    assert [(f.version, f.stall_ms) for f in last.flips] == [(1, None)]


async def test_one_that_dies_while_staging_aborts_when_its_lease_ends(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    good = await fleet.instance("a")
    await fleet.instance("b", Engine(hang=asyncio.Event()))
    swap = asyncio.create_task(coordinator.activate(await fleet.publish()))
    await eventually(lambda: fleet.participants["b"].record.state == "STAGING")
    dies = fleet.participants["b"]  # as with SIGKILL: it says nothing more, and its lease ends
    for task in (dies._task, fleet.lease("b")._task):
        assert task is not None
        task.cancel()
    await fleet.store().revoke(fleet.lease("b").id)
    report = await swap
    assert (report.ok, report.reason) == (False, "instance b is gone")
    assert (await coordinator.activate(1)).ok
    assert good.running == 1


@pytest.mark.parametrize("mode", ["together", "rolling"])
async def test_one_that_cannot_flip_is_torn_and_its_publisher_hears_of_it(fleet: Fleet, mode: SwapMode) -> None:
    coordinator = fleet.coordinator()
    good, bad, later = await fleet.instances("abc")
    first = await fleet.publish(activate=True, timeout_s=60)
    assert (first, first.not_flipped) == (1, ())
    bad.on_commit = out_of_memory
    second = await fleet.publish(1.0, activate=True, mode=mode, timeout_s=60)
    assert (second, second.not_flipped, good.running, later.running) == (2, ("b",), 2, 2)
    torn = await fleet.read(KEYS.instance("b"), InstanceRecord)
    assert (torn.state, torn.active_epoch) == ("TORN", 1)
    assert torn.error is not None
    assert torn.error.message == "RuntimeError: out of memory"
    assert json.loads(json.dumps({"version": copy.copy(second)})) == {"version": first + 1}
    assert copy.copy(second).not_flipped == ("b",)
    assert (await coordinator.activate(await fleet.publish())).instances.keys() == {"a", "c"}


async def test_if_no_instance_can_flip_the_version_before_is_committed_again(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    engines = await fleet.instances("ab")
    await fleet.publish(activate=True, timeout_s=60)
    for engine in engines:
        engine.on_commit = out_of_memory
    with refused("swap_aborted", match=r"no instance could flip \([ab]: RuntimeError: out of memory"):
        await fleet.publish(1.0, activate=True, timeout_s=60)
    found = await fleet.active()
    assert (found.version, found.epoch, found.previous) == (1, 3, None)
    assert (await fleet.instance("c")).running == 1
    assert [entry.outcome for entry in await past_swaps(fleet.store(), KEYS)] == ["aborted", "done"]
    assert (await coordinator.activate(2)).ok, "the version itself is still there"


def out_of_memory() -> None:
    raise RuntimeError("out of memory")


async def test_a_new_coordinator_aborts_what_cannot_succeed_any_more(fleet: Fleet) -> None:
    store = fleet.store()
    version = await fleet.publish()
    target = TargetRecord(version, "old", "test", 1.0)
    swap = SwapRecord("old", version, "prepare", ("long gone",), deadline=1.0, opened_at=0.0)
    await store.txn({}, {KEYS.target: target.to_json(), KEYS.swap: swap.to_json()})
    engine = await fleet.instance("a")
    coordinator = fleet.coordinator()
    assert (await coordinator.activate(version)).ok
    assert engine.running == version


async def test_a_leader_whose_clock_is_ahead_gives_a_commit_its_time_anew(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader before it committed an hour ago, as this one counts, and the instance is about to flip."""
    store, decided = fleet.store(), asyncio.Event()

    def noted(view: View) -> Step | Ask | Wait:
        decided.set()
        return decide(view)

    version, behind = await fleet.publish(), time.time() - 3600.0
    swap = SwapRecord("old", version, "commit", ("a",), deadline=behind + 10.0, opened_at=behind)
    active, target = ActiveRecord(version, 1, None, "old", behind), TargetRecord(version, "old", "test", 10.0)
    waits = InstanceRecord("a", "http://a:1", "STAGED", staged_version=version, swap_id="old")
    await store.txn({}, {KEYS.target: target.to_json(), KEYS.swap: swap.to_json(), KEYS.active: active.to_json()})
    await store.put(KEYS.instance("a"), waits.to_json())
    monkeypatch.setattr("weightsync.control.coordinator.decide", noted)
    fleet.coordinator()
    await decided.wait()
    flipped = replace(waits, state="SERVING", active_version=version, active_epoch=1, staged_version=None)
    await store.put(KEYS.instance("a"), flipped.to_json())
    done = await eventually(lambda: ended(fleet))
    assert (done.phase, done.reason) == ("done", None)


async def ended(fleet: Fleet) -> SwapRecord | None:
    swap = await fleet.read(KEYS.swap, SwapRecord)
    return None if in_flight(swap) else swap


def test_each_leader_has_the_time_of_a_request() -> None:
    """A new leader gives the phase that runs its whole time again."""
    target = TargetRecord(1, "s", "test", 10.0)
    swap = SwapRecord("s", 1, "prepare", ("a",), deadline=10.0, opened_at=0.0)
    found, patience = [KeyValue(KEYS.swap, swap.to_json(), 1, 1)], outcome.Patience(target, 100.0)
    limit_s = outcome.patience_s(target, swap)
    assert patience.until(Board(KEYS), 105.0) == 110.0, "no leader has opened it"
    for leader, now, since in ((2, 106.0, 106.0), (2, 150.0, 106.0), (3, 160.0, 160.0), (3, 170.0, 160.0)):
        board = Board(KEYS, [*found, KeyValue(KEYS.leader, b"", leader, leader)])
        assert patience.until(board, now) == since + limit_s


async def test_of_many_wishes_the_newest_wins_and_every_one_is_answered(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    engine = await fleet.instance("a")
    versions = [await fleet.publish(i) for i in range(4)]
    reports: list[SwapReport] = await asyncio.gather(*[coordinator.activate(v, 60) for v in versions])
    found = await fleet.active()
    assert all(r.ok or "superseded" in (r.reason or "") for r in reports)
    assert [r.version for r in reports if r.ok and r.epoch == found.epoch] == [found.version]
    await eventually(lambda: engine.running == found.version)


async def test_old_versions_are_retired_and_needed_ones_are_not(fleet: Fleet) -> None:
    coordinator = fleet.coordinator(keep=3)
    engine = await fleet.instance("a")
    waiting = await fleet.publish()
    for i in range(5):
        await coordinator.activate(await fleet.publish(i))
    records = await asyncio.to_thread(fleet.publisher.versions)
    assert [r.version for r in records if r.state == "ready"] == [4, 5, 6]
    assert waiting == 1
    for version in (4, 6, 5):
        assert (await coordinator.activate(version)).ok
        assert engine.running == version
    with refused("unknown_version", match="retired"):
        await coordinator.activate(2)
    assert len(fleet.publisher.arena.slots("demo")) <= 4


async def test_versions_that_were_refused_push_no_good_one_out(fleet: Fleet) -> None:
    coordinator = fleet.coordinator(keep=3)
    engine = await fleet.instance("a")
    for i in range(3):
        assert (await coordinator.activate(await fleet.publish(i))).ok
    engine.on_stage = refuse
    for i in (3, 4):
        assert not (await coordinator.activate(await fleet.publish(i))).ok
    engine.on_stage = None
    assert (await coordinator.activate(await fleet.publish(5))).ok
    records = await asyncio.to_thread(fleet.publisher.versions)
    assert [r.version for r in records if r.state == "ready"] == [2, 3, 6]


async def test_a_version_that_is_taken_after_all_is_no_longer_one_that_was_refused(fleet: Fleet) -> None:
    coordinator = await fleet.serving("a")
    engine = fleet.engines["a"]
    engine.on_stage = refuse
    assert not (await coordinator.activate(await fleet.publish())).ok
    engine.on_stage = None
    assert [r.refused for r in await asyncio.to_thread(fleet.publisher.versions)] == [False, True]
    assert (await coordinator.activate(2)).ok
    assert [r.refused for r in await asyncio.to_thread(fleet.publisher.versions)] == [False, False]


async def test_many_swaps_by_two_coordinators_leave_nothing_behind(fleet: Fleet) -> None:
    coordinators = [fleet.coordinator(), fleet.coordinator()]
    engine = await fleet.instance("a")
    for i in range(60):
        report = await coordinators[i % 2].activate(await fleet.publish(i))
        assert (report.ok, report.epoch) == (True, i + 1)
    assert engine.running == 60
    assert [c for c in engine.calls if c[0] == "commit"] == [("commit", v) for v in range(1, 61)]
    assert len(fleet.publisher.arena.slots("demo")) <= 3
    keys = [kv.key for kv in (await fleet.store().list(""))[0]]
    others = [key for key in keys if not key.startswith((KEYS.history, chain.PREFIX))]
    assert len(others) < 60 + 10  # versions' records, and the rest


async def test_whoever_waits_for_a_version_waits_until_the_fleet_has_flipped(fleet: Fleet) -> None:
    """Another process than the one that asked: it sees the commit record first, and must not take it for the end."""

    class Slow(Engine):
        flip: asyncio.Event

        async def commit(self, active: ActiveRecord, version: VersionRecord) -> CommitResult:
            await self.flip.wait()
            return await super().commit(active, version)

    Slow.flip = asyncio.Event()
    coordinator = fleet.coordinator()
    slow = await fleet.instance("a", Slow())
    version = await fleet.publish()
    swap = asyncio.create_task(coordinator.activate(version))
    store = fleet.store()
    early = asyncio.create_task(outcome.of_version(store, KEYS, version, 60))
    await eventually(lambda: store.get(KEYS.active))
    late = asyncio.create_task(outcome.of_version(store, KEYS, version, 60))
    await stays(lambda: not early.done() and not late.done(), 0.1)
    Slow.flip.set()
    await asyncio.gather(early, late)
    assert slow.running == version
    assert (await swap).ok
    await outcome.of_version(store, KEYS, version, 60)
    with refused("swap_timeout"):
        await outcome.of_version(store, KEYS, 99, 0.1)


async def test_whoever_waits_for_a_version_hears_that_it_was_aborted(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = fleet.coordinator()
    await fleet.instance("a", Engine(on_stage=refuse))
    version = await fleet.publish()
    store, follows = fleet.store(), list[str]()
    watch = store.watch
    monkeypatch.setattr(
        store, "watch", lambda prefix, *at, **first: (follows.append(prefix), watch(prefix, *at, **first))[1]
    )
    waiting = asyncio.create_task(outcome.of_version(store, KEYS, version, 60))
    await eventually(lambda: follows)
    assert not (await coordinator.activate(version)).ok
    with refused("swap_aborted", match=r"model\.norm\.weight"):
        await waiting


@pytest.mark.parametrize("mode", ["together", "rolling"])
async def test_a_publisher_chooses_the_mode(fleet: Fleet, mode: str) -> None:
    """It waits for its own swap."""
    fleet.coordinator()
    engine = await fleet.instance("a")
    assert await fleet.publish(activate=True, timeout_s=60) == (await fleet.active()).version == 1
    version = await fleet.publish()
    options = {"mode": mode, "drain_s": 1.0, "timeout_s": 60}
    await asyncio.to_thread(fleet.publisher.activate, version, **options)  # type: ignore[arg-type]
    swap = await fleet.read(KEYS.swap, SwapRecord)
    assert (swap.phase, swap.mode, swap.drain_s) == ("done", mode, 1.0)
    assert swap.canary == ("a" if mode == "rolling" else None)
    assert await asyncio.to_thread(fleet.publisher.rollback, **options) == 1  # type: ignore[arg-type]
    back = await fleet.read(KEYS.swap, SwapRecord)
    assert ((await fleet.active()).version, back.canary) == (1, swap.canary)
    await eventually(lambda: engine.running == 1)


async def test_whoever_waits_learns_the_outcome_though_the_events_are_gone(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is away, no longer keeps what happened, and has another swap in the place of the one that ended."""
    fleet.coordinator()
    engine = await fleet.instance("a")
    store, target = fleet.store(), swap.new_target(await fleet.publish(), "test", 60)
    await swap.request(store, KEYS, target)
    await outcome.of_version(store, KEYS, 1, 60)
    watch, ends = store.watch, [StoreUnavailable("store", "away", "wait"), WatchCompacted(0, 1)]

    def cut(prefix: str, start_revision: int | None = None, *, first: str = "") -> AsyncGenerator[Event, None]:
        if ends:
            raise ends.pop()
        engine.go_on()
        return watch(prefix, start_revision, first=first)

    engine.hang = asyncio.Event()
    later = swap.new_target(await fleet.publish(), "test", 60)
    await swap.request(store, KEYS, later)
    monkeypatch.setattr(store, "watch", cut)
    assert (await outcome.of_request(store, KEYS, later)).ok
    assert not ends
    first = await outcome.of_request(store, KEYS, target)
    assert (first.ok, first.version, first.epoch) == (True, 1, 1)
    superseded = await outcome.of_request(store, KEYS, swap.new_target(1, "test", 60))
    assert (superseded.ok, superseded.reason) == (False, "superseded by a request for version 2")


async def test_a_swap_has_its_time_from_when_the_one_before_has_ended(fleet: Fleet) -> None:
    """The one in flight drains for longer than the next one may take to be staged."""
    await fleet.serving("a")
    engine, store, short_s = fleet.engines["a"], fleet.store(), 0.5
    engine.streams = asyncio.Event()
    first, second = await fleet.publish(1.0), await fleet.publish(2.0)
    before = swap.new_target(first, "test", short_s, mode="rolling", drain_s=60.0)
    await swap.request(store, KEYS, before)
    await eventually(lambda: ("drain", 60) in engine.calls)
    target = swap.new_target(second, "test", short_s)
    await swap.request(store, KEYS, target)
    waiting = asyncio.create_task(outcome.of_request(store, KEYS, target))
    await stays(lambda: not waiting.done(), 3 * short_s)
    engine.streams.set()
    assert (await waiting).ok


async def test_who_is_lost_between_decision_and_commit_is_as_one_lost_right_after_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record goes with its lease, which no compare sees: the commit stands and names it, and it follows later."""
    coordinator = fleet.coordinator()
    engines = await fleet.instances("ab")
    before_the_commit(coordinator._store, monkeypatch, fleet.participants["b"].stop)
    report = await coordinator.activate(await fleet.publish())
    assert report.ok
    assert "not flipped: b" in (report.reason or "")
    assert [engine.running for engine in engines] == [1, None]
    assert await fleet.store().get(KEYS.instance("b")) is None
    back = await fleet.instance("b")
    assert back.running == 1


async def test_who_says_anything_between_decision_and_commit_is_looked_at_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves, after it had staged: that swap aborts. A newcomer only costs a turn."""
    coordinator = fleet.coordinator()
    engines = await fleet.instances("ab")
    before_the_commit(coordinator._store, monkeypatch, fleet.participants["b"].drain)
    report = await coordinator.activate(await fleet.publish())
    assert (report.ok, report.reason) == (False, "instance b is DRAINING")
    assert [engine.running for engine in engines] == [None, None]
    await fleet.participants["b"].stop()
    before_the_commit(coordinator._store, monkeypatch, lambda: fleet.instance("c"))
    assert (await coordinator.activate(1)).ok
    assert engines[0].running == 1
    await eventually(lambda: fleet.engines["c"].running == 1)


# on etcd


async def test_a_swap_outlives_a_kill_and_restart_of_etcd(server: Etcd) -> None:
    url = server.url("fleet")
    async with running_fleet(url) as fleet:
        fleet.coordinator(leader_ttl_s=3.0)
        engine = await fleet.instance("a", Engine(hang=asyncio.Event()), ttl_s=30)
        publishing = asyncio.create_task(fleet.publish(activate=True, timeout_s=60))
        await eventually(lambda: engine.calls)
        await asyncio.to_thread(server.restart)
        engine.go_on()
        assert await publishing == 1
        await eventually(lambda: engine.running == 1)
        assert await fleet.publish(activate=True, timeout_s=60) == engine.running == 2


@pytest.mark.parametrize("server", [("--max-txn-ops=12",)], indirect=True)
async def test_a_commit_is_no_larger_for_a_larger_fleet(server: Etcd) -> None:
    async with running_fleet(server.url("large")) as fleet:
        fleet.coordinator()
        engines = await fleet.instances("abcdefghijklmn")
        for value in (1.0, 2.0, 3.0, 4.0):  # with the fourth, a version retires
            version = await fleet.publish(value, activate=True, timeout_s=60)
            assert {engine.running for engine in engines} == {version}


async def test_a_commit_that_the_store_refuses_aborts_the_swap_and_says_why(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No instance flips, and the next swap is committed."""
    coordinator, engine = fleet.coordinator(), await fleet.instance("a")

    async def refuse() -> None:
        raise StoreRefused("etcd://x", "request is too large", "Start etcd with a larger --max-request-bytes")

    before_the_commit(coordinator._store, monkeypatch, refuse)
    with refused("swap_aborted", match="--max-request-bytes"):
        await fleet.publish(activate=True, timeout_s=60)
    assert await fleet.store().get(KEYS.active) is None
    assert engine.running is None
    assert await fleet.publish(activate=True, timeout_s=60) == engine.running
