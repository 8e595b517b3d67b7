"""An instance whose engine cannot flip, on an engine that fails on purpose."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from server.errors import ConfigError
from server.instance import sidecar
from server.instance.config import Form
from server.instance.forms import tell_own
from server.instance.sidecar import reference_schema
from tests.server.instance.engines import Engine, config_of, sidecar_of, version
from tests.waiting import eventually
from tests.weightsync.codes import refused
from weightsync.control.records import ActiveRecord, FormRecord, Keys
from weightsync.errors import StoreRefused
from weightsync.signing import Trust
from weightsync.store import open_store

UNASKED: Any = None  # a store, where there is one host


async def test_a_torn_instance_says_so_and_then_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error goes to the participant, which writes TORN; the process ends a moment later, to be started anew."""

    class Broken(Engine):
        async def commit(self, version: int, epoch: int, withdrawn: bool) -> dict[str, float]:
            raise RuntimeError("a worker died in the flip")

    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(sidecar, "TORN_LINGER_S", 0.05)
    torn = sidecar_of(config_of(tmp_path), Broken())
    with pytest.raises(RuntimeError, match="died in the flip"):
        await torn._commit(ActiveRecord(2, 2, 1, "s", 0.0), version())
    assert not killed, "the record must be written before the process ends"
    await eventually(lambda: killed == [(os.getpid(), signal.SIGTERM)])


@pytest.mark.parametrize("name", ["ordered", "_has_active", "Participant._session"])
async def test_an_instance_that_cannot_take_part_any_more_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Else it would answer requests for ever, with the weights that it happens to have."""
    killed = asyncio.Event()
    monkeypatch.setattr(os, "kill", lambda *_: killed.set())

    async def fail(*_: object) -> None:
        raise RuntimeError("what no code expects")

    config = config_of(tmp_path)
    store = open_store(config.store)
    await store.put(Keys(config.model).active, ActiveRecord(1, 1, None, "s", 0.0).to_json())
    await store.close()
    monkeypatch.setattr(f"server.instance.sidecar.{name}", fail)
    async with sidecar_of(config).running(), asyncio.timeout(60):
        await killed.wait()


def test_schema_comes_from_the_checkpoint_and_is_empty_without_weights(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    schema = reference_schema(checkpoints["a"])
    assert ["lm_head.weight", "bfloat16", [512, 128]] in schema
    assert reference_schema(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "fingerprint", "previous"),
    [("pointer", "f2", True), ("retained", "f2", False), ("retained", "other", True), ("retained", "", False)],
)
async def test_an_aborted_swap_leaves_only_what_was_held_before_it_and_is_as_published(
    tmp_path: Path, path: str, fingerprint: str, previous: bool
) -> None:
    engine: Any = Engine()
    engine.path, engine.fingerprint = path, fingerprint
    staging = sidecar_of(config_of(tmp_path), engine)
    staged = await staging._stage(UNASKED, version())
    assert staged.staging_gbps == (0.0 if path == "retained" else 1.0), "no rate is made up for what was held already"
    await staging._drop(version())
    assert engine.dropped == [(2, previous)]


async def test_the_first_version_must_be_one_for_the_configuration_that_the_engine_has(tmp_path: Path) -> None:
    """An engine that waits for a first version was started with its directory's."""
    (tmp_path / "config.json").write_text('{"model_type": "m", "rope_theta": 1e4}')
    config = config_of(tmp_path)
    staging, store = sidecar_of(config), open_store(config.store)
    for form, theta in (("same", 1e4), ("other", 1e6)):
        wanted = json.dumps({"model_type": "m", "rope_theta": theta, "use_cache": True})
        await store.put(Keys(config.model).form(form), FormRecord("[]", wanted).to_json())
    await staging._stage(store, version(1, form="same"))
    with refused("config_mismatch", match="another rope_theta"):
        await staging._stage(store, version(1, form="other"))
    await store.close()


async def test_an_instance_tells_the_configuration_of_its_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It tells before it waits for a version: the first may have none."""
    config = config_of(tmp_path)
    key = Keys(config.model).config
    store = open_store(config.store)
    await tell_own(config, store)
    assert await store.get(key) is None, "a directory without config.json says nothing"
    for theta in (1, 2):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "m", "rope_theta": theta}))
        told = b'{"model_type": "m", "rope_theta": %d}' % theta
        async with sidecar_of(config).running():
            while (found := await store.get(key)) is None or found.value != told:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await store.close()
    assert "rope_theta of" in caplog.text, "the one before it had another"


async def test_a_role_of_a_release_before_keeps_no_instance_from_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = config_of(tmp_path)
    store = open_store(config.store)

    async def refuse(*given: Any) -> None:
        raise StoreRefused("memory:", "permission denied", "Grant it")

    monkeypatch.setattr(store, "put", refuse)
    await tell_own(config, store)
    await store.close()


async def test_a_version_is_staged_beside_the_warm_up_and_not_before_that_has_ended(tmp_path: Path) -> None:
    """A staging that is given up meanwhile (the version is retired, or its peer is lost) leaves it to the next one."""
    warm, began = asyncio.Event(), asyncio.Event()

    class Staging(Engine):
        async def stage(self, *given: Any) -> dict[str, Any]:
            began.set()
            return await super().stage(*given)

    async def warm_up() -> None:
        await warm.wait()

    engine, config = Staging(), config_of(tmp_path)
    starting = sidecar_of(config, engine, warm_up=warm_up)
    async with asyncio.timeout(60), starting.running():
        first = asyncio.create_task(starting._stage(UNASKED, version()))
        await began.wait()
        first.cancel()
        await asyncio.wait({first})
        assert first.cancelled()
        await starting._drop(version())
        assert engine.dropped == [(2, True)], "what it had built is not taken for that version again"
        began.clear()
        second = asyncio.create_task(starting._stage(UNASKED, version()))
        await began.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not second.done()
        warm.set()
        assert (await second).fingerprint == "f2"
    warm.clear()
    async with asyncio.timeout(60), sidecar_of(config, engine, warm_up=warm_up).running():
        pass  # it ends before it is warm


async def test_what_no_trusted_key_has_signed_does_not_get_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/weightsync/test_signing.py has the keys that count. They are compared with those of the engine."""
    key = ed25519.Ed25519PrivateKey.generate().public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    trusted = tmp_path / "publisher.pub"
    trusted.write_bytes(key.public_bytes(serialization.Encoding.PEM, form))
    with refused("version_refused", match="version 2 is not signed"):
        await sidecar_of(config_of(tmp_path, trust=(trusted,)))._stage(UNASKED, version())
    config, checked = config_of(tmp_path, trust=(trusted,)), list[str | None]()
    monkeypatch.setattr(Trust, "check", lambda self, model, record, config=None: checked.append(config))
    (config.model_dir / "config.json").write_text('{"name": "own"}')
    for form in (Form("digest", config='{"name": "form"}'), Form("digest")):
        await sidecar_of(replace(config, form=form))._stage(UNASKED, version())
    assert checked == ['{"name": "form"}', '{"name": "own"}']
    with pytest.raises(ConfigError, match="--trust"):
        config_of(tmp_path, trust=(tmp_path / "none.pub",))
