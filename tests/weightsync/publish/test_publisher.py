from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.waiting import wait_until
from tests.weightsync.tensors import model, read_back
from weightsync import Publisher, SlotReader
from weightsync.control.records import Keys, TargetRecord, VersionRecord
from weightsync.errors import (
    DraftClosed,
    DraftLost,
    DtypeMismatch,
    ManifestError,
    MissingTensor,
    RecordError,
    ShapeMismatch,
    StalePublisher,
    StoreUnavailable,
    SwapAborted,
    SwapTimeout,
    UnexpectedTensor,
    UnknownVersion,
    UnsupportedDtype,
)
from weightsync.memory.arena import MAPPINGS, SlotLock
from weightsync.publish.publisher import Draft


def ready(publisher: Publisher) -> list[VersionRecord]:
    return [v for v in publisher.versions() if v.state == "ready"]


def test_what_is_published_is_what_is_read(publisher: Publisher) -> None:
    tensors = {name: np.random.default_rng(1).random(t.shape).astype(t.dtype) for name, t in model().items()}
    version = publisher.publish(tensors.items(), step=10, activate=False, metadata={"run": "x"}, source="test")
    (record,) = publisher.versions()
    assert (record.version, record.state, record.step, record.source) == (version, "ready", 10, "test")
    assert record.nbytes == sum(t.nbytes for t in tensors.values())
    found = read_back(record)
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    with SlotReader.open(record.slot) as reader:
        assert reader.manifest.metadata["run"] == "x"
        assert reader.manifest.step == 10


@pytest.mark.parametrize(
    "wrong", [{"step": "8"}, {"step": 8.0}, {"source": None}, {"mode": "Together"}, {"timeout_s": "9"}]
)
def test_an_argument_of_the_wrong_type_publishes_nothing(publisher: Publisher, wrong: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="Nothing was written"):
        publisher.publish(model(), **wrong)
    assert not ready(publisher)
    assert publisher.publish(model(), step=8, activate=False)
    assert len(publisher.arena.slots("demo")) == 1


@pytest.mark.parametrize("kind", ["a mapping", "a list", "a generator"])
def test_a_second_name_of_the_same_matrix_is_left_out(publisher: Publisher, kind: str) -> None:
    publisher.publish(model(), activate=False)
    tensors = model(1.0)
    again = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    given = {"a mapping": again, "a list": list(again.items()), "a generator": (item for item in again.items())}[kind]
    publisher.publish(given, activate=False)
    assert read_back(publisher.versions()[-1]).keys() == tensors.keys()
    other = tensors["model.embed_tokens.weight"] + 1
    by_chance = tensors["model.norm.weight"]
    for extra in ({"lm_head.weight": other}, {"model.norm.bias": by_chance}):
        with pytest.raises(UnexpectedTensor):
            publisher.publish(tensors | extra, activate=False)


def test_a_record_that_cannot_be_read_stops_nobody_and_keeps_its_slot(publisher: Publisher) -> None:
    bad = publisher.publish(model(1), activate=False)
    key, slot = Keys("demo").version(bad), publisher.versions()[0].slot
    found = publisher._store.get(key)
    assert found is not None
    publisher._store.put(key, found.value.replace(b'"step":null', b'"step":"8"'))
    for value in range(2, 12):
        publisher.publish(model(value), activate=False)
    records = publisher.versions()
    assert bad not in [record.version for record in records]
    assert read_back(records[-1])["model.norm.weight"][0] == 11
    assert slot not in {record.slot for record in records}


def test_versions_only_grow_and_slots_are_reused(publisher: Publisher) -> None:
    versions = [publisher.publish(model(i), activate=False) for i in range(20)]
    assert versions == list(range(1, 21))
    assert len(publisher.arena.slots("demo")) <= 6
    assert read_back(publisher.versions()[-1])["model.norm.weight"][0] == 19


