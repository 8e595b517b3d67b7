"""The state of one gateway process, and the tasks that keep it current. A restart loses nothing of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from server.answers.desk import Desk
from server.answers.feedback import Recent
from server.answers.log import Log
from server.errors import ConfigError
from server.gateway.access.budgets import Budgets
from server.gateway.access.key_sources import KeyFiles, KeyStore, load_keys
from server.gateway.access.keys import KeyRing
from server.gateway.access.limits import Limits
from server.gateway.access.oidc import AdminAccess
from server.gateway.access.scope import CacheScopes
from server.gateway.access.sharing import Sharing
from server.gateway.admission import Admission
from server.gateway.config import GatewayConfig
from server.gateway.cors import Origins
from server.gateway.metrics import Counted, render
from server.gateway.models import external
from server.gateway.models.directory import Directory
from server.gateway.models.file import External, ModelsFile
from server.gateway.models.model import Model, keep_going
from server.gateway.models.served import Served
from server.gateway.observe.ledger import LedgerKeeper, Webhooks
from server.gateway.observe.pages import Pages
from server.gateway.observe.stats import ProcessStats, Stats
from server.gateway.observe.tracing import open_watchers
from server.gateway.openapi import PublicDocument
from server.gateway.wire.pool import Outbox
from weightsync.control.chain import LedgerEntry
from weightsync.errors import RecordError, StoreError
from weightsync.store import Store, open_store
from weightsync.tls import ClusterTls

if TYPE_CHECKING:
    from server.gateway.connection import GatewayProtocol

log = logging.getLogger("hotswap.gateway")

SWEEP_INTERVAL_S = 0.25
RELOAD_INTERVAL_S = 1.0
FIRST_VIEW_TIMEOUT_S = 2.0


class Gateway:
    """Shared by the hot path (connection.py, exchange.py) and the app (app.py): the models, and what all share."""

    def __init__(self, config: GatewayConfig, store: Store, keys: KeyRing) -> None:
        found = ModelsFile.of(config)
        self.config = config = replace(config, model=found.main(config))
        self.store = store
        self.keys = keys
        self.stats = ProcessStats()
        self.tls = ClusterTls(config.cluster_tls) if config.cluster_tls is not None else None
        self.key_files = KeyFiles(config, keys)
        self.access = AdminAccess(keys, config.oidc)
        self.key_store = KeyStore(store, keys)
        self.limits = Limits(self.stats.limited)
        self.sharing = Sharing(store, self.limits, lambda: keys.limits)
        self.budgets = Budgets(store, self.limits)
        self.scopes = CacheScopes(shared=config.cache_scope == "shared")
        self.desk = Desk(self.stats, Recent(config.answers.feedback_s))
        self.desk.add(Log(config.answers_url, config.answers, self.stats))
        self.file = found
        self.directory = Directory()
        self.models = {name: self._model(name, found) for name in found.own}
        self.upstreams = {name: self._upstream(at) for name, at in found.external.items()}
        self.origins = Origins(keys, config.host)
        self._use(found)
        self._changing = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()
        self.admission = Admission(config, keys, self.scopes, self.limits, self.directory, self.origins)
        self.webhooks = Webhooks(store, config.model, config.webhooks, self._leads, lambda name: name in self.models)
        self.stats.webhooks = self.webhooks.counts
        self.ledger = LedgerKeeper(store, config.ledger_place, self._leads, self._tell)
        self.document = PublicDocument(self.directory, keys)
        self.pages = Pages(config.worker, lambda: render(Counted(self.stats, self.directory)))
        self.leaving = False  # it was told to stop: load balancers are to send nothing more
        self.outbox = Outbox()
        self.buffered = 0  # bytes of request bodies held now
        self.look_ups: Counter[bytes | None] = Counter()  # of answers at other gateways, by the key that rates them
        self.clients: set[GatewayProtocol] = set()  # their connections
        self.handshakes: set[asyncio.Task[None]] = set()  # of connections that are none of these yet

    @property
    def default(self) -> Model:
        """The model that stands for all, in what is done once for them, and where there is but one."""
        return self.models[self.config.model]

    def _model(self, name: str, found: ModelsFile) -> Model:
        settings, refuses = found.settings_of(name, self.config), self.directory.refuses
        return Model(name, settings, self.store, self.stats, self.desk, self.tls, refuses)

    def _upstream(self, at: External) -> Served:
        return external.serve(at, self.config, self.store, self.stats)

    def _use(self, found: ModelsFile) -> None:
        """Requests from now on go by `found`, whose models are there."""
        self.file = found
        served = {name: model.served for name, model in self.models.items()} | self.upstreams
        self.directory.use([served[name] for name in found.names], found.aliases)
        self.origins.use((*self.config.allowed_origins, *found.origins))

    async def reload(self) -> None:
        """Takes in the file of models anew: models come and go, and the requests of those that go are answered.

        Raises ConfigError, and then nothing has changed.
        """
        async with self._changing:
            found = await asyncio.to_thread(ModelsFile.of, self.config)
            found.main(self.config)
            before, upstreams, file = self.models, self.upstreams, self.file
            kept = {name for name in found.own if file.own.get(name) == found.own[name]}
            models = {name: before[name] if name in kept else self._model(name, found) for name in found.own}
            theirs = {name for name, at in found.external.items() if file.external.get(name) == at}
            self.upstreams = {
                name: upstreams[name] if name in theirs else self._upstream(at) for name, at in found.external.items()
            }
            for name in models.keys() - kept:
                with contextlib.suppress(StoreError, TimeoutError):  # then `Fleet.run` goes on trying
                    async with asyncio.timeout(FIRST_VIEW_TIMEOUT_S):
                        await models[name].fleet.refresh()
            self.models = models
            self._use(found)
            for name, model in before.items():
                if name not in kept:
                    await model.stop()
                    self._retire(model.stats, model.close)
            for name in models.keys() - kept:
                models[name].start()
            for name, served in upstreams.items():
                if name not in theirs:
                    self._retire(served.stats, _closing(served))
            log.info("the models were read anew: %s", ", ".join(found.names))

    def _retire(self, stats: Stats, close: Callable[[], Awaitable[None]]) -> None:
        """`close` is called when the last of its requests is answered."""

        async def last() -> None:
            while stats.inflight:  # noqa: ASYNC110 - many things end a request, and none of them is to know of this
                await asyncio.sleep(SWEEP_INTERVAL_S)
            await close()

        task = asyncio.create_task(last())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def hang_up(self) -> None:
        """SIGHUP: reload, and say in the log what cannot be."""

        async def tried() -> None:
            try:
                await self.reload()
            except ConfigError as exc:
                log.error("the models of before stay in use: %s", exc)

        task = asyncio.create_task(tried())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _leads(self, model: str = "") -> bool:
        """Whether this gateway leads that model; without a name, whether it does what one gateway does for all."""
        found = self.models.get(model or self.config.model)
        return found is not None and found.coordinator.leads

    def _tell(self, entry: LedgerEntry) -> None:
        """Traces and webhooks of a new entry of the ledger."""
        self.stats.ledger_told(entry)
        self.webhooks.told(entry)

    @classmethod
    @asynccontextmanager
    async def open(cls, config: GatewayConfig) -> AsyncIterator[Gateway]:
        """A gateway with its tasks running. Raises ConfigError, StoreUnavailable, TlsUnavailable."""
        keys = load_keys(config)
        store = open_store(config.store)
        gateway = cls(config, store, keys)
        tasks: list[asyncio.Task[None]] = []
        close_watchers = open_watchers(config.observe, gateway.stats, gateway._leads)
        try:
            with contextlib.suppress(StoreError, TimeoutError):  # then `Fleet.run` goes on trying
                async with asyncio.timeout(FIRST_VIEW_TIMEOUT_S):
                    await gateway.scopes.adopt(store)
                    await gateway.key_store.refresh()
                    await gateway.budgets.refresh()
                    await gateway.sharing.enter()
                    for model in gateway.models.values():
                        await model.fleet.refresh()
            for model in gateway.models.values():
                model.start()
            tasks = [asyncio.create_task(keep_going(name, work)) for name, work in gateway._work().items()]
            with contextlib.suppress(TimeoutError):  # the other gateways make room for this one
                await asyncio.wait_for(gateway.sharing.entered.wait(), FIRST_VIEW_TIMEOUT_S)
            if config.models is not None and threading.current_thread() is threading.main_thread():
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.hang_up)
            yield gateway
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *(model.stop() for model in gateway.models.values()), return_exceptions=True)
            with contextlib.suppress(StoreError, RecordError):
                await gateway.budgets.save()
            await gateway.sharing.leave()
            for model in gateway.models.values():
                await model.close()
            for served in gateway.upstreams.values():
                await _closing(served)()
            for task in list(gateway._retiring):
                task.cancel()
            await asyncio.gather(*gateway._retiring, return_exceptions=True)
            await asyncio.to_thread(gateway.desk.close)
            await store.close()
            await asyncio.to_thread(close_watchers)

    def _work(self) -> dict[str, Callable[[], Awaitable[None]]]:
        work: dict[str, Callable[[], Awaitable[None]]] = {
            "sweeper": self._sweep_forever,
            "keys": self.key_store.run,
            "limits": self.sharing.run,
            "budgets": self.budgets.run,
            "files": self._reload_forever,
            "cache scopes": lambda: self.scopes.keep_adopting(self.store),
            "metrics page": self.pages.serve,
        }
        if self.config.run_coordinator:
            work |= {"ledger": self.ledger.run, "webhooks": self.webhooks.run}
        return work

    async def _sweep_forever(self) -> None:
        """Ends what is over its time. One timer for all connections costs less than one timer each."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now = time.monotonic()
            for client in list(self.clients):
                client.sweep(now)
            for served in self.directory.models.values():
                served.sweep(now)

    async def _reload_forever(self) -> None:
        """Takes in files that were changed: keys, and the certificate."""
        while True:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            self.key_files.reload()


def _closing(served: Served) -> Callable[[], Awaitable[None]]:
    async def close() -> None:
        served.gate.close()
        served.fleet.close()

    return close
