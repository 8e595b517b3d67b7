"""What the instance does when its engine cannot flip, on an engine that fails on purpose."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from server.errors import ConfigError
from server.instance import sidecar
from server.instance.config import InstanceConfig
from server.instance.hosts import Places
from server.instance.middleware import Admission
from server.instance.sidecar import Sidecar, reference_schema
from tests.waiting import eventually
from weightsync.control.records import ActiveRecord, FormRecord, InstanceRecord, Keys, VersionRecord
from weightsync.errors import ConfigMismatch, VersionRefused
from weightsync.store import open_store


class BrokenEngine:
    async def commit(self, version: int, epoch: int) -> dict[str, float]:
        raise RuntimeError("a worker died in the flip")


async def test_a_torn_instance_says_so_and_then_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error goes to the participant, which writes TORN; the process ends a moment later, to be started anew."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(sidecar, "TORN_LINGER_S", 0.05)
    config = InstanceConfig(model_dir=tmp_path, model="m", store="sqlite:///unused.db", instance_id="i")
    engine: Any = BrokenEngine()
    torn = Sidecar(config, engine, Admission(None), address="http://127.0.0.1:1")
    version = VersionRecord(2, "ready", "slot", 1, "d", None, None, "p", 1, 0.0, "", 1)
    with pytest.raises(RuntimeError, match="died in the flip"):
        await torn._commit(ActiveRecord(2, 2, 1, "s", 0.0), version)
    assert not killed, "the record must be written before the process ends"
    await eventually(lambda: killed == [(os.getpid(), signal.SIGTERM)])


@pytest.mark.parametrize(
    ("state", "dead", "waits"), [("SERVING", False, True), ("SERVING", True, False), ("TORN", False, False)]
)
async def test_it_waits_for_requests_that_can_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, dead: bool, waits: bool
) -> None:
    emptied = []

    async def empty(_: object, drain_s: float) -> None:
        emptied.append(drain_s)

    config = InstanceConfig(model_dir=tmp_path, model="m", store="sqlite:///unused.db", instance_id="i", drain_s=7.0)
    engine: Any = WellEngine()
    engine.dead = dead
    leaving = Sidecar(config, engine, Admission(None), address="http://127.0.0.1:1")
    participant: Any = SimpleNamespace(record=InstanceRecord("i", "http://127.0.0.1:1", state=state))
    monkeypatch.setattr(leaving, "_participant", participant)
    monkeypatch.setattr(leaving, "_empty", empty)
    assert (await leaving.leave(), emptied) == (waits, [7.0] if waits else [])


class WellEngine:
    """It has nothing to do here."""

    max_num_seqs = 1
    dead = False
    hosts = ("",)

    async def prepare(self, *_: object, **__: object) -> None: ...

    async def pause(self, *_: object) -> None: ...

    async def resume(self, *_: object) -> None: ...

    async def died(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("name", ["ordered", "_has_active"])
async def test_an_instance_that_cannot_take_part_any_more_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Else it would answer requests for ever, with the weights that it happens to have."""
    killed = asyncio.Event()
    monkeypatch.setattr(os, "kill", lambda *_: killed.set())

    async def fail(*_: object) -> None:
        raise RuntimeError("what no code expects")

    monkeypatch.setattr(sidecar, name, fail)
    url = f"sqlite://{tmp_path / 'store.db'}"
    config = InstanceConfig(model_dir=tmp_path, model="m", store=url, instance_id="i")
    engine: Any = WellEngine()
    failing = Sidecar(config, engine, Admission(None), address="http://127.0.0.1:1")
    async with failing.running(), asyncio.timeout(20):
        await killed.wait()


