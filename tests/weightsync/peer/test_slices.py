"""Hosts that need a part of a version: what their peers fetch, announce and keep over a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tests.weightsync.codes import refused
from tests.weightsync.peer.hosts import CHUNK, KEYS, MODEL, SLOW, Hosts, bytes_of, path_of, random_model
from weightsync import SlotReader, Store
from weightsync.control.records import CopyHostRecord, CopyRecord, ErrorInfo, InstanceRecord, Keys, VersionRecord
from weightsync.errors import ManifestError
from weightsync.format.manifest import CUTS, Cuts, Layout, Manifest, Schema, TensorEntry, TensorSpec, cut_ends, parts_of
from weightsync.format.slices import MOST_BLOCKS, Slices
from weightsync.memory.arena import Arena
from weightsync.peer.chunks import Bitmap, Head, Shape, manifest_of
from weightsync.peer.copies import wait_for_slots
from weightsync.peer.shelf import Regions, Shelf
from weightsync.peer.slices import Needs, PartCopyRecord, SlicesRecord, part_copy_key, slices_prefix
from weightsync.transport import Transport
from weightsync.versions import Records, opened

WEIGHTS = random_model(1)
SCHEMA = Schema({name: TensorSpec(str(array.dtype), array.shape) for name, array in WEIGHTS.items()})
FIRST, SECOND = ("layer.0", "layer.1"), ("layer.2", "layer.3")


def some_of(names: Iterable[str]) -> Slices:
    return Slices.of(SCHEMA, [(name, 0, WEIGHTS[name].nbytes) for name in names])


HALF = some_of(FIRST)


def say(hosts: Hosts, host: str, slices: Slices | None, instance: str = "i") -> None:
    """As an instance on that host does."""
    record = SlicesRecord(host, instance, slices.to_text() if slices is not None else "")
    hosts.store.put(slices_prefix(KEYS, host) + instance, record.to_json())


def part_of(hosts: Hosts, host: str, digest: str, slices: Slices) -> PartCopyRecord:
    """The record of a copy that has these slices, once it is there."""

    def found() -> PartCopyRecord | None:
        records, _ = hosts.store.list(part_copy_key(KEYS, digest, host))
        record = PartCopyRecord.from_json(records[0].value) if records else None
        return record if record is not None and slices.digest in record.slices else None

    return hosts.wait_for(found, host, digest)


def chunk_bytes(record: VersionRecord, slices: Slices) -> int:
    """The bytes of all chunks that have something of these slices."""
    nbytes = Path(record.slot.removeprefix("//a")).stat().st_size
    chunks = slices.chunks(nbytes, CHUNK)
    return sum(min(CHUNK, nbytes - at) for n, at in enumerate(range(0, nbytes, CHUNK)) if chunks >> n & 1)


def check(part: PartCopyRecord, names: Iterable[str]) -> None:
    """These tensors are there, as they were published; and nobody takes the file for a slot."""
    path = Path(part.slot.removeprefix(f"//{part.host}"))
    with pytest.raises(ManifestError, match="only slices"):
        SlotReader.open(path, manifest_digest=part.digest)
    with pytest.raises(ManifestError):
        manifest_of(memoryview(path.read_bytes()), part.digest)
    with SlotReader.open(path, manifest_digest=part.digest, part=True) as reader:
        assert reader.is_part
        for name in names:
            reader.verify(name)
            assert bytes(reader.buffer(name)) == WEIGHTS[name].tobytes()


# which bytes, and which chunks ----------------------------------------------------------------------------------------


def test_slices_are_the_chunks_that_have_some_of_them() -> None:
    layout = Layout.of(SCHEMA)
    row = 4096 * 5
    slices = Slices.of(SCHEMA, [("layer.2", row, row + 10), ("layer.0", 0, 0)])
    at = layout.offsets["layer.2"] + row
    for size in (4096, 3 * 4096, CHUNK, 1 << 20):
        chunks = slices.chunks(layout.total_nbytes, size)
        wanted = 1 << at // size | 1 << (at + 9) // size
        assert chunks & wanted == wanted
        assert chunks.bit_count() <= 2 + 4096 // size  # a block of 4 KiB may lie in two
    everything = some_of(WEIGHTS).chunks(layout.total_nbytes, CHUNK)
    header = (1 << layout.header_nbytes // CHUNK) - 1
    assert everything | header == (1 << -(-layout.total_nbytes // CHUNK)) - 1


def test_slices_are_joined_told_apart_and_written() -> None:
    first, second = HALF, some_of(SECOND)
    both = first.joined(second)
    assert both.blocks == first.blocks | second.blocks
    assert len({first.digest, second.digest, both.digest}) == 3
    assert Slices.from_text(both.to_text()) == both
    assert some_of((*FIRST, *SECOND)).digest == both.digest
    for text in ("", "x", f"{first.schema} 4096 ?", f"{first.schema} 1 AA==", first.to_text() + "A" * MOST_BLOCKS):
        with pytest.raises(ManifestError):
            Slices.from_text(text)


def test_a_version_of_any_size_has_few_blocks() -> None:
    huge = Schema({f"layer.{n:03d}": TensorSpec("bfloat16", (1 << 20, 1 << 12)) for n in range(256)})
    slices = Slices.of(huge, [(name, 0, 1 << 33) for name in huge.tensors])
    assert slices.blocks.bit_length() <= MOST_BLOCKS
    assert len(slices.to_text()) < 12_000


# what is needed on a host ---------------------------------------------------------------------------------------------


async def needs_of(store: Store, keys: Keys = KEYS, host: str = "b") -> Needs:
    needs = Needs(keys, host, lambda: None)
    await needs.read(store)
    await needs.look(store, "swap")
    return needs


async def tell(store: Store, slices: str, instance: str, host: str = "b") -> None:
    await store.put(slices_prefix(KEYS, host) + instance, SlicesRecord(host, instance, slices).to_json())


async def test_all_instances_of_a_host_count(store: Store) -> None:
    schema = SCHEMA.digest
    assert (await needs_of(store)).of(schema) is None  # nobody has said anything
    first, second = HALF, some_of(("layer.2",))
    await tell(store, first.to_text(), "i0")
    needs = await needs_of(store)
    assert (needs.of(schema), needs.group, needs.met(schema)) == (first, first.digest, (first.digest,))
    assert (needs.of("another"), needs.met("another")) == (None, ())  # another layout: everything
    await tell(store, second.to_text(), "i1")
    both = first.joined(second)
    needs = await needs_of(store)
    assert needs.of(schema) == both
    assert set(needs.met(schema)) == {first.digest, second.digest, both.digest}
    assert needs.of(schema) is needs.of(schema)  # it is asked for every chunk
    for text in ("", "not ours"):
        await tell(store, text, "i2")
        needs = await needs_of(store)
        assert (needs.of(schema), needs.group) == (None, "")


async def test_an_instance_that_says_nothing_anywhere_needs_everything(store: Store) -> None:
    await tell(store, HALF.to_text(), "i0")
    await store.put(KEYS.instance("i0"), InstanceRecord("i0", "http://x:1").to_json())
    assert (await needs_of(store)).of(HALF.schema) == HALF
    await store.put(KEYS.instance("old"), InstanceRecord("old", "http://x:2").to_json())
    assert (await needs_of(store)).of(HALF.schema) is None
    await tell(store, "", "old", host="c")  # on another host
    assert (await needs_of(store)).of(HALF.schema) == HALF


async def test_a_host_whose_instances_have_gone_keeps_to_what_they_needed(store: Store) -> None:
    await tell(store, HALF.to_text(), "i0")
    needs = Needs(KEYS, "b", asyncio.Event().set)
    following = asyncio.create_task(needs.follow(store, await needs.read(store)))
    try:
        await needs.look(store, "")
        await store.delete(slices_prefix(KEYS, "b") + "i0")
        await tell(store, "", "other", host="b")
        while needs.of(HALF.schema) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await store.delete(slices_prefix(KEYS, "b") + "other")
        await tell(store, HALF.to_text(), "i1")
        while needs.of(HALF.schema) != HALF:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await store.delete(slices_prefix(KEYS, "b") + "i1")
        assert (await needs.read(store), needs.of(HALF.schema))[1] == HALF
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


# by real peers --------------------------------------------------------------------------------------------------------


def test_a_host_fetches_what_is_needed_there_and_the_rest_when_that_grows(hosts: Hosts) -> None:
    say(hosts, "b", HALF)
    hosts.start("abc")
    wait_until(lambda: len(hosts.store.list(KEYS.copy_hosts)[0]) == 3, 60)
    record = hosts.publish("a", WEIGHTS)
    part = part_of(hosts, "b", record.manifest_digest, HALF)
    check(part, FIRST)
    received = hosts.received("b")
    assert received == chunk_bytes(record, HALF)
    hosts.wait_copy("b", record.manifest_digest, "fetching")  # a holder of some chunks, for all others
    whole = hosts.wait_copy("c", record.manifest_digest)
    assert hosts.received("c") == whole.nbytes
    assert 0.4 < received / whole.nbytes < 0.6
    say(hosts, "b", some_of(("layer.3",)), "another")
    both = some_of((*FIRST, "layer.3"))
    check(part_of(hosts, "b", record.manifest_digest, both), (*FIRST, "layer.3"))
    assert hosts.received("b") == chunk_bytes(record, both)
    say(hosts, "b", None, "another")
    copy = hosts.wait_copy("b", record.manifest_digest)
    assert path_of(copy) == Path(part.slot.removeprefix("//b"))  # the same file, now a slot
    assert bytes_of(copy) == bytes_of(whole)
    wait_until(lambda: not hosts.store.list(part_copy_key(KEYS, record.manifest_digest, "b"))[0])


def test_a_peer_that_is_killed_goes_on_with_a_part(hosts: Hosts) -> None:
    """In the middle of the fetch, and after it while an instance reads what is there."""
    say(hosts, "b", HALF)
    hosts.start("a")
    hosts.start("b", *SLOW)
    record = hosts.publish("a", WEIGHTS)
    digest = record.manifest_digest
    hosts.wait_copy("b", digest, "fetching")
    wait_until(lambda: hosts.received("b") >= 2 * CHUNK)
    hosts.kill("b")
    hosts.start("b")
    part = part_of(hosts, "b", digest, HALF)
    resumed = wait_until(lambda: hosts.metric("b", "hotswap_peer_chunks_resumed_total"))
    assert resumed >= 2
    assert hosts.received("b") <= chunk_bytes(record, HALF) - (resumed - 1) * CHUNK
    check(part, FIRST)
    path = Path(part.slot.removeprefix("//b"))
    with SlotReader.open(path, manifest_digest=digest, part=True) as held:
        hosts.kill("b")
        wait_until(lambda: "b" not in hosts.copies(digest))
        hosts.start("b")
        assert part_of(hosts, "b", digest, HALF).slot == part.slot
        assert hosts.received("b") == 0
        say(hosts, "b", None)
        copy = hosts.wait_copy("b", digest)
        assert path_of(copy) == path
        assert bytes_of(copy) == bytes_of(hosts.wait_copy("a", digest))
        assert bytes(held.buffer("layer.0")) == WEIGHTS["layer.0"].tobytes()


def test_hosts_that_need_the_same_feed_each_other(hosts: Hosts) -> None:
    """Two halves on two hosts each: the source sends each byte about once, and nobody reads what it does not need."""
    halves = {"b": FIRST, "c": FIRST, "d": SECOND, "e": SECOND}
    for host, names in halves.items():
        say(hosts, host, some_of(names))
    hosts.start("abcde")
    wait_until(
        lambda: len({CopyHostRecord.from_json(kv.value).slices for kv in hosts.store.list(KEYS.copy_hosts)[0]}) == 3,
        60,
    )
    record = hosts.publish("a", WEIGHTS)
    for host, names in halves.items():
        check(part_of(hosts, host, record.manifest_digest, some_of(names)), names)
    for host, names in halves.items():
        assert hosts.received(host) == chunk_bytes(record, some_of(names))


async def test_an_instance_waits_until_its_peer_has_what_it_needs(hosts: Hosts, store: Store) -> None:
    more = some_of((*FIRST, "layer.2"))
    say(hosts, "b", HALF)
    hosts.start("ab")
    record = await asyncio.to_thread(hosts.publish, "a", WEIGHTS)
    found = await wait_for_slots(store, KEYS, record, "b", 60.0, HALF.digest)
    assert found.slot == (await asyncio.to_thread(part_of, hosts, "b", record.manifest_digest, HALF)).slot[3:]
    for wanted in ("", more.digest):
        with refused("copy_unavailable"):
            await wait_for_slots(store, KEYS, record, "b", 0.5, wanted)
    waiting = asyncio.create_task(wait_for_slots(store, KEYS, record, "b", 60.0, more.digest))
    await asyncio.to_thread(say, hosts, "b", more)
    assert (await waiting).slot == found.slot


async def test_what_the_peer_cannot_fetch_for_another_instance_holds_nobody_up(store: Store) -> None:
    record = VersionRecord(1, "ready", "//a/dev/shm/x/slot-1", 1, "d" * 32, None, None, "p", 1, 0.0, "", 1)
    copy = CopyRecord("b", "//b/x/slot-9", "d" * 32, 1, "failed", "b:1", 1.0, ErrorInfo("arena_full", "no room"))
    await store.put(KEYS.copy("d" * 32, "b"), copy.to_json())
    with refused("copy_unavailable", match="no room"):
        await wait_for_slots(store, KEYS, record, "b", 10.0, HALF.digest)
    part = PartCopyRecord("b", "//b/x/slot-9", "d" * 32, (HALF.digest,))
    await store.put(part_copy_key(KEYS, "d" * 32, "b"), part.to_json())
    assert (await wait_for_slots(store, KEYS, record, "b", 10.0, HALF.digest)).slot == "/x/slot-9"
    with refused("copy_unavailable", match="no room"):
        await wait_for_slots(store, KEYS, record, "b", 10.0, "another")


def test_who_looks_for_versions_on_a_host_does_not_take_a_part(hosts: Hosts) -> None:
    say(hosts, "b", HALF)
    hosts.start("ab")
    record = hosts.publish("a", WEIGHTS)
    part = part_of(hosts, "b", record.manifest_digest, HALF)
    path = Path(part.slot.removeprefix("//b"))
    with SlotReader.open(path, part=True) as reader, refused("digest_mismatch"):
        reader.verify_all()  # the rest is not here, and says so
    head = Head.of_part(memoryview(path.read_bytes()), record.manifest_digest)
    assert head is not None
    assert parts_of(head.manifest).keys() == WEIGHTS.keys()
    assert Head.of_part(memoryview(path.read_bytes()), "0" * 32) is None
    for host, state in (("a", "ready"), ("b", "fetching")):
        hosts.wait_copy(host, record.manifest_digest, state)
    for name, value in hosts.environment("b").items():
        hosts._monkeypatch.setenv(name, value)
    with pytest.raises(ManifestError, match="on host a"), opened(Records.read(hosts.store_url, MODEL).ready(None)):
        pass


def test_without_digests_of_chunks_everything_is_fetched(tmp_path: Path, transport: Transport) -> None:
    """As of a release that did not take them: what has arrived can then be trusted only as a whole."""
    layout = Layout.of(SCHEMA)
    entries = {
        name: TensorEntry(spec.dtype, spec.shape, layout.offsets[name], spec.nbytes, "0" * 32)
        for name, spec in SCHEMA.tensors.items()
    }
    parts = sum(len(cut_ends(layout.offsets[name], spec.nbytes, 1 << 16)) for name, spec in SCHEMA.tensors.items())
    for metadata in ({}, {CUTS: Cuts(1 << 16, ("0" * 32,) * parts).to_text()}):
        manifest = Manifest(1, MODEL, entries, metadata=metadata)
        head = Head.parse(manifest.to_json(), manifest.digest)
        shelf = Shelf(Arena(tmp_path / str(len(metadata))), MODEL, Regions(transport))
        shelf.needs = lambda found: HALF if found == SCHEMA.digest else None
        shape = head.shape or Shape(layout.total_nbytes, 1 << 16, ("0" * 32,) * -(-layout.total_nbytes // (1 << 16)))
        copy, _ = shelf.claim(manifest.digest, "", shape, head)
        needed = HALF.chunks(shape.nbytes, shape.chunk_nbytes) if metadata else Bitmap.full(shape.chunks).bits
        assert shelf.settled(copy).bits == Bitmap.full(shape.chunks).bits & ~needed
        copy.is_open = True
        assert not shelf.has(copy.digest)
        for chunk in Bitmap(shape.chunks, needed):
            copy.came(chunk)
        assert shelf.has(copy.digest) == (not copy.journal.done.complete)  # with all of it, it is to become a slot
        shelf.close()
