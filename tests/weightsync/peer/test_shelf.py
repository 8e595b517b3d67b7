"""A peer's shelf, what a fetch leaves there for the next process, and the supply of it, without the peer's process."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.waiting import eventually
from tests.weightsync.peer.hosts import MODEL
from weightsync import Store
from weightsync.control.hosts import slot_name
from weightsync.control.records import CopyRecord, PartRecord, VersionRecord
from weightsync.errors import ManifestError, PeerError, PeerRefused, arena_full, digest_mismatch
from weightsync.memory.arena import Arena
from weightsync.peer.chunks import Bitmap, Head, Shape, digests_of
from weightsync.peer.control import PeerClient
from weightsync.peer.copies import all_parts
from weightsync.peer.messages import Open
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.service import Peer, Supply, Turns
from weightsync.peer.settings import PeerSettings
from weightsync.peer.shelf import Journal, Regions, Shelf
from weightsync.transport import Transport

DIGEST = "d" * 32
CHUNK = 4096


def shape_of(content: bytes) -> Shape:
    with ThreadPoolExecutor(1) as pool:
        return Shape(len(content), CHUNK, digests_of(memoryview(content), CHUNK, pool))


CONTENT = b"".join(bytes([n]) * CHUNK for n in range(8))
SHAPE = shape_of(CONTENT)


def found(directory: Path) -> Journal | None:
    return next(Journal.all_in(directory, "demo"), None)


def test_chunks_are_remembered(tmp_path: Path) -> None:
    journal = Journal.begin(tmp_path / "slot-1", "demo", "", DIGEST, SHAPE)
    for chunk in (3, 1):
        journal.add(chunk)
    again = found(tmp_path)
    assert again is not None
    assert (again.slot, again.digest, again.shape, sorted(again.done)) == (tmp_path / "slot-1", DIGEST, SHAPE, [1, 3])
    assert next(Journal.all_in(tmp_path, "another"), None) is None
    again.keep(Bitmap(8, 0b1000))
    assert sorted(found(tmp_path).done) == [3]  # type: ignore[union-attr]
    again.remove()
    again.remove()
    assert found(tmp_path) is None


@pytest.mark.parametrize("end", [b"5", b"99\n", b"x\n", b"-1\n", b"\n\n", 5000 * b"1" + b"\n"])
def test_a_line_that_is_cut_short_or_wrong_counts_for_nothing(tmp_path: Path, end: bytes) -> None:
    journal = Journal.begin(tmp_path / "slot-1", "demo", "", DIGEST, SHAPE)
    journal.add(2)
    with journal.path.open("ab") as file:
        file.write(end)
    assert sorted(found(tmp_path).done) == [2]  # type: ignore[union-attr]


@pytest.mark.parametrize("head", [b"", b"{}", b"null", b'{"model":"demo"', b"\xff\xfe"])
def test_what_is_no_journal_is_passed_over(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "fetch-slot-1").write_bytes(head + b"\n1\n")
    assert found(tmp_path) is None


def test_a_difference_that_the_release_before_fetched_is_passed_over(tmp_path: Path) -> None:
    journal = Journal.begin(tmp_path / "slot-1", "demo", "", DIGEST, SHAPE)
    first, rest = journal.path.read_bytes().split(b"\n", 1)
    older = json.loads(first) | {"delta_of": "b" * 32}
    journal.path.write_bytes(json.dumps(older).encode() + b"\n" + rest)
    assert found(tmp_path) is None


def test_only_chunks_with_the_right_bytes_are_taken_over(tmp_path: Path, transport: Transport) -> None:
    """The process died between the note and the bytes, or somebody wrote there."""
    directory = tmp_path / "arena"
    first = Shelf(Arena(directory), "demo", Regions(transport))
    copy, resumed = first.claim(DIGEST, "", SHAPE, None)
    assert resumed == 0
    copy.mapped.view[: 4 * CHUNK] = CONTENT[: 4 * CHUNK]
    for chunk in (0, 1, 2, 5):
        copy.journal.add(chunk)
    copy.mapped.view[CHUNK + 7] = 0xFF
    first.close()
    second = Shelf(Arena(directory), "demo", Regions(transport))
    second.adopt()
    assert second.find(DIGEST) is None
    again, resumed = second.claim(DIGEST, "", SHAPE, None)
    assert (again.path, resumed, sorted(again.journal.done)) == (copy.path, 2, [0, 2])
    second.drop(DIGEST)
    assert not list(directory.glob("fetch-*"))


def test_what_is_left_of_something_else_is_given_up(tmp_path: Path, transport: Transport) -> None:
    first = Shelf(Arena(tmp_path / "arena"), "demo", Regions(transport))
    copy, _ = first.claim(DIGEST, "", SHAPE, None)
    copy.journal.add(0)
    first.close()
    second = Shelf(Arena(tmp_path / "arena"), "demo", Regions(transport))
    second.adopt()
    changed = Shape(SHAPE.nbytes, CHUNK, ("0" * 32, *SHAPE.digests[1:]))
    _, resumed = second.claim(DIGEST, "", changed, None)
    assert resumed == 0
    third = Shelf(Arena(tmp_path / "arena"), "demo", Regions(transport))
    second.close()
    third.adopt()
    third.forget(set())
    assert not list((tmp_path / "arena").glob("fetch-*"))


@pytest.mark.parametrize(
    ("nbytes", "chunk", "digests"), [(0, 4096, 0), (4096, 0, 1), (4096, 512, 8), (8192, 4096, 1), (-1, 4096, 0)]
)
def test_sizes_that_another_host_cannot_mean(nbytes: int, chunk: int, digests: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        Shape(nbytes, chunk, ("0" * 32,) * digests)


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"format":2}', b"\xff"])
def test_a_manifest_that_is_not_the_one_asked_for(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        Head.parse(raw, "0" * 32)


# the supply


GUARD_S = 60.0
PART = PartRecord("", 1, "//a/slot", "d" * 32, 1)


@pytest.fixture
async def peer(store: Store, arena_directory: Path, transport: Transport) -> AsyncIterator[Peer]:
    settings = PeerSettings(store.url, MODEL, "me", chunk_nbytes=CHUNK)
    async with PeerClient(MODEL, "me", "tcp", None) as client:
        yield Peer(settings, store, Arena(arena_directory), transport, client, "127.0.0.1:1")


async def test_a_copy_that_is_dropped_is_read_no_more(peer: Peer) -> None:
    """Its slot takes another version next, and its readers would blame this host for wrong bytes."""
    copy, _ = peer._shelf.claim(DIGEST, "", SHAPE, None)
    copy.mapped.view[:] = CONTENT
    copy.whole = True
    opened = await peer._tickets.open(Open(MODEL, DIGEST, "b", ("tcp",)), told=True)
    assert (await peer._tickets.have(opened.ticket)).have == "all"
    peer._shelf.drop(DIGEST)
    with pytest.raises(PeerRefused, match="ticket has ended"):
        await peer._tickets.have(opened.ticket)


async def test_a_slot_that_cannot_be_opened_holds_up_nothing_else(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = VersionRecord(1, "ready", slot_name(tmp_path, "me"), 1, "d" * 32, None, None, "p", 1, 0.0, "", 1)

    def publish(digest: str, path: Path) -> bool:
        raise OSError(errno.EMFILE, "as told")

    monkeypatch.setattr(peer._shelf, "publish", publish)
    await peer._offers.offer(all_parts(version))


async def test_a_slot_whose_publisher_was_killed_before_it_had_pages_is_not_offered(peer: Peer, tmp_path: Path) -> None:
    empty = tmp_path / "slot-empty"
    empty.touch()
    assert not peer._shelf.publish(DIGEST, empty)


class Failing:
    """In place of Bring: it fails with `error`. `others`: whether other hosts have what it brings, at each question."""

    waiting = None

    def __init__(self, error: Exception, *others: bool) -> None:
        self._error, self._others, self.asked = error, list(others), 0

    async def slot(self, part: PartRecord, begun: Callable[[], None]) -> None:
        self.asked += 1
        raise self._error

    def has_others(self, digest: str) -> bool:
        return self._others.pop(0)

    def keep_to(self, wanted: set[str]) -> None: ...

    async def close(self) -> None: ...


class Coming(Failing):
    """A source whose copy is whole, and that has not said so yet."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self.go_on = peer, asyncio.Event()

    async def slot(self, part: PartRecord, begun: Callable[[], None]) -> None:
        copy, _ = self._peer._shelf.claim(part.manifest_digest, "", SHAPE, None)
        copy.whole = True
        await self.go_on.wait()


