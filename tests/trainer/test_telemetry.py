"""Metrics posted to a gateway: what is posted, and that nothing that happens to the gateway reaches the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.server.gateway.harness import ADMIN_KEY, running_gateway
from tests.waiting import wait_until
from trainer.config import TelemetryConfig
from trainer.errors import ConfigError
from trainer.metrics.dashboards import WAITING, HttpMetrics, point
from trainer.metrics.writers import Tee


class Server:
    """Takes posts; `answer` is awaited before each is answered."""

    def __init__(self) -> None:
        self.points: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.status = 200
        self.answer = threading.Event()
        self.answer.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.answer.wait(30)
                outer.points.append(orjson.loads(body))
                outer.keys.add(self.headers["authorization"])
                self.send_response(outer.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.answer.set()
    started.http.shutdown()
    started.http.server_close()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_ADMIN_KEY", ADMIN_KEY)


def test_a_step_is_its_numbers_under_the_names_the_console_draws() -> None:
    values = {
        "step": 3,
        "loss": 1.5,
        "reward_mean": 0.25,
        "version": 7,
        "algorithm": "grpo",
        "kl": float("nan"),
        "on": True,
    }
    assert point("step", values) == {"step": 3, "version": 7, "reward": 0.25, "loss": 1.5}
    assert point("eval", {"step": 3, "accuracy": 0.5, "reward_mean": 0.4}) == {
        "step": 3, "accuracy": 0.5, "eval_reward": 0.4
    }  # fmt: skip
    many = point("step", {f"m{i}": i for i in range(100)} | {"step": 1, "loss": 2.0})
    assert len(many) == 64
    assert (many["step"], many["loss"]) == (1, 2.0)


def test_steps_and_evaluations_are_posted_and_nothing_else(server: Server) -> None:
    metrics = HttpMetrics(TelemetryConfig(server.url))
    metrics.write("start", {"step": 0, "steps": 9})
    metrics.write("step", {"step": 1, "loss": 2.0})
    metrics.write("eval", {"step": 1, "set": "sums", "accuracy": 0.5})
    metrics.write("eval", {"step": 1, "version": 7, "set": "products", "accuracy": 0.25})
    metrics.write("checkpoint", {"step": 1, "ms": 3})
    metrics.close()
    assert server.points == [
        {"step": 1, "loss": 2.0},
        {"step": 1, "accuracy": 0.5},
        {"step": 1, "products/accuracy": 0.25},
    ]
    assert server.keys == {f"Bearer {ADMIN_KEY}"}


def test_a_gateway_that_hangs_holds_up_nothing_and_the_newest_are_kept(server: Server) -> None:
    server.answer.clear()
    metrics = HttpMetrics(TelemetryConfig(server.url))
    for step in range(5 * WAITING):
        metrics.write("step", {"step": step, "loss": 0.0})
    server.answer.set()
    wait_until(lambda: bool(server.points) and server.points[-1]["step"] == 5 * WAITING - 1, 30)
    metrics.close()
    assert len(server.points) <= WAITING + 2


def test_a_gateway_that_is_away_or_refuses_is_logged_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.status = 503
    metrics = HttpMetrics(TelemetryConfig(server.url))
    for step in (1, 2, 3):
        metrics.write("step", {"step": step, "loss": 0.0})
    wait_until(lambda: len(server.points) == 3)
    metrics.close()
    away = HttpMetrics(TelemetryConfig("http://127.0.0.1:9"))
    began = time.monotonic()
    away.write("step", {"step": 1, "loss": 0.0})
    away.close()
    assert time.monotonic() - began < 30
    assert len([r for r in caplog.records if "does not take" in r.message]) == 2


def test_every_writer_gets_every_event(server: Server) -> None:
    seen: list[str] = []

    class Lines:
        def write(self, event: str, values: dict[str, Any]) -> None:
            seen.append(event)

        def close(self) -> None:
            seen.append("closed")

    both = Tee(Lines(), HttpMetrics(TelemetryConfig(server.url)))
    both.write("step", {"step": 1, "loss": 1.0})
    both.close()
    assert seen == ["step", "closed"]
    assert server.points == [{"step": 1, "loss": 1.0}]


def test_a_real_gateway_takes_them(tmp_path: Path) -> None:
    with running_gateway(tmp_path) as gateway:
        metrics = HttpMetrics(TelemetryConfig(f"http://127.0.0.1:{gateway.admin_port}"))
        metrics.write("step", {"step": 1, "loss": 2.0, "reward_mean": 0.5, "reward/exact_match": 0.5, "version": 3})
        metrics.write("eval", {"step": 1, "set": "held_out", "accuracy": 0.75, "reward_mean": 0.5})
        metrics.close()
        (kept,) = gateway.gateway.default.training.points
    assert (kept["loss"], kept["reward"], kept["accuracy"], kept["version"]) == (2.0, 0.5, 0.75, 3)


def test_the_key_is_read_from_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTSWAP_ADMIN_KEY")
    (tmp_path / "key").write_text("a-key-in-a-file\n")
    assert TelemetryConfig("http://h", admin_key_file=str(tmp_path / "key")).admin_key() == "a-key-in-a-file"
    with pytest.raises(ConfigError, match="no admin key"):
        TelemetryConfig("http://h").admin_key()
    with pytest.raises(ConfigError, match="cannot read"):
        TelemetryConfig("http://h", admin_key_file="/nowhere/key").admin_key()
    with pytest.raises(ConfigError, match="not an HTTP address"):
        TelemetryConfig("host:8001")
