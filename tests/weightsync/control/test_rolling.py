"""Rolling swaps of a small fleet: a canary goes first, is probed, and the others follow one by one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.waiting import eventually
from tests.weightsync.fleet import KEYS, MODEL, Engine, Fleet
from weightsync import CommitResult, Coordinator, Participant, ProbeResult, SwapReport
from weightsync.control.chain import recent
from weightsync.control.history import past_swaps
from weightsync.control.records import (
    ActiveRecord,
    InstanceRecord,
    ShareRecord,
    SwapRecord,
    TargetRecord,
    VersionRecord,
)

STORES = ["sqlite", "etcd"]


class Probing:
    """A probe that waits for `go`, and notes whom it was asked about and what the fleet ran then."""

    def __init__(self, fleet: Fleet, result: ProbeResult | Exception = ProbeResult(True)) -> None:  # noqa: B008
        self.fleet, self.result = fleet, result
        self.go = asyncio.Event()
        self.go.set()
        self.cancelled = False
        self.seen: list[tuple[str, str, int | None, int]] = []
        self.running: list[dict[str, int | None]] = []

    async def __call__(self, canary: InstanceRecord, swap: SwapRecord, active: ActiveRecord | None) -> ProbeResult:
        assert active is not None
        assert canary.active_version == swap.target
        self.seen.append((canary.id, canary.state, canary.active_version, active.version))
        self.running.append({name: engine.running for name, engine in self.fleet.engines.items()})
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


async def test_a_publisher_waits_for_a_rolling_swap_as_long_as_its_drains_may_take(fleet: Fleet) -> None:
    """Its time limit is for staging: here the swap's drains last until the publisher would have given up."""
    limit_s = 1.0
    await fleet.serving("ab")
    version = await fleet.publish(1.0)
    began = time.monotonic()
    for engine in fleet.engines.values():
        engine.streams = asyncio.Event()
    about: dict[str, Any] = {"mode": "rolling", "timeout_s": limit_s, "drain_s": limit_s}
    assert await asyncio.to_thread(fleet.publisher.activate, version, **about) == version
    assert time.monotonic() - began > limit_s
    assert {engine.running for engine in fleet.engines.values()} == {version}


async def test_the_canary_is_probed_before_the_commit_and_the_others_follow_in_turn(fleet: Fleet) -> None:
    probing = Probing(fleet)
    coordinator = fleet.coordinator(probe=probing)
    engines = {name: await fleet.instance(name) for name in ("a", "b", "c")}
    first = await coordinator.activate(await fleet.publish(), mode="rolling")
    assert (first.ok, first.mode, probing.seen) == (True, "together", [])  # there was nothing to go back to
    order: list[str] = []
    for name, engine in engines.items():
        engine.on_commit = lambda name=name: order.append(name)  # type: ignore[misc]
    report = await coordinator.activate(await fleet.publish(1.0), mode="rolling", drain_s=2.0)
    assert (report.ok, report.mode, report.epoch, report.reason) == (True, "rolling", 2, None)
    assert probing.seen == [("a", "COMMITTING", 2, 1)]
    assert probing.running == [{"a": 2, "b": 1, "c": 1}]
    assert order == ["a", "b", "c"]
    assert {(i.state, i.active_version, i.active_epoch) for i in report.instances.values()} == {("SERVING", 2, 2)}
    assert [engine.calls[2:] for engine in engines.values()] == [[("stage", 2), ("drain", 2), ("commit", 2)]] * 3


