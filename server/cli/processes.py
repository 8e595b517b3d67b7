"""Child processes that die with their parent, log to files, and are ended as whole process groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """In the child, before exec: a parent killed with SIGKILL cannot clean up, so the kernel does."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One `python -m` process of ours, in a group of its own."""

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        """`inherited`: descriptors that it has open too, for as long as it lives."""
        self.name, self.log = name, log
        self._args, self._env, self._inherited = list(args), {**os.environ, **(env or {})}, tuple(inherited)
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self._args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
                pass_fds=self._inherited,
                preexec_fn=die_with_parent,
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, lines: int = 15) -> str:
        """The end of its log, for an error message."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM to the process, then SIGKILL to what is left of its group."""
        if self.alive:
            self.process.terminate()
            deadline = time.monotonic() + grace_s
            while self.alive and time.monotonic() < deadline:
                time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
