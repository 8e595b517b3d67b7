"""`hotswap up` as a user runs it: what dies comes back with the same weights, and all of it does, however it ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from server.cli.admin import AdminClient
from server.up.paths import ServerInfo
from server.up.server import arena_name
from tests.live import VLLM_ARGS
from tests.waiting import ended, wait_until
from weightsync.memory.arena import DEFAULT_ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.broad, pytest.mark.timeout(900)]  # five starts
ASK = {"prompt_token_ids": [3, 4, 5, 6], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": False}


class Up:
    """The command on one state directory, started again and again, and what it writes about itself."""

    def __init__(self, model: Path, state_dir: Path) -> None:
        self.state_dir, self.key = state_dir, ""
        self.arena = DEFAULT_ROOT / arena_name(model.name, state_dir.resolve())
        self.command = [sys.executable, "-m", "server.cli", "up", "--model", str(model), "--port", "0"]
        self.command += ["--state-dir", str(state_dir), "--kv-cache-gib", "0.06", *VLLM_ARGS]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it says that it is ready."""
        assert self.process is None
        with self.output.open("wb") as output:
            self.process = process = subprocess.Popen(self.command, stdout=output, stderr=subprocess.STDOUT)
        wait_until(lambda: self.info_of(process.pid) is not None or process.poll() is not None, 300)
        assert process.poll() is None, self.said()

    @property
    def output(self) -> Path:
        return self.state_dir.with_suffix(".out")

    def said(self) -> str:
        return " ".join(self.output.read_text().split())  # the console breaks lines

    def info_of(self, pid: int) -> ServerInfo | None:
        path = self.state_dir / "server.json"
        info = ServerInfo.read(self.state_dir) if path.exists() else None
        return info if info is not None and (info.pid, info.state) == (pid, "ready") else None

    @property
    def info(self) -> ServerInfo:
        assert self.process is not None
        info = self.info_of(self.process.pid)
        assert info is not None
        return info

    def family(self) -> list[psutil.Process]:
        assert self.process is not None
        up = psutil.Process(self.process.pid)
        return [up, *up.children(recursive=True)]

    def end(self, number: int) -> int:
        """Send a signal to the command, or SIGKILL to all of its processes; its exit status, when all have ended."""
        assert self.process is not None
        family = self.family()
        for process in family if number == signal.SIGKILL else family[:1]:
            process.send_signal(number)
        status = self.process.wait(120)
        wait_until(lambda: all_ended(family), 60)
        self.process = None
        return status

    def hotswap(self, *args: str) -> str:
        command = [sys.executable, "-m", "server.cli", *args, "--state-dir", str(self.state_dir)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    def pushed(self, model: Path) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            return bool(self.hotswap("weights", "push", str(model)))
        return False

    def history(self) -> list[dict[str, Any]]:
        return list(AdminClient(self.state_dir).call("GET", "/admin/swaps")["swaps"])

    def child(self, module: str) -> psutil.Process:
        """Not what that has forked in turn, which has its command line."""
        ours = {p.pid: p for p in self.family() if module in command_of(p)}
        (found,) = [p for p in ours.values() if p.ppid() not in ours]
        return found

    def ready(self) -> bool:
        try:
            return httpx.get(self.info.url + "/readyz", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, key: str | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key if key is None else key}"} if key != "" else {}
        return httpx.post(self.info.url + "/generate", json=ASK, headers=headers, timeout=30)

    def answer(self) -> dict[str, Any]:
        answer = self.ask()
        answer.raise_for_status()
        return dict(answer.json()["choices"][0])


def command_of(process: psutil.Process) -> str:
    """Its command line; "" of one that has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def all_ended(processes: list[psutil.Process]) -> bool:
    return all(map(ended, processes))


@pytest.fixture
def up(checkpoints: dict[str, Path], tmp_path: Path) -> Iterator[Up]:
    """Version 2 is active, and there is a key."""
    found = Up(checkpoints["a"], tmp_path / "state")
    found.start()
    try:
        found.hotswap("weights", "push", str(checkpoints["b"]))
        found.key = found.hotswap("keys", "create", "somebody").strip()
        assert [swap["version"] for swap in found.history()] == [2, 1]
        yield found
    finally:
        if found.process is not None:
            found.process.terminate()
            found.process.wait(120)


def test_killed_in_part_killed_whole_and_stopped(up: Up, checkpoints: dict[str, Path]) -> None:
    before, history = up.answer(), up.history()
    assert before["weight_versions"][0]["version"] == 2
    assert up.ask(key="").status_code == 401

    for module in ("server.cli instance", "server.up.forks", "server.gateway"):
        victim = up.child(module)
        family = [victim, *victim.children(recursive=True)]
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: all_ended(family), 60)  # noqa: B023
        wait_until(lambda: not up.ready(), 60)
        wait_until(up.ready, 300)
        assert up.answer() == before, f"the answer changed after {module} was killed"

    second = subprocess.run([*up.command, "--fresh"], capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode != 0
    assert "already runs with its state in" in second.stderr
    assert up.hotswap("status").count("SERVING") == 1
    assert up.answer() == before

    up.end(signal.SIGKILL)
    assert list(up.arena.glob("slot-*"))
    up.start()
    assert "going on with version 2" in up.said()
    assert "from shared memory" in up.said()
    assert (up.answer(), up.history()) == (before, history)
    assert up.ask(key="").status_code == 401
    assert "is active" in up.hotswap("weights", "rollback")
    assert up.answer()["weight_versions"][0]["version"] == 1
    assert "version 3" in up.hotswap("weights", "push", str(checkpoints["a"]))

    assert up.end(signal.SIGTERM) == 0
    assert not up.arena.exists()


@pytest.mark.broad
def test_the_supervisor_alone_is_killed_the_store_goes_away_and_the_power_fails(
    up: Up, checkpoints: dict[str, Path]
) -> None:
    before, history = up.answer(), up.history()

    family = up.family()
    family[0].kill()
    family[0].wait()
    up.process = None
    up.start()  # at once: what is left of the run before is waited for
    assert all_ended(family)
    assert "from shared memory" in up.said()
    assert (up.answer(), up.history()) == (before, history)

    assert up.end(signal.SIGINT) == 0
    assert not up.arena.exists()
    up.start()
    assert f"its copy in {up.state_dir}" in up.said()
    assert (up.answer(), up.history()) == (before, history)
    assert "is active" in up.hotswap("weights", "rollback")
    assert up.answer()["weight_versions"][0]["version"] == 1

    store = [path for path in up.state_dir.glob("store.db*") if path.is_file()]
    for path in store:
        path.rename(path.with_name("aside-" + path.name))
    wait_until(lambda: "Requests are answered; no weights and no keys can be changed" in up.said(), 120)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        up.hotswap("weights", "push", str(checkpoints["a"]))
    assert "store.db: no such file" in " ".join(refused.value.stderr.split())
    assert up.ask().status_code == 200
    assert not (up.state_dir / "store.db").exists()
    for path in store:
        path.with_name("aside-" + path.name).rename(path)
    wait_until(lambda: up.pushed(checkpoints["b"]), 120)
    assert up.answer()["weight_versions"][0]["version"] == 3

    (key,) = json.loads(up.hotswap("keys", "list", "--json"))["keys"]
    up.hotswap("keys", "revoke", key["id"], "--forget")
    assert up.ask().status_code == 401
    wait_until((up.state_dir / "versions" / "3").is_dir, 60)
    up.end(signal.SIGKILL)
    shutil.rmtree(up.arena)
    up.start()
    assert "going on with version 3" in up.said()
    assert up.ask().status_code == 401
    up.key = up.hotswap("keys", "create", "another").strip()
    numbers = ("weight_versions", "prompt_weight_versions")  # the same weights, published again
    assert {k: v for k, v in up.answer().items() if k not in numbers} == {
        k: v for k, v in before.items() if k not in numbers
    }
