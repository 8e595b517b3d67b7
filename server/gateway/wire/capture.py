"""The bytes of an exchange, for whoever reads whole answers (server/answers): the request's body and the answer's.

The pieces of the answer are kept as they are: bytes in a list, which costs an append for each. An answer that nobody
asked for has no `Capture`.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

W = TypeVar("W")

LIMIT: Final = 64 * 2**20
PER_ANSWER: Final = 2 * 2**20


class CaptureMemory:
    """Bytes that all captured exchanges of a gateway may hold, `per_answer` of them one.

    Only the event loop writes `taken`, and only one thread `given_back`, so neither needs a lock.
    """

    def __init__(self, limit: int = LIMIT, per_answer: int = PER_ANSWER) -> None:
        self.limit, self.per_answer = limit, per_answer
        self.taken = 0
        self.given_back = 0
        self.lost = 0  # exchanges that were too large, or found no room

    @property
    def used(self) -> int:
        """Bytes held now."""
        return self.taken - self.given_back


class Capture(Generic[W]):
    """One exchange. `take` is on the hot path; `wanted` is what its collector wants to remember, such as its owner."""

    __slots__ = ("_charged", "_memory", "body", "lost", "pieces", "wanted")

    def __init__(self, memory: CaptureMemory, body: bytes | None, wanted: W) -> None:
        self._memory = memory
        self._charged = 0
        self.wanted = wanted
        self.body = body or b""
        self.pieces: list[bytes] = []
        self.lost = body is None  # nothing is kept of it
        if body is not None:
            self._charge(len(body))

    def take(self, piece: bytes) -> None:
        """A piece of the answer's body passes."""
        if not self.lost:
            self.pieces.append(piece)
            self._charge(len(piece))

    def restart(self) -> None:
        """Nothing of the answer has gone out, and another instance is asked."""
        self.pieces.clear()

    def drop(self) -> None:
        """Drops the capture, which is not read after all. For the event loop."""
        self._memory.taken -= self._charged
        self._clear()

    def close(self) -> None:
        """It was read. For the one thread that reads."""
        self._memory.given_back += self._charged
        self._clear()

    def _clear(self) -> None:
        self._charged = 0
        self.pieces.clear()
        self.body = b""

    def _charge(self, size: int) -> None:
        memory = self._memory
        if self._charged + size > memory.per_answer or memory.used + size > memory.limit:
            self._lose()
            return
        memory.taken += size
        self._charged += size

    def _lose(self) -> None:
        self.lost = True
        self._memory.lost += 1
        self.drop()
