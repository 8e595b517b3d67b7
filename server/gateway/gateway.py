"""The state of one gateway process, and the tasks that keep it current. A restart loses nothing of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from server.answers.desk import Desk
from server.answers.feedback import Passing, Recent
from server.answers.log import Log
from server.gateway.access.approvals import Approvals
from server.gateway.access.key_sources import KeyFiles, KeyStore, load_keys
from server.gateway.access.keys import KeyRing
from server.gateway.access.limits import Limits
from server.gateway.access.oidc import AdminAccess
from server.gateway.access.scope import CacheScopes
from server.gateway.access.sharing import Sharing
from server.gateway.admin.probes import ProbeSettings, build_probe
from server.gateway.admin.publishing import Pusher, Updates
from server.gateway.admission import Admission
from server.gateway.config import GatewayConfig
from server.gateway.fleet.scrape import Readiness, scrape_forever
from server.gateway.fleet.view import Fleet
from server.gateway.observe.history import Throughput, TrainingLog
from server.gateway.observe.keeper import LedgerKeeper
from server.gateway.observe.metrics import Counted, Pages, render
from server.gateway.observe.stats import Stats
from server.gateway.observe.tracing import open_watchers
from server.gateway.observe.webhooks import Webhooks
from server.gateway.openapi.document import PublicDocument
from server.gateway.queue.gate import Gate
from server.gateway.release.answers import AnswerReader
from server.gateway.release.control import FleetControl
from server.gateway.release.evidence import Observer
from server.gateway.release.runner import Releases
from server.gateway.wire.pool import Outbox
from weightsync.control.chain import LedgerEntry
from weightsync.control.coordinator import Coordinator
from weightsync.control.records import InstanceRecord
from weightsync.errors import StoreError
from weightsync.store import Store, open_store
from weightsync.tls import ClusterTls

log = logging.getLogger("hotswap.gateway")

SWEEP_INTERVAL_S = 0.25
RELOAD_INTERVAL_S = 1.0
RESTART_S = 0.5
FIRST_VIEW_TIMEOUT_S = 2.0


class Client(Protocol):
    """A client that is served now: a connection (connection.py), or a request of the ASGI app (asgi.py)."""

    def sweep(self, now: float) -> None:
        """Ends what is over its time. Monotonic seconds."""


class Gateway:
    """Shared by the hot path (connection.py, exchange.py) and the app (app.py)."""

    def __init__(self, config: GatewayConfig, store: Store, keys: KeyRing) -> None:
        self.config = config
        self.store = store
        self.keys = keys
        self.stats = Stats()
        self.tls = ClusterTls(config.cluster_tls) if config.cluster_tls is not None else None
        self.fleet = Fleet(store, config.model, config.upstream, self.stats, self.tls)
        self.gate = Gate(self.fleet, config.queue)
        self.fleet.on_change = self.gate.changed
        self.key_files = KeyFiles(config, keys)
        self.access = AdminAccess(keys, config.oidc)
        self.key_store = KeyStore(store, keys)
        self.approvals = Approvals(store, config.model)
        self.limits = Limits(self.stats.limited)
        self.sharing = Sharing(store, self.limits, lambda: keys.limits)
        self.scopes = CacheScopes(shared=config.cache_scope == "shared")
        self.admission = Admission(config, keys, self.scopes, self.limits, self.fleet.splits)
        self.desk = Desk(self.stats, Recent(config.answers.feedback_s))
        self.desk.add(Log(config.answers_url, config.answers, self.stats))
        self.passing = Passing(store, config.model, self.desk.recent, self.desk.rate)
        fleet = self.fleet
        probe = build_probe(ProbeSettings.of(config), self._records, self.tls)
        self.coordinator = Coordinator(store, config.model, keep=config.keep_versions, probe=probe)
        self.webhooks = Webhooks(store, config.model, config.webhooks, lambda: self.coordinator.leads)
        self.stats.webhooks = self.webhooks.counts
        self.ledger = LedgerKeeper(store, config.ledger_place, lambda: self.coordinator.leads, self._tell)
        observer = Observer(self.stats.watchers)
        self.releases = Releases(
            store,
            config.model,
            FleetControl(store, config.model, self.coordinator, self._records, config.swap_deadline_s, self.tls),
            observer,
            lambda: self.coordinator.leads,
            AnswerReader(self.desk, fleet.shadows, observer),
            lambda state: setattr(self.stats, "release", state),
        )
        self.pusher = Pusher(config)
        self.updates = Updates()
        self.document = PublicDocument(self.fleet, keys)
        self.throughput = Throughput()
        self.training = TrainingLog(store, config.model)
        self.pages = Pages(config.worker, lambda: render(Counted(self.stats, self.fleet, self.gate)))
        self.readiness = Readiness()
        self.leaving = False  # it was told to stop: load balancers are to send nothing more
        self.outbox = Outbox()
        self.buffered = 0  # bytes of request bodies held now
        self.clients: set[Client] = set()

    def _tell(self, entry: LedgerEntry) -> None:
        """Traces and webhooks of a new entry of the ledger."""
        self.stats.ledger_told(entry)
        self.webhooks.told(entry)

    def _records(self) -> list[InstanceRecord]:
        """Of the instances that are known."""
        return [instance.record for instance in self.fleet.instances.values()]

    @classmethod
    @asynccontextmanager
    async def open(cls, config: GatewayConfig) -> AsyncIterator[Gateway]:
        """A gateway with its tasks running. Raises ConfigError, StoreUnavailable, TlsUnavailable."""
        keys = load_keys(config)
        store = open_store(config.store)
        gateway = cls(config, store, keys)
        tasks: list[asyncio.Task[None]] = []
        close_watchers = open_watchers(config.observe, config.model, gateway.stats, lambda: gateway.coordinator.leads)
        try:
            with contextlib.suppress(StoreError, TimeoutError):  # then `Fleet.run` goes on trying
                async with asyncio.timeout(FIRST_VIEW_TIMEOUT_S):
                    await gateway.scopes.adopt(store)
                    await gateway.key_store.refresh()
                    await gateway.sharing.enter()
                    await gateway.fleet.refresh()
            tasks = [asyncio.create_task(keep_going(name, work)) for name, work in gateway._work().items()]
            with contextlib.suppress(TimeoutError):  # the other gateways make room for this one
                await asyncio.wait_for(gateway.sharing.entered.wait(), FIRST_VIEW_TIMEOUT_S)
            yield gateway
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await gateway.sharing.leave()
            await gateway.pusher.close()
            gateway.updates.drop()
            gateway.gate.close()
            gateway.fleet.close()
            await asyncio.to_thread(gateway.desk.close)
            await store.close()
            await asyncio.to_thread(close_watchers)

    def _work(self) -> dict[str, Callable[[], Awaitable[None]]]:
        work: dict[str, Callable[[], Awaitable[None]]] = {
            "fleet": self.fleet.run,
            "scraper": lambda: scrape_forever(self.fleet, self.config.upstream),
            "sweeper": self._sweep_forever,
            "keys": self.key_store.run,
            "limits": self.sharing.run,
            "files": self._reload_forever,
            "feedback": self.passing.run,
            "cache scopes": lambda: self.scopes.keep_adopting(self.store),
            "throughput": lambda: self.throughput.run(self.fleet.instances),
            "training": self.training.run,
            "metrics page": self.pages.serve,
            "releases": self.releases.run,
        }
        if self.config.run_coordinator:
            work |= {"coordinator": self.coordinator.run, "ledger": self.ledger.run, "webhooks": self.webhooks.run}
        return work

    async def _sweep_forever(self) -> None:
        """Ends what is over its time. One timer for all connections costs less than one timer each."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now = time.monotonic()
            for client in list(self.clients):
                client.sweep(now)
            self.gate.changed()  # a limit may have grown
            self.fleet.shadows.sweep(now)
            for instance in self.fleet.instances.values():
                instance.pool.sweep(now)

    async def _reload_forever(self) -> None:
        """Takes in files that were changed: keys, and the certificate."""
        while True:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            self.key_files.reload()


async def keep_going(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Runs a background task to its end, and begins it anew after a fault: requests go on, so what keeps them must."""
    while True:
        try:
            await work()
            return
        except Exception:
            log.exception("the %s task of the gateway failed; it begins again in %g s", name, RESTART_S)
            await asyncio.sleep(RESTART_S)
