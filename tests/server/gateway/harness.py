"""A real gateway on a thread of its own (uvicorn, uvloop, the SQLite store), and raw clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys
import threading
import types
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import uvicorn
import uvicorn.server

from server.gateway import GatewayConfig
from server.gateway import gateway as gateways
from server.gateway.access import budgets
from server.gateway.gateway import Gateway
from server.gateway.main import bind, uvicorn_config
from server.gateway.models import model
from server.gateway.observe import ledger, pages
from server.gateway.release import progress, runner
from server.ports import free_port, url_of
from tests.server.gateway.pusher import WarmPusher
from tests.server.gateway.upstream import Answer, Handler, Upstream, answer_json, read_answer, upstream
from tests.waiting import eventually, wait_until
from tests.warm import SYNC, shared
from weightsync.control.records import InstanceRecord, Keys
from weightsync.store import SyncStore

MODEL = "toy"
CONFIG = b'{"model_config": {}, "lora_config": null, "parallel_config": {}}'  # an instance's answer at /hotswap/config
ADMIN_KEY = "admin-key-for-the-tests"
ADMIN = f"Authorization: Bearer {ADMIN_KEY}\r\n"
KEYS = Keys(MODEL)

model.Pusher = WarmPusher  # type: ignore[misc]
pages.MOST_KEPT_S = 0.0  # a test that asks for metrics wants what has just happened
# A gateway looks at files, deadlines, budgets and releases a few times a second; a test waits for each look.
gateways.RELOAD_INTERVAL_S = gateways.SWEEP_INTERVAL_S = budgets.INTERVAL_S = 0.05
ledger.LOOK_S = progress.LOOK_S = runner.FLUSH_S = 0.05  # type: ignore[misc]
gateways.FIRST_VIEW_TIMEOUT_S = 60.0  # one that gives up sooner begins without keys, cache scopes and limits
# uvicorn looks ten times a second whether it is to end, and whether its connections have.
_HURRIED = {"sleep": lambda for_s: asyncio.sleep(for_s / 20)}
uvicorn.server.asyncio = types.SimpleNamespace(**(vars(asyncio) | _HURRIED))  # type: ignore[assignment]


@dataclass
class Client:
    """A client's connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> Answer:
        return await asyncio.wait_for(read_answer(self.reader), 120)

    async def rest(self) -> bytes:
        """All bytes until the gateway closes the connection."""
        return await asyncio.wait_for(self.reader.read(), 120)


@dataclass
class Ports:
    """Where a gateway listens, and its store."""

    host: str
    port: int
    admin_port: int
    store: SyncStore
    scheme = "http"  # of the admin port

    @property
    def url(self) -> str:
        return url_of(self.host, self.port)

    @property
    def admin_url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.admin_port}"

    async def connect(self, *, admin: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.admin_port if admin else self.port)

    @contextlib.asynccontextmanager
    async def client(self, raw: bytes = b"", *, admin: bool = False) -> AsyncIterator[Client]:
        """A new connection, to the admin port if `admin`, that begins with `raw`; it ends with the context."""
        found = Client(*await self.connect(admin=admin))
        try:
            found.writer.write(raw)
            yield found
        finally:
            found.writer.close()  # done by the loop, which a test may hold up next: waiting for the gateway, say
            await asyncio.sleep(0)

    async def ask(self, raw: bytes, *, admin: bool = False) -> Answer:
        """Sends `raw` on a new connection, to the admin port if `admin`, and reads one answer."""
        async with self.client(raw, admin=admin) as client:
            return await client.answer()


