"""The admin routes, with the real store, the real push process and participants that build nothing."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pytest
from safetensors.numpy import save_file

from server.errors import HttpError
from server.gateway import UpstreamSettings
from server.gateway.error_map import STATUS, from_fields, to_http
from server.gateway.models.publishing import Pusher
from tests.server.gateway.harness import (
    ADMIN,
    RunningGateway,
    ask,
    code,
    get,
    post,
    running_gateway,
)
from tests.server.gateway.upstream import Handler, Link, Received, answering, upstream
from tests.waiting import eventually
from tests.weightsync.fleet import Engine
from weightsync import ensure_arena, open_store
from weightsync.control.agent import Participant
from weightsync.control.records import ActiveRecord, InstanceRecord, VersionRecord
from weightsync.control.swap import CommitResult, StageResult
from weightsync.error_codes import CODES
from weightsync.errors import StoreUnavailable, arena_full, shape_mismatch

SETTINGS = UpstreamSettings(scrape_interval_s=3600.0)


@pytest.fixture
def gateway(tmp_path: Path, arena: Path) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path, upstream=SETTINGS, swap_deadline_s=20.0) as g:
        g.store.run(ensure_arena(g.store.store, arena))
        yield g


@dataclass
class Toy:
    """A participant that notes what it is asked for; `refuse` breaks its staging, `hold` delays it."""

    refuse: Exception | None = None
    hold: asyncio.Event | None = None
    staged: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    async def stage(self, version: VersionRecord) -> StageResult:
        self.staged.append(version.version)
        if self.hold is not None:
            await self.hold.wait()
        if self.refuse is not None:
            raise self.refuse
        return StageResult(fingerprint=version.fingerprint, path="toy", expected_flip_ms=3.5, device_copies=2)

    async def commit(self, active: ActiveRecord, _: VersionRecord) -> CommitResult:
        self.committed.append(active.version)
        return CommitResult()


def answering_as(toy: Toy) -> Handler:
    """Answers probes as an instance whose engine is `toy`."""

    async def answer(link: Link, _: Received) -> None:
        spans = [{"start": 0, "end": 1, "version": toy.committed[-1]}]
        choice = {"text": "x", "token_ids": [5], "logprobs": [-0.5], "weight_versions": spans}
        await link.json(orjson.dumps({"choices": [choice]}))

    return answer


@contextlib.asynccontextmanager
async def participating(
    gateway: RunningGateway, toy: Toy | Engine, name: str = "i0", address: str = "http://127.0.0.1:1"
) -> AsyncIterator[Participant]:
    store = open_store(gateway.gateway.config.store)
    record = InstanceRecord(name, address)
    member = Participant(store, gateway.gateway.config.model, record, toy.stage, toy.commit)
    member.start()
    try:
        await asyncio.wait_for(member.serving(), 60)
        yield member
    finally:
        await member.stop()
        await store.close()


@contextlib.contextmanager
def two_participants(gateway: RunningGateway) -> Iterator[None]:
    """Instances "a" and "b", which take each version."""
    with contextlib.ExitStack() as stack:
        for name in ("a", "b"):
            member = participating(gateway, Toy(), name)
            gateway.store.run(member.__aenter__())
            stack.callback(lambda member=member: gateway.store.run(member.__aexit__(None, None, None)))
        yield


def checkpoint(directory: Path, **shapes: tuple[int, ...]) -> str:
    directory.mkdir(exist_ok=True)
    tensors = {name: np.full(shape, 0.5, np.float32) for name, shape in (shapes or {"a": (4, 4), "b": (8,)}).items()}
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


# the life of a version


async def test_push_activate_list_and_roll_back(gateway: RunningGateway, tmp_path: Path) -> None:
    toy = Toy()
    path = checkpoint(tmp_path / "model")
    async with participating(gateway, toy):
        status, first = await ask(gateway, "POST", "/weights", path=path, activate=True)
        assert (status, first["version"], first["swap"]["ok"]) == (200, 1, True)
        assert first["swap"]["prepare_ms"] >= 0
        assert list(first["swap"]["instances"]) == ["i0"]

        status, second = await ask(gateway, "POST", "/weights", path=path, activate=False)
        assert (status, second) == (200, {"version": 2, "swap": None, "kept": []})
        assert toy.committed == [1]

        status, swap = await ask(gateway, "POST", "/weights/activate", version=2)
        assert (status, swap.get("version"), swap.get("previous")) == (200, 2, 1), swap

        status, listed = await ask(gateway, "GET", "/weights")
        assert [(v["version"], v["state"]) for v in listed["versions"]] == [(1, "ready"), (2, "ready")]
        assert listed["active"]["version"] == 2

        status, back = await ask(gateway, "POST", "/weights/rollback")
        assert (status, back["version"]) == (200, 1)
        assert toy.committed == [1, 2, 1]

        status, active = await ask(gateway, "GET", "/weights/active")
        assert (active["version"], active["epoch"], active["previous"]) == (1, 3, 2)

        status, fleet = await ask(gateway, "GET", "/instances")
        (row,) = fleet["instances"]
        assert (row["id"], row["state"], row["active_version"], row["in_flight"]) == ("i0", "SERVING", 1, 0)
        assert (row["expected_flip_ms"], row["device_copies"]) == (3.5, 2)
        page = (await gateway.ask(get("/metrics"))).body.decode()
        assert re.search(r'^hotswap_instance_device_copies\{.*"i0".*\} 2', page, re.MULTILINE)
        await eventually(lambda: gateway.gateway.default.stats.swaps.ended["done"] == 3)


async def test_a_rolling_swap_and_a_rollback_to_a_named_version(gateway: RunningGateway, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    assert (await ask(gateway, "GET", "/swap"))[1] == {"model": "toy", "swap": None}
    toy = Toy()
    async with upstream(answering_as(toy)) as instance, participating(gateway, toy, address=instance.address):
        for version in (1, 2, 3):
            body = {"path": path, "mode": "rolling", "drain_s": 0, "deadline_s": 60}
            status, pushed = await ask(gateway, "POST", "/weights", **body)
            assert (status, pushed["swap"]["version"]) == (200, version), pushed
        swap = pushed["swap"]
        assert (swap["mode"], swap["canary"], swap["probe"]) == ("rolling", "i0", "passed")
        status, found = await ask(gateway, "GET", "/swap")
        last = found["swap"]
        assert (last["id"], last["phase"], last["in_flight"]) == (swap["id"], "done", False)
        status, back = await ask(gateway, "POST", "/weights/rollback", version=2, mode="together")
        assert (status, back["version"], back["mode"], back["probe"]) == (200, 2, "together", None)


async def test_versions_share_the_traffic_by_the_admin_port(gateway: RunningGateway, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    async with participating(gateway, one := Toy()):
        for activate in (True, False):
            assert (await ask(gateway, "POST", "/weights", path=path, activate=activate))[0] == 200
        status, alone = await ask(gateway, "POST", "/weights/split", **halves(1, 2))
        assert (status, alone["code"]) == (409, "not_enough_instances")
        assert (alone["needed"], alone["have"]) == (2, 1)
        async with participating(gateway, two := Toy(), "i1"):
            status, done = await ask(gateway, "POST", "/weights/split", **halves(1, 2, sticky="header:X-User"))
            assert (status, done["version"], done["split"]["sticky"]) == (200, 1, "header:x-user"), done
            assert (one.committed[-1], two.committed[-1]) == (2, 1)
            await eventually(lambda: gateway.gateway.default.fleet.splits.percents == {1: 50.0, 2: 50.0})
            active = (await ask(gateway, "GET", "/weights/active"))[1]
            assert active["split"]["shares"] == done["split"]["shares"]
            assert [(s["version"], s["instances"]) for s in active["split"]["shares"]] == [(2, ["i0"])]
            status, ended = await ask(gateway, "DELETE", "/weights/split")
            assert (status, ended["version"], ended["split"]) == (200, 1, None)
            assert (one.committed[-1], two.committed[-1]) == (1, 1)
            status, nothing = await ask(gateway, "DELETE", "/weights/split")
            assert (status, nothing["code"]) == (409, "no_split")
            swaps = (await ask(gateway, "GET", "/swaps"))[1]["swaps"]
            assert [swap["split"] is not None for swap in swaps] == [False, True, False]


async def test_a_failed_probe_is_in_the_answer_and_in_the_swap(gateway: RunningGateway, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    fails = answering(b"{}", b"500 Internal Server Error")
    async with upstream(fails) as instance, participating(gateway, Toy(), address=instance.address):
        assert (await ask(gateway, "POST", "/weights", path=path))[0] == 200
        status, answer = await ask(gateway, "POST", "/weights", path=path, mode="rolling")
        assert (status, answer["code"]) == (409, "swap_aborted")
        reason = answer["reason"]
        assert reason.startswith("the probe of canary i0 failed: prompt default 1 was answered with status 500")
        status, found = await ask(gateway, "GET", "/swap")
        assert (found["swap"]["phase"], found["swap"]["probe"]) == ("aborted", "failed")
        assert found["swap"]["drain_s"] == 30, "unless told otherwise, streams may end before a canary tries anything"
        assert found["swap"]["reason"] == reason
        assert (await ask(gateway, "GET", "/weights/active"))[1]["version"] == 1


async def test_a_push_outlives_the_client_that_asked(gateway: RunningGateway, tmp_path: Path) -> None:
    toy = Toy(hold=asyncio.Event())
    async with participating(gateway, toy):
        raw = post("/admin/weights", {"path": checkpoint(tmp_path / "model")}, ADMIN)
        async with gateway.client(raw, admin=True) as client:
            await eventually(lambda: toy.staged == [1], 120)
            client.writer.transport.abort()
        assert toy.hold is not None
        toy.hold.set()
        await eventually(lambda: toy.committed == [1])


# what can go wrong


async def test_a_refused_version_is_409_and_changes_nothing(gateway: RunningGateway, tmp_path: Path) -> None:
    toy = Toy()
    path = checkpoint(tmp_path / "model")
    async with participating(gateway, toy):
        assert (await ask(gateway, "POST", "/weights", path=path))[0] == 200
        toy.refuse = shape_mismatch("a", [4, 4], [2, 2])
        status, answer = await ask(gateway, "POST", "/weights", path=path)
        assert status == 409
        assert (answer["code"], answer["tensor"]) == ("swap_aborted", "a")
        assert "[2, 2]" in answer["message"]
        assert (await ask(gateway, "GET", "/weights/active"))[1]["version"] == 1
        await eventually(lambda: gateway.gateway.default.stats.swaps.ended["aborted"] == 1)


async def test_wrong_checkpoints_are_named(gateway: RunningGateway, tmp_path: Path) -> None:
    push = partial(ask, gateway, "POST", "/weights", activate=False)
    assert (await push(path=checkpoint(tmp_path / "good")))[0] == 200
    status, error = await push(path=checkpoint(tmp_path / "other", a=(4, 5), b=(8,)))
    assert (status, error["code"], error["tensor"]) == (422, "shape_mismatch", "a")
    assert (error["expected"], error["got"]) == ([4, 4], [4, 5])
    assert "[4, 5]" in error["message"]
    assert "[4, 4]" in error["message"]
    truncated = Path(checkpoint(tmp_path / "cut")) / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-7])
    status, error = await push(path=str(tmp_path / "cut"))
    assert (status, error["code"]) == (400, "checkpoint_error")
    assert "model.safetensors" in error["message"]
    status, error = await push(path=str(tmp_path / "nowhere"))
    assert (status, error["code"]) == (400, "checkpoint_error")
    status, error = await push(path="relative/path")
    assert (status, error["code"]) == (400, "bad_path")
    assert len((await ask(gateway, "GET", "/weights"))[1]["versions"]) == 1


async def test_unknown_versions_and_no_way_back(gateway: RunningGateway) -> None:
    _, nothing = await ask(gateway, "GET", "/weights/active")
    assert nothing == {"model": "toy", "version": None, "epoch": 0, "previous": None}
    status, answer = await ask(gateway, "POST", "/weights/activate", version=7)
    assert (status, answer["code"], answer["version"]) == (404, "unknown_version", 7)
    status, answer = await ask(gateway, "POST", "/weights/rollback")
    assert (status, answer["code"]) == (409, "swap_aborted")


def halves(first: int, second: int, percent: float = 50, **more: Any) -> dict[str, Any]:
    """Of the traffic, to two versions."""
    return {"shares": [{"version": first, "percent": 50}, {"version": second, "percent": percent}], **more}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("", b"{", "invalid_parameter"),
        ("", b'{"activate":true}', "invalid_parameter"),
        ("", b'{"path":"/x","surprise":1}', "invalid_parameter"),
        ("/activate", b'{"version":"1"}', "invalid_parameter"),
        ("/activate", b'{"version":0}', "invalid_parameter"),
        ("/activate", b'{"version":1,"deadline_s":-1}', "invalid_parameter"),
        ("/split", {"shares": [{"version": 1, "percent": 100}]}, "invalid_parameter"),
        ("/split", halves(1, 2, 60), "bad_split"),
        ("/split", halves(1, 1), "bad_split"),
        ("/split", halves(1, 2, sticky="user"), "bad_split"),
        ("/split", halves(1, 2, minimum=0), "invalid_parameter"),
    ],
)
async def test_bad_bodies_are_400(gateway: RunningGateway, path: str, body: Any, expected: str) -> None:
    assert code(await gateway.ask(post(f"/admin/weights{path}", body, ADMIN), admin=True)) == (400, expected)


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publications in children of this process."""
    monkeypatch.setattr("server.gateway.models.model.Pusher", Pusher)


