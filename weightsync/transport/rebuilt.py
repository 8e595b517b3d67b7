"""A library that is started anew whenever its process has ended, with the same regions registered."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from weightsync.errors import TransportUnavailable
from weightsync.transport.messages import Forget, Register, Settings
from weightsync.transport.shared import Shared
from weightsync.transport.worker import START_TIMEOUT_S, Worker, WorkerFailed, WorkerLost

REGISTER_GBPS = 0.5  # at worst: pages are pinned one by one


class Rebuilt:
    """One at a time. Where a method may have to start it, it raises TransportUnavailable."""

    def __init__(self, settings: Settings, advice: str) -> None:
        self._settings, self._advice = settings, advice
        self._lock = threading.Lock()  # held while it starts; of all below
        self._worker: Worker | None = None
        self._shared: dict[int, Shared] = {}
        self._descriptors: dict[int, bytes] = {}
        self._closed = False

    def worker(self) -> Worker:
        """One that runs."""
        with self._lock:
            return self._running()

    def add(self, region: int, shared: Shared) -> None:
        with self._lock:
            self._descriptors[region] = self._registered(self._running(), region, shared)
            self._shared[region] = shared

    def remove(self, region: int) -> None:
        """Returns when the library cannot reach the region any more. No process is started for that."""
        with self._lock:
            self._shared.pop(region, None)
            known = self._descriptors.pop(region, None)
            worker = self._worker
            if known is None or worker is None or worker.lost:
                return
            try:
                worker.submit(Forget(worker.number(), region)).result(START_TIMEOUT_S)
            except (WorkerFailed, WorkerLost, TimeoutError):
                worker.kill()

    def descriptor(self, region: int) -> bytes:
        """What readers need to know of a region now."""
        with self._lock:
            self._running()
            return self._descriptors[region]

    def stop(self) -> None:
        """End the process, which ends all reads; the next one starts another."""
        worker = self._worker
        if worker is not None:
            worker.kill()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._worker is not None:
                self._worker.kill()

    def _running(self) -> Worker:
        if self._closed:
            raise TransportUnavailable(self._settings.engine, "it was closed", "Open it again")
        if self._worker is None or self._worker.lost:
            self._worker = worker = Worker(self._settings, self._advice)
            self._descriptors = {n: self._registered(worker, n, shared) for n, shared in self._shared.items()}
        return self._worker

    def _registered(self, worker: Worker, region: int, shared: Shared) -> bytes:
        request = Register(worker.number(), region, shared.offset, shared.nbytes)
        answer: Future[bytes] = worker.submit(request, [shared.fd])
        try:
            return answer.result(START_TIMEOUT_S + shared.nbytes / 1e9 / REGISTER_GBPS)
        except (WorkerFailed, WorkerLost, TimeoutError) as error:
            worker.kill()
            reason = f"{shared.nbytes:,} bytes could not be registered ({str(error) or 'not done in time'})"
            raise TransportUnavailable(self._settings.engine, reason, self._advice) from error
