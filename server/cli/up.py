"""`hotswap up`: the processes of one host, started, watched, and stopped together."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from rich.console import Console

from server.cli import interrupts
from server.cli.errors import CliError, ProcessFailed
from server.cli.paths import ServerInfo, default_state_dir, resolve_model
from server.cli.processes import Child
from weightsync import ensure_arena, open_store

READY_TIMEOUT_S = 600.0
RESTART_PAUSE_S = 2.0


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
    vllm_args: tuple[str, ...] = ()


class Server:
    """A gateway and an instance on this host, with a store, a key and logs in one state directory.

    Start-up overlaps: the checkpoint is published into shared memory while vLLM imports itself; the instance starts
    with dummy weights and receives the version like any other.
    """

    def __init__(self, config: UpConfig) -> None:
        model_dir = resolve_model(config.model)
        name = config.name or model_dir.name
        self.state_dir = (config.state_dir or default_state_dir(name)).resolve()
        self.config = replace(config, name=name, port=config.port or free_port(config.host))
        self.model_dir, self.name = model_dir, name
        self.url = f"http://{config.host}:{self.config.port}"
        self.store = f"sqlite://{self.state_dir / 'store.db'}"
        self.admin_key_file = config.admin_key_file or self.state_dir / "admin.key"
        self.children: dict[str, Child] = {}

    def start(self) -> None:
        """Start every process; returns at once."""
        self._fresh_state()
        asyncio.run(self._create_store())
        self._spawn("gateway", self._gateway_args())
        push = ["weightsync.push", "--store", self.store, "--model", self.name, str(self.model_dir)]
        self._spawn("publish", push)
        self._spawn("instance", self._instance_args())

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Block until the gateway says it is ready. ProcessFailed shows the log of what ended early."""
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            for child in self.children.values():
                if not child.alive and not (child.name == "publish" and child.process.returncode == 0):
                    raise ProcessFailed(f"{child.name} ended early; the end of {child.log}:\n{child.tail()}")
            if time.monotonic() > deadline:
                raise ProcessFailed(f"not ready after {timeout_s:.0f} s; see the logs in {self.state_dir / 'logs'}")
            time.sleep(0.1)
        info = ServerInfo(self.url, self.name, self.store, str(self.admin_key_file), os.getpid())
        info.write(self.state_dir)

    def watch(self) -> None:
        """Restart what dies, until interrupted; a trainer that ends by itself is left ended."""
        while True:
            for child in [c for c in self.children.values() if c.name in ("gateway", "instance") and not c.alive]:
                print(f"hotswap: {child.name} ended with {child.process.returncode}; restarting", file=sys.stderr)
                time.sleep(RESTART_PAUSE_S)
                with interrupts.held():
                    child.start()
            time.sleep(0.2)

    def train(self, config: Path) -> Child:
        """Start the trainer against this server."""
        return self._spawn("trainer", ["trainer.main", "--config", str(config)])

    def stop(self) -> None:
        """Stop every process and free the shared memory."""
        for child in reversed(self.children.values()):
            child.stop()
        (self.state_dir / "server.json").unlink(missing_ok=True)
        shutil.rmtree(self.arena, ignore_errors=True)

    @property
    def arena(self) -> Path:
        """Directory of the shared-memory slots."""
        return Path(f"/dev/shm/hotswap-{self.name}-{self.config.port}")  # noqa: S108

    @property
    def admin_key(self) -> str:
        return self.admin_key_file.read_text().strip()

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2.0).status_code == 200
        except httpx.TransportError:
            return False

    def _fresh_state(self) -> None:
        """What is served is what the command line names: versions of an earlier run are not carried over."""
        if (self.state_dir / "server.json").exists() and _alive(ServerInfo.read(self.state_dir).pid):
            raise CliError(f"a server already runs with its state in {self.state_dir}; stop it or pass --state-dir")
        for stale in ("store.db", "store.db-wal", "store.db-shm", "server.json"):
            (self.state_dir / stale).unlink(missing_ok=True)
        shutil.rmtree(self.state_dir / "logs", ignore_errors=True)
        shutil.rmtree(self.arena, ignore_errors=True)
        (self.state_dir / "logs").mkdir(parents=True, mode=0o700)
        self.state_dir.chmod(0o700)
        if not self.admin_key_file.exists():
            fd = os.open(self.admin_key_file, os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(fd, secrets.token_urlsafe(32).encode())
            os.close(fd)

    async def _create_store(self) -> None:
        store = open_store(self.store)
        await ensure_arena(store, self.arena)
        await store.close()

    def _spawn(self, name: str, args: list[str]) -> Child:
        environment = {"HOTSWAP_STORE": self.store, "HOTSWAP_ARENA": str(self.arena), "HOTSWAP_URL": self.url}
        with interrupts.held():
            child = Child(name, args, self.state_dir / "logs" / f"{name}.log", environment)
            self.children[name] = child
        return child

    def _gateway_args(self) -> list[str]:
        c = self.config
        args = ["server.gateway", "--store", self.store, "--model", self.name, "--host", c.host, "--port", str(c.port)]
        args += ["--admin-key-file", str(self.admin_key_file)]
        return args + (["--api-key-file", str(c.api_key_file)] if c.api_key_file else [])

    def _instance_args(self) -> list[str]:
        c = self.config
        args = ["server.cli", "instance", "--model", str(self.model_dir), "--name", self.name, "--store", self.store]
        return [*args, "--kv-cache-gib", str(c.kv_cache_gib), *c.vllm_args]


def run_up(config: UpConfig) -> None:
    """The command: start, report, watch, and stop on SIGINT or SIGTERM."""
    console = Console()
    server = Server(config)
    interrupts.install()
    try:
        with console.status(f"starting {server.name}: gateway, vLLM, first version"):
            server.start()
            server.wait_ready()
        console.print(f"[bold]{server.name}[/] answers on {server.url}  (OpenAI: {server.url}/v1)")
        console.print(f"admin key: {server.admin_key_file}   logs: {server.state_dir / 'logs'}")
        if config.train is not None:
            server.train(config.train)
        server.watch()
    except interrupts.Interrupted:
        console.print("stopping")
    finally:
        interrupts.ignore()
        server.stop()


def free_port(host: str) -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
