"""Which adapters an instance answers for, over commits, rollbacks and adapters that come and go."""

from __future__ import annotations

from typing import Any

import pytest

from server.instance.engine import FIRST_ID, Adapters
from tests.server.instance import engines
from weightsync.control.records import PartRecord, VersionRecord

pytestmark = pytest.mark.engine


def version(number: int, *parts: str) -> VersionRecord:
    records = tuple(PartRecord(name, number, f"slot-{name}-{number}", f"digest-{number}", 1) for name in parts)
    return engines.version(number, parts=records)


def commit(adapters: Adapters, number: int) -> None:
    adapters.withdraw(number)
    adapters.offer(number)


def test_names_follow_the_commits() -> None:
    table: dict[str, Any] = {"own": "an adapter that vLLM was started with"}
    adapters = Adapters()
    adapters.bind(table)
    adapters.orders(version(1, "lora/x", "draft"))
    assert set(table) == {"own"}, "offered before its commit"
    commit(adapters, 1)
    assert set(table) == {"own", "x"}
    adapters.orders(version(2, "lora/y"))
    adapters.withdraw(2)
    assert set(table) == {"own"}, "new requests still got an adapter that the next version does not have"
    adapters.offer(2)
    assert set(table) == {"own", "y"}
    commit(adapters, 1)
    assert set(table) == {"own", "x"}
    assert adapters.find("x").lora_path == "hotswap:lora/x"
    assert adapters.find("y") is adapters.find(None) is None


def test_a_name_keeps_its_id() -> None:
    """Requests in flight refer to it."""
    adapters = Adapters()
    first = {o["name"]: o for o in adapters.orders(version(1, "draft", "lora/x", "lora/y"))}
    again = {o["name"]: o for o in adapters.orders(version(2, "lora/y", "lora/z"))}
    assert first["lora/y"]["lora_id"] == again["lora/y"]["lora_id"]
    ids = [first["lora/x"]["lora_id"], first["lora/y"]["lora_id"], again["lora/z"]["lora_id"]]
    assert len(set(ids)) == 3
    assert min(ids) >= FIRST_ID
    assert first["draft"]["lora_id"] == 0
    commit(adapters, 2)
    assert adapters.find("z").lora_int_id == again["lora/z"]["lora_id"]


def test_a_table_that_is_bound_late_has_what_was_offered() -> None:
    adapters = Adapters()
    adapters.orders(version(1, "lora/x"))
    commit(adapters, 1)
    table: dict[str, Any] = {}
    adapters.bind(table)
    assert set(table) == {"x"}


def test_no_adapter_takes_the_name_of_the_model() -> None:
    table: dict[str, Any] = {}
    adapters = Adapters()
    adapters.bind(table, ["tiny"])
    adapters.orders(version(1, "lora/tiny", "lora/x"))
    commit(adapters, 1)
    assert set(table) == {"x"}
    assert adapters.find("tiny") is None
    commit(adapters, 2)
    assert not table
