"""A place for programs that nobody has read: bubblewrap's namespaces, a read-only system, limits.

Inside are the system's libraries and this Python with its standard library, read-only, a small `/tmp` in memory, and
nothing else: no network, no other processes, no home, no `/etc`, no environment, no new namespaces (calls.py). See
docs/trainer/rewards.md for what it does not cover.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from trainer.errors import RewardError, RewardTimeout, SandboxUnavailable
from trainer.rewards.calls import call_filter

RUNNER = Path(__file__).with_name("sandboxed.py")
ADVICE = "Install bubblewrap and allow user namespaces, or set the reward's sandbox to none where nothing can be lost."
_FIRST_UID, _UIDS = 2_000_000_000, 100_000  # nobody's; one for each sandbox, as processes are counted by user
_STARTED = itertools.count()


@dataclass(frozen=True)
class Limits:
    """Of one sandbox. `disk_bytes`: its `/tmp`, and the longest file; `output_bytes`: what a case may say."""

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
        """Raises SandboxUnavailable where programs cannot be isolated."""
        if not self._isolated:
            return
        if _bubblewrap() is None:
            raise SandboxUnavailable(f"there is no bubblewrap (`bwrap`) on PATH. {ADVICE}")
        if call_filter() is None:
            raise SandboxUnavailable(f"the system calls of {platform.machine()} are not known here. {ADVICE}")
        case = {"setup": "", "expression": "sum([20, 22])"}
        try:
            outcomes = await self.run("", [case])
        except RewardError as error:
            raise SandboxUnavailable(f"bubblewrap cannot isolate programs here: {error} {ADVICE}") from None
        if outcomes != [{"case": 0, "value": "42"}]:
            raise SandboxUnavailable(f"a trial in the sandbox failed: {outcomes}. {ADVICE}")

    async def run(self, program: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The outcome of each case that was come to. Raises RewardTimeout, RewardError."""
        with contextlib.ExitStack() as stack:
            environment = {"PATH": os.environ.get("PATH", "/usr/bin")}
            directory = "/tmp" if self._isolated else stack.enter_context(tempfile.TemporaryDirectory())  # noqa: S108
            calls = stack.enter_context(_filter_file()) if self._isolated else None
            process = await asyncio.create_subprocess_exec(
                *self._command(calls), pass_fds=() if calls is None else (calls,),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, env=environment, start_new_session=True,
            )  # fmt: skip
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    said, complaint = await self._talk(process, self._job(program, cases, directory), len(cases))
            except TimeoutError:
                raise RewardTimeout(f"the program took over {self._limits.timeout_s:g} s and was killed.") from None
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        outcomes = _outcomes(said)
        if not outcomes and complaint:
            raise RewardError(f"the sandbox did not start: {complaint.decode(errors='replace').strip()[:300]}.")
        return outcomes

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
        size = str(self._limits.disk_bytes)
        return [
            _bubblewrap() or "bwrap", "--die-with-parent", "--new-session", "--seccomp", str(calls), *self._identity(),
            "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
            *_system(), "--ro-bind", str(RUNNER), "/runner.py",
            "--proc", "/proc", "--dev", "/dev", "--size", size, "--perms", "1777", "--tmpfs", "/tmp",  # noqa: S108
            "--size", "4096", "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/",  # noqa: S108
            "--clearenv", "--setenv", "LC_ALL", "C.UTF-8", *python, "/runner.py",
        ]  # fmt: skip

    def _identity(self) -> list[str]:
        """Root mounts as itself and steps down inside (the kernel does not count root's processes); others get a user
        namespace."""
        if self._as_root:
            return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        return ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]


@contextlib.contextmanager
def _filter_file() -> Iterator[int]:
    """A descriptor to read the filter of system calls from."""
    calls = call_filter()
    assert calls is not None  # check() refuses such machines
    descriptor = os.memfd_create("seccomp")
    try:
        os.write(descriptor, calls)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _bubblewrap() -> str | None:
    """On PATH, or beside this Python (scripts/bubblewrap.sh)."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=str(Path(sys.executable).parent))


def _system() -> list[str]:
    """Read-only binds of the system's libraries and of this Python."""
    binds = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        path = Path(name)
        if path.is_symlink():
            binds += ["--symlink", os.readlink(path), name]
        elif path.exists():
            binds += ["--ro-bind", name, name]
    prefix = Path(sys.base_prefix)
    if prefix.is_relative_to("/usr"):
        return binds
    for parent in reversed(prefix.parents[:-1]):  # bubblewrap would make them for root alone
        binds += ["--perms", "0755", "--dir", str(parent)]
    return [*binds, "--ro-bind", str(prefix), str(prefix)]


def _outcomes(said: bytes) -> list[dict[str, Any]]:
    """The lines that are whole."""
    outcomes: list[dict[str, Any]] = []
    for line in said.split(b"\n"):
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(line)
            if isinstance(value, dict) and value.get("case") == len(outcomes):
                outcomes.append(value)
    return outcomes
