"""Processes that an actor on a test's Ray node starts are forked from a warm process (tests/warm.py)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

WARM = {"instance": "engines", "trainer.main": "trainers"}


class Starting(type):
    """Makes a `subprocess.Popen`, but of the processes that a test waits for what `forked` returns."""

    def __call__(cls, args: Any, *more: Any, **how: Any) -> Any:
        words = list(args[2:4]) if isinstance(args, list) and args[1:2] == ["-m"] else []
        kind = next((WARM[word] for word in words if word in WARM), None)
        return super().__call__(args, *more, **how) if kind is None else forked(kind, args[2:], how["env"])


class Popen(subprocess.Popen, metaclass=Starting):  # type: ignore[type-arg]
    """In place of the one that Ray and actors of ours start processes with."""


def forked(kind: str, args: list[str], env: dict[str, str]) -> Any:
    """Its output comes through pipes, as an actor expects it; they end with it."""
    from tests import warm

    class Piped:
        def __init__(self) -> None:
            (out, self._out), (err, self._err) = os.pipe(), os.pipe()
            self.stdout, self.stderr = os.fdopen(out, "rb"), os.fdopen(err, "rb")
            log, errors = (Path(f"/proc/{os.getpid()}/fd/{fd}") for fd in (self._out, self._err))
            self._process, self._open = warm.warm(kind).start(args, env, log, errors=errors), True

        def __getattr__(self, name: str) -> Any:
            return getattr(self._process, name)

        def poll(self) -> int | None:
            status = self._process.poll()
            if status is not None and self._open:
                self._open = False
                os.close(self._out)
                os.close(self._err)
            return status

        def wait(self, timeout: float | None = None) -> int | None:
            self._process.wait(timeout)
            return self.poll()

    return Piped()
