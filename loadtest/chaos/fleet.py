"""Three hosts with the processes of two models: where each runs, who starts it again, and who watches it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from loadtest.chaos.models import CHECKPOINTS, FIRST_TOKEN, Placement, models_file
from loadtest.chaos.verdict import ETCD, PUBLISHER, process_name
from loadtest.hosts.certificates import self_signed
from loadtest.hosts.etcd import Members
from loadtest.hosts.namespaces import Hosts, until
from loadtest.models.checkpoints import make_constant_checkpoint
from server.up import interrupts
from server.up.processes import share_of_cores
from weightsync.control.records import ActiveRecord, InstanceRecord, Keys, PastSwapRecord, SwapRecord
from weightsync.dying import with_me
from weightsync.errors import StoreError
from weightsync.store import SyncStore

RESTART_S = 1.0
FENCE_S = 20.0  # an instance whose engine did not flip within 10 s is torn, and ends; until its restart is under way
STOP_S = 10.0


class Supervised:
    """One process in a group of its own. `own_ends` counts how often it ended though nobody had broken it.

    An instance must end when its engine has been frozen for longer than a flip may take: that is nobody's fault either.
    """

    def __init__(
        self, name: str, hosts: Hosts, host: int, argv: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        self.name, self.host, self.log, self.own_ends = name, host, log, 0
        self._hosts, self._argv, self._env = hosts, list(argv), dict(env)
        self._broken = self._killed = self._held = False
        self._fenced, self._may_end_until = False, 0.0  # whether it is a part of it that is frozen
        self._frozen: list[int] = []
        self._restart_at: float | None = None
        self.start()

    def start(self) -> None:
        with interrupts.held(), self.log.open("ab") as log:
            said = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            how: dict[str, Any] = {"start_new_session": True, "preexec_fn": with_me()}
            self._process = self._hosts.run(self.host, self._argv, env=self._env, **said, **how)
        self._broken = self._killed = self._held = False

    @property
    def runs(self) -> bool:
        return self._process.poll() is None and not self._frozen

    def tend(self) -> None:
        """Start it again when it has ended; to be called again and again."""
        if self._held or self._process.poll() is None:
            return
        if self._restart_at is None:
            self.own_ends += not (self._broken or time.monotonic() < self._may_end_until)
            self._restart_at = time.monotonic() + RESTART_S
        elif time.monotonic() >= self._restart_at:
            self._end_group()
            self._frozen.clear()
            self._restart_at = None
            self.start()

    @property
    def returncode(self) -> int | None:
        """The status that it ended with; None while it runs."""
        return self._process.poll()

    @property
    def descriptors(self) -> int:
        """How many it and its children have open; 0 when it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            return sum(one.num_fds() for one in (process, *process.children(recursive=True)))
        return 0

    def terminate(self) -> None:
        """SIGTERM, and nothing else."""
        self._broken = True
        self._process.terminate()

    def kill(self, part: str = "") -> None:
        """SIGKILL; `part`: only its child with that in its name."""
        self._broken = self._killed = True
        with contextlib.suppress(ProcessLookupError):  # it ended already, and is about to be started again
            os.kill(self._victim(part), signal.SIGKILL)

    def hold(self) -> None:
        """SIGKILL; nobody starts it again before `start`."""
        self._broken = self._held = True
        self._end_group()
        self._process.wait()
        self._restart_at = None

    def tell(self, number: signal.Signals) -> None:
        """A signal that breaks nothing."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def freeze(self, part: str = "") -> None:
        """SIGSTOP, until `thaw`."""
        self._broken = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim := self._victim(part), signal.SIGSTOP)
            self._frozen.append(victim)
            self._fenced = victim != self._process.pid

    def thaw(self) -> None:
        for victim in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
        self._frozen.clear()
        self._broken = self._killed  # it ends of a part that was killed meanwhile once it can notice
        if self._fenced:
            self._fenced, self._may_end_until = False, time.monotonic() + FENCE_S

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what is left of its group."""
        self.thaw()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        self._end_group()
        self._process.wait()

    def _end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _victim(self, part: str) -> int:
        """The process itself, where it has no such child (any more)."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True) if part else ():
                if part in child.name() or part in " ".join(child.cmdline()):
                    return int(child.pid)
        return self._process.pid


NAMESPACE, HOST = "chaos", "h"
COUNT = 3
PUBLIC, ADMIN = 8000, 8002
INSTANCE, PEER = 8010, 8020  # and one more for each model
DRAIN_S = 2.0  # what an instance that was told to leave goes on for: many an answer takes longer, and is handed on
CHUNK = 64 << 10  # so that a version of a tiny model is several chunks
READ_TIMEOUT_S = 20.0  # how long a gateway lets an instance be silent
VLLM_ARGS = (
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "16",
    "--enable-lora",
    "--max-loras",
    "2",
    "--max-cpu-loras",
    "8",
)
ARENAS = Path("/dev/shm")  # noqa: S108 - as arenas are
PREFIX = "hotswap-chaos-"


class Layout:
    """All processes, running. `work` gets logs and keys; what is in memory goes with `close`."""

    def __init__(self, hosts: Hosts, etcd: str, work: Path, seed: int, models: Sequence[Placement]) -> None:
        self.hosts, self.processes, self.models = hosts, dict[str, Supervised](), tuple(models)
        self.guests: list[Supervised] = []
        self._work, self._seed = work, seed
        remove_leftovers()
        self.memory = ARENAS / f"{PREFIX}{os.getpid()}"
        self.memory.mkdir(mode=0o700)
        self.etcd = Members(hosts, etcd, self.memory / "etcd", range(COUNT))
        self._checkpoints = {placed.model: _checkpoints(work.parent, FIRST_TOKEN[placed.model]) for placed in models}
        self._prepare()

    @property
    def gateways(self) -> list[str]:
        return [f"http://{self.hosts.address(host)}:{PUBLIC}" for host in range(COUNT)]

    @property
    def peers(self) -> list[str]:
        ports = [PEER + n for n in range(len(self.models))]
        return [f"https://{self.hosts.address(host)}:{port}" for host in range(COUNT) for port in ports]

    @property
    def tls(self) -> Path:
        """The certificates of all members."""
        return self._work / "tls"

    @property
    def _models_file(self) -> Path:
        return self._work / "models.yaml"

    def arena(self, name: str) -> Path:
        """That of the host with this name."""
        return self.memory / f"arena{name.removeprefix(HOST)}"

    @property
    def snapshot(self) -> Path:
        """Of the store."""
        return self.memory / "snapshot"

    @property
    def store(self) -> str:
        return self.etcd.url(NAMESPACE)

    def start_stores(self) -> None:
        for host in range(COUNT):
            self._start("etcd", host, self.etcd.command(host))

    def start_rest(self) -> None:
        for host in range(COUNT):
            for n, placed in enumerate(self.models):
                self._start("peer", host, [*_hotswap("peer"), *self._peer(n, host)], placed.model)
            self._start("gateway", host, [*_hotswap("gateway"), *self._gateway(host)])
        for placed in self.models:
            publisher = [sys.executable, "-m", "loadtest.chaos.publisher", *self._publisher(placed)]
            self._start(PUBLISHER, placed.publisher, publisher, placed.model)
            for host in placed.instances:
                name = process_name("instance", host, placed.model)
                self._start("instance", host, self._instance(placed.model, host, name), placed.model)

    def go_back(self, snapshot: Path) -> None:
        """The store is what it was in the snapshot, under another cluster's id. Publishers end before, and wait until
        `start_again`: they would give numbers anew of versions that instances still run. Raises TimeoutError."""
        stores = [self.processes[process_name(ETCD, host)] for host in range(COUNT)]
        for process in [*self._publishers(), *stores]:
            process.hold()
        self.etcd.restore(snapshot)
        for process in stores:
            process.start()
        until(lambda: self.etcd.listen() and self.etcd.agreed())

    def start_again(self) -> None:
        """Everything but the store, as an operator does after `go_back`."""
        publishers = self._publishers()
        for name, process in self.processes.items():
            if process not in publishers and not name.startswith(ETCD):
                process.kill()
        for process in publishers:
            process.start()

    def _publishers(self) -> list[Supervised]:
        return [self.processes[process_name(PUBLISHER, p.publisher, p.model)] for p in self.models]

    def join(self, model: str, host: int, name: str) -> Supervised:
        """Starts an instance that nobody starts again."""
        guest = self._supervised(name, host, self._instance(model, host, name))
        self.guests.append(guest)
        return guest

    def descriptors(self) -> dict[str, int]:
        """Of each process, by name."""
        return {name: process.descriptors for name, process in self.processes.items()}

    def log(self, name: str) -> Path:
        return self._work / "logs" / f"{name}.log"

    def tend(self) -> None:
        for process in self.processes.values():
            process.tend()

    def close(self) -> None:
        """Ends everything, the stores last; safe after half a start."""
        for process in reversed([*self.processes.values(), *self.guests]):
            process.stop()
        shutil.rmtree(self.memory, ignore_errors=True)

    def _start(self, what: str, host: int, argv: list[str], model: str = "") -> None:
        name = process_name(what, host, model)
        self.processes[name] = self._supervised(name, host, argv)

    def _supervised(self, name: str, host: int, argv: list[str]) -> Supervised:
        return Supervised(name, self.hosts, host, argv, self._environment(host), self.log(name))

    def _environment(self, host: int) -> dict[str, str]:
        """As on a host of its own. vLLM's engine core meets its API server on loopback."""
        return {
            "HOTSWAP_HOST": f"{HOST}{host}",
            "HOTSWAP_STORE": self.etcd.url(NAMESPACE, first=host),
            "HOTSWAP_ARENA": str(self.arena(f"{HOST}{host}")),
            "HOTSWAP_CLUSTER_TLS": str(self.tls),
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **share_of_cores(host, COUNT, VLLM_ARGS, os.environ),
        }

    def _peer(self, n: int, host: int) -> list[str]:
        words = ["--model", self.models[n].model, "--listen", f"{self.hosts.address(host)}:{PEER + n}"]
        return [*words, "--transport", "tcp", "--chunk", str(CHUNK)]

    def _gateway(self, host: int) -> list[str]:
        words = ["--models", str(self._models_file), "--host", self.hosts.address(host), "--port", str(PUBLIC)]
        words += ["--admin-port", str(ADMIN), "--admin-key-file", str(self._work / "admin.key")]
        return [*words, "--read-timeout", str(READ_TIMEOUT_S), "--log-format", "json"]

    def _instance(self, model: str, host: int, name: str) -> list[str]:
        port = INSTANCE + [placed.model for placed in self.models].index(model)
        words = ["--model", str(self._checkpoints[model][0]), "--name", model, "--instance-id", name]
        words += ["--host", self.hosts.address(host), "--port", str(port), "--kv-cache-gib", "0.06"]
        return [*_hotswap("instance"), *words, "--drain", str(DRAIN_S), *VLLM_ARGS]

    def _publisher(self, placed: Placement) -> list[str]:
        url = self.etcd.url(NAMESPACE, first=placed.publisher)
        return [url, placed.model, str(self._seed), *map(str, self._checkpoints[placed.model])]

    def _prepare(self) -> None:
        (self._work / "logs").mkdir(parents=True)
        self_signed(self.tls)
        self._models_file.write_text(json.dumps(models_file()))
        key = self._work / "admin.key"
        key.touch(mode=0o600)
        key.write_text(secrets.token_urlsafe(32))
        for directory in ("etcd", *(f"arena{host}" for host in range(COUNT))):
            (self.memory / directory).mkdir(mode=0o700)


