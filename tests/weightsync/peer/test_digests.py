"""The manifest tells whether a chunk is right; peers of the release before it did are served and read from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.weightsync.peer.hosts import CHUNK, MODEL, newest
from tests.weightsync.peer.served import GUARD_S, Reader, Served, slot_served
from weightsync import Publisher, SlotReader
from weightsync.errors import ManifestError, PublishError
from weightsync.format.manifest import CUTS, Cuts, Layout, Manifest, Schema, TensorEntry, TensorSpec, cut_ends
from weightsync.peer import serve
from weightsync.peer.chunks import Head, Shape, digests_of
from weightsync.peer.fetch import _finish
from weightsync.peer.messages import Open, Opened
from weightsync.publish import draft as drafts
from weightsync.transport import Transport


def without_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish as the release before did."""
    assemble = drafts.assemble

    def older(manifest: Manifest, *rest: Any) -> Manifest:
        made = assemble(manifest, *rest)
        return dataclasses.replace(made, metadata=manifest.metadata)

    monkeypatch.setattr(drafts, "assemble", older)


async def opened_as_before(served: Served) -> Opened:
    """By a reader that wants all digests from the holder."""
    wish = Open(MODEL, served.digest, "b", ("tcp",))
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"http://{served.address}/v1/open", content=msgspec.json.encode(wish))
    return msgspec.json.decode(answer.raise_for_status().content, type=Opened)


async def test_a_holder_reads_no_byte_before_it_offers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "digests_of", lambda *_: pytest.fail("the slot is digested again"))
    opened = await served.client.open("a", served.address, served.digest)
    assert (opened.digests, opened.chunk_nbytes) == ((), CHUNK)


