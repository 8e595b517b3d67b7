"""The schedule of the GPU day, and what runs it: phases in forks of one process, each ended at its limit.

A rented GPU is paid by the second, and a command there has a limit. So the day is three calls. A call is groups, one
behind the other; a group is chains that run at once; the phases of a chain run one behind the other. No phase begins
that cannot be through before the call's seconds are over. Checks are collected as they are printed: what a phase had
found is there, too, when the phase, or this process, is ended.

torch is imported once, here, and a phase is a fork: none imports torch again, and the context of a phase on the device
ends with the phase. This process never touches CUDA, else no fork could.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.forks import fork
from loadtest.gpu_day.report import FAILED, SKIPPED, Check, read_checks, status_of

LEAVES_S = 6.0  # between SIGTERM and SIGKILL: a server stops its processes
WRITES_S = 3.0  # for the logs, at the end
POLL_S = 0.05
LOG_NBYTES = 2 << 20  # of each log, its end
ARENAS = "hotswap-gpu-day-"  # and the process group of the phase: the directories of its slots


@dataclass(frozen=True)
class Step:
    """A phase. It took `expected_s` on an H200 with 16 cores, which must be left for it to begin, and is ended
    after `limit_s`."""

    phase: str
    expected_s: float
    limit_s: float
    small: bool = False

    @property
    def name(self) -> str:
        return f"{self.phase}:small" if self.small else self.phase


Chain = tuple[Step, ...]
Group = tuple[Chain, ...]


@dataclass(frozen=True)
class Call:
    """`starts_s`: what unpacking and imports take before the first phase; `seconds` is the whole limit."""

    groups: tuple[Group, ...]
    seconds: float = float("inf")
    starts_s: float = 0.0

    @property
    def expected_s(self) -> float:
        return self.starts_s + sum(max(sum(s.expected_s for s in chain) for chain in group) for group in self.groups)


CALLS = {
    "call-1": Call((
        ((Step("env", 2, 10), Step("flip", 8, 25), Step("remap", 3, 10), Step("checksum", 4, 15),
          Step("stage", 42, 70)),),
        ((Step("undo", 3, 15, small=True), Step("tied", 10, 20), Step("race", 9, 25), Step("memory", 72, 110)),
         (Step("serve-small", 104, 150),)),
    ), seconds=250, starts_s=12),
    "call-2": Call((((Step("streams-small", 115, 150),),), ((Step("serve-fp8", 78, 110),),)), seconds=280, starts_s=10),
    "call-3": Call((((Step("streams-8b", 190, 225),),),), seconds=245, starts_s=10),
}  # fmt: skip
"""The first one's first group has the device to itself: its times count. The rest is about bytes, and runs at once."""


def plan(calls: Mapping[str, Call]) -> list[str]:
    """The schedule as a table: when each phase begins if all goes as expected, and when it would be ended."""
    lines = []
    for name, call in calls.items():
        lines.append(f"{name}: ended after {call.seconds:g} s, {call.expected_s:g} s expected")
        lines.append(f"  {'unpack, import':16}{0:5g} s to {call.starts_s:5g} s")
        begins, latest = call.starts_s, call.seconds - LEAVES_S - WRITES_S
        for group in call.groups:
            ends = begins
            for chain in group:
                at = begins
                for step in chain:
                    ends_at = min(at + step.limit_s, latest)
                    expected = f"{at:5g} s to {at + step.expected_s:5g} s"
                    lines.append(f"  {step.name:16}{expected}, ended at {ends_at:5g} s")
                    at += step.expected_s
                ends = max(ends, at)
            begins = ends
    return lines