def test_the_schema_is_set_by_the_first_version(publisher: Publisher, store_url: str) -> None:
    publisher.publish(model(), activate=False)
    wrong = {
        "missing": (MissingTensor, {k: v for k, v in model().items() if k != "model.norm.weight"}),
        "extra": (UnexpectedTensor, model() | {"lm_head.bias": np.zeros(1)}),
        "shape": (ShapeMismatch, model() | {"model.norm.weight": np.zeros(9, np.float32)}),
        "dtype": (DtypeMismatch, model() | {"model.norm.weight": np.zeros(8, np.float16)}),
    }
    for kind, (error, tensors) in wrong.items():
        for given in (list(tensors.items()), iter(tensors.items())):  # known before the claim, and while streaming
            with pytest.raises(error) as refused:
                publisher.publish(given, activate=False)
            assert refused.value.tensor == ("lm_head.bias" if kind == "extra" else "model.norm.weight")
    assert [v.version for v in publisher.versions()] == [1]
    with Publisher(store_url, model="demo", lineage="another") as other, pytest.raises(ShapeMismatch):
        other.publish(wrong["shape"][1], activate=False)
    assert publisher.publish(model(), activate=False) > 1


def test_a_generator_is_consumed_one_tensor_at_a_time(publisher: Publisher) -> None:
    publisher.publish(model(), activate=False)
    alive: list[str] = []

    def tensors():  # type: ignore[no-untyped-def]
        for name, tensor in model(2.0).items():
            alive.append(name)
            yield name, tensor
            assert alive.pop() == name

    publisher.publish(tensors(), activate=False)
    assert read_back(ready(publisher)[-1])["model.norm.weight"][0] == 2.0


@pytest.mark.parametrize("tensor", [np.zeros(3, np.complex64), np.zeros(3, ">f4"), np.array(["x"]), [1.0], None])
def test_what_cannot_be_carried_is_refused_by_name(publisher: Publisher, tensor: object) -> None:
    with pytest.raises(UnsupportedDtype) as refused:
        publisher.publish([("x", tensor)], activate=False)
    assert refused.value.tensor == "x"
    assert publisher.versions() == []


def test_odd_arrays(publisher: Publisher) -> None:
    base = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    arrays = {
        "transposed": base.T,
        "strided": base[::2, 1:3, ::-1],
        "broadcast": np.broadcast_to(np.float32(3), (4, 2)),
        "scalar": np.array(7, np.int64),
        "generic": np.float16(2.5),
        "empty": np.zeros((0, 4), np.int8),
        "flag": np.array([True, False]),
        "fortran": np.asfortranarray(base[0]),
    }
    publisher.publish(arrays, activate=False)
    found = read_back(publisher.versions()[0])
    for name, array in arrays.items():
        assert np.array_equal(found[name], array), name
        assert found[name].shape == array.shape


def test_a_newer_publisher_fences_off_the_older(store_url: str) -> None:
    old = Publisher(store_url, model="demo")
    old.publish(model(), activate=False)
    draft = old.begin(_schema(model()))
    new = Publisher(store_url, model="demo")
    new.hold()
    for name, tensor in model(1.0).items():
        draft.write(name, tensor)
    with pytest.raises(StalePublisher, match="lineage 'trainer' was taken over"):
        draft.commit()
    with pytest.raises(StalePublisher) as stale:
        old.publish(model(), activate=False)
    assert stale.value.token == 2
    new.publish(model(2.0), activate=False)
    assert [v.token for v in ready(new)] == [1, 2]
    assert {v.state for v in new.versions()} == {"ready"}
    old.close()
    new.close()


def test_a_publisher_that_only_looks_fences_nobody_off(store_url: str) -> None:
    with Publisher(store_url, model="demo") as trainer, Publisher(store_url, model="demo") as notebook:
        draft = _written(trainer)
        assert [v.state for v in notebook.versions()] == ["publishing"]
        assert (notebook.active(), notebook.schema(), notebook.copies()) == (None, None, {})
        with pytest.raises(UnknownVersion):
            notebook.activate(99)
        with pytest.raises(SwapAborted, match="no previous version"):
            notebook.rollback()
        assert draft.commit() == 1
        notebook.publish(model(1.0), activate=False)
        with pytest.raises(StalePublisher):
            trainer.publish(model(2.0), activate=False)


