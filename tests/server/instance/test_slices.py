"""What an instance says that it needs on each of its hosts, and what peers make of it."""

from __future__ import annotations

import asyncio

import pytest

from server.instance.slices import Reads, Saying, joined_reads
from tests.waiting import eventually
from weightsync import Store
from weightsync.control.records import Keys
from weightsync.format.manifest import schema_of
from weightsync.format.slices import Slices
from weightsync.peer.slices import SlicesRecord, slices_prefix

KEYS = Keys("m")
ROWS = [["a", "float32", [1 << 14]], ["b", "float32", [1 << 14]], ["c", "float32", [1 << 14]]]
SCHEMA = schema_of((n, d, s) for n, d, s in ROWS)


def slices(*names: str) -> Slices:
    return Slices.of(SCHEMA, [(name, 0, 4 << 14) for name in names])


async def said(store: Store) -> dict[str, str]:
    """By host."""
    records = [SlicesRecord.from_json(kv.value) for kv in (await store.list(slices_prefix(KEYS)))[0]]
    assert {record.instance for record in records} <= {"i"}
    return {record.host: record.slices for record in records}


def test_the_ranks_of_a_host_are_joined_and_rank_0_has_what_nobody_reads() -> None:
    answers = [(slices("a").to_text(), "6"), (slices("b").to_text(), "5"), (slices("a").to_text(), "6")]
    found = joined_reads(ROWS, ["x", "y", "y"], answers)
    assert found == Reads({"x": slices("a", "c"), "y": slices("a", "b")}, ("c",))
    assert joined_reads(ROWS, ["x", "y", "y"], [*answers[:2], None]) is None


async def test_it_is_said_under_a_lease_and_again_when_it_changes(store: Store) -> None:
    saying = Saying(KEYS, "i")
    reads = Reads({"x": slices("a"), "y": slices("b")}, ("c",))
    saying.say(("x", "y", "y"), reads)
    assert saying.digests == {"x": slices("a").digest, "y": slices("b").digest}
    assert saying.unread == ("c",)
    running = asyncio.create_task(saying.run(store))

    async def is_said(expected: dict[str, str]) -> bool:
        return await said(store) == expected

    await eventually(lambda: is_said({"x": slices("a").to_text(), "y": slices("b").to_text()}))
    saying.say(("x", "y"), reads, everything="x")  # a signature is checked there
    await eventually(lambda: is_said({"x": "", "y": slices("b").to_text()}))
    assert saying.digests == {"y": slices("b").digest}
    saying.say(("x", "y"), None)
    await eventually(lambda: is_said({"x": "", "y": ""}))
    assert saying.digests == {}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await said(store) == {}


@pytest.mark.parametrize(("hosts", "expected"), [(("x", "x"), {"x": ""}), (("", ""), {})])
async def test_an_instance_on_one_host_needs_everything_there(
    hosts: tuple[str, ...], expected: dict[str, str], store: Store
) -> None:
    saying = Saying(KEYS, "i")
    saying.say(hosts, Reads({"x": slices("a")}, ()))
    assert saying.digests == {}
    running = asyncio.create_task(saying.run(store))

    async def is_said() -> bool:
        return await said(store) == expected

    await eventually(is_said)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
