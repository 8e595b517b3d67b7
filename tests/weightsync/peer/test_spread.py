"""A version that stays on the hosts that wrote it: which chunks, which bytes move, and the manifest of one host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsync
from tests.waiting import wait_until
from tests.weightsync.codes import refused
from tests.weightsync.fleet import running_fleet
from tests.weightsync.peer.hosts import CHUNK, MODEL, Fetching, Hosts, bytes_of, newest
from tests.weightsync.peer.spreading import ROWS, Ranks, model, schema_of, spread, write
from weightsync import Adapter, SlotReader
from weightsync.errors import ManifestError, PublishError
from weightsync.format.manifest import Layout
from weightsync.peer.chunks import Bitmap
from weightsync.peer.shelf import Regions
from weightsync.publish.spread import Gatherer, HostShare, chunks_of, staying
from weightsync.transport import Transport


def test_chunks_stay_whose_tensors_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of two hosts meet within a chunk, which stays on neither."""
    monkeypatch.setattr("weightsync.format.manifest.CHUNK", CHUNK)
    schema = schema_of(model(4))
    layout = Layout.of(schema)
    names = list(schema.tensors)
    here, there = staying(schema, layout, names[:2]), staying(schema, layout, names[2:])
    border = chunks_of(schema, layout, names[1:2]) & chunks_of(schema, layout, names[2:3])
    assert border.bit_count() == 1
    assert here & there == 0
    assert here | there | border == chunks_of(schema, layout, names)
    assert staying(schema, layout, []) == 0
    assert staying(schema, layout, names) == chunks_of(schema, layout, names)