def test_lineages_publish_side_by_side(store_url: str) -> None:
    def run(lineage: str, value: float) -> None:
        with Publisher(store_url, model="demo", lineage=lineage, keep=100) as publisher:
            for _ in range(15):
                publisher.publish(model(value), activate=False)

    threads = [threading.Thread(target=run, args=(f"l{i}", float(i))) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Publisher(store_url, model="demo") as reader:
        records = reader.versions()
        assert [r.version for r in records] == sorted({r.version for r in records})
        assert len(ready(reader)) == 45
        assert len({r.slot for r in records}) == 45
        for record in records:
            value = float(record.publisher.removeprefix("l"))
            assert all((t == value).all() for t in read_back(record).values())


def test_an_aborted_draft_leaves_nothing(publisher: Publisher) -> None:
    with publisher.begin(_schema(model())) as draft:
        draft.write("model.norm.weight", np.zeros(8, np.float32))
        assert [v.state for v in publisher.versions()] == ["publishing"]
    assert publisher.versions() == []
    with pytest.raises(DraftClosed):
        draft.write("model.norm.weight", np.zeros(8, np.float32))
    with pytest.raises(DraftClosed):
        draft.commit()
    assert publisher.publish(model(), activate=False) == draft.version + 1
    assert len(publisher.arena.slots("demo")) == 1


def test_an_incomplete_draft_cannot_be_committed(publisher: Publisher) -> None:
    draft = publisher.begin(_schema(model()))
    for name, tensor in list(model().items())[1:]:
        draft.write(name, tensor)
    with pytest.raises(MissingTensor, match=r"model\.layers\.0\.mlp\.weight"):
        draft.commit()
    assert publisher.versions() == []


def test_a_draft_whose_lease_ended_is_lost_and_the_next_one_is_not(store_url: str) -> None:
    with Publisher(store_url, model="demo", lease_ttl_s=60) as publisher:
        draft = _written(publisher)
        assert publisher._ledger._lease is not None
        publisher._store.revoke(publisher._ledger._lease.id)  # what happens to a process that was stopped for a while
        with pytest.raises(DraftLost, match="publish it again"):
            draft.commit()
        assert publisher.versions() == []
        assert publisher.publish(model(), activate=False) == draft.version + 1


def test_closing_ends_the_lease_at_once(store_url: str) -> None:
    publisher = Publisher(store_url, model="demo", lease_ttl_s=3600)
    publisher.begin(_schema(model()))
    publisher.close()
    publisher.close()
    with Publisher(store_url, model="demo") as other:
        assert other.versions() == []


def test_a_slot_that_is_being_read_is_never_reused(publisher: Publisher) -> None:
    publisher.publish(model(1.0), activate=False)
    reader = SlotReader.open(publisher.versions()[0].slot)
    view = np.frombuffer(reader.buffer("model.norm.weight"), np.float32)
    reader.close()  # the view keeps the slot
    for i in range(20):
        publisher.publish(model(100.0 + i), activate=False)
    assert publisher.versions()[0].state == "retired"
    assert (view == 1.0).all()
    del view
    slots = len(publisher.arena.slots("demo"))
    for _ in range(20):
        publisher.publish(model(), activate=False)
    assert len(publisher.arena.slots("demo")) == slots


def test_a_slot_is_never_taken_for_its_former_version(publisher: Publisher) -> None:
    publisher.publish(model(1.0), activate=False)
    (former,) = publisher.versions()
    for i in range(5):
        publisher.publish(model(i), activate=False)
    assert publisher.versions()[0].state == "retired"
    lock = publisher.arena.claim("demo", Path(former.slot).stat().st_size, {v.slot for v in ready(publisher)})
    assert str(lock.path) == former.slot
    lock.admit_writers()
    with pytest.raises(ManifestError, match="wrong magic"):
        SlotReader.open(former.slot, manifest_digest=former.manifest_digest)


def test_mapping_and_file_are_the_same_for_every_version_of_a_slot(publisher: Publisher) -> None:
    for _ in range(10):
        publisher.publish(model(), activate=False)
    inodes = {p.stat().st_ino for p in publisher.arena.slots("demo")}
    maps = len(MAPPINGS._maps)
    for _ in range(10):
        publisher.publish(model(), activate=False)
    assert {p.stat().st_ino for p in publisher.arena.slots("demo")} == inodes
    assert len(MAPPINGS._maps) == maps


def test_without_a_coordinator_waiting_ends_with_advice(publisher: Publisher) -> None:
    with pytest.raises(SwapTimeout, match="is a gateway"):
        publisher.publish(model(), timeout_s=0.2)
    assert [v.state for v in publisher.versions()] == ["ready"]
    with pytest.raises(SwapTimeout):
        publisher.wait_active(1, timeout_s=0.1)


def test_a_name_that_no_instance_serves_ends_with_those_that_some_do(publisher: Publisher) -> None:
    for name in ("org/other", "third"):
        publisher._store.put(Keys(name).instance("a"), b"{}")
    for wait in (lambda: publisher.publish(model(), timeout_s=0.2), lambda: publisher.wait_active(1, 0.1)):
        with pytest.raises(SwapTimeout, match=r"no instance serves 'demo'.*: org/other, third$"):
            wait()
    publisher._store.put(Keys("demo").instance("a"), b"{}")
    with pytest.raises(SwapTimeout, match="is a gateway"):
        publisher.activate(1, timeout_s=0.1)


def test_the_wish_to_activate_is_written_with_the_version(publisher: Publisher) -> None:
    version = publisher.publish(model(), wait=False, timeout_s=12.0)
    found, record = (publisher._store.get(key) for key in (Keys("demo").target, Keys("demo").version(version)))
    assert found is not None
    assert record is not None
    target = TargetRecord.from_json(found.value)
    assert (target.version, target.deadline_s) == (version, 12.0)
    assert target.requested_by.startswith("trainer@")
    assert found.mod_revision == record.mod_revision


def test_only_ready_versions_can_be_activated(publisher: Publisher) -> None:
    with pytest.raises(UnknownVersion, match="version 99 does not exist"):
        publisher.activate(99)
    draft = publisher.begin(_schema(model()))
    with pytest.raises(UnknownVersion, match="is publishing"):
        publisher.activate(draft.version)


def test_the_store_is_named_by_the_environment(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_STORE", store_url)
    with Publisher(model="demo") as publisher:
        assert publisher.versions() == []
    monkeypatch.delenv("HOTSWAP_STORE")
    with pytest.raises(StoreUnavailable, match="HOTSWAP_STORE"):
        Publisher(model="demo")


def test_a_store_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="hotswap up"):
        Publisher(f"sqlite://{tmp_path}/none.db", model="demo")


def test_a_failed_publish_can_be_repeated_when_the_store_is_back(store_url: str, tmp_path: Path) -> None:
    with Publisher(store_url, model="demo") as publisher:
        publisher.publish(model(1.0), activate=False)
        (tmp_path / "store.db").rename(tmp_path / "away.db")
        with pytest.raises(StoreUnavailable):
            publisher.publish(model(2.0), activate=False)
        (tmp_path / "away.db").rename(tmp_path / "store.db")
        publisher.publish(model(3.0), activate=False)
        assert [read_back(v)["model.norm.weight"][0] for v in ready(publisher)] == [1.0, 3.0]


def test_a_claim_whose_answer_was_lost_keeps_no_slot(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher.hold()
    store = publisher._store.store
    txn = store.txn

    async def lost(*what: Any) -> int:
        await txn(*what)
        raise StoreUnavailable(store.url, "no answer in time", "")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(store, "txn", lost)
            with pytest.raises(StoreUnavailable):
                publisher.begin(_schema(model()))
    assert publisher.versions() == []
    publisher.publish(model(), activate=False)
    assert len(publisher.arena.slots("demo")) == 1


def test_a_slot_of_a_commit_that_failed_is_free_again(store_url: str, tmp_path: Path) -> None:
    with Publisher(store_url, model="demo", lease_ttl_s=1.0) as publisher:
        draft = _written(publisher)
        (tmp_path / "store.db").rename(tmp_path / "away.db")
        with pytest.raises(StoreUnavailable):
            draft.commit()
        (tmp_path / "away.db").rename(tmp_path / "store.db")
        wait_until(lambda: not publisher.versions(), what="the lease's end")
        (slot,) = publisher.arena.slots("demo")
        lock = SlotLock.try_exclusive(slot)
        assert lock is not None
        lock.release()


def _schema(tensors: dict[str, np.ndarray]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, str(t.dtype), t.shape) for name, t in tensors.items()]


def _written(publisher: Publisher) -> Draft:
    """A draft with all of its tensors."""
    draft = publisher.begin(_schema(model()))
    for name, tensor in model().items():
        draft.write(name, tensor)
    return draft
