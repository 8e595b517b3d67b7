"""NIXL, a library for reads over RDMA, in processes of its own (nixl_process.py): one that serves, one that reads.

It cannot work in the process that uses it. After a read that was given up it writes what arrives late, although the
transfer was released. And UCX ends the process that serves (SIGABRT) when that process was frozen, wakes, and its
reader is gone. Therefore a read that fails ends the process that reads: when `read` raises, the kernel has removed its
mappings, sockets and RDMA queues. The process that serves others stays. A buffer can be registered if it is a mapping
of a file, as slots are.

    NixlTransport, NixlRegion, NixlLink    the transport
    Rebuilt                                NIXL, started again after its process has ended
    Worker                                 one such process, from the side of its parent
    Shared                                 the file behind a mapping, which both processes map
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from weightsync.errors import PeerUnreachable, TransportUnavailable, transfer_failed, transfer_timed_out
from weightsync.memory.arena import address_of
from weightsync.transport.addresses import Address, rdma_devices
from weightsync.transport.nixl_process import (
    BATCH,
    MAX_NBYTES,
    REPLIES,
    Failed,
    Forget,
    Read,
    Register,
    Request,
    Settings,
    encode,
)
from weightsync.transport.protocol import Buffer, Closed, Piece, Region, Transport, Uses, bytes_of, check_pieces

log = logging.getLogger("hotswap.transport")

NAME: Final[Literal["nixl"]] = "nixl"
ADVICE: Final = "Install nixl-cu12 (nixl-cu13 with CUDA 13) as pinned in requirements/; or use tcp"
REGISTER_GBPS = 0.5  # at worst: pages are pinned one by one

START_TIMEOUT_S = 60.0


class NixlEndpoint(msgspec.Struct, frozen=True):
    """The owner; the way to it is in the descriptor of each region."""

    peer: str
    engine: Literal["nixl"] = NAME
    data: bytes = b""  # what peers of another release may want


class NixlDescriptor(msgspec.Struct, frozen=True):
    nbytes: int
    data: bytes
    engine: Literal["nixl"] = NAME


class NixlRegion:
    """As Region. A writable one is registered twice: with the process that serves, and with the one that reads."""

    def __init__(self, transport: NixlTransport, number: int, shared: Shared, *, writable: bool) -> None:
        self.number, self.nbytes, self.writable, self.uses = number, shared.nbytes, writable, Uses()
        self._transport, self._shared = transport, shared
        self._processes = [transport.serving, transport.reading] if writable else [transport.serving]
        try:
            for process in self._processes:
                process.add(number, shared)
        except BaseException:
            self.close()
            raise

    @property
    def descriptor(self) -> bytes:
        """As in Region; another one when the serving process was started anew."""
        known = self._transport.serving.descriptor(self.number)
        return msgspec.msgpack.encode(NixlDescriptor(self.nbytes, known))

    def close(self) -> None:
        self.uses.close()
        for process in self._processes:
            process.remove(self.number)
        self._shared.close()


class NixlLink:
    """As Link. All links read in the same process: what stops one read stops the others too."""

    def __init__(self, reading: Rebuilt, peer: str) -> None:
        self._reading, self._peer, self._uses = reading, peer, Uses()

    def read(self, into: Region, remote: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        """As in Link. If the process must be started first, that does not count."""
        assert isinstance(into, NixlRegion), "a region of another transport"
        assert into.writable, "a region that was not registered as writable"
        peer = self._peer
        try:
            region = msgspec.msgpack.decode(remote, type=NixlDescriptor)
        except msgspec.DecodeError as error:
            raise transfer_failed(peer, "its region is of another transport") from error
        check_pieces(peer, pieces, into.nbytes, region.nbytes)
        try:
            with self._uses.use(self._reading.stop), into.uses.use(self._reading.stop):
                self._read(into, region.data, [piece for piece in pieces if piece.nbytes], timeout_s)
        except Closed:
            raise transfer_failed(peer, "the region or the link is closed") from None

    def close(self) -> None:
        self._uses.close()

    def _read(self, into: NixlRegion, remote: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        peer = self._peer
        try:
            worker = self._reading.worker()
        except TransportUnavailable as error:
            raise transfer_failed(peer, str(error)) from error
        if into.uses.closed or self._uses.closed:
            raise Closed
        settled = False
        try:
            futures = [worker.submit(Read(worker.number(), into.number, remote, batch)) for batch in _batches(pieces)]
            done, waiting = wait(futures, timeout_s, FIRST_EXCEPTION)
            failure = next(filter(None, (future.exception() for future in done)), None)
            settled = failure is None and not waiting
        finally:
            if not settled:  # an interrupt too
                worker.kill()
        if failure is not None:
            raise transfer_failed(peer, str(failure)) from failure
        if waiting:
            raise transfer_timed_out(peer, timeout_s)


class NixlTransport(Transport):
    """As Transport. Raises TransportUnavailable when the library is not there or does not start."""

    name = NAME

    def __init__(self, listen: Address) -> None:
        self._host = listen.reachable
        rdma = bool(rdma_devices())
        self.serving, self.reading = (
            Rebuilt(Settings(listen.reachable, serve=serve, rdma=rdma, parent=os.getpid())) for serve in (True, False)
        )
        self._numbers = itertools.count(1)
        self._regions: weakref.WeakSet[NixlRegion] = weakref.WeakSet()
        self._links: weakref.WeakSet[NixlLink] = weakref.WeakSet()
        self.serving.worker()

    @property
    def endpoint(self) -> bytes:
        self.serving.worker()
        return msgspec.msgpack.encode(NixlEndpoint(self._host))

    def register(self, buffer: Buffer, *, writable: bool) -> NixlRegion:
        """As in Transport. Raises ValueError for a buffer that is no shared mapping of a file; TransportUnavailable."""
        view = bytes_of(buffer, writable=writable)
        # RDMA pins for writing, what is only served as well.
        shared = Shared.of(view, writable=writable or bool(rdma_devices()))
        region = NixlRegion(self, next(self._numbers), shared, writable=writable)
        self._regions.add(region)
        return region

    def connect(self, endpoint: bytes) -> NixlLink:
        """As in Transport; a peer that is gone may be noticed at the first read only."""
        try:
            found = msgspec.msgpack.decode(endpoint, type=NixlEndpoint)
        except msgspec.DecodeError as error:
            raise PeerUnreachable("?", "its endpoint is of another transport") from error
        link = NixlLink(self.reading, found.peer)
        self._links.add(link)
        return link

    def close(self) -> None:
        for process in (self.reading, self.serving):
            process.close()
        for link in list(self._links):
            link.close()
        for region in list(self._regions):
            region.close()


def _batches(pieces: Sequence[Piece]) -> list[list[tuple[int, int, int]]]:
    all_of_them = [(piece.local_offset, piece.remote_offset, piece.nbytes) for piece in pieces]
    return [all_of_them[start : start + BATCH] for start in range(0, len(all_of_them), BATCH)]


class Rebuilt:
    """NIXL, started again, with the same regions registered, after its process has ended.

    There is one process at a time. A method that may have to start it raises TransportUnavailable.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
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
            except OSError:
                worker.kill()

    def descriptor(self, region: int) -> bytes:
        """The descriptor that readers need of a region now."""
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
            raise TransportUnavailable(NAME, "it was closed", "Open it again")
        if self._worker is None or self._worker.lost:
            self._worker = worker = Worker(self._settings)
            self._descriptors = {n: self._registered(worker, n, shared) for n, shared in self._shared.items()}
        return self._worker

    def _registered(self, worker: Worker, region: int, shared: Shared) -> bytes:
        request = Register(worker.number(), region, shared.offset, shared.nbytes)
        answer: Future[bytes] = worker.submit(request, [shared.fd])
        try:
            return answer.result(START_TIMEOUT_S + shared.nbytes / 1e9 / REGISTER_GBPS)
        except OSError as error:
            worker.kill()
            reason = f"{shared.nbytes:,} bytes could not be registered ({str(error) or 'not done in time'})"
            raise TransportUnavailable(NAME, reason, ADVICE) from error


