"""Starting the ranks of a run on this machine, and ending them together."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainer.config import FaultsConfig, ParallelConfig
from trainer.faults.restarts import VARIABLE, RunDir
from weightsync.loopback import keep_to_loopback

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def is_rank() -> bool:
    """True in a process that torchrun (or any launcher that speaks its environment variables) started as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def die_with_parent() -> None:
    """A rank whose launcher is killed must not train on alone. Linux only; elsewhere the launcher's agent ends it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def launch(arguments: list[str], parallel: ParallelConfig, faults: FaultsConfig) -> int:
    """Run `python -m trainer.main ARGUMENTS` on every rank through torchrun's agent. Returns the run's exit status.

    A rank that fails ends all; it has printed why, so the agent's own report of it is left out, but for a rank that was
    killed: it could print nothing, and the others may be ended before they notice. All are started anew,
    up to `max_restarts` times, unless the fault is one that would only repeat itself. SIGTERM is passed on; ranks save
    and leave within `grace_s`.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from trainer.rendezvous import register

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    keep_to_loopback()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        run_id=uuid.uuid4().hex,
        nproc_per_node=parallel.world_size,
        rdzv_backend=register(),
        max_restarts=faults.max_restarts,
        monitor_interval=0.2,
        shutdown_timeout=math.ceil(faults.grace_s) + 5,
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # SIGTERM: _run_dir
    )
    with _run_dir() as run_dir:
        try:
            elastic_launch(config, sys.executable)("-m", "trainer.main", *arguments)
        except ChildFailedError as failed:
            _tell_killed(failed)
            codes = [failure.exitcode for failure in failed.failures.values() if failure.exitcode > 0]
            return run_dir.final() or (2 if 2 in codes else 1)
        except SignalException as stopped:  # the agent has passed it on and waited for the ranks
            return 128 + int(stopped.sigval)
    return 0


def _tell_killed(failed: ChildFailedError) -> None:
    """Name the ranks that a signal ended, other than the SIGTERM with which the agent ends those that are left."""
    for rank, failure in sorted(failed.failures.items()):
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:
            name = signal.Signals(-failure.exitcode).name
            hint = " Look in the kernel's log for its out-of-memory killer." if name == "SIGKILL" else ""
            print(f"error: lost rank {rank} (process {failure.pid}) to {name}.{hint}", file=sys.stderr)


@contextmanager
def _run_dir() -> Iterator[RunDir]:
    """A directory that the ranks find in their environment; SIGTERM is told there before it is passed on."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def leave(number: int, _: object) -> None:
        run_dir.ask_to_leave()
        raise SignalException(f"signal {number}", sigval=signal.Signals(number))

    with tempfile.TemporaryDirectory(prefix="hotswap-run-") as path:
        run_dir = RunDir(path)
        os.environ[VARIABLE] = path
        before = signal.signal(signal.SIGTERM, leave)
        try:
            yield run_dir
        finally:
            signal.signal(signal.SIGTERM, before)
            del os.environ[VARIABLE]