def test_every_layout_gives_the_same_manifest_and_bytes(
    hosts: Hosts, transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks write layers of their own, and share two tensors across their hosts; two ranks share one within."""
    publisher = hosts.publisher("a")
    tensors = model(8)

    def rank(writer: Any, number: int) -> None:
        if number == 0:
            write(writer, tensors, ["layer.00", "layer.01"])
            writer.write_slice("layer.02", tensors["layer.02"][: ROWS // 2], 0)
            writer.write_slice("layer.03", tensors["layer.03"][:, :32], 0, dim=1)
        elif number == 1:
            writer.write_slice("layer.02", tensors["layer.02"][ROWS // 2 :], ROWS // 2)
            writer.write_slice("layer.03", tensors["layer.03"][:, 32:], 32, dim=1)
            write(writer, tensors, ["layer.04", "layer.05", "layer.06"])
            writer.write_slice("layer.07", tensors["layer.07"][:, :16], 0, dim=1)
        else:
            writer.write_slice("layer.07", tensors["layer.07"][:, 16:], 16, dim=1)

    def number_again() -> None:  # the same version number, so that the manifests can be equal
        publisher._store.delete(publisher._keys.counter)

    with publisher.begin(schema_of(tensors)) as draft:
        others = [weightsync.join(draft.ticket, number) for number in (1, 2)]
        for number, writer in enumerate([draft, *others]):
            rank(writer, number)
        manifest, one_host = draft._complete([other.seal() for other in others]), bytes(draft._claim.mapping)
    number_again()

    regions = Regions(transport)
    draft = publisher.begin(schema_of(tensors))
    draft._claim.mapping[:] = b"\xff" * draft.layout.total_nbytes  # it may be the slot from before
    ranks = Ranks(hosts.arena("b"), draft, [1, 2])
    for number, writer in enumerate([draft, *ranks.writers]):
        rank(writer, number)
    part, offer = ranks.settle(transport, regions)
    gathered = Gatherer(transport, regions).gather(offer, draft)
    raw = draft.spread([], {"b": part})
    ranks.share.accept(raw)
    assert raw == manifest.to_json()
    stay = Bitmap(-(-draft.layout.total_nbytes // CHUNK), int(part["stay"], 16))
    assert len(stay) >= 3
    cut = 2 * tensors["layer.02"].nbytes // 2
    assert cut <= gathered <= cut + 2 * CHUNK, "more than the cut tensors and the chunks at the border"
    theirs = Path(ranks.share.ticket["slot"]).read_bytes()
    mine = bytes(draft._claim.mapping)
    start = draft.layout.header_nbytes
    for chunk in range(stay.chunks):
        at = slice(max(start, chunk * CHUNK), (chunk + 1) * CHUNK)
        assert (theirs if chunk in stay else mine)[at] == one_host[at], chunk
    version = draft.commit()
    (record,) = [v for v in publisher.versions() if v.version == version]
    assert record.shares == ("b",)
    ranks.share.close()


def test_what_came_is_compared_with_what_was_written(hosts: Hosts, transport: Transport) -> None:
    publisher, regions = hosts.publisher("a"), Regions(transport)
    tensors = model()
    with publisher.begin(schema_of(tensors)) as draft:
        ranks = Ranks(hosts.arena("b"), draft, [1])
        write(ranks.writers[0], tensors, sorted(tensors)[6:])
        _, offer = ranks.settle(transport, regions)
        ranks.share._mapping[offer["strips"][0][0]] ^= 1
        with pytest.raises(PublishError, match="not what was written"):
            Gatherer(transport, regions).gather(offer, draft)
        for strips in ([[0, 64, 0, 1, ""]], [[1 << 20, 0, 0, 1, ""]], [["x"]]):
            with pytest.raises(PublishError):
                Gatherer(transport, regions).gather(offer | {"strips": strips}, draft)
        with pytest.raises(ManifestError):
            ranks.share.accept(b"{}")
        ranks.share.close()


def test_a_directory_that_no_peer_sees_gets_no_share(hosts: Hosts, tmp_path: Path) -> None:
    """Where ranks do not share the arena with their host's peer, the same path is another directory, or none."""
    publisher = hosts.publisher("a")
    with publisher.begin(schema_of(model())) as draft, refused("arena_unavailable", match="share it"):
        HostShare(tmp_path / "absent", MODEL, draft.version, draft.schema, [])
    assert not (tmp_path / "absent").exists()


def test_hosts_without_a_peer_or_with_an_older_one_are_gathered_from(hosts: Hosts) -> None:
    publisher = hosts.publisher("a")
    assert publisher.share_hosts() == {}
    hosts.start("bc")
    store, prefix = publisher._store, f"copies/{MODEL}/takers/"
    wait_until(lambda: len(store.list(prefix)[0]) == 2, 60)
    assert publisher.share_hosts() == {}, "no peer on the publisher's own host"
    hosts.start("a")
    wait_until(lambda: publisher.share_hosts() == {host: str(hosts.arena(host)) for host in "bc"}, 60)
    publisher._signer = object()  # type: ignore[assignment]
    assert publisher.share_hosts() == {}, "a signed version lies in one slot"
    publisher._signer = None
    store.delete(f"{prefix}c")
    assert publisher.share_hosts() == {}, "a peer of a release that knows nothing of it"


def test_peers_fetch_each_chunk_from_who_wrote_it(hosts: Hosts, transport: Transport) -> None:
    """Of a version of two hosts hardly anything is gathered; both serve it, and all three have all of it."""
    hosts.start("abc", "--limit-gbps", 0.08)
    publisher = hosts.publisher("a")
    for step in range(3):
        tensors = model(40, seed=step)
        version, gathered, share = spread(publisher, transport, hosts.arena("b"), tensors)
        publisher.activate(version, wait=False)
        record = newest(publisher)
        images = [bytes_of(hosts.wait_copy(host, record.manifest_digest)) for host in "abc"]
        share.close()
        assert images[0] == images[1] == images[2]
        assert gathered < 2 * CHUNK < record.nbytes / 20
        with SlotReader.open(record.slot.removeprefix("//a"), manifest_digest=record.manifest_digest) as reader:
            assert all(bytes(reader.buffer(name)) == tensor.tobytes() for name, tensor in tensors.items())
    for writer, others in (("a", "bc"), ("b", "ac")):  # about half of each version, which no other host has at first
        came = {host: hosts.metric(host, "hotswap_peer_received_bytes_total", holder=writer) for host in others}
        assert sum(came.values()) > record.nbytes, (writer, came)
    slots = [path for path in hosts.arena("b").iterdir() if path.name.startswith("slot-")]
    assert len(slots) <= 4


def test_a_share_outlives_its_peer(hosts: Hosts, transport: Transport) -> None:
    """The peer of the second host is killed and started again: the same chunks are there, and nobody else had them."""
    hosts.start("ab")
    publisher = hosts.publisher("a")
    wait_until(lambda: "b" in publisher.share_hosts(), 60)
    hosts.kill("a")
    hosts.kill("b")
    version, _, share = spread(publisher, transport, hosts.arena("b"), model())
    share.close()
    record = newest(publisher)
    publisher.activate(version, wait=False)
    hosts.start("b")
    hosts.wait_copy("b", record.manifest_digest, "fetching")
    hosts.start("a")
    hosts.arrived("b", record.manifest_digest)


async def test_a_writer_that_is_gone_costs_one_version(hosts: Hosts, transport: Transport) -> None:
    """Its peer is killed before anybody has read its chunks: the swap is given up and says why, and the version before
    serves on. When the peer is back, so is the version."""
    hosts.start("abc")
    publisher = hosts.publisher("a")
    await asyncio.to_thread(wait_until, lambda: set(publisher.share_hosts()) == {"b", "c"}, 60)
    async with running_fleet(hosts.store_url) as fleet:
        fleet.coordinator()
        engine = await fleet.instance("on-c", Fetching(fleet.store(), "c"))

        def swap(seed: int, *, killed: str = "") -> int:
            if killed:
                hosts.kill(killed)
            version, _, share = spread(publisher, transport, hosts.arena("b"), model(seed=seed))
            try:
                publisher.activate(version, timeout_s=90)
            finally:
                share.close()
            return version

        first = await asyncio.to_thread(swap, 0)
        with refused("swap_aborted", match="host b, which wrote some, is gone"):
            await asyncio.to_thread(swap, 1, killed="b")
        assert engine.running == first
        record = newest(publisher)
        hosts.start("b")
        await asyncio.to_thread(hosts.wait_copy, "b", record.manifest_digest, "fetching")
        await asyncio.to_thread(publisher.activate, record.version, timeout_s=90)
        assert [version for call, version in engine.calls if call == "commit"] == [first, record.version]


def test_an_adapter_goes_onto_a_version_that_is_whole_nowhere(hosts: Hosts, transport: Transport) -> None:
    """No host fetches the version, as none has asked for it; as long as both shares are offered it can be built on."""
    hosts.start("ab")
    publisher = hosts.publisher("a")
    wait_until(lambda: "b" in publisher.share_hosts(), 60)
    version, _, share = spread(publisher, transport, hosts.arena("b"), model())
    record = newest(publisher)
    for slot in (record.slot.removeprefix("//a"), share.ticket["slot"]):
        with pytest.raises(ManifestError, match="only slices"):
            SlotReader.open(slot, manifest_digest=record.manifest_digest)
    for host in "ab":
        hosts.wait_copy(host, record.manifest_digest, "fetching")
    adapter = Adapter({"x.lora_A.weight": np.zeros((1, 64), np.float32)}, {"r": 1})
    onto: dict[str, Any] = {"part": "lora/x", "onto": version, "activate": False}
    publisher.publish(adapter, **onto)
    carried = newest(publisher)
    assert (carried.base_version, carried.slot, carried.shares) == (version, record.slot, ("b",))
    hosts.kill("b")
    wait_until(lambda: "b" not in hosts.copies(record.manifest_digest))
    with refused("bad_part"):
        publisher.publish(adapter, **onto)
    share.close()
