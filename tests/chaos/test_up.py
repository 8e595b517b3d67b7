"""`hotswap up` as a user runs it: what dies comes back with the same weights, and stopping leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from server.cli.paths import ServerInfo
from tests.live import VLLM_ARGS, eventually

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ASK = {"prompt_token_ids": [3, 4, 5, 6], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": False}


@dataclass
class Up:
    """The running command, and what it wrote about itself."""

    process: subprocess.Popen[bytes]
    state_dir: Path
    info: ServerInfo

    def hotswap(self, *args: str) -> str:
        command = [sys.executable, "-m", "server.cli", *args, "--state-dir", str(self.state_dir)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    def child(self, module: str) -> psutil.Process:
        (found,) = [p for p in psutil.Process(self.process.pid).children() if module in " ".join(p.cmdline())]
        return found

    def ready(self) -> bool:
        try:
            return httpx.get(self.info.url + "/readyz", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def ask(self) -> dict[str, Any]:
        answer = httpx.post(self.info.url + "/generate", json=ASK, timeout=30)
        answer.raise_for_status()
        return dict(answer.json()["choices"][0])


@pytest.fixture
def up(checkpoints: dict[str, Path], tmp_path: Path) -> Iterator[Up]:
    command = [sys.executable, "-m", "server.cli", "up", "--model", str(checkpoints["a"]), "--port", "0"]
    command += ["--state-dir", str(tmp_path), "--kv-cache-gib", "0.06", *VLLM_ARGS]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        assert eventually((tmp_path / "server.json").exists, 300)
        yield Up(process, tmp_path, ServerInfo.read(tmp_path))
    finally:
        process.terminate()
        process.wait(30)


def test_instance_and_gateway_killed_then_stopped(up: Up, checkpoints: dict[str, Path]) -> None:
    up.hotswap("weights", "push", str(checkpoints["b"]))
    before = up.ask()
    assert before["weight_versions"][0]["version"] == 2

    for module in ("server.cli instance", "server.gateway"):
        victim = up.child(module)
        family = [victim, *victim.children(recursive=True)]
        os.kill(victim.pid, signal.SIGKILL)
        assert eventually(lambda: not any(p.is_running() and p.status() != "zombie" for p in family), 15)  # noqa: B023
        assert eventually(lambda: not up.ready(), 15)
        assert eventually(up.ready, 300)
        assert up.ask() == before, f"the answer changed after {module} was killed"

    assert "active" in up.hotswap("weights", "list")
    assert "is active" in up.hotswap("weights", "rollback")
    assert up.ask()["weight_versions"][0]["version"] == 1

    family = psutil.Process(up.process.pid).children(recursive=True)
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(30) == 0
    assert eventually(lambda: not any(p.is_running() and p.status() != "zombie" for p in family), 15)
    assert not list(Path("/dev/shm").glob(f"hotswap-*{up.info.url.rsplit(':', 1)[1]}*"))