class Worker:
    """One process with a library in it. The constructor starts it and returns when the library works.

    Raises TransportUnavailable.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._numbers = settings, itertools.count(1)
        self._channel, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()  # of the three below
        self._pending: dict[int, Future[bytes]] = {0: Future()}
        self._lost = False
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `_last_words` closes it
        started = self._pending[0]
        # The kernel ends the process when the thread that started it ends: this one, which lives as long as it.
        self._thread = threading.Thread(target=self._run, name="transport-nixl", daemon=True)
        self._thread.start()
        try:
            started.result(START_TIMEOUT_S)
        except OSError as error:
            self.kill()
            reason = str(error) or f"it did not start within {START_TIMEOUT_S:g} s"
            raise TransportUnavailable(NAME, reason, ADVICE) from error

    def submit(self, request: Request, fds: Sequence[int] = ()) -> Future[bytes]:
        """`request.id` is from `number`. The future raises OSError: the library refused, or the process
        has ended, killed by us or by itself."""
        future: Future[bytes] = Future()
        with self._lock:
            if self._lost:
                future.set_exception(ConnectionError("its process has ended"))
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
            log.error("a process for NIXL could not be started: %s", error)
        finally:
            self._end()

    def _spawn(self) -> subprocess.Popen[bytes]:
        arguments = [msgspec.json.encode(self._settings).decode(), str(self._far.fileno())]
        return subprocess.Popen(
            [sys.executable, "-m", "weightsync.transport.nixl_process", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            pass_fds=[self._far.fileno()],
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
            future.set_exception(OSError(reply.reason))
        else:
            future.set_result(reply.data)

    def _end(self) -> None:
        """Reap the process, whatever ended it, and then tell those who wait."""
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
            log.warning("nixl: %s", reason)
        for future in pending:
            future.set_exception(ConnectionError(reason))

    def _last_words(self) -> str:
        """The end of what the library has written to stderr, on one line."""
        with self._said as said:
            said.seek(max(0, said.seek(0, os.SEEK_END) - 300))
            lines = said.read().decode(errors="replace").split("\n")
        return "".join(f"; {line.strip()}" for line in lines[-3:] if line.strip())


@dataclass
class Shared:
    """`nbytes` bytes at `offset` of a file, so that another process can map the same memory.

    The file stays open until `close`, even if it is deleted.
    """

    fd: int
    offset: int
    nbytes: int
    _closed: bool = field(default=False, init=False)

    @classmethod
    def of(cls, view: memoryview, *, writable: bool) -> Shared:
        """Raises ValueError unless the bytes are a shared mapping of a file that this process has open, as Python's
        mmap objects of files are, memfds and deleted ones too."""
        device, inode, offset = _mapped(address_of(view), view.nbytes)
        for entry in os.listdir("/proc/self/fd"):
            try:
                found = os.stat(f"/proc/self/fd/{entry}")
            except OSError:  # closed meanwhile
                continue
            if (found.st_ino, os.major(found.st_dev), os.minor(found.st_dev)) == (inode, *device):
                # A description of its own: nobody's lock is carried into the other process.
                mode = os.O_RDWR if writable else os.O_RDONLY
                return cls(os.open(f"/proc/self/fd/{entry}", mode | os.O_CLOEXEC), offset, view.nbytes)
        raise ValueError("the file that the buffer is a mapping of is not open: keep the mmap object")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self.fd)


def _mapped(start: int, nbytes: int) -> tuple[tuple[int, int], int, int]:
    """Device, inode and offset in the file of the bytes at an address. They may lie in several mappings in a row."""
    first: tuple[tuple[int, int], int, int] | None = None
    reached = start
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, flags, offset, device, inode, *_ = line.split()
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if not low <= reached < high:
            continue
        major, minor = (int(number, 16) for number in device.split(":"))
        found = ((major, minor), int(inode), int(offset, 16) + reached - low - (reached - start))
        if flags[3] != "s" or inode == "0" or (first is not None and found != first):
            break
        first, reached = found, high
        if reached >= start + nbytes:
            return found
    raise ValueError("only a shared mapping of a file (in /dev/shm) can be registered with this transport")
