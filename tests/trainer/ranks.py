"""Real ranks on gloo, asked for one case after another.

One process imports Megatron; for every case it forks the ranks, which form a process group, run the case (a function of
tests/trainer/cases), answer and end. Process groups leave threads behind that poll for ever: none outlives its case.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from typing import Any

PATIENCE_S = 120.0
# Asking for a GPU must not start CUDA in the process that ranks are forked from.
_ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Ranks:
    """Runs cases on `world` processes. Use as a context."""

    def __init__(self, world: int, server: subprocess.Popen[str] | None = None) -> None:
        self._world = world
        self._server = server or subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.ranks"],
            env=os.environ | _ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def sharing(self, world: int) -> Ranks:
        """Another number of processes, forked from the same one; ends with this."""
        return Ranks(world, self._server)

    def call(self, case: str, **arguments: Any) -> list[Any]:
        """Run a case on every rank; their results in rank order. Raises AssertionError with the traceback of the first
        rank that fails."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({"world": self._world, "case": case, "arguments": arguments}) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline() or '{"error": "the server of the ranks died"}')
        if "error" in answer:
            raise AssertionError(f"{case}: {answer['error']}")
        results: list[Any] = answer["results"]
        return results

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()


def serve_cases() -> None:
    """Import once, then run each case that comes in until the parent closes the pipe."""
    from trainer.launch import die_with_parent
    from trainer.main import _quiet

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    _quiet()
    die_with_parent()
    from tests.trainer import cases  # noqa: F401 - imported before the ranks are forked
    from trainer.megatron import shim

    shim.install()
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(run_case(request["world"], request)) + "\n")
        answers.flush()
    os._exit(0)


def run_case(world: int, request: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks, collect an answer from each, and end them all: one that failed leaves its peers waiting."""
    port = _free_port()
    children: dict[int, tuple[int, int]] = {}
    for rank in range(world):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, world, port, request, write)
        os.close(write)
        children[rank] = (pid, read)
    try:
        return _collect({rank: read for rank, (_, read) in children.items()})
    finally:
        for pid, read in children.values():
            os.close(read)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _collect(pipes: dict[int, int]) -> dict[str, Any]:
    texts: dict[int, bytes] = dict.fromkeys(pipes, b"")
    results: dict[int, Any] = {}
    with selectors.DefaultSelector() as ready:
        for rank, fd in pipes.items():
            ready.register(fd, selectors.EVENT_READ, rank)
        while len(results) < len(pipes):
            found = ready.select(PATIENCE_S)
            if not found:
                return {"error": f"no answer from ranks {sorted(set(pipes) - set(results))} in {PATIENCE_S:.0f} s"}
            for key, _ in found:
                if piece := os.read(key.fd, 1 << 16):
                    texts[key.data] += piece
                    continue
                ready.unregister(key.fd)
                answer = json.loads(texts[key.data] or '{"error": "it died"}')
                if "error" in answer:
                    return {"error": f"rank {key.data}: {answer['error']}"}
                results[key.data] = answer["result"]
    return {"results": [results[rank] for rank in sorted(results)]}


def _be_rank(rank: int, world: int, port: int, request: dict[str, Any], answer_fd: int) -> None:
    """One rank of one case; never returns."""
    from trainer.launch import die_with_parent

    die_with_parent()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
    import torch.distributed as dist

    from tests.trainer import cases

    try:
        dist.init_process_group("gloo")
        answer = {"result": getattr(cases, request["case"])(**request["arguments"])}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    with os.fdopen(answer_fd, "w") as answers:
        answers.write(json.dumps(answer))
    signal.pause()  # peers may still be in a collective with this rank: the server ends all of them together


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    serve_cases()
