"""The processes that tokenise, seen from the run: started, fed one unit each at a time, ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from trainer.config import FileData
from trainer.data.formats import Unit
from trainer.data.tokenise import Done, Failed, Setup, Task, Worker
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError

SMALL_BYTES = 1 << 22  # not worth the start of a process


def tokenise(
    units: Sequence[Unit], size: int, config: FileData, tokenizer: Tokenizer, directory: Path
) -> Iterator[Done]:
    """Write segment i from unit i, for all units, on as many processes as the configuration and the work ask for; what
    each gave, in the units' order. Raises DataError for the first unit that cannot be read; closing the iterator ends
    the processes."""
    tasks = [Task(segment_name(i), unit) for i, unit in enumerate(units)]
    count = min(config.workers or len(os.sched_getaffinity(0)), len(tasks))
    if count <= 1 or (size < SMALL_BYTES and config.workers == 0):
        worker = Worker(config, tokenizer, directory)
        for task in tasks:
            yield worker(task)
        return
    workers = [_Process(config, tokenizer, directory) for _ in range(count)]
    idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
    for process in workers:
        idle.put(process)

    def run(task: Task) -> Done:
        process = idle.get()
        try:
            return process(task)
        finally:
            idle.put(process)

    pool = ThreadPoolExecutor(count)
    try:
        yield from pool.map(run, tasks)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in workers:
            process.kill()  # a thread that still waits for it reads its end
        pool.shutdown()
        for process in workers:
            process.close()


def segment_name(number: int) -> str:
    return f"{number:06d}"


class _Process:
    def __init__(self, config: FileData, tokenizer: Tokenizer, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainer.data.tokenise"],
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._setup = Setup(str(tokenizer.directory), str(directory), config.kind, dataclasses.asdict(config))  # type: ignore[arg-type]
        self._told = False

    def __call__(self, task: Task) -> Done:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if not self._told:
                self._process.stdin.write(msgspec.json.encode(self._setup) + b"\n")
                self._told = True
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            status = self._process.wait()
            raise DataError(
                f"the worker that tokenised {task.unit.url} ended with status {status}; what it printed says why. "
                "If it was killed for memory, lower data.workers."
            )
        answer = msgspec.json.decode(line, type=Done | Failed)
        if isinstance(answer, Failed):
            raise DataError(answer.message)
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                    stream.close()
