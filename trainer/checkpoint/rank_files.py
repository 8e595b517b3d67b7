"""One rank's share of a checkpoint, and the thread that writes it while training goes on.

A thread, not a process: a killed rank leaves nothing behind. Each rank tells rank 0 what it wrote through a file beside
it, because the threads that write must not take part in collectives while the main threads train with them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from trainer.checkpoint.directory import Listing
from trainer.errors import CheckpointError

FIRST_LOOK_S, LONGEST_LOOK_S = 0.01, 1.0
T = TypeVar("T")


@dataclass(frozen=True)
class RankFiles:
    """A rank's files, flushed and digested, by their path below the checkpoint. `pieces` says where each tensor lies
    in them (by role of the model; what `shards.py` needs for its index). `problem` is empty, or why
    there is no share."""

    files: Listing = field(default_factory=dict)
    pieces: dict[str, list[Any]] = field(default_factory=dict)
    problem: str = ""


def put(directory: Path, rank: int, share: RankFiles) -> None:
    """Tell rank 0. The file appears in one piece."""
    unfinished = _path(directory, rank).with_suffix(".tmp")
    unfinished.write_text(json.dumps(asdict(share)))
    unfinished.replace(_path(directory, rank))


def collect(directory: Path, world: int, timeout_s: float, given_up: threading.Event) -> list[RankFiles]:
    """Wait for every rank's share and take the files away; in rank order.

    Raises CheckpointError naming the ranks that could not write theirs, or that have not within `timeout_s` or when
    `given_up` is set (a rank on a full disk cannot even say so here).
    """
    deadline, look_s = time.monotonic() + timeout_s, FIRST_LOOK_S
    while missing := [rank for rank in range(world) if not _path(directory, rank).exists()]:
        if given_up.wait(look_s) or time.monotonic() > deadline:
            raise CheckpointError(f"{directory}: no share from ranks {missing}. Look at those ranks' disk.")
        look_s = min(2 * look_s, LONGEST_LOOK_S)
    shares = [_take(directory, rank) for rank in range(world)]
    for rank, share in enumerate(shares):
        if share.problem:
            raise CheckpointError(f"rank {rank}: {share.problem}")
    return shares


def _take(directory: Path, rank: int) -> RankFiles:
    path = _path(directory, rank)
    read = json.loads(path.read_text())
    path.unlink()
    files = {name: (int(size), str(digest)) for name, (size, digest) in read["files"].items()}
    return RankFiles(files, read["pieces"], read["problem"])


def _path(directory: Path, rank: int) -> Path:
    return directory / f".share-{rank:05d}.json"


class Background(Generic[T]):
    """A thread for writing, with at most one job at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._result: T | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], T]) -> None:
        """Run `job` in the thread; the result of the last job must have been taken."""
        assert self._thread is None, "take the last result first"
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True)
        self._thread.start()

    def take(self, *, wait: bool) -> T | None:
        """The result of the job that has ended, once; None if there is none (yet, without `wait`). Raises what the job
        raised."""
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        result, error = self._result, self._error
        self._thread = self._result = self._error = None
        if error is not None:
            raise error
        return result

    def _run(self, job: Callable[[], T]) -> None:
        try:
            self._result = job()
        except Exception as error:
            self._error = error
