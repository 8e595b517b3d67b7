"""What a request names by URL never comes from this host or a private network, unless the operator listed the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from vllm import envs
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.multimodal.media.base import MediaIO

from server.instance import media
from server.instance.main import prepare_environment
from tests.server.asking import answering


class Bytes(MediaIO[bytes]):
    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        return data.encode()

    def load_file(self, filepath: Any) -> bytes:
        raise AssertionError(filepath)

    def get_max_bytes(self) -> int | None:
        return None


@dataclass
class Server:
    port: int
    asked: list[str]


@contextlib.contextmanager
def serving(address: str = "127.0.0.1", target: str = "") -> Iterator[Server]:
    """`/away` redirects to `target`."""
    asked: list[str] = []

    def answer(path: str, _: object) -> tuple[int, bytes]:
        asked.append(path)
        return 302 if path == "/away" else 200, b"secret"

    with answering(answer, address, {"location": target}) as url:
        yield Server(int(url.rpartition(":")[2]), asked)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


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


async def test_a_redirect_leads_nowhere_else() -> None:
    with (
        serving("127.0.0.2") as other,
        serving(target=f"http://127.0.0.2:{other.port}/") as server,
        pytest.raises(VLLMValidationError, match="not public"),
    ):
        await fetch(f"http://localhost:{server.port}/away", "localhost")
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
