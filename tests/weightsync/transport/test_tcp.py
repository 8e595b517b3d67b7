"""Peers that the TCP transport lets in, how it listens, and how a read is spread over connections."""

from __future__ import annotations

import socket
import ssl
import threading
from itertools import accumulate
from pathlib import Path

import msgspec
import pytest

from tests.cluster_tls import Authority
from tests.weightsync.codes import refused
from tests.weightsync.transport.peers import LISTEN, MIB, READ_TIMEOUT_S, Peer, buffer, content, read_all, whole
from weightsync.errors import PeerUnreachable, TransportUnavailable
from weightsync.tls import ClusterTls
from weightsync.transport import Piece, Transport, open_transport, tcp
from weightsync.transport.addresses import Address
from weightsync.transport.tcp import MIN_STRIPE, TcpEndpoint, TcpTransport, stripes
from weightsync.transport.tcp_wire import HELLO, TOKEN_NBYTES, Deadline


def plain() -> Transport:
    return open_transport("tcp", listen=LISTEN, tls=None)


def found_at(serving: Peer | Transport) -> TcpEndpoint:
    return msgspec.msgpack.decode(serving.endpoint, type=TcpEndpoint)


def connected(serving: Peer | Transport) -> socket.socket:
    return socket.create_connection((found_at(serving).host, found_at(serving).port))


def answer(connection: socket.socket, hello: bytes) -> bytes:
    """The bytes that come back; none after a hang-up of any kind. Raises TimeoutError when neither comes."""
    connection.settimeout(READ_TIMEOUT_S)
    try:
        connection.sendall(hello)
        return connection.recv(100)
    except TimeoutError:
        raise
    except OSError:
        return b""


def test_without_the_token_nobody_is_let_in() -> None:
    with Peer("tcp", nbytes=MIB) as peer, plain() as transport:
        for hello in (HELLO + bytes(TOKEN_NBYTES), b"GET / HTTP/1.1\r\nHost: peer\r\nAccept: */*\r\n\r\n"):
            with connected(peer) as connection:
                assert answer(connection, hello) == b""
        guessed = msgspec.structs.replace(found_at(peer), token=bytes(TOKEN_NBYTES))
        with pytest.raises(PeerUnreachable):
            transport.connect(msgspec.msgpack.encode(guessed))
        assert read_all(transport, peer) == peer.content


def test_a_member_of_the_cluster_reads_over_tls(authority: Authority, tmp_path: Path) -> None:
    owner, reader = str(authority.mount(tmp_path / "owner")), ClusterTls(authority.mount(tmp_path / "reader"))
    with (
        Peer("tcp", nbytes=4 * MIB + 1, tls=owner) as peer,
        open_transport("tcp", listen=LISTEN, tls=reader) as transport,
    ):
        assert read_all(transport, peer) == peer.content
        target = buffer(len(peer.content))
        into = transport.register(target, writable=True)
        link, remote = transport.connect(peer.endpoint), peer.region
        peer.kill()
        with refused("transfer_failed"):
            link.read(into, remote, [whole(peer)], READ_TIMEOUT_S)


def test_a_stranger_is_not_let_in_though_it_has_the_token(authority: Authority, tmp_path: Path) -> None:
    owner = str(authority.mount(tmp_path / "owner"))
    stranger = ClusterTls(Authority(tmp_path / "other").mount(tmp_path / "stranger"))
    with Peer("tcp", nbytes=MIB, tls=owner) as peer:
        hello, trusting = HELLO + found_at(peer).token, ssl._create_unverified_context()
        with connected(peer) as connection:
            assert HELLO not in answer(connection, hello)
        with connected(peer) as without, trusting.wrap_socket(without) as connection:
            assert answer(connection, hello) == b""
        with TcpTransport(Address(LISTEN), stranger) as transport, pytest.raises(PeerUnreachable):
            transport.connect(peer.endpoint)
        with TcpTransport(Address(LISTEN), None) as transport, pytest.raises(PeerUnreachable, match="no TLS"):
            transport.connect(peer.endpoint)


def test_other_networks_without_tls_a_port_that_is_taken_and_a_strange_name_are_refused() -> None:
    with pytest.raises(TransportUnavailable, match="without TLS"):
        open_transport("tcp", listen="0.0.0.0", tls=None)
    with plain() as transport, pytest.raises(TransportUnavailable, match="cannot listen"):
        open_transport("tcp", listen=f"{LISTEN}:{found_at(transport).port}", tls=None)
    with pytest.raises(ValueError, match="choose auto"):
        open_transport("carrier pigeon", listen=LISTEN, tls=None)


