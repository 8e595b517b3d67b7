"""A place for programs that nobody has read: bubblewrap's namespaces, a read-only system, limits.

Inside are the system's libraries and this Python with its standard library, read-only, a small `/tmp` in memory, and
nothing else: no network, no other processes, no home, no `/etc`, no environment, no new namespaces (bubblewrap.py). See
docs/trainer/rewards.md for what it does not cover.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import platform
import secrets
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

from trainer.errors import RewardError
from trainer.rewards import bubblewrap
from trainer.rewards.bubblewrap import call_filter

RUNNER = Path(__file__).with_name("sandboxed.py")
ADVICE = "Install bubblewrap and allow user namespaces, or set the reward's sandbox to none where nothing can be lost."
_FIRST_UID, _UIDS = 2_000_000_000, 100_000  # nobody's; one for each sandbox, as processes are counted by user
_STARTED = itertools.count(secrets.randbelow(_UIDS))  # another trainer on this host begins elsewhere
A_MOMENT_S, LEAVE_S = 0.05, 1.0  # for a sandbox to end by itself: after its last word, and once all in it was killed


@dataclass(frozen=True)
class Limits:
    """The limits of one sandbox. `disk_bytes`: its `/tmp`, and the longest file; `output_bytes`: what a case may
    say."""

    case_timeout_s: float = 4.0
    timeout_s: float = 10.0
    memory_bytes: int = 256 * 2**20
    disk_bytes: int = 16 * 2**20
    output_bytes: int = 256 * 2**10
    processes: int = 16


class Sandbox:
    """Runs programs, each in a sandbox of its own. `isolated: False` leaves only the resource limits."""

    def __init__(self, limits: Limits, *, isolated: bool = True) -> None:
        self._limits, self._isolated = limits, isolated
        self._as_root = os.geteuid() == 0

    async def check(self) -> None:
        """Raises RewardError where programs cannot be isolated."""
        if not self._isolated:
            return
        if bubblewrap.binary() is None:
            raise RewardError(f"there is no bubblewrap (`bwrap`) on PATH. {ADVICE}", exit_code=2)
        if call_filter() is None:
            raise RewardError(f"the system calls of {platform.machine()} are not known here. {ADVICE}", exit_code=2)
        case = {"setup": "", "expression": "sum([20, 22])"}
        try:
            outcomes = await self.run("", [case])
        except RewardError as error:
            raise RewardError(f"bubblewrap cannot isolate programs here: {error} {ADVICE}", exit_code=2) from None
        if outcomes != [{"case": 0, "value": "42"}]:
            raise RewardError(f"a trial in the sandbox failed: {outcomes}. {ADVICE}", exit_code=2)

    async def run(self, program: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The outcome of each case that was come to. Raises RewardError."""
        with contextlib.ExitStack() as stack:
            environment = {"PATH": os.environ.get("PATH", "/usr/bin")}
            directory = "/tmp" if self._isolated else stack.enter_context(tempfile.TemporaryDirectory())  # noqa: S108
            calls = stack.enter_context(bubblewrap.filter_file()) if self._isolated else None
            process = await asyncio.create_subprocess_exec(
                *self._command(calls), pass_fds=() if calls is None else (calls,),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, env=environment, start_new_session=True,
            )  # fmt: skip
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    said, complaint = await self._talk(process, self._job(program, cases, directory), len(cases))
            except TimeoutError:
                why = f"the program took over {self._limits.timeout_s:g} s and was killed."
                raise RewardError(why, code="timeout") from None
            finally:
                await _end(process, isolated=self._isolated)
        outcomes = _outcomes(said)
        if not outcomes and complaint:
            raise RewardError(f"the sandbox did not start: {complaint.decode(errors='replace').strip()[:300]}.")
        return outcomes

    async def output(self, program: str) -> str:
        """The output of a program, and the error that ended it. Raises RewardError."""
        (outcome,) = await self.run(program, [{"input": "", "errors": True}]) or [{"error": "it said nothing"}]
        if "output" in outcome:
            return base64.b64decode(outcome["output"]).decode(errors="replace")
        return f"error: {outcome['error']}"

    async def _talk(self, process: asyncio.subprocess.Process, job: bytes, cases: int) -> tuple[bytes, bytes]:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(job)
            await process.stdin.drain()
            process.stdin.close()
        limit = 2 * (self._limits.output_bytes + 256) * cases  # base64, and the names around it
        said = bytearray()
        while piece := await process.stdout.read(1 << 16):
            said += piece
            if len(said) > limit:
                break
        return bytes(said), await process.stderr.read(1 << 12)

    def _job(self, program: str, cases: list[dict[str, Any]], directory: str) -> bytes:
        limits = self._limits
        uid = _FIRST_UID + next(_STARTED) % _UIDS if self._isolated and self._as_root else 0
        settings = {
            "uid": uid,
            "alone": self._isolated,
            "directory": directory,
            "replies": 1,
            "case_timeout_s": limits.case_timeout_s,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "output_bytes": limits.output_bytes,
            "processes": limits.processes,
        }
        return orjson.dumps(settings | {"program": program, "cases": cases}) + b"\n"

    def _command(self, calls: int | None) -> list[str]:
        python = [str(Path(sys.base_prefix) / "bin" / "python3"), "-I", "-S"]
        if calls is None:
            return [*python, str(RUNNER)]
        options = bubblewrap.options(calls, RUNNER, self._limits.disk_bytes, as_root=self._as_root)
        return [*options, *python, bubblewrap.INSIDE]


async def _end(process: asyncio.subprocess.Process, *, isolated: bool) -> None:
    """Kill what has not ended by itself. Bubblewrap from the inside: it waits for its child and then ends. Killed first
    itself, it would leave a dead process to the host's number one, which in a container may be this trainer, and nobody
    would ever take it away."""
    if not await _has_ended(process, A_MOMENT_S):
        with contextlib.suppress(psutil.Error):
            inside = psutil.Process(process.pid).children(recursive=True)
            if not isolated:
                process.kill()  # or it would go on with the next test
            for child in inside:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        await _has_ended(process, LEAVE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _has_ended(process: asyncio.subprocess.Process, within_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), within_s)
    return process.returncode is not None


def _outcomes(said: bytes) -> list[dict[str, Any]]:
    """The lines that are whole."""
    outcomes: list[dict[str, Any]] = []
    for line in said.split(b"\n"):
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(line)
            if isinstance(value, dict) and value.get("case") == len(outcomes):
                outcomes.append(value)
    return outcomes
