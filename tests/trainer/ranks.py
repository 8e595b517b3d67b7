"""A few real ranks on gloo, started once and asked for one case after another.

Parent and ranks talk in JSON lines over pipes; a case is a function of tests/trainer/cases.py.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import traceback
from typing import Any

PATIENCE_S = 120.0


class Ranks:
    """`world` processes in one process group. Use as a context."""

    def __init__(self, world: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.trainer.ranks"],
                env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]

    def call(self, case: str, **arguments: Any) -> list[Any]:
        """Run a case on every rank; their results in rank order. Raises AssertionError with the traceback of the first
        rank that fails, whose peers may then wait for it for ever: the ranks are ended."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"case": case, "arguments": arguments}) + "\n")
            process.stdin.flush()
        results: dict[int, Any] = {}
        with selectors.DefaultSelector() as ready:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                ready.register(process.stdout, selectors.EVENT_READ, rank)
            while len(results) < len(self._processes):
                events = ready.select(PATIENCE_S)
                answers = {key.data: json.loads(key.fileobj.readline() or '{"error": "it died"}') for key, _ in events}
                for rank, answer in answers.items() or {-1: {"error": "no answer in time"}}.items():
                    if "error" in answer:
                        self._end()
                        raise AssertionError(f"{case} on rank {rank}: {answer['error']}")
                    results[rank] = answer["result"]
        return [results[rank] for rank in sorted(results)]

    def _end(self) -> None:
        for process in self._processes:
            process.kill()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                self._end()


def serve_cases() -> None:
    """The ranks' side: read a case, run it, answer, until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not spoil the answers
    from trainer.launch import die_with_parent
    from trainer.main import _quiet

    die_with_parent()
    _quiet()
    import torch.distributed as dist

    from tests.trainer import cases
    from trainer.megatron import shim

    shim.install()
    dist.init_process_group("gloo")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(cases, request["case"])(**request["arguments"])}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    serve_cases()
