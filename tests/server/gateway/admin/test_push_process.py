"""The processes that publish for a gateway: one a publication, warm from the second on, ended when they hang."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.errors import HttpError
from server.gateway.access.records import By
from server.gateway.config import GatewayConfig, NamedSettings
from server.gateway.error_map import to_http
from server.gateway.models import publishing
from server.gateway.models.publishing import Edition, Publication, Published, Pusher
from tests.server.refusals import refuses
from tests.waiting import eventually
from tests.weightsync.tensors import model, save_safetensors
from tests.weightsync.test_signing import pair
from weightsync import SyncStore
from weightsync.control.chain import recent
from weightsync.control.editions import key_of, prefix_of
from weightsync.control.records import ActiveRecord, Keys, VersionRecord
from weightsync.errors import WeightSyncError
from weightsync.signing import Trust
from weightsync.store import open_store


@pytest.fixture
async def pusher(tmp_path: Path, arena: Path) -> AsyncIterator[Pusher]:
    url = f"sqlite://{tmp_path / 'store.db'}"
    SyncStore(url).close()
    made = Pusher(GatewayConfig(store=url, model="demo"))
    yield made
    await made.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    save_safetensors(directory / "model.safetensors", model(1.0))
    return directory


HANGS = """
import threading, time
def keep_a_lease_alive():
    while True:
        time.sleep(0.1)
        open("/dev/null", "wb").write(b"alive")
threading.Thread(target=keep_a_lease_alive, daemon=True).start()
threading.Event().wait()
"""


async def version(number: int) -> int:
    return number


async def version_of(answer: dict[str, Any]) -> int:
    return int(answer["version"])


def one(path: Path, **more: Any) -> Publication:
    """Unchecked, as no request's body is."""
    return Publication.model_construct(path=str(path), **more)


async def spare_of(pusher: Pusher) -> asyncio.subprocess.Process:
    assert pusher._spare is not None
    return await asyncio.shield(pusher._spare)


async def test_a_publication_is_signed_with_the_key_that_is_named(
    pusher: Pusher, checkpoint: Path, tmp_path: Path
) -> None:
    private, public = pair(tmp_path, "k")
    pusher._config = replace(pusher._config, named=NamedSettings(sign_key=(f"ops={private}",)))
    await pusher.push(one(checkpoint, sign_key="ops"), version, By("key ops (1)", "a good one", admin=True))
    store = open_store(pusher._config.store)
    found = await store.get(Keys("demo").version(1))
    assert found is not None
    Trust([public]).check("demo", VersionRecord.from_json(found.value))
    (entry,) = await recent(store, 10)
    assert (entry.action, entry.who, entry.reason) == ("publish", "key ops (1)", "a good one")
    await store.close()
    with refuses(400, match=r"no --sign-key .*another \(ops\)"):
        await pusher.push(one(checkpoint, sign_key=str(private)), version)


