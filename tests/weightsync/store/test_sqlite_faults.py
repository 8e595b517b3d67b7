"""A store that cannot be used says why and what to do; one that comes back is used again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import stat
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.waiting import eventually, stays
from tests.weightsync.codes import refused
from weightsync import Publisher, SyncStore
from weightsync.errors import StoreUnavailable
from weightsync.store import open_store
from weightsync.store.sqlite import SqliteStore
from weightsync.store.sqlite_db import Database


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of the store, in a directory of its own, which is not there yet."""
    return tmp_path / "run" / "store.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    opened = SqliteStore(str(path))
    yield opened
    await opened.close()


async def test_the_file_is_private(store: SqliteStore, path: Path) -> None:
    await store.put("a", b"1")
    files = [f for f in path.parent.iterdir() if f.is_file()]
    assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("sqlite://relative.db", "not an absolute path"),
        ("redis://x", "unknown scheme 'redis'"),
        ("/tmp/x.db", "not a URL"),
        ("", "not a URL"),
    ],
)
def test_urls_that_cannot_be_opened(url: str, problem: str) -> None:
    with pytest.raises(StoreUnavailable, match=problem) as refused:
        open_store(url)
    assert "sqlite:///" in refused.value.advice


def test_an_absent_store_is_not_made_for_a_client(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="no such file"):
        open_store(f"sqlite://{tmp_path}/typo.db", create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["/proc/store.db", "/proc/new/store.db", "/dev/null/store.db"])
def test_a_place_nobody_may_write_to(place: str) -> None:
    with pytest.raises(StoreUnavailable, match="may write to"):
        open_store(f"sqlite://{place}")


@pytest.mark.parametrize("content", [b"x" * 8192, b"SQLite format 3\0" + b"\xff" * 8192, bytes(8192)])
def test_a_file_that_is_not_a_store(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(content)
    with pytest.raises(StoreUnavailable, match="move it away"):
        open_store(f"sqlite://{path}")
    assert path.read_bytes() == content


async def test_a_store_that_is_damaged_while_open(store: SqliteStore, path: Path) -> None:
    for i in range(200):
        await store.put(f"k/{i}", b"v" * 500)
    await store.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(os.fstat(file.fileno()).st_size - 4096))
    with pytest.raises(StoreUnavailable, match="move it away"):
        await SqliteStore(str(path)).list("")


def test_another_release(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(StoreUnavailable, match="has format 99"):
        open_store(f"sqlite://{path}")


def test_a_lock_that_is_never_given_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.store.sqlite_db.LOCK_TIMEOUT_S", 0.05)
    database = Database(str(path), create=True)
    hog = sqlite3.connect(path, isolation_level=None)
    hog.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="look for one that hangs"):
        database.txn({}, {"a": b"1"})
    hog.execute("ROLLBACK")
    assert database.txn({}, {"a": b"1"}) == (1, True)
    hog.close()
    database.close()


async def test_a_full_file_system_loses_nothing_that_was_there(store: SqliteStore) -> None:
    await store.put("a", b"1")
    await store._call(lambda: store._db._connection.execute("PRAGMA max_page_count=1"))
    with pytest.raises(StoreUnavailable, match="Free space"):
        await store.put("b", b"x" * 1_000_000)
    assert (await store.get("a")).value == b"1"  # type: ignore[union-attr]
    assert await store.get("b") is None


async def test_a_store_that_goes_away_and_comes_back(store: SqliteStore, path: Path, tmp_path: Path) -> None:
    await store.put("a", b"1")
    async with contextlib.aclosing(store.watch("b/", 1)) as watch:
        waiting = asyncio.ensure_future(anext(watch))
        await stays(lambda: not waiting.done(), 0.05)
        path.parent.rename(tmp_path / "away")
        for call in (store.put("a", b"2"), asyncio.wait_for(waiting, 60)):
            with pytest.raises(StoreUnavailable, match="not there any more"):
                await call
    (tmp_path / "away").rename(path.parent)
    assert (await store.get("a")).value == b"1"  # type: ignore[union-attr]
    await store.put("a", b"3")


def _unlink(directory: Path) -> None:
    for name in os.listdir(directory):
        os.unlink(directory / name)


async def test_another_store_in_its_place_is_never_taken_for_it(store: SqliteStore, path: Path) -> None:
    await store.put("a", b"old")
    _unlink(path.parent)
    other = open_store(store.url)
    for _ in range(5):  # it is newer than the one that is gone
        await other.put("a", b"new")
    for _ in range(2):
        with refused("store_lost", match="another store is in its place"):
            await store.get("a")
        with refused("store_lost"):
            await store.put("a", b"old again")
        with refused("store_lost"):
            await anext(store.watch("a", 2))
    assert (await other.get("a")).value == b"new"  # type: ignore[union-attr]
    await other.close()


async def test_a_file_that_is_no_store_in_its_place_is_left_alone(store: SqliteStore, path: Path) -> None:
    await store.put("a", b"old")
    _unlink(path.parent)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()  # noqa: ASYNC240
    with refused("store_lost"):
        await store.get("a")
    assert path.read_bytes() == before  # noqa: ASYNC240