async def test_a_fetch_that_is_about_to_end_may_say_so(peer: Peer) -> None:
    coming, metrics, said = Coming(peer), PeerMetrics(), asyncio.Event()
    supply = Supply(peer._shelf, coming, metrics, said.set)  # type: ignore[arg-type]
    async with asyncio.timeout(GUARD_S):

        async def has_it() -> bool:
            await supply.steer([PART])
            return peer._shelf.has(PART.manifest_digest)

        await eventually(has_it)
        await supply.steer([PART])
        coming.go_on.set()
        await said.wait()
    assert metrics.fetch_seconds._sum.get() > 0
    await supply.end()


async def failed(supply: Supply) -> bool:
    """Whether it has, after one more turn."""
    await supply.steer([PART])
    return bool(supply.turns.failed)


async def test_a_fault_of_the_peers_own_is_said_and_not_tried_again_at_once(peer: Peer) -> None:
    broken = Failing(KeyError("no such thing"))
    supply = Supply(peer._shelf, broken, PeerMetrics(), lambda: None)  # type: ignore[arg-type]
    await eventually(lambda: failed(supply), GUARD_S)
    assert supply.turns.problems[PART.manifest_digest].code == "internal_error"
    for _ in range(3):
        await supply.steer([PART])
        await asyncio.sleep(0)
    assert broken.asked == 1
    await supply.end()


