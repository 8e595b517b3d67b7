"""A real store and arena per test, and real servers' halves of a swap where one is wanted."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from weightsync import Publisher, Store, SyncStore, open_store


@pytest.fixture
def arena_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's slots go; child processes inherit the setting."""
    directory = Path(tempfile.mkdtemp(prefix="hotswap-test-", dir="/dev/shm"))
    monkeypatch.setenv("HOTSWAP_ARENA", str(directory))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def store_url(tmp_path: Path, arena_directory: Path) -> str:
    """An empty store."""
    url = f"sqlite://{tmp_path / 'store.db'}"
    SyncStore(url).close()
    return url


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    opened = open_store(store_url)
    yield opened
    await opened.close()


@pytest.fixture
def publisher(store_url: str) -> Iterator[Publisher]:
    with Publisher(store_url, model="demo") as opened:
        yield opened