def test_every_byte_of_every_chunk_counts(
    store_url: str, arena_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors within a chunk, ending with one, over two and over many, empty ones, in slices, and from two ranks."""
    monkeypatch.setattr("weightsync.format.manifest.CHUNK", 8192)
    rng = np.random.default_rng(0)
    tensors = {f"t{n:02}": rng.integers(0, 256, size, np.uint8) for n, size in enumerate((1, 0, 8000, 9000, 64, 50000))}
    sliced = rng.standard_normal((64, 200), np.float32)
    schema = [(name, str(t.dtype), t.shape) for name, t in tensors.items()] + [("s", "float32", sliced.shape)]
    with Publisher(store_url, model=MODEL) as publisher, publisher.begin(schema) as draft:
        for name, tensor in tensors.items():
            draft.write(name, tensor)
        draft.write_slice("s", sliced[:, :77], 0, 1)
        draft.write_slice("s", sliced[:, 77:], 77, 1)
        draft.commit()
        path = Path(newest(publisher).slot)
    with SlotReader.open(path) as reader:
        head, data = Head.parse(reader.manifest.to_json(), reader.manifest_digest), bytearray(path.read_bytes())
    assert head.shape == Shape(len(data), 8192)
    ranges = sorted((start, end) for parts in head.parts for start, end, _ in parts)
    assert sum(end - start for start, end in ranges) == sum(t.nbytes for t in tensors.values()) + sliced.nbytes
    assert all(start // 8192 == (end - 1) // 8192 for start, end in ranges if end > start)
    with memoryview(data) as view:
        assert all(head.shape.is_right(view, chunk, head) for chunk in range(head.shape.chunks))
    for start, end in ranges:
        for at in {start, end - 1} if end > start else ():
            data[at] ^= 1
            with memoryview(data) as view:
                wrong = [chunk for chunk in range(head.shape.chunks) if not head.shape.is_right(view, chunk, head)]
            assert wrong == [at // 8192]
            data[at] ^= 1


async def test_an_older_reader_is_told_the_digests_of_all_chunks(served: Served) -> None:
    opened = await opened_as_before(served)
    with ThreadPoolExecutor(1) as pool:
        assert opened.digests == digests_of(memoryview(served.path.read_bytes()), CHUNK, pool)
    again = await served.client.open("a", served.address, served.digest)
    assert again.digests in ((), opened.digests)


async def test_an_older_reader_waits_for_a_copy_to_be_whole(reader: Reader) -> None:
    """The part that a copy has so far may be read by those that know the manifest."""
    copy = await reader.claim()
    await reader.sources.close()
    served = reader.served
    served.tickets._shelf.published.clear()
    served.tickets._shelf.copies[served.digest] = copy
    await served.client.open("a", served.address, served.digest)
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        await opened_as_before(served)


@pytest.mark.parametrize("older", ["version", "holder"])
async def test_what_the_release_before_published_or_holds_is_fetched(
    older: str,
    store_url: str,
    arena_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: Transport,
    tmp_path: Path,
) -> None:
    """A holder of before digests all chunks and says so, whoever asks."""
    if older == "version":
        without_cuts(monkeypatch)
    else:
        inner = serve.Tickets.open
        monkeypatch.setattr(serve.Tickets, "open", lambda self, wish, *, told: inner(self, wish, told=False))
    async with slot_served(store_url, arena_directory, monkeypatch) as served:
        reader = Reader(served, transport, tmp_path / "arena")
        copy = await reader.claim()
        assert bool(copy.shape.digests) == (older == "version")
        await reader.fetch(copy).run()
        assert copy.head is not None
        with ThreadPoolExecutor(1) as pool:
            _finish(copy, copy.head, pool)
        assert bytes(copy.mapped.view) == served.path.read_bytes()
        await reader.background.end(GUARD_S)


def test_what_was_signed_elsewhere_keeps_its_metadata(store_url: str, arena_directory: Path) -> None:
    tensors = {"w": np.ones(8, np.float32)}
    with Publisher(store_url, model=MODEL) as publisher:
        with publisher.begin([("w", "float32", (8,))], metadata={"k": "v"}) as draft:
            draft.write("w", tensors["w"])
            draft.signature = "somebody's"
            draft.commit()
        with SlotReader.open(newest(publisher).slot) as reader:
            assert reader.manifest.metadata == {"k": "v"}
        with pytest.raises(PublishError, match="leave it out"):
            publisher.publish(tensors, metadata={CUTS: "1"})


@pytest.mark.parametrize(
    "metadata", [{CUTS: ""}, {CUTS: "x "}, {CUTS: "16 "}, {CUTS: "8192 !"}, {CUTS: "8192 AAAA"}, {CUTS: "8192 "}]
)
def test_digests_of_parts_that_cannot_be(metadata: Mapping[str, str]) -> None:
    """The last one has none for a tensor that is cut."""
    schema = Schema({"w": TensorSpec("uint8", (1 << 17,))})
    offset = Layout.of(schema).offsets["w"]
    entries = {"w": TensorEntry("uint8", (1 << 17,), offset, 1 << 17, "0" * 32)}
    manifest = Manifest(1, MODEL, entries, metadata=metadata)
    with pytest.raises(ManifestError):
        Head.parse(manifest.to_json(), manifest.digest)


@pytest.mark.parametrize(("tensors", "nbytes"), [(2000, 29 << 20), (723, 200 << 20), (4, 10 << 30)])
def test_the_digests_of_parts_take_little_of_the_header(tensors: int, nbytes: int) -> None:
    """Of many experts, of a dense model, and of a few giants, whose chunks grow."""
    schema = Schema({f"model.layers.{n}.weight": TensorSpec("uint8", (nbytes,)) for n in range(tensors)})
    layout = Layout.of(schema)
    parts = sum(len(cut_ends(offset, nbytes, layout.chunk_nbytes)) for offset in layout.offsets.values())
    text = Cuts(layout.chunk_nbytes, ("0" * 32,) * parts).to_text()
    assert len(text) <= layout.room // 4 + 32
    assert Cuts.from_text(text) == Cuts(layout.chunk_nbytes, ("0" * 32,) * parts)
