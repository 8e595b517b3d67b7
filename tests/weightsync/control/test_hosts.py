"""Names of slots among several hosts, what is done with those of other hosts, and where ranks of one host listen."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.weightsync.codes import refused
from tests.weightsync.tensors import model
from weightsync import Adapter, Publisher, Store
from weightsync.control.hosts import arena_key, check_host, host_of, keep_to_loopback, local_path, slot_name, this_host
from weightsync.control.parts import slots_of
from weightsync.control.records import ArenaRecord, CopyRecord, Keys, PartRecord
from weightsync.errors import ManifestError, RecordError
from weightsync.peer.copies import local_slot, own_copies, parse_key, ready_digests
from weightsync.publish.delta import Base, DeltaHeader
from weightsync.push import _base_slot
from weightsync.versions import Records, opened

KEYS = Keys("demo")
DIGEST = "0123456789abcdef0123456789abcdef"
ADAPTER = Adapter({"x.lora_A.weight": np.ones((2, 8), np.float32)}, {"r": 2})


def copy(host: str, digest: str = DIGEST, state: str = "ready", slot: str = "/dev/shm/x/slot-9") -> CopyRecord:
    return CopyRecord(host, slot_name(slot, host), digest, 10, state, f"{host}:1", 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["a", "node-1", "10.0.0.7", "gpu-a.rack-3.example", "a" * 63])
def test_a_name_leads_back_to_the_path_on_its_host_only(host: str) -> None:
    name = slot_name(Path("/dev/shm/x/slot-1"), host)
    assert (host_of(name), local_path(name, host)) == (host, Path("/dev/shm/x/slot-1"))
    assert local_path(name, "") is None
    assert local_path(name, "other") is None


def test_on_the_one_host_a_name_is_the_path() -> None:
    assert slot_name("/dev/shm/x/slot-1", "") == "/dev/shm/x/slot-1"
    assert slot_name("//dev/shm/x/slot-1", "") == "/dev/shm/x/slot-1"  # not host `dev`
    assert local_path("/dev/shm/x/slot-1", "") == Path("/dev/shm/x/slot-1")
    assert local_path("/dev/shm/x/slot-1", "a") is None
    assert (arena_key(""), arena_key("a")) == ("arena", "arenas/a")


@pytest.mark.parametrize("host", ["A", "-a", "a-", "a_b", "a/b", "a" * 64, "ä", "a b"])
def test_bad_host_names(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_HOST", host)
    with refused("host_name", match="HOTSWAP_HOST"):
        this_host()
    with refused("host_name"):
        slot_name("/x", check_host(host))


@pytest.mark.parametrize("slot", ["//", "//a", "///x", "//A/x", "//a b/x"])
def test_what_is_no_slot_name(slot: str) -> None:
    with pytest.raises(RecordError, match="slot name"):
        host_of(slot)


async def test_copies_of_one_model_and_host(store: Store) -> None:
    assert parse_key(KEYS, KEYS.copy(DIGEST, "b")) == (DIGEST, "b")
    assert parse_key(KEYS, Keys("demo/small").copy(DIGEST, "b")) is None
    other = "f" * 32
    for record in (copy("a"), copy("b"), copy("b", other, "fetching")):
        await store.put(KEYS.copy(record.digest, record.host), record.to_json())
    await store.put(Keys("demo/small").copy(other, "b"), copy("b", other).to_json())
    assert await ready_digests(store, KEYS) == {DIGEST}
    assert set(await own_copies(store, KEYS, "b")) == {DIGEST, other}
    assert await own_copies(store, KEYS, "") == {}


def test_a_slot_is_where_its_name_says_or_where_the_copy_is() -> None:
    part = PartRecord("", 1, "//a/dev/shm/x/slot-1", DIGEST, 10)
    assert local_slot(part, "a", {}) == Path("/dev/shm/x/slot-1")
    assert local_slot(part, "b", {}) is None
    assert local_slot(part, "b", {DIGEST: copy("b")}) == Path("/dev/shm/x/slot-9")
    assert local_slot(part, "b", {DIGEST: copy("b", state="fetching")}) is None


def test_a_publisher_on_a_named_host(store_url: str, monkeypatch: pytest.MonkeyPatch, arena_directory: Path) -> None:
    """It has an arena of its own, names its slots after its host, and reads them back there only."""
    monkeypatch.setenv("HOTSWAP_HOST", "a")
    with Publisher(store_url, model="demo", keep=1) as publisher:
        for number in range(8):  # more than are kept: slots are reused
            publisher.publish(model(number), activate=False)
        publisher.publish(ADAPTER, part="lora/x", onto=8, activate=False)
        newest = max((v for v in publisher.versions() if v.state == "ready"), key=lambda v: v.version)
        arena = publisher._store.get("arenas/a")
        assert arena is not None
        assert ArenaRecord.from_json(arena.value).directory == str(arena_directory)
        assert publisher._store.get("arena") is None
    assert all(slot.startswith(f"//a{arena_directory}/slot-") for slot in slots_of(newest))
    assert len(list(arena_directory.glob("slot-*"))) < 8
    with opened(Records.read(store_url, "demo").ready(newest.version)) as slots:
        assert set(slots) == {"", "lora/x"}
    monkeypatch.setenv("HOTSWAP_HOST", "b")
    elsewhere = Records.read(store_url, "demo").ready(None)
    with pytest.raises(ManifestError, match="is on host a"), opened(elsewhere):
        pass


def test_what_other_hosts_have_copies_of_is_carried_on(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part published on b goes with the base that lies on a, if some host has that whole; else there is no base."""
    monkeypatch.setenv("HOTSWAP_HOST", "a")
    with Publisher(store_url, model="demo", lineage="base") as publisher:
        first = publisher.publish(model(1.0), activate=False)
        base = publisher.versions()[0]
    monkeypatch.setenv("HOTSWAP_HOST", "b")
    with Publisher(store_url, model="demo", lineage="tuner") as publisher:
        with pytest.raises(Exception, match="no base model"):
            publisher.publish(ADAPTER, part="lora/x", onto=first, activate=False)
        publisher._store.put(KEYS.copy(base.manifest_digest, "c"), copy("c", base.manifest_digest).to_json())
        second = publisher.publish(ADAPTER, part="lora/x", onto=first, activate=False)
        record = next(v for v in publisher.versions() if v.version == second)
    assert record.slot == base.slot
    assert [host_of(part.slot) for part in record.parts] == ["b"]


