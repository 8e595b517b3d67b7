"""Who may ask for a version: an operator any ready one, a publisher only while it holds its lineage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from tests.weightsync.simulation.model_store import ModelStore
from weightsync import Publisher, SyncStore
from weightsync.control import activation
from weightsync.control.records import ActiveRecord, Keys, TargetRecord, VersionRecord
from weightsync.errors import StalePublisher, UnknownVersion

STORES = ("sqlite", "etcd")
KEYS = Keys("demo")


@pytest.fixture
def records(store_url: str) -> Iterator[SyncStore]:
    opened = SyncStore(store_url)
    yield opened
    opened.close()


@pytest.mark.parametrize("ask", ["activate", "rollback"])
def test_a_publisher_that_was_replaced_cannot_ask_for_a_version(store_url: str, records: SyncStore, ask: str) -> None:
    with Publisher(store_url, model="demo") as stale:
        first = stale.publish(model(0.0), activate=False)
        with Publisher(store_url, model="demo") as holder:
            second = holder.publish(model(1.0), wait=False)
            records.put(KEYS.active, ActiveRecord(second, 1, first, "s", 0.0, "").to_json())
            with pytest.raises(StalePublisher, match="lineage 'trainer' was taken over"):
                stale.activate(first, wait=False) if ask == "activate" else stale.rollback(wait=False)
            assert wanted(records) == second
            holder.rollback(wait=False)
            assert wanted(records) == first


def test_an_operator_may_ask_for_any_ready_version_whoever_publishes(store_url: str, records: SyncStore) -> None:
    with Publisher(store_url, model="demo") as trainer:
        first, second = trainer.publish(model(0.0), activate=False), trainer.publish(model(1.0), wait=False)
        target = activation.new_target(first, "operator", 5.0)
        records.run(activation.request(records.store, KEYS, target))
        assert wanted(records) == first
        trainer.activate(second, wait=False)
        assert wanted(records) == second


def test_a_version_that_is_retired_meanwhile_is_not_asked_for() -> None:
    store = RetiresOnRead()
    with pytest.raises(UnknownVersion, match="version 1 is retired"):
        asyncio.run(activation.request(store, KEYS, activation.new_target(1, "operator", 5.0)))  # type: ignore[arg-type]
    assert store.found(KEYS.target) is None


class RetiresOnRead:
    """A store in which the version is retired between the first look at it and the next write."""

    def __init__(self) -> None:
        self._model, self._read = ModelStore(), False
        self._model.put(KEYS.version(1), version("ready"))

    def found(self, key: str) -> object:
        return self._model.get(key)

    async def get(self, key: str) -> object:
        found = self._model.get(key)
        if not self._read:
            self._read = True
            self._model.put(KEYS.version(1), version("retired"))
        return found

    async def put(self, key: str, value: bytes) -> int:
        return self._model.put(key, value)

    async def txn(self, compares: Mapping[str, int], puts: Mapping[str, bytes | None]) -> int:
        return self._model.txn(compares, puts)


def version(state: str) -> bytes:
    return VersionRecord(1, state, "", 0, "", None, None, "t", 1, 0.0, "", 0).to_json()  # type: ignore[arg-type]


def model(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full((4, 4), value, np.float32)}


def wanted(records: SyncStore) -> int:
    found = records.get(KEYS.target)
    assert found is not None
    return TargetRecord.from_json(found.value).version
