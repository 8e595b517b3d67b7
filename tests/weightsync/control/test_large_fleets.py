"""A fleet with more instances than its store can compare in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.etcd import Etcd
from tests.waiting import eventually
from tests.weightsync.fleet import MODEL, running_fleet
from tests.weightsync.tensors import model
from weightsync import Publisher, SyncStore


@pytest.fixture
def small_etcd() -> Iterator[Etcd]:
    etcd = Etcd(flags=("--max-txn-ops=12",))
    yield etcd
    etcd.close()


async def test_a_fleet_of_more_instances_than_a_transaction_compares_keys_swaps(small_etcd: Etcd) -> None:
    url = small_etcd.url("large")
    SyncStore(url).close()
    async with running_fleet(url) as fleet:
        fleet.coordinator()
        engines = [await fleet.instance(f"i{number:02d}") for number in range(14)]
        with Publisher(url, model=MODEL) as publisher:
            for _ in range(2):
                version = await asyncio.to_thread(publisher.publish, model(1.0), timeout_s=30)
                await eventually(lambda v=version: [engine.running for engine in engines] == [v] * 14)  # type: ignore[misc]
