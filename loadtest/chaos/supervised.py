"""A process on a host that is started again whenever it ends, as systemd or a kubelet does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from loadtest.hosts.namespaces import Hosts
from server.cli import interrupts
from server.cli.processes import die_with_parent

RESTART_S = 1.0
STOP_S = 10.0


class Supervised:
    """One process in a group of its own. `own_ends` counts how often it ended though nobody had broken it."""

    def __init__(
        self, name: str, hosts: Hosts, host: int, argv: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        self.name, self.host, self.log, self.own_ends = name, host, log, 0
        self._hosts, self._argv, self._env = hosts, list(argv), dict(env)
        self._broken = False
        self._frozen: list[int] = []
        self._restart_at: float | None = None
        self.start()

    def start(self) -> None:
        with interrupts.held(), self.log.open("ab") as log:
            said = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            how: dict[str, Any] = {"start_new_session": True, "preexec_fn": die_with_parent}
            self._process = self._hosts.run(self.host, self._argv, env=self._env, **said, **how)
        self._broken = False

    @property
    def runs(self) -> bool:
        return self._process.poll() is None and not self._frozen

    def tend(self) -> None:
        """Start it again when it has ended; to be called again and again."""
        if self._process.poll() is None:
            return
        if self._restart_at is None:
            self.own_ends += not self._broken
            self._restart_at = time.monotonic() + RESTART_S
        elif time.monotonic() >= self._restart_at:
            self._end_group()
            self._frozen.clear()
            self._restart_at = None
            self.start()

    def kill(self, part: str = "") -> None:
        """SIGKILL; `part`: only its child with that in its name."""
        self._broken = True
        with contextlib.suppress(ProcessLookupError):  # it ended already, and is about to be started again
            os.kill(self._victim(part), signal.SIGKILL)

    def freeze(self, part: str = "") -> None:
        """SIGSTOP, until `thaw`."""
        self._broken = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim := self._victim(part), signal.SIGSTOP)
            self._frozen.append(victim)

    def thaw(self) -> None:
        for victim in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
        self._frozen.clear()
        self._broken = False

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
