"""Mutual TLS between members: real handshakes over loopback, with certificates that come, go and are wrong."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import logging
import shutil
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import uvloop

from tests.cluster_tls import Authority
from weightsync import tls as tls_module
from weightsync.errors import TlsUnavailable
from weightsync.tls import ClusterTls


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_module, "INTERVAL_S", 0.0)


@contextlib.asynccontextmanager
async def echo(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server that sends every line back; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(line)
        except OSError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def shown(port: int, context: ssl.SSLContext) -> bytes:
    """The certificate that a server shows, once it has taken ours and answered."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"well?\n")
        if await reader.readline() != b"well?\n":
            raise ConnectionResetError("the server has hung up")
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return bytes(found)


def der(directory: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert((directory / "tls.crt").read_text())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_members_know_each_other(authority: Authority, tmp_path: Path, loop: type) -> None:
    here, there = authority.mount(tmp_path / "here"), authority.mount(tmp_path / "there")

    async def meet() -> None:
        async with echo(ClusterTls(here).server_context()) as port:
            assert await shown(port, ClusterTls(there).client_context()) == der(here)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(meet())


async def test_strangers_are_refused(authority: Authority, tmp_path: Path) -> None:
    here = ClusterTls(authority.mount(tmp_path / "here"))
    theirs = Authority(tmp_path / "other").mount(tmp_path / "stranger")
    stranger = ClusterTls(theirs)
    anonymous = ssl.create_default_context(cafile=authority.ca)
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # does not check the server, which has to check the client
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    careless.load_cert_chain(theirs / "tls.crt", theirs / "tls.key")
    other_name = ClusterTls(authority.mount(tmp_path / "named", name="etcd"))
    async with echo(here.server_context()) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown(port, stranger.client_context())
        with pytest.raises(OSError, match=r"(?i)certificate required|hung up"):
            await shown(port, anonymous)
        with pytest.raises(OSError, match=r"(?i)unknown ca|hung up"):
            await shown(port, careless)
    async with echo(stranger.server_context()) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown(port, here.client_context())
    async with echo(other_name.server_context()) as port:
        with pytest.raises(ssl.SSLCertVerificationError, match="hotswap"):
            await shown(port, here.client_context())


async def test_new_files_count_for_new_connections(authority: Authority, tmp_path: Path) -> None:
    here, there = authority.mount(tmp_path / "here"), authority.mount(tmp_path / "there")
    server, client = ClusterTls(here).server_context(), ClusterTls(there).client_context()
    async with echo(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        first = await shown(port, client)
        authority.mount(here)
        assert await shown(port, client) == der(here) != first
        other = Authority(tmp_path / "other")
        other.mount(here)
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown(port, client)
        other.mount(there)
        assert await shown(port, client) == der(here)
        writer.write(b"still there?\n")  # over the connection of before
        assert await asyncio.wait_for(reader.readline(), 30) == b"still there?\n"
        writer.close()


async def test_half_written_files_harm_nobody(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = Path(shutil.copytree(authority.mount(tmp_path / "mounted"), tmp_path / "here"))  # files instead of links
    member = ClusterTls(here)
    first, (certificate, key) = der(here), authority.issue("hotswap")
    async with echo(member.server_context()) as port:
        for name, content in (
            ("tls.crt", b""),
            ("tls.crt", certificate.read_bytes()[:200]),
            ("tls.crt", certificate.read_bytes()),  # the key has not come yet
            ("tls.key", key.read_bytes()[:100]),
        ):
            (here / name).write_bytes(content)
            with caplog.at_level(logging.ERROR):
                assert await shown(port, member.client_context()) == first
            assert "the certificate of before stays in use" in caplog.text
            caplog.clear()
        (here / "tls.key").write_bytes(key.read_bytes())
        assert await shown(port, member.client_context()) == der(here) != first


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(TlsUnavailable, match=r"no tls.crt and no tls.key and no ca.crt.*docs/security.md"):
        ClusterTls(tmp_path / "nowhere")
    here = authority.mount(tmp_path / "here")
    (here / "tls.key").unlink()
    (here / "tls.key").write_bytes(authority.issue("other")[1].read_bytes())
    with pytest.raises(TlsUnavailable, match="cannot be used"):
        ClusterTls(here)


def test_the_environment_names_the_directory(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOTSWAP_CLUSTER_TLS", raising=False)
    assert ClusterTls.of_environment() is None
    monkeypatch.setenv("HOTSWAP_CLUSTER_TLS", str(authority.mount(tmp_path / "here")))
    found = ClusterTls.of_environment()
    assert found is not None
    assert found.directory == tmp_path / "here"


@contextlib.contextmanager
def http_server(context: ssl.SSLContext) -> Iterator[int]:
    """A server of the standard library on blocking sockets; its port."""

    class Hello(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "5")
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_blocking_clients(authority: Authority, tmp_path: Path) -> None:
    member = ClusterTls(authority.mount(tmp_path / "here"))
    with http_server(member.server_context()) as port:
        with httpx.Client(verify=member.client_context(), trust_env=False) as client:
            assert client.get(f"https://127.0.0.1:{port}/").text == "hello"
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=member.client_context(), timeout=30)
        connection.request("GET", "/")
        assert connection.getresponse().read() == b"hello"
        connection.close()
        with socket.create_connection(("127.0.0.1", port), 30) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"hello" not in plain.recv(1000)
