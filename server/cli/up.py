"""`hotswap up`: the processes of one host, started, watched, and stopped together."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from rich.console import Console

from server.cli import interrupts, missing, store
from server.cli.cores import share_of_cores
from server.cli.errors import CliError, ProcessFailed
from server.cli.paths import ServerInfo, default_state_dir, resolve_model
from server.cli.processes import Child
from server.errors import ConfigError
from server.gateway.observe.otlp import traces_url
from server.instance import options
from weightsync.errors import StoreError

READY_TIMEOUT_S = 600.0
RESTART_PAUSE_S = 2.0
LEAVES_S, TRAINER_LEAVES_S = 10.0, 130.0  # after SIGTERM; a trainer saves first, within its faults.grace_s (120 s)


@dataclass(frozen=True)
class UpConfig:
    """What `hotswap up` was asked for."""

    model: str
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    state_dir: Path | None = None
    admin_key_file: Path | None = None
    api_key_file: Path | None = None
    train: Path | None = None
    kv_cache_gib: float = 1.0
    instances: int = 1
    store: str | None = None  # None: a SQLite file in the state directory, made anew
    gateway_args: tuple[str, ...] = ()
    vllm_args: tuple[str, ...] = ()
    otlp_endpoint: str | None = None  # a collector of traces, for the gateway and for vLLM

    def __post_init__(self) -> None:
        try:
            options.check(self.vllm_args)
        except ConfigError as error:
            raise CliError(str(error)) from error
        if self.instances < 1:
            raise CliError(f"--instances {self.instances}: at least 1 is needed to answer anything")
        if self.store is not None and not self.store.startswith("etcd://"):
            raise CliError("--store: only etcd://... is taken here; without it a SQLite store is made")


class Server:
    """A gateway and instances on this host, with a store, a key and logs in one state directory.

    Start-up overlaps: the checkpoint is published into shared memory while vLLM imports itself; instances start with
    dummy weights and receive the version like any other.

    The SQLite store is made anew: what is served is what the command line names. What an etcd store holds is kept, and
    its active version served, if its bytes are still on this host; else the model becomes a new version.
    """

    def __init__(self, config: UpConfig) -> None:
        model_dir = resolve_model(config.model)
        name = config.name or model_dir.name
        self.state_dir = (config.state_dir or default_state_dir(name)).resolve()
        self.config = replace(config, name=name, port=config.port or free_port(config.host))
        self.model_dir, self.name = model_dir, name
        self.url = f"http://{config.host}:{self.config.port}"
        self.admin_port = _free_port_after(self.config.port)
        self.admin_url = f"http://127.0.0.1:{self.admin_port}"
        self.store = config.store or f"sqlite://{self.state_dir / 'store.db'}"
        self.arena = Path(f"/dev/shm/hotswap-{name}-{self.config.port}")  # noqa: S108 - directory of the slots
        self.admin_key_file = config.admin_key_file or self.state_dir / "admin.key"
        self.children: dict[str, Child] = {}
        self._restart_at: dict[str, float] = {}

    def __enter__(self) -> Server:
        """Started and ready; stopped when the context ends."""
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start every process; returns at once. Raises CliError."""
        self._fresh_state()
        try:
            found = asyncio.run(store.prepare(self.store, self.arena, self.name))
        except StoreError as error:
            raise CliError(f"the store {self.store} cannot be used: {error}") from error
        self.arena = found.arena
        self._spawn("gateway", self._gateway_args())
        if not found.has_version:
            push = ["weightsync.push", "--store", self.store, "--model", self.name, str(self.model_dir)]
            draft = draft_dir(self.config.vllm_args)
            self._spawn("publish", push if draft is None else [*push, "--with", f"draft={draft}"])
        for index in range(self.config.instances):
            env = share_of_cores(index, self.config.instances, self.config.vllm_args, os.environ)
            self._spawn(f"instance-{index}", self._instance_args(index), {**env, **self._instance_tracing()})

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Block until every instance serves. ProcessFailed shows the log of what ended early."""
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            for child in self.children.values():
                if not child.alive and not (child.name == "publish" and child.process.returncode == 0):
                    raise ProcessFailed(f"{child.name} ended early; the end of {child.log}:\n{child.tail()}")
            if time.monotonic() > deadline:
                raise ProcessFailed(f"not ready after {timeout_s:.0f} s; see the logs in {self.state_dir / 'logs'}")
            time.sleep(0.1)
        info = ServerInfo(self.url, self.admin_url, self.name, self.store, str(self.admin_key_file), os.getpid())
        info.write(self.state_dir)

    def watch(self) -> None:
        """Restart what dies, until interrupted; a trainer that ends by itself is left ended."""
        while True:
            self.restart_ended()
            time.sleep(0.2)

    def restart_ended(self) -> None:
        """Start what has ended, each after a pause of its own; to be called again and again."""
        now = time.monotonic()
        for name in [n for n, c in self.children.items() if _is_lasting(n) and not c.alive]:
            child = self.children[name]
            if name not in self._restart_at:
                print(f"hotswap: {name} ended with {child.process.returncode}; restarting", file=sys.stderr)
                self._restart_at[name] = now + RESTART_PAUSE_S
            elif now >= self._restart_at[name]:
                with interrupts.held():
                    child.stop()  # what it may have left of its group
                    child.start()
                    del self._restart_at[name]

    def train(self, config: Path) -> Child:
        """Start the trainer against this server."""
        return self._spawn("trainer", ["trainer.main", "--config", str(config)])

    def stop(self) -> None:
        """Stop every process and free the shared memory."""
        for child in reversed(self.children.values()):
            child.stop(TRAINER_LEAVES_S if child.name == "trainer" else LEAVES_S)
        (self.state_dir / "server.json").unlink(missing_ok=True)
        shutil.rmtree(self.arena, ignore_errors=True)

    def instance_id(self, index: int) -> str:
        """Stable over restarts; in a store that several hosts share it says where to look."""
        host = f"{socket.gethostname()}-{self.config.port}-" if self.config.store else ""
        return f"{host}instance-{index}"

    @property
    def admin_key(self) -> str:
        """The key the gateway takes: the environment's, else the file's, as for `hotswap weights`."""
        return os.environ.get("HOTSWAP_ADMIN_KEY") or self.admin_key_file.read_text().strip()

    def _ready(self) -> bool:
        ours = {self.instance_id(index) for index in range(self.config.instances)}
        key = {"authorization": f"Bearer {self.admin_key}"}
        try:
            if httpx.get(f"{self.url}/readyz", timeout=2.0).status_code != 200:
                return False
            fleet = httpx.get(f"{self.admin_url}/admin/instances", headers=key, timeout=2.0)
            return ours <= {i["id"] for i in fleet.raise_for_status().json()["instances"] if i["eligible"]}
        except httpx.HTTPError:
            return False

    def _fresh_state(self) -> None:
        """Nothing of an earlier run on this host is left, but its admin key."""
        if _runs(self.state_dir):
            raise CliError(f"a server already runs with its state in {self.state_dir}; stop it or pass --state-dir")
        for stale in ("store.db", "store.db-wal", "store.db-shm", "server.json"):
            (self.state_dir / stale).unlink(missing_ok=True)
        shutil.rmtree(self.state_dir / "logs", ignore_errors=True)
        if self.config.store is None:
            shutil.rmtree(self.arena, ignore_errors=True)
        (self.state_dir / "logs").mkdir(parents=True, mode=0o700)
        self.state_dir.chmod(0o700)
        if not self.admin_key_file.exists():
            fd = os.open(self.admin_key_file, os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(fd, secrets.token_urlsafe(32).encode())
            os.close(fd)

    def _spawn(self, name: str, args: list[str], env: Mapping[str, str] | None = None) -> Child:
        environment = {"HOTSWAP_STORE": self.store, "HOTSWAP_ARENA": str(self.arena), "HOTSWAP_URL": self.url}
        environment |= env or {}
        with interrupts.held():
            child = Child(name, args, self.state_dir / "logs" / f"{name}.log", environment)
            self.children[name] = child
        return child

    def _gateway_args(self) -> list[str]:
        c = self.config
        args = ["server.gateway", "--store", self.store, "--model", self.name, "--host", c.host, "--port", str(c.port)]
        args += ["--admin-port", str(self.admin_port), "--admin-key-file", str(self.admin_key_file)]
        args += ["--otlp-endpoint", c.otlp_endpoint] if c.otlp_endpoint else []
        return [*args, *(["--api-key-file", str(c.api_key_file)] if c.api_key_file else []), *c.gateway_args]

    def _instance_args(self, index: int) -> list[str]:
        c = self.config
        args = ["server.cli", "instance", "--model", str(self.model_dir), "--name", self.name, "--store", self.store]
        args += ["--instance-id", self.instance_id(index)]
        args += ["--otlp-traces-endpoint", traces_url(c.otlp_endpoint)] if c.otlp_endpoint else []
        return [*args, "--kv-cache-gib", str(c.kv_cache_gib), *c.vllm_args]

    def _instance_tracing(self) -> dict[str, str]:
        """What vLLM's own tracing reads from the environment: it speaks gRPC unless told otherwise."""
        if self.config.otlp_endpoint is None:
            return {}
        return {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "hotswap-instance"}


