"""A running server for tests: the processes of `hotswap up`, a client of its admin API, and looks inside."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx2  # the OpenAI SDK's
import orjson
import psutil

from loadtest.histories.check import check
from loadtest.histories.recorder import Log, Recorder
from loadtest.histories.requests import tap
from server.ports import free_port
from server.up.config import UpConfig
from server.up.processes import Child
from server.up.server import Server
from tests.cpu import check_engine
from tests.waiting import wait_until
from weightsync.control.records import InstanceRecord, Keys, VersionRecord
from weightsync.store import SyncStore

STARTS = ("server.gateway", "server.cli instance", "weightsync.push", "weightsync.persist")  # for scripts/reach.py
LOGS: dict[int | None, Log] = {}  # by the port of a live server: what its clients in this process see
tap(lambda url: LOGS.get(url.port), httpx2)
VLLM_ARGS = ("--max-model-len", "1024", "--max-num-seqs", "32", "--grammar-seconds", "2")


def flags(options: dict[str, Any]) -> tuple[str, ...]:
    """vLLM's options as they stand on a command line."""
    return tuple(
        part
        for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    )


async def events(
    server: dict[str, Any], body: dict[str, Any], route: str = "/generate", headers: dict[str, str] | None = None
) -> AsyncIterator[dict[str, Any]]:
    """The payloads of a streamed answer, as they come. `server`: options of an httpx client."""
    async with (
        httpx.AsyncClient(**server, timeout=240) as client,
        client.stream("POST", route, json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield orjson.loads(line.removeprefix("data: "))


class LiveServer:
    """`Server` with short-hands. `client` has no key; `admin` holds the admin key."""

    def __init__(
        self, model: Path, state_dir: Path, vllm_args: tuple[str, ...] = VLLM_ARGS, name: str = "toy", **more: Any
    ) -> None:
        """`more`: fields of UpConfig, such as `instances`."""
        fields: dict[str, Any] = {"throwaway": True, "kv_cache_gib": 0.06, "vllm_args": vllm_args, **more}
        self.processes = Server(UpConfig(str(model), name=name, port=free_port(), state_dir=state_dir, **fields))
        self.url, self.name = self.processes.url, name

    @contextlib.contextmanager
    def running(self) -> Iterator[LiveServer]:
        try:
            self.processes.start()
            with self._recorded():
                self.processes.wait_ready(300)  # a machine that others use too
                for name, child in self.processes.children.items():
                    if name.startswith("instance-"):
                        check_engine(child.log)
                with httpx.Client(base_url=self.url, timeout=240) as self.client, self._admin() as self.admin:
                    yield self
        finally:
            self.processes.stop()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Observations of the store and clients must not contradict the rules; $HOTSWAP_HISTORIES keeps the file."""
        state, port, began = self.processes.state_dir, self.processes.config.port, time.time()
        path = Path(os.environ.get("HOTSWAP_HISTORIES", state)) / f"{self.name}-{port}-{began:.0f}.jsonl"
        gateway, log = self.processes.children["gateway"].process, Log(path)
        self.recorder = Recorder(log, self.processes.store, [model.name for model in self.processes.models])
        LOGS[port] = log
        try:
            yield
        finally:
            del LOGS[port]
            self.recorder.close()
            if gateway.poll() is not None:  # a test has ended it: what broke with it is no fault
                log.write("excuse", began=began, ended=time.time(), server=self.url.removeprefix("http://"))
            log.close()
        assert not (wrong := check([path], _says)), "\n".join(map(str, wrong))

    def _admin(self) -> httpx.Client:
        key = {"authorization": f"Bearer {self.processes.admin_key}"}
        return httpx.Client(base_url=self.processes.admin_url, headers=key, timeout=280)

    def push(self, directory: Path, *, activate: bool = True) -> int:
        """Publish a checkpoint through the admin API, and activate it; its version."""
        answer = self.admin.post("/admin/weights", json={"path": str(directory), "activate": activate})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["version"])

    def activate(self, version: int, **how: Any) -> httpx.Response:
        return self.admin.post("/admin/weights/activate", json={"version": version, **how})

    def rollback(self) -> int:
        """To the version before, which takes no time on a busy machine either; the one that is then active."""
        answer = self.admin.post("/admin/weights/rollback")
        assert answer.status_code == 200, answer.text
        return int(answer.json()["version"])

    def active(self) -> int:
        return int(self.admin.get("/admin/weights/active").json()["version"])

    def instance(self) -> dict[str, Any]:
        """The record of the only instance."""
        (record,) = self.instances()
        return record

    def instances(self) -> list[dict[str, Any]]:
        """The records of all instances, by id."""
        found = self.admin.get("/admin/instances").json()["instances"]
        return sorted(found, key=lambda record: str(record["id"]))

    def whole(self) -> bool:
        """Whether every instance serves; what has ended is started again, as by `hotswap up`."""
        self.processes.restart_ended()
        return [record["eligible"] for record in self.instances()] == [True] * self.processes.config.instances

    def all_serve(self, version: int) -> bool:
        served = [(r["eligible"], r["state"], r["active_version"]) for r in self.instances()]
        return served == [(True, "SERVING", version)] * self.processes.config.instances

    @contextlib.contextmanager
    def another_gateway(self, *args: str) -> Iterator[str]:
        """Its URL."""
        url = f"http://127.0.0.1:{(port := free_port())}"
        common = ["--store", self.processes.store, "--model", self.name, "--port", str(port), "--admin-port", "0"]
        common += ["--admin-key-file", str(self.processes.admin_key_file)]
        log = self.processes.state_dir / "logs" / f"gateway-{port}.log"
        gateway = Child("another", ["server.gateway", *common, *args], log)
        try:
            wait_until(lambda: _ready(url), 200, what=lambda: gateway.tail())
            LOGS[port] = LOGS[self.processes.config.port]
            yield url
        finally:
            LOGS.pop(port, None)
            gateway.stop()

    def direct(self) -> list[dict[str, Any]]:
        """Options of an httpx client for each instance, by id: its address, and what it asks of those who ask it."""
        with contextlib.closing(SyncStore(self.processes.store)) as store:
            records = [InstanceRecord.from_json(kv.value) for kv in store.list(Keys(self.name).instances)[0]]
        members = sorted(records, key=lambda record: record.id)
        return [{"base_url": m.address, "headers": {"authorization": f"Bearer {m.key}"}} for m in members]

    def generate(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """One greedy answer, whole."""
        body = {"prompt_token_ids": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": False}
        answer = self.client.post("/generate", json=body | more)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No engine generates meanwhile. Requests that come then are all there when the engines go on."""
        pause = self.admin.post("/admin/pause", json={"ttl_s": 300, "requested_by": "test"}).json()["id"]
        try:
            yield
        finally:
            assert self.admin.delete(f"/admin/pause/{pause}").status_code == 200

    def gateway_metric(self, name: str) -> float:
        """The sum of one of the gateway's metrics."""
        return _sum(self.client.get("/metrics").text, name)

    def engine_metric(self, name: str) -> float:
        """The sum of one of vLLM's own metrics, asked of the instance directly."""
        return _sum(httpx.get(self.instance()["address"] + "/metrics", timeout=60).text, name)

    def tree(self, index: int = 0) -> list[psutil.Process]:
        """An instance's processes: API server and engine core."""
        parent = psutil.Process(self.processes.children[f"instance-{index}"].process.pid)
        return [parent, *parent.children(recursive=True)]


def _ready(url: str) -> bool:
    try:
        return httpx.get(url + "/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def _says(version: VersionRecord) -> int | None:
    """The token of the checkpoints say-0, say-1 ... of tests/conftest.py."""
    name, _, number = Path(version.source).name.partition("-")
    return 100 + int(number) if name == "say" and number.isdecimal() and not version.parts else None


def _sum(text: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))
