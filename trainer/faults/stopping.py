"""SIGTERM: save and leave. It is noticed even while the main thread waits in a collective.

A launcher also sends SIGTERM to the ranks that are left when one has failed; those must not try to save, their peers
are gone. `hotswap train` as a launcher tells the two apart with a file (`restarts.py`).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

STATUS = 128 + signal.SIGTERM


class Stopping:
    """Installs itself for SIGTERM; built in the main thread. `give_up` says whether to leave at once."""

    def __init__(self, grace_s: float, give_up: Callable[[], bool]) -> None:
        self._grace_s, self._give_up = grace_s, give_up
        self._requested = threading.Event()
        self._done = threading.Event()
        self._wake, self._noticed = socket.socketpair()
        for end in (self._wake, self._noticed):
            end.setblocking(False)
        self._before = signal.signal(signal.SIGTERM, lambda *_: None)
        # Written to by the interpreter's own handler, in whatever call the main thread is.
        self._fd_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="sigterm", daemon=True)
        self._thread.start()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def close(self) -> None:
        """As it was before."""
        signal.set_wakeup_fd(self._fd_before)
        signal.signal(signal.SIGTERM, self._before)
        self._done.set()
        self._wake.send(b"\0")
        self._thread.join()
        self._wake.close()
        self._noticed.close()

    def _run(self) -> None:
        self._noticed.setblocking(True)
        while not self._done.is_set():
            received = self._noticed.recv(64)
            if signal.SIGTERM in received:
                self._leave()

    def _leave(self) -> None:
        if self._give_up():
            os._exit(STATUS)
        self._requested.set()
        if not self._done.wait(self._grace_s):
            print(f"error: not ready to leave {self._grace_s:g} s after SIGTERM; leaving.", file=sys.stderr, flush=True)
            os._exit(STATUS)
