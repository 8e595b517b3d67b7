"""What a request names by URL never comes from this host or a private network, unless the operator listed the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from vllm import envs
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.multimodal.media.base import MediaIO

from server.instance import media
from server.instance.main import prepare_environment


class Bytes(MediaIO[bytes]):
    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        return data.encode()

    def load_file(self, filepath: Any) -> bytes:
        raise AssertionError(filepath)

    def get_max_bytes(self) -> int | None:
        return None


class Server:
    """Counts what it is asked for; `/away` redirects to `target`."""

    def __init__(self, address: str) -> None:
        self.asked: list[str] = []
        self.target = ""
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told.asked.append(self.path)
                self.send_response(302 if self.path == "/away" else 200)
                self.send_header("location", told.target)
                self.send_header("content-length", "6")
                self.end_headers()
                self.wfile.write(b"secret")

            def log_message(self, *_: Any) -> None: ...

        self._server = HTTPServer((address, 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server("127.0.0.1")
    yield made
    made.close()


async def fetch(url: str, *domains: str) -> bytes:
    connector = MEDIA_CONNECTOR_REGISTRY.load(media.NAME, allowed_media_domains=list(domains))
    assert isinstance(connector, media.PublicMedia)
    try:
        return bytes(await connector.load_from_url_async(url, Bytes()))
    finally:
        await (await connector.connection.get_async_client()).close()
        media._connection.cache_clear()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "0.0.0.0", "2130706433", "[::ffff:127.0.0.1]"])
async def test_nothing_on_this_host_is_asked(server: Server, host: str) -> None:
    with pytest.raises((VLLMValidationError, VLLMUnprocessableEntityError), match=r"not public|Invalid URL"):
        await fetch(f"http://{host}:{server.port}/")
    assert not server.asked


async def test_a_host_that_the_operator_listed_is_asked(server: Server) -> None:
    assert await fetch(f"http://localhost:{server.port}/", "localhost") == b"secret"
    assert await fetch(f"http://127.0.0.1:{server.port}/", "127.0.0.1") == b"secret"


async def test_a_redirect_leads_nowhere_else(server: Server) -> None:
    other = Server("127.0.0.2")
    server.target = f"http://127.0.0.2:{other.port}/"
    with pytest.raises(VLLMValidationError, match="not public"):
        await fetch(f"http://localhost:{server.port}/away", "localhost")
    other.close()
    assert (server.asked, other.asked) == (["/away"], [])


async def test_what_is_in_the_request_needs_no_address() -> None:
    assert await fetch("data:image/png;base64,AAAA") == b"AAAA"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2001:4860:4860::8888", True), ("64:ff9b::8.8.8.8", True),
        ("10.0.0.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("224.0.0.1", False), ("::1", False),
        ("fe80::1%lo", False), ("fd00::1", False), ("::ffff:10.0.0.1", False), ("64:ff9b::10.0.0.1", False),
        ("2002:0a00:0001::", False), ("example.org", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert media.is_public(address) is public


def test_instances_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_MEDIA_CONNECTOR", raising=False)
    monkeypatch.setattr("os.environ", {})
    prepare_environment()
    assert envs.VLLM_MEDIA_CONNECTOR == media.NAME
