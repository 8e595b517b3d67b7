"""The serving side as a component: its instances sleep and wake by orders to the gateway's admin port.

They wake by themselves if the orders are not renewed, so that a trainer that dies leaves a server behind.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import httpx

from trainer.config import ServingMemory
from trainer.connection import Bearer, verify
from trainer.errors import MemoryPlanError
from trainer.memory.ledger import Base

log = logging.getLogger(__name__)
POLL_S = 0.1
CALL_S = 10.0
REQUESTED_BY = "trainer"


class Fleet:
    """The instances that share the device. Raises MemoryPlanError for whatever keeps them from obeying."""

    def __init__(self, config: ServingMemory) -> None:
        self._config = config
        key, checks = Bearer(config.admin_key), verify(config)
        self._http = httpx.Client(base_url=config.admin_url, auth=key, verify=checks, timeout=CALL_S)
        self._sleeping: tuple[str, ...] = ()
        self._stop = threading.Event()
        self._renewing: threading.Thread | None = None

    def asleep(self) -> bool:
        """Whether any of them is ordered to sleep now, by whomever."""
        return bool(set(self._ids()) & {order["id"] for order in self._call("GET", "/admin/sleep")["orders"]})

    def sleep(self) -> None:
        """Return when all have given their memory back; if one does not, all are woken again."""
        self._sleeping = self._ids()
        if not self._sleeping:
            raise MemoryPlanError(f"{self._config.admin_url} has no instances. Start them before the trainer.")
        try:
            self._order()
            self._begin_renewing()  # now: requests in flight may take longer to end than an order lasts
            self._wait("asleep", "fall asleep")
        except MemoryPlanError:
            self._end_renewing()
            self._wake_all()
            raise

    def wake(self) -> None:
        """Return when all serve, with the version that is active now."""
        self._end_renewing()
        self._sleeping = self._sleeping or self._ids()
        self._wake_all()
        self._wait("serving", "wake")
        self._sleeping = ()

    def close(self) -> None:
        """Wake whoever sleeps, without waiting for it."""
        self._end_renewing()
        if self._sleeping:
            try:
                self._wake_all()
            except MemoryPlanError as error:
                log.warning("instances stay asleep until their orders end: %s", error)
        self._http.close()

    def _ids(self) -> tuple[str, ...]:
        if self._config.instances:
            return self._config.instances
        there = self._call("GET", "/admin/instances")["instances"]
        ordered = self._call("GET", "/admin/sleep")["orders"]
        return tuple(sorted({row["id"] for row in (*there, *ordered)}))

    def _order(self) -> None:
        c = self._config
        body = {"level": c.level, "drain_s": c.drain_s, "ttl_s": c.ttl_s, "requested_by": REQUESTED_BY}
        for name in self._sleeping:
            self._call("POST", f"/admin/instances/{name}/sleep", body)

    def _wake_all(self) -> None:
        for name in self._sleeping:
            self._call("POST", f"/admin/instances/{name}/wake", {})

    def _wait(self, state: str, what: str) -> None:
        deadline = time.monotonic() + self._config.timeout_s
        while missing := set(self._sleeping) - self._in_state(state):
            if time.monotonic() > deadline:
                late = ", ".join(sorted(missing))
                advice = "Look into the log of the instance, or raise memory.serving.timeout_s"
                raise MemoryPlanError(f"{late} did not {what} within {self._config.timeout_s:g} s. {advice}.")
            time.sleep(POLL_S)

    def _in_state(self, state: str) -> set[str]:
        if state == "asleep":
            return {row["id"] for row in self._call("GET", "/admin/sleep")["asleep"]}
        return {row["id"] for row in self._call("GET", "/admin/instances")["instances"] if row["eligible"]}

    def _begin_renewing(self) -> None:
        self._stop.clear()
        self._renewing = threading.Thread(target=self._renew, name="sleep orders", daemon=True)
        self._renewing.start()

    def _renew(self) -> None:
        while not self._stop.wait(self._config.ttl_s / 3):
            try:
                self._order()
            except MemoryPlanError as error:
                log.warning("an order to sleep was not renewed; trying again: %s", error)

    def _end_renewing(self) -> None:
        """Before anybody is woken: an order that is renewed after that would put it to sleep again."""
        if self._renewing is not None:
            self._stop.set()
            self._renewing.join()
            self._renewing = None

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """A gateway that is away for a moment is asked again, for up to `timeout_s`."""
        deadline = time.monotonic() + self._config.timeout_s
        while True:
            try:
                answer = self._http.request(method, path, json=body)
            except httpx.HTTPError as error:
                problem = f"{self._config.admin_url} does not answer ({error})"
            else:
                if answer.is_success:
                    return answer.json()
                problem = f"{method} {path}: HTTP {answer.status_code} {answer.text[:300]}"
                if answer.status_code < 500:
                    raise MemoryPlanError(f"{problem}. Correct memory.serving.")
            if time.monotonic() > deadline:
                raise MemoryPlanError(f"{problem}. Start the gateway, or correct memory.serving.admin_url.")
            time.sleep(POLL_S)


class ServingEngine(Base):
    """The engines of a fleet. Level 1 offloads them, level 2 destroys them: they come back with dummy weights, and
    serve only once they have caught up with the active version."""

    def __init__(self, fleet: Fleet, nbytes: int, level: int) -> None:
        super().__init__("engine", "instantiated")
        self.bytes, self._fleet = nbytes, fleet
        self.leaves = "offload" if level == 1 else "destroy"
        if fleet.asleep():
            self.state = "offloaded" if level == 1 else "destroyed"

    def _offload(self) -> None:
        self._fleet.sleep()

    def _reload(self) -> None:
        self._fleet.wake()

    def _destroy(self) -> None:
        self._fleet.sleep()

    def _instantiate(self) -> None:
        self._fleet.wake()
