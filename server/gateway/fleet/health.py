"""Is an instance well: judged by its answers to clients, and by those to the gateway's own probes.

    closed --EJECT_AFTER failures in a row, or too many of the last ones--> open, for a time that grows
    open --the time is up--> half_open: one request a second tries it
    half_open --TRIALS answers--> closed        half_open --a failure--> open, for twice as long

A failure is a connection that is refused or breaks, silence for too long, or a status of FAULTS. What a client has done
wrong (4xx, 501) and a refusal for the version that runs there say nothing against an instance. Plain state: the time is
handed in, and who may be ejected at all is for the fleet to say (view.py).
"""

from __future__ import annotations

from typing import Final

from server.gateway.config import HealthSettings

FAULTS: Final = frozenset({500, 502, 503, 504})
STATES: Final = ("closed", "half_open", "open")


class Health:
    """Of one instance. `now` is monotonic seconds."""

    __slots__ = (
        "_answers", "_failures", "_in_a_row", "_next_trial", "_settings", "_window_from", "ejections", "opened_at",
        "probe_failures", "recovered_at", "strikes", "trials", "until",
    )  # fmt: skip

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._in_a_row = 0
        self._window_from = 0.0
        self._answers = self._failures = 0  # in the window
        self._next_trial = 0.0
        self.until = 0.0  # when an ejection ends; 0.0: closed
        self.opened_at = 0.0
        self.recovered_at = 0.0
        self.strikes = 0  # ejections without a long good time between them: each is twice as long
        self.trials = 0  # answers since half open
        self.ejections = 0
        self.probe_failures = 0  # in a row

    @property
    def closed(self) -> bool:
        """Whether it is asked like any other, as far as clients' answers go."""
        return self.until == 0.0

    @property
    def answering(self) -> bool:
        """Whether its probes say it is up."""
        return self.probe_failures < self._settings.unhealthy_after

    @property
    def well(self) -> bool:
        """Whether nothing speaks against it."""
        return self.until == 0.0 and self.answering

    def state(self, now: float) -> str:
        """One of STATES."""
        if self.closed:
            return "closed"
        return "half_open" if now >= self.until else "open"

    def admits(self, now: float) -> bool:
        """Whether it may be asked now: always when well, once in a while when half open."""
        if not self.answering:
            return False
        return self.closed or (now >= self.until and now >= self._next_trial)

    def asked(self, now: float) -> None:
        """A request goes there; the next trial has to wait."""
        if not self.closed:
            self._next_trial = now + self._settings.trial_interval_s

    def success(self, now: float) -> bool:
        """It has answered; True if that closes the circuit."""
        self._answers += 1
        self._in_a_row = 0
        if self.closed or now < self.until:  # an answer to what was asked before the ejection proves nothing
            return False
        self.trials += 1
        if self.trials < self._settings.trials:
            return False
        self.until, self.recovered_at, self._window_from = 0.0, now, now
        self._answers = self._failures = 0
        return True

    def failure(self, now: float) -> bool:
        """It has failed; True if it should be ejected for that."""
        s = self._settings
        if now - self._window_from > s.window_s:
            self._window_from, self._answers, self._failures = now, 0, 0
        self._in_a_row += 1
        self._failures += 1
        if not self.closed:
            return now >= self.until
        asked = self._answers + self._failures
        often = asked >= s.min_requests and self._failures >= s.max_failure_share * asked
        return often or self._in_a_row >= s.eject_after

    def eject(self, now: float) -> float:
        """Out for a time that doubles with each ejection; seconds."""
        s = self._settings
        if self.closed and now - self.recovered_at > s.forgive_s:
            self.strikes = 0
        seconds = min(s.ejection_s * 2.0**self.strikes, s.max_ejection_s)
        self.strikes += 1
        self.ejections += 1
        self.opened_at, self.until = now, now + seconds
        self.trials = self._in_a_row = 0
        self._next_trial = 0.0
        return seconds

    def probed(self, *, well: bool) -> None:
        """What /health said."""
        self.probe_failures = 0 if well else self.probe_failures + 1
