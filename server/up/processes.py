"""Child processes that die with their parent, log to files, and end as whole process groups; their cores and GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from server.errors import CliError

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """In the child, before exec: a parent killed with SIGKILL cannot clean up, so the kernel does."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One `python -m` process of ours, in a group of its own."""

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        """`inherited`: descriptors that it has open too, for as long as it lives."""
        self.name, self.log = name, log
        self._args, self._env, self._inherited = list(args), {**os.environ, **(env or {})}, tuple(inherited)
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self._args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
                pass_fds=self._inherited,
                preexec_fn=die_with_parent,
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


def cause_in(log: Path) -> str:
    """The last error in a log; "" if there is none. One of vLLM's workers, or else of its engine, comes before that of
    the process which tells that they have ended."""
    text = log.read_text(errors="replace") if log.exists() else ""
    found = [match for line in text.splitlines() if (match := _ERROR.match(line)) and "root cause" not in match[2]]
    sources = ("Worker", "EngineCore", "")
    return next((m[2] for source in sources for m in reversed(found) if (m[1] or "").startswith(source)), "")


BIND_ENV = "VLLM_CPU_OMP_THREADS_BIND"
THREADS_ENV = "OMP_NUM_THREADS"
DEVICES_ENV = "CUDA_VISIBLE_DEVICES"


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


def visible_devices(env: Mapping[str, str]) -> list[str] | None:
    """The names of the GPUs that a process has in this environment, found without CUDA; None if NVML is not there."""
    if (said := env.get(DEVICES_ENV)) is not None:
        return [name for name in said.replace(" ", "").split(",") if name not in ("", "-1")]
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:  # no driver
        return []


def shares_of_devices(asked: Sequence[int], devices: Sequence[str]) -> list[dict[str, str]]:
    """Environments that give instances the number of `devices` that each has asked for, one behind the other's.

    A single instance keeps all of them: vLLM takes the first. Raises CliError when there are too few.
    """
    ends = list(itertools.accumulate(asked))
    if ends[-1] > len(devices):
        raise CliError(
            f"too few GPUs: needed {ends[-1]} ({' + '.join(map(str, asked))}), visible {len(devices)} "
            f"({', '.join(devices) or 'none'}). Start fewer instances or make more GPUs visible; one that several are "
            f"to share stands in {DEVICES_ENV} once for each"
        )
    shares = [",".join(devices[end - count : end]) for count, end in zip(asked, ends, strict=True)]
    return [{DEVICES_ENV: share} if share and len(asked) > 1 else {} for share in shares]


def devices_asked(vllm_args: Sequence[str]) -> int:
    """How many GPUs of this host the ranks of one engine take; 0 where Ray places them."""
    if any(arg.rpartition("=")[2] == "ray" for arg in vllm_args):
        return 0
    ranks = tensor_parallel(vllm_args) * _asked(vllm_args, "-pp", "--pipeline-parallel-size")
    replicas = _asked(vllm_args, "-dp", "--data-parallel-size")
    replicas = _asked(vllm_args, "-dpl", "--data-parallel-size-local", otherwise=replicas)
    return max(1, ranks * replicas // _asked(vllm_args, "-n", "--nnodes"))


def tensor_parallel(vllm_args: Sequence[str]) -> int:
    """The number of ranks asked of vLLM; 1 if it is not said in a form vLLM would take."""
    return _asked(vllm_args, "-tp", "--tensor-parallel-size")


def _asked(vllm_args: Sequence[str], *names: str, otherwise: int = 1) -> int:
    words = [word for arg in vllm_args for word in arg.split("=", 1)]
    for name, value in itertools.pairwise(words):
        if name.replace("_", "-") in names and value.isdigit() and int(value) > 0:
            otherwise = int(value)  # the last one counts, as for vLLM
    return otherwise