async def test_a_copy_of_it_is_taken_for_it_unless_it_is_older(store: SqliteStore, path: Path, tmp_path: Path) -> None:
    await store.put("a", b"1")
    _copy(path, tmp_path / "first.db")
    await store.put("a", b"2")
    _copy(path, tmp_path / "second.db")
    _unlink(path.parent)
    shutil.copy(tmp_path / "first.db", path)
    with refused("store_lost", match="an older copy of it is in its place"):
        await store.get("a")
    _unlink(path.parent)
    shutil.copy(tmp_path / "second.db", path)
    assert (await store.get("a")).value == b"2"  # type: ignore[union-attr]
    await store.put("a", b"3")


def _copy(path: Path, to: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(to)) as target:
        source.backup(target)


async def test_a_url_with_an_id_opens_that_store_alone_and_makes_none(store: SqliteStore, path: Path) -> None:
    await store.put("a", b"1")
    same = open_store(store.url_of_this)
    assert (await same.get("a")).value == b"1"  # type: ignore[union-attr]
    assert same.url == store.url
    await same.close()
    await store.close()
    with refused("store_lost"):
        open_store(f"{store.url}?id={'0' * 32}")
    _unlink(path.parent)
    with pytest.raises(StoreUnavailable, match="no such file"):
        open_store(store.url_of_this)
    assert os.listdir(path.parent) == []


async def test_a_publisher_does_not_begin_again_at_version_1(path: Path, arena_directory: Path) -> None:
    url = f"sqlite://{path}"
    SyncStore(url).close()
    with Publisher(url, model="toy") as publisher:
        assert publisher.publish({"w": np.zeros(8, np.float32)}, activate=False) == 1
        _unlink(path.parent)
        SyncStore(url).close()
        with refused("store_lost"):
            publisher.publish({"w": np.zeros(8, np.float32)}, activate=False)


@pytest.mark.parametrize(
    ("leased", "expected"), [((), "FULL"), (("a", "b"), "NORMAL"), (("a",), "FULL")], ids=["none", "all", "some"]
)
def test_what_outlives_its_writer_is_on_the_disk_when_it_is_written(
    path: Path, leased: tuple[str, ...], expected: str
) -> None:
    """A lease that is kept alive all the time must not wait for the disk; a key, or a version's number, must."""
    database = Database(str(path), create=True)
    lease = database.grant_lease(3600)
    levels: list[str] = []

    def on_statement(statement: str) -> None:
        if statement == "COMMIT":
            levels.append(["OFF", "NORMAL", "FULL"][connection.execute("PRAGMA synchronous").fetchone()[0]])

    connection = database._connection
    connection.set_trace_callback(on_statement)
    database.txn({}, {"a": b"1", "b": b"2"}, dict.fromkeys(leased, lease))
    database.keep_alive(lease)
    assert levels == [expected, "NORMAL"]
    database.close()


def test_leases_of_a_former_boot_have_ended(path: Path) -> None:
    database = Database(str(path), create=True)
    lease = database.grant_lease(3600)
    database.txn({}, {"a": b"1"}, {"a": lease})
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = 'another' WHERE name = 'boot_id'")
    database.close()
    database = Database(str(path), create=True)
    assert database.get("a") is None
    database.close()


async def test_a_change_that_nobody_told_of_is_found_by_one_look_for_all_watchers(
    store: SqliteStore, path: Path
) -> None:
    """A writer that is killed after its commit tells nobody; and watchers to whom nothing happens cost one look."""
    reads: Counter[str] = Counter()
    for name in ("events", "revision"):
        _count(store._db, name, reads)
    async with contextlib.AsyncExitStack() as stack:
        watches = [await stack.enter_async_context(contextlib.aclosing(store.watch(f"{n}/", 1))) for n in range(8)]
        found = [asyncio.ensure_future(anext(watch)) for watch in watches]
        await asyncio.sleep(0)
        store._signal.wake()  # they are told while they read, so each of them reads once more
        await eventually(lambda: reads["events"] >= 16 and reads["revision"] >= 5)
        assert reads["events"] == 16
        killed = Database(str(path), create=False)
        killed.txn({}, {f"{n}/a": b"1" for n in range(8)})
        killed.close()
        events = await asyncio.wait_for(asyncio.gather(*found), 60)
        assert [event.kv.key for event in events] == [f"{n}/a" for n in range(8)]


def _count(database: Database, name: str, reads: Counter[str]) -> None:
    read = getattr(database, name)

    def counted(*arguments: Any) -> Any:
        reads[name] += 1
        return read(*arguments)

    setattr(database, name, counted)


def test_a_watcher_reads_new_events_alone(tmp_path: Path) -> None:
    """By an index: every watcher reads at every write, and thousands of events are kept."""
    database, asked = Database(str(tmp_path / "store.db"), create=True), list[str]()
    database.txn({}, {"a/1": b"x"})
    database._connection.set_trace_callback(asked.append)
    events, _ = database.events("a/", 1)
    database._connection.set_trace_callback(None)
    assert [event.kv.key for event in events] == ["a/1"]
    plans = [
        database._connection.execute(f"EXPLAIN QUERY PLAN {each}").fetchall() for each in asked if "SELECT" in each
    ]
    assert len(plans) >= 2
    assert not [step for plan in plans for *_, step in plan if step.startswith("SCAN events")], plans
    database.close()
