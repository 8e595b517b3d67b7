"""Rules that every transport keeps to, with real peers that die and freeze."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.weightsync.codes import refused
from tests.weightsync.transport.peers import MIB, NBYTES, READ_TIMEOUT_S, Peer, Reads, buffer, read_all, whole
from weightsync.errors import PeerUnreachable, TransferError
from weightsync.transport import NAMES, Link, Piece, Transport


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece(1, 3, 5), Piece(101, MIB + 7, 2 * MIB + 1), Piece(4 * MIB + 1, 11, 1), Piece(9 * MIB - 1, 0, 0)],
        [Piece((999 - n) * 1000, n * 1000, 999) for n in range(1000)],
    ],
    ids=["odd offsets", "more pieces than a library takes at once"],
)
def test_bytes_arrive_where_they_belong(transport: Transport, healthy: Peer, pieces: list[Piece]) -> None:
    target = buffer()
    target[:] = b"\xaa" * NBYTES
    expected = bytearray(target)
    into = transport.register(target, writable=True)
    transport.connect(healthy.endpoint).read(into, healthy.region, pieces, READ_TIMEOUT_S)
    for p in pieces:
        expected[p.local_offset : p.local_offset + p.nbytes] = healthy.content[p.remote_offset :][: p.nbytes]
    assert target[:] == expected
    into.close()


@pytest.mark.sample(2)
def test_several_links_read_at_once(transport: Transport, healthy: Peer, other: Peer) -> None:
    target, quarter, peers = buffer(), NBYTES // 4, [healthy, other] * 2
    into = transport.register(target, writable=True)
    links = [(transport.connect(peer.endpoint), peer.region) for peer in (healthy, other)] * 2

    def read(n: int) -> None:
        link, region = links[n]
        link.read(into, region, [Piece(n * quarter, n * quarter, quarter)], READ_TIMEOUT_S)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    assert target[:] == b"".join(peer.content[n * quarter :][:quarter] for n, peer in enumerate(peers))
    into.close()


def test_a_piece_out_of_range_is_refused(transport: Transport, healthy: Peer) -> None:
    target = buffer(MIB)
    into, link = transport.register(target, writable=True), transport.connect(healthy.endpoint)
    for piece in (Piece(0, NBYTES - 1, 2), Piece(MIB - 1, 0, 2), Piece(0, 1 << 62, 1), Piece(1 << 62, 0, 1)):
        with refused("transfer_failed", match="beyond"):
            link.read(into, healthy.region, [Piece(0, 0, 1), piece], READ_TIMEOUT_S)
    assert target[:] == bytes(MIB)
    link.read(into, healthy.region, [Piece(0, 0, MIB)], READ_TIMEOUT_S)
    assert target[:] == healthy.content[:MIB]
    into.close()


def test_a_region_or_endpoint_of_something_else_is_refused(name: str, transport: Transport, healthy: Peer) -> None:
    target = buffer(MIB)
    into, link = transport.register(target, writable=True), transport.connect(healthy.endpoint)
    with refused("transfer_failed", match="another transport"):
        link.read(into, b"nothing of the kind", [Piece(0, 0, 1)], READ_TIMEOUT_S)
    with pytest.raises(PeerUnreachable, match="another transport"):
        transport.connect(b"nothing of the kind")
    assert target[:] == bytes(MIB)
    into.close()


def test_what_is_read_only_or_closed_is_not_read_into(transport: Transport, healthy: Peer) -> None:
    target = buffer(MIB)
    link = transport.connect(healthy.endpoint)
    into = transport.register(target, writable=True)
    into.close()
    into.close()
    with refused("transfer_failed", match="closed"):
        link.read(into, healthy.region, [Piece(0, 0, 1)], READ_TIMEOUT_S)
    target.close()  # nothing holds the buffer any more
    with pytest.raises(ValueError, match="writable"):
        transport.register(memoryview(buffer(MIB)).toreadonly(), writable=True)
    link.close()
    into = transport.register(buffer(MIB), writable=True)
    with refused("transfer_failed", match="closed"):
        link.read(into, healthy.region, [Piece(0, 0, 1)], READ_TIMEOUT_S)
    into.close()


def test_a_peer_killed_in_the_middle_of_a_read(name: str, transport: Transport, healthy: Peer) -> None:
    with Peer(name) as peer:
        into = transport.register(buffer(), writable=True)
        reads = Reads(transport, peer, into, READ_TIMEOUT_S)
        reads.under_way()
        peer.kill()
        assert reads.error().code == "transfer_failed"
        into.close()
    assert read_all(transport, healthy) == healthy.content


def read_again(transport: Transport, peer: Peer) -> bytes:
    """The first read may still meet the connection that was cut; its error says what to do."""
    with contextlib.suppress(TransferError):
        return read_all(transport, peer)
    return read_all(transport, peer)


@pytest.mark.sample(2)
def test_a_peer_frozen_in_the_middle_of_a_read_writes_nothing_when_it_wakes(
    transport: Transport, healthy: Peer, other: Peer
) -> None:
    target = buffer()
    into = transport.register(target, writable=True)
    reads = Reads(transport, other, into, timeout_s=1.0)
    reads.under_way()
    other.freeze()
    assert reads.error().code == "transfer_timed_out"
    target[:] = b"\xaa" * NBYTES
    assert read_all(transport, healthy) == healthy.content  # while it is frozen
    other.thaw()
    # Bytes that it had still to send went out before these, which it sends when it is awake.
    assert read_again(transport, other) == other.content
    assert target[:] == b"\xaa" * NBYTES
    transport.connect(other.endpoint).read(into, other.region, [whole(other)], READ_TIMEOUT_S)
    assert target[:] == other.content
    into.close()


def test_closing_ends_a_read_from_a_frozen_peer(transport: Transport, other: Peer) -> None:
    target = buffer()
    into, remote = transport.register(target, writable=True), other.region
    links = [transport.connect(other.endpoint) for _ in range(2)]
    links[0].read(into, remote, [whole(other)], READ_TIMEOUT_S)
    other.freeze()
    with ThreadPoolExecutor(1) as pool:
        for link, closing in ((links[0], links[0]), (links[1], into)):
            began = threading.Event()

            def read(link: Link = link, began: threading.Event = began) -> None:
                began.set()
                link.read(into, remote, [whole(other)], READ_TIMEOUT_S)

            reading = pool.submit(read)
            began.wait()
            closing.close()
            with refused("transfer_failed"):
                reading.result()
    target[:] = b"\xaa" * NBYTES
    other.thaw()
    assert read_again(transport, other) == other.content
    assert target[:] == b"\xaa" * NBYTES


def test_nothing_listens_beyond_loopback(transport: Transport, healthy: Peer) -> None:
    """127.0.0.2 stands for any other address of the host: what listens on all of them answers there too."""
    read_all(transport, healthy)  # so that there is a process that reads
    ours = [
        process for process in psutil.Process().children() if "weightsync.transport.nixl_process" in process.cmdline()
    ]
    ports = [
        connection.laddr.port
        for process in (*ours, *healthy.family())
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert ports
    for port in ports:
        with pytest.raises(OSError, match=r"refused|timed out"):
            socket.create_connection(("127.0.0.2", port), timeout=0.4)


def test_the_names() -> None:
    assert NAMES == ("tcp", "nixl")
