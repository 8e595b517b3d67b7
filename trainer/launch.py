"""Starting the ranks of a run on this machine, and ending them together.

The launcher and the ranks it starts, again and again, tell each other through files in a directory of the run:

    leave   the launcher was asked to end: ranks save and leave
    final   a rank found a mistake that a restart would only repeat; holds the exit status

Under another launcher there is no directory, and nothing is told.

To a rank SIGTERM means: save and leave. It is noticed even while the main thread waits in a collective. A launcher also
sends SIGTERM to the ranks that are left when one has failed; those must not try to save, their peers are gone. The
file `leave` tells the two apart.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import FaultsConfig, ParallelConfig
from trainer.errors import ConfigError, Preempted, RankFailed, TrainerError
from weightsync.control.hosts import keep_to_loopback
from weightsync.dying import die_with

if TYPE_CHECKING:  # torch is slow to import, and most processes that import this need none of it
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

RUN_DIR_ENV = "HOTSWAP_RUN_DIR"
TERMINATED = 128 + signal.SIGTERM  # exit status
USER_ERROR = 2


def is_rank() -> bool:
    """True in a process that torchrun (or any launcher that speaks its environment variables) started as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """True on rank 0, before the process groups exist."""
    return os.environ.get("RANK", "0") == "0"


def die_with_parent() -> None:
    """A rank whose launcher is killed must not train on alone. Linux only; elsewhere the launcher's agent ends it."""
    die_with(os.getppid(), signal.SIGKILL)


def status_of(run: Callable[[], int | None]) -> int:
    """The exit status of `run` (None: 0), or that of the error that it raised, which is printed. One that the user must
    mend is final for all ranks."""
    try:
        return run() or 0
    except RankFailed as error:
        return error.exit_code  # said by the rank that failed
    except Preempted as error:
        if is_first():
            print(error, file=sys.stderr)
        return 0 if is_rank() else error.exit_code  # a launcher would take anything else for a fault
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.exit_code == USER_ERROR:
            RunDir.of_environment().end(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def launch(module: str, arguments: list[str], parallel: ParallelConfig, faults: FaultsConfig) -> int:
    """Run `python -m MODULE ARGUMENTS` on every rank through torchrun's agent. Returns the run's exit status.

    A rank that fails ends all; it has printed why, so the agent's own report of it is left out, but for a rank that was
    killed: it could print nothing, and the others may be ended before they notice. All are started anew,
    up to `max_restarts` times, unless the fault is one that would only repeat itself. SIGTERM is passed on; ranks save
    and leave within `grace_s`. Raises ConfigError where each rank would need a GPU of its own, and there are fewer.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from trainer.rendezvous import register

    if 0 < (visible := torch.cuda.device_count()) < parallel.world_size:
        problem = f"{parallel.world_size} ranks want a GPU each, and this host shows {visible}"
        raise ConfigError("parallel", problem, "Change the layout, or correct CUDA_VISIBLE_DEVICES")
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
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as failed:
            _tell_killed(failed)
            codes = [failure.exitcode for failure in failed.failures.values() if failure.exitcode > 0]
            return run_dir.final() or (2 if 2 in codes else 1)
        except SignalException as stopped:  # the agent has passed it on and waited for the ranks
            return 128 + int(stopped.sigval)
        return run_dir.final() or 0


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
        os.environ[RUN_DIR_ENV] = path
        before = signal.signal(signal.SIGTERM, leave)
        try:
            yield run_dir
        finally:
            signal.signal(signal.SIGTERM, before)
            del os.environ[RUN_DIR_ENV]


class RunDir:
    """The directory that the launcher and its ranks share. `path` is None under another launcher."""

    def __init__(self, path: str | Path | None) -> None:
        self._path = Path(path) if path else None

    @classmethod
    def of_environment(cls) -> RunDir:
        return cls(os.environ.get(RUN_DIR_ENV))

    def ask_to_leave(self) -> None:
        self._write("leave", "")

    def being_torn_down(self) -> bool:
        """Whether a SIGTERM came from a launcher that ends what a failed rank has left. A rank asks this."""
        return self._path is not None and not (self._path / "leave").exists()

    def end(self, status: int) -> None:
        """No restart will help."""
        self._write("final", str(status))

    def final(self) -> int | None:
        """The exit status of a run that need not be tried again."""
        with contextlib.suppress(OSError, ValueError):
            return int((self._path / "final").read_text()) if self._path is not None else None
        return None

    def _write(self, name: str, text: str) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                (self._path / name).write_text(text)


def attempt() -> int:
    """How often torchrun has started the ranks before this time."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Stopping:
    """Handles SIGTERM as soon as it is built, in the main thread. `give_up` says whether to leave at once."""

    def __init__(self, grace_s: float, give_up: Callable[[], bool]) -> None:
        self._grace_s, self._give_up = grace_s, give_up
        self._requested = threading.Event()
        self._done = threading.Event()
        self._wake, self._noticed = socket.socketpair()
        for end in (self._wake, self._noticed):
            end.setblocking(False)
        self._before = signal.signal(signal.SIGTERM, lambda *_: None)
        # Written to by the interpreter's own handler, in whatever call the main thread is.
        self._fd_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="sigterm", daemon=True)
        self._thread.start()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def close(self) -> None:
        """Handle SIGTERM as before."""
        signal.set_wakeup_fd(self._fd_before)
        signal.signal(signal.SIGTERM, self._before)
        self._done.set()
        self._wake.send(b"\0")
        self._thread.join()
        self._wake.close()
        self._noticed.close()

    def _run(self) -> None:
        self._noticed.setblocking(True)
        while not self._done.is_set():
            received = self._noticed.recv(64)
            if signal.SIGTERM in received:
                self._leave()

    def _leave(self) -> None:
        if self._give_up():
            os._exit(TERMINATED)
        self._requested.set()
        if not self._done.wait(self._grace_s):
            print(f"error: not ready to leave {self._grace_s:g} s after SIGTERM; leaving.", file=sys.stderr, flush=True)
            os._exit(TERMINATED)
