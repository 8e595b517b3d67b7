"""A version that ranks of several hosts write: each host into a slot of its own, of which most chunks may stay there.

Where a tensor lies in a slot follows from the schema alone, so a trainer's hosts can write one version into several
slots. Chunks whose tensors were all written on one host stay there if that host's peer serves them. The others, of
tensors that are cut across hosts, at the borders between the hosts' tensors, and of hosts without a peer, go to the
publisher's slot, which lacks those that stay elsewhere. All of this happens before anybody is told of the version:

    hosts, kept = publisher.share_hosts(), publisher.kept()                   the publisher's host, who has a draft
    share = HostShare(hosts[host], MODEL, draft.version, draft.schema, kept)  one rank of each of those hosts
    writer = weightsync.join(share.ticket, rank)                              every rank of such a host; seal() as ever
    part, offer = share.settle(parts, regions, transport.endpoint)            that rank, from what its host's sealed
    Gatherer(transport, regions).gather(offer, draft)                         beside the draft
    raw = draft.spread(parts, {host: part})                                   the manifest, to be brought to each host
    share.accept(raw)                                                         there: its peer will find it
    draft.commit()                                                            when all have

On a host without a peer nothing stays. Its slot is a `MemorySlot` of the rank that makes the share. Its part goes to
`Draft.spread` or `Draft.commit` as one of the publisher's own host does, and `accept` is not needed there.

From `accept` on the version's record alone decides: whoever fails then cannot know whether there is one. So nobody
takes a share away. One that no record names is not looked for, and its slot is as good as any for what comes next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash

from weightsync.control.parts import BASE
from weightsync.errors import ArenaError, PublishError, SlotBusy
from weightsync.format.manifest import Layout, Schema, digest_of, write_header
from weightsync.memory.arena import MAPPINGS, Arena, SlotLock
from weightsync.peer.chunks import Bitmap, Head
from weightsync.peer.shelf import Journal, Regions, copies_pool, leave, lock_of
from weightsync.publish.writer import SealedPart, Sums, Ticket, blank, digested
from weightsync.transport import Piece, Transport

READ_NBYTES, READ_PIECES = 64 << 20, 1024  # of one read
TIMEOUT_S = 120.0


class Strip(msgspec.Struct, frozen=True, array_like=True):
    """`rows` rows of `run` bytes in a slot, the first from byte `first` on, each `step` bytes after the one before.
    `digest` is xxh3_128 of their bytes in a row."""

    first: int
    run: int
    step: int
    rows: int
    digest: str = ""

    def pieces(self) -> Iterator[Piece]:
        for row in range(self.rows):
            start = self.first + row * self.step
            yield Piece(start, start, self.run)

    def sum(self, slot: memoryview) -> str:
        hasher = xxhash.xxh3_128()
        for piece in self.pieces():
            hasher.update(slot[piece.local_offset : piece.local_offset + piece.nbytes])
        digest: str = hasher.hexdigest()
        return digest


class Rest(msgspec.Struct, frozen=True):
    """The strips of a host's slot for others to read. `endpoint` and `region` may hold a token, as an `Offer`'s may."""

    endpoint: bytes
    region: bytes
    strips: tuple[Strip, ...]


def chunks_of(schema: Schema, layout: Layout, names: Iterable[str]) -> int:
    """Bits of the chunks that have something of tensors `names`."""
    found = 0
    for name in names:
        if nbytes := schema.tensors[name].nbytes:
            first = layout.offsets[name] // layout.chunk_nbytes
            last = (layout.offsets[name] + nbytes - 1) // layout.chunk_nbytes
            found |= (1 << last + 1) - (1 << first)
    return found


def staying(schema: Schema, layout: Layout, known: Iterable[str]) -> int:
    """Bits of the chunks that stay where all of the tensors `known` were written: no other tensor has a part of one."""
    here = set(known)
    return chunks_of(schema, layout, here) & ~chunks_of(schema, layout, schema.tensors.keys() - here)


class MemorySlot:
    """The slot of a host without a peer, for one version after the other: memory of this process, of which only what
    is written takes room. Other processes of this host and PID namespace can join it."""

    def __init__(self, schema: Schema) -> None:
        """Raises OSError."""
        self._fd = os.memfd_create("hotswap-share")
        self._path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        os.ftruncate(self._fd, Layout.of(schema).total_nbytes)

    def claim(self) -> SlotLock:
        """Raises SlotBusy while ranks write the version before."""
        lock = SlotLock.try_exclusive(self._path)
        if lock is None:
            raise SlotBusy("a rank of this host still writes the version before: wait until it has sealed its part")
        return lock

    def close(self) -> None:
        os.close(self._fd)


def _claimed(directory: Path, model: str, nbytes: int, kept: Collection[str]) -> SlotLock:
    """A slot of an arena with a peer. Raises ArenaError, OSError."""
    if not lock_of(directory, model).exists():
        raise ArenaError(
            f"no peer of {model} has been in {directory}: share it with the trainer's ranks", code="arena_unavailable"
        )
    left = Journal.all_in(directory, model)
    in_use = {str(journal.slot) for journal in left if not journal.share or journal.digest in kept}
    lock = Arena(directory).claim(copies_pool(model, BASE), nbytes, in_use)
    Journal.drop(lock.path)  # of a share that no record names
    return lock


class HostShare:
    """A slot on a host that is not the publisher's, for its ranks to write into, and what becomes of it.

    It is held until `close`: until then nobody reuses it, whether a peer has found it or not.
    """

    def __init__(
        self, where: Path | str | MemorySlot, model: str, version: int, schema: Schema, kept: Collection[str]
    ) -> None:
        """`where` is the host's arena, as its peer sees it; with a `MemorySlot` nothing stays there. `kept` is what
        `Publisher.kept` says of the versions whose shares must stay: their peer may be away, and hold none. Raises
        ArenaError, OSError."""
        self._model, self._schema, self._layout = model, schema, Layout.of(schema)
        self.stays = not isinstance(where, MemorySlot)
        self._settled: tuple[dict[str, Sums], Bitmap] | None = None
        if isinstance(where, MemorySlot):
            self._lock = where.claim()
        else:
            self._lock = _claimed(Path(where), model, self._layout.total_nbytes, kept)
        try:
            self._lock.admit_writers()
            self._mapping = MAPPINGS.get(self._lock.path, self._lock.fd)
            draft = blank(schema, self._layout, version, model)
            write_header(self._mapping, draft, self._layout)
            self.ticket: Ticket = {"slot": str(self._lock.path), "version": version, "draft": draft.digest}
        except BaseException:
            self._lock.release()
            raise

    def settle(
        self, parts: Sequence[SealedPart], regions: Regions, endpoint: bytes
    ) -> tuple[SealedPart, dict[str, Any]]:
        """From what all ranks of this host have sealed: what goes to `Draft.spread`, and to `Gatherer.gather`.

        Raises PublishError, TransportUnavailable.
        """
        with memoryview(self._mapping) as slot:
            known, slices = digested(self._schema, self._layout, parts, slot)
            stay = staying(self._schema, self._layout, known) if self.stays else 0
            strips = [*self._borders(known, stay), *_cut(parts, known)]
            strips = [msgspec.structs.replace(strip, digest=strip.sum(slot)) for strip in strips]
        self._settled = known, Bitmap(-(-self._layout.total_nbytes // self._layout.chunk_nbytes), stay)
        mapped = regions.of(self._lock.path, self._lock.fd, writable=True)
        rest = Rest(endpoint, mapped.region.descriptor, tuple(strips))
        part = {"sums": {name: [*sums] for name, sums in known.items()}, "slices": slices, "stay": f"{stay:x}"}
        return part, msgspec.to_builtins(rest)

    def _borders(self, known: Mapping[str, Sums], stay: int) -> Iterator[Strip]:
        """The bytes of tensors that are all here in chunks that do not stay."""
        size = self._layout.chunk_nbytes
        for name in known:
            start, end = self._layout.offsets[name], self._layout.offsets[name] + self._schema.tensors[name].nbytes
            while start < end:
                stop = min(end, (start // size + 1) * size)
                if not stay >> start // size & 1:
                    yield Strip(start, stop - start, 0, 1)
                start = stop

    def accept(self, raw: bytes) -> None:
        """Leave the chunks that stay to this host's peer; `raw` is the manifest that `Draft.spread` gave.

        Raises ManifestError, PublishError when it is another version's than was written here, OSError.
        """
        assert self._settled is not None, "settle first"
        known, stay = self._settled
        head = Head.parse(raw, digest_of(raw), self._layout.total_nbytes)
        tensors = head.manifest.tensors
        if head.manifest.schema != self._schema or any(tensors[n].digest != sums.digest for n, sums in known.items()):
            raise PublishError("the manifest is not of what was written on this host: publish the version again")
        if stay.bits:
            with memoryview(self._mapping) as slot:
                leave(self._lock, slot, head, self._model, BASE, stay)

    def close(self) -> None:
        """Let go of the slot; what the peer has found, it holds itself. Twice is fine."""
        self._lock.release()


def _cut(parts: Iterable[SealedPart], known: Mapping[str, Sums]) -> Iterator[Strip]:
    """The slices of tensors that are not all here."""
    for part in parts:
        for name, strips in part["strips"].items():
            if name not in known:
                yield from (Strip(*strip) for strip in strips if strip[1] * strip[3])


class Slot(Protocol):
    """A Draft, or a SlotWriter."""

    @property
    def lock(self) -> SlotLock: ...

    @property
    def layout(self) -> Layout: ...


class Gatherer:
    """Reads what does not stay on a host into the slot beside this rank, at the same places."""

    def __init__(self, transport: Transport, regions: Regions, *, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s` is for one read, of 64 MB at most."""
        self._transport, self._regions, self._timeout_s = transport, regions, timeout_s

    def gather(self, offer: Mapping[str, Any], slot: Slot) -> int:
        """Returns how many bytes there were. The other host must keep its slot as it is meanwhile.

        Raises TransferError, and PublishError for an offer that cannot be read, or bytes that are not those offered.
        """
        try:
            rest = msgspec.convert(offer, Rest)
        except msgspec.ValidationError as error:
            raise PublishError(f"a host's offer cannot be read: {error}") from error
        if not rest.strips:
            return 0
        for strip in rest.strips:
            if strip.first < slot.layout.header_nbytes or min(strip.run, strip.rows) < 1 or strip.step < 0:
                raise PublishError("a host's offer names bytes that are no tensor's")
        into = self._regions.of(slot.lock.path, slot.lock.fd, writable=True)
        pieces = (piece for strip in rest.strips for piece in strip.pieces())
        with contextlib.closing(self._transport.connect(rest.endpoint)) as link:
            for batch in _batches(pieces):
                link.read(into.region, rest.region, batch, self._timeout_s)
        for strip in rest.strips:
            if strip.sum(into.view) != strip.digest:
                raise PublishError("what came from another host is not what was written there: look at its memory")
        return sum(strip.run * strip.rows for strip in rest.strips)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        for start in range(0, piece.nbytes, READ_NBYTES):
            size = min(READ_NBYTES, piece.nbytes - start)
            if batch and (len(batch) == READ_PIECES or nbytes + size > READ_NBYTES):
                yield batch
                batch, nbytes = [], 0
            batch.append(Piece(piece.local_offset + start, piece.remote_offset + start, size))
            nbytes += size
    if batch:
        yield batch
