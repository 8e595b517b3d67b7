"""Judging heartbeats: pure functions of what was seen and when."""

from __future__ import annotations

from trainer.faults.board import Beat

DONE = "done"
"""The phase of a rank's last beat, after which none is missed."""


class Watched:
    """One peer, seen through its beats. Clocks of other machines are not trusted: what counts is when a new beat was
    seen here."""

    def __init__(self, rank: int, now: float) -> None:
        self.rank, self._seen = rank, now
        self.last: Beat | None = None

    def see(self, beat: Beat | None, now: float) -> float:
        """Take a look; seconds since the last new beat."""
        if beat is not None and (self.last is None or beat.number != self.last.number):
            self.last, self._seen = beat, now
        return now - self._seen if self.last is None or self.last.phase != DONE else 0.0


def watched_by(rank: int, world: int) -> int:
    """Each watches the next one, in a ring: of any ranks that stop, the first has a live one before it."""
    return (rank + 1) % world


def silence(peer: Watched, silent_s: float) -> str:
    """What is said of a peer that no longer beats."""
    who = str(peer.last) if peer.last is not None else f"rank {peer.rank}, which never did,"
    return f"no heartbeat for {silent_s:.1f} s from {who}: stopped, or its machine is gone."


def hang(beats: list[Beat], hang_s: float) -> str:
    """What is said when no rank has got on for `hang_s`; empty while one has. The rank that is somewhere else than
    most is who the others wait for. Ranks that are done beat no more: they neither hang nor get on."""
    beats = [beat for beat in beats if beat.phase != DONE]
    if not beats or min(beat.still_s for beat in beats) < hang_s:
        return ""
    places = [(beat.step, beat.phase) for beat in beats]
    common = max(places, key=places.count)
    odd = [f"rank {beat.rank}" for beat in beats if (beat.step, beat.phase) != common]
    suspects = f" They seem to wait for {', '.join(odd)}." if odd and places.count(common) > 1 else ""
    return f"no rank got on for {hang_s:g} s: {'; '.join(map(str, beats))}.{suspects}"