def test_a_region_that_its_owner_has_closed_is_refused() -> None:
    with plain() as owner, plain() as reader:
        data = buffer(MIB)
        data[:] = content(3, MIB)
        served, kept = owner.register(data, writable=False), owner.register(data, writable=True)
        into, link = reader.register(buffer(MIB), writable=True), reader.connect(owner.endpoint)
        link.read(into, served.descriptor, [Piece(0, 0, MIB)], READ_TIMEOUT_S)
        served.close()
        with refused("transfer_failed", match="refuses"):
            link.read(into, served.descriptor, [Piece(0, 0, 1)], READ_TIMEOUT_S)
        link.read(into, kept.descriptor, [Piece(0, 0, MIB)], READ_TIMEOUT_S)  # what is read into is served as well


def test_idle_connections_that_the_peer_has_closed_are_replaced() -> None:
    """As after its time-out for idle ones."""
    with Peer("tcp", nbytes=MIB) as peer, plain() as transport:
        link = transport.connect(peer.endpoint)
        for connection in link._idle:  # type: ignore[attr-defined]
            connection.shutdown(socket.SHUT_RDWR)
        target = buffer(MIB)
        link.read(transport.register(target, writable=True), peer.region, [whole(peer)], READ_TIMEOUT_S)
        assert target[:] == peer.content


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("127.0.0.1", 0), ("peer.example", 9), ("\0", 9)])
def test_an_endpoint_that_no_peer_can_mean_is_refused(host: str, port: int) -> None:
    endpoint = TcpEndpoint(host, port, bytes(TOKEN_NBYTES), tls=False)
    with plain() as transport, pytest.raises(PeerUnreachable):
        transport.connect(msgspec.msgpack.encode(endpoint))


def test_a_read_that_gets_no_thread_fails_when_the_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with Peer("tcp", nbytes=4 * MIB) as peer, TcpTransport(Address(LISTEN), None, streams=4) as transport:
        target, link = buffer(4 * MIB), transport.connect(peer.endpoint)
        into, started = transport.register(target, writable=True), list[threading.Thread]()
        start = threading.Thread.start

        def second_fails(thread: threading.Thread) -> None:
            if started:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", second_fails)
        with refused("transfer_failed", match="new thread"):
            link.read(into, peer.region, [whole(peer)], READ_TIMEOUT_S)
        assert not started[0].is_alive()
        monkeypatch.undo()
        link.read(into, peer.region, [whole(peer)], READ_TIMEOUT_S)
        assert target[:] == peer.content


def test_a_part_that_breaks_in_any_way_does_not_pass_for_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with Peer("tcp", nbytes=2 * MIB) as peer, TcpTransport(Address(LISTEN), None, streams=2) as transport:
        link, into = transport.connect(peer.endpoint), transport.register(buffer(2 * MIB), writable=True)
        exchange = tcp._exchange

        def broken(connection: socket.socket, view: memoryview, key: bytes, part: list[Piece], until: Deadline) -> None:
            if part[0].local_offset:
                raise MemoryError("no room")
            exchange(connection, view, key, part, until)

        monkeypatch.setattr(tcp, "_exchange", broken)
        with refused("transfer_failed", match="no room"):
            link.read(into, peer.region, [whole(peer)], READ_TIMEOUT_S)


def test_a_server_that_once_got_no_thread_still_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    with plain() as owner:
        start = threading.Thread.start

        def refused(thread: threading.Thread) -> None:
            if thread.name == "transport-serve":
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            with connected(owner) as connection:
                assert answer(connection, HELLO + found_at(owner).token) == b""
        with plain() as reader:
            reader.connect(owner.endpoint).close()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_stripes_hold_the_same_bytes_in_order(count: int) -> None:
    sizes = [5 * MIN_STRIPE + 3, 1, 0, 2 * MIN_STRIPE - 1, 17]
    parts = stripes([Piece(end - n, 1000 + end - n, n) for n, end in zip(sizes, accumulate(sizes), strict=True)], count)
    assert len(parts) <= count
    flat = [piece for part in parts for piece in part]
    assert all(piece.remote_offset == 1000 + piece.local_offset and piece.nbytes for piece in flat)
    assert [piece.local_offset for piece in flat] == list(accumulate([0, *(p.nbytes for p in flat)]))[:-1]
    assert sum(piece.nbytes for piece in flat) == sum(sizes)
    assert len(stripes([Piece(0, 0, MIN_STRIPE)], count)) == 1


@pytest.mark.parametrize(
    ("text", "host", "port"), [("10.1.2.3", "10.1.2.3", 0), ("10.1.2.3:80", "10.1.2.3", 80), ("[::1]:9", "::1", 9)]
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)
    assert Address.parse(str(Address(host, port))) == Address(host, port)


@pytest.mark.parametrize("text", ["", "10.1.2.3:", "10.1.2.3:x", "10.1.2.3:70000", "no such host.invalid"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ADDRESS"):
        Address.parse(text)