def test_schema_comes_from_the_checkpoint_and_is_empty_without_weights(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    schema = reference_schema(checkpoints["a"])
    assert ["lm_head.weight", "bfloat16", [512, 128]] in schema
    assert reference_schema(tmp_path) == []


class StagingEngine:
    """Says `path` and `fingerprint` of what it stages; notes what it is told to drop."""

    hosts = ("",)

    def __init__(self) -> None:
        self.path, self.fingerprint = "pointer", "f2"
        self.dropped: list[tuple[int, bool]] = []

    async def stage(self, version: VersionRecord, timeout_s: float, places: Places, _: object) -> dict[str, Any]:
        return {"stage_ms": 1.0, "staging_gbps": 1.0, "path": self.path, "fingerprint": self.fingerprint}

    async def drop(self, version: int, *, previous: bool) -> None:
        self.dropped.append((version, previous))


@pytest.mark.parametrize(
    ("path", "fingerprint", "previous"),
    [("pointer", "f2", True), ("retained", "f2", False), ("retained", "other", True), ("retained", "", False)],
)
async def test_an_aborted_swap_leaves_only_what_was_held_before_it_and_is_as_published(
    tmp_path: Path, path: str, fingerprint: str, previous: bool
) -> None:
    config = InstanceConfig(model_dir=tmp_path, model="m", store="sqlite:///unused.db", instance_id="i")
    engine: Any = StagingEngine()
    store: Any = None  # not asked where there is one host
    staging = Sidecar(config, engine, Admission(None), address="http://127.0.0.1:1")
    version = VersionRecord(2, "ready", "slot", 1, "d", None, None, "p", 1, 0.0, "", 1, fingerprint="f2")
    engine.path, engine.fingerprint = path, fingerprint
    await staging._stage(store, version)
    await staging._drop(version)
    assert engine.dropped == [(2, previous)]


async def test_the_first_version_must_be_one_for_the_configuration_that_the_engine_has(tmp_path: Path) -> None:
    """An engine that waits for a first version was started with its directory's."""
    (tmp_path / "config.json").write_text('{"model_type": "m", "rope_theta": 1e4}')
    url = f"sqlite://{tmp_path / 'store.db'}"
    config = InstanceConfig(model_dir=tmp_path, model="m", store=url, instance_id="i")
    engine: Any = StagingEngine()
    staging = Sidecar(config, engine, Admission(None), address="http://127.0.0.1:1")
    store = open_store(url)
    for form, theta in (("same", 1e4), ("other", 1e6)):
        wanted = json.dumps({"model_type": "m", "rope_theta": theta, "use_cache": True})
        await store.put(Keys("m").form(form), FormRecord("[]", wanted).to_json())
    version = VersionRecord(1, "ready", "slot", 1, "d", None, None, "p", 1, 0.0, "", 1, fingerprint="f2", form="same")
    await staging._stage(store, version)
    with pytest.raises(ConfigMismatch, match="another rope_theta"):
        await staging._stage(store, replace(version, form="other"))
    await store.close()


async def test_a_version_is_staged_beside_the_warm_up_and_not_before_that_has_ended(tmp_path: Path) -> None:
    """A staging that is given up meanwhile (the version is retired, or its peer is lost) leaves it to the next one."""
    warm, began = asyncio.Event(), asyncio.Event()

    class Engine(WellEngine, StagingEngine):
        async def stage(self, *given: Any) -> dict[str, Any]:
            began.set()
            return await super().stage(*given)

    async def warm_up() -> None:
        await warm.wait()

    engine: Any = Engine()
    store: Any = None
    url = f"sqlite://{tmp_path / 'store.db'}"
    config = InstanceConfig(model_dir=tmp_path, model="m", store=url, instance_id="i")
    starting = Sidecar(config, engine, Admission(None), address="http://127.0.0.1:1", warm_up=warm_up)
    version = VersionRecord(2, "ready", "slot", 1, "d", None, None, "p", 1, 0.0, "", 1, fingerprint="f2")
    async with asyncio.timeout(20), starting.running():
        first = asyncio.create_task(starting._stage(store, version))
        await began.wait()
        first.cancel()
        await asyncio.wait({first})
        assert first.cancelled()
        await starting._drop(version)
        assert engine.dropped == [(2, True)], "what it had built is not taken for that version again"
        began.clear()
        second = asyncio.create_task(starting._stage(store, version))
        await began.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not second.done()
        warm.set()
        assert (await second).fingerprint == "f2"
    warm.clear()
    ending = Sidecar(config, engine, Admission(None), address="http://127.0.0.1:1", warm_up=warm_up)
    async with asyncio.timeout(20), ending.running():
        pass  # it ends before it is warm


async def test_what_no_trusted_key_has_signed_does_not_get_to_the_engine(tmp_path: Path) -> None:
    """tests/weightsync/format/test_signing.py has what counts as signed."""
    key = ed25519.Ed25519PrivateKey.generate().public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    trusted = tmp_path / "publisher.pub"
    trusted.write_bytes(key.public_bytes(serialization.Encoding.PEM, form))
    given: dict[str, Any] = {"model_dir": tmp_path, "model": "m", "store": "sqlite:///unused.db", "instance_id": "i"}
    engine: Any = StagingEngine()
    store: Any = None
    staging = Sidecar(InstanceConfig(**given, trust=(trusted,)), engine, Admission(None), address="http://127.0.0.1:1")
    version = VersionRecord(2, "ready", "slot", 1, "d", None, None, "p", 1, 0.0, "", 1, fingerprint="f2")
    with pytest.raises(VersionRefused, match="version 2 is not signed"):
        await staging._stage(store, version)
    with pytest.raises(ConfigError, match="--trust"):
        InstanceConfig(**given, trust=(tmp_path / "none.pub",))
