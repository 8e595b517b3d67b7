"""A few real ranks on gloo, started once and asked for one case after another.

One process imports Megatron and forks the other ranks. Parent and ranks talk in JSON lines over pipes; a case is a
function of tests/trainer/cases.py.
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
from typing import Any, TextIO

PATIENCE_S = 120.0


class Ranks:
    """`world` processes in one process group. Use as a context."""

    def __init__(self, world: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        requests, answers = [os.pipe() for _ in range(world)], [os.pipe() for _ in range(world)]
        theirs = [(request[0], answer[1]) for request, answer in zip(requests, answers, strict=True)]
        self._requests = [os.fdopen(write, "w") for _, write in requests]
        self._answers = [os.fdopen(read) for read, _ in answers]
        self._first_rank = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.ranks", json.dumps(theirs)],
            env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
            pass_fds=[fd for pair in theirs for fd in pair],
            start_new_session=True,
        )
        for pair in theirs:
            for fd in pair:
                os.close(fd)

    def call(self, case: str, **arguments: Any) -> list[Any]:
        """Run a case on every rank; their results in rank order. Raises AssertionError with the traceback of the first
        rank that fails, whose peers may then wait for it for ever: the ranks are ended."""
        for stream in self._requests:
            stream.write(json.dumps({"case": case, "arguments": arguments}) + "\n")
            stream.flush()
        results: dict[int, Any] = {}
        with selectors.DefaultSelector() as ready:
            for rank, answers in enumerate(self._answers):
                ready.register(answers, selectors.EVENT_READ, rank)
            while len(results) < len(self._answers):
                found = {key.data: _read(self._answers[key.data]) for key, _ in ready.select(PATIENCE_S)}
                for rank, answer in found.items() or {-1: {"error": "no answer in time"}}.items():
                    if "error" in answer:
                        self._end()
                        raise AssertionError(f"{case} on rank {rank}: {answer['error']}")
                    results[rank] = answer["result"]
        return [results[rank] for rank in sorted(results)]

    def _end(self) -> None:
        os.killpg(self._first_rank.pid, signal.SIGKILL)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (*self._requests, *self._answers):
            stream.close()
        try:
            self._first_rank.wait(20)
        except subprocess.TimeoutExpired:
            self._end()


def _read(answers: TextIO) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(answers.readline() or '{"error": "it died"}')
    return answer


def serve_cases(pipes: list[tuple[int, int]]) -> None:
    """The ranks' side: import, fork, then read a case, run it and answer, until the parent closes the pipe."""
    from trainer.launch import die_with_parent
    from trainer.main import _quiet

    _quiet()
    die_with_parent()
    import torch.distributed as dist

    from tests.trainer import cases
    from trainer.megatron import shim

    shim.install()
    rank = next((rank for rank in range(1, len(pipes)) if os.fork() == 0), 0)
    die_with_parent()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(pipes))}
    for other in [pair for number, pair in enumerate(pipes) if number != rank]:
        for fd in other:
            os.close(fd)
    requests, answers = os.fdopen(pipes[rank][0]), os.fdopen(pipes[rank][1], "w")
    dist.init_process_group("gloo")
    for line in requests:
        request = json.loads(line)
        try:
            answer = {"result": getattr(cases, request["case"])(**request["arguments"])}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # peers may be gone: nothing is left to take down together


if __name__ == "__main__":
    serve_cases(json.loads(sys.argv[1]))
