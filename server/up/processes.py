"""Child processes that die with their parent, log to files, and end as whole process groups; their cores."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from server.gpus import tensor_parallel
from weightsync.dying import with_me

if TYPE_CHECKING:
    from server.up.forks import Forked, Forks


class Child:
    """One `python -m` process of ours, in a group of its own."""

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
        forks: Callable[[], Forks] | None = None,
    ) -> None:
        """`inherited`: descriptors that it has open too, for as long as it lives. `forks`: what it is forked from."""
        self.name, self.log, self._forks = name, log, forks
        self._args, self._env, self._inherited = list(args), {**os.environ, **(env or {})}, tuple(inherited)
        self.start()

    def start(self) -> None:
        self._begins = self.log.stat().st_size if self.log.exists() else 0
        self.process = self._process()

    def _process(self) -> subprocess.Popen[bytes] | Forked:
        if self._forks is not None:
            return self._forks().start(self._args, self._env, self.log, self._inherited)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *self._args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
                pass_fds=self._inherited,
                preexec_fn=with_me(),
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The status that it ended with, as far as `alive` has found out."""
        return self.process.returncode

    def tail(self, lines: int = 15) -> str:
        """The end of its log, for an error message."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def cause(self) -> str:
        """The last error in its log since its start, as `cause_in`."""
        return cause_in(self.log, self._begins)

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


# As Python or a log prints an error; in lines of vLLM behind its process: "(EngineCore pid=7) ERROR ... [core.py:9] ".
_ERROR = re.compile(r"(?:\((\w+) pid=\d+\) )?(?:[A-Z]+ [\d: -]+\[\S+\] )?([\w.]*(?:Error|Exception): .+)")


def cause_in(log: Path, begin: int = 0) -> str:
    """The last error in a log, behind the byte `begin`; "" if there is none.

    One of vLLM's workers, or else of its engine, comes before that of the process which tells that they have ended.
    """
    text = log.read_bytes()[begin:].decode(errors="replace") if log.exists() else ""
    found = [match for line in text.splitlines() if (match := _ERROR.match(line)) and "root cause" not in match[2]]
    sources = ("Worker", "EngineCore", "")
    return next((m[2] for source in sources for m in reversed(found) if (m[1] or "").startswith(source)), "")


BIND_ENV = "VLLM_CPU_OMP_THREADS_BIND"
THREADS_ENV = "OMP_NUM_THREADS"


def share_of_cores(index: int, instances: int, vllm_args: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Environment that gives instance `index` of `instances` its part of this process's cores, for vLLM on CPU.

    Nothing for a single instance, nor where the user has said it already; with fewer cores than instances they take
    turns on them.
    """
    if instances == 1 or BIND_ENV in env:
        return {}
    cores = _part(sorted(os.sched_getaffinity(0)), index, instances)
    ranks = tensor_parallel(vllm_args)
    parts = [_part(cores, rank, ranks) for rank in range(ranks)]
    threads = env.get(THREADS_ENV) or str(len(parts[0]))
    return {BIND_ENV: "|".join(",".join(map(str, part)) for part in parts), THREADS_ENV: threads}


def _part(cores: Sequence[int], index: int, parts: int) -> Sequence[int]:
    """The `index`-th of `parts` runs of nearly equal length; single cores in turn if there are fewer than parts."""
    if len(cores) < parts:
        return [cores[index % len(cores)]]
    return cores[index * len(cores) // parts : (index + 1) * len(cores) // parts]