@dataclass
class GatewayProcess(Ports):
    """`python -m server.gateway`, as users start it. `log` has all that it printed."""

    log: Path
    process: subprocess.Popen[bytes]

    def is_up(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/healthz", timeout=5, trust_env=False).is_success
        return False


@dataclass
class RunningGateway(Ports):
    """A gateway under test. `gateway` is read across threads for its counts only."""

    gateway: Gateway
    server: uvicorn.Server

    async def refuses(self) -> bool:
        """Whether it takes no connections any more."""
        try:
            (await self.connect())[1].close()
        except OSError:
            return True
        return False

    def stop(self) -> None:
        """Tells it to end, as SIGTERM does; it goes on until what it has is answered."""
        self.server.should_exit = True

    def register(
        self, upstream: Upstream | str, instance_id: str = "i0", state: str = "SERVING", model: str = "", **fields: Any
    ) -> None:
        """Writes an instance record, as the instance's agent does, and waits until the gateway sees it."""
        address = upstream if isinstance(upstream, str) else upstream.address
        record = InstanceRecord(
            id=instance_id, address=address, **{"state": state, "active_version": 1, "active_epoch": 1, **fields}
        )
        served = self.gateway.models[model] if model else self.gateway.default
        self.store.put(Keys(served.name).instance(instance_id), record.to_json())
        instances = served.fleet.instances
        wait_until(lambda: instance_id in instances and instances[instance_id].record == record)

    @contextlib.asynccontextmanager
    async def instance(
        self,
        handler: Handler = answer_json,
        instance_id: str = "i0",
        tls: ssl.SSLContext | None = None,
        **fields: Any,
    ) -> AsyncIterator[Upstream]:
        """An instance that answers by `handler`. Its record, with these `fields`, stays in the store."""
        async with upstream(handler, tls) as up:
            self.register(up, instance_id, **fields)
            yield up

    def unregister(self, instance_id: str = "i0") -> None:
        self.store.delete(KEYS.instance(instance_id))
        wait_until(lambda: instance_id not in self.gateway.default.fleet.instances)


def request(method: str, path: str, body: bytes | dict[str, Any] = b"", headers: str = "") -> bytes:
    """As bytes; `headers` are whole lines ending in CRLF."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    head = f"{method} {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
    head += f"{headers}Content-Length: {len(data)}\r\n\r\n"
    return head.encode("latin-1") + data


def post(path: str = "/v1/completions", body: bytes | dict[str, Any] = b"{}", headers: str = "") -> bytes:
    return request("POST", path, body, headers)


def get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: t\r\n{headers}\r\n".encode("latin-1")


def code(answer: Answer) -> tuple[int, str]:
    """Its status, and the code of its error."""
    return answer.status, orjson.loads(answer.body)["error"]["code"]


async def ask(
    gateway: RunningGateway, method: str, path: str, key: str = ADMIN, /, **body: Any
) -> tuple[int, dict[str, Any]]:
    """Asks `/admin{path}`: its status, and the answer or the error. `key`: a header line."""
    answer = await gateway.ask(request(method, f"/admin{path}", body or b"", key), admin=True)
    found = orjson.loads(answer.body)
    return answer.status, found.get("error", found)


async def admin(gateway: RunningGateway, method: str, path: str, key: str = ADMIN_KEY, **fields: Any) -> Answer:
    """Asks `/admin/keys{path}`."""
    raw = request(method, f"/admin/keys{path}", fields or b"", f"Authorization: Bearer {key}\r\n")
    return await gateway.ask(raw, admin=True)


async def new_key(gateway: RunningGateway, **fields: Any) -> tuple[str, str]:
    """Makes a key and waits until the gateway knows it; its id, and a header line with it."""
    answer = await admin(gateway, "POST", "", **{"name": "test", **fields})
    assert answer.status == 200, answer.body
    made = orjson.loads(answer.body)
    await eventually(lambda: made["id"] in gateway.gateway.keys.limits)
    return made["id"], f"Authorization: Bearer {made['key']}\r\n"


def private(path: Path, text: str) -> Path:
    """A file, of keys say, that nobody else can read."""
    path.touch(0o600)
    path.chmod(0o600)
    path.write_text(text)
    return path


@contextlib.contextmanager
def gateway_process(
    directory: Path, *options: str, key: str = ADMIN_KEY, ports: tuple[int, int] | None = None, model: str = MODEL
) -> Iterator[GatewayProcess]:
    """One that answers, with its store in `directory`; `options` are the command's."""
    port, admin_port = ports or (free_port(), free_port())
    store, log = f"sqlite://{directory / 'store.db'}", directory / "gateway.log"
    command = [sys.executable, "-m", "server.gateway", "--store", store, "--model", model, "--port", str(port)]
    command += ["--admin-port", str(admin_port), *options]
    with log.open("ab") as out:
        env = os.environ | {"HOTSWAP_ADMIN_KEY": key}
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    try:
        with contextlib.closing(SyncStore(store)) as opened:
            found = GatewayProcess("127.0.0.1", port, admin_port, opened, log, process)
            wait_until(found.is_up, 180, log.read_text, process)
            yield found
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(120)
        process.kill()
        process.wait()


@contextlib.contextmanager
def running_gateway(directory: Path, **settings: Any) -> Iterator[RunningGateway]:
    """A gateway on a free port with its store in `directory`; `settings` are fields of GatewayConfig."""
    url = f"sqlite://{directory / 'store.db'}"
    config = GatewayConfig(**{"store": url, "model": MODEL, "port": 0, "admin_key": ADMIN_KEY, **settings})
    config, listeners = bind(config)
    server = uvicorn.Server(uvicorn_config(config))
    shared(SYNC)  # which ends with the thread that has it started
    thread = threading.Thread(target=server.run, kwargs={"sockets": listeners}, name="gateway")
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive(), 120)
    assert server.started, "the gateway did not start"
    store = SyncStore(url)
    assert config.admin_port is not None
    try:
        gateway: Gateway = server.lifespan.state["gateway"]
        yield RunningGateway(config.host, config.port, config.admin_port, store, gateway, server)
    finally:
        server.should_exit = True
        thread.join(10)
        server.force_exit = True
        thread.join(60)
        store.close()
        assert not thread.is_alive()