async def on_trial(fleet: Fleet, names: str) -> tuple[Coordinator, Probing, asyncio.Task[SwapReport]]:
    """These instances serve version 1; the first of them is on trial with version 2, and its probe waits for `go`."""
    probing = Probing(fleet)
    coordinator = await fleet.serving(names, probe=probing)
    probing.go.clear()
    swap = asyncio.create_task(coordinator.activate(await fleet.publish(), mode="rolling"))
    await eventually(lambda: probing.seen)
    return coordinator, probing, swap


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ProbeResult(False, "drift 0.3 is over the bound"), "canary a failed: drift 0.3 is over the bound"),
        (RuntimeError("no answer"), "canary a failed: RuntimeError: no answer"),
    ],
)
async def test_a_canary_that_fails_its_probe_goes_back(
    fleet: Fleet, result: ProbeResult | Exception, reason: str
) -> None:
    """The commit record stays as it was; the history and the ledger have one entry of each kind."""
    coordinator = await fleet.serving("ab", probe=Probing(fleet, result))
    (canary, other), store = fleet.engines.values(), fleet.store()
    assert (await coordinator.activate(await fleet.publish())).ok
    before = await fleet.active()
    report = await coordinator.activate(await fleet.publish(1.0), mode="rolling")
    assert (report.ok, report.epoch, await fleet.active()) == (False, 2, before)
    assert reason in (report.reason or "")
    last, earlier = (await past_swaps(store, KEYS))[:2]
    assert (last.mode, last.canary, last.probe) == ("rolling", "a", "failed")
    assert [(s.version, s.outcome) for s in (last, earlier)] == [(3, "aborted"), (2, "done")]
    assert [(e.action, e.version) for e in await recent(store, 2)] == [("abort", 3), ("activate", 3)]
    await eventually(lambda: ("drop", 3) in canary.calls and ("drop", 3) in other.calls)
    assert [canary.running, other.running] == [2, 2]
    assert ("commit", 3) not in other.calls
    await eventually(lambda: {p.record.state for p in fleet.participants.values()} == {"SERVING"})
    assert {p.record.active_epoch for p in fleet.participants.values()} == {2}
    back = await coordinator.rollback()
    assert (back.ok, back.version) == (True, 1), "the way back is what it was"
    assert (await coordinator.activate(3)).ok
    assert [canary.running, other.running] == [3, 3]


async def test_a_rollback_asked_for_during_a_trial_follows_it(fleet: Fleet) -> None:
    """It goes to the version before the one that serves, whatever comes of the trial."""
    probing = Probing(fleet)
    coordinator = fleet.coordinator(probe=probing)
    engines = await fleet.instances("ab")
    for _ in range(2):
        assert (await coordinator.activate(await fleet.publish())).ok
    probing.go.clear()
    swap = asyncio.create_task(coordinator.activate(await fleet.publish(), mode="rolling"))
    await eventually(lambda: probing.seen)
    active = await fleet.active()
    assert (active.version, active.epoch, active.previous) == (2, 2, 1)
    assert active.trial == ShareRecord(3, 0.0, ("a",), active.trial.fingerprint if active.trial else "")
    rollback = asyncio.create_task(coordinator.rollback())
    await eventually(lambda: _wish(fleet, 1))
    assert [engine.running for engine in engines] == [3, 2]
    probing.go.set()
    assert (await swap).ok
    report = await rollback
    assert (report.ok, report.version, report.previous, report.epoch) == (True, 1, 3, 4)
    assert [engine.running for engine in engines] == [1, 1]


async def _wish(fleet: Fleet, version: int) -> bool:
    return (await fleet.read(KEYS.target, TargetRecord)).version == version


async def test_a_swap_that_aborts_while_the_canary_drains_ends_the_drain(fleet: Fleet) -> None:
    coordinator = await fleet.serving("ab")
    engine = fleet.engines["a"]
    engine.streams = asyncio.Event()
    swap = asyncio.create_task(coordinator.activate(await fleet.publish(), mode="rolling", drain_s=60))
    await eventually(lambda: ("drain", 60) in engine.calls)
    assert not fleet.participants["a"].admits
    await fleet.participants["b"].stop()
    report = await swap
    assert (report.ok, report.reason) == (False, "instance b is gone")
    await eventually(lambda: fleet.participants["a"].record.state == "SERVING")
    assert engine.running == 1
    assert fleet.participants["a"].admits


async def test_a_canary_that_dies_aborts_the_swap(fleet: Fleet) -> None:
    _, probing, swap = await on_trial(fleet, "ab")
    await fleet.participants["a"].stop()
    assert (await swap).reason == "instance a is gone"
    assert fleet.engines["b"].running == 1
    await eventually(lambda: probing.cancelled)


async def test_a_probe_that_was_interrupted_is_run_again_by_the_next_leader(fleet: Fleet) -> None:
    first, _, swap = await on_trial(fleet, "a")
    engine, probing = fleet.engines["a"], Probing(fleet)
    await first.stop()
    assert engine.running == 2
    assert (fleet.participants["a"].record.state, fleet.participants["a"].record.active_epoch) == ("COMMITTING", 2)
    fleet.coordinator(probe=probing)
    assert (await swap).ok
    assert probing.seen == [("a", "COMMITTING", 2, 1)]
    assert engine.calls.count(("commit", 2)) == 1


async def test_one_that_joins_while_a_rolling_swap_is_under_way_ends_on_the_committed_version(fleet: Fleet) -> None:
    _, probing, swap = await on_trial(fleet, "b")
    late = await fleet.instance("a")
    assert late.running == 1
    probing.go.set()
    assert (await swap).ok
    await eventually(lambda: late.running == 2 and fleet.participants["a"].record.active_epoch == 2)


