"""What one rank wrote of a checkpoint, told to rank 0 through a file beside it.

A file, because the threads that write must not take part in collectives while the main threads train with them.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.files import Listing
from trainer.errors import CheckpointError

FIRST_LOOK_S, LONGEST_LOOK_S = 0.01, 1.0


@dataclass(frozen=True)
class Share:
    """A rank's files, flushed and digested, by their path below the checkpoint. `pieces` says where each tensor lies
    in them (by role of the model; what `trainer.megatron.staging` needs for its index). `problem` is empty, or why
    there is no share."""

    files: Listing = field(default_factory=dict)
    pieces: dict[str, list[Any]] = field(default_factory=dict)
    problem: str = ""


def put(directory: Path, rank: int, share: Share) -> None:
    """Tell rank 0. Appears in one piece."""
    unfinished = _path(directory, rank).with_suffix(".tmp")
    unfinished.write_text(json.dumps(asdict(share)))
    unfinished.replace(_path(directory, rank))


def collect(directory: Path, world: int, timeout_s: float, given_up: threading.Event) -> list[Share]:
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


def _take(directory: Path, rank: int) -> Share:
    path = _path(directory, rank)
    read = json.loads(path.read_text())
    path.unlink()
    files = {name: (int(size), str(digest)) for name, (size, digest) in read["files"].items()}
    return Share(files, read["pieces"], read["problem"])


def _path(directory: Path, rank: int) -> Path:
    return directory / f".share-{rank:05d}.json"
