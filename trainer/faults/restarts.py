"""What the launcher and the ranks it starts, again and again, tell each other: files in a directory of the run.

    leave   the launcher was asked to end: ranks save and leave
    final   a rank found a mistake that a restart would only repeat; holds the exit status

Under another launcher there is no directory, and nothing is told.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

VARIABLE = "HOTSWAP_RUN_DIR"


class RunDir:
    """`path` is None without our launcher."""

    def __init__(self, path: str | Path | None) -> None:
        self._path = Path(path) if path else None

    @classmethod
    def of_environment(cls) -> RunDir:
        return cls(os.environ.get(VARIABLE))

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
    """How often torchrun has started the ranks before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
