"""A fleet with more instances than its store can compare in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.etcd import Etcd
from tests.weightsync.fleet import KEYS, MODEL, running_fleet
from tests.weightsync.tensors import model
from weightsync import Publisher, SyncStore
from weightsync.errors import SwapAborted


@pytest.fixture
def small_etcd() -> Iterator[Etcd]:
    etcd = Etcd(flags=("--max-txn-ops=12",))
    yield etcd
    etcd.close()


async def test_a_commit_that_the_store_refuses_aborts_the_swap_and_says_why(small_etcd: Etcd) -> None:
    """Nobody flips, the version before serves on, and with fewer instances the next swap is committed."""
    url = small_etcd.url("large")
    SyncStore(url).close()
    async with running_fleet(url) as fleet:
        fleet.coordinator()
        names = [f"i{number:02d}" for number in range(14)]
        engines = [await fleet.instance(name) for name in names]
        with Publisher(url, model=MODEL) as publisher:
            with pytest.raises(SwapAborted, match="--max-txn-ops"):
                await asyncio.to_thread(publisher.publish, model(1.0), timeout_s=30)
            assert await fleet.store().get(KEYS.active) is None
            assert not any(engine.running for engine in engines)
            for name in names[4:]:
                await fleet.participants[name].stop()
            version = await asyncio.to_thread(publisher.publish, model(2.0), timeout_s=30)
        assert [engine.running for engine in engines[:4]] == [version] * 4
