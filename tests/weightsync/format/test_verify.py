"""Versions read again: every flipped byte is named, and so is every instance that runs something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.weightsync.tensors import flip, model
from weightsync import Publisher, SlotReader, SyncStore
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, PartRecord, VersionRecord
from weightsync.errors import UnknownVersion
from weightsync.format.fingerprint import Running
from weightsync.format.versions import verify

KEYS = Keys("demo")


def flip_tensor(record: VersionRecord | PartRecord, tensor: str) -> None:
    with SlotReader.open(record.slot) as slot:
        flip(record.slot, slot.entry(tensor).offset)


def test_a_sound_version(record: VersionRecord, store_url: str) -> None:
    report = verify(store_url, "demo", record.version)
    assert report.ok
    assert (report.version, report.tensors, report.nbytes) == (1, record.tensors, record.nbytes)
    assert report.fingerprint == record.fingerprint != ""


def test_a_flipped_byte_names_its_tensor(record: VersionRecord, store_url: str) -> None:
    flipped = ("model.norm.weight", "model.embed_tokens.weight")
    for tensor in flipped:
        flip_tensor(record, tensor)
    report = verify(store_url, "demo")
    assert not report.ok
    assert {(p.code, p.tensor) for p in report.problems} == {("digest_mismatch", tensor) for tensor in flipped}


def test_a_checksum_that_is_not_of_the_bytes_names_its_tensor(
    publisher: Publisher, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is right and the checksum beside it wrong: every instance would seem to run other weights."""
    weights = model(3.0)
    wrong = {"model.norm.weight": 1, "model.embed_tokens.weight": -1}
    off_by = {weights[name].nbytes: difference for name, difference in wrong.items()}
    update = Running.update

    def misread(running: Running, data: memoryview) -> None:
        update(running, data)
        running.sum += off_by.get(len(data), 0)

    with monkeypatch.context() as patch:
        patch.setattr(Running, "update", misread)
        publisher.publish(weights, activate=False)
    report = verify(store_url, "demo")
    assert {(p.code, p.tensor) for p in report.problems} == {("checksum_mismatch", name) for name in wrong}


def test_the_parts_of_a_version_are_read_too(publisher: Publisher, store_url: str) -> None:
    version = publisher.publish(model(1.0), parts={"draft": model(2.0, layers=1)}, activate=False)
    report = verify(store_url, "demo", version)
    assert (report.ok, report.tensors) == (True, len(model()) + len(model(layers=1)))
    flip_tensor(publisher.versions()[0].parts[0], "model.norm.weight")
    (problem,) = verify(store_url, "demo", version).problems
    assert problem.tensor == "draft:model.norm.weight"


@pytest.mark.parametrize(
    ("promised", "code"),
    [({"manifest_digest": "0" * 32}, "manifest_error"), ({"fingerprint": "0" * 32}, "fingerprint_mismatch")],
    ids=["another manifest", "another fingerprint"],
)
def test_a_record_that_promises_something_else(
    record: VersionRecord, store_url: str, store_sync: SyncStore, promised: dict[str, Any], code: str
) -> None:
    store_sync.put(KEYS.version(1), replace(record, **promised).to_json())
    (problem,) = verify(store_url, "demo").problems
    assert (problem.code, problem.tensor, problem.instance) == (code, None, None)


def test_instances_are_compared_with_what_was_published(
    record: VersionRecord, store_url: str, store_sync: SyncStore
) -> None:
    told = {"good": record.fingerprint, "bad": "f" * 32, "silent": None, "elsewhere": "e" * 32}
    for name, found in told.items():
        running = InstanceRecord(name, "http://127.0.0.1:1", "SERVING", active_version=1, fingerprint=found)
        if name == "elsewhere":
            running = replace(running, active_version=7)
        store_sync.put(KEYS.instance(name), running.to_json())
    report = verify(store_url, "demo", 1)
    assert report.instances == {"good": "same", "bad": "differs", "silent": "not told"}
    (problem,) = report.problems
    assert (problem.code, problem.instance) == ("fingerprint_mismatch", "bad")


def test_without_a_number_the_active_version_is_read(
    publisher: Publisher, store_url: str, store_sync: SyncStore
) -> None:
    for value in (1.0, 2.0):
        publisher.publish(model(value), activate=False)
    assert verify(store_url, "demo").version == 2  # the newest, while none is active
    store_sync.put(KEYS.active, ActiveRecord(1, 1, None, "swap", 0.0).to_json())
    assert verify(store_url, "demo").version == 1


def test_a_version_that_is_gone_is_said_so(record: VersionRecord, store_url: str, store_sync: SyncStore) -> None:
    store_sync.put(KEYS.version(1), replace(record, state="retired").to_json())
    with pytest.raises(UnknownVersion, match="is retired"):
        verify(store_url, "demo", 1)
    with pytest.raises(UnknownVersion, match="does not exist"):
        verify(store_url, "demo", 9)
