"""An instance's part in a swap when the world around it fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.waiting import eventually, stays
from tests.weightsync.fleet import KEYS, MODEL, Engine, Fleet
from weightsync import Participant, StageResult
from weightsync.control import agent_state
from weightsync.control.records import ActiveRecord, InstanceRecord, SwapRecord, VersionRecord
from weightsync.errors import StoreRefused, digest_mismatch


async def registered(fleet: Fleet, name: str) -> InstanceRecord:
    """Its record, as soon as there is one."""
    store = fleet.store()
    found = await eventually(lambda: store.get(KEYS.instance(name)))
    return InstanceRecord.from_json(found.value)


async def opened(fleet: Fleet) -> SwapRecord:
    """A swap to the next version, asked of instance a."""
    version = await fleet.publish()
    swap = SwapRecord(f"s{version}", version, "prepare", ("a",), deadline=1e12, opened_at=0.0)
    await fleet.store().put(KEYS.swap, swap.to_json())
    return swap


async def test_it_catches_up_before_it_serves(fleet: Fleet) -> None:
    await fleet.coordinator().activate(await fleet.publish())
    engine = await fleet.instance("a", Engine(hang=asyncio.Event()), wait=False)
    await eventually(lambda: engine.calls == [("stage", 1)])
    assert fleet.participants["a"].record.state == "STARTING"
    engine.go_on()
    await asyncio.wait_for(fleet.participants["a"].serving(), 60)
    assert engine.running == 1
    found = await registered(fleet, "a")
    assert (found.state, found.active_version, found.active_epoch, found.commit_ms) == ("SERVING", 1, 1, 0.5)
    assert found.address == "http://a"


async def test_one_that_cannot_catch_up_stays_out_and_tries_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record and its log say why: the log once for each new error."""
    monkeypatch.setattr("weightsync.control.swap.CATCH_UP_RETRY_S", 0.02)
    await fleet.coordinator().activate(await fleet.publish())

    def refuse(version: object) -> None:
        raise digest_mismatch("w", "aa", "bb" if len(engine.calls) <= 3 else "cc")

    engine = Engine(on_stage=refuse)
    await fleet.instance("a", engine, wait=False)
    await eventually(lambda: len(engine.calls) >= 6)
    said = [line for line in caplog.messages if "cannot follow" in line]
    assert [got for line in said for got in ("digest bb", "digest cc") if got in line] == ["digest bb", "digest cc"]
    found = await registered(fleet, "a")
    assert (found.state, found.error.code if found.error else None) == ("STARTING", "digest_mismatch")
    engine.on_stage = None
    await asyncio.wait_for(fleet.participants["a"].serving(), 60)
    assert fleet.participants["a"].record.error is None
    assert engine.running == 1


