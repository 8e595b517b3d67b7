"""The control channel: who may ask, what is refused, and tickets that end by themselves."""

from __future__ import annotations

import asyncio
import fcntl
import os
import ssl
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.cluster_tls import Authority
from tests.weightsync.peer.hosts import KEYS, MODEL, Hosts, bytes_of, newest, path_of, random_model, until
from weightsync import Publisher
from weightsync.arena import Arena
from weightsync.errors import PeerRefused, PeerUnreachable, TransportUnavailable
from weightsync.hosts import local_path
from weightsync.manifest import digest_of
from weightsync.peer import main
from weightsync.peer.client import PeerClient
from weightsync.peer.control import Control, listen, serving
from weightsync.peer.copies import parsed
from weightsync.peer.messages import ALL, Key
from weightsync.peer.metrics import PeerMetrics
from weightsync.peer.regions import Regions
from weightsync.peer.shelf import Shelf
from weightsync.peer.tickets import Tickets
from weightsync.records import VersionRecord
from weightsync.transport import open_transport
from weightsync.transport.addresses import Address


class Served:
    """A control server with one published slot, and a client."""

    def __init__(self, tickets: Tickets, address: str, record: VersionRecord, path: Path, client: PeerClient) -> None:
        self.tickets, self.address, self.record, self.path, self.client = tickets, address, record, path, client
        self.key = Key(record.manifest_digest)

    def is_held(self) -> bool:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


@pytest.fixture
async def served(store_url: str, arena_directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setenv("HOTSWAP_HOST", "a")
    with Publisher(store_url, model=MODEL) as publisher:
        publisher.publish(random_model(1, 256 << 10), wait=False)
        record = newest(publisher)
    path = local_path(record.slot, "a")
    assert path is not None
    metrics, listener = PeerMetrics(), listen(Address("127.0.0.1"), None)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with open_transport("tcp", listen="127.0.0.1", tls=None) as transport, ThreadPoolExecutor(1) as pool:
        shelf = Shelf(Arena(arena_directory), MODEL, Regions(transport))
        assert shelf.publish(Key(record.manifest_digest), path)
        tickets = Tickets("a", shelf, transport, metrics, pool, chunk_nbytes=64 << 10, most=2, unused_s=0.2)
        async with (
            serving(Control(tickets, metrics).app, listener, None),
            PeerClient(MODEL, "b", "tcp", None) as client,
        ):
            yield Served(tickets, address, record, path, client)


async def test_a_ticket_holds_the_slot_until_it_is_closed(served: Served) -> None:
    assert not served.is_held()
    opened = await served.client.open("a", served.address, served.key)
    assert (opened.have, opened.active, opened.nbytes) == (ALL, 1, served.path.stat().st_size)
    assert len(opened.digests) == -(-opened.nbytes // opened.chunk_nbytes)
    assert served.is_held()
    raw = await served.client.manifest("a", served.address, opened.ticket)
    assert digest_of(raw) == served.record.manifest_digest
    await served.client.close("a", served.address, opened.ticket, 5)
    assert not served.is_held()
    with pytest.raises(PeerRefused) as caught:
        await served.client.have("a", served.address, opened.ticket)
    assert (caught.value.status, caught.value.reason) == (404, "unknown_ticket")


async def test_a_ticket_that_is_not_used_ends(served: Served) -> None:
    await served.client.open("a", served.address, served.key)
    sweeping = asyncio.create_task(served.tickets.sweep())
    async with asyncio.timeout(30):
        while served.is_held():  # noqa: ASYNC110 - of the kernel's
            await asyncio.sleep(0.02)
    sweeping.cancel()


async def test_there_is_room_for_so_many_readers(served: Served) -> None:
    tickets = [(await served.client.open("a", served.address, served.key)).ticket for _ in range(2)]
    with pytest.raises(PeerRefused, match="2 readers are here already") as caught:
        await served.client.open("a", served.address, served.key)
    assert (caught.value.status, caught.value.reason) == (503, "busy")
    await served.client.close("a", served.address, tickets[0], 0)
    await served.client.open("a", served.address, served.key)


@pytest.mark.parametrize(
    ("transport", "model", "digest", "status", "code"),
    [
        ("tcp", MODEL, "0" * 32, 404, "unknown_copy"),
        ("tcp", "another", None, 404, "unknown_copy"),
        ("nixl", MODEL, None, 409, "no_common_transport"),
    ],
)
async def test_refusals(served: Served, transport: str, model: str, digest: str | None, status: int, code: str) -> None:
    async with PeerClient(model, "b", transport, None) as client:
        with pytest.raises(PeerRefused) as caught:
            await client.open("a", served.address, Key(digest or served.key.digest))
    assert (caught.value.status, caught.value.reason) == (status, code)


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"model":1}', b"x" * (65 << 10), b"\xff"])
async def test_bad_bodies(served: Served, body: bytes) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"http://{served.address}/v1/open", content=body)
    assert answer.status_code == 400
    assert msgspec.json.decode(answer.content)["code"] == "bad_request"


