"""Work in a forked process with a stand-in of its own: this one has imported vLLM, and never has a device."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.forks import fork
from tests.gpu_emulated import operators, standin


class ProcessDied(Exception):
    """A forked process ended without a result: `signal` 11 where it read an address that was unmapped."""

    def __init__(self, status: int, said: str) -> None:
        self.signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        how = signal.Signals(self.signal).name if self.signal else f"exit status {os.WEXITSTATUS(status)}"
        super().__init__(f"ended by {how}; it said:\n{said[-6000:]}")


class WorkFailed(Exception):
    """The work raised; the message is the error's type and text, and the process's output follows."""

    def __init__(self, error: str, said: str) -> None:
        self.error = error
        super().__init__(f"{error}; it said:\n{said[-6000:]}")


def forked(work: Callable[[], Any], **settings: int) -> Any:
    """Do `work` on a stand-in with these settings. Returns its result, by JSON. Raises ProcessDied, WorkFailed."""
    with tempfile.TemporaryDirectory() as folder:
        result, said = Path(folder, "result"), Path(folder, "said")
        child = fork(lambda: _run(work, settings, result, said))
        try:
            _, status = os.waitpid(child, 0)
        except BaseException:  # a time limit, or an interrupt
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        text = said.read_text(errors="replace") if said.exists() else ""
        if status or not result.exists():
            raise ProcessDied(status, text)
        kind, value = json.loads(result.read_text())
        if kind == "failed":
            raise WorkFailed(value, text)
        return value


def _run(work: Callable[[], Any], settings: standin.Settings, result: Path, said: Path) -> None:
    """In the fork."""
    log = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", closefd=False)
    faulthandler.enable(sys.stderr)
    standin.configure(settings)
    operators.everywhere()
    try:
        answer = ["done", work()]
        if operators.failures:
            raise operators.failures[0]
    except Exception as error:
        traceback.print_exc()
        answer = ["failed", f"{type(error).__name__}: {error}"]
    result.write_text(json.dumps(answer))
