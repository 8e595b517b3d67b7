"""Checks of a phase: each prints one JSON line, `{"phase", "check", "ok" and figures}`, units in the figures' names."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
Check = dict[str, Any]


class Skipped(Exception):
    """This machine cannot run the phase; the message says what it lacks."""


class Report:
    """The checks of one phase, in order. One that is not ok fails the phase, and so does a phase without any.

    `work` is where the phase may leave checkpoints; `logs`, in `work` if it is not given, is for what its processes
    print.
    """

    def __init__(self, phase: str, work: Path = Path("runs") / "gpu-day", logs: Path | None = None) -> None:
        self.phase, self.work, self._logs = phase, work, logs if logs is not None else work / "logs"
        self.checks: list[Check] = []

    @property
    def logs(self) -> Path:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self._logs

    def say(self, check: str, ok: bool | None = None, **figures: Any) -> bool:
        """Print and keep a check; `ok` is left out where figures say it all. Returns whether it did not fail."""
        found: Check = {"phase": self.phase, "check": check}
        if ok is not None:
            found["ok"] = bool(ok)
        found |= {name: _rounded(value) for name, value in figures.items()}
        self.checks.append(found)
        print(json.dumps(found), flush=True)
        return ok is None or bool(ok)

    @contextmanager
    def running(self) -> Iterator[None]:
        """An exception of the phase becomes its last check."""
        try:
            yield
        except Skipped as reason:
            self.say(SKIPPED, reason=str(reason))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.say("completed", False, error=f"{type(error).__name__}: {error}")


def status_of(checks: list[Check]) -> str:
    if any(check.get("ok") is False for check in checks) or not checks:
        return FAILED
    return SKIPPED if checks[-1]["check"] == SKIPPED else PASSED


def read_checks(lines: Iterable[str]) -> Iterator[Check]:
    """Those among the lines that a phase printed."""
    for line in lines:
        if line.startswith('{"phase"'):
            yield json.loads(line)


def collect(path: Path, about: dict[str, Any], phases: dict[str, Any]) -> None:
    """Put what phases came to into the file, beside those that are there; `about` is of the latest.

    The file is whole at any time: the process that writes it may be killed.
    """
    before = json.loads(path.read_text())["phases"] if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.new")
    written.write_text(json.dumps({**about, "phases": {**before, **phases}}, indent=1) + "\n")
    written.replace(path)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
