"""A real store and arena per test, and a publisher and what it has published where they are wanted."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.cluster_tls import Authority
from tests.etcd import MIN_LEASE_S, Etcd
from tests.weightsync.tensors import model
from tests.weightsync.writers import watched
from weightsync import Publisher, Store, SyncStore, open_store
from weightsync.control.records import VersionRecord
from weightsync.store.etcd import EtcdStore
from weightsync.store.sqlite import SqliteStore


@pytest.fixture
def arena_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's slots go; child processes inherit the setting."""
    directory = Path(tempfile.mkdtemp(prefix="hotswap-test-", dir="/dev/shm"))
    monkeypatch.setenv("HOTSWAP_ARENA", str(directory))
    yield directory
    while directory.exists():  # a stager's spare slots may still be on their way
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def one_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Swap and active records are written by weightsync/control/swap.py alone; a test may write them itself."""
    found: list[str] = []
    for kind in (SqliteStore, EtcdStore):
        for name in ("put", "txn", "compare_and_swap", "delete"):
            monkeypatch.setattr(kind, name, watched(getattr(kind, name), found))
    yield
    assert not found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The tests of a module that names its STORES run on each of them; all others on SQLite."""
    stores = getattr(metafunc.module, "STORES", None)
    if stores and "store_url" in metafunc.fixturenames:
        metafunc.parametrize("store_url", stores, indirect=True)


@pytest.fixture(scope="session")
def etcd() -> Iterator[Etcd]:
    """One etcd for the session; each test has a namespace of its own in it."""
    server = Etcd()
    yield server
    server.close()


@pytest.fixture
def server(request: pytest.FixtureRequest, arena_directory: Path) -> Iterator[Etcd]:
    """An etcd that this test may harm, with the flags that it names."""
    own = Etcd(flags=getattr(request, "param", ()))
    yield own
    own.thaw()
    own.close()


@pytest.fixture
def store_url(request: pytest.FixtureRequest, tmp_path: Path, arena_directory: Path) -> Iterator[str]:
    """An empty store."""
    if getattr(request, "param", "sqlite") == "etcd":
        url = request.getfixturevalue("etcd").url(f"test-{uuid.uuid4().hex}")
        yield url
        asyncio.run(_delete_all(url))  # what hangs on leases too: a lease that ends later then moves no revision
    else:
        url = f"sqlite://{tmp_path / 'store.db'}"
        SyncStore(url).close()
        yield url


async def _delete_all(url: str) -> None:
    store = open_store(url)
    for kv in (await store.list(""))[0]:
        await store.delete(kv.key)
    await store.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def shortest_lease_s(store_url: str) -> float:
    return MIN_LEASE_S if store_url.startswith("etcd") else 0.05


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    opened = open_store(store_url)
    yield opened
    await opened.close()


@pytest.fixture
def store_sync(store_url: str) -> Iterator[SyncStore]:
    opened = SyncStore(store_url)
    yield opened
    opened.close()


@pytest.fixture
def publisher(store_url: str) -> Iterator[Publisher]:
    with Publisher(store_url, model="demo", lease_ttl_s=60) as opened:
        yield opened


@pytest.fixture
def record(publisher: Publisher) -> VersionRecord:
    """A version all of whose elements are 1."""
    publisher.publish(model(1.0), activate=False)
    (published,) = publisher.versions()
    return published
