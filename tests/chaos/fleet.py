"""A whole fleet for tests that kill real things: vLLM instances, two gateways, a real etcd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from server.ports import free_port
from server.up.processes import Child
from tests.chaos.clients import Seen
from tests.etcd import Etcd
from tests.live import LiveServer
from tests.waiting import comes_true, wait_until
from weightsync import SyncStore
from weightsync.control.records import Keys, SwapRecord

# What a client may see whose answer was under way on the instance that died; all of them can be asked again.
CUT = {"upstream_died", "instance_unreachable", "engine_error", "engine_died", "RemoteProtocolError", "ReadError"}


class Fleet:
    """The server under test, a second gateway, and which checkpoint each version is."""

    def __init__(self, live: LiveServer, checkpoints: dict[str, Path], etcd: Etcd, second: Child, url: str) -> None:
        self.live, self.checkpoints, self.etcd = live, checkpoints, etcd
        self.second, self.second_url = second, url
        self.version_of: dict[int, int] = {}
        self._turn = 0

    def publish(self, *, activate: bool = True) -> int:
        """A new version that says something else than the one before it."""
        self._turn = (self._turn + 1) % 4
        body = {"path": str(self.checkpoints[f"say-{self._turn}"]), "activate": activate}
        answer = self.live.admin.post("/admin/weights", json=body)
        assert answer.status_code == 200, answer.text
        version = int(answer.json()["version"])
        self.version_of[version] = self._turn
        return version

    def states(self) -> dict[str, str]:
        return {
            r["id"].rsplit("-", 2)[-2] + "-" + r["id"].rsplit("-", 1)[-1]: r["state"] for r in self.live.instances()
        }

    def all_serve(self, version: int) -> bool:
        try:
            records = self.live.instances()
        except httpx.TransportError:  # the gateway is being started again
            return False
        served = [(r["eligible"], r["active_version"]) for r in records]
        return served == [(True, version)] * self.live.processes.config.instances

    def engine_core(self, index: int) -> psutil.Process:
        (core,) = [p for p in self.live.tree(index)[1:] if "EngineCore" in p.name() or "EngineCore" in str(p.cmdline())]
        return core

    def revive(self) -> None:
        """What `hotswap up` does all the time: start again what has ended."""
        self.live.processes.restart_ended()

    def mended(self) -> bool:
        """Whether every instance lives and serves, those that were killed included."""
        self.revive()
        children = [child for name, child in self.live.processes.children.items() if name.startswith("instance-")]
        try:
            served = {record["pid"] for record in self.live.instances() if record["eligible"]}
        except (httpx.TransportError, KeyError):  # the gateway is being started again, or waits for the store
            return False
        return all(child.alive for child in children) and served == {child.process.pid for child in children}

    def whole_again(self, version: int) -> bool:
        def look() -> bool:
            self.revive()
            return self.all_serve(version)

        return comes_true(look, 200)

    def swap(self) -> SwapRecord:
        store = SyncStore(self.live.processes.store)
        try:
            found = store.get(Keys(self.live.name).swap)
            assert found is not None
            return SwapRecord.from_json(found.value)
        finally:
            store.close()


@contextlib.contextmanager
def running(
    checkpoints: dict[str, Path], root: Path, instances: int = 2, gateway_args: tuple[str, ...] = ()
) -> Iterator[Fleet]:
    """A fleet that serves version 1."""
    etcd = Etcd()
    store = etcd.url("contract")
    live = LiveServer(checkpoints["say-0"], root, instances=instances, store=store, gateway_args=gateway_args)
    with live.running():
        port = free_port()
        args = ["server.gateway", "--store", store, "--model", live.name, "--port", str(port), "--admin-port", "0"]
        args += ["--admin-key-file", str(live.processes.admin_key_file), *gateway_args]
        second = Child("gateway-2", args, live.processes.state_dir / "logs" / "gateway-2.log", {})
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: ready(url), 30, what=lambda: second.tail())
            found = Fleet(live, checkpoints, etcd, second, url)
            found.version_of[live.active()] = 0
            yield found
        finally:
            second.stop()
    etcd.close()


def ready(url: str) -> bool:
    try:
        return httpx.get(url + "/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def assert_clean(seen: Seen, fleet: Fleet, *, faults: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """No token came from other weights than its label says, and no fault but those that are allowed."""
    assert seen.wrong(fleet.version_of) == []
    assert set(seen.faults) <= faults
    assert seen.answers > 0
