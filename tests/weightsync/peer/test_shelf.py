"""What a fetch leaves behind for the next process: read strictly, trusted in nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weightsync.errors import ManifestError
from weightsync.memory.arena import Arena
from weightsync.peer.chunks import Bitmap, Head, Shape, digests_of
from weightsync.peer.messages import Key
from weightsync.peer.shelf import Journal, Regions, Shelf
from weightsync.transport import Transport

KEY = Key("d" * 32, "b" * 32)  # a delta: bytes without a header
CHUNK = 4096


def shape_of(content: bytes) -> Shape:
    with ThreadPoolExecutor(1) as pool:
        return Shape(len(content), CHUNK, digests_of(memoryview(content), CHUNK, pool))


CONTENT = b"".join(bytes([n]) * CHUNK for n in range(8))
SHAPE = shape_of(CONTENT)


def found(directory: Path) -> Journal | None:
    return next(Journal.all_in(directory, "demo"), None)


def test_chunks_are_remembered(tmp_path: Path) -> None:
    journal = Journal.begin(tmp_path / "slot-1", "demo", "", KEY, SHAPE)
    for chunk in (3, 1):
        journal.add(chunk)
    again = found(tmp_path)
    assert again is not None
    assert (again.slot, again.key, again.shape, sorted(again.done)) == (tmp_path / "slot-1", KEY, SHAPE, [1, 3])
    assert next(Journal.all_in(tmp_path, "another"), None) is None
    again.keep(Bitmap(8, 0b1000))
    assert sorted(found(tmp_path).done) == [3]  # type: ignore[union-attr]
    again.remove()
    again.remove()
    assert found(tmp_path) is None


@pytest.mark.parametrize("end", [b"5", b"99\n", b"x\n", b"-1\n", b"\n\n", 5000 * b"1" + b"\n"])
def test_a_line_that_is_cut_short_or_wrong_counts_for_nothing(tmp_path: Path, end: bytes) -> None:
    journal = Journal.begin(tmp_path / "slot-1", "demo", "", KEY, SHAPE)
    journal.add(2)
    with journal.path.open("ab") as file:
        file.write(end)
    assert sorted(found(tmp_path).done) == [2]  # type: ignore[union-attr]


@pytest.mark.parametrize("head", [b"", b"{}", b"null", b'{"model":"demo"', b"\xff\xfe"])
def test_what_is_no_journal_is_passed_over(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "fetch-slot-1").write_bytes(head + b"\n1\n")
    assert found(tmp_path) is None


def test_only_chunks_with_the_right_bytes_are_taken_over(tmp_path: Path, transport: Transport) -> None:
    """The process died between the note and the bytes, or somebody wrote there."""
    directory = tmp_path / "arena"
    first = Shelf(Arena(directory), "demo", Regions(transport))
    copy, resumed = first.claim(KEY, "", SHAPE, None)
    assert resumed == 0
    copy.mapped.view[: 4 * CHUNK] = CONTENT[: 4 * CHUNK]
    for chunk in (0, 1, 2, 5):
        copy.journal.add(chunk)
    copy.mapped.view[CHUNK + 7] = 0xFF
    first.close()
    second = Shelf(Arena(directory), "demo", Regions(transport))
    second.adopt()
    assert second.find(KEY) is None
    again, resumed = second.claim(KEY, "", SHAPE, None)
    assert (again.path, resumed, sorted(again.journal.done)) == (copy.path, 2, [0, 2])
    second.drop(KEY)
    assert not list(directory.glob("fetch-*"))


def test_what_is_left_of_something_else_is_given_up(tmp_path: Path, transport: Transport) -> None:
    first = Shelf(Arena(tmp_path / "arena"), "demo", Regions(transport))
    copy, _ = first.claim(KEY, "", SHAPE, None)
    copy.journal.add(0)
    first.close()
    second = Shelf(Arena(tmp_path / "arena"), "demo", Regions(transport))
    second.adopt()
    changed = Shape(SHAPE.nbytes, CHUNK, ("0" * 32, *SHAPE.digests[1:]))
    _, resumed = second.claim(KEY, "", changed, None)
    assert resumed == 0
    third = Shelf(Arena(tmp_path / "arena"), "demo", Regions(transport))
    second.close()
    third.adopt()
    third.forget(set())
    assert not list((tmp_path / "arena").glob("fetch-*"))


def test_what_is_claimed_while_it_is_given_up_stays_claimed(
    tmp_path: Path, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Shelf(Arena(tmp_path / "arena"), "demo", Regions(transport))
    first.claim(KEY, "", SHAPE, None)[0].journal.add(0)
    first.close()
    second = Shelf(Arena(tmp_path / "arena"), "demo", Regions(transport))
    second.adopt()

    def claimed(_: Key) -> bool:
        """The slot is here, so the difference is not wanted; but another thread makes it anew just now."""
        second.claim(KEY, "", SHAPE, None)
        return True

    monkeypatch.setattr(second, "has", claimed)
    second.forget({Key(KEY.digest)})
    assert second.copies[KEY].journal.path.exists()


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
