"""Real ranks on gloo, asked for one case after another.

A process that has Megatron (tests/warm.py) forks the ranks for every case. They form a process group, run the case (a
function of tests/trainer/cases), answer and end. Process groups leave threads behind that poll for ever: none outlives
its case.
"""

from __future__ import annotations

import copy
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.ports import free_port
from tests.warm import TRAINERS, warm
from trainer.config import ParallelConfig

PATIENCE_S = 120.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class Ranks:
    """Runs cases on `world` processes. Use as a context."""

    def __init__(self, world: int, first: Ranks | None = None) -> None:
        self._world = world
        self._server: socket.socket = first._server if first else _started()
        self._answers = self._server.makefile()
        self._known: dict[str, list[Any]] = first._known if first else {}

    def sharing(self, world: int) -> Ranks:
        """Another number of processes, forked from the same one; ends with this."""
        return Ranks(world, self)

    def spread(self, parallel: dict[str, Any]) -> Ranks:
        """As many as a layout has."""
        return self.sharing(ParallelConfig(**parallel).world_size)

    def call(self, case: str, **arguments: Any) -> list[Any]:
        """Run a case on every rank; their results in rank order. Raises AssertionError with the traceback of the first
        rank that fails."""
        self._server.sendall(json.dumps({"world": self._world, "case": case, "arguments": arguments}).encode() + b"\n")
        answer = json.loads(self._answers.readline() or '{"error": "the server of the ranks died"}')
        if "error" in answer:
            raise AssertionError(f"{case}: {answer['error']}")
        results: list[Any] = answer["results"]
        return results

    def known(self, case: str, **arguments: Any) -> list[Any]:
        """As `call`, for a case whose results depend on its arguments alone: it is run once in a session."""
        key = json.dumps([self._world, case, arguments], sort_keys=True)
        if key not in self._known:
            self._known[key] = self.call(case, **arguments)
        return copy.deepcopy(self._known[key])

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


def _started() -> socket.socket:
    ours, theirs = socket.socketpair()
    log = Path(tempfile.mkdtemp(prefix="hotswap-ranks-")) / "log"
    with theirs:
        inherited = (theirs.fileno(),)
        warm(TRAINERS).start(["tests.trainer.ranks", str(*inherited)], os.environ | _ENVIRONMENT, log, inherited)
    return ours


def serve_cases(asked: socket.socket) -> None:
    """Run each case that comes in until the parent closes the socket."""
    for line in asked.makefile():
        request = json.loads(line)
        asked.sendall(json.dumps(run_case(request["world"], request)).encode() + b"\n")


def run_case(world: int, request: dict[str, Any]) -> dict[str, Any]:
    """Run the case that is asked for on every rank."""

    def case() -> Any:
        from tests.trainer import cases

        return getattr(cases, request["case"])(**request["arguments"])

    return run_ranks(world, case, _meet)


def _meet() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def run_ranks(world: int, case: Callable[[], Any], meet: Callable[[], None]) -> dict[str, Any]:
    """Fork the ranks, collect an answer from each, and end them all: one that failed leaves its peers waiting. Each
    rank joins the process group by `meet`, before its case."""
    port = free_port()
    children: dict[int, tuple[int, int]] = {}
    for rank in range(world):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, world, port, case, meet, write)
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


def _be_rank(
    rank: int, world: int, port: int, case: Callable[[], Any], meet: Callable[[], None], answer_fd: int
) -> None:
    """One rank of one case; never returns."""
    from trainer.launch import die_with_parent

    die_with_parent()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        meet()
        answer = {"result": case()}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    with os.fdopen(answer_fd, "w") as answers:
        answers.write(json.dumps(answer))
    signal.pause()  # peers may still be in a collective with this rank: the server ends all of them together


if __name__ == "__main__":
    serve_cases(socket.socket(fileno=int(sys.argv[1])))
