"""One model of this gateway's, whole: the fleet that serves it, its queue and its counts, its swaps and releases.

Every record of the model in the store lies below `models/{name}/`, and nothing here knows of another model. State that
all models of a process share is in gateway.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from server.answers.desk import Desk
from server.answers.feedback import Passing
from server.gateway.access.approvals import Approvals
from server.gateway.config import GatewayConfig
from server.gateway.fleet.scrape import Readiness, scrape_forever
from server.gateway.fleet.view import Fleet
from server.gateway.models.history import Throughput, TrainingLog
from server.gateway.models.probes import ProbeSettings, build_probe
from server.gateway.models.publishing import Pusher, Updates
from server.gateway.models.served import Served
from server.gateway.observe.stats import ProcessStats, Stats
from server.gateway.queue.gate import Gate
from server.gateway.release.answers import AnswerReader
from server.gateway.release.evidence import Observer
from server.gateway.release.runner import FleetControl, Releases
from weightsync.control.coordinator import Coordinator
from weightsync.control.records import InstanceRecord, VersionRecord
from weightsync.store import Store
from weightsync.tls import ClusterTls

log = logging.getLogger("hotswap.gateway")

RESTART_S = 0.5


class Model:
    """A model whose instances register in the store. `served` is what requests see of it."""

    def __init__(
        self,
        name: str,
        config: GatewayConfig,
        store: Store,
        process: ProcessStats,
        desk: Desk,
        tls: ClusterTls | None,
        refuses: Callable[[VersionRecord], str],
    ) -> None:
        self.name = name
        self.config = config  # as it holds for this model
        self.store = store
        self.stats = Stats(process, name)
        self.fleet = Fleet(store, name, config.upstream, self.stats, tls)
        self.gate = Gate(self.fleet, config.queue)
        self.fleet.on_change = self.gate.changed
        self.served = Served(name, self.fleet, self.gate, self.stats)
        self.approvals = Approvals(store, name)
        self.passing = Passing(store, name, desk.recent, desk.rate)
        probe = build_probe(ProbeSettings.of(config), self._records, tls)
        self.coordinator = Coordinator(store, name, keep=config.keep_versions, probe=probe, refuses=refuses)
        observer = Observer(self.stats.watchers)
        self.releases = Releases(
            store,
            name,
            FleetControl(store, name, self.coordinator, self._records, config.swap_deadline_s, config.named, tls),
            observer,
            lambda: self.coordinator.leads,
            AnswerReader(name, desk, self.fleet.shadows, observer, config.named),
            lambda state: setattr(self.stats, "release", state),
        )
        self.pusher = Pusher(config)
        self.updates = Updates()
        self.throughput = Throughput()
        self.training = TrainingLog(store, name)
        self.readiness = Readiness()
        self._tasks: list[asyncio.Task[None]] = []

    def _records(self) -> list[InstanceRecord]:
        """Of the instances that are known."""
        return [instance.record for instance in self.fleet.instances.values()]

    def start(self) -> None:
        """Begins the tasks that keep it current."""
        self._tasks = [
            asyncio.create_task(keep_going(f"{name} of {self.name}", work)) for name, work in self._work().items()
        ]

    def _work(self) -> dict[str, Callable[[], Awaitable[None]]]:
        work: dict[str, Callable[[], Awaitable[None]]] = {
            "fleet": self.fleet.run,
            "scraper": lambda: scrape_forever(self.fleet, self.config.upstream),
            "feedback": self.passing.run,
            "throughput": lambda: self.throughput.run(self.fleet.instances),
            "training": self.training.run,
            "releases": self.releases.run,
        }
        if self.config.run_coordinator:
            work["coordinator"] = self.coordinator.run
        return work

    async def stop(self) -> None:
        """Ends its tasks, and a coordinator's lead with them."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Lets go of everything; nothing asks it any more."""
        await self.stop()
        await self.pusher.close()
        self.updates.drop()
        self.gate.close()
        self.fleet.close()


async def keep_going(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Runs a background task to its end, and begins it anew after a fault: requests go on, so what keeps them must."""
    while True:
        try:
            await work()
            return
        except Exception:
            log.exception("the task %s of the gateway failed; it begins again in %g s", name, RESTART_S)
            await asyncio.sleep(RESTART_S)
