"""The ledger and the history of swaps on every store: a changed ledger is noticed where it was changed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from server import ledger
from server.ledger import Held, archive, export, verify
from tests.waiting import eventually
from tests.weightsync.codes import refused
from tests.weightsync.control.children import running
from tests.weightsync.fleet import KEYS, MODEL, Fleet
from weightsync import Store, open_store
from weightsync.control import history, swap
from weightsync.control.chain import HEAD, HeadRecord, LedgerEntry, append, entry_key, recent
from weightsync.control.history import History, past_swaps
from weightsync.control.records import Keys, PastSwapRecord
from weightsync.errors import Conflict, RecordError

STORES = ("sqlite", "etcd")


async def entries(store: Store) -> list[LedgerEntry]:
    """Oldest first."""
    return (await recent(store, 10_000))[::-1]


async def write(store: Store, count: int) -> None:
    for number in range(count):
        await append(store, {}, {}, LedgerEntry("publish", "somebody", version=number + 1))


async def read(store: Store, number: int) -> LedgerEntry:
    found = await store.get(entry_key(number))
    assert found is not None
    return LedgerEntry.from_json(found.value)


async def test_an_entry_comes_with_what_it_records_or_not_at_all(store: Store) -> None:
    revision = await append(store, {"a": 0}, {"a": b"1"}, LedgerEntry("publish", "me", reason="why"))
    first = await read(store, 1)
    assert (first.number, first.previous, first.who, first.reason) == (1, "", "me", "why")
    for key in ("a", entry_key(1), HEAD):
        found = await store.get(key)
        assert found is not None
        assert found.mod_revision == revision
    with pytest.raises(Conflict) as conflict:
        await append(store, {"a": 0}, {"a": b"2"}, LedgerEntry("publish", "me"))
    assert conflict.value.key == "a"
    assert await store.get(entry_key(2)) is None
    assert (await verify(store)).ok


async def test_writers_at_the_same_time_make_one_chain(store_url: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stores = [open_store(store_url) for _ in range(4)]
        for store in stores:
            stack.push_async_callback(store.close)
        await asyncio.gather(*(write(store, 10) for store in stores))
        found = await verify(stores[0])
        assert (found.ok, found.entries, found.first) == (True, 40, 1)
        assert [e.number for e in await entries(stores[0])] == list(range(1, 41))


async def test_a_changed_entry_is_named(store: Store) -> None:
    await write(store, 5)
    good = await read(store, 3)
    await store.put(entry_key(3), replace(good, who="nobody").to_json())
    found = await verify(store)
    assert (found.number, found.entries) == (3, 2)
    assert "changed" in found.problem
    forged = replace(good, who="nobody")  # with a digest that fits, it is the next one that does not
    await store.put(entry_key(3), replace(forged, digest=forged.expected).to_json())
    found = await verify(store)
    assert found.number == 4
    assert "does not follow entry 3" in found.problem
    await store.put(entry_key(3), b"{}")
    assert (await verify(store)).number == 3
    await store.put(entry_key(3), good.to_json())
    assert (await verify(store)).ok


async def test_a_missing_a_moved_and_an_added_entry_are_named(store: Store) -> None:
    await write(store, 5)
    second, third = await read(store, 2), await read(store, 3)
    await store.delete(entry_key(2))
    assert ((await verify(store)).number, (await verify(store)).problem) == (2, "it is missing")
    await store.put(entry_key(2), third.to_json())
    await store.put(entry_key(3), second.to_json())
    assert ((await verify(store)).number, (await verify(store)).problem) == (2, "in its place is entry 3")
    await store.put(entry_key(2), second.to_json())
    await store.put(entry_key(3), third.to_json())
    more = LedgerEntry("publish", "x").after(HeadRecord(5, (await read(store, 5)).digest))
    await store.put(entry_key(6), more.to_json())
    assert (await verify(store)).number == 6
    await store.delete(entry_key(6))
    last = replace(await read(store, 5), who="x", digest="")
    await store.put(entry_key(5), replace(last, digest=last.expected).to_json())
    found = await verify(store)
    assert (found.number, found.problem) == (5, "the head does not name it by its digest")


async def test_a_chain_that_was_cut_short_is_noticed_by_its_head_or_by_one_noted_before(store: Store) -> None:
    await write(store, 5)
    whole = await verify(store)
    await store.delete(entry_key(5))
    assert (await verify(store)).number == 5
    shorter = await read(store, 4)
    await store.put(HEAD, HeadRecord(4, shorter.digest).to_json())
    assert (await verify(store)).ok  # nothing within the store tells
    assert (await verify(store, anchor=whole.head)).number == 5
    await write(store, 2)
    found = await verify(store, anchor=whole.head)
    assert found.number == 5
    assert "another chain" in found.problem
    assert (await verify(store, anchor=f"4:{shorter.digest}")).ok
    with pytest.raises(RecordError):
        await verify(store, anchor="4")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FILE": 10, "KEPT": 10, "BATCH": 3}.items():
        monkeypatch.setattr(ledger, name, value)


@pytest.mark.usefixtures("small")
async def test_older_entries_move_to_files_and_the_chain_goes_on(store: Store, tmp_path: Path) -> None:
    place = tmp_path / "old"
    await write(store, 19)
    assert await archive(store, str(place)) == 0
    await write(store, 16)
    whole = await verify(store)
    assert await archive(store, str(place)) == 20
    assert [e.number for e in await entries(store)] == list(range(21, 36))
    assert sorted(file.name for file in place.iterdir()) == [
        "ledger-000000000001-000000000010.jsonl",
        "ledger-000000000011-000000000020.jsonl",
    ]
    assert {file.stat().st_mode & 0o777 for file in place.iterdir()} == {0o600}
    assert await verify(store, anchor=whole.head) == whole
    await write(store, 1)
    found = await verify(store)
    assert (found.ok, found.entries) == (True, 36)

    file = place / "ledger-000000000011-000000000020.jsonl"
    good = file.read_bytes()
    lines = good.splitlines(keepends=True)
    changed = {**orjson.loads(lines[4]), "who": "nobody"}
    for damage, number in (
        (b"".join([*lines[:4], orjson.dumps(changed), b"\n", *lines[5:]]), 15),
        (b"".join([*lines[:4], *lines[5:]]), 15),
        (b"".join([*lines[:4], lines[5], lines[4], *lines[6:]]), 15),
        (b"".join(lines[:4]), 15),
        (good + lines[0], 20),
        (None, 11),
    ):
        file.unlink() if damage is None else file.write_bytes(damage)
        assert (await verify(store)).number == number
    moved = tmp_path / "elsewhere"
    place.rename(moved)
    (moved / file.name).write_bytes(good)
    assert (await verify(store)).number == 1
    assert (await verify(store, str(moved))).ok
    await write(store, 10)
    with refused("ledger_unavailable", "move those files there first"):
        await archive(store, str(tmp_path / "third"))
    assert await archive(store, str(moved)) == 10
    assert (await verify(store)).ok


@pytest.mark.usefixtures("small")
async def test_a_url_of_fsspec_is_a_place_too(store: Store) -> None:
    await write(store, 25)
    assert await archive(store, f"memory://{uuid.uuid4().hex}") == 10
    assert ((await verify(store)).ok, (await verify(store)).entries) == (True, 25)
    with refused("ledger_unavailable"):
        await archive(store, "no-such-scheme://x")


@pytest.mark.usefixtures("small")
async def test_without_a_place_the_oldest_are_dropped_and_the_rest_is_still_a_chain(
    store: Store, tmp_path: Path
) -> None:
    await write(store, 25)
    assert await archive(store) == 10
    found = await verify(store)
    assert (found.ok, found.first, found.entries) == (True, 11, 15)
    await store.delete(entry_key(11))
    assert (await verify(store)).number == 11


@pytest.mark.usefixtures("small")
async def test_a_chain_that_does_not_fit_stays_where_it_is(store: Store, tmp_path: Path) -> None:
    await write(store, 25)
    await store.put(entry_key(3), replace(await read(store, 3), who="nobody").to_json())
    with refused("ledger_unavailable", "entry 3"):
        await archive(store, str(tmp_path / "old"))
    assert not (tmp_path / "old").exists()
    assert len(await entries(store)) == 25


@pytest.mark.usefixtures("small")
async def test_the_files_of_another_ledger_are_not_overwritten(store: Store, tmp_path: Path) -> None:
    place = tmp_path / "old"
    place.mkdir()
    theirs = place / "ledger-000000000001-000000000010.jsonl"
    theirs.write_text("of another store\n")
    await write(store, 25)
    with refused("ledger_unavailable", "other entries"):
        await archive(store, str(place))
    assert theirs.read_text() == "of another store\n"
    assert len(await entries(store)) == 25


# what writes into it


async def test_a_publication_and_a_swap_leave_their_entries_in_their_own_transactions(fleet: Fleet) -> None:
    coordinator, store = fleet.coordinator(), fleet.store()
    await fleet.instance("a")
    for value in (1.0, 2.0):
        version = await fleet.publish(value)
        await coordinator.activate(version, requested_by="key ops (1)", reason=f"because {value}")
    await coordinator.rollback(requested_by="key ops (1)", reason="worse")
    found = await eventually(lambda: _ended(store, 3))
    assert [(e.action, e.version) for e in found] == [
        *[(action, 1) for action in ("publish", "activate", "commit", "done")],
        *[(action, 2) for action in ("publish", "activate", "commit", "done")],
        *[(action, 1) for action in ("rollback", "commit", "done")],
    ]
    assert found[0].who.startswith("trainer@")
    assert (found[5].who, found[5].reason) == ("key ops (1)", "because 2.0")
    assert (found[8].who, found[8].reason) == ("key ops (1)", "worse")
    assert (found[9].who, found[9].subject) == ("coordinator", "asked for by key ops (1)")
    assert found[8].swap == found[9].swap == found[10].swap != found[5].swap
    active, entry = await store.get(KEYS.active), await store.get(entry_key(10))
    assert active is not None
    assert entry is not None
    assert active.mod_revision == entry.mod_revision
    assert (await verify(store)).ok


async def _ended(store: Store, swaps: int) -> list[LedgerEntry] | None:
    found = await entries(store)
    return found if sum(e.action in ("done", "abort") for e in found) == swaps else None


# processes that are killed


@pytest.mark.usefixtures("small")
async def test_writers_that_are_killed_leave_a_whole_chain(store_url: str, store: Store, tmp_path: Path) -> None:
    """Each deed has its entry and each entry its deed, in store or file, whenever they are killed."""
    place = str(tmp_path / "old")
    for round_ in range(3):
        async with (
            running("ledger_process", store_url, f"a{round_}", place) as a,
            running("ledger_process", store_url, f"b{round_}") as b,
        ):
            await asyncio.gather(a.says("writes"), b.says("writes"))
            goal = (await Held.read(store)).head.number + 12 + 7 * round_
            await eventually(lambda goal=goal: _has_grown(store, goal), 120)
            a.signal(signal.SIGKILL)
            b.signal(signal.SIGKILL)
        found = await verify(store, place)
        assert found.ok, found
    deeds = {kv.key for kv in (await store.list("deeds/"))[0]}
    told = [orjson.loads(line)["subject"] async for line in export(store, place)]
    assert len(told) == len(set(told))
    assert set(told) == deeds


async def _has_grown(store: Store, goal: int) -> bool:
    return (await Held.read(store)).head.number >= goal


async def test_a_leader_killed_before_its_commit_leaves_no_commit_without_its_entry(
    store_url: str, fleet: Fleet
) -> None:
    await fleet.instance("a")
    store = fleet.store()
    async with running("coordinator_process", store_url, "2", "commit") as leader:
        await leader.says("leads")
        await fleet.publish(activate=True, wait=False)
        await leader.says("stops before commit")
        assert await store.get(KEYS.active) is None
        assert [e.action for e in await entries(store)] == ["publish", "activate"]
        leader.signal(signal.SIGKILL)
    fleet.coordinator()
    found = await eventually(lambda: _ended(store, 1), 120)
    assert [e.action for e in found] == ["publish", "activate", "commit", "done"]
    assert (found[2].swap, found[2].model) == ((await fleet.active()).swap_id, MODEL)
    assert (await verify(store)).ok


# the history of swaps


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


async def test_a_request_for_what_is_not_ready_any_more_is_kept(fleet: Fleet) -> None:
    version = await fleet.publish()
    store = fleet.store()
    await swap.request(store, KEYS, swap.new_target(version, "somebody", 5.0))
    await store.delete(KEYS.version(version))
    fleet.coordinator()
    kept = await eventually(lambda: past_swaps(store, KEYS), 60)
    assert (kept[0].outcome, kept[0].requested_by, kept[0].flips) == ("aborted", "somebody", ())
    assert "does not exist" in (kept[0].reason or "")


async def test_the_oldest_make_way(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT", 3)
    store = fleet.store()
    for number in range(1, 10):  # more were kept before
        await store.put(KEYS.past_swap(number), OLD.to_json())
    coordinator = await fleet.serving("a")
    assert [s.epoch for s in await past_swaps(store, KEYS)] == [1, None, None]
    await coordinator.activate(await fleet.publish(2.0))
    for _ in range(4):
        await coordinator.rollback()
    await eventually(lambda: fleet.engines["a"].running == 2)
    assert [s.epoch for s in await past_swaps(store, KEYS)] == [6, 5, 4]


async def test_one_that_cannot_be_read_hides_no_other_and_those_of_a_similar_name_are_not_its(fleet: Fleet) -> None:
    store = fleet.store()
    await store.put(KEYS.past_swap(1), b"{}")
    await store.put(KEYS.past_swap(2), OLD.to_json())
    await store.put(Keys("demo/7").past_swap(41), replace(OLD, id="y").to_json())
    assert [s.id for s in await past_swaps(store, KEYS)] == ["x"]
    await fleet.serving("a")
    assert await store.get(KEYS.past_swap(3)) is not None


async def test_a_conflict_moves_nothing_on() -> None:
    """A swap that was not written is written again under the same number."""
    past = History(KEYS, [1, 2])
    first: Mapping[str, bytes | None] = past.additions(OLD)
    assert past.additions(OLD) == first == {KEYS.past_swap(3): OLD.to_json()}
    past.added()
    assert past.additions(OLD) == {KEYS.past_swap(4): OLD.to_json()}