async def test_it_registers_again_when_its_lease_is_lost(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    await fleet.instance("a", ttl_s=3.0)
    await coordinator.activate(await fleet.publish())
    store = fleet.store()
    _, revision = await store.list("")
    await store.revoke(fleet.lease("a").id)
    events = store.watch(KEYS.instance("a"), revision + 1)
    assert [(await asyncio.wait_for(anext(events), 60)).kind for _ in range(2)] == ["delete", "put"]
    found = await registered(fleet, "a")
    assert (found.state, found.active_version) == ("SERVING", 1)
    assert (await coordinator.activate(await fleet.publish())).instances["a"].active_version == 2


def keepers() -> int:
    return sum(task.get_name().startswith("lease ") for task in asyncio.all_tasks())


async def test_a_store_that_refuses_its_record_gets_one_lease_at_a_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.control.agent.LAST_RETRY_S", 0.02)
    store, kept = fleet.store(), list[int]()

    async def put(key: str, value: bytes, lease: int | None = None) -> int:
        kept.append(keepers())
        raise StoreRefused(store.url, "etcdserver: permission denied", "Grant the role")

    monkeypatch.setattr(store, "put", put)
    engine = Engine()
    participant = Participant(store, MODEL, InstanceRecord("a", "http://a"), engine.stage, engine.commit)
    participant.start()
    await eventually(lambda: len(kept) >= 4)
    await participant.stop()
    assert (set(kept), keepers()) == ({1}, 0)


async def test_it_serves_on_without_the_store_and_takes_part_when_it_is_back(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.control.agent.LAST_RETRY_S", 0.1)
    coordinator = fleet.coordinator(leader_ttl_s=1.0)
    engine = await fleet.instance("a")
    await coordinator.activate(await fleet.publish())
    participant, former = fleet.participants["a"], fleet.lease("a")
    participant._lease_ttl_s = 1.0
    former.lost.set()
    await eventually(lambda: participant._lease is not former and keepers() == 2)  # with the leader's
    os.rename(tmp_path / "store.db", tmp_path / "away.db")
    await stays(lambda: engine.running == 1 and participant.record.state == "SERVING", 1.2)  # longer than its lease
    await eventually(lambda: not coordinator.leads)
    participant._lease_ttl_s = 60.0
    os.rename(tmp_path / "away.db", tmp_path / "store.db")
    version = await fleet.publish()
    await registered(fleet, "a")
    assert (await coordinator.activate(version)).ok
    await eventually(lambda: engine.running == version)


async def test_a_swap_it_missed_is_followed_when_the_store_is_back(fleet: Fleet, tmp_path: Path) -> None:
    """It was away, not dead: the fleet went on without it, and it must not serve the old version for long."""
    coordinator = fleet.coordinator()
    engine = await fleet.instance("a")
    participant = fleet.participants["a"]
    assert participant._task is not None
    participant._task.cancel()
    await fleet.lease("a").end()
    assert (await coordinator.activate(await fleet.publish())).instances == {}
    assert engine.running is None
    participant.start()
    await eventually(lambda: engine.running == 1)


async def test_an_interrupted_staging_is_begun_again(fleet: Fleet) -> None:
    """It says "I am staging", but nobody does any more."""
    coordinator = fleet.coordinator()
    engine = await fleet.instance("a", Engine(hang=asyncio.Event()))
    swap = asyncio.create_task(coordinator.activate(await fleet.publish()))
    participant = fleet.participants["a"]
    await eventually(lambda: engine.calls == [("stage", 1)])
    assert participant._task is not None
    participant._task.cancel()
    engine.go_on()
    participant.start()
    assert (await swap).ok
    assert engine.calls == [("stage", 1), ("stage", 1), ("commit", 1)]


async def test_an_abort_ends_a_staging_under_way(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    engine = await fleet.instance("a", Engine(hang=asyncio.Event()))
    swap = asyncio.create_task(coordinator.activate(await fleet.publish()))
    await eventually(lambda: engine.calls == [("stage", 1)])
    under_way = await fleet.read(KEYS.swap, SwapRecord)
    await fleet.store().put(KEYS.swap, replace(under_way, deadline=under_way.opened_at + 0.2).to_json())
    report = await swap
    assert (report.ok, report.reason) == (False, "not staged within 0.2 s by a")
    await eventually(lambda: fleet.participants["a"].record.state == "SERVING")
    await eventually(lambda: engine.calls == [("stage", 1), ("cancelled", 1), ("drop", 1)])
    engine.hang = None
    assert (await coordinator.activate(await fleet.publish())).ok
    assert engine.running == 2


async def test_a_staging_begins_when_the_one_before_it_has_stopped(fleet: Fleet) -> None:
    engine = await fleet.instance("a", Engine(hang=asyncio.Event(), stopping=asyncio.Event()))
    for _ in range(2):
        swap = await opened(fleet)
        await eventually(lambda id=swap.id: fleet.participants["a"].record.swap_id == id and engine.calls)  # type: ignore[misc]
    assert engine.calls == [("stage", 1)], "it builds still"
    assert engine.stopping is not None
    engine.go_on()
    engine.stopping.set()
    await eventually(lambda: fleet.participants["a"].record.staged_version == 2)
    assert engine.calls == [("stage", 1), ("cancelled", 1), ("drop", 1), ("stage", 2)]


@pytest.mark.parametrize("obeys", [False, True], ids=["with a result", "cancelled"])
async def test_a_staging_that_ends_in_spite_of_all_is_not_taken_for_the_next_one(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, obeys: bool
) -> None:
    """It ends while the instance says that it stages the next: cancelled, or through just when it was cancelled."""
    engine, stopping = Engine(), asyncio.Event()

    async def stage(version: VersionRecord) -> StageResult:
        if version.version > 1:
            return await Engine.stage(engine, version)
        engine.calls.append(("stage", 1))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await stopping.wait()
        if obeys:
            raise asyncio.CancelledError
        return StageResult("of version 1")

    monkeypatch.setattr(engine, "stage", stage)
    await fleet.instance("a", engine)
    participant = fleet.participants["a"]
    publish_record = participant._publish

    async def ends_meanwhile() -> None:
        await publish_record()
        if participant.record.swap_id == "s2" and not stopping.is_set() and participant._steps.staging is not None:
            stopping.set()
            await asyncio.wait({participant._steps.staging.task})

    monkeypatch.setattr(participant, "_publish", ends_meanwhile)
    for _ in range(2):
        swap = await opened(fleet)
        await eventually(lambda id=swap.id: participant.record.swap_id == id and engine.calls)  # type: ignore[misc]
    await eventually(lambda: participant.record.staged_version == 2)
    assert engine.calls == [("stage", 1), ("drop", 1), ("stage", 2)]
    assert participant.record.staged_fingerprint != "of version 1"


async def test_a_lease_that_is_lost_while_staging_is_replaced_at_once(fleet: Fleet) -> None:
    engine = await fleet.instance("a", Engine(hang=asyncio.Event()))
    await opened(fleet)
    await eventually(lambda: engine.calls)
    await fleet.store().revoke(fleet.lease("a").id)
    fleet.lease("a").lost.set()
    assert (await registered(fleet, "a")).state == "STAGING"
    engine.go_on()
    await eventually(lambda: fleet.participants["a"].record.state == "STAGED")
    assert engine.calls == [("stage", 1)]


async def test_a_commit_of_what_is_being_staged_does_not_begin_it_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fleet went on without this one, which was thought to be lost. The commit is seen before the end of the swap:
    of two watches the later event may come first, and then the staging is given up and begun again."""
    decided, decide = list[agent_state.Action](), agent_state.decide
    monkeypatch.setattr(agent_state, "decide", lambda *seen: (decided.append(decide(*seen)), decided[-1])[1])
    engine = await fleet.instance("a", Engine(hang=asyncio.Event()))
    store, swap = fleet.store(), await opened(fleet)
    await eventually(lambda: engine.calls)
    await store.put(KEYS.active, ActiveRecord(swap.target, 1, None, swap.id, 0.0).to_json())
    await eventually(lambda: isinstance(decided[-1], agent_state.Flip))
    await store.put(KEYS.swap, replace(swap, phase="done").to_json())
    engine.go_on()
    await eventually(lambda: engine.running == 1)
    assert engine.calls == [("stage", 1), ("commit", 1)]


async def test_leaving_ends_a_staging_and_is_seen_at_once(fleet: Fleet) -> None:
    engine = await fleet.instance("a", Engine(hang=asyncio.Event()), ttl_s=3600)
    await opened(fleet)
    await eventually(lambda: engine.calls)
    await fleet.participants["a"].stop()
    assert engine.calls == [("stage", 1), ("cancelled", 1)]
    assert await fleet.store().get(KEYS.instance("a")) is None


async def test_one_that_builds_other_weights_than_were_committed_drops_them_and_builds_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.control.swap.CATCH_UP_RETRY_S", 0.02)
    await fleet.coordinator().activate(await fleet.publish())
    late = await fleet.instance("a", Engine(builds="other"), wait=False)
    await eventually(lambda: len(late.calls) >= 4)
    assert late.calls[:4] == [("stage", 1), ("drop", 1)] * 2
    record = fleet.participants["a"].record
    assert (record.state, record.error.code if record.error else None) == ("STARTING", "fingerprint_mismatch")
    late.builds = None
    await asyncio.wait_for(fleet.participants["a"].serving(), 60)
    assert late.running == 1


async def test_one_that_is_told_to_drain_while_it_stages_stays_drained(fleet: Fleet) -> None:
    """The step that was under way ends, and says nothing that would bring it requests again."""
    coordinator = fleet.coordinator()
    engine = await fleet.instance("a", Engine(hang=asyncio.Event()))
    await fleet.instance("b")
    swap = asyncio.create_task(coordinator.activate(await fleet.publish()))
    await eventually(lambda: engine.calls)
    await fleet.participants["a"].drain()
    engine.go_on()
    await swap
    assert (await coordinator.activate(await fleet.publish())).instances.keys() == {"b"}
    assert (await registered(fleet, "a")).state == "DRAINING"
    assert not fleet.participants["a"].admits


async def test_one_whose_flip_fails_as_it_leaves_is_torn_and_does_nothing_more(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = fleet.coordinator()
    engine = await fleet.instance("a")

    async def commit(active: ActiveRecord, version: VersionRecord) -> None:
        engine.calls.append(("commit", version.version))
        await fleet.participants["a"].drain()
        raise RuntimeError("x")

    steps = fleet.participants["a"]._steps
    monkeypatch.setattr(steps, "_engine", replace(steps._engine, commit=commit))
    await coordinator.activate(await fleet.publish())
    await eventually(lambda: fleet.participants["a"].record.state == "TORN")
    await coordinator.activate(await fleet.publish())
    assert engine.calls == [("stage", 1), ("commit", 1)]
    found = await registered(fleet, "a")
    assert (found.state, found.active_version) == ("TORN", None)
