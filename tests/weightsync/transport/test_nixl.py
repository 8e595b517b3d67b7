"""NIXL in processes of its own: what those may do, and what happens when they end."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.weightsync.transport.peers import LISTEN, MIB, READ_TIMEOUT_S, Peer, buffer, read_all, require, whole
from weightsync.errors import TransportUnavailable
from weightsync.transport import Piece, nixl_process
from weightsync.transport.addresses import Address
from weightsync.transport.nixl import NAME, NixlTransport, Shared, Worker
from weightsync.transport.nixl_process import Register, Request


@pytest.fixture(scope="module")
def transport() -> Iterator[NixlTransport]:
    require(NAME)
    with NixlTransport(Address(LISTEN)) as opened:
        yield opened


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    require(NAME)
    with Peer(NAME, nbytes=MIB) as serving:
        yield serving


def mappings(pid: int, inode: int) -> set[str]:
    """With which rights a process maps a file."""
    lines = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {flags for _, flags, _, _, found, *_ in lines if int(found) == inode}


def inode_of(data: object) -> int:
    with memoryview(data) as view:  # type: ignore[arg-type]
        shared = Shared.of(view, writable=False)
    try:
        return Path(f"/proc/self/fd/{shared.fd}").stat().st_ino
    finally:
        shared.close()


def test_the_process_that_serves_cannot_write_into_a_slot(transport: NixlTransport) -> None:
    data = buffer(MIB)
    region = transport.register(data, writable=True)
    inode = inode_of(data)
    assert mappings(transport.serving.worker().pid, inode) == {"r--s"}
    assert mappings(transport.reading.worker().pid, inode) == {"rw-s"}
    region.close()
    assert not mappings(transport.serving.worker().pid, inode)
    assert not mappings(transport.reading.worker().pid, inode)


def test_a_buffer_is_registered_once(transport: NixlTransport, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Request] = []
    submit = Worker.submit
    monkeypatch.setattr(
        Worker, "submit", lambda self, request, fds=(): sent.append(request) or submit(self, request, fds)
    )
    into = transport.register(buffer(MIB), writable=True)
    for _ in range(3):
        link = transport.connect(peer.endpoint)
        link.read(into, peer.region, [whole(peer)], READ_TIMEOUT_S)
    assert sum(isinstance(request, Register) for request in sent) == 2  # with each process


def test_a_crash_of_either_process_is_mended(transport: NixlTransport) -> None:
    """As by a fault in the library: the one that reads, the one that serves, and again."""
    data, target = buffer(MIB), buffer(MIB)
    data[:] = os.urandom(MIB)
    served, into = transport.register(data, writable=False), transport.register(target, writable=True)
    for crashed in (transport.reading, transport.serving, transport.reading):
        psutil.Process(crashed.worker().pid).kill()
        before = crashed._worker
        assert before is not None
        before.kill()  # returns when it has been noticed
        target[:] = bytes(MIB)
        link = transport.connect(transport.endpoint)
        link.read(into, served.descriptor, [Piece(0, 0, MIB)], READ_TIMEOUT_S)
        assert target[:] == data[:]


def test_its_thread_waits_for_events_instead_of_turning_in_a_loop(transport: NixlTransport) -> None:
    """The library sets a wait of 0 µs by this name, in each agent that it makes."""
    library = nixl_process._library()
    config = library.nixlBind.nixlAgentConfig()
    config.pthrDelay = 0
    assert config.pthrDelay == nixl_process.PROGRESS_US
    assert "agent_config = nixlBind.nixlAgentConfig()" in inspect.getsource(library.nixl_agent)


def test_what_is_no_shared_file_is_refused(transport: NixlTransport) -> None:
    with pytest.raises(ValueError, match="shared mapping"):
        transport.register(memoryview(bytearray(MIB)), writable=True)


def test_a_part_of_a_mapping_can_be_registered(transport: NixlTransport, peer: Peer) -> None:
    target = buffer(2 * MIB)
    into = transport.register(memoryview(target)[4099 : 4099 + MIB], writable=True)
    transport.connect(peer.endpoint).read(into, peer.region, [whole(peer)], READ_TIMEOUT_S)
    assert target[:] == bytes(4099) + peer.content + bytes(MIB - 4099)
    assert read_all(transport, peer) == peer.content


def test_a_transport_that_was_closed_says_so() -> None:
    require(NAME)
    transport = NixlTransport(Address(LISTEN))
    pid = transport.serving.worker().pid
    transport.close()
    transport.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(TransportUnavailable, match="closed"):
        _ = transport.endpoint


def test_a_library_that_does_not_start_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "broken"))
    with pytest.raises(TransportUnavailable, match=r"broken on purpose.*nixl-cu12"):
        NixlTransport(Address(LISTEN))
