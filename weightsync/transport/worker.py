"""A process with a library in it, from the side of its parent."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec

from weightsync.errors import TransportUnavailable
from weightsync.transport.messages import MAX_NBYTES, REPLIES, Failed, Request, Settings, encode

log = logging.getLogger("hotswap.transport")

START_TIMEOUT_S = 60.0
UNPACKED = Path(sys.prefix) / "mooncake"  # by scripts/debian.sh, where it may not install
LIBRARIES = [UNPACKED / root / f"{platform.machine()}-linux-gnu" for root in ("usr/lib", "lib")]


class WorkerFailed(Exception):
    """The library refused; the process goes on."""


class WorkerLost(Exception):
    """The process has ended, killed by us or by itself."""


class Worker:
    """Started by the constructor, which returns when the library works. Raises TransportUnavailable."""

    def __init__(self, settings: Settings, advice: str) -> None:
        self._settings, self._numbers = settings, itertools.count(1)
        self._channel, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()  # of the three below
        self._pending: dict[int, Future[bytes]] = {0: Future()}
        self._lost = False
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `_last_words` closes it
        started = self._pending[0]
        # The kernel ends the process when the thread that started it ends: this one, which lives as long as it.
        self._thread = threading.Thread(target=self._run, name=f"transport-{settings.engine}", daemon=True)
        self._thread.start()
        try:
            self.endpoint = started.result(START_TIMEOUT_S)
        except (WorkerFailed, WorkerLost, TimeoutError) as error:
            self.kill()
            reason = str(error) or f"it did not start within {START_TIMEOUT_S:g} s"
            raise TransportUnavailable(settings.engine, reason, advice) from error

    def submit(self, request: Request, fds: Sequence[int] = ()) -> Future[bytes]:
        """`request.id` is from `number`. The future raises WorkerFailed or WorkerLost."""
        future: Future[bytes] = Future()
        with self._lock:
            if self._lost:
                future.set_exception(WorkerLost("its process has ended"))
                return future
            self._pending[request.id] = future
        with contextlib.suppress(OSError):  # the process is gone: `_run` says so to whoever waits
            socket.send_fds(self._channel, [encode(request)], fds)
        return future

    def number(self) -> int:
        return next(self._numbers)

    @property
    def lost(self) -> bool:
        return self._lost

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """When it returns, the process is gone, and its mappings and sockets with it. Twice is fine."""
        with self._lock:
            process = self._process
            self._lost = True
        if process is not None:
            process.kill()
            process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._far, self._lock:
                if not self._lost:
                    self._process = self._spawn()
            while self._process is not None and (data := self._receive()):
                self._settle(data)
        except OSError as error:
            log.error("a process for %s could not be started: %s", self._settings.engine, error)
        finally:
            self._end()

    def _spawn(self) -> subprocess.Popen[bytes]:
        unpacked = [str(directory) for directory in LIBRARIES if directory.is_dir()]
        paths = filter(None, [os.environ.get("LD_LIBRARY_PATH"), *unpacked])
        arguments = [msgspec.json.encode(self._settings).decode(), str(self._far.fileno())]
        return subprocess.Popen(
            [sys.executable, "-m", "weightsync.transport.child", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            pass_fds=[self._far.fileno()],
            env=os.environ | ({"LD_LIBRARY_PATH": joined} if (joined := ":".join(paths)) else {}),
            process_group=0,
        )

    def _receive(self) -> bytes:
        try:
            return self._channel.recv(MAX_NBYTES)
        except ConnectionResetError:
            return b""

    def _settle(self, data: bytes) -> None:
        reply = REPLIES.decode(data)
        with self._lock:
            future = self._pending.pop(reply.id)
        if isinstance(reply, Failed):
            future.set_exception(WorkerFailed(reply.reason))
        else:
            future.set_result(reply.data)

    def _end(self) -> None:
        """Whatever ended it: the process is reaped, and then those who wait are told."""
        with self._lock:
            wanted, self._lost = self._lost, True
            process, pending = self._process, list(self._pending.values())
            self._pending.clear()
        if process is not None and process.poll() is None:
            process.kill()
        status = process.wait() if process is not None else None
        self._channel.close()
        reason = f"its process has ended (status {status}){self._last_words()}"
        if status and not wanted:
            log.warning("%s: %s", self._settings.engine, reason)
        for future in pending:
            future.set_exception(WorkerLost(reason))

    def _last_words(self) -> str:
        """The end of what the library has written to stderr, on one line."""
        with self._said as said:
            said.seek(max(0, said.seek(0, os.SEEK_END) - 300))
            lines = said.read().decode(errors="replace").split("\n")
        return "".join(f"; {line.strip()}" for line in lines[-3:] if line.strip())
