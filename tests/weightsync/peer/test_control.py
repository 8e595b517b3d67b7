"""The control channel: who may ask, what is refused, and tickets that end by themselves."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import httpx
import orjson
import pytest
from starlette.applications import Starlette

from server.ports import free_port
from tests.cluster_tls import Authority
from tests.waiting import eventually, wait_until
from tests.weightsync.peer.hosts import CHUNK, KEYS, MODEL, Hosts
from tests.weightsync.peer.served import Served
from weightsync.errors import PeerRefused, PeerUnreachable, TransportUnavailable
from weightsync.format.manifest import digest_of
from weightsync.peer import __main__ as main
from weightsync.peer import serve
from weightsync.peer.chunks import Bitmap, Shape
from weightsync.peer.control import PeerClient, listen, serving
from weightsync.peer.copies import parsed
from weightsync.peer.messages import ALL, TOLD
from weightsync.transport.addresses import Address


async def test_a_ticket_holds_the_slot_until_it_is_closed(served: Served) -> None:
    assert not served.is_held()
    opened = await served.client.open("a", served.address, served.digest)
    assert (opened.have, opened.active, opened.nbytes) == (ALL, 1, served.path.stat().st_size)
    assert not opened.digests  # the manifest has what tells
    assert served.is_held()
    raw = await served.client.manifest("a", served.address, opened.ticket)
    assert digest_of(raw) == served.record.manifest_digest
    await served.client.close("a", served.address, opened.ticket, 5)
    assert not served.is_held()
    with pytest.raises(PeerRefused) as caught:
        await served.client.have("a", served.address, opened.ticket, 5)
    assert (caught.value.status, caught.value.reason) == (404, "unknown_ticket")


async def test_a_ticket_that_is_not_used_ends(served: Served) -> None:
    served.tickets._unused_s = 0.2
    await served.client.open("a", served.address, served.digest)
    sweeping = asyncio.create_task(served.tickets.sweep())
    await eventually(lambda: not served.is_held(), 30)
    sweeping.cancel()


async def test_there_is_room_for_so_many_readers(served: Served) -> None:
    tickets = [(await served.client.open("a", served.address, served.digest)).ticket for _ in range(2)]
    with pytest.raises(PeerRefused, match="2 readers are here already") as caught:
        await served.client.open("a", served.address, served.digest)
    assert (caught.value.status, caught.value.reason) == (503, "busy")
    await served.client.close("a", served.address, tickets[0], 0)
    await served.client.open("a", served.address, served.digest)


@pytest.mark.parametrize(
    ("model", "host", "transport", "digest", "status", "code"),
    [
        (MODEL, "b", "tcp", "0" * 32, 404, "unknown_copy"),
        ("another", "b", "tcp", None, 404, "unknown_copy"),
        (MODEL, "b", "nixl", None, 409, "no_common_transport"),
        (MODEL, 'b",x="1', "tcp", None, 400, "bad_request"),
    ],
)
async def test_refusals(
    served: Served, model: str, host: str, transport: str, digest: str | None, status: int, code: str
) -> None:
    async with PeerClient(model, host, transport, None) as client:
        with pytest.raises(PeerRefused) as caught:
            await client.open("a", served.address, digest or served.digest)
    assert (caught.value.status, caught.value.reason) == (status, code)
    assert b"x=" not in served.metrics.generate()


@pytest.mark.parametrize(
    ("call", "body"),
    [
        *(("open", body) for body in (b"", b"{}", b"[1]", b'{"model":1}', b"x" * (257 << 10), b"\xff")),
        *(("close/", b'{"nbytes": %b}' % nbytes) for nbytes in (b"-5", b"1" + 400 * b"0", b"1.5")),
    ],
)
async def test_bad_bodies(served: Served, call: str, body: bytes) -> None:
    ticket = (await served.client.open("a", served.address, served.digest)).ticket
    async with httpx.AsyncClient(base_url=f"http://{served.address}") as client:
        answer = await client.post(f"/v1/{call}{ticket if call == 'close/' else ''}", content=body)
    assert (answer.status_code, answer.json()["code"], served.readers()) == (400, "bad_request", 1)
    await served.client.close("a", served.address, ticket, 5)


async def test_an_answer_waits_for_news_of_its_tree(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that was told of chunk 0 hears of chunk 2 as soon as it is there, and does not wait for chunk 1."""
    monkeypatch.setattr(serve, "NEWS_S", 0.1)
    shape = Shape(5 * CHUNK, CHUNK, ("0" * 32,) * 5)
    copy, _ = served.tickets._shelf.claim("e" * 32, "", shape, None)
    copy.came(0)
    opened = await served.client.open("a", served.address, copy.digest)
    first, _ = await served.client.have("a", served.address, opened.ticket, 5, 0)
    asking = asyncio.create_task(served.client.have("a", served.address, opened.ticket, 5, 0))
    copy.came(1)
    copy.came(2)
    second, _ = await asking
    assert [Bitmap.decoded(told.have, 5).bits for told in (first, second)] == [0b001, 0b111]
    third, seconds = await served.client.have("a", served.address, opened.ticket, 5, 1)  # nothing comes
    assert third.have == second.have
    assert seconds >= serve.NEWS_S