def pushing() -> list[psutil.Process]:
    """The publications that are children of this process, and have not ended meanwhile."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child] if "weightsync.push" in child.cmdline() else []
    return found


@pytest.mark.usefixtures("real_processes")
async def test_a_push_that_takes_too_long_is_ended(tmp_path: Path, arena: Path) -> None:
    with running_gateway(tmp_path, upstream=SETTINGS, push_timeout_s=0.01) as gateway:
        status, answer = await ask(gateway, "POST", "/weights", path=checkpoint(tmp_path / "model"))
        assert (status, answer["code"]) == (504, "push_timeout")
        assert (await ask(gateway, "GET", "/weights"))[1]["versions"] == []
        assert not pushing()


@pytest.mark.usefixtures("real_processes")
async def test_stopping_the_gateway_ends_its_push(tmp_path: Path, arena: Path) -> None:
    with running_gateway(tmp_path, upstream=SETTINGS) as gateway:
        raw = post("/admin/weights", {"path": checkpoint(tmp_path / "model")}, ADMIN)
        async with gateway.client(raw, admin=True):
            await eventually(pushing)
    assert not pushing()


# the table


def test_every_error_of_weightsync_has_a_status() -> None:
    assert STATUS.keys() == CODES.keys()


def test_what_an_error_knows_is_in_the_body() -> None:
    error = to_http(shape_mismatch("a.b", [1, 2], [3]))
    body = orjson.loads(error.body())["error"]
    assert error.status == 422
    assert (body["tensor"], body["expected"], body["got"], body["code"]) == ("a.b", [1, 2], [3], "shape_mismatch")
    full = to_http(arena_full("/dev/shm/x", 10, 3))
    assert (full.status, full.details["needed"], full.details["free"]) == (507, 10, 3)
    lost = to_http(StoreUnavailable("/x", "gone", "look"))
    assert (lost.status, lost.headers()["retry-after"], lost.code) == (503, "1", "store_unavailable")
    assert "look" in lost.message


def test_a_code_from_a_newer_release_is_500() -> None:
    error = from_fields({"code": "novelty", "message": "m"})
    assert (type(error), error.status, error.code) == (HttpError, 500, "novelty")
