"""Mutual TLS between a gateway and its instances, and on the admin port beyond loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from server.cli.admin import AdminClient
from server.errors import ConfigError, RequestFailed
from server.gateway import GatewayConfig, HealthSettings, Limits, UpstreamSettings, listening
from server.gateway.main import bind, run
from server.gateway.models.probes import ProbePrompt, ProbeSettings, build_probe
from tests.cluster_tls import Authority
from tests.server.gateway.harness import (
    ADMIN_KEY,
    KEYS,
    GatewayProcess,
    RunningGateway,
    gateway_process,
    post,
    running_gateway,
)
from tests.server.gateway.upstream import Link, Moody, Received, answering, upstream
from tests.waiting import eventually, wait_until
from weightsync.control.records import InstanceRecord, SwapRecord
from weightsync.errors import TlsUnavailable
from weightsync.tls import ClusterTls

HARDY = HealthSettings(eject_after=10**6)
QUIET = UpstreamSettings(scrape_interval_s=3600.0, max_idle_s=3600.0, hold_s=0.0, health=HARDY)
STREAM = post(body={"stream": True})


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.tls.INTERVAL_S", 0.0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def member(authority: Authority, tmp_path: Path) -> ClusterTls:
    """An instance's own files."""
    return ClusterTls(authority.mount(tmp_path / "instance"))


@pytest.fixture
def stranger(tmp_path: Path) -> ClusterTls:
    """Files of another authority."""
    return ClusterTls(Authority(tmp_path / "other").mount(tmp_path / "stranger"))


@pytest.fixture
def gateway(authority: Authority, tmp_path: Path) -> Iterator[RunningGateway]:
    files = authority.mount(tmp_path / "gateway")
    with running_gateway(tmp_path, cluster_tls=files, upstream=QUIET) as running:
        yield running


def certificate_of(writer: asyncio.StreamWriter) -> bytes:
    """The certificate that the other side has shown."""
    return bytes(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))


