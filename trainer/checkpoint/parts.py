"""The rest of a run's state: rollout buffer, data cursor, guards; whatever can say what it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import ResumeError

FOLDER = "parts"


class Part(Protocol):
    """Something with state on rank 0. `state_dict` returns JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def take(parts: Mapping[str, Part]) -> dict[str, bytes]:
    """Every part's state at this moment, by file name below a checkpoint."""
    return {f"{FOLDER}/{name}.json": json.dumps(part.state_dict()).encode() for name, part in parts.items()}


def write(files: Mapping[str, bytes], directory: Path) -> None:
    """Write the files that `take` returned below a checkpoint that is being written."""
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


def restore(parts: Mapping[str, Part], directory: Path) -> None:
    """Give every part its state back. A part that the checkpoint does not know keeps what it has: it is new.

    Raises ResumeError when a state is there and does not fit.
    """
    for name, part in parts.items():
        path = directory / FOLDER / f"{name}.json"
        if not path.exists():
            continue
        try:
            part.load_state_dict(json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError) as error:
            raise ResumeError(f"{path} does not fit this run ({error!r}). Set checkpoint.resume to never.") from error
