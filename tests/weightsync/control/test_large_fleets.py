"""Fleets with more instances than their store takes operations in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.etcd import Etcd
from tests.weightsync.fleet import KEYS, MODEL, Fleet, running_fleet
from tests.weightsync.tensors import model
from weightsync import Publisher, SyncStore
from weightsync.errors import StoreRefused, SwapAborted


@pytest.fixture
def small_etcd() -> Iterator[Etcd]:
    etcd = Etcd(flags=("--max-txn-ops=12",))
    yield etcd
    etcd.close()


async def test_a_commit_is_no_larger_for_a_larger_fleet(small_etcd: Etcd) -> None:
    url = small_etcd.url("large")
    SyncStore(url).close()
    async with running_fleet(url) as fleet:
        fleet.coordinator()
        engines = [await fleet.instance(f"i{number:02d}") for number in range(14)]
        with Publisher(url, model=MODEL) as publisher:
            for value in (1.0, 2.0, 3.0, 4.0):  # with the fourth, a version retires
                version = await asyncio.to_thread(publisher.publish, model(value), timeout_s=30)
                assert {engine.running for engine in engines} == {version}


async def test_a_commit_that_the_store_refuses_aborts_the_swap_and_says_why(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody flips, and the next swap is committed."""
    store = fleet.coordinator()._store
    engine, real = await fleet.instance("a"), store.txn

    async def txn(compares: Mapping[str, int], puts: Mapping[str, bytes | None], *leases: Any) -> int:
        if KEYS.active in puts:
            raise StoreRefused("etcd://x", "request is too large", "Start etcd with a larger --max-request-bytes")
        return await real(compares, puts, *leases)

    with Publisher(fleet.store().url, model=MODEL) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(store, "txn", txn)
            with pytest.raises(SwapAborted, match="--max-request-bytes"):
                await asyncio.to_thread(publisher.publish, model(1.0), timeout_s=30)
        assert await fleet.store().get(KEYS.active) is None
        assert engine.running is None
        assert await asyncio.to_thread(publisher.publish, model(2.0), timeout_s=30) == engine.running
