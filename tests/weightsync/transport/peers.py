"""Peers in processes of their own, which are killed, frozen and thawed with all that they have started.

A peer runs this module: NAME SEED NBYTES TLS_DIRECTORY.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor

import psutil

from tests.lacking import lacking
from tests.waiting import wait_until
from tests.warm import SYNC, piped
from weightsync.errors import WeightSyncError
from weightsync.tls import ClusterTls
from weightsync.transport import Piece, Region, Transport, available, open_transport

MIB = 1 << 20
NBYTES = 16 * MIB
LISTEN = "127.0.0.1"
READ_TIMEOUT_S = 60.0  # a guard


def require(name: str, _found: dict[str, str] = {}) -> None:  # noqa: B006 - asked once per run
    """Skips the test where the library is not there; in CI that is a failure."""
    if not _found:
        _found.update(available())
    if _found[name]:
        lacking(_found[name])


def content(seed: int, nbytes: int = NBYTES) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def buffer(nbytes: int = NBYTES) -> mmap.mmap:
    """Shared memory, of zeros."""
    fd = os.memfd_create("hotswap-test")
    try:
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


class Peer:
    """Serves `content(seed)`. Use as a context."""

    def __init__(self, name: str, seed: int = 1, nbytes: int = NBYTES, tls: str = "") -> None:
        self.content = content(seed, nbytes)
        read_end, write_end = os.pipe()
        args = ["tests.weightsync.transport.peers", name, str(seed), str(nbytes), tls]
        self.process, self._answers = piped(SYNC, args, stdin=read_end)
        os.close(read_end)
        self._questions = write_end
        self._ask()  # returns when it serves

    @property
    def endpoint(self) -> bytes:
        """As of now; not of a peer that is frozen or dead."""
        return self._ask()[0]

    @property
    def region(self) -> bytes:
        """As `endpoint`."""
        return self._ask()[1]

    def _ask(self) -> tuple[bytes, bytes]:
        os.write(self._questions, b"\n")
        endpoint, region = self._answers.readline().decode().split()
        return bytes.fromhex(endpoint), bytes.fromhex(region)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        family = self.family()
        for process in family:
            process.kill()
        psutil.wait_procs(family, timeout=30)
        self.process.wait(60)
        os.close(self._questions)
        self._answers.close()

    def family(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def freeze(self) -> None:
        """Returns when every thread stands still."""
        for process in self.family():
            process.send_signal(signal.SIGSTOP)
        for process in self.family():
            wait_until(lambda process=process: process.status() == psutil.STATUS_STOPPED)

    def thaw(self) -> None:
        for process in self.family():
            process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Only the process itself: what it has started must end with it."""
        family = self.family()
        self.process.kill()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive


class Reads:
    """Reads all of a peer again and again, in a thread, until that raises."""

    def __init__(self, transport: Transport, peer: Peer, into: Region, timeout_s: float) -> None:
        self.count = 0
        self._into, self._timeout_s = into, timeout_s
        self._link, self._remote, self._piece = transport.connect(peer.endpoint), peer.region, whole(peer)
        self._pool = ThreadPoolExecutor(1)
        self._done: Future[None] = self._pool.submit(self._loop)

    def _loop(self) -> None:
        while True:
            self._link.read(self._into, self._remote, [self._piece], self._timeout_s)
            self.count += 1

    def under_way(self) -> None:
        """Returns in the middle of one: they follow each other without a pause."""
        wait_until(lambda: self.count > 0 or self._done.done(), READ_TIMEOUT_S)

    def error(self) -> WeightSyncError:
        """The error that it raised."""
        try:
            error = self._done.exception(READ_TIMEOUT_S)
            assert isinstance(error, WeightSyncError)
            return error
        finally:
            self._pool.shutdown()


def whole(peer: Peer) -> Piece:
    return Piece(0, 0, len(peer.content))


def read_all(transport: Transport, peer: Peer) -> bytes:
    """Through a link and into a buffer of its own."""
    target = buffer(len(peer.content))
    into, link = transport.register(target, writable=True), transport.connect(peer.endpoint)
    try:
        link.read(into, peer.region, [whole(peer)], READ_TIMEOUT_S)
        return target[:]
    finally:
        link.close()
        into.close()


def serve(name: str, seed: str, nbytes: str, tls: str) -> None:
    """Serves bytes, and says where for every line of its input, until that ends."""
    data = buffer(int(nbytes))
    data[:] = content(int(seed), int(nbytes))
    with open_transport(name, listen=LISTEN, tls=ClusterTls(tls) if tls else None) as transport:
        region = transport.register(data, writable=False)
        for _ in sys.stdin:
            print(transport.endpoint.hex(), region.descriptor.hex(), flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