def pools(memory: Path, but: Container[str] = ()) -> dict[str, int]:
    """How many slots each pool of each arena below `memory` has, by arena and pool; `but` those with these paths."""
    there = (path for path in memory.glob("arena*/*") if str(path) not in but)
    files = [path for path in there if path.name.rpartition("-")[2].isdecimal()]
    return dict(sorted(Counter(f"{path.parent.name}/{path.name.rpartition('-')[0]}" for path in files).items()))


def survivors(memory: Path) -> list[str]:
    """The processes with an arena below `memory`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOTSWAP_ARENA", "").startswith(f"{memory}/"):
                found.append(f"{process.name()} ({process.pid})")
    return found


def remove_leftovers() -> None:
    """Leftovers in memory of runs that were killed are deleted."""
    for path in _leftovers():
        shutil.rmtree(path, ignore_errors=True)


def _leftovers() -> Iterator[Path]:
    for path in ARENAS.glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX)
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            yield path


def _hotswap(command: str) -> list[str]:
    return [sys.executable, "-m", "server.cli", command]


def _checkpoints(directory: Path, first: int) -> list[Path]:
    """Each answers the token in its name."""
    paths = {first + i: directory / f"say-{first + i}" for i in range(CHECKPOINTS)}
    return [
        path if (path / "config.json").exists() else make_constant_checkpoint(path, token=token)
        for token, path in paths.items()
    ]


EVERY_S, HISTORY_EVERY_S = 0.4, 1.0
SERVES = frozenset({"SERVING", "STAGING", "STAGED", "COMMITTING"})


@dataclass(frozen=True)
class Snapshot:
    """Records of one moment; `at` is monotonic, None while the store has not been read."""

    at: float | None = None
    active: ActiveRecord | None = None
    swap: SwapRecord | None = None
    instances: dict[str, InstanceRecord] = field(default_factory=dict)

    def behind(self, names: Sequence[str]) -> list[str]:
        """Instances among `names` that do not run what is committed, and how they stand."""
        return [f"{name} {self._state(name)}" for name in names if not self.follows(name)]

    def follows(self, name: str) -> bool:
        """Whether the instance serves what is committed."""
        instance = self.instances.get(name)
        if instance is None or self.active is None or instance.state not in SERVES:
            return False
        return (instance.active_version, instance.active_epoch) == (self.active.version, self.active.epoch)

    def _state(self, name: str) -> str:
        found = self.instances.get(name)
        return "is gone" if found is None else f"is {found.state} with version {found.active_version}"


class Watch:
    """Use as a context. `now` and the `past` swaps, by id, are of some moment ago."""

    def __init__(self, store: str, model: str) -> None:
        self.now = Snapshot()
        self.past: dict[str, PastSwapRecord] = {}
        self._url, self._keys = store, Keys(model)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self._thread.join()

    def whole_swaps(self, participants: int, since: float) -> int:
        """Swaps done by so many instances, all of which follow, that were opened after the time `since` (unix)."""
        return sum(
            past.outcome == "done" and past.opened_at > since and _followed(past) >= participants
            for past in list(self.past.values())
        )

    def _run(self) -> None:
        store, read_at = None, 0.0
        while not self._ends.wait(EVERY_S):
            try:
                store = store or SyncStore(self._url, create=False)
                self._look(store)
                if time.monotonic() - read_at > HISTORY_EVERY_S:
                    self._read_history(store)
                    read_at = time.monotonic()
            except StoreError as error:  # the fleet is not whole while it cannot be read
                if error.code == "store_lost":  # it was restored: this starts again, as all that use it
                    if store is not None:
                        store.close()
                    store = None
        if store is not None:
            store.close()

    def _look(self, store: SyncStore) -> None:
        keys, at = self._keys, time.monotonic()
        found = {kv.key: kv.value for kv in store.list(keys.root)[0]}
        instances = [InstanceRecord.from_json(v) for k, v in found.items() if k.startswith(keys.instances)]
        active = ActiveRecord.from_json(found[keys.active]) if keys.active in found else None
        swap = SwapRecord.from_json(found[keys.swap]) if keys.swap in found else None
        self.now = Snapshot(at, active, swap, {record.id: record for record in instances})

    def _read_history(self, store: SyncStore) -> None:
        for kv in store.list(self._keys.history)[0]:
            record = PastSwapRecord.from_json(kv.value)
            self.past[record.id] = record


def _followed(past: PastSwapRecord) -> int:
    return sum(flip.version == past.version for flip in past.flips)
