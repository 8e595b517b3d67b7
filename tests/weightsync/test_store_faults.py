"""A store that cannot be used says why and what to do; one that comes back is used again."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from pathlib import Path

import pytest

from weightsync.errors import StoreUnavailable, WatchCompacted
from weightsync.store import open_store
from weightsync.store.sqlite_db import Database


async def test_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "store.db"
    store = open_store(f"sqlite://{path}")
    await store.put("a", b"1")
    files = [f for f in path.parent.iterdir() if f.is_file()]
    assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    await store.close()


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


async def test_a_store_that_is_damaged_while_open(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = open_store(f"sqlite://{path}")
    for i in range(200):
        await store.put(f"k/{i}", b"v" * 500)
    await store.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    with pytest.raises(StoreUnavailable, match="move it away"):
        await _read_all(f"sqlite://{path}")


async def _read_all(url: str) -> None:
    store = open_store(url)
    await store.list("")


def test_another_release(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(StoreUnavailable, match="has format 99"):
        open_store(f"sqlite://{path}")


def test_a_lock_that_is_never_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.store.sqlite_db.LOCK_TIMEOUT_S", 0.05)
    path = str(tmp_path / "store.db")
    database = Database(path, create=True)
    hog = sqlite3.connect(path, isolation_level=None)
    hog.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="look for one that hangs"):
        database.txn({}, {"a": b"1"})
    hog.execute("ROLLBACK")
    assert database.txn({}, {"a": b"1"}) == (1, True)
    hog.close()
    database.close()


async def test_a_full_file_system_loses_nothing_that_was_there(tmp_path: Path) -> None:
    store = open_store(f"sqlite://{tmp_path}/store.db")
    await store.put("a", b"1")
    await store._call(lambda: store._db._connection.execute("PRAGMA max_page_count=1"))  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailable, match="Free space"):
        await store.put("b", b"x" * 1_000_000)
    assert (await store.get("a")).value == b"1"  # type: ignore[union-attr]
    assert await store.get("b") is None
    await store.close()


async def test_a_store_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "store.db"
    store = open_store(f"sqlite://{path}")
    await store.put("a", b"1")
    path.parent.rename(tmp_path / "away")
    with pytest.raises(StoreUnavailable, match="not there any more"):
        await store.put("a", b"2")
    (tmp_path / "away").rename(path.parent)
    assert (await store.get("a")).value == b"1"  # type: ignore[union-attr]
    await store.put("a", b"3")
    await store.close()


async def test_a_store_that_is_replaced_is_opened_anew(tmp_path: Path) -> None:
    store = open_store(f"sqlite://{tmp_path}/store.db")
    for _ in range(5):
        await store.put("a", b"old")
    for name in os.listdir(tmp_path):
        os.unlink(tmp_path / name)
    other = open_store(f"sqlite://{tmp_path}/store.db")
    await other.put("a", b"new")
    assert (await store.get("a")).value == b"new"  # type: ignore[union-attr]
    with pytest.raises(WatchCompacted):  # revisions of the old file mean nothing in the new one
        async with asyncio.timeout(5):
            await anext(store.watch("a", 6))
    await store.close()
    await other.close()


def test_leases_of_a_former_boot_have_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    database = Database(path, create=True)
    lease = database.grant_lease(3600)
    database.txn({}, {"a": b"1"}, {"a": lease})
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = 'another' WHERE name = 'boot_id'")
    database.close()
    database = Database(path, create=True)
    assert database.get("a") is None
    database.close()