async def test_releases_that_know_no_trees_are_asked_and_answered(served: Served) -> None:
    """They pass over the query, and want a bitmap of what the reader has or is reading, of the slot's length."""
    asked: list[tuple[str, bytes]] = []

    async def before(request: httpx.Request) -> None:
        asked.append((request.url.query.decode(), request.content))

    opened = await served.client.open("a", served.address, served.digest)
    served.client._http.event_hooks["request"].append(before)
    await served.client.have("a", served.address, opened.ticket, 5, 1)
    ((query, body),) = asked
    assert (query, Bitmap.decoded(orjson.loads(body)["taken"], 5).bits) == ("tree=1", 0)
    served.client._http.event_hooks["request"].clear()
    theirs = {"taken": Bitmap(5, 0b101).encoded()}
    async with httpx.AsyncClient(base_url=f"http://{served.address}") as reader:
        answer = await reader.post(f"/v1/have/{opened.ticket}", json=theirs)
        assert (answer.status_code, answer.json()["have"]) == (200, "all")
        wrong = await reader.post(f"/v1/have/{opened.ticket}?tree=2", json=theirs)
        assert (wrong.status_code, wrong.json()["code"]) == (400, "bad_request")


async def test_a_reader_of_the_release_before_is_refused_a_difference_and_served_the_slot(served: Served) -> None:
    """Refused so, it tries the other holders of a difference, and then reads all of the slot."""
    wish = {"model": MODEL, "digest": served.digest, "reader": "b", "transports": ["tcp"]}
    async with httpx.AsyncClient(base_url=f"http://{served.address}") as reader:
        refused = await reader.post(f"/v1/open?{TOLD}", json=wish | {"delta_of": "d" * 32})
        assert (refused.status_code, refused.json()["code"]) == (404, "unknown_copy")
        opened = await reader.post(f"/v1/open?{TOLD}", json=wish | {"delta_of": ""})
        assert opened.json()["have"] == ALL
        close = f"/v1/close/{opened.json()['ticket']}"
        assert (await reader.post(close, json={"nbytes": 5, "bytes_per_s": 1e6})).status_code == 200
    assert served.readers() == 0


async def test_an_answer_that_is_too_long_or_does_not_end_is_given_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.peer.control.MAX_ANSWER", 100)
    with pytest.raises(PeerRefused, match="more than 100 bytes"):
        await served.client.open("a", served.address, served.digest)
    monkeypatch.setattr("weightsync.peer.control.ANSWER_S", 0.3)

    async def dribble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.01)  # 90 bytes in all: more than the time there is

    async with await asyncio.start_server(dribble, "127.0.0.1", 0) as server, asyncio.timeout(30):
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(PeerUnreachable):
            await served.client.have("a", address, "ticket", 5)


async def test_a_server_that_does_not_start_is_said_so() -> None:
    closed = listen(Address("127.0.0.1"), None)
    closed.close()
    with pytest.raises(TransportUnavailable, match="has not started"):
        async with serving(Starlette(), closed, None):
            pytest.fail("nobody is served")


async def test_a_slot_that_was_reused_is_not_served(served: Served) -> None:
    with served.path.open("r+b") as slot:
        slot.write(bytes(64))
    with pytest.raises(PeerRefused) as caught:
        await served.client.open("a", served.address, served.digest)
    assert caught.value.reason == "unknown_copy"
    assert not served.is_held()


async def test_what_is_no_peer(served: Served) -> None:
    with pytest.raises(PeerUnreachable):
        await served.client.open("a", "127.0.0.1:1", served.digest)
    listener = listen(Address("127.0.0.1"), None)
    async with serving(Starlette(), listener, None):
        with pytest.raises(PeerRefused, match="does not answer as a peer"):
            await served.client.open("a", f"127.0.0.1:{listener.getsockname()[1]}", served.digest)


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


@pytest.mark.parametrize(("said", "port"), [(None, 0), ("8004", 8004)])
def test_the_data_port_and_the_rack_may_come_from_the_environment(
    said: str | None, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if said is not None:
        monkeypatch.setenv("HOTSWAP_PEER_DATA_PORT", said)
        monkeypatch.setenv("HOTSWAP_RACK", "r1")
    asked = ["--store", "sqlite:///x", "--model", MODEL, "--host-id", "a"]
    settings = main._settings(main._parser().parse_args(asked))
    assert (settings.data_port, settings.rack) == (port, "r1" if said else "")
    with pytest.raises(SystemExit):
        main._parser().parse_args([*asked, "--data-port", "70000"])
    assert "--data-port" in capsys.readouterr().err


def test_members_read_over_tls_and_strangers_do_not(hosts: Hosts, tmp_path: Path) -> None:
    authority, port = Authority(tmp_path / "authority"), free_port()
    for host in "ab":
        own = ("--data-port", port) if host == "a" else ()
        hosts.start(host, "--cluster-tls", authority.mount(tmp_path / host), *own)
    copy = hosts.arrived("b", hosts.published("a"))
    socket.create_connection(("127.0.0.1", port), 30).close()  # where its data was asked to come from
    stranger = ssl.create_default_context()
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(httpx.TransportError):
        httpx.get(f"https://{copy.address}/metrics", verify=stranger).raise_for_status()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{copy.address}/metrics")


def test_a_peer_that_is_told_to_end_takes_its_records_back(hosts: Hosts) -> None:
    process = hosts.start("a", "--lease-ttl", 600)
    hosts.wait_copy("a", hosts.published("a"))
    process.terminate()
    assert process.wait(60) == 0
    wait_until(lambda: not parsed(KEYS, hosts.store.list(KEYS.copies)[0]))