async def test_a_push_names_the_files_that_the_version_keeps(pusher: Pusher, checkpoint: Path) -> None:
    async def kept(pushed: Published) -> tuple[str, ...]:
        return pushed.kept

    (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    (checkpoint / "generation_config.json").write_text('{"top_k": 5}')
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    assert await pusher.push(one(checkpoint), kept) == ()
    await activated(pusher, 1)
    (checkpoint / "chat_template.jinja").unlink()
    assert await pusher.push(one(checkpoint), kept) == ("chat template",)
    (checkpoint / "config.json").unlink()
    assert await pusher.push(one(checkpoint), kept) == ("config.json", "generation_config.json", "chat template")


async def activated(pusher: Pusher, number: int) -> None:
    """Later versions follow it."""
    active = ActiveRecord(number, 1, None, "s", 0.0)
    store = open_store(pusher._config.store)
    await store.put(Keys("demo").active, active.to_json())
    await store.close()


async def test_from_the_second_publication_on_a_process_waits_for_it(pusher: Pusher, checkpoint: Path) -> None:
    assert await pusher.push(one(checkpoint), version) == 1
    waiting = await spare_of(pusher)
    assert await pusher.push(one(checkpoint), version) == 2
    assert waiting.returncode == 0  # it was the one that published
    after = await spare_of(pusher)
    assert after.pid != waiting.pid
    broken = checkpoint.parent / "broken"
    broken.mkdir()
    with pytest.raises(HttpError, match="has no"):
        await pusher.push(one(broken), version)
    assert after.returncode == 1
    assert await pusher.push(one(checkpoint), version, step=7) == 3


async def test_the_same_upload_id_again_gives_the_same_version(pusher: Pusher, checkpoint: Path) -> None:
    for upload_id, number in (("follow-a", 1), ("follow-a", 1), ("follow-b", 2), ("", 3), ("", 4)):
        assert await pusher.push(one(checkpoint, upload_id=upload_id), version) == number


HOSTILE = ["--store", "-x", "--with=draft=/x", "lora/--json", "draft\0", "draft\ud800", "-" * 200]


@pytest.mark.parametrize("warm", [False, True])
async def test_no_value_of_a_client_s_is_taken_for_an_option(pusher: Pusher, checkpoint: Path, warm: bool) -> None:
    if warm:
        assert await pusher.push(one(checkpoint), version) == 1
    for value in HOSTILE:
        for how in ({"part": value}, {"parts": {value: str(checkpoint)}}, {"without": [value]}):
            with pytest.raises((HttpError, WeightSyncError)) as refused:
                await pusher.push(one(checkpoint, **how), version)
            error = refused.value if isinstance(refused.value, HttpError) else to_http(refused.value)
            assert (error.status, error.code) == (422, "bad_part"), error
    for path in ("/x\0y", "/x\ud800", f"/{'x' * 5000}", "/\n--store"):
        for what, how in ((checkpoint, {"parts": {"draft": path}}), (Path(path), {})):
            with pytest.raises(HttpError) as wrong:
                await pusher.push(one(what, **how), version)
            assert 400 <= wrong.value.status < 500, wrong.value


async def test_an_upload_id_is_taken_for_no_option(pusher: Pusher) -> None:
    for upload_id in ("--when-told", "--no-activate"):
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - the publication closes it
        with pytest.raises(HttpError) as refused:
            await pusher.push_delta(await pusher.prepare(file, upload_id), version_of)
        assert (refused.value.status, refused.value.code) == (422, "delta_error")


async def test_a_spare_that_died_is_not_missed(pusher: Pusher, checkpoint: Path) -> None:
    assert await pusher.push(one(checkpoint), version) == 1
    waiting = await spare_of(pusher)
    waiting.kill()
    await waiting.wait()
    assert await pusher.push(one(checkpoint), version) == 2


async def test_closing_ends_the_spare(pusher: Pusher, checkpoint: Path) -> None:
    assert await pusher.push(one(checkpoint), version) == 1
    waiting = await spare_of(pusher)
    await pusher.close()
    assert waiting.returncode is not None


async def test_a_publication_that_hangs_is_ended_and_the_next_one_goes_on(
    pusher: Pusher, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hanging = pusher._start, []

    async def hangs(options: tuple[str, ...], **how: Any) -> asyncio.subprocess.Process:
        if hanging:
            return await real(options, **how)
        hanging.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", HANGS, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
        )
        return hanging[0]

    monkeypatch.setattr(pusher, "_start", hangs)
    monkeypatch.setattr(publishing, "STALLED_S", 1.0, raising=False)
    stuck = asyncio.create_task(pusher.push(one(checkpoint), version))
    await asyncio.wait({stuck}, timeout=120)
    assert stuck.done(), "everybody else waits for it"
    error = stuck.exception()
    assert error.status == 504
    assert error.code == "push_stalled"
    monkeypatch.setattr(publishing, "STALLED_S", 60.0)
    assert await pusher.push(one(checkpoint), version) == 1


async def test_versions_are_compared_in_a_process_that_is_ended_when_it_takes_too_long(
    pusher: Pusher, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await pusher.push(one(checkpoint), version) == 1
    save_safetensors(checkpoint / "model.safetensors", model(2.0))
    assert await pusher.push(one(checkpoint), version) == 2
    found = await pusher.diff(1, 2)
    assert (found["a"], found["b"]) == (1, 2)
    assert {tensor["state"] for tensor in found["tensors"]} == {"changed"}
    with refuses(404, match="version 3 does not exist"):
        await pusher.diff(1, 3)
    hanging = await asyncio.create_subprocess_exec(sys.executable, "-c", HANGS, stdout=asyncio.subprocess.PIPE)

    async def hangs(options: tuple[str, ...], **how: Any) -> asyncio.subprocess.Process:
        return hanging

    monkeypatch.setattr(pusher, "_start", hangs)
    monkeypatch.setattr(pusher, "_config", replace(pusher._config, push_timeout_s=0.01))
    with refuses(504, match="ended; run `hotswap weights diff`"):
        await pusher.diff(1, 2)
    assert hanging.returncode is not None


BUSY_ELSEWHERE = """
import threading
threading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()
threading.Event().wait()
"""


@pytest.mark.parametrize("code", ["while True: pass", "while True: open('/dev/zero', 'rb').read(1)", BUSY_ELSEWHERE])
async def test_a_publication_that_works_is_not_taken_for_one_that_hangs(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "STALLED_S", 1.0)
    busy = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    try:
        for _ in range(2):
            seen = publishing._work_done(busy.pid)
            assert seen is not None
            await eventually(lambda seen=seen: publishing._work_done(busy.pid).has_gone_on(seen))  # type: ignore[misc]
    finally:
        busy.kill()
        await busy.wait()


async def test_an_edition_of_an_adapter_is_published_by_its_terms(
    pusher: Pusher, checkpoint: Path, tmp_path: Path
) -> None:
    await pusher.push(one(checkpoint), version)
    (place := tmp_path / "adapter").mkdir()
    save_safetensors(place / "adapter_model.safetensors", {"a.lora_A.weight": np.ones((2, 4), np.float32)})
    (place / "adapter_config.json").write_text('{"r": 2}')
    by = By("key ops (1)", "a good one", admin=True)
    made = [
        await pusher.push_edition(Edition(name="math", path=str(place), percent=25.0, keep=2, step=number), by)
        for number in (1, 2, 3)
    ]
    assert [(each["name"], each["percent"], each["step"]) for each in made] == [("math", 25.0, n) for n in (1, 2, 3)]
    store = open_store(pusher._config.store)
    found = (await store.list(prefix_of(Keys("demo"))))[0]
    assert [kv.key for kv in found] == [key_of(Keys("demo"), "math", each["number"]) for each in made[1:]]
    entry = max(await recent(store, 10), key=lambda entry: entry.number)
    assert (entry.action, entry.who, entry.subject) == ("publish", by.who, f"lora/math@{made[-1]['number']}")
    await store.close()
    with refuses(403, match="--checkpoints"):
        await pusher.push_edition(Edition(name="math", path=str(place)), By("key tuner (2)"))
    with refuses(400, match="absolute"):
        await pusher.push_edition(Edition(name="math", path="adapter"), by)
    with refuses(422, match="leave out the @"):
        await pusher.push_edition(Edition(name="math@7", path=str(place)), by)
