"""Requests for a version: of an operator any ready one, of a publisher while it holds its lineage; and what goes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from loadtest.simulation.clock import Clock
from loadtest.simulation.store import Client, ModelStore
from tests.weightsync.codes import refused
from tests.weightsync.writers import ROOT, watched
from weightsync import Publisher, SyncStore
from weightsync.control import swap
from weightsync.control.chain import LedgerEntry, append
from weightsync.control.records import ActiveRecord, FormRecord, Keys, TargetRecord, VersionRecord
from weightsync.errors import StalePublisher
from weightsync.format.manifest import Schema
from weightsync.store.protocol import KeyValue

STORES = ("sqlite", "etcd")
KEYS = Keys("demo")


@pytest.mark.parametrize("ask", ["activate", "rollback"])
def test_a_publisher_that_was_replaced_cannot_ask_for_a_version(
    store_url: str, publisher: Publisher, store_sync: SyncStore, ask: str
) -> None:
    first = publisher.publish(model(0.0), activate=False)
    with Publisher(store_url, model="demo") as holder:
        second = holder.publish(model(1.0), wait=False)
        store_sync.put(KEYS.active, ActiveRecord(second, 1, first, "s", 0.0, "").to_json())
        with pytest.raises(StalePublisher, match="lineage 'trainer' was taken over"):
            publisher.activate(first, wait=False) if ask == "activate" else publisher.rollback(wait=False)
        assert wanted(store_sync) == second
        holder.rollback(wait=False)
        assert wanted(store_sync) == first


def test_an_operator_may_ask_for_any_ready_version_while_a_trainer_publishes(
    publisher: Publisher, store_sync: SyncStore
) -> None:
    first, second = publisher.publish(model(0.0), activate=False), publisher.publish(model(1.0), wait=False)
    target = swap.new_target(first, "operator", 5.0)
    store_sync.run(swap.request(store_sync.store, KEYS, target))
    assert wanted(store_sync) == first
    publisher.activate(second, wait=False)
    assert wanted(store_sync) == second


def test_a_version_that_is_retired_meanwhile_is_not_asked_for() -> None:
    store = RetiresOnRead()
    with refused("unknown_version", match=r"version 1 is retired, .*--keep-versions.* choose one that is ready"):
        asyncio.run(swap.request(store, KEYS, swap.new_target(1, "operator", 5.0)))
    assert store.store.get(KEYS.target) is None


class RetiresOnRead(Client):
    """A store in which the version is retired between the first look at it and the next write."""

    def __init__(self) -> None:
        super().__init__(ModelStore(Clock()))
        self.store.put(KEYS.version(1), version("ready"))

    async def get(self, key: str) -> KeyValue | None:
        found = await super().get(key)
        if self.store.revision == 1:
            self.store.put(KEYS.version(1), version("retired"))
        return found


def test_a_form_goes_with_the_last_version_that_has_it(
    publisher: Publisher, store_sync: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "TOMBSTONES_KEPT", 1)

    def kept() -> tuple[list[int], list[str]]:
        """Records of versions, and the tensors of the forms, after what is superseded has been retired."""
        store_sync.run(swap.retire(store_sync.store, KEYS, spare=0))
        forms = [FormRecord.from_json(kv.value) for kv in store_sync.list(KEYS.forms)[0]]
        names = {name for form in forms for name in Schema.from_json(form.tensors.encode()).tensors}
        return [v.version for v in publisher.versions()], sorted(names)

    publisher.publish(model(0.0), config={}, wait=False)
    for number, name in enumerate("xxy"):
        publisher.publish(model(number, name), config={}, activate=False)
    assert kept() == ([1, 2, 3, 4], ["w", "x", "y"])
    assert kept() == ([1, 4], ["w", "y"])
    publisher.publish(model(9.0, "x"), config={}, activate=False)
    assert kept() == ([1, 4, 5], ["w", "x", "y"])
    assert kept() == ([1, 5], ["w", "x"])
    publisher.publish(model(1.0), activate=False)
    assert kept() == ([1, 5, 6], ["w", "x"])


def test_a_form_that_a_publisher_writes_anew_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "TOMBSTONES_KEPT", 1)
    store = PublishesOnRead()
    assert asyncio.run(swap.retire(store, KEYS, spare=0)) == []
    assert store.store.get(KEYS.form("x")) is not None
    assert store.store.get(KEYS.version(1)) is not None


def test_what_is_superseded_is_retired_though_a_swap_is_asked_for_meanwhile() -> None:
    """The request is of another version, so what was decided still holds: a second look says so."""
    store = AskedOnRead()
    assert asyncio.run(swap.retire(store, KEYS, spare=0)) == [1]
    assert store.store.get(KEYS.target) is not None


class AskedOnRead(Client):
    """A store in which one of two versions is asked for right after everything was read for the first time."""

    def __init__(self) -> None:
        super().__init__(ModelStore(Clock()))
        self.store.txn({}, {KEYS.version(n): version("ready", n) for n in (1, 2)})

    async def list(self, prefix: str, *, first: str = "") -> tuple[list[KeyValue], int]:
        found = await super().list(prefix, first=first)
        if self.store.get(KEYS.target) is None:
            self.store.put(KEYS.target, swap.new_target(2, "operator", 5.0).to_json())
        return found


class PublishesOnRead(Client):
    """A store in which a version of a form that only a tombstone has is published right after everything was read."""

    def __init__(self) -> None:
        super().__init__(ModelStore(Clock()))
        retired = {KEYS.version(n): version("retired", n, form) for n, form in ((1, "x"), (2, ""))}
        self.store.txn({}, {**retired, KEYS.form("x"): b"{}"})

    async def list(self, prefix: str, *, first: str = "") -> tuple[list[KeyValue], int]:
        found = await super().list(prefix, first=first)
        self.store.txn({}, {KEYS.version(3): version("ready", 3, "x"), KEYS.form("x"): b"{}"})
        return found


def version(state: str, number: int = 1, form: str = "") -> bytes:
    record = VersionRecord(number, state, "", 0, "", None, None, "t", 1, 0.0, "", 0, form=form)  # type: ignore[arg-type]
    return record.to_json()


def model(value: float, name: str = "w") -> dict[str, np.ndarray]:
    return {name: np.full((4, 4), value, np.float32)}


def wanted(store_sync: SyncStore) -> int:
    found = store_sync.get(KEYS.target)
    assert found is not None
    return TargetRecord.from_json(found.value).version


async def test_a_swap_record_that_another_module_writes_is_noticed() -> None:
    found: list[str] = []

    class Watched(Client):
        txn = watched(Client.txn, found)  # type: ignore[assignment]

    source = "async def write(store, puts):\n    await store.txn({}, puts)\n"
    names: dict[str, Any] = {}
    exec(compile(source, str(ROOT / "server/other.py"), "exec"), names)
    store = Watched(ModelStore(Clock()))
    await append(store, {}, {KEYS.active: b"1"}, LedgerEntry("commit", "t"))
    assert not found, "a test may"
    await names["write"](store, {KEYS.target: b"1", KEYS.active: b"1"})
    assert found == [f"server/other.py writes {KEYS.active}"]
