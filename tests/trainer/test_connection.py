"""The trainer's clients of a gateway: metrics that are posted, versions that serving goes back to, and TLS.

Keys and certificates come from files that are replaced under the clients.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.cluster_tls import Authority
from tests.server.gateway.harness import ADMIN_KEY, running_gateway
from tests.waiting import wait_until
from trainer.config import GatewayConfig, JudgeReward, ServingMemory, TelemetryConfig
from trainer.connection import ROLLBACK_ROUTE, roll_back_serving, verify
from trainer.errors import ConfigError, PublishError, RolloutError
from trainer.memory.serving import Fleet
from trainer.metrics.dashboards import ROUTE, WAITING, HttpMetrics, point
from trainer.metrics.writers import Tee
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
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An admin key, files that are looked at for every request, and time enough to post what waits at the end."""
    monkeypatch.setenv("HOTSWAP_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setattr("weightsync.tls.INTERVAL_S", 0.0)
    monkeypatch.setattr("trainer.metrics.dashboards.CLOSE_S", 60.0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


class Server(ThreadingHTTPServer):
    """A gateway of a few answers. `asked` are the requests: path, key and body. A path answers with its `statuses`
    first, then with 200. No answer is sent while `open` is not set."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tls = tls
        self.asked: list[tuple[str, str, Any]] = []
        self.statuses: dict[str, list[int]] = {}
        self.open = threading.Event()
        self.open.set()
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.server_port}"

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        if self.tls is not None:
            connection = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None: ...

    def bodies(self, path: str) -> list[Any]:
        """Bodies of the requests to a path."""
        return [body for asked, _, body in self.asked if asked == path]

    @property
    def keys(self) -> list[tuple[str, str]]:
        """The keys that were shown, by path."""
        return [(path, key) for path, key, _ in self.asked]


class Handler(BaseHTTPRequestHandler):
    def answer(self) -> None:
        assert isinstance(self.server, Server)
        asked = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.open.wait(30)
        self.server.asked.append((self.path, self.headers.get("authorization", ""), orjson.loads(asked or b"null")))
        statuses = self.server.statuses.get(self.path)
        status = statuses.pop(0) if statuses else 200
        refusal = {"error": {"message": "version 1 is retired"}}
        body = orjson.dumps(ANSWERS.get(self.path, {}) if status == 200 else refusal)
        self.send_response(status)
        if self.path == "/generate":
            body = b"event: token\ndata: " + body + b"\n\n"
            self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    server = Server(tls)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.open.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def gateway() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
def server(authority: Authority, tmp_path: Path) -> Iterator[Server]:
    """It wants certificates of the cluster."""
    with serving(ClusterTls(authority.mount(tmp_path / "gateway")).server_context()) as running:
        yield running


@pytest.fixture
def member(authority: Authority, tmp_path: Path) -> str:
    return str(authority.mount(tmp_path / "trainer"))


def test_a_step_is_its_numbers_under_the_names_the_console_draws() -> None:
    shown = {"step": 3, "version": 7, "loss": 1.5}
    values = shown | {"reward_mean": 0.25, "algorithm": "grpo", "kl": float("nan"), "on": True}
    assert point("step", values) == shown | {"reward": 0.25}
    evaluation = point("eval", {"step": 3, "accuracy": 0.5, "reward_mean": 0.4})
    assert evaluation == {"step": 3, "accuracy": 0.5, "eval_reward": 0.4}
    many = point("step", {f"m{i}": i for i in range(100)} | {"step": 1, "loss": 2.0})
    assert len(many) == 64
    assert (many["step"], many["loss"]) == (1, 2.0)


def test_steps_and_evaluations_are_posted_and_nothing_else(gateway: Server) -> None:
    """Beside another writer, which gets every event too."""
    seen: list[str] = []

    class Lines:
        def write(self, event: str, values: dict[str, Any]) -> None:
            seen.append(event)

        def close(self) -> None:
            seen.append("closed")

    metrics = Tee(Lines(), HttpMetrics(TelemetryConfig(gateway.url, timeout_s=60.0)))
    metrics.write("start", {"step": 0, "steps": 9})
    metrics.write("step", {"step": 1, "loss": 2.0})
    metrics.write("eval", {"step": 1, "set": "sums", "accuracy": 0.5})
    metrics.write("eval", {"step": 1, "version": 7, "set": "products", "accuracy": 0.25})
    metrics.write("checkpoint", {"step": 1, "ms": 3})
    metrics.close()
    assert gateway.bodies(ROUTE) == [
        {"step": 1, "loss": 2.0},
        {"step": 1, "accuracy": 0.5},
        {"step": 1, "products/accuracy": 0.25},
    ]
    assert set(gateway.keys) == {(ROUTE, f"Bearer {ADMIN_KEY}")}
    assert seen == ["start", "step", "eval", "eval", "checkpoint", "closed"]


def test_a_gateway_that_hangs_holds_up_nothing_and_the_newest_are_kept(gateway: Server) -> None:
    gateway.open.clear()
    metrics = HttpMetrics(TelemetryConfig(gateway.url, timeout_s=60.0))
    for step in range(5 * WAITING):
        metrics.write("step", {"step": step, "loss": 0.0})
    gateway.open.set()
    wait_until(lambda: {"step": 5 * WAITING - 1, "loss": 0.0} in gateway.bodies(ROUTE), 30)
    metrics.close()
    assert len(gateway.asked) <= WAITING + 2


def test_a_gateway_that_is_away_or_refuses_is_logged_once(gateway: Server, caplog: pytest.LogCaptureFixture) -> None:
    gateway.statuses[ROUTE] = [503] * 3
    metrics = HttpMetrics(TelemetryConfig(gateway.url, timeout_s=60.0))
    for step in (1, 2, 3):
        metrics.write("step", {"step": step, "loss": 0.0})
    wait_until(lambda: len(gateway.asked) == 3)
    metrics.close()
    away = HttpMetrics(TelemetryConfig(NOWHERE))
    began = time.monotonic()
    away.write("step", {"step": 1, "loss": 0.0})
    away.close()
    assert time.monotonic() - began < 50, "it was given up at once"
    assert len([r for r in caplog.records if "does not take" in r.message]) == 2


def test_a_real_gateway_takes_them(tmp_path: Path) -> None:
    with running_gateway(tmp_path) as gateway:
        metrics = HttpMetrics(TelemetryConfig(f"http://127.0.0.1:{gateway.admin_port}", timeout_s=60.0))
        metrics.write("step", {"step": 1, "loss": 2.0, "reward_mean": 0.5, "reward/exact_match": 0.5, "version": 3})
        metrics.write("eval", {"step": 1, "set": "held_out", "accuracy": 0.75, "reward_mean": 0.5})
        metrics.close()
        (kept,) = gateway.gateway.default.training.points
    assert (kept["loss"], kept["reward"], kept["accuracy"], kept["version"]) == (2.0, 0.5, 0.75, 3)


def test_serving_goes_back_through_the_admin_port(gateway: Server) -> None:
    roll_back_serving(TelemetryConfig(gateway.url), 3, 30.0)
    assert gateway.asked == [(ROLLBACK_ROUTE, f"Bearer {ADMIN_KEY}", {"version": 3})]
    gateway.statuses[ROLLBACK_ROUTE] = [409]
    with pytest.raises(PublishError, match=r"would not go back to version 3.*is retired"):
        roll_back_serving(TelemetryConfig(gateway.url), 3, 30.0)
    with pytest.raises(PublishError, match="does not answer"):
        roll_back_serving(TelemetryConfig(NOWHERE), 3, 30.0)


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
            with pytest.raises(RolloutError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.generate(ASK)
            assert not server.keys
            ca.write_bytes(authority.ca.read_bytes())
            assert (await client.generate(ASK))[0].turn.token_ids == (1,)
        finally:
            await client.close()


def test_the_admin_port_over_mutual_tls(
    server: Server, member: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOTSWAP_ADMIN_KEY")
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
    later = (ROUTE, "/admin/instances", "/admin/sleep", "/admin/sleep")
    assert server.keys == [(ROLLBACK_ROUTE, "Bearer first"), *((path, "Bearer second") for path in later)]
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
    with pytest.raises(ConfigError, match=r"no tls.crt"):
        verify(GatewayConfig("https://h", cluster_tls=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="ca_file"):
        verify(GatewayConfig("https://h", ca_file=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"api_key_file.*cannot read"):
        GenerateClient(GatewayConfig("https://h", api_key_file=str(tmp_path / "nowhere")))
    assert verify(GatewayConfig("https://h")) is True


def test_the_key_is_read_from_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTSWAP_ADMIN_KEY")
    (tmp_path / "key").write_text("a-key-in-a-file\n")
    assert TelemetryConfig("http://h", admin_key_file=str(tmp_path / "key")).admin_key() == "a-key-in-a-file"
    with pytest.raises(ConfigError, match="no admin key"):
        TelemetryConfig("http://h").admin_key()
    with pytest.raises(ConfigError, match="cannot read"):
        TelemetryConfig("http://h", admin_key_file="/nowhere/key").admin_key()