def der(directory: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert((directory / "tls.crt").read_text())


@pytest.mark.parametrize("port", ["public", "admin"])
async def test_a_handshake_that_does_not_go_on_ends(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    files = authority.mount(tmp_path / "gateway")
    monkeypatch.setattr(listening, "HANDSHAKE_S", 0.1)
    monkeypatch.setattr(uvicorn, "Server", lambda config: listening.GatewayServer(config, leave))
    tls = {"ssl_certfile": files / "tls.crt", "ssl_keyfile": files / "tls.key"}
    with running_gateway(tmp_path, upstream=QUIET, **tls) as gateway:
        reader, writer = await gateway.connect(admin=port == "admin")
        writer.write(b"\x16\x03\x01")  # half of a hello
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        assert not gateway.gateway.clients


async def test_handshakes_count_as_connections(
    authority: Authority, member: ClusterTls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound and some to be refused with a status, a connection ends before its handshake."""
    files = authority.mount(tmp_path / "gateway")
    monkeypatch.setattr(listening, "REFUSED", 1)
    monkeypatch.setattr(uvicorn, "Server", lambda config: listening.GatewayServer(config, leave))
    tls = {"ssl_certfile": files / "tls.crt", "ssl_keyfile": files / "tls.key"}
    with running_gateway(tmp_path, upstream=QUIET, limits=Limits(max_connections=3), **tls) as gateway:
        there = gateway.gateway
        slow = [await gateway.connect() for _ in range(3)]
        for _, writer in slow:
            writer.write(b"\x16\x03\x01")
        await eventually(lambda: len(there.handshakes) == 3)
        async with httpx.AsyncClient(verify=member.client_context(), timeout=30) as client:
            refused = await client.get(f"https://{gateway.host}:{gateway.port}/healthz")
        assert refused.status_code == 503
        await eventually(lambda: not there.clients)
        slow.append(await gateway.connect())
        await eventually(lambda: len(there.handshakes) == 4)
        reader, _ = await gateway.connect()
        assert await asyncio.wait_for(reader.read(), 30) == b""
        for _, writer in slow:
            writer.close()
        await eventually(lambda: not there.handshakes)
        assert not there.clients


async def leave() -> bool:
    return True


# instances


async def test_a_stream_outlives_the_certificates_it_began_with(
    authority: Authority, member: ClusterTls, gateway: RunningGateway, tmp_path: Path
) -> None:
    go_on, shown = asyncio.Event(), []

    async def handler(link: Link, received: Received) -> None:
        shown.append(certificate_of(link.writer))
        await link.sse_head()
        await link.chunk(b"data: one\n\n")
        if len(shown) == 1:
            await go_on.wait()
        await link.chunk(b"data: two\n\n")
        await link.end()

    async with gateway.instance(handler, tls=member.server_context()) as up, gateway.client(STREAM) as client:
        await client.reader.readuntil(b"data: one\n\n")
        authority.mount(tmp_path / "gateway")
        authority.mount(tmp_path / "instance")
        assert (await gateway.ask(STREAM)).body == b"data: one\n\ndata: two\n\n"
        assert up.connections == 2
        assert shown[1] == der(tmp_path / "gateway") != shown[0]
        go_on.set()
        await asyncio.wait_for(client.reader.readuntil(b"data: two\n\n"), 30)


async def test_connections_are_kept_and_large_bodies_pass(member: ClusterTls, gateway: RunningGateway) -> None:
    large = b'{"prompt": "' + b"x" * 3_000_000 + b'"}'

    async def handler(link: Link, received: Received) -> None:
        await link.json(received.body)

    async with gateway.instance(handler, tls=member.server_context()) as up:
        for _ in range(3):
            assert (await gateway.ask(post(body=large))).body == large
        assert up.connections == 1


async def test_a_client_that_leaves_ends_the_instance_s_work(member: ClusterTls, gateway: RunningGateway) -> None:
    gone = asyncio.Event()

    async def handler(link: Link, _: Received) -> None:
        await link.sse_head()
        await link.chunk(b"data: one\n\n")
        await link.gone()
        gone.set()

    async with gateway.instance(handler, tls=member.server_context()), gateway.client(STREAM) as client:
        await client.reader.readuntil(b"data: one\n\n")
        client.writer.transport.abort()
        await asyncio.wait_for(gone.wait(), 30)


async def test_an_instance_of_another_authority_gets_nothing(
    stranger: ClusterTls, gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway.instance(tls=stranger.server_context()) as up:
        with caplog.at_level(logging.ERROR):
            for _ in range(2):
                assert (await gateway.ask(post())).refusal == (503, "instance_untrusted")
        assert sum("are its certificate and this gateway's of one authority" in m for m in caplog.messages) == 1
        assert not up.requests


async def test_an_instance_that_speaks_no_tls_gets_nothing(gateway: RunningGateway) -> None:
    async with upstream() as up:
        gateway.register(up.address.replace("http", "https"))
        answer = await gateway.ask(post())
        assert answer.status == 503, answer.body
        assert not up.requests


Answer = Callable[[socket.socket], object]
HANDSHAKES: dict[str, tuple[Answer, str, str]] = {
    "closes": (lambda _: None, "instance_unreachable", "closed a connection"),
    "resets": (
        lambda link: link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)),
        "instance_unreachable",
        "closed a connection",
    ),
    "half a record": (lambda link: link.sendall(bytes([22, 3, 3, 2, 0, 2])), "instance_unreachable", "closed a conn"),
    "says goodbye": (lambda link: link.sendall(bytes([21, 3, 3, 0, 2, 1, 0])), "instance_untrusted", "it closed the"),
    "alerts": (lambda link: link.sendall(bytes([21, 3, 3, 0, 2, 2, 40])), "instance_untrusted", "HANDSHAKE_FAILURE"),
    "speaks HTTP": (lambda link: link.sendall(b"HTTP/1.1 400 No\r\n\r\n"), "instance_untrusted", "WRONG_VERSION"),
}


@pytest.mark.parametrize("name", HANDSHAKES)
async def test_a_handshake_that_fails_is_told_as_it_failed(gateway: RunningGateway, name: str) -> None:
    """Not as a port that refuses connections, which sends the operator to another place."""
    answer, code, told = HANDSHAKES[name]

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                with link, contextlib.suppress(OSError):
                    link.recv(1 << 16)
                    answer(link)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        gateway.register(f"https://127.0.0.1:{listener.getsockname()[1]}")
        refused = await gateway.ask(post())
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(30)
    assert refused.refusal == (503, code), refused.body
    assert told in refused.body.decode()


async def test_an_instance_that_does_not_know_the_gateway_answers_nothing(
    authority: Authority, gateway: RunningGateway, tmp_path: Path
) -> None:
    """With TLS 1.3 the gateway hears of the refusal only after its request has gone to nobody."""
    files = authority.mount(tmp_path / "strict")
    suspicious = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=Authority(tmp_path / "other").ca)
    suspicious.verify_mode = ssl.CERT_REQUIRED
    suspicious.load_cert_chain(files / "tls.crt", files / "tls.key")
    async with gateway.instance(tls=suspicious) as up:
        answer = await gateway.ask(post())
        assert answer.status in (502, 503), answer.body
        assert not up.requests


async def test_others_are_asked_instead(
    member: ClusterTls, stranger: ClusterTls, gateway: RunningGateway, tmp_path: Path
) -> None:
    async with (
        gateway.instance(instance_id="a", tls=stranger.server_context()) as bad,
        gateway.instance(instance_id="b", tls=member.server_context()) as good,
        gateway.instance(instance_id="c"),
    ):
        for _ in range(8):
            assert (await gateway.ask(post())).status == 200
        assert not bad.requests
        assert good.requests  # and so has the one on loopback without TLS, now and then


async def test_health_and_load_are_asked_over_tls(
    authority: Authority, member: ClusterTls, stranger: ClusterTls, tmp_path: Path
) -> None:
    well = Moody(page=b'vllm:num_requests_running{x="1"} 3.0\n')
    settings = UpstreamSettings(scrape_interval_s=0.02, scrape_timeout_s=30.0)
    files = authority.mount(tmp_path / "gateway")
    with running_gateway(tmp_path, cluster_tls=files, upstream=settings) as gateway:
        async with (
            gateway.instance(well, "good", member.server_context()),
            gateway.instance(well, "bad", stranger.server_context()) as bad,
        ):
            fleet = gateway.gateway.default.fleet
            await eventually(lambda: fleet.instances["good"].signals is not None, 30)
            await eventually(lambda: not fleet.instances["bad"].health.answering, 30)
            assert fleet.instances["good"].health.answering
            assert not bad.requests


async def test_a_canary_is_probed_over_tls(authority: Authority, member: ClusterTls, tmp_path: Path) -> None:
    answer = (
        b'{"choices": [{"text": "x", "token_ids": [1], "logprobs": [-0.5],'
        b' "weight_versions": [{"version": 2, "start": 0, "end": 1}]}]}'
    )
    settings = ProbeSettings("toy", (ProbePrompt("p", "hello"),))
    swap = SwapRecord("s", 2, "canary", ("i0",), 0.0, 0.0)
    async with upstream(answering(answer), member.server_context()) as up:
        canary = InstanceRecord("i0", up.address)
        gateway = ClusterTls(authority.mount(tmp_path / "gateway"))
        assert (await build_probe(settings, list, gateway)(canary, swap, None)).ok
        found = await build_probe(settings, list)(canary, swap, None)
        assert not found.ok
        assert "certificate" in found.detail


def test_records_that_must_not_be_spoken_to_are_ignored(
    gateway: RunningGateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        record = InstanceRecord("plain", "http://192.0.2.1:8001", "SERVING", active_version=1)
        gateway.store.put(KEYS.instance("plain"), record.to_json())
        wait_until(lambda: "Start it with --cluster-tls" in caplog.text)
        assert not gateway.gateway.default.fleet.instances
    (tmp_path / "b").mkdir()
    with running_gateway(tmp_path / "b", upstream=QUIET) as without, caplog.at_level(logging.ERROR):
        record = InstanceRecord("secure", "https://127.0.0.1:8001", "SERVING", active_version=1)
        without.store.put(KEYS.instance("secure"), record.to_json())
        wait_until(lambda: "Start the gateway with --cluster-tls" in caplog.text)
        assert not without.gateway.default.fleet.instances


# the admin port, and a process of its own


@pytest.fixture(scope="module")
def files(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority.mount(tmp_path_factory.mktemp("files") / "tls")


@pytest.fixture(scope="module")
def process(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """Two workers whose admin port is open beyond loopback."""
    options = ("--admin-host", "0.0.0.0", "--cluster-tls", str(files), "--workers", "2", "--log-level", "warning")
    with gateway_process(tmp_path_factory.mktemp("gateway"), *options) as running:
        running.scheme = "https"
        yield running


def is_up(url: str, verify: ssl.SSLContext | bool = True) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, verify=verify, trust_env=False).status_code == 200
    return False


async def test_a_gateway_process_streams_over_mutual_tls(
    process: GatewayProcess, files: Path, member: ClusterTls
) -> None:
    shown = set()

    async def handler(link: Link, received: Received) -> None:
        shown.add(certificate_of(link.writer))
        if received.method == "GET":
            await link.json()
            return
        await link.sse_head()
        for number in range(20):
            await link.chunk(b"data: %d\n\n" % number)
        await link.end()

    async with upstream(handler, member.server_context()) as up:
        record = InstanceRecord("i0", up.address, "SERVING", active_version=1, active_epoch=1)
        process.store.put(KEYS.instance("i0"), record.to_json())
        ready = f"http://127.0.0.1:{process.port}/readyz"
        # Whichever of the two workers is asked.
        await asyncio.to_thread(wait_until, lambda: all(is_up(ready) for _ in range(16)), 60)
        answer = await process.ask(STREAM)
        assert answer.body == b"".join(b"data: %d\n\n" % number for number in range(20))
        assert shown == {der(files)}


def test_the_admin_port_wants_a_certificate_and_the_key(
    process: GatewayProcess, authority: Authority, member: ClusterTls
) -> None:
    url, key = f"{process.admin_url}/admin/instances", {"authorization": f"Bearer {ADMIN_KEY}"}
    wait_until(lambda: is_up(f"{process.admin_url}/healthz", member.client_context()), 60)
    with httpx.Client(verify=member.client_context(), timeout=60, trust_env=False) as client:
        assert client.get(url).status_code == 401
        assert client.get(url, headers=key).status_code == 200
    anonymous = ssl.create_default_context(cafile=authority.ca)
    with httpx.Client(verify=anonymous, trust_env=False) as client, pytest.raises(httpx.TransportError):
        client.get(url, headers=key)
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http"), headers=key, trust_env=False)
    assert httpx.get(f"http://127.0.0.1:{process.port}/healthz", timeout=60).status_code == 200


def test_commands_reach_the_admin_port(
    process: GatewayProcess, member: ClusterTls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(ADMIN_KEY)
    monkeypatch.delenv("HOTSWAP_CLUSTER_TLS", raising=False)
    monkeypatch.delenv("HOTSWAP_ADMIN_KEY", raising=False)
    wait_until(lambda: is_up(f"{process.admin_url}/healthz", member.client_context()), 60)
    ask = lambda: AdminClient(None, process.admin_url, tmp_path / "key").call("GET", "/admin/instances")  # noqa: E731
    with pytest.raises(RequestFailed, match="CERTIFICATE_VERIFY_FAILED"):
        ask()
    monkeypatch.setenv("HOTSWAP_CLUSTER_TLS", str(member.directory))
    assert "instances" in ask()
    monkeypatch.setenv("HOTSWAP_CLUSTER_TLS", str(tmp_path))
    with pytest.raises(RequestFailed, match="there is no tls"):
        ask()
    monkeypatch.setenv("HOTSWAP_ADMIN_CA", str(tmp_path / "nowhere"))
    with pytest.raises(RequestFailed, match="name a PEM file"):
        ask()


def test_beyond_loopback_the_admin_port_is_refused_without_tls(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--cluster-tls, or --ssl-certfile"):
        GatewayConfig(f"sqlite://{tmp_path}/s.db", "toy", admin_host="0.0.0.0")
    own = GatewayConfig(f"sqlite://{tmp_path}/s.db", "toy", port=0, admin_host="127.0.0.2")
    for listener in bind(own)[1]:
        listener.close()


def test_files_that_cannot_be_used_end_it_at_once(tmp_path: Path) -> None:
    config = GatewayConfig(f"sqlite://{tmp_path}/s.db", "toy", port=0, cluster_tls=tmp_path / "nowhere")
    with pytest.raises(TlsUnavailable, match="there is no tls"):
        run(config)
