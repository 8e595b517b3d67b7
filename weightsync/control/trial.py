"""The trial of a rolling swap's canary: the probe, and what it came to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from weightsync.control.records import ActiveRecord, InstanceRecord, SwapRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeResult:
    """Whether the canary may be followed; `detail` says why not, and ends up as the reason of the aborted swap."""

    ok: bool
    detail: str = ""


Probe = Callable[[InstanceRecord, SwapRecord, ActiveRecord | None], Awaitable[ProbeResult]]
"""probe(canary, swap, active): the canary runs `swap.target` already and gets no traffic; `active` is what the others
run. Raising counts as a failed probe. It is cancelled when the swap ends without it, and run again by a new leader."""


class Trial:
    """The probe of one swap's canary, run beside the watch."""

    def __init__(self, probe: Probe | None) -> None:
        self._probe = probe
        self._swap_id = ""
        self._task: asyncio.Task[ProbeResult] | None = None

    def of(self, canary: InstanceRecord, swap: SwapRecord, active: ActiveRecord | None) -> asyncio.Task[ProbeResult]:
        """Begun if it has not been."""
        if self._task is None or self._swap_id != swap.id:
            self.end()
            self._swap_id = swap.id
            self._task = asyncio.create_task(self._run(canary, swap, active), name=f"probe {canary.id}")
        return self._task

    def result(self, swap: SwapRecord | None) -> ProbeResult | None:
        """The outcome of the probe of `swap`; None if there is none yet. Ends a probe that has lost its swap."""
        if swap is None or (swap.id, swap.phase) != (self._swap_id, "canary"):
            self.end()
        return self._task.result() if self._task is not None and self._task.done() else None

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, canary: InstanceRecord, swap: SwapRecord, active: ActiveRecord | None) -> ProbeResult:
        if self._probe is None:
            return ProbeResult(True, "no probe is set")
        try:
            return await self._probe(canary, swap, active)
        except Exception as error:
            log.exception("the probe of %s failed", canary.id)
            return ProbeResult(False, f"{type(error).__name__}: {error}")