@pytest.mark.parametrize("mode", ["together", "rolling"])
async def test_weights_that_are_not_those_that_were_published_are_never_flipped_to(fleet: Fleet, mode: str) -> None:
    coordinator = await fleet.serving("ab")
    engines = list(fleet.engines.values())
    engines[1].builds = "other"
    report = await coordinator.activate(await fleet.publish(), mode=mode)  # type: ignore[arg-type]
    assert not report.ok
    assert "instance b built other weights than were published (fingerprint other" in (report.reason or "")
    assert [e.running for e in engines] == [1, 1]
    swap = (await past_swaps(fleet.store(), KEYS))[0]
    assert (swap.outcome, swap.verified) == ("aborted", False)
    (entry,) = await recent(fleet.store(), 1)
    assert (entry.action, entry.version, entry.outcome) == ("abort", 2, report.reason)


async def test_a_canary_that_loses_its_lease_on_trial_goes_back(fleet: Fleet) -> None:
    """It was too slow to renew it: to the fleet it is gone, and what it runs was never committed."""
    coordinator, probing, swap = await on_trial(fleet, "ab")
    canary, other = fleet.engines.values()
    await fleet.store().revoke(fleet.lease("a").id)
    assert (await swap).reason == "instance a is gone"
    fleet.lease("a").lost.set()
    await eventually(lambda: canary.running == 1 and fleet.participants["a"].record.state == "SERVING")
    assert other.running == 1
    await eventually(lambda: probing.cancelled)
    probing.go.set()
    assert (await coordinator.activate(2, mode="rolling")).ok


async def test_the_drain_of_one_swap_is_not_that_of_the_next(fleet: Fleet) -> None:
    engine = Engine(streams=asyncio.Event())
    record = InstanceRecord("a", "http://a")
    participant = Participant(fleet.store(), MODEL, record, engine.stage, engine.commit, drain=engine.drain)
    for name, seconds in (("s1", 30.0), ("s1", 30.0), ("s2", 50.0)):
        await participant._leave(SwapRecord(name, 1, "commit", ("a",), 1e12, 0.0, mode="rolling", drain_s=seconds))
        await eventually(lambda seconds=seconds: ("drain", int(seconds)) in engine.calls)  # type: ignore[misc]
    participant._stop_draining()
    assert engine.calls == [("drain", 30), ("drain", 50)]


class Deaf(Engine):
    async def drain(self, seconds: float) -> None:
        raise RuntimeError("cannot count streams")


@pytest.mark.parametrize("made", [lambda: Engine(streams=asyncio.Event()), Deaf], ids=["never idle", "cannot drain"])
async def test_a_canary_that_cannot_drain_in_time_flips(fleet: Fleet, made: Callable[[], Engine]) -> None:
    coordinator = fleet.coordinator()
    engine = await fleet.instance("a", made())
    await coordinator.activate(await fleet.publish())
    assert (await coordinator.activate(await fleet.publish(), mode="rolling", drain_s=0.2)).ok
    assert engine.running == 2


async def test_a_flip_whose_weights_read_back_otherwise_is_torn(fleet: Fleet) -> None:
    class Misread(Engine):
        async def commit(self, active: ActiveRecord, version: VersionRecord) -> CommitResult:
            await super().commit(active, version)
            return CommitResult(fingerprint="other")

    coordinator = fleet.coordinator()
    await fleet.instance("a", Misread())
    report = await coordinator.activate(await fleet.publish())
    assert (report.ok, report.reason, report.not_flipped) == (True, "not flipped: a", ("a",))
    torn = report.instances["a"]
    assert (torn.state, torn.error.code if torn.error else None) == ("TORN", "fingerprint_mismatch")


async def test_a_drop_that_fails_is_logged_and_the_instance_serves_on(fleet: Fleet) -> None:
    class Clinging(Engine):
        async def drop(self, version: VersionRecord) -> None:
            raise RuntimeError("still mapped")

    coordinator = fleet.coordinator()
    engine, bad = await fleet.instance("a", Clinging()), await fleet.instance("b")
    await coordinator.activate(await fleet.publish())
    bad.builds = "other"
    assert not (await coordinator.activate(await fleet.publish())).ok
    await eventually(lambda: fleet.participants["a"].record.state == "SERVING")
    bad.builds = None
    assert (await coordinator.activate(2)).ok
    assert engine.running == 2
