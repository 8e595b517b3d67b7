"""Versions read again, which names every flipped byte and every instance that runs something else; and two of them
compared: changes are counted from the bits and measured from the values, in every element type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.weightsync.codes import refused
from tests.weightsync.tensors import flip, model
from weightsync import Publisher, SlotReader, SyncStore
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, PartRecord, VersionRecord
from weightsync.format.delta_codec import WORD
from weightsync.format.dtypes import ITEMSIZE
from weightsync.format.fingerprint import Running
from weightsync.versions import as_floats, compare, diff, verify

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
    with refused("unknown_version", match="does not exist"):
        diff(store_url, "demo", 1, 9)
    store_sync.put(KEYS.version(1), replace(record, state="retired").to_json())
    for number, why in ((1, "is retired"), (9, "does not exist")):
        with refused("unknown_version", match=why):
            verify(store_url, "demo", number)


# two versions compared ------------------------------------------------------------------------------------------------


def tensors(**named: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(value, np.float32) for name, value in named.items()}


def test_tensors_are_listed_by_how_far_they_moved(publisher: Publisher, store_url: str) -> None:
    rest = np.linspace(1, 2, 500)
    publisher.publish(tensors(same=rest, little=[1.0, 2.0, 4.0], much=[0.0, 8.0, -4.0, 1.0]), activate=False)
    publisher.publish(tensors(same=rest, little=[1.0, 2.5, 4.0], much=[3.0, 8.0, -4.0, 2.0]), activate=False)
    found = diff(store_url, "demo", 1, 2)
    assert [(t.name, t.state) for t in found.tensors] == [("much", "changed"), ("little", "changed"), ("same", "same")]
    much, little, same = found.tensors
    assert (much.elements, much.changed, much.max_abs, much.max_rel, much.mean_abs) == (4, 2, 3.0, 1.0, 1.0)
    assert (little.changed, little.max_abs, little.max_rel) == (1, 0.5, 0.25)
    assert little.mean_abs == pytest.approx(0.5 / 3)
    assert (same.changed, same.elements) == (0, 500)
    assert (found.changed, found.elements) == (3, 507)


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_every_element_type_is_read_as_torch_reads_it(dtype: str) -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, 8 * 4096, np.uint8)
    if dtype == "bool":
        raw &= 1
    expected = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).to(torch.float64).numpy()
    with np.errstate(invalid="ignore"):
        values = as_floats(raw.view(WORD[ITEMSIZE[dtype]]), dtype).astype(np.float64)
    np.testing.assert_array_equal(values, expected)


def test_a_large_tensor_in_bf16_is_measured_as_torch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1_200_000, generator=generator).bfloat16()
    new = torch.where(torch.rand(old.shape, generator=generator) < 0.01, old * 1.01, old).bfloat16()
    step = (new.float() - old.float()).abs()
    found = compare("w", "bfloat16", *(memoryview(t.view(torch.uint8).numpy()) for t in (old, new)))
    assert found.changed == int((old != new).sum()) > 5000
    assert found.max_abs == float(step.max())
    assert found.mean_abs == pytest.approx(float(step.double().mean()), rel=1e-9)
    assert found.max_rel == pytest.approx(float((step.double() / old.double().abs()).nan_to_num().max()), rel=1e-6)


def test_what_is_not_a_number_is_counted_and_not_measured() -> None:
    old = np.array([1.0, 2.0, np.nan, 3.0, 0.0], np.float32)
    new = np.array([1.0, np.inf, np.nan, 3.5, -0.0], np.float32)
    found = compare("w", "float32", memoryview(old.view(np.uint8)), memoryview(new.view(np.uint8)))
    assert (found.changed, found.not_finite, found.max_abs) == (3, 2, 0.5)  # minus zero is another bit pattern
    assert found.mean_abs == pytest.approx(0.5 / 3)


def test_nothing_is_compared_of_an_empty_tensor() -> None:
    found = compare("w", "bfloat16", memoryview(b""), memoryview(b""))
    assert (found.elements, found.changed, found.max_abs, found.mean_abs) == (0, 0, 0.0, 0.0)
