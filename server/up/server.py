"""`hotswap up`: the processes of one host, started, watched, and stopped together.

A start goes on where the run before ended, however it ended (resume.py); the state directory is used by one `up` at a
time (state.py), and whatever is refused is refused before anything of it is touched. A stop first lets the copy of the
active version get to the disk, and then gives the shared memory back.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from server import missing
from server.errors import CliError, ConfigError, as_cli_error
from server.files import write_new_file
from server.gateway.__main__ import configured
from server.gateway.config import GatewayConfig
from server.gateway.observe.tracing import traces_url
from server.gpus import devices_asked, devices_of_each
from server.ports import free_port, url_of
from server.up import forks, interrupts, resume
from server.up.config import UpConfig
from server.up.forks import Forks
from server.up.nodes import NodeChild, Nodes
from server.up.paths import ServerInfo, default_state_dir
from server.up.processes import Child, share_of_cores
from server.up.served import Served, served
from server.up.state import StateDir, require_own
from weightsync.control.hosts import this_host
from weightsync.errors import ArenaError, PersistError, StoreError, TlsUnavailable
from weightsync.memory.arena import DEFAULT_ROOT
from weightsync.tls import ClusterTls, trusting
from weightsync.vllm_engine import gpus
from weightsync.vllm_engine.releases import for_cpus

RESTART_PAUSE_S = 2.0  # between two starts of a process
STEADY_S = 60.0  # a process that fails earlier, again and again, waits longer each time
LONGEST_PAUSE_S = 60.0
FORKED = "server.instance.fork_server:prepare"
LEAVES_S, TRAINER_LEAVES_S = 10.0, 130.0  # after SIGTERM; a trainer saves first, within its faults.grace_s (120 s)
PERSIST_S = 600.0  # for the copy of the active version at a stop
USERS = ".users"  # the file in an arena that its servers hold a shared lock on
LOOK_S = 1.0  # between two looks at the store's file
SERVES = "serves"


class Server:
    """A gateway and instances on this host, with a store, a key and logs in one state directory.

    Start-up overlaps: the checkpoint is published into shared memory while vLLM imports itself; instances start with
    dummy weights and receive the version like any other. If there is a version to go on with, it is there before.
    """

    def __init__(self, config: UpConfig) -> None:
        self.models = served(config)
        self._devices: list[dict[str, str]] | None = None  # of each instance on GPUs; Ray gives them theirs
        if config.ray is None and not for_cpus():
            asked = [devices_asked(model.vllm_args) for model in self.models for _ in range(model.instances)]
            with as_cli_error(ConfigError):
                self._devices = devices_of_each(asked, os.environ, gpus.look())
        self.name = name = self.models[0].name
        self.state_dir = (config.state_dir or default_state_dir(name)).resolve()
        self.admin_key_file = (config.admin_key_file or self.state_dir / "admin.key").absolute()
        self.config = replace(config, port=config.port or free_port(config.host))
        self.state = StateDir(self.state_dir)
        self.store = config.store or f"sqlite://{self.state.store}"
        with as_cli_error(ConfigError, TlsUnavailable):
            self.gateway = configured(self._gateway_args()[1:])
            self._verify = _verify(self.gateway)
        self.admin_port = self.gateway.admin_port or free_port(self.gateway.admin_host, self.config.port + 1)
        self.url = url_of(config.host, self.config.port, self.gateway.scheme)
        self.admin_url = url_of(self.gateway.admin_host, self.admin_port, self.gateway.admin_scheme)
        self.arena = DEFAULT_ROOT / arena_name(name, self.state_dir)
        self.children: dict[str, Child] = {}
        self.placed: dict[str, NodeChild] = {}  # on nodes of a Ray cluster
        self._nodes: Nodes | None = None  # of a Ray cluster
        self.said: tuple[str, ...] = ()  # what the operator should know of what it goes on with
        self._fork_server: Forks | None = None
        self._restart_at: dict[str, float] = {}
        self._begun: dict[str, float] = {}  # when each process was last started
        self._failures: dict[str, int] = {}  # in a row, each within STEADY_S of the start
        self._left: set[str] = set()  # what has ended, and is not to be started again
        self._notes: dict[str, str] = {}  # by id, how the gateway or an instance that does not serve yet stands
        self._store_seen: tuple[int, int] | None = None
        self._arena_lock: int | None = None  # shared with other servers in the same arena, if the store is
        self._look_at = 0.0

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

    def start(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Start every process; returns at once. `say` is told what it waits for, or discards. Raises CliError.

        A refused start leaves everything as it was. Call `stop` whatever happens.
        """
        self.state.claim()
        self.children.clear()
        self.placed.clear()
        self.state.end_leftovers(LEAVES_S, TRAINER_LEAVES_S, say)
        for port, host in ((self.config.port, self.config.host), (self.admin_port, "127.0.0.1")):
            _require_free(host, port)
        try:
            if self.config.ray is not None:
                self._nodes = Nodes(self.config, self.models, self.state_dir / "logs")
            begun = self._begin(say)
            self.said = begun.said
            (self.state_dir / "server.json").unlink(missing_ok=True)
            self.state.rotate_logs()
            self._make_admin_key()
            self._start_children(begun)
        except (StoreError, ArenaError, PersistError, OSError) as error:
            raise CliError(f"the state in {self.state_dir} cannot be used: {error}") from error

    def _begin(self, say: Callable[[str], None]) -> resume.Begun:
        """Store, shared memory and records in order."""
        shared, c = self.config.store is not None, self.config
        wanted = [
            resume.Wanted(
                model=model.name,
                checkpoint=model.checkpoint,
                draft=model.draft,
                adapters="--enable-lora" in model.vllm_args,
                copies=self._copies_of(model) if self._persists else None,
                kept=self.state.copies_of(model.tag),
                arena=self.arena,
            )
            for model in self.models
        ]
        if not shared:
            self.state.finish_discard(self.arena)
            if c.fresh or c.throwaway:
                self._discard(say)
        store_id = None if shared else self.state.require_store()
        url = self.store if shared else f"sqlite://{self.state.store}{f'?id={store_id}' if store_id else ''}"
        begun = asyncio.run(resume.begin(url, wanted, None if shared else self.state.remember))
        self.store, self.arena = begun.url, begun.arena
        if shared:
            self._arena_lock = os.open(self.arena / USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._arena_lock, fcntl.LOCK_SH)
        else:
            self._store_seen = _inode(self.state.store)
        return begun

    def _discard(self, say: Callable[[str], None]) -> None:
        copies = [self._copies_of(model) for model in self.models]
        for place in copies if self._persists else []:
            if not place.is_relative_to(self.state_dir):
                require_own(place, self.state.store_id)
        if self.state.store.exists():
            line, recorded = asyncio.run(resume.describe(f"sqlite://{self.state.store}", [m.name for m in self.models]))
            say(f"discarding {line}")
            copies += recorded
        self.state.discard(copies, self.arena)

    def _start_children(self, begun: resume.Begun) -> None:
        self._spawn("gateway", [*self._gateway_args(), "--admin-port", str(self.admin_port)])
        for model in self.models:
            if self._persists:
                self._spawn(model.named("persist"), self._persist_args(model))
            if (what := begun.publish.get(model.name)) is not None:
                push = ["weightsync.push", "--store", self.store, "--model", model.name]
                self._spawn(model.named("publish"), [*push, *what])
            if self._nodes is not None:
                self._spawn(model.named("peer"), self._nodes.peer_args(self.store, model.name))
        every = [(model, index) for model in self.models for index in range(model.instances)]
        for place, (model, index) in enumerate(every):
            args = self._instance_args(model, index)
            if self._nodes is not None:
                with interrupts.held():
                    self.placed |= self._nodes.start(place, self.store, model, index, args)
                continue
            if self._devices is not None:
                env = self._devices[place]
            else:
                env = share_of_cores(place, len(every), model.vllm_args, os.environ)
            self._spawn(
                f"{model.named('instance')}-{index}", args, {**env, **self._instance_tracing()}, forks=self._forks
            )

    def wait_ready(self, timeout_s: float | None = None, say: Callable[[str], None] = lambda _: None) -> None:
        """Block until every instance serves; `say` gets a line for each phase or error of one, with the seconds so far.
        Raises CliError, with reasons.

        `timeout_s`: another one than that of the configuration.
        """
        timeout_s = self.config.ready_timeout_s if timeout_s is None else timeout_s
        began, told = time.monotonic(), dict[str, str]()
        key_file, certificate = str(self.admin_key_file), self.gateway.ssl_certfile
        about = self.name, self.store, key_file, os.getpid(), "starting", tuple(model.name for model in self.models)
        shown = str(certificate.absolute()) if certificate else ""
        info = ServerInfo(self.url, self.admin_url, *about, certificate=shown)
        info.write(self.state_dir)
        while not self._ready():
            for name, note in sorted(self._notes.items() - told.items()):
                say(f"{time.monotonic() - began:4.0f} s  {name}: {note}")
            told |= self._notes
            for child in self._everything().values():
                if not child.alive and not (_kind(child.name) == "publish" and child.returncode == 0):
                    cause = f"{found}\n" if (found := child.cause()) else ""
                    raise CliError(f"{child.name} ended early: {cause}the end of {child.log}:\n{child.tail()}")
            if time.monotonic() - began > timeout_s:
                why = "".join(f"{name}: {note}\n" for name, note in self._notes.items() if note != SERVES)
                raise CliError(
                    f"not ready after {timeout_s:.0f} s (--ready-timeout). {why}"
                    f"The logs are in {self.state_dir / 'logs'}"
                )
            time.sleep(0.1)
        replace(info, state="ready").write(self.state_dir)

    def watch(self) -> None:
        """Restart what dies, until interrupted; a trainer that ends by itself is left ended, and told."""
        while True:
            self.restart_ended()
            self._look_at_store()
            time.sleep(0.2)

    def restart_ended(self) -> None:
        """Start what has ended, RESTART_PAUSE_S after its last start, or later if it fails in a row; to be called again
        and again."""
        now = time.monotonic()
        for name, child in self._everything().items():
            if child.alive or name in self._left:
                continue
            if not _is_lasting(name):
                self._left.add(name)
                if child.returncode:
                    print(f"hotswap: {_end_of(child)}. Its log is {child.log}", file=sys.stderr)
            elif name not in self._restart_at:
                pause = self._pause(name, child, now)
                when = f" in {pause:.0f} s" if pause else ""
                print(f"hotswap: {_end_of(child)}; restarting{when}", file=sys.stderr)
                self._restart_at[name] = max(now + pause, self._begun.get(name, now) + RESTART_PAUSE_S)
            elif now >= self._restart_at[name]:
                with interrupts.held():
                    child.stop()  # what it may have left of its group
                    child.start()
                    self._begun[name] = now
                    del self._restart_at[name]

    def _pause(self, name: str, child: Child | NodeChild, now: float) -> float:
        """Seconds before what ended now starts again. A process that somebody has killed did not fail by itself."""
        failed = (child.returncode or 0) > 0 and now - self._begun.get(name, -STEADY_S) < STEADY_S
        self._failures[name] = failures = self._failures.get(name, 0) + 1 if failed else 0
        return min(LONGEST_PAUSE_S, RESTART_PAUSE_S * 2 ** min(failures - 2, 10)) if failures > 1 else 0.0

    def train(self, config: Path) -> Child:
        """Start the trainer against this server."""
        return self._spawn("trainer", ["trainer.main", "--config", str(config)])

    def stop(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Stop every process, the one that copies to disk last, and free the shared memory if the copy is there.

        Where the start was refused nothing is touched.
        """
        if not self.state.held:
            return
        if self._fork_server is not None and not self._fork_server.ready:
            self._fork_server.stop()  # no instance has begun yet
        copying = [child for child in self.children.values() if _kind(child.name) == "persist"]
        for child in reversed([c for c in self._everything().values() if c not in copying]):
            child.stop(TRAINER_LEAVES_S if child.name == "trainer" else LEAVES_S)
        if self._fork_server is not None:
            self._fork_server.stop()
            self._fork_server = None
        if copying:
            say("waiting for the copies on disk; after a kill, the next start goes on from shared memory")
        for child in copying:
            child.stop(PERSIST_S)
        if self.children and self.state.claimed:
            (self.state_dir / "server.json").unlink(missing_ok=True)
            self._leave_memory(bool(copying) and all(child.returncode == 0 for child in copying), say)
        if self._nodes is not None:
            self._nodes.close()
            self._nodes = None
        if self._arena_lock is not None:
            os.close(self._arena_lock)
            self._arena_lock = None
        self.state.release()

    def _leave_memory(self, is_copied: bool, say: Callable[[str], None]) -> None:
        """Free the shared memory, unless the only copy of the active version is there."""
        if self.config.throwaway:
            shutil.rmtree(self.arena, ignore_errors=True)
        elif is_copied:
            self._free_arena()
        elif self.arena.exists():
            say(f"the active version stays in shared memory ({self.arena}) for the next start: it is not on disk")

    def _free_arena(self) -> None:
        """Not what others use: with an etcd other servers may have their slots there, and with a name of this host a
        peer does."""
        if self._arena_lock is None:
            resume.free_arena(self.arena)
            return
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._arena_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not this_host():
                (self.arena / USERS).unlink(missing_ok=True)
                resume.free_arena(self.arena)

    def instance_id(self, index: int, model: Served | None = None) -> str:
        """Of the first model, or of another one. Stable over restarts; in a store that several hosts share it says
        where to look."""
        host = f"{socket.gethostname()}-{self.config.port}-" if self.config.store else ""
        host = f"ray-{host}" if self.config.ray else host  # its process is to be looked for elsewhere
        return f"{host}{(model or self.models[0]).named('instance')}-{index}"

    @property
    def admin_key(self) -> str:
        """The key the gateway takes: the environment's, else the file's, as for `hotswap weights`."""
        return os.environ.get("HOTSWAP_ADMIN_KEY") or self.admin_key_file.read_text().strip()

    def _ready(self) -> bool:
        """Whether each instance serves, or sleeps as it was ordered to before."""
        self._notes = {}
        try:
            serving = [self._serves(model) for model in self.models]  # each, for the errors of its instances
            return all(serving)
        except httpx.HTTPError:
            self._notes = {"gateway": "starts"}
            return False

    def _serves(self, model: Served) -> bool:
        ours = {self.instance_id(index, model) for index in range(model.instances)}
        key = {"authorization": f"Bearer {self.admin_key}"}
        asked = {}
        for what in ("instances", "sleep"):
            answer = self._ask(f"{self.admin_url}/admin/{what}", params={"model": model.name}, headers=key)
            asked[what] = answer.raise_for_status().json()
        asleep = {row["id"] for row in asked["sleep"]["asleep"]}
        rows = [row for row in asked["instances"]["instances"] if row["id"] in ours]
        eligible = {row["id"] for row in rows if row["eligible"]}
        self._notes |= dict.fromkeys(ours - asleep, "the engine starts") | {row["id"]: _note(row) for row in rows}
        if not ours <= eligible | asleep:
            return False
        return ours <= asleep or self._ask(f"{self.url}/readyz").status_code == 200

    def _ask(self, url: str, **more: Any) -> httpx.Response:
        """GET of this server's own gateway, which may have a certificate for other names than its address here."""
        return httpx.get(url, verify=self._verify, timeout=2.0, **more)

    def _make_admin_key(self) -> None:
        if not self.admin_key_file.exists():
            write_new_file(self.admin_key_file, secrets.token_urlsafe(32))

    def _look_at_store(self) -> None:
        """Say once that the store is gone, or another one: nothing is swapped from then on, and no key changed."""
        now = time.monotonic()
        if self.config.store is not None or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        if (seen := _inode(self.state.store)) == self._store_seen:
            return
        self._store_seen = seen
        if (problem := resume.lost(self.store)) is not None:
            print(f"hotswap: {problem}. Requests are answered; no weights and no keys can be changed", file=sys.stderr)

    @property
    def _persists(self) -> bool:
        return self.config.persist != "off" and not self.config.throwaway

    def _copies_of(self, model: Served) -> Path:
        """Where copies of its committed versions are."""
        named = self.config.persist
        return named.resolve() / model.tag if isinstance(named, Path) else self.state.copies_of(model.tag)

    def _everything(self) -> dict[str, Child | NodeChild]:
        return {**self.children, **self.placed}

    def _spawn(
        self,
        name: str,
        args: list[str],
        env: Mapping[str, str] | None = None,
        *,
        forks: Callable[[], Forks] | None = None,
    ) -> Child:
        environment = {"HOTSWAP_STORE": self.store, "HOTSWAP_ARENA": str(self.arena), "HOTSWAP_URL": self.url}
        environment |= env or {}
        with interrupts.held():
            log = self.state_dir / "logs" / f"{name}.log"
            child = Child(name, args, log, environment, [self.state.inherited], forks)
            self.children[name] = child
            self._begun[name] = time.monotonic()
            self._left.discard(name)
        return child

    def _forks(self) -> Forks:
        """The server that instances are forked from; a new one where the last has ended."""
        if self._fork_server is None or self._fork_server.look():
            log = self.state_dir / "logs" / "forks.log"
            self._fork_server = forks.begin(FORKED, log, inherited=[self.state.inherited])
        return self._fork_server

    def _gateway_args(self) -> list[str]:
        c = self.config
        args = ["server.gateway", "--store", self.store, "--model", self.name, "--host", c.host, "--port", str(c.port)]
        args += ["--admin-key-file", str(self.admin_key_file)]
        args += ["--otlp-endpoint", c.otlp_endpoint] if c.otlp_endpoint else []
        args += ["--models", str(c.models)] if c.models is not None else []
        return [*args, *(["--api-key-file", str(c.api_key_file)] if c.api_key_file else []), *c.gateway_args]

    def _persist_args(self, model: Served) -> list[str]:
        c = self.config
        args = [
            "weightsync.persist",
            "--store",
            self.store,
            "--model",
            model.name,
            "--dir",
            str(self._copies_of(model)),
        ]
        args += ["--keep", str(c.persist_keep)]
        return [*args, *(["--max-bytes", str(int(c.persist_max_gib * 2**30))] if c.persist_max_gib else [])]

    def _instance_args(self, model: Served, index: int) -> list[str]:
        c = self.config
        args = ["server.cli", "instance", "--model", str(model.checkpoint), "--name", model.name]
        args += ["--store", self.store, "--instance-id", self.instance_id(index, model)]
        args += ["--otlp-traces-endpoint", traces_url(c.otlp_endpoint)] if c.otlp_endpoint else []
        args += ["--kv-cache-gib", str(model.kv_cache_gib)] if model.kv_cache_gib is not None else []
        return [*args, *model.vllm_args]

    def _instance_tracing(self) -> dict[str, str]:
        """The environment that vLLM's own tracing reads: it speaks gRPC unless told otherwise."""
        if self.config.otlp_endpoint is None:
            return {}
        return {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "hotswap-instance"}


def run_up(config: UpConfig) -> None:
    """The command: start, report, watch, and stop on SIGINT or SIGTERM."""
    missing.require("torch", "vllm")  # of the processes that it starts
    console = Console()
    server = Server(config)
    names, instances = ", ".join(m.name for m in server.models), sum(m.instances for m in server.models)
    interrupts.install()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    try:
        with console.status(f"starting {names}: gateway, {instances} x vLLM, first version"):
            server.start(say)
            for line in server.said:
                say(line)
            server.wait_ready(say=say)
        say(f"{names} answers on {server.url}  (OpenAI: {server.url}/v1)")
        say(f"console: {server.admin_url}/console")
        say(f"admin: {server.admin_url}, key in {server.admin_key_file}   logs: {server.state_dir / 'logs'}")
        store = server.store.partition("?id=")[0]  # which a fresh start changes
        say(f"trainers: weightsync.Publisher({store!r}, model={server.models[0].name!r})")
        if config.train is not None:
            server.train(config.train)
        server.watch()
    except CliError as failed:
        if "torchvision" not in str(failed):
            raise
        raise CliError(f"{failed}\n{missing.NO_VISION}") from None
    except interrupts.Interrupted:
        console.print("stopping")
    finally:
        interrupts.ignore()
        server.stop(say)


def _note(row: Mapping[str, Any]) -> str:
    """How an instance stands that is being started."""
    if row["error"]:
        return str(row["error"]["message"])
    if row["eligible"]:
        return SERVES
    return "takes its first version" if row["state"] in ("STAGING", "STAGED", "COMMITTING") else "the engine runs"


def _kind(name: str) -> str:
    return name.partition("-")[0]


def _end_of(child: Child | NodeChild) -> str:
    cause = child.cause()
    return f"{child.name} ended with {child.returncode}" + (f" ({cause})" if cause else "")


def _is_lasting(name: str) -> bool:
    """Whether a child of that name is to run for ever: not a publication, and not a trainer, which ends by itself."""
    return _kind(name) in ("gateway", "persist", "peer", "instance")


def arena_name(model: str, state_dir: Path) -> str:
    """The directory of the slots in shared memory belongs to the state directory, wherever the server listens."""
    readable = re.sub("[^A-Za-z0-9._-]", "-", model)[:64]
    return f"hotswap-{readable}-{hashlib.blake2b(str(state_dir).encode(), digest_size=6).hexdigest()}"


def _inode(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None


def _require_free(host: str, port: int) -> None:
    """Raises CliError."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise CliError(
            f"cannot listen on {host}, port {port} ({error.strerror or error}): stop what does, or pass another --port"
        ) from error


def _verify(gateway: GatewayConfig) -> ssl.SSLContext | bool:
    """How `up` knows its own gateway. Raises ConfigError, TlsUnavailable."""
    if (certificate := gateway.ssl_certfile) is not None:
        try:
            return trusting(certificate)
        except OSError as error:
            raise ConfigError(f"--ssl-certfile {certificate}: cannot be used ({error}); name a PEM file.") from error
    return ClusterTls(gateway.cluster_tls).client_context() if gateway.is_admin_mutual and gateway.cluster_tls else True
