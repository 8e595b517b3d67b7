"""What a library must do to carry a transport: the part that runs in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weightsync.transport.messages import Settings


class EngineError(Exception):
    """The library refused or failed; the message says why."""


class Reading(Protocol):
    """Some pieces on their way."""

    def done(self) -> bool:
        """Whether all have arrived; does not block. Raises EngineError."""


class Engine(Protocol):
    """Addresses are of this process."""

    @property
    def endpoint(self) -> bytes:
        """How others reach it."""

    def register(self, address: int, nbytes: int) -> bytes:
        """Returns what a reader needs to know of it. Raises EngineError."""

    def forget(self, address: int, nbytes: int) -> None:
        """Raises EngineError."""

    def read(self, endpoint: bytes, remote: bytes, pieces: Sequence[tuple[int, int, int]]) -> Reading:
        """Begin. `pieces`: local address, remote offset, bytes. Raises EngineError."""


def load(settings: Settings) -> Engine:
    """Raises EngineError, ImportError, or what the library raises."""
    if settings.engine == "mooncake":
        from weightsync.transport.mooncake import MooncakeEngine

        return MooncakeEngine(settings)
    from weightsync.transport.nixl import NixlEngine

    return NixlEngine(settings)
