"""The trainer's clients over TLS, with keys and certificates from files that are replaced under them."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import orjson
import pytest

from tests.cluster_tls import Authority
from trainer.config import GatewayConfig, JudgeReward, ServingMemory, TelemetryConfig
from trainer.connection import roll_back_serving, verify
from trainer.errors import ConfigError, GatewayUnreachable, PublishError
from trainer.memory.serving import Fleet
from trainer.metrics.dashboards import HttpMetrics
from trainer.rewards import RewardRequest
from trainer.rewards.models import Judge
from trainer.rollouts.generate import GenerateClient, Request
from weightsync.tls import ClusterTls

CHOICE = {"index": 0, "token_ids": [1], "logprobs": [-0.5], "finish_reason": "stop"}
ANSWERS: dict[str, Any] = {
    "/generate": {**CHOICE, "weight_versions": [{"version": 1, "start": 0, "end": 1}]},
    "/v1/chat/completions": {"choices": [{"message": {"content": "7"}}]},
    "/admin/sleep": {"orders": [], "asleep": []},
    "/admin/instances": {"instances": [{"id": "i0", "eligible": True}]},
}
ASK = Request(prompt_ids=(1,), n=1, max_tokens=1, temperature=1.0)


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.tls.INTERVAL_S", 0.0)
    monkeypatch.delenv("HOTSWAP_ADMIN_KEY", raising=False)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


class Server(ThreadingHTTPServer):
    """A gateway of a few answers; `keys` are those it was shown, by path."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tls = tls
        self.keys: list[tuple[str, str]] = []
        self.url = f"https://127.0.0.1:{self.server_port}"

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        return self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, request: Any, client_address: Any) -> None: ...


class Handler(BaseHTTPRequestHandler):
    def answer(self) -> None:
        assert isinstance(self.server, Server)
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.keys.append((self.path, self.headers.get("authorization", "")))
        body = orjson.dumps(ANSWERS.get(self.path, {}))
        self.send_response(200)
        if self.path == "/generate":
            body = b"event: token\ndata: " + body + b"\n\n"
            self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def serving(tls: ssl.SSLContext) -> Iterator[Server]:
    server = Server(tls)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def server(authority: Authority, tmp_path: Path) -> Iterator[Server]:
    """It wants certificates of the cluster."""
    with serving(ClusterTls(authority.mount(tmp_path / "gateway")).server_context()) as running:
        yield running


@pytest.fixture
def member(authority: Authority, tmp_path: Path) -> str:
    return str(authority.mount(tmp_path / "trainer"))


async def test_rollouts_over_mutual_tls_with_a_key_that_is_replaced(
    server: Server, member: str, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("first\n")
    client = GenerateClient(GatewayConfig(server.url, api_key_file=str(key), cluster_tls=member))
    try:
        for content in ("first", "second", "", "third"):
            key.write_text(content)
            (answer,) = await client.generate(ASK)
            assert answer.turn.token_ids == (1,)
    finally:
        await client.close()
    assert [shown for _, shown in server.keys] == [f"Bearer {k}" for k in ("first", "second", "second", "third")]


async def test_rollouts_from_a_server_whose_authority_is_in_a_file(authority: Authority, tmp_path: Path) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(authority.server_cert, authority.server_key)
    ca = tmp_path / "ca.pem"
    ca.write_bytes(Authority(tmp_path / "other").ca.read_bytes())
    with serving(tls) as server:
        client = GenerateClient(GatewayConfig(server.url, ca_file=str(ca), retry_s=0.2))
        try:
            with pytest.raises(GatewayUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
                await client.generate(ASK)
            assert not server.keys
            ca.write_bytes(authority.ca.read_bytes())
            assert (await client.generate(ASK))[0].turn.token_ids == (1,)
        finally:
            await client.close()


def test_the_admin_port_over_mutual_tls(server: Server, member: str, tmp_path: Path) -> None:
    key = tmp_path / "admin.key"
    key.write_text("first")
    config = TelemetryConfig(server.url, admin_key_file=str(key), cluster_tls=member)
    roll_back_serving(config, 3, 30.0)
    metrics = HttpMetrics(config)
    key.write_text("second")
    metrics.write("step", {"step": 1, "loss": 0.5})
    metrics.close()
    fleet = Fleet(ServingMemory(server.url, admin_key_file=str(key), cluster_tls=member))
    assert not fleet.asleep()
    fleet.close()
    rest = [("/admin/instances", "Bearer second"), ("/admin/sleep", "Bearer second"), ("/admin/sleep", "Bearer second")]
    assert server.keys == [
        ("/admin/weights/rollback", "Bearer first"),
        ("/admin/training/metrics", "Bearer second"),
        *rest,
    ]
    with pytest.raises(PublishError, match="CERTIFICATE_VERIFY_FAILED"):
        roll_back_serving(TelemetryConfig(server.url, admin_key_file=str(key)), 3, 30.0)


async def test_a_judge_behind_the_gateway(server: Server, member: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    gateway = GatewayConfig(server.url, api_key_file=str(key), cluster_tls=member)
    judge = Judge(JudgeReward(model="m"), gateway)
    await judge.open()
    assert await judge(RewardRequest("p", "a", "e")) == 0.7
    await judge.close()
    assert server.keys == [("/v1/chat/completions", "Bearer secret")]


def test_what_cannot_work_is_said_at_the_start(tmp_path: Path, authority: Authority, member: str) -> None:
    with pytest.raises(ConfigError, match=r"ca_file.*beside cluster_tls"):
        GatewayConfig("https://h", ca_file="/a", cluster_tls="/b")
    with pytest.raises(ConfigError, match="not encrypted"):
        TelemetryConfig("http://h", ca_file="/a")
    with pytest.raises(ConfigError, match=r"no tls.crt"):
        verify(GatewayConfig("https://h", cluster_tls=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="ca_file"):
        verify(GatewayConfig("https://h", ca_file=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"api_key_file.*cannot read"):
        GenerateClient(GatewayConfig("https://h", api_key_file=str(tmp_path / "nowhere")))
    assert verify(GatewayConfig("https://h")) is True