async def test_a_slot_that_was_reused_is_not_served(served: Served) -> None:
    with served.path.open("r+b") as slot:
        slot.write(bytes(64))
    with pytest.raises(PeerRefused) as caught:
        await served.client.open("a", served.address, served.key)
    assert caught.value.reason == "unknown_copy"
    assert not served.is_held()


async def test_what_is_no_peer(served: Served) -> None:
    with pytest.raises(PeerUnreachable):
        await served.client.open("a", "127.0.0.1:1", served.key)
    listener = listen(Address("127.0.0.1"), None)
    from starlette.applications import Starlette

    async with serving(Starlette(), listener, None):
        with pytest.raises(PeerRefused, match="does not answer as a peer"):
            await served.client.open("a", f"127.0.0.1:{listener.getsockname()[1]}", served.key)


def test_beyond_loopback_only_with_tls(
    capsys: pytest.CaptureFixture[str], store_url: str, arena_directory: Path
) -> None:
    with pytest.raises(TransportUnavailable, match="without TLS"):
        listen(Address("0.0.0.0"), None)
    arguments = ["--store", store_url, "--model", MODEL, "--listen", "0.0.0.0:0", "--host-id"]
    assert main.main([*arguments, "a"]) == 1
    assert "HOTSWAP_CLUSTER_TLS" in capsys.readouterr().err
    assert main.main([*arguments, "No Name"]) == 1
    assert "HOTSWAP_HOST" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wish", "reached"),
    [
        (None, "10.0.0.1:7"),
        ("pod-1.pods", "pod-1.pods:7"),
        ("pod-1.pods:9", "pod-1.pods:9"),
        ("[::1]", "[::1]:7"),
        ("[::1]:9", "[::1]:9"),
    ],
)
def test_the_address_that_others_are_told(wish: str | None, reached: str) -> None:
    assert main.advertised(wish, Address("10.0.0.1", 7)) == reached


def test_members_read_over_tls_and_strangers_do_not(hosts: Hosts, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    for host in "ab":
        hosts.start(host, "--cluster-tls", authority.mount(tmp_path / host))
    publisher = hosts.publisher("a")
    publisher.publish(random_model(1, 256 << 10), wait=False)
    record = newest(publisher)
    copy = hosts.wait_copy("b", record.manifest_digest)
    assert bytes_of(copy) == path_of(hosts.copies(record.manifest_digest)["a"]).read_bytes()
    stranger = ssl.create_default_context()
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(httpx.TransportError):
        httpx.get(f"https://{copy.address}/metrics", verify=stranger).raise_for_status()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{copy.address}/metrics")


def test_a_peer_that_is_told_to_end_takes_its_records_back(hosts: Hosts) -> None:
    process = hosts.start("a", "--lease-ttl", 600)
    publisher = hosts.publisher("a")
    publisher.publish(random_model(1, 64 << 10), wait=False)
    hosts.wait_copy("a", newest(publisher).manifest_digest)
    process.terminate()
    assert process.wait(60) == 0
    until(lambda: not parsed(KEYS, hosts.store.list(KEYS.copies)[0]))
