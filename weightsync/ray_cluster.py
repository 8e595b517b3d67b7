"""Processes of ours on the nodes of a Ray cluster that somebody else runs.

An actor stands for each process: it starts the same command that one would type on its node, hands on what the command
prints, and ends it. The resources of all of them are one placement group. When a node is lost, Ray gives its bundles
to other nodes as soon as one has room; a process that is started again goes where its bundle is then. Ray alone
decides which node that is.

Arguments and environments travel to the actors in Ray's own pickles, among machines that run whatever a member of the
cluster sends them. No secret is among them: passwords and certificates are named by their files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weightsync.control.hosts import HOST_ENV
from weightsync.dying import die_with
from weightsync.errors import ray_unavailable

ADDRESS = "{address of the node}"  # in an argument: where others reach the node
STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
SECRET = {"KEY", "TOKEN", "SECRET", "PASSWORD"}  # words in the names of variables that stay here
LOOK_S = 0.5  # that an actor waits for news, before it says that there are none
KEPT = 1 << 20  # bytes printed that nobody has asked for yet
CONNECT_S, ANSWER_S = 10.0, 5.0
LOST = -signal.SIGKILL  # the status of a process whose node or actor is gone


@dataclass(frozen=True)
class Node:
    """A node of the cluster: `host` is its name in records (HOTSWAP_HOST), `address` where others reach it."""

    host: str
    address: str


@dataclass(frozen=True)
class News:
    """The output of a process since the last look, how it ended, and the files that it then left in its
    directory."""

    out: bytes
    err: bytes
    returncode: int | None
    left: dict[str, str]


def parse_bundle(text: str) -> dict[str, float]:
    """`CPU=8,GPU=2` as Ray's resources. Raises ValueError."""
    found = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        if not name.strip() or not float(amount) > 0:
            raise ValueError(f"{part!r} is no NAME=AMOUNT with an amount above 0")
        found[name.strip()] = float(amount)
    return found


def connect(address: str) -> Node:
    """Join the cluster at `address` (`auto`: the one on this machine, or in RAY_ADDRESS) from one of its nodes; this
    one. Raises WeightSyncError."""
    try:
        import ray
    except ModuleNotFoundError:
        raise ray_unavailable(
            address, "the package ray is not installed", "Install the release that the cluster runs: pip install ray"
        ) from None
    if address.startswith("ray://"):
        raise ray_unavailable(
            address, "that is the address of a Ray client's server", "Run this on a node of the cluster, with `auto`"
        )
    handler = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    try:
        host, _, port = address.rpartition(":")
        if host:  # Ray itself would try for two minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        advice = "Start one with `ray start --head`, or give the HOST:PORT that it prints"
        raise ray_unavailable(address, reason, advice) from error
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray puts one of its own
    return _this_node()


def disconnect() -> None:
    """Leave the cluster; it ends what this process has placed there."""
    import ray

    ray.shutdown()


def has_gpus() -> bool:
    """Whether a node of the cluster has some."""
    import ray

    return bool(ray.cluster_resources().get("GPU"))


def passed_on(env: Mapping[str, str], beginnings: tuple[str, ...], but: tuple[str, ...] = ()) -> dict[str, str]:
    """The variables of this process that a process on another node gets too: no secrets, but where these lie."""
    found = {name: value for name, value in env.items() if name.startswith(beginnings) and name not in but}
    return {name: value for name, value in found.items() if name.endswith("_FILE") or not SECRET & {*name.split("_")}}


class Group:
    """A placement group, one bundle for each member. It waits for room without an end."""

    def __init__(self, bundles: Sequence[Mapping[str, float]], strategy: str) -> None:
        from ray.util.placement_group import placement_group

        self.bundles = [dict(bundle) for bundle in bundles]
        self._group = placement_group(self.bundles, strategy=strategy)

    def scheduling(self, index: int) -> Any:
        """Ray's strategy for an actor in a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, index)

    def remove(self) -> None:
        """Give the resources back; what is left in it ends."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


