"""The asynchronous schedule: samples are always in flight, and groups are trained on about as they finish.

The bound on staleness is kept by choosing, not by throwing away, which would favour short answers. A group sent off at
version v may be used up to version v + max_lag. With B groups a step, d versions from now at most `left + d * B` more
groups can be used; if that many are due by then, the next one must come from these, and is waited for (earliest
deadline first is feasible). Otherwise any finished one will do. At most (max_lag + 1) * B groups are ahead of training,
which is also the back-pressure on sampling (as in AReaL, arXiv 2505.24298, whose rule counts the same in
first-in-first-out order). Groups over the bound all the same, since versions were skipped, are sampled again.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait

from trainer.schedules.base import Keep, Pending, Rollout, Schedule, Start
from trainer.schedules.feed import Feed


class Asynchronous(Schedule):
    """`max_lag` in versions, `buffer` in groups (None: the most that the bound allows)."""

    def __init__(
        self, batch: int, max_refills: int, feed: Feed, start: Start, keep: Keep, max_lag: int, buffer: int | None
    ) -> None:
        super().__init__(batch, max_refills, feed, start, keep)
        self.max_lag = max_lag
        most = (max_lag + 1) * batch
        self._buffer = most if buffer is None else min(max(buffer, batch), most)

    def take(self, version: int, steps_left: int) -> Iterator[Rollout]:
        """Tops up what is in flight, then takes groups as they finish, those first that would be too old."""
        self._begin()
        self._top_up(version, steps_left)
        for left in range(self.batch, 0, -1):
            rollout = None
            while rollout is None:
                rollout = self._next(version, left)
            yield rollout

    def ahead(self, version: int, steps_left: int) -> None:
        """While training, the server works on what is ahead; room for more comes with the next version."""
        room = self.max_lag * self.batch  # what can still be used in time by the steps after this one
        self._fill(min(self._buffer, room, steps_left * self.batch), version)

    def _top_up(self, version: int, steps_left: int) -> None:
        self._fill(min(self._buffer, steps_left * self.batch), version)

    def _fill(self, groups: int, version: int) -> None:
        self._send_next(max(groups - len(self.pending), 0), version)

    def _next(self, version: int, left: int) -> Rollout | None:
        candidates = self._candidates(version, left)
        done, _ = wait([pending.future for pending in candidates], return_when=FIRST_COMPLETED)
        chosen = next(pending for pending in candidates if pending.future in done)
        if self._sent_again(chosen, version):
            return None
        group = chosen.future.result()
        self.pending.remove(chosen)
        return None if self._sent_back(group, version) else Rollout(chosen.draw, group)

    def _candidates(self, version: int, left: int) -> list[Pending]:
        """Among which the next one is chosen, those due first in front."""
        by_deadline = sorted(self.pending, key=lambda pending: (pending.version, pending.draw.number))
        for count, pending in enumerate(by_deadline, 1):
            deadline = pending.version + self.max_lag
            if count >= left + (deadline - version) * self.batch:
                return by_deadline[:count]
        return by_deadline