def test_the_base_of_a_delta_must_be_on_this_host(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_HOST", "a")
    with Publisher(store_url, model="demo", lineage="one") as publisher:
        publisher.publish(model(1.0), activate=False)
        record = publisher.versions()[0]
        header = DeltaHeader("demo", {}, Base(1, record.manifest_digest))
        with _base_slot(publisher, header) as slot:
            assert slot is not None
    monkeypatch.setenv("HOTSWAP_HOST", "b")
    with Publisher(store_url, model="demo", lineage="two") as publisher:
        with refused("unknown_base", match="is not here"), _base_slot(publisher, header):
            pass
        path = local_path(record.slot, "a")
        here = copy("b", record.manifest_digest, slot=str(path))
        publisher._store.put(KEYS.copy(here.digest, "b"), here.to_json())
        with _base_slot(publisher, header) as slot:
            assert slot is not None
            assert slot.path == path


def test_two_hosts_have_arenas_of_their_own(store_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for host in ("a", "b"):
        monkeypatch.setenv("HOTSWAP_HOST", host)
        monkeypatch.setenv("HOTSWAP_ARENA", str(tmp_path / host))
        with Publisher(store_url, model="demo", lineage=host) as publisher:
            assert publisher.arena.directory == tmp_path / host
    (tmp_path / "b").chmod(0o777)
    with refused("arena_unavailable"):
        Publisher(store_url, model="demo")


def test_bytes_of_a_slot_follow_from_its_contents(store_url: str, arena_directory: Path) -> None:
    """Bytes that an earlier version of another shape left in the gaps and behind the manifest are gone."""
    tensors = {"a": np.ones(3, np.float32), "b": np.ones(5, np.int8)}
    with Publisher(store_url, model="demo") as publisher:
        with publisher.begin([(n, str(t.dtype), t.shape) for n, t in tensors.items()]) as draft:
            mapping, layout = draft._claim.mapping, draft._layout
            mapping[64:] = b"\xff" * (len(mapping) - 64)
            for name, tensor in tensors.items():
                draft.write(name, tensor)
            manifest = draft._complete([])
            draft.commit()
        image = bytearray(mapping[:])
    image[: 64 + len(manifest.to_json())] = bytes(64 + len(manifest.to_json()))
    for name, tensor in tensors.items():
        image[layout.offsets[name] : layout.offsets[name] + tensor.nbytes] = bytes(tensor.nbytes)
    assert not any(image)


def test_the_interfaces_of_the_environment_go_before_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    keep_to_loopback()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "eth1")