class Running:
    """A phase in a fork of this process, in a process group of its own; what it prints is in two files."""

    def __init__(self, step: Step, limit_s: float, logs: Path, work: Callable[[Step], Any]) -> None:
        self.step, self._limit_s = step, limit_s
        self.began = time.monotonic()
        self.checks: list[Check] = []
        self.seconds = 0.0
        self._signals = iter((signal.SIGTERM, signal.SIGKILL))
        self._ends, self._late = self.began + limit_s, False
        output, log = (logs / f"{step.phase}.{kind}" for kind in ("jsonl", "log"))
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = fork(lambda: _become(step, work, output, log))
        with contextlib.suppress(ProcessLookupError, PermissionError):  # as the child does: the first one wins
            os.setpgid(self._pid, self._pid)
        output.touch()
        self._output = output.open(errors="replace")
        self._rest = ""

    def look(self) -> bool:
        """Read what it has printed, end it at its limit; returns whether it has ended."""
        found, status = os.waitpid(self._pid, os.WNOHANG)
        self._read()
        if not found:
            if time.monotonic() > self._ends:
                self._late, self._ends = True, self._ends + LEAVES_S
                self._signal(next(self._signals, signal.SIGKILL))
            return False
        self._over(os.waitstatus_to_exitcode(status))
        return True

    def end(self) -> None:
        """At once, with all that it has started."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + LEAVES_S
        while not os.waitpid(self._pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
            time.sleep(POLL_S)
        self._clean()

    def _over(self, status: int) -> None:
        self._clean()
        self.seconds = time.monotonic() - self.began
        error = f"ended at its limit of {self._limit_s:.0f} s" if self._late else f"ended with status {status}"
        if self._late or (status and status_of(self.checks) != FAILED):
            self.checks.append({"phase": self.step.phase, "check": "completed", "ok": False, "error": error})

    def _read(self) -> None:
        *lines, self._rest = (self._rest + self._output.read()).split("\n")
        self.checks += read_checks(lines)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, number)

    def _clean(self) -> None:
        """Remove what the phase has left behind: processes of its group, and slots in memory or on a disk."""
        self._signal(signal.SIGKILL)
        self._output.close()
        for root in (Path("/dev/shm"), Path(tempfile.gettempdir())):  # noqa: S108 - where engine.arena is
            for arena in root.glob(f"{ARENAS}{self._pid}-*"):
                shutil.rmtree(arena, ignore_errors=True)


def _become(step: Step, work: Callable[[Step], Any], output: Path, log: Path) -> None:
    """The child."""
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for path, descriptor in ((Path(os.devnull), 0), (output, 1), (log, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    work(step)


@dataclass
class Day:
    """Runs calls. `work` is what the fork of a step does; `tell` is called with {phase: outcome} when one changes.

    `archive`: a file that has the ends of the logs after each group.
    `began`: of the monotonic clock, when the call's seconds began. `slower` stretches them and the limits of phases.
    """

    logs: Path
    work: Callable[[Step], Any]
    tell: Callable[[dict[str, dict[str, Any]]], None]
    archive: Path | None = None
    began: float = field(default_factory=time.monotonic)
    slower: float = 1.0

    def run(self, call: Call) -> dict[str, dict[str, Any]]:
        """{phase: {"status", "seconds", "checks"}}, in the order in which they ended."""
        self.logs.mkdir(parents=True, exist_ok=True)
        ends = self.began + call.seconds * self.slower
        found: dict[str, dict[str, Any]] = {}
        for group in call.groups:
            for step, checks, seconds in self._together(group, ends):
                found[step.phase] = outcome(checks, seconds)
            if self.archive is not None:
                archive(self.logs, self.archive)
        return found

    def _together(self, group: Group, ends: float) -> Iterator[tuple[Step, list[Check], float]]:
        waiting, running = [list(chain) for chain in group], dict[int, Running]()
        try:
            while any(waiting) or running:
                for index, chain in enumerate(waiting):
                    if chain and index not in running:
                        begun = self._begin(step := chain.pop(0), ends)
                        if isinstance(begun, Running):
                            running[index] = begun
                        else:
                            self.tell({step.phase: outcome([begun], 0.0)})
                            yield step, [begun], 0.0
                time.sleep(POLL_S)
                for index, phase in list(running.items()):
                    known = len(phase.checks)
                    if over := phase.look():
                        del running[index]
                    if over or len(phase.checks) > known:
                        result = outcome(phase.checks, time.monotonic() - phase.began)
                        self.tell({phase.step.phase: result if over else result | {"status": "running"}})
                    if over:
                        yield phase.step, phase.checks, phase.seconds
        finally:
            for phase in running.values():
                phase.end()

    def _begin(self, step: Step, ends: float) -> Running | Check:
        left = ends - time.monotonic() - LEAVES_S - WRITES_S
        if left < step.expected_s * self.slower:
            error = f"not begun: it takes {step.expected_s * self.slower:.0f} s, and {max(0.0, left):.0f} s are left"
            return {"phase": step.phase, "check": "begun", "ok": False, "error": error}
        return Running(step, min(step.limit_s * self.slower, left), self.logs, self.work)


def outcome(checks: list[Check], seconds: float) -> dict[str, Any]:
    return {"status": status_of(checks), "seconds": round(seconds, 1), "checks": checks}


def summary(found: Mapping[str, dict[str, Any]]) -> list[str]:
    """A line for each phase: what became of it, and why it failed or was skipped."""
    lines = []
    for phase, result in found.items():
        wrong = [check for check in result["checks"] if check.get("ok") is False]
        why = [f"{check['check']}{': ' + check['error'] if 'error' in check else ''}" for check in wrong]
        why += [check["reason"] for check in result["checks"] if check["check"] == SKIPPED]
        lines.append(f"{result['status']:8}{phase:14}{result['seconds']:7.1f} s  {'; '.join(why)}".rstrip())
    return lines


def archive(logs: Path, target: Path) -> None:
    """The ends of the logs, as one file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:gz") as file:
        for path in sorted(logs.iterdir()):
            if path.stat().st_size > LOG_NBYTES:
                path.write_bytes(path.read_bytes()[-LOG_NBYTES:])
            file.add(path, path.name)
