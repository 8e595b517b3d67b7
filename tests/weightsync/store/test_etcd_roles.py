"""Each role can do its work on a real etcd with authentication, and nothing beyond it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli.app import app
from server.etcd_roles import NAMES, Administrator, roles
from server.gateway.access.records import KEYS_PREFIX, USAGE_PREFIX
from server.gateway.access.scope import STORE_KEY
from server.orders import drains, orders, sleepers
from tests.etcd import Etcd
from tests.waiting import eventually
from tests.weightsync.fleet import MODEL, Engine
from tests.weightsync.store.test_etcd import opened
from tests.weightsync.tensors import model
from weightsync import Coordinator, Participant, Publisher, Store
from weightsync.control.records import InstanceRecord, Keys
from weightsync.control.swap import previous_version
from weightsync.errors import StoreRefused
from weightsync.peer.slices import slices_prefix
from weightsync.persist.__main__ import Persister
from weightsync.persist.disk import Disk

KEYS = Keys(MODEL)
OTHER = Keys("another")


@dataclass(frozen=True)
class Guarded:
    """An etcd that lets in whom `hotswap store roles` has made."""

    server: Etcd
    passwords: Path

    def url(self, role: str, namespace: str = "prod") -> str:
        return self.server.url(namespace, user=role, password_file=self.passwords / role)

    def store(self, role: str, namespace: str = "prod") -> contextlib.AbstractAsyncContextManager[Store]:
        return opened(self.url(role, namespace))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    server, passwords = Etcd(), tmp_path_factory.mktemp("secrets") / "etcd"
    command = ["store", "roles", "--etcd", server.url("prod"), "--model", MODEL, "--passwords", str(passwords)]
    done = CliRunner().invoke(app, [*command, "--enable"])
    assert done.exit_code == 0, done.output
    assert {(path.name, path.stat().st_mode & 0o777) for path in passwords.iterdir()} == {
        (name, 0o600) for name in (*NAMES, "root")
    }
    yield Guarded(server, passwords)
    server.close()


async def test_a_version_goes_from_a_trainer_through_a_gateway_to_an_instance(
    guarded: Guarded, arena_directory: Path, tmp_path: Path
) -> None:
    async with guarded.store("gateway") as leading, guarded.store("instance") as serving:
        engine, record = Engine(), InstanceRecord("i0", "https://i0:8001")
        coordinator = Coordinator(leading, MODEL)
        participant = Participant(serving, MODEL, record, engine.stage, engine.commit, drop=engine.drop)
        coordinator.start()
        participant.start()
        publisher = await asyncio.to_thread(Publisher, guarded.url("trainer"), model=MODEL)
        for step in (1, 2, 3):
            assert await asyncio.to_thread(publisher.publish, model(step), timeout_s=60) == step
        await eventually(lambda: engine.running == 3)
        assert await previous_version(leading, KEYS) == 2
        assert (await coordinator.rollback()).version == 2
        async with guarded.store("peer") as copying:
            copies, told = Disk(tmp_path), asyncio.Event()
            told.set()
            assert await Persister(copying, KEYS, copies).run(told)
            assert {kept.version for kept in copies.kept()} == {2, 3}
        await asyncio.to_thread(publisher.close)
        await participant.stop()
        await coordinator.stop()


OF_THE_MODEL = (KEYS.active, KEYS.swap, KEYS.leader, KEYS.target, KEYS.counter, KEYS.schema, KEYS.version(9))
OF_GATEWAYS = (
    KEYS_PREFIX + "k",
    USAGE_PREFIX + "u",
    STORE_KEY,
    drains(KEYS) + "i0",
    orders(KEYS) + "i0",
    KEYS.pause("p"),
)
OF_INSTANCES = (KEYS.instance("i1"), sleepers(KEYS) + "i1", slices_prefix(KEYS, "h") + "i1")
OF_PEERS = (f"{KEYS.copies}d/h",)
DISK = (KEYS.disk("h"),)
ARENA = ("arena", "arenas/h")
PAST = (KEYS.past_swap(1), KEYS.training_point(1))
MAY_WRITE = {
    "gateway": {*OF_THE_MODEL, *OF_GATEWAYS, *PAST, *ARENA, *DISK, KEYS.publisher("upload"), KEYS.part_schema("draft")},
    "instance": {*OF_INSTANCES},
    "trainer": {KEYS.target, KEYS.counter, KEYS.schema, KEYS.version(9), KEYS.publisher("t"), *ARENA},
    "peer": {*OF_PEERS, *ARENA, *DISK},
}
OF_NOBODY = (OTHER.active, OTHER.instance("i0"), "other")
ALL = {*OF_THE_MODEL, *OF_GATEWAYS, *OF_INSTANCES, *OF_PEERS, *ARENA, *DISK, *PAST, *OF_NOBODY}


@pytest.mark.parametrize("role", NAMES)
async def test_a_role_writes_its_own_keys_alone(guarded: Guarded, role: str) -> None:
    async with guarded.store(role, "prod") as store:
        for key in sorted(ALL | MAY_WRITE[role]):
            if key in MAY_WRITE[role]:
                await store.put(key, b"{}")
                await store.delete(key)
            else:
                with pytest.raises(StoreRefused, match="permission denied"):
                    await store.put(key, b"{}")
                with pytest.raises(StoreRefused, match="permission denied"):
                    await store.delete(key)
    async with guarded.store(role, "staging") as store:
        with pytest.raises(StoreRefused, match="permission denied"):
            await store.put(KEYS.instance("i0"), b"{}")


async def test_what_a_role_may_read(guarded: Guarded) -> None:
    for role in NAMES:
        async with guarded.store(role) as store:
            for prefix in (KEYS.root, KEYS.copies, "arenas/"):
                await store.list(prefix)
            with contextlib.nullcontext() if role in ("gateway", "trainer") else pytest.raises(StoreRefused):
                await store.list(KEYS.history)
            for prefix in (OTHER.root, "models/", ""):
                with pytest.raises(StoreRefused, match="permission denied"):
                    await store.list(prefix or "a")
            if role != "gateway":
                for key in OF_GATEWAYS[:3]:
                    with pytest.raises(StoreRefused, match="permission denied"):
                        await store.get(key)


async def test_leases_end_with_those_who_hold_them(guarded: Guarded) -> None:
    async with guarded.store("instance") as instance, guarded.store("gateway") as gateway:
        lease = await instance.grant_lease(30)
        await instance.put(KEYS.instance("leased"), b"{}", lease)
        await instance.keep_alive(lease)
        with pytest.raises(StoreRefused, match="permission denied"):
            await gateway.revoke(lease)
        await instance.revoke(lease)
        assert await gateway.get(KEYS.instance("leased")) is None


async def test_doing_it_again_changes_passwords_and_takes_away_what_is_too_much(guarded: Guarded) -> None:
    administrator = Administrator(guarded.url("root"))
    try:
        for role in roles([MODEL, "another"]):
            await administrator.make_role(role)
        async with guarded.store("instance") as store:
            await store.put(OTHER.instance("i0"), b"{}")
            (guarded.passwords / "instance").write_text("changed")
            await administrator.make_users({"instance": "changed"})
            await store.delete(OTHER.instance("i0"))  # goes on with the new one
            for role in roles([MODEL]):
                await administrator.make_role(role)
            with pytest.raises(StoreRefused, match="permission denied"):
                await store.put(OTHER.instance("i0"), b"{}")
            await store.put(KEYS.instance("i0"), b"{}")
    finally:
        await administrator.close()


def test_without_an_etcd_the_roles_are_shown() -> None:
    shown = CliRunner().invoke(app, ["store", "roles", "--model", MODEL], env={"HOTSWAP_STORE": ""})
    assert shown.exit_code == 0, shown.output
    assert "models/demo/sleepers/" in shown.output
    refused = CliRunner().invoke(app, ["store", "roles", "--model", MODEL, "--enable"])
    assert "--passwords" in str(refused.exception)
