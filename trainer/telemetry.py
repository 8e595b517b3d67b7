"""A run's step and evaluation numbers, posted to the gateway's admin port, where the console draws them.

Whatever becomes of the gateway, training goes on: a thread of its own posts, what it cannot keep up with is left out
(the newest are kept), and the first failure in a row is logged.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Mapping
from typing import Any

import httpx

from trainer.config import TelemetryConfig
from trainer.connection import Bearer, verify
from trainer.metrics import Tee, numbers

__all__ = ["HttpMetrics", "Tee", "point"]

log = logging.getLogger(__name__)

ROUTE = "/admin/training/metrics"
EVENTS = frozenset({"step", "eval"})
MAX_FIELDS = 64  # that the route takes
WAITING = 64  # points kept while the gateway is slow
CLOSE_S = 3.0


class HttpMetrics:
    """A MetricsWriter. `reward` and `accuracy` are what the console draws, with `loss`, by `step`."""

    def __init__(self, config: TelemetryConfig) -> None:
        """Raises ConfigError when the admin key or the certificates cannot be read."""
        key, checks = Bearer(config.admin_key), verify(config)
        self._client = httpx.Client(base_url=config.admin_url, auth=key, verify=checks, timeout=config.timeout_s)
        self._waiting: queue.Queue[dict[str, float] | None] = queue.Queue(maxsize=WAITING)
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="training metrics", daemon=True)
        self._thread.start()

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Returns at once; an event that is no step's and no evaluation's is not posted."""
        if event in EVENTS:
            self._put(point(event, values))

    def close(self) -> None:
        """Posts what still waits, within a few seconds."""
        self._put(None)
        self._thread.join(CLOSE_S)
        self._client.close()

    def _put(self, item: dict[str, float] | None) -> None:
        while True:
            try:
                self._waiting.put_nowait(item)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._waiting.get_nowait()  # the oldest makes way

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._client.post(ROUTE, json=item).raise_for_status()
                self._failing = False
            except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed under way
                if not self._failing:
                    log.warning("the gateway does not take training metrics: %s", error)
                self._failing = True


def point(event: str, values: Mapping[str, Any]) -> dict[str, float]:
    """An event's finite numbers, under the names the console knows. An evaluation's reward is not the training's."""
    renamed = {"reward_mean": "reward"} if event == "step" else {"reward_mean": "eval_reward"}
    found = {renamed.get(name, name): value for name, value in numbers(values).items()}
    first = {name: found.pop(name) for name in ("step", "version", "reward", "loss", "accuracy") if name in found}
    return first | dict(list(found.items())[: MAX_FIELDS - len(first)])