class NodeProcess:
    """`python -m ARGS` on the node of a bundle. Where the bundle has no node yet, it is started when it has.

    `whole`: it takes the bundle's resources; without, it only goes where the bundle is. `printed` gets what it writes
    to standard output and to standard error; `say` gets a line when it was placed, or lost. `directory`: the variable
    that names it a directory of its own; `left` has the texts in there when it has ended.
    """

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        env: Mapping[str, str],
        group: Group,
        index: int,
        *,
        printed: Callable[[bytes, bytes], None],
        say: Callable[[str], None],
        whole: bool = True,
        directory: str = "",
    ) -> None:
        self.name, self._args, self._env, self._directory = name, list(args), dict(env), directory
        self._group, self._index, self._whole = group, index, whole
        self._printed, self._say = printed, say
        self.start()

    def start(self) -> None:
        import ray

        resources = self._group.bundles[self._index] if self._whole else {}
        others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
        self._actor: Any = (
            ray.remote(_Keeper)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                resources=others,
                scheduling_strategy=self._group.scheduling(self._index),
                max_restarts=0,
            )
            .remote()
        )
        self.node: Node | None = None
        self.returncode: int | None = None
        self.left: dict[str, str] = {}
        self._placing: Any = self._actor.start.remote(self._args, self._env, os.getcwd(), self._directory)
        self._looking: Any = self._actor.look.remote(LOOK_S)

    @property
    def alive(self) -> bool:
        """Whether it runs, or waits for room."""
        self._attend()
        return self.returncode is None

    def terminate(self, note: str = "") -> None:
        """SIGTERM, with an empty file of that name in its directory before; returns at once."""
        if self.node is not None:
            self._actor.terminate.remote(note)

    def stop(self, grace_s: float) -> None:
        """SIGTERM to the process, then SIGKILL to what is left of its group."""
        import ray

        if self.node is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ending = self._actor.stop.remote(grace_s)
                ray.wait([ending], timeout=grace_s + ANSWER_S)
                self._looking = self._actor.look.remote(0.0)
                ray.wait([self._looking], timeout=ANSWER_S)
                self._attend()
        self.returncode = LOST if self.returncode is None else self.returncode
        ray.kill(self._actor)

    def _attend(self) -> None:
        """Hand on what there is to know by now."""
        import ray

        while self.returncode is None:
            waits_for = self._placing if self.node is None else self._looking
            if not ray.wait([waits_for], timeout=0)[0]:
                return
            try:
                found = ray.get(waits_for)
            except ray.exceptions.ActorUnavailableError:  # a break in the network, which may pass
                self._looking = self._actor.look.remote(LOOK_S)
                return
            except ray.exceptions.RayError as error:
                if self.node is None and isinstance(error, ray.exceptions.RayActorError):
                    self.start()  # its bundle was on a node that Ray had yet to give up
                    return
                where = f" on {self.node.host}" if self.node is not None else ""
                self._say(f"{self.name}{where} is lost: {_reason(error)}")
                self.returncode = LOST
                return
            if isinstance(found, Node):
                self.node = found
                self._say(f"{self.name} runs on {found.host} ({found.address})")
                continue
            if found.out or found.err:
                self._printed(found.out, found.err)
            self.returncode, self.left = found.returncode, found.left
            if self.returncode is None:
                self._looking = self._actor.look.remote(LOOK_S)


class _Keeper:
    """The actor. Its methods run one after the other in the main thread of a process of Ray's: with that process the
    kernel ends what it has started."""

    def start(self, args: Sequence[str], env: Mapping[str, str], place: str, directory: str) -> Node:
        """`place`: where it runs, if there is such a place on this node. Raises OSError."""
        node = _this_node()
        environment = {**os.environ, **env, HOST_ENV: node.host}
        self._directory = tempfile.TemporaryDirectory(prefix="hotswap-run-") if directory else None
        if self._directory is not None:
            environment[directory] = self._directory.name
        self._process = subprocess.Popen(
            [sys.executable, "-m", *(argument.replace(ADDRESS, node.address) for argument in args)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=place if Path(place).is_dir() else None,
            env=environment,
            start_new_session=True,
            preexec_fn=partial(_as_usual, os.getpid()),
        )
        self._news = threading.Condition()
        self._printed = [bytearray(), bytearray()]
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, buffer), daemon=True)
            for pipe, buffer in zip((self._process.stdout, self._process.stderr), self._printed, strict=True)
        ]
        for reader in self._readers:
            reader.start()
        return node

    def _read(self, pipe: Any, buffer: bytearray) -> None:
        while read := pipe.read1(1 << 16):
            with self._news:
                buffer += read
                del buffer[:-KEPT]
                self._news.notify()

    def look(self, wait_s: float) -> News:
        """The news of the process; waits a while until there is some."""
        deadline = time.monotonic() + wait_s
        while self._process.poll() is None and not any(self._printed) and (left := deadline - time.monotonic()) > 0:
            with self._news:
                self._news.wait(min(left, 0.05))
        if (status := self._process.poll()) is not None:
            for reader in self._readers:  # a process that it left behind may have its pipes open
                reader.join(1.0)
        with self._news:
            out, err = (bytes(buffer) for buffer in self._printed)
            for buffer in self._printed:
                buffer.clear()
        return News(out, err, status, self._left() if status is not None else {})

    def terminate(self, note: str) -> None:
        if note and self._directory is not None:
            Path(self._directory.name, note).touch()
        self._process.terminate()

    def stop(self, grace_s: float) -> None:
        """Return when nothing of it is left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _left(self) -> dict[str, str]:
        if self._directory is None:
            return {}
        return {path.name: path.read_text() for path in Path(self._directory.name).iterdir()}


def _as_usual(parent: int) -> None:
    """In the child, before exec: signals as a shell gives them, which Ray's processes block and ignore some of."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    die_with(parent)


def _this_node() -> Node:
    """A node is called as in `ray status`: by its address, or `ray start --node-name`. So it finds its arena again when
    the cluster is started anew."""
    import ray

    mine = ray.get_runtime_context().get_node_id()
    (found,) = (node for node in ray.nodes() if node["NodeID"] == mine)
    name = re.sub("[^a-z0-9.-]", "-", found["NodeName"].lower()).strip(".-")[:63].rstrip(".-")
    return Node(name, found["NodeManagerAddress"])


def _reason(error: Exception) -> str:
    """The last line of Ray's message that is a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip().endswith(".") or "died" in line]
    return lines[-1] if lines else type(error).__name__
