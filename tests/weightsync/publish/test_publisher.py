"""Versions that are published are read as they were given, from numpy and from torch; and drafts, lineages, waiting.

Other tensors than those before are published with the configuration of such a checkpoint, and not without.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from tests.waiting import wait_until
from tests.weightsync.codes import refused
from tests.weightsync.tensors import model, read_back
from weightsync import Publisher, SlotReader
from weightsync.control.records import ActiveRecord, Keys, TargetRecord, VersionRecord
from weightsync.errors import ManifestError, PublishError, StalePublisher, StoreUnavailable
from weightsync.format.dtypes import ITEMSIZE
from weightsync.memory.arena import SlotLock
from weightsync.publish.draft import Draft

SCHEMA = [(name, str(tensor.dtype), tensor.shape) for name, tensor in model().items()]


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
    with refused("record_refused", match="Nothing was written"):
        publisher.publish(model(), **wrong)
    assert not ready(publisher)
    assert publisher.publish(model(), step=8, activate=False)
    assert len(publisher.arena.slots("demo")) == 1


@pytest.mark.parametrize("value", [-1.0, float("nan"), 1e9, "9"], ids=str)
def test_a_refused_time_is_called_by_the_name_that_the_caller_gave_it(publisher: Publisher, value: Any) -> None:
    for known in (1, 2):
        assert publisher.publish(model(known), activate=False) == known
    publisher._store.put(Keys("demo").active, ActiveRecord(2, 1, 1, "s", 0.0).to_json())
    ways: dict[str, Callable[[], object]] = {
        "publish": lambda: publisher.publish(model(), timeout_s=value),
        "take away": lambda: publisher.publish(None, without=["draft"], timeout_s=value),
        "rolling": lambda: publisher.publish(model(), timeout_s=value, mode="rolling"),
        "activate": lambda: publisher.activate(1, timeout_s=value),
        "rollback": lambda: publisher.rollback(timeout_s=value),
        "commit": lambda: written(publisher).commit(activate=True, timeout_s=value),
    }
    for way in ways.values():
        with refused("record_refused", match="'timeout_s' cannot be"):
            way()


def written(publisher: Publisher) -> Draft:
    draft = publisher.begin(SCHEMA)
    for name, tensor in model().items():
        draft.write(name, tensor)
    return draft


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
        with refused("unexpected_tensor"):
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


def test_the_schema_is_set_by_the_first_version(publisher: Publisher, store_url: str) -> None:
    publisher.publish(model(), activate=False)
    wrong = {
        "missing": ("missing_tensor", {k: v for k, v in model().items() if k != "model.norm.weight"}),
        "extra": ("unexpected_tensor", model() | {"lm_head.bias": np.zeros(1)}),
        "shape": ("shape_mismatch", model() | {"model.norm.weight": np.zeros(9, np.float32)}),
        "dtype": ("dtype_mismatch", model() | {"model.norm.weight": np.zeros(8, np.float16)}),
    }
    for kind, (code, tensors) in wrong.items():
        for given in (list(tensors.items()), iter(tensors.items())):  # known before the claim, and while streaming
            with refused(code) as caught:
                publisher.publish(given, activate=False)
            assert caught.value.tensor == ("lm_head.bias" if kind == "extra" else "model.norm.weight")
    assert [v.version for v in publisher.versions()] == [1]
    with Publisher(store_url, model="demo", lineage="another") as other, refused("shape_mismatch"):
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
    with refused("unsupported_dtype") as caught:
        publisher.publish([("x", tensor)], activate=False)
    assert caught.value.tensor == "x"
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
    draft = old.begin(SCHEMA)
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
        draft = written(trainer)
        assert [v.state for v in notebook.versions()] == ["publishing"]
        assert (notebook.active(), notebook.schema(), notebook.copies()) == (None, None, {})
        with refused("swap_aborted", match="no previous version"):
            notebook.rollback()
        assert draft.commit() == 1
        notebook.publish(model(1.0), activate=False)
        with pytest.raises(StalePublisher):
            trainer.publish(model(2.0), activate=False)


def test_lineages_publish_side_by_side(store_url: str) -> None:
    def run(number: int) -> None:
        with Publisher(store_url, model="demo", lineage=f"l{number}", keep=100) as publisher:
            for _ in range(15):
                publisher.publish(model(number), activate=False)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    with Publisher(store_url, model="demo") as reader:
        records = reader.versions()
        assert [r.version for r in records] == sorted({r.version for r in records})
        assert len(ready(reader)) == 45
        assert len({r.slot for r in records}) == 45
        for record in records:
            value = float(record.publisher.removeprefix("l"))
            assert all((t == value).all() for t in read_back(record).values())


def test_an_aborted_draft_leaves_nothing(publisher: Publisher) -> None:
    with publisher.begin(SCHEMA) as draft:
        draft.write("model.norm.weight", np.zeros(8, np.float32))
        assert [v.state for v in publisher.versions()] == ["publishing"]
    assert publisher.versions() == []
    with refused("draft_closed"):
        draft.write("model.norm.weight", np.zeros(8, np.float32))
    with refused("draft_closed"):
        draft.commit()
    assert publisher.publish(model(), activate=False) == draft.version + 1
    assert len(publisher.arena.slots("demo")) == 1


def test_a_draft_outlives_its_lease(store_url: str) -> None:
    """A process that was stopped for a while goes on with its draft: no other publisher could take its slot."""
    with Publisher(store_url, model="demo") as publisher, Publisher(store_url, model="demo", lineage="b") as other:
        draft = written(publisher)
        end_lease(publisher)
        later = [other.publish(model(2.0 + i), activate=False) for i in range(2)]
        assert draft.commit() == draft.version < later[0]
        values = {v.version: read_back(v)["model.norm.weight"][0] for v in ready(publisher)}
        assert values == {draft.version: 0.0, later[0]: 2.0, later[1]: 3.0}


def test_a_draft_that_was_claimed_again_leaves_nothing_when_it_fails(store_url: str) -> None:
    with Publisher(store_url, model="demo") as publisher:
        draft = written(publisher)
        end_lease(publisher)
        publisher._session._form_for = _failing_at_the_second(publisher._session._form_for)
        with pytest.raises(PublishError):
            draft.commit()
        assert publisher.versions() == []


def test_a_draft_without_a_lease_is_stale_once_another_publisher_has_the_lineage(store_url: str) -> None:
    with Publisher(store_url, model="demo") as publisher, Publisher(store_url, model="demo") as other:
        draft = written(publisher)
        end_lease(publisher)
        other.hold()
        with pytest.raises(StalePublisher):
            draft.commit()
        assert other.versions() == []


def test_a_draft_with_shares_on_other_hosts_ends_with_its_lease(store_url: str) -> None:
    """Other hosts free what no record names."""
    with Publisher(store_url, model="demo") as publisher:
        draft = written(publisher)
        published = replace(draft._finish([]), shares=("b",))
        draft._published = published
        end_lease(publisher)
        with refused("draft_lost", match="publish it again"):
            draft.commit()
        assert publisher.versions() == []
        assert publisher.publish(model(), activate=False) == draft.version + 1


def _failing_at_the_second(step: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[None] = []

    async def fails(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise PublishError("the form of the version before is not in the store")
        return await step(*arguments)

    return fails


def end_lease(publisher: Publisher) -> None:
    """As it ends for a process that is stopped for a while."""
    assert publisher._session._lease is not None
    publisher._store.revoke(publisher._session._lease.id)


def test_closing_ends_the_lease_at_once(store_url: str) -> None:
    publisher = Publisher(store_url, model="demo", lease_ttl_s=3600)
    publisher.begin(SCHEMA)
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


def test_without_a_coordinator_waiting_ends_with_advice(publisher: Publisher) -> None:
    """There is no gateway, or the name is one that no instance serves: the error says which names some do."""
    with refused("swap_timeout", match="is a gateway"):
        publisher.publish(model(), timeout_s=0.1)
    assert [v.state for v in publisher.versions()] == ["ready"]
    for name in ("org/other", "third"):
        publisher._store.put(Keys(name).instance("a"), b"{}")
    for wait in (lambda: publisher.publish(model(), timeout_s=0.1), lambda: publisher.wait_active(1, 0.1)):
        with refused("swap_timeout", match=r"no instance serves 'demo'.*: org/other, third$"):
            wait()
    publisher._store.put(Keys("demo").instance("a"), b"{}")
    with refused("swap_timeout", match="is a gateway"):
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
    with refused("unknown_version", match="version 99 does not exist"):
        publisher.activate(99)
    draft = publisher.begin(SCHEMA)
    with refused("unknown_version", match="is publishing"):
        publisher.activate(draft.version)


def test_the_store_is_named_by_the_environment(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_STORE", store_url)
    with Publisher(model="demo") as publisher:
        assert publisher.versions() == []
    monkeypatch.setenv("HOTSWAP_STORE", f"{store_url}.none")
    with pytest.raises(StoreUnavailable, match="hotswap up"):
        Publisher(model="demo")
    monkeypatch.delenv("HOTSWAP_STORE")
    monkeypatch.setenv("HOTSWAP_STATE_DIR", f"{store_url}.none")
    with pytest.raises(StoreUnavailable, match="HOTSWAP_STORE"):
        Publisher(model="demo")


def test_a_failed_publish_can_be_repeated_when_the_store_is_back(store_url: str, tmp_path: Path) -> None:
    with Publisher(store_url, model="demo") as publisher:
        publisher.publish(model(1.0), activate=False)
        (tmp_path / "store.db").rename(tmp_path / "away.db")
        with refused("store_unavailable"):
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
            with refused("store_unavailable"):
                publisher.begin(SCHEMA)
    assert publisher.versions() == []
    publisher.publish(model(), activate=False)
    assert len(publisher.arena.slots("demo")) == 1


def test_a_slot_of_a_commit_that_failed_is_free_again(store_url: str, tmp_path: Path) -> None:
    with Publisher(store_url, model="demo", lease_ttl_s=1.0) as publisher:
        draft = written(publisher)
        (tmp_path / "store.db").rename(tmp_path / "away.db")
        with refused("store_unavailable"):
            draft.commit()
        (tmp_path / "away.db").rename(tmp_path / "store.db")
        wait_until(lambda: not publisher.versions(), what="the lease's end")
        (slot,) = publisher.arena.slots("demo")
        lock = SlotLock.try_exclusive(slot)
        assert lock is not None
        lock.release()


# tensors of torch -----------------------------------------------------------------------------------------------------


def torch_back(publisher: Publisher) -> dict[str, torch.Tensor]:
    record = publisher.versions()[-1]
    found = {}
    with SlotReader.open(record.slot, manifest_digest=record.manifest_digest) as reader:
        reader.verify_all()
        for name, entry in reader.manifest.tensors.items():
            raw = torch.tensor(list(bytes(reader.buffer(name))), dtype=torch.uint8)
            found[name] = raw.view(getattr(torch, entry.dtype)).reshape(entry.shape)
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits, others = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and bits.equal(others)


GPU = pytest.param("bfloat16", "cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("name", "device"), [*((name, "cpu") for name in sorted(ITEMSIZE)), GPU])
def test_every_dtype(publisher: Publisher, name: str, device: str) -> None:
    raw = torch.arange(300 * 50 * ITEMSIZE[name]).to(torch.uint8)
    tensor = (raw % 2 if name == "bool" else raw).view(getattr(torch, name)).reshape(300, 50)
    there = tensor.to(device)
    publisher.publish({"contiguous": there, "transposed": there.t()}, activate=False)
    found = torch_back(publisher)
    assert same_bits(found["contiguous"], tensor)
    assert same_bits(found["transposed"], tensor.t())


def test_odd_tensors(publisher: Publisher) -> None:
    base = torch.randn(6, 4, 8, dtype=torch.float32)
    tensors = {
        "parameter": torch.nn.Parameter(base[0].clone()),
        "grad": base[1].clone().requires_grad_() * 2,
        "permuted": base.permute(2, 0, 1),
        "sliced": base[1:5:2, :, 3],
        "offset": base.flatten()[7:23],
        "expanded": torch.tensor([1.5]).expand(3, 5),
        "scalar": torch.tensor(4, dtype=torch.int64),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "conjugate": torch.randn(4).bfloat16(),
        "large": torch.randn(1 << 19),  # more than one chunk
    }
    publisher.publish(tensors.items(), activate=False)
    found = torch_back(publisher)
    for name, tensor in tensors.items():
        assert same_bits(found[name], tensor.detach()), name


def test_publishing_leaves_the_tensor_resizable(publisher: Publisher) -> None:
    tensor = torch.randn(16)
    publisher.publish({"w": tensor}, activate=False)
    tensor.untyped_storage().resize_(0)  # what offloading does; sharing the storage with numpy would forbid it


def offloaded() -> torch.Tensor:
    tensor = torch.zeros(1 << 20)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(2, device="meta"), torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex64), offloaded()],
    ids=["meta", "sparse", "complex", "offloaded"],
)
def test_tensors_without_plain_bytes_are_refused(publisher: Publisher, tensor: torch.Tensor) -> None:
    with refused("unsupported_dtype", match="'w'"):
        publisher.publish({"w": tensor}, activate=False)


def test_a_sharded_tensor_is_refused_with_advice(publisher: Publisher) -> None:
    there = dist.is_initialized()  # by a test of vLLM's models in this process
    if not there:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.zeros(4, 4), DeviceMesh("cpu", [0]), [Shard(0)])
        with refused("unsupported_dtype", match="full_tensor"):
            publisher.publish({"w": sharded}, activate=False)
        publisher.publish({"w": sharded.full_tensor()}, activate=False)
    finally:
        if not there:
            dist.destroy_process_group()


def test_dtypes_of_torch_in_a_schema(publisher: Publisher) -> None:
    with publisher.begin([("w", torch.bfloat16, torch.Size([2, 3]))]) as draft:
        with refused("dtype_mismatch", match="float32, the served model has bfloat16"):
            draft.write("w", torch.zeros(2, 3))
        draft.write("w", torch.zeros(2, 3, dtype=torch.bfloat16))
        assert draft.commit() == 1
