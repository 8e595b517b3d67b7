"""Numbers that go wrong: back to the last good version, in training and in serving."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.trainer.faults.runs import arguments, curve, events
from tests.trainer.fleet import fleet
from tests.trainer.zygote import Zygote
from trainer.config import TelemetryConfig
from trainer.connection import roll_back_serving
from trainer.errors import PublishError

KEY = {"HOTSWAP_ADMIN_KEY": "secret"}


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[dict[str, Any]], list[int]]]:
    """An admin port: its address, what it was asked, and the statuses it answers with (then 200)."""
    asked: list[dict[str, Any]] = []
    statuses: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/admin/weights/rollback":
                asked.append({"key": self.headers["authorization"], **body})
            self.send_response(statuses.pop(0) if statuses and "rollback" in self.path else 200)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "version 1 is retired"}}')

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv(*next(iter(KEY.items())))
    yield f"http://127.0.0.1:{server.server_port}", asked, statuses
    server.shutdown()
    server.server_close()


def test_serving_goes_back_through_the_admin_port(admin: tuple[str, list[dict[str, Any]], list[int]]) -> None:
    url, asked, statuses = admin
    roll_back_serving(TelemetryConfig(admin_url=url), 3, 5.0)
    assert asked == [{"key": "Bearer secret", "version": 3}]
    statuses.append(409)
    with pytest.raises(PublishError, match=r"would not go back to version 3.*is retired"):
        roll_back_serving(TelemetryConfig(admin_url=url), 3, 5.0)
    with pytest.raises(PublishError, match="does not answer"):
        roll_back_serving(TelemetryConfig(admin_url="http://127.0.0.1:9"), 3, 5.0)


Training = Callable[..., tuple[int, str]]


@pytest.fixture
def train(zygote: Zygote, config: dict[str, Any], tmp_path: Path) -> Training:
    """A run whose weights become NaN before a step's pass, as often as it says there."""

    def run(poison: str = "", **changes: Any) -> tuple[int, str]:
        started = zygote.start(
            arguments(config | changes, tmp_path), tmp_path / "said", HOTSWAP_TEST_POISON=poison, **KEY
        )
        status = zygote.wait(started)
        return status, (tmp_path / "said").read_text()

    return run


def test_a_transient_fault_leaves_no_trace(train: Training, config: dict[str, Any], tmp_path: Path) -> None:
    """What was NaN once is computed again from the checkpoint: the curve is that of a run without a fault."""
    assert train(metrics=str(tmp_path / "through"), checkpoint=None)[0] == 0
    status, said = train("8x1", faults={"on_diverged": "rollback"})
    assert status == 0, said
    (event,) = events(config["metrics"], "rollback")
    assert (event["step"], event["to_step"], event["skipped_to"]) == (8, 6, None)
    assert "loss nan" in event["reason"]
    assert curve(config["metrics"]) == curve(tmp_path / "through")
    assert len(curve(config["metrics"])) == 12


def test_a_batch_that_does_it_again_is_left_out(train: Training, config: dict[str, Any]) -> None:
    status, said = train("8x2", faults={"on_diverged": "rollback"})
    assert status == 0, said
    first, second = events(config["metrics"], "rollback")
    assert (first["skipped_to"], second["skipped_to"]) == (None, 48), "6 records a step, 8 steps"
    assert max(curve(config["metrics"])) == 12


def test_there_is_an_end_to_it(train: Training, config: dict[str, Any]) -> None:
    status, said = train("8x9", faults={"on_diverged": "rollback", "max_rollbacks": 2})
    assert status == 1
    assert "after 2 rollbacks too" in said
    config["checkpoint"]["resume"] = "never"
    status, said = train("8x1")
    assert status == 1
    assert said.count("error: ") == 2
    assert "Traceback" not in said


@pytest.mark.parametrize("held", [True, False], ids=["version-held", "version-gone"])
def test_serving_follows(
    train: Training,
    config: dict[str, Any],
    small_models: dict[str, str],
    admin: tuple[str, list[dict[str, Any]], list[int]],
    tmp_path: Path,
    held: bool,
) -> None:
    """Versions published since the checkpoint are bad too. The gateway is asked for the checkpoint's; one that no
    longer has it gets the same weights as a new version."""
    url, asked, statuses = admin
    statuses += [] if held else [404]
    with fleet(small_models["qwen2"], tmp_path) as running:
        publish = {"model": "tiny", "store": running.store_url, "dtype": "float32"}
        status, said = train(
            "8x1", faults={"on_diverged": "rollback"}, publish=publish, telemetry={"admin_url": url}, steps=9
        )
    assert status == 0, said
    (event,) = events(config["metrics"], "rollback")
    versions = {e["step"]: e["version"] for e in events(config["metrics"], "step")[:7]}
    assert asked == [{"key": "Bearer secret", "version": versions[6]}]
    assert event["version"] == (versions[6] if held else versions[7] + 1)