async def test_a_share_of_this_host_does_not_make_room(peer: Peer) -> None:
    """Other copies do; nobody else may have what ranks of this host wrote, until all of it is here."""
    peer._shelf.claim("f" * 32, "", SHAPE, None)
    share, _ = peer._shelf.claim("s" * 32, "", SHAPE, None)
    share.journal.share = True
    full = Failing(arena_full("/arena", 1, 0))
    supply = Supply(peer._shelf, full, PeerMetrics(), lambda: None)  # type: ignore[arg-type]
    await eventually(lambda: failed(supply), GUARD_S)
    assert list(peer._shelf.copies) == [share.digest]
    share.whole = True
    assert supply._make_room(PART.manifest_digest)
    assert peer._shelf.copies == {}
    await supply.end()


async def test_wrong_contents_fail_a_fetch_only_when_no_other_host_has_it(peer: Peer) -> None:
    """An instance refuses a swap as soon as its peer has failed: one bad host of several must not cost it that."""
    wrong, metrics = Failing(digest_mismatch("a.weight", "0", "1"), True, False), PeerMetrics()
    supply = Supply(peer._shelf, wrong, metrics, lambda: None)  # type: ignore[arg-type]
    seen = []

    async def has_failed() -> bool:
        seen.append((wrong.asked, await failed(supply)))
        return seen[-1][1]

    await eventually(has_failed, GUARD_S)
    assert (1, False) in seen
    assert wrong.asked == 2
    assert metrics.failures.labels("digest_mismatch")._value.get() == 1
    await supply.end()


async def test_who_is_left_out_is_no_other_host(peer: Peer) -> None:
    bring, digest = peer._supply._bring, PART.manifest_digest
    assert not bring.has_others(digest)
    records = {h: CopyRecord(h, f"//{h}/slot", digest, 1, "ready", "127.0.0.1:1", 0.0) for h in ("a", "b")}
    bring._board._records[digest] = records
    bring._leave(digest, "a", 60)
    assert bring.has_others(digest)
    bring._leave(digest, "b", 60)
    assert not bring.has_others(digest)


# whose turn it is


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("weightsync.peer.service.time.monotonic", lambda: self.now)


A, B = "a" * 32, "b" * 32


def test_what_waits_for_a_holder_stands_back_for_another_but_not_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turn = Clock(monkeypatch), Turns()
    assert turn.next([]) is None
    assert turn.next([A, B]) == A
    turn.waits(A, PeerError("nobody has it"))
    assert (turn.next([A, B]), turn.next([A])) == (B, A)
    assert turn.problems[A].code == "peer_error"
    assert A not in turn.failed
    clock.now += 5
    assert turn.next([A, B]) == A  # tried again
    turn.waits(A, PeerError("still"))
    clock.now += 5
    assert turn.next([A, B]) == B  # for longer each time, as B would come to nothing otherwise
    turn.goes_on(A)
    assert turn.next([A, B]) == A
    assert not turn.problems


def test_what_failed_is_tried_again_later_and_stays_failed_until_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turn = Clock(monkeypatch), Turns()
    turn.ended(A, PeerError("no"), failed=True)
    assert turn.next([A]) is None
    clock.now += 5
    assert turn.next([A]) == A
    turn.goes_on(A)
    turn.waits(A, PeerError("nobody"))
    assert turn.failed == {A}
    assert turn.problems[A].message == "no"
    turn.done(A)
    assert (turn.failed, turn.problems) == (set(), {})
    turn.ended(A, PeerError("no"), failed=False)
    clock.now += 0.5
    assert turn.next([A]) == A
    turn.ended(B, ValueError("broken"), failed=True)
    assert turn.problems[B].code == "internal_error"
    turn.keep_to({A})
    assert (set(turn.problems), turn.failed) == ({A}, set())
