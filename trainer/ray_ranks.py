"""The ranks of a run on the nodes of a Ray cluster, each in a bundle of one placement group.

Actors do here the work of torchrun's agent on one machine (trainer/launch.py). Ranks meet at a store that
this process keeps, at its node's address alone, over all attempts. A rank that fails, or whose node is lost, ends the
attempt; the next one begins from the newest checkpoint, wherever there is room. So checkpoints must be in a place that
all nodes see. Ray shows each rank its own GPUs alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.launch import RUN_DIR_ENV
from trainer.rendezvous import listening_store
from weightsync import ray_cluster
from weightsync.control.hosts import LOOPBACK_VARIABLES
from weightsync.errors import WeightSyncError
from weightsync.ray_cluster import Group, NodeProcess
from weightsync.tls import is_loopback

LOOK_S = 0.05
TORN_DOWN_S = 10.0  # for the ranks that are left when one has failed: they do not save
PASSED_ON = ("HOTSWAP_", "GLOO_", "NCCL_", "HF_", "TOKENIZERS_", "WANDB_MODE")
KEPT_HERE = ("HOTSWAP_HOST", "HOTSWAP_ARENA", RUN_DIR_ENV)


def launch(arguments: Sequence[str], config: TrainerConfig, address: str, bundle: str | None, strategy: str) -> int:
    """Run `trainer.main ARGUMENTS` on every rank. Returns the run's exit status. Raises ConfigError."""
    publish = config.publish
    if publish is not None and publish.store_url and not publish.store_url.startswith("etcd://"):
        raise ConfigError("publish.store", "is a file of one host, and ranks are on several", "Name an etcd")
    try:
        node = ray_cluster.connect(address)
        resources = ray_cluster.parse_bundle(bundle) if bundle is not None else _resources()
    except WeightSyncError as error:
        raise ConfigError("", str(error).rstrip("."), "No rank was started") from error
    except ValueError as error:
        raise ConfigError("--ray-bundle", str(error), "Write it as CPU=8,GPU=1") from error
    ranks = Ranks(arguments, config, node.address, Group([resources] * config.parallel.world_size, strategy))
    try:
        with ranks.signals():
            return ranks.run()
    finally:
        ray_cluster.disconnect()


class Ranks:
    """All ranks of one run."""

    def __init__(self, arguments: Sequence[str], config: TrainerConfig, address: str, group: Group) -> None:
        self._args = ["trainer.main", *arguments]
        self._faults, self._group = config.faults, group
        self._store, where = listening_store(address)  # kept open over all attempts
        world = len(group.bundles)
        self._env = ray_cluster.passed_on(os.environ, PASSED_ON, KEPT_HERE)
        self._env |= {"MASTER_ADDR": where.master_addr, "MASTER_PORT": str(where.master_port)}
        self._env |= {"WORLD_SIZE": str(world), "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        if is_loopback(address):
            self._env = dict.fromkeys(LOOPBACK_VARIABLES, "lo") | self._env
        self._asked: int | None = None  # the signal that came

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT are noted, for the body's duration."""

        def note(number: int, _: FrameType | None) -> None:
            self._asked = number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self) -> int:
        """Attempts, until one ends well, none is left, or nothing would be gained by another."""
        for attempt in range(self._faults.max_restarts + 1):
            ranks = [self._start(rank, attempt) for rank in range(len(self._group.bundles))]
            try:
                self._wait(ranks)
                if self._asked is not None:
                    return self._leave(ranks)
            finally:
                for rank in ranks:
                    rank.terminate()
                for rank in ranks:
                    rank.stop(TORN_DOWN_S)
            finals = [int(rank.left["final"]) for rank in ranks if "final" in rank.left]
            if finals or all(rank.returncode == 0 for rank in ranks):
                return finals[0] if finals else 0
        return 1

    def _start(self, rank: int, attempt: int) -> NodeProcess:
        return NodeProcess(
            f"rank {rank}",
            self._args,
            {**self._env, "RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(attempt)},
            self._group,
            rank,
            printed=_print,
            say=lambda line: print(line, file=sys.stderr, flush=True),
            directory=RUN_DIR_ENV,
        )

    def _wait(self, ranks: Sequence[NodeProcess]) -> None:
        """Until all have ended, one has failed, or a signal has come."""
        while self._asked is None:
            alive = [rank.alive for rank in ranks]
            if any(rank.returncode for rank in ranks) or not any(alive):
                return
            time.sleep(LOOK_S)

    def _leave(self, ranks: Sequence[NodeProcess]) -> int:
        """Pass the signal on, and give the ranks time to save after SIGTERM."""
        assert self._asked is not None
        if self._asked == signal.SIGTERM:
            for rank in ranks:
                rank.terminate("leave")
            deadline = time.monotonic() + self._faults.grace_s + TORN_DOWN_S
            while sum(rank.alive for rank in ranks if rank.node is not None) and time.monotonic() < deadline:
                time.sleep(LOOK_S)
        return 128 + self._asked


def absolute(arguments: Sequence[str], config: Path) -> list[str]:
    """The command line of a rank: the file by its full path, and nothing of Ray."""
    kept, skip = ["--config", str(config.resolve())], False
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in ("--config", "--ray", "--ray-bundle", "--ray-strategy"):
            skip = "=" not in argument
        elif skip and not argument.startswith("-"):
            skip = False
        else:
            kept.append(argument)
            skip = False
    return kept


def _resources() -> dict[str, float]:
    return {"CPU": 1.0} | ({"GPU": 1.0} if ray_cluster.has_gpus() else {})


def _print(out: bytes, err: bytes) -> None:
    streams: list[tuple[BinaryIO, bytes]] = [(sys.stdout.buffer, out), (sys.stderr.buffer, err)]
    for stream, text in streams:
        stream.write(text)
        stream.flush()
