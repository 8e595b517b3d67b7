"""What a worker process is told beyond the options, which it reads like any gateway: its number and its ports."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

VARIABLE = "HOTSWAP_GATEWAY_WORKER"
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Place:
    """One of `count` workers. `admin` is the inherited descriptor of that listener, `directory` is where they meet."""

    index: int
    count: int
    port: int
    admin: int
    directory: str
    parent: int

    @property
    def leads(self) -> bool:
        """Only this one serves the admin port and is a candidate for coordinator: what they do lives in one process."""
        return self.index == 0

    def page_socket(self, index: int) -> Path:
        """Where worker `index` gives out its metrics."""
        return Path(self.directory) / f"{index}.metrics"

    def to_environment(self) -> dict[str, str]:
        """How it is passed on."""
        return {VARIABLE: orjson.dumps(asdict(self)).decode()}

    @classmethod
    def taken(cls) -> Place | None:
        """What this process was told, None if it is no worker. Nothing it starts is told the same."""
        told = os.environ.pop(VARIABLE, None)
        return None if told is None else cls(**orjson.loads(told))

    def die_with_parent(self) -> None:
        """Ends in order when the supervisor is gone, even if that was killed."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self.parent:  # it went before this was asked for
            raise SystemExit(0)
