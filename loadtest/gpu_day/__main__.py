"""Run one phase, or all: `python -m loadtest.gpu_day PHASE [--json FILE] [--small]`.

Each check prints one JSON line. `all` runs every phase in a process of its own with a limit of time, and goes on behind
one that fails. Exit status 1: something failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.gpu_day.report import FAILED, PASSED, SKIPPED, Check, Report, collect, read_checks, status_of

LIMIT_S = 480.0
PR_SET_PDEATHSIG = 1
LEAVES_S = 15.0  # for a phase behind its limit to end what it has started
PHASES = {
    "env": "hardware", "copy": "hardware", "flip": "flips", "tied": "flips", "undo": "flips", "race": "flips",
    "memory": "stagings", "stage": "stagings", "checksum": "stagings", "remap": "hardware",
    "serve-small": "serving", "streams-small": "serving", "serve-fp8": "serving", "serve-8b": "serving",
    "streams-8b": "serving",
}  # fmt: skip
"""In the order of `all`, and the modules that they are in."""
WITH_VLLM = [name for name, module in PHASES.items() if module == "serving"]


def run(phase: str, small: bool) -> list[Check]:
    """The checks of one phase, in this process."""
    import importlib

    from loadtest.gpu_day.device import Device

    report = Report(phase)
    with report.running():
        work: Callable[[Report, Device, bool], None] = getattr(
            importlib.import_module(f"loadtest.gpu_day.{PHASES[phase]}"), phase.replace("-", "_")
        )
        work(report, Device(), small)
    return report.checks


def run_apart(phase: str, small: bool | None, limit_s: float = LIMIT_S, command: Sequence[str] = ()) -> list[Check]:
    """The checks of one phase in a process group of its own, which is ended at the limit; prints what it prints."""
    flags = {True: ["--small"], False: ["--no-small"], None: []}[small]
    command = command or [sys.executable, "-m", "loadtest.gpu_day", phase, *flags]
    late, lines = threading.Event(), list[str]()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, process_group=0, preexec_fn=_die_with_parent
    ) as process:
        assert process.stdout is not None

        def at_limit() -> None:
            late.set()
            _end(process)

        timer = threading.Timer(limit_s, at_limit)
        timer.start()
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
            status = process.wait()
        except BaseException:  # whoever interrupts this process does not reach that group
            _end(process)
            raise
        finally:
            timer.cancel()
    report = Report(phase)
    report.checks = list(read_checks(iter(lines)))
    if late.is_set():
        report.say("completed", False, error=f"ended at its limit of {limit_s:g} s")
    elif status and status_of(report.checks) != FAILED:
        report.say("completed", False, error=f"ended with status {status}")
    return report.checks


def _end(process: subprocess.Popen[str]) -> None:
    """It, and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(LEAVES_S)


def _die_with_parent() -> None:
    """In the child: a phase does not go on with the device when whoever runs all of them was killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_all(phases: Sequence[str], small: bool | None, limit_s: float, json: Path | None) -> dict[str, dict[str, Any]]:
    """One after the other, whatever comes of them; what is known by then is in `json` after each."""
    found: dict[str, dict[str, Any]] = {}
    about = environment(small) if json is not None else {}
    for phase in phases:
        started = time.monotonic()
        found[phase] = _outcome(run_apart(phase, small, limit_s), time.monotonic() - started)
        if json is not None:
            collect(json, about, {phase: found[phase]})
    return found


def _outcome(checks: list[Check], seconds: float) -> dict[str, Any]:
    return {"status": status_of(checks), "seconds": round(seconds, 1), "checks": checks}


def summary(found: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each phase: what became of it, and why it failed or was skipped."""
    lines = []
    for phase, outcome in found.items():
        wrong = [check for check in outcome["checks"] if check.get("ok") is False]
        why = [f"{check['check']}{': ' + check['error'] if 'error' in check else ''}" for check in wrong]
        why += [check["reason"] for check in outcome["checks"] if check["check"] == SKIPPED]
        lines.append(f"{outcome['status']:8}{phase:12}{outcome['seconds']:7.1f} s  {'; '.join(why)}".rstrip())
    return lines


def environment(small: bool | None) -> dict[str, Any]:
    """Hardware and versions that the figures belong to."""
    import torch

    from loadtest.measure.machine import machine

    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name(0) if cuda else "cpu"
    return {"machine": machine(), "device": device, "cuda": torch.version.cuda, "small": _small(small)}


def _small(asked: bool | None) -> bool:
    import torch

    return asked if asked is not None else not torch.cuda.is_available()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu_day", description=__doc__)
    parser.add_argument("phase", choices=[*PHASES, "all", "without-vllm", "with-vllm"])
    parser.add_argument("--json", type=Path, help="write all checks, hardware and versions here")
    parser.add_argument(
        "--small", action=argparse.BooleanOptionalAction, help="tiny shapes; the default where there is no CUDA"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that each phase of several may take")
    options = parser.parse_args(argv)
    if options.phase in PHASES:
        started = time.monotonic()
        checks = run(options.phase, _small(options.small))
        found = {options.phase: _outcome(checks, time.monotonic() - started)}
        if options.json is not None:
            collect(options.json, environment(options.small), found)
    else:
        chosen = {"all": list(PHASES), "with-vllm": WITH_VLLM}
        phases = chosen.get(options.phase, [name for name in PHASES if name not in WITH_VLLM])
        found = run_all(phases, options.small, options.limit, options.json)
        print("\n".join(["", *summary(found)]), flush=True)
    return 1 if any(outcome["status"] == FAILED for outcome in found.values()) else 0


__all__ = ["FAILED", "PASSED", "SKIPPED", "main", "run", "run_all", "run_apart", "summary"]

if __name__ == "__main__":
    sys.exit(main())
