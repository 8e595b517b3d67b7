"""Where ranks leave word for each other outside collectives: the key-value store that torchrun (or rank 0) runs.

Each process has a connection of its own, so that a main thread that waits in a collective holds nobody up. What was
left before a restart can still be read after it under torchrun, whose agent keeps the store.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

PREFIX = "hotswap"
PATIENCE_S = 10.0


@dataclass(frozen=True)
class Beat:
    """One heartbeat. `number` counts them; `still_s` is how long the rank has been at this place."""

    rank: int
    pid: int
    host: str
    number: int
    phase: str
    step: int
    still_s: float

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host}), {self.phase} of step {self.step}"


class Board(Protocol):
    """Raises OSError or RuntimeError when the store does not answer."""

    def beat(self, beat: Beat) -> None: ...

    def last_beat(self, rank: int) -> Beat | None: ...

    def report(self, fault: str) -> None: ...

    def fault(self, attempt: int | None = None) -> str: ...


class StoreBoard:
    """On torch's TCPStore, at the address in torchrun's environment variables."""

    def __init__(self, attempt: int) -> None:
        from torch.distributed import TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store: Any = TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S)
        )
        self._attempt = attempt

    def beat(self, beat: Beat) -> None:
        self._store.set(self._key(f"beat/{beat.rank}"), json.dumps(asdict(beat)))

    def last_beat(self, rank: int) -> Beat | None:
        text = self._read(self._key(f"beat/{rank}"))
        return Beat(**json.loads(text)) if text else None

    def report(self, fault: str) -> None:
        self._store.set(self._key("fault"), fault)

    def fault(self, attempt: int | None = None) -> str:
        """What ended this attempt, or an earlier one; empty when nobody said."""
        return self._read(self._key("fault", attempt))

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _key(self, name: str, attempt: int | None = None) -> str:
        return f"{PREFIX}/{self._attempt if attempt is None else attempt}/{name}"


class LocalBoard:
    """For a run of one process: nobody listens."""

    def __init__(self) -> None:
        self._beats: dict[int, Beat] = {}
        self._fault = ""

    def beat(self, beat: Beat) -> None:
        self._beats[beat.rank] = beat

    def last_beat(self, rank: int) -> Beat | None:
        return self._beats.get(rank)

    def report(self, fault: str) -> None:
        self._fault = fault

    def fault(self, attempt: int | None = None) -> str:
        return self._fault if attempt is None else ""
