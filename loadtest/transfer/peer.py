"""One end of the transfer benchmark, in a process of its own.

serve NAME NBYTES TLS                        registers as many bytes, says where, and stays
receive NAME NBYTES TLS ENDPOINT REGION      reads them, once for every line of its input, and says how long it took
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import time
from collections.abc import Callable

import numpy as np
import xxhash

from weightsync.memory.arena import prefault
from weightsync.tls import ClusterTls
from weightsync.transport import Piece, Transport, open_transport

LISTEN = "127.0.0.1"
CHUNK = 32 << 20  # as a peer reads
READ_TIMEOUT_S = 120.0
RAW = "raw socket"  # what one connection without any of our code gives


def memory(nbytes: int) -> mmap.mmap:
    """As a slot: shared, and there."""
    fd = os.memfd_create("hotswap-transfer")
    os.posix_fallocate(fd, 0, nbytes)
    mapping = mmap.mmap(fd, nbytes)
    os.close(fd)
    prefault(mapping, write=True)
    return mapping


def opened(name: str, tls: str) -> Transport:
    return open_transport(name, listen=LISTEN, tls=ClusterTls(tls) if tls else None)


def serve(name: str, nbytes: int, tls: str) -> None:
    data = memory(nbytes)
    np.frombuffer(data, np.uint64)[:] = np.random.default_rng(1).integers(1 << 63, size=nbytes // 8, dtype=np.uint64)
    digest = xxhash.xxh3_128_hexdigest(data)
    if name == RAW:
        return serve_raw(data, digest)
    with opened(name, tls) as transport:
        region = transport.register(data, writable=False)
        print(transport.endpoint.hex(), region.descriptor.hex(), digest, flush=True)
        sys.stdin.read()
    return None


def serve_raw(data: mmap.mmap, digest: str) -> None:
    """To whoever connects, all of it for every byte that comes."""
    with socket.create_server((LISTEN, 0)) as server:
        print(f"{server.getsockname()[1]:08x}", "00", digest, flush=True)
        connection, _ = server.accept()
        while connection.recv(1):
            connection.sendall(data)


def receive(name: str, nbytes: int, tls: str, endpoint: str, region: str) -> None:
    target = memory(nbytes)
    if name == RAW:
        connection = socket.create_connection((LISTEN, int(endpoint, 16)))
        return rounds(target, lambda: receive_raw(connection, memoryview(target)))
    with opened(name, tls) as transport:
        into, link = transport.register(target, writable=True), transport.connect(bytes.fromhex(endpoint))
        remote, chunks = bytes.fromhex(region), [Piece(n, n, min(CHUNK, nbytes - n)) for n in range(0, nbytes, CHUNK)]

        def read() -> None:
            for chunk in chunks:
                link.read(into, remote, [chunk], READ_TIMEOUT_S)

        rounds(target, read)
    return None


def receive_raw(connection: socket.socket, view: memoryview) -> None:
    connection.sendall(b"\0")
    done = 0
    while done < len(view):
        done += connection.recv_into(view[done:])


def rounds(target: mmap.mmap, read: Callable[[], None]) -> None:
    """One to warm up and to look at the bytes, then one for every line."""
    read()
    print(xxhash.xxh3_128_hexdigest(target), flush=True)
    for _ in sys.stdin:
        started = time.monotonic()
        read()
        print(started, time.monotonic(), flush=True)


if __name__ == "__main__":
    _, what, name, nbytes, tls, *rest = sys.argv
    if what == "serve":
        serve(name, int(nbytes), tls)
    else:
        receive(name, int(nbytes), tls, *rest)
