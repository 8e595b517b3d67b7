"""Which of the slots that are missing is fetched next, and what holds up the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from weightsync.errors import WeightSyncError
from weightsync.peer.messages import Key
from weightsync.records import ErrorInfo

log = logging.getLogger("hotswap.peer")

AGAIN_S = 0.5  # after a fetch that found nobody to read from
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0  # after one that failed, and before one that waits gets another's turn


class Turns:
    """Times are of the monotonic clock."""

    def __init__(self) -> None:
        self.problems: dict[Key, ErrorInfo] = {}  # what holds up a fetch
        self.failed: set[Key] = set()  # those that ended with it
        self._again_at: dict[Key, float] = {}
        self._pauses: dict[Key, float] = {}
        self._passed_over: dict[Key, float] = {}  # until when; those only wait for a holder

    def next(self, missing: Sequence[Key]) -> Key | None:
        """The most urgent one that may be tried; who waits for a holder stands back while there is another."""
        now = time.monotonic()
        due = [key for key in missing if self._again_at.get(key, 0.0) <= now]
        return next((key for key in due if self._passed_over.get(key, 0.0) <= now), due[0] if due else None)

    def waits(self, key: Key, error: WeightSyncError) -> None:
        """Nobody it can be read from now. It goes on waiting, unless another is missing. Said ever more seldom."""
        now = time.monotonic()
        if self._passed_over.get(key, 0.0) > now:
            return
        pause = self._longer(key)
        log.warning("%s waits for a holder; others are not held up for %g s: %s", key.digest, pause, error)
        self._passed_over[key] = now + pause
        if key not in self.failed:
            self.problems[key] = _told(error)

    def goes_on(self, key: Key) -> None:
        """It is being read."""
        if key not in self.failed:
            self._forget(key)

    def done(self, key: Key) -> None:
        """It is here."""
        self.failed.discard(key)
        self._forget(key)

    def ended(self, key: Key, error: Exception, *, failed: bool) -> ErrorInfo:
        """With an error; `failed`: another attempt at once would do no better."""
        info = self.problems[key] = _told(error)
        pause = self._longer(key) if failed else AGAIN_S
        if failed:
            self.failed.add(key)
        log.warning("%s could not be fetched; again in %g s: %s", key.digest, pause, error)
        self._again_at[key] = time.monotonic() + pause
        return info

    def keep_to(self, wanted: set[Key]) -> None:
        """Forget all others."""
        self.failed &= wanted
        for told in (self.problems, self._again_at, self._pauses, self._passed_over):
            for key in told.keys() - wanted:
                del told[key]  # type: ignore[attr-defined]

    def _forget(self, key: Key) -> None:
        for told in (self.problems, self._again_at, self._pauses, self._passed_over):
            told.pop(key, None)  # type: ignore[attr-defined]

    def _longer(self, key: Key) -> float:
        pause = self._pauses[key] = min(2 * self._pauses.get(key, FIRST_PAUSE_S / 2), LONGEST_PAUSE_S)
        return pause


def _told(error: Exception) -> ErrorInfo:
    if isinstance(error, WeightSyncError):
        return ErrorInfo(error.code, str(error), error.tensor)
    return ErrorInfo("internal_error", f"{type(error).__name__}: {error}")
