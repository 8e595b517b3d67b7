from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from tests.weightsync.tensors import flip
from weightsync import Publisher, Schema, SlotReader
from weightsync.control.records import VersionRecord
from weightsync.errors import DigestMismatch, ManifestError, MissingTensor, ShapeMismatch, SlotBusy
from weightsync.format.manifest import TensorSpec
from weightsync.memory.arena import READ_MAPPINGS, Mappings, SlotLock


def open_(record: VersionRecord) -> SlotReader:
    return SlotReader.open(record.slot, manifest_digest=record.manifest_digest, version=record.version)


def free(path: str) -> bool:
    lock = SlotLock.try_exclusive(Path(path))
    if lock is not None:
        lock.release()
    return lock is not None


def test_a_version_is_read_in_place(record: VersionRecord) -> None:
    with open_(record) as reader:
        reader.verify_all(reader.manifest.schema)
        view = reader.buffer("model.norm.weight")
        assert view.readonly
        assert np.frombuffer(view, np.float32).tolist() == [1.0] * 8
        with pytest.raises(MissingTensor, match="nothing"):
            reader.buffer("nothing")
        view.release()


def test_a_byte_that_flips_is_found_and_named(record: VersionRecord) -> None:
    with open_(record) as reader:
        entry = reader.entry("model.layers.1.mlp.weight")
        flip(record.slot, entry.offset + 77)
        reader.verify("model.layers.0.mlp.weight")
        with pytest.raises(DigestMismatch) as found:
            reader.verify_all()
        assert found.value.tensor == "model.layers.1.mlp.weight"
        assert found.value.expected == entry.digest != found.value.got


def test_another_schema_than_the_engine_has(record: VersionRecord) -> None:
    with open_(record) as reader:
        tensors = dict(reader.manifest.schema.tensors) | {"model.norm.weight": TensorSpec("float32", (9,))}
        with pytest.raises(ShapeMismatch, match=r"model\.norm\.weight"):
            reader.verify_all(Schema(tensors))


def test_the_lock_lasts_as_long_as_anything_maps_the_slot(record: VersionRecord) -> None:
    assert free(record.slot)
    reader = open_(record)
    array = np.frombuffer(reader.buffer("model.norm.weight"), np.float32)
    assert not free(record.slot)
    reader.close()
    reader.close()
    assert not free(record.slot)
    assert array.sum() == 8.0
    del array, reader
    gc.collect()
    assert free(record.slot)


def test_a_reader_that_is_forgotten_lets_go(record: VersionRecord) -> None:
    reader = open_(record)
    assert not free(record.slot)
    del reader
    gc.collect()
    assert free(record.slot)


def test_another_version_than_the_one_asked_for(record: VersionRecord) -> None:
    with pytest.raises(ManifestError, match="holds version 1, not 2"):
        SlotReader.open(record.slot, version=2)
    with pytest.raises(ManifestError, match="retired and reused"):
        SlotReader.open(record.slot, manifest_digest="0" * 32)
    assert free(record.slot)


def test_a_slot_that_a_writer_has_claimed(record: VersionRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.memory.receiver.LOCK_PATIENCE_S", 0.01)
    writer = SlotLock.try_exclusive(Path(record.slot))
    assert writer is not None
    with pytest.raises(SlotBusy, match="choose a version that is ready"):
        open_(record)
    writer.release()
    open_(record).close()


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * 8192, b"HOTSWAP\0" + b"\xff" * 8192])
def test_a_file_that_is_not_a_slot(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "slot"
    path.write_bytes(content)
    with pytest.raises(ManifestError):
        SlotReader.open(path)


def test_a_slot_that_is_cut_off(record: VersionRecord) -> None:
    os.truncate(record.slot, os.stat(record.slot).st_size - 4096)
    with pytest.raises(ManifestError, match="outside the slot"):
        open_(record)


def test_a_slot_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="the version is gone"):
        SlotReader.open(tmp_path / "none")


def test_readers_do_not_exclude_each_other(record: VersionRecord) -> None:
    with open_(record) as first, open_(record) as second:
        assert first.manifest == second.manifest
    assert free(record.slot)


def test_a_map_is_kept_and_its_lock_is_not(record: VersionRecord) -> None:
    with open_(record) as first:
        kept = READ_MAPPINGS.get(first.path, first._fd, populate=False)
    assert free(record.slot)
    with open_(record) as again:
        assert READ_MAPPINGS.get(again.path, again._fd, populate=False) is kept
    assert free(record.slot)


def test_a_kept_map_shows_what_is_written_later(publisher: Publisher, record: VersionRecord) -> None:
    with open_(record):
        pass
    fd = os.open(record.slot, os.O_RDWR)
    with SlotReader.open(record.slot) as reader:
        offset = reader.entry("model.norm.weight").offset
        os.pwrite(fd, np.float32(7).tobytes(), offset)
        assert np.frombuffer(reader.buffer("model.norm.weight"), np.float32)[0] == 7.0
    os.close(fd)


def test_a_view_in_a_forked_child_does_not_unlock_the_parents_slot(record: VersionRecord) -> None:
    gc.freeze()  # the child collects what comes from here on, and not all that the tests have imported
    reader = open_(record)
    child = os.fork()
    if child == 0:
        reader.close()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    gc.unfreeze()
    assert not free(record.slot)
    reader.close()
    assert free(record.slot)


def test_the_map_of_a_slot_that_is_gone_is_dropped(tmp_path: Path) -> None:
    mappings = Mappings(write=False)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(b"x" * 4096)
    fds = [os.open(path, os.O_RDONLY) for path in paths]
    mappings.get(paths[0], fds[0])
    paths[0].unlink()
    mappings.get(paths[1], fds[1])
    assert len(mappings._maps) == 1
    for fd in fds:
        os.close(fd)