def run_up(config: UpConfig) -> None:
    """The command: start, report, watch, and stop on SIGINT or SIGTERM."""
    missing.require("torch", "vllm")  # of the processes that it starts
    console = Console()
    server = Server(config)
    interrupts.install()
    try:
        with console.status(f"starting {server.name}: gateway, {config.instances} x vLLM, first version"):
            server.start()
            server.wait_ready()
        console.print(f"[bold]{server.name}[/] answers on {server.url}  (OpenAI: {server.url}/v1)")
        console.print(f"console: {server.admin_url}/console")
        console.print(f"admin: {server.admin_url}, key in {server.admin_key_file}   logs: {server.state_dir / 'logs'}")
        if config.train is not None:
            server.train(config.train)
        server.watch()
    except interrupts.Interrupted:
        console.print("stopping")
    finally:
        interrupts.ignore()
        server.stop()


def draft_dir(vllm_args: Sequence[str]) -> Path | None:
    """The draft model that `--speculative-config` names, if it has weights of its own to publish. Raises CliError."""
    joined = [
        word for argument in vllm_args for word in (argument.split("=", 1) if argument[:2] == "--" else [argument])
    ]
    if "--speculative-config" not in joined[:-1]:
        return None
    try:
        config = json.loads(joined[joined.index("--speculative-config") + 1])
    except json.JSONDecodeError as error:
        raise CliError(f"--speculative-config is not JSON ({error})") from error
    own = isinstance(config, dict) and "model" in config and config.get("method", "draft_model") == "draft_model"
    return resolve_model(config["model"]) if own else None


def free_port(host: str) -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _is_lasting(name: str) -> bool:
    """Whether a child of that name is to run for ever: not a publication, and not a trainer, which ends by itself."""
    return name == "gateway" or name.startswith("instance-")


def _free_port_after(port: int) -> int:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port + 1))
        except (OSError, OverflowError):
            return free_port("127.0.0.1")
    return port + 1


def _runs(state_dir: Path) -> bool:
    """Whether the server described there is alive; what cannot be read is not."""
    try:
        return store.process_lives(ServerInfo.read(state_dir).pid)
    except CliError:
        return False
