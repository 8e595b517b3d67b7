"""Schedules that train on records in the order they were drawn: colocated and one-step-off.

With seeded sampling, what a colocated step trains on depends on nothing but the weights and the seed.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.schedules.base import Rollout, Schedule


class InOrder(Schedule):
    """A whole batch at a time, and nothing meanwhile: training has the device to itself."""

    def take(self, version: int, steps_left: int) -> Iterator[Rollout]:
        """The batch sampled ahead, or a new one. A group that is not wanted is replaced at the end of the line."""
        self._begin()
        self._send_up_to_batch(version)
        self._renew(version)
        for _ in range(self.batch):
            rollout = None
            while rollout is None:
                first = self.pending[0]
                group = first.future.result()
                if self._sent_again(first, version):
                    self._line_up()
                    continue
                del self.pending[0]  # not before: a checkpoint or a retry must still find it
                rollout = None if self._sent_back(group, version) else Rollout(first.draw, group)
            yield rollout

    def ahead(self, version: int, steps_left: int) -> None:
        """Nothing."""

    def _send_up_to_batch(self, version: int) -> None:
        """More than a batch may be there after another schedule: then it is used first."""
        self._send_next(max(self.batch - len(self.pending), 0), version)
        self._line_up()

    def _renew(self, version: int) -> None:
        """What is known to be too old is sampled again now, all at the same time."""
        for pending in [pending for pending in self.pending[: self.batch] if pending.future.done()]:
            self._sent_again(pending, version)
        self._line_up()

    def _line_up(self) -> None:
        self.pending.sort(key=lambda pending: pending.draw.number)


class OneStepOff(InOrder):
    """The next batch is sampled while this one trains."""

    max_lag = 1

    def ahead(self, version: int, steps_left: int) -> None:
        if steps_left > 0:
            self._send_up_to_batch(version)
