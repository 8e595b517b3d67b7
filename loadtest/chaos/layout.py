"""Three hosts, on each an etcd member, a peer, a vLLM instance and a gateway; a publisher on the first one.

The commands are those of the chart: instances, gateways and peers know each other by certificates of one cluster.
Clients are on no host: they are plugged into the switch beside them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from loadtest.certificates import self_signed
from loadtest.chaos.answers import CHECKPOINTS, FIRST_TOKEN
from loadtest.chaos.supervised import Supervised
from loadtest.checkpoints import make_constant_checkpoint
from loadtest.hosts.etcd import Members
from loadtest.hosts.namespaces import Hosts
from server.cli.processes import share_of_cores

MODEL = "chaos"
COUNT = 3
PUBLISHER = 0  # its host
PUBLIC, INSTANCE, ADMIN, PEER = 8000, 8001, 8002, 8003
CHUNK = 64 << 10  # so that a version of a tiny model is several chunks
READ_TIMEOUT_S = 20.0  # how long a gateway lets an instance be silent
VLLM_ARGS = ("--max-model-len", "512", "--max-num-seqs", "16")
ARENAS = Path("/dev/shm")  # noqa: S108 - as arenas are
PREFIX = "hotswap-chaos-"


class Layout:
    """All processes, running. `work` gets logs and keys; what is in memory goes with `close`."""

    def __init__(self, hosts: Hosts, etcd: str, work: Path, seed: int) -> None:
        self.hosts, self.processes = hosts, dict[str, Supervised]()
        self._work, self._seed = work, seed
        remove_leftovers()
        self._memory = ARENAS / f"{PREFIX}{os.getpid()}"
        self._memory.mkdir(mode=0o700)
        self.etcd = Members(hosts, etcd, self._memory / "etcd", range(COUNT))
        self.checkpoints = [_checkpoint(work.parent / f"say-{i}", FIRST_TOKEN + i) for i in range(CHECKPOINTS)]
        self._prepare()

    @property
    def gateways(self) -> list[str]:
        return [f"http://{self.hosts.address(host)}:{PUBLIC}" for host in range(COUNT)]

    @property
    def peers(self) -> list[str]:
        return [f"https://{self.hosts.address(host)}:{PEER}" for host in range(COUNT)]

    @property
    def tls(self) -> Path:
        """The certificates of all members."""
        return self._work / "tls"

    @property
    def store(self) -> str:
        return self.etcd.url(MODEL)

    def start_stores(self) -> None:
        for host in range(COUNT):
            self._start("etcd", host, self.etcd.command(host))

    def start_rest(self) -> None:
        for host in range(COUNT):
            self._start("peer", host, [*_hotswap("peer"), *self._peer(host)])
            self._start("gateway", host, [*_hotswap("gateway"), *self._gateway(host)])
        self._start("publisher", PUBLISHER, [sys.executable, "-m", "loadtest.chaos.publisher", *self._publisher()])
        for host in range(COUNT):
            self._start("instance", host, [*_hotswap("instance"), *self._instance(host)])

    def tend(self) -> None:
        for process in self.processes.values():
            process.tend()

    def close(self) -> None:
        """Ends everything, the stores last; safe after half a start."""
        for process in reversed(list(self.processes.values())):
            process.stop()
        shutil.rmtree(self._memory, ignore_errors=True)

    def _start(self, what: str, host: int, argv: list[str]) -> None:
        name = f"{what}-{host}"
        log = self._work / "logs" / f"{name}.log"
        self.processes[name] = Supervised(name, self.hosts, host, argv, self._environment(host), log)

    def _environment(self, host: int) -> dict[str, str]:
        """As on a host of its own. vLLM's engine core meets its API server on loopback."""
        return {
            "HOTSWAP_HOST": f"h{host}",
            "HOTSWAP_STORE": self.etcd.url(MODEL, first=host),
            "HOTSWAP_ARENA": str(self._memory / f"arena{host}"),
            "HOTSWAP_CLUSTER_TLS": str(self.tls),
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **share_of_cores(host, COUNT, VLLM_ARGS, os.environ),
        }

    def _peer(self, host: int) -> list[str]:
        listen = f"{self.hosts.address(host)}:{PEER}"
        return ["--model", MODEL, "--listen", listen, "--transport", "tcp", "--chunk", str(CHUNK)]

    def _gateway(self, host: int) -> list[str]:
        words = ["--model", MODEL, "--host", self.hosts.address(host), "--port", str(PUBLIC)]
        words += ["--admin-port", str(ADMIN), "--admin-key-file", str(self._work / "admin.key")]
        return [*words, "--read-timeout", str(READ_TIMEOUT_S), "--log-format", "json"]

    def _instance(self, host: int) -> list[str]:
        words = ["--model", str(self.checkpoints[0]), "--name", MODEL, "--instance-id", f"instance-{host}"]
        words += ["--host", self.hosts.address(host), "--port", str(INSTANCE), "--kv-cache-gib", "0.06"]
        return [*words, *VLLM_ARGS]

    def _publisher(self) -> list[str]:
        return [self.etcd.url(MODEL, first=PUBLISHER), MODEL, str(self._seed), *map(str, self.checkpoints)]

    def _prepare(self) -> None:
        (self._work / "logs").mkdir(parents=True)
        self_signed(self.tls)
        key = self._work / "admin.key"
        key.touch(mode=0o600)
        key.write_text(secrets.token_urlsafe(32))
        for directory in ("etcd", *(f"arena{host}" for host in range(COUNT))):
            (self._memory / directory).mkdir(mode=0o700)


def remove_leftovers() -> None:
    """What runs that were killed left in memory."""
    for path in _leftovers():
        shutil.rmtree(path, ignore_errors=True)


def _leftovers() -> Iterator[Path]:
    for path in ARENAS.glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX)
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            yield path


def _hotswap(command: str) -> list[str]:
    return [sys.executable, "-m", "server.cli", command]


def _checkpoint(path: Path, token: int) -> Path:
    return path if (path / "config.json").exists() else make_constant_checkpoint(path, token=token)
