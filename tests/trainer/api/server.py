"""The training API in a process of its own, which tests kill and start again, before a fleet without an engine."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import tinker
from tinker import types

from server.ports import free_port
from server.up.forks import Forked
from tests.live import LiveServer
from tests.trainer.fleet import Fleet, fleet
from tests.trainer.test_publish import publish_once
from tests.waiting import wait_until
from tests.warm import TRAINERS, warm
from trainer.config import ParallelConfig

KEY = "tml-somebody"


class ApiServer:
    """`trainer.api` with its configuration. Use `running` as a context; `process` may be killed and started in it.
    Several ranks are forked as a launcher of somebody else's would start them, or `launched` by our own."""

    def __init__(
        self,
        root: Path,
        model: str,
        gateway: str,
        store: str,
        name: str = "tiny",
        dtype: str = "float32",
        launched: bool = False,
        **more: Any,
    ) -> None:
        self.root, self.log, self.port = root, root / "api.log", free_port()
        self.url = f"{'https' if 'ssl_certfile' in more else 'http'}://127.0.0.1:{self.port}"
        self.verify: ssl.SSLContext | bool = True
        served = {"model": name, "store": store, "dtype": dtype}
        self.config: dict[str, Any] = {
            "model": {"path": model, "dtype": "float32"},
            "gateway": {"url": gateway, "retry_s": 5.0},
            "publish": served,
            "directory": str(root / "api"),
            "port": self.port,
        } | more
        self._ranks = 1 if launched else ParallelConfig(**more.get("parallel", {})).world_size
        self._processes: list[Forked] = []
        self._services: list[tinker.ServiceClient] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[ApiServer]:
        self.start()
        try:
            yield self
        finally:
            for service in self._services:  # their heartbeats would go on for as long as the tests do
                with contextlib.suppress(Exception):  # the server may have been killed for good
                    service.close("success").result(10)
            self.kill()

    @property
    def process(self) -> Forked:
        """Rank 0, or its launcher."""
        return self._processes[0]

    def start(self) -> None:
        """Returns when it answers."""
        file = self.root / "api.json"
        file.write_text(json.dumps(self.config))  # which is YAML, too
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self._ranks)}
        self._processes = []
        for rank in map(str, range(self._ranks)):
            env = os.environ | (meeting | {"RANK": rank, "LOCAL_RANK": rank} if self._ranks > 1 else {})
            self._processes.append(warm(TRAINERS).start(["trainer.api", "--config", str(file)], env, self.log))
        wait_until(self.answers, 240, what=lambda: self.log.read_text())

    def kill(self) -> None:
        """As a power failure would."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(120)

    def restart(self) -> None:
        """After a power failure."""
        self.kill()
        self.start()

    def answers(self) -> bool:
        if any(process.poll() is not None for process in self._processes):
            raise AssertionError(self.log.read_text())
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/api/v1/healthz", verify=self.verify).status_code == 200
        return False

    def service(self, key: str = KEY) -> tinker.ServiceClient:
        """A client of the stock SDK."""
        self._services.append(tinker.ServiceClient(base_url=self.url, api_key=key))
        return self._services[-1]

    def post(self, route: str, key: str = KEY, **request: Any) -> httpx.Response:
        """A request that the SDK would not send."""
        headers = {"x-api-key": key} | request.pop("headers", {})
        return httpx.post(f"{self.url}/api/v1/{route}", headers=headers, timeout=60, **request)

    def journal(self, statement: str, *values: Any) -> list[Any]:
        """Of what is on disk."""
        with contextlib.closing(sqlite3.connect(f"file:{self.root}/api/journal.db?mode=ro", uri=True)) as db:
            return db.execute(statement, values).fetchall()


@contextlib.contextmanager
def serving(root: Path, model: str, **more: Any) -> Iterator[tuple[ApiServer, Fleet]]:
    """Both, with a first version of the base model."""
    with fleet(model, root) as running:

        def models() -> dict[str, Any]:
            return {"data": [{"id": "tiny", "max_model_len": 128}]}

        running.server.app.get("/v1/models")(models)
        publish_once(model, running.store_url, None)
        with ApiServer(root, model, running.server.url, running.store_url, **more).running() as api:
            yield api, running


@contextlib.contextmanager
def live(root: Path, model: Path, engine: tuple[str, ...], **more: Any) -> Iterator[tuple[LiveServer, ApiServer, str]]:
    """`hotswap up` with a real engine, the training API before it, and a key for both."""
    server = LiveServer(model, root / "state", engine, name="demo")
    with server.running():
        made = server.admin.post("/admin/keys", json={"name": "somebody"})
        assert made.is_success, made.text
        with ApiServer(root, str(model), server.url, server.processes.store, "demo", **more).running() as api:
            yield server, api, "tml-" + made.json()["key"]


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """`tokens` without the last, to predict those without the first; `inputs` have one number for each of these."""
    targets = {"target_tokens": tokens[1:]}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=targets | inputs)


def sums() -> list[types.Datum]:
    """Additions in the tiny model's tokens: 1+2=3 and so on."""
    return [datum([3 + a, 13, 3 + b, 14, 3 + a + b], weights=[0.0, 0.0, 0.0, 1.0]) for a in range(5) for b in range(4)]


def new(service: tinker.ServiceClient, rank: int = 4, **more: Any) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="tiny", rank=rank, **{"seed": 7} | more).result()


def loss_of(client: tinker.TrainingClient) -> float:
    """Of the sums, as the client's weights are now."""
    return client.forward(sums(), "cross_entropy").result().metrics["loss:sum"]


def learn(
    client: tinker.TrainingClient, data: list[types.Datum], steps: int, lr: float = 1e-3, loss: Any = "cross_entropy"
) -> list[float]:
    """The loss before each step."""
    found = []
    for _ in range(steps):
        passed = client.forward_backward(data, loss)
        stepped = client.optim_step(types.AdamParams(learning_rate=lr))
        found.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return found
