"""Going back to the last checkpoint when a step's numbers are not sane, in training and in serving."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from trainer.errors import Diverged, PublishError
from trainer.faults.serving import roll_back_serving
from trainer.megatron.parallel import broadcast_json, is_lead, lead

if TYPE_CHECKING:
    from trainer.run import Run
    from trainer.state import TrainState

log = logging.getLogger(__name__)


class Rollback:
    """Counts what went wrong where. Collective."""

    def __init__(self, run: Run) -> None:
        self._run, self._config = run, run.config.faults
        self._done = 0
        self._strikes: Counter[int] = Counter()

    def __call__(self, bad: TrainState, error: Diverged) -> TrainState:
        """The state to go on from, after a step from `bad` went wrong; raises `error` when there is to be no going
        back, or no more of it.

        The first time the steps since the checkpoint are repeated as they were: if memory or a link failed, that was
        all. A step that fails again is not at fault for the hardware: everything drawn up to it is left out then.
        """
        run = self._run
        if self._config.on_diverged == "stop" or run.checkpoints is None:
            raise error
        if self._done == self._config.max_rollbacks:
            raise Diverged(f"{error} It was so after {self._done} rollbacks too (faults.max_rollbacks).") from error
        self._done += 1
        self._strikes[bad.step] += 1
        drawn = run.sampling.drawn
        good = dataclasses.replace(bad, **run.checkpoints.restore())
        if skip := self._strikes[bad.step] > 1:
            run.sampling.skip_to(drawn)
            good = dataclasses.replace(good, consumed=drawn)
        good = self._serve(good, bad)
        if is_lead():
            values = {"step": bad.step + 1, "to_step": good.step, "version": good.version, "reason": str(error)}
            run.write("rollback", values | {"skipped_to": drawn if skip else None})
        return good

    def _serve(self, good: TrainState, bad: TrainState) -> TrainState:
        """The version of the checkpoint serves again; if it cannot, its weights are published as a new one."""
        run = self._run
        if run.config.publish is None or bad.version == good.version or not self._config.rollback_serving:
            return good
        if broadcast_json(lead(lambda: self._gateway_went_back(good.version))):
            return good
        return run.publish_again(good)

    def _gateway_went_back(self, version: int) -> bool:
        telemetry, publish = self._run.config.telemetry, self._run.config.publish
        if telemetry is None or publish is None or version == 0:
            return False
        try:
            roll_back_serving(telemetry, version, publish.timeout_s)
        except PublishError as error:
            log.warning("%s Its weights are published again.", error)
            return False
        return True


def judged(problem: str, stats: Any) -> None:
    """Raises Diverged for a step that `Guard` has found fault with."""
    if problem:
        raise Diverged(f"{problem} (loss {stats.loss:.4g}, gradient norm {stats.grad_norm:.4g}). Lower optimizer.lr.")
