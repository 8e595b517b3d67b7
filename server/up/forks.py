"""Processes forked from one that has imported their libraries, which saves each its imports.

`python -m server.up.forks FD MODULE:FUNCTION` is such a fork server: it calls the function, which imports, and forks
what it is ordered to. FD is a connection, with which it ends, or a socket that listens for connections. A forked
process is `python -m ARGS` as it is otherwise: a group, a log, an environment and descriptors of its own. It is told to
end when the connection that ordered it ends, and when the fork server does.

Orders and answers are JSON, a packet each. Only a caller that wants a process id or an exit status waits for an
answer: a fork server that still imports has its orders queued.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightsync.dying import die_with, with_me

MOST = 1 << 20  # bytes of a packet
DESCRIPTORS = 16
POLL_S = 0.01


class Forked:
    """A process that a fork server has forked, with those parts of a subprocess.Popen that callers use."""

    def __init__(self, forks: Forks, number: int, args: Sequence[str]) -> None:
        self._forks, self._number, self.args = forks, number, args
        self.returncode: int | None = None
        self.started: int | None = None  # its process id, when that is known
        self.wanted = True

    @property
    def pid(self) -> int:
        """Waits for it. Raises ProcessLookupError where the fork server has ended and forked nothing."""
        while self.poll() is None and self.started is None:
            time.sleep(POLL_S)
        if self.started is None:
            raise ProcessLookupError(f"{' '.join(self.args)} was never started: the fork server has ended")
        return self.started

    def poll(self) -> int | None:
        if self.returncode is None:
            self._forks.look()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Also to one that is yet to be forked."""
        if self.poll() is None:
            self._forks.order({"signal": number, "process": self._number})

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """A connection to a fork server. The processes forked for it get the signal `ends` when the connection ends."""

    def __init__(self, connection: socket.socket, server: subprocess.Popen[bytes] | None = None) -> None:
        """`server`: the process, if it serves this connection alone."""
        self._socket, self._server, self._lock = connection, server, threading.RLock()
        self._processes: dict[int, Forked] = {}
        self.ready = False  # it has imported what it is to import
        self.ended = False

    def start(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        inherited: Sequence[int] | Mapping[int, int] = (),
        errors: Path | None = None,
    ) -> Forked:
        """Order `python -m ARGS`. Its errors go to the log as well, unless `errors` is given.

        `inherited`: descriptors that it has open too, or {the number that it has there: the one here}.
        """
        given = inherited if isinstance(inherited, Mapping) else {number: number for number in inherited}
        with self._lock:
            number = len(self._processes) + 1
            process = self._processes[number] = Forked(self, number, list(args))
        files = {"log": str(log), "errors": str(errors or log), "cwd": os.getcwd()}
        what = {"args": list(args), "env": dict(env), "inherited": list(given), **files}
        try:
            self.order({"start": number, **what}, list(given.values()))
        except BaseException:
            process.wanted = False  # by nobody: it is killed when it is there
            raise
        return process

    def order(self, what: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Nothing, where the fork server has ended."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if not self.ended:
                socket.send_fds(self._socket, [json.dumps(what).encode()], list(descriptors))

    def look(self) -> bool:
        """Take what the fork server has answered by now; returns whether it has ended."""
        with self._lock:
            answers = select.poll()  # select() takes no descriptor beyond 1,023
            if not self.ended:
                answers.register(self._socket, select.POLLIN)
            while not self.ended and answers.poll(0):
                try:
                    raw = self._socket.recv(MOST)
                except ConnectionResetError:
                    raw = b""
                if raw:
                    self._take(json.loads(raw))
                else:
                    self.ended = True
            if self.ended:
                for process in self._processes.values():
                    if process.returncode is None and not _runs(process.started):
                        process.returncode = -signal.SIGTERM
            return self.ended

    def _take(self, answer: dict[str, Any]) -> None:
        if "process" not in answer:
            self.ready = True
            return
        process = self._processes[answer["process"]]
        process.started, process.returncode = answer["pid"], answer["status"]
        if not process.wanted:
            process.kill()

    def stop(self) -> None:
        """End the fork server, and with it what it has forked."""
        self._socket.close()
        self.ended = True
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()


def _runs(pid: int | None) -> bool:
    """Whether there is such a process; one that has ended and is yet to be collected is none."""
    if pid is None:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def begin(prepare: str, log: Path, env: Mapping[str, str] | None = None, inherited: Sequence[int] = ()) -> Forks:
    """Start a fork server of this process's own. `prepare`: MODULE:FUNCTION. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, log.open("ab") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "server.up.forks", str(theirs.fileno()), prepare],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            pass_fds=[theirs.fileno(), *inherited],
            preexec_fn=with_me(),
        )
    return Forks(ours, server)


@dataclass
class Connection:
    """Of one who orders: the process ids of what runs for it, by number."""

    orders: socket.socket
    running: dict[int, int] = field(default_factory=dict)

    def tell(self, **answer: Any) -> None:
        """Nothing, to one that has gone."""
        with contextlib.suppress(OSError):
            self.orders.send(json.dumps(answer).encode())


@dataclass(frozen=True)
class Child:
    """A forked process; `end` is a descriptor that can be read when it has ended."""

    connection: Connection
    number: int
    pid: int
    end: int

    def collect(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        del self.connection.running[self.number]
        os.close(self.end)
        self.connection.tell(process=self.number, pid=self.pid, status=os.waitstatus_to_exitcode(status))


class ForkServer:
    """In the fork server: forks what is ordered, until the last connection ends, or for ever if it listens."""

    def __init__(self, own: socket.socket, ends: int) -> None:
        """`ends`: the signal to what runs for a connection that ends."""
        self._selector, self._ends = selectors.DefaultSelector(), ends
        self._listens = bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        self._own = own

    def serve(self, prepare: Callable[[], None]) -> Mapping[str, Any] | None:
        """Returns in the forked processes, with the order; and at the end, with None."""
        first = self._own.accept()[0] if self._listens else self._own  # nothing is imported for nobody
        prepare()
        gc.freeze()  # a collection would write to pages that all of them share
        if self._listens:
            self._selector.register(self._own, selectors.EVENT_READ)
        self._connect(first)
        while len(self._selector.get_map()):
            for key, _ in self._selector.select():
                if isinstance(key.data, Child):
                    self._selector.unregister(key.fileobj)
                    key.data.collect()
                elif key.data is None:
                    self._connect(self._own.accept()[0])
                elif (order := self._follow(key.data)) is not None:
                    return order
        return None

    def _connect(self, connection: socket.socket) -> None:
        held = Connection(connection)
        self._selector.register(connection, selectors.EVENT_READ, held)
        held.tell(ready=True)

    def _follow(self, connection: Connection) -> Mapping[str, Any] | None:
        """One order; returned in the process that was forked for it."""
        try:
            raw, descriptors, _, _ = socket.recv_fds(connection.orders, MOST, DESCRIPTORS)
        except ConnectionResetError:  # it was killed before it had read an answer
            raw, descriptors = b"", []
        if not raw:
            for pid in connection.running.values():
                _signal(pid, self._ends, group=True)
            self._selector.unregister(connection.orders)
            connection.orders.close()
            return None
        order = json.loads(raw)
        if "signal" in order:
            if order["process"] in connection.running:
                _signal(connection.running[order["process"]], order["signal"])
            return None
        server = os.getpid()
        if not (forked := os.fork()):
            die_with(server)
            self._leave()
            return {**order, "descriptors": descriptors}
        connection.running[order["start"]] = forked
        child = Child(connection, order["start"], forked, os.pidfd_open(forked))
        self._selector.register(child.end, selectors.EVENT_READ, child)
        connection.tell(process=order["start"], pid=forked, status=None)
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _leave(self) -> None:
        """In a fork: close all that is the server's."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.detach()
        self._selector.close()


def _signal(pid: int, number: int, *, group: bool = False) -> None:
    """A process has no group of its own before it has become what was ordered, and has begun nothing by then."""
    for send in (os.killpg, os.kill) if group else (os.kill,):
        with contextlib.suppress(ProcessLookupError):
            send(pid, number)
            return


def become(order: Mapping[str, Any]) -> None:
    """In the fork: the process that was ordered. Returns, or raises, as its program does."""
    os.setsid()
    for descriptor, file in ((1, order["log"]), (2, order["errors"])):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    for here, there in zip(order["descriptors"], order["inherited"], strict=True):
        os.dup2(here, there, inheritable=True)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    command = [sys.executable, "-m", *order["args"]]
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(" ".join(command))
    sys.argv, sys.orig_argv = list(order["args"]), command  # with which an instance that starts over begins anew
    runpy.run_module(order["args"][0], run_name="__main__", alter_sys=True)


def main(descriptor: int, prepare: str, ends: int = signal.SIGTERM) -> None:
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.getproctitle()  # it finds the memory of the title only while the environment is what it was
    module, _, function = prepare.partition(":")
    own = socket.socket(fileno=descriptor)  # open until an exception of the import stands in the log
    order = ForkServer(own, ends).serve(getattr(importlib.import_module(module), function))
    if order is not None:
        become(order)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
