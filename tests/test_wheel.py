"""What `pip install` of a built wheel gives: a `hotswap` that serves, publishes and trains, away from the checkout."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.ports import free_port
from tests.live import VLLM_ARGS
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.broad, pytest.mark.timeout(900)]
ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "trainer", "weightsync", "loadtest")


def without_checkout() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built, sources = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("sources")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__", "_compiled"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(built)]
    subprocess.run([*command, str(sources)], check=True, timeout=300)
    (made,) = built.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def hotswap(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in an environment that has the pinned packages and the wheel, and nothing of the checkout."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    install = [str(ROOT / "scripts/install.sh"), str(environment), str(ROOT / "requirements/cpu.txt")]
    subprocess.run(install, check=True, timeout=600, cwd=environment.parent)
    pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, timeout=120, env=without_checkout())
    return environment / "bin/hotswap"


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, Any]:
    """Options of subprocess: where nothing is to be found but what is installed."""
    return {"env": without_checkout() | {"HOTSWAP_STATE_DIR": str(tmp_path / "state")}, "cwd": tmp_path}


def test_every_file_that_is_not_code_is_in_it(wheel: Path) -> None:
    tracked = subprocess.check_output(["git", "ls-files", *PACKAGES], cwd=ROOT, text=True).split()
    with zipfile.ZipFile(wheel) as archive:
        assert set(tracked) <= set(archive.namelist())


@pytest.mark.parametrize("command", [["--help"], ["up", "--help"], ["train", "--help"], ["bench", "--help"]])
def test_it_says_what_it_can_do(hotswap: Path, alone: dict[str, Any], command: list[str]) -> None:
    done = subprocess.run([hotswap, *command], capture_output=True, text=True, check=False, **alone)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_it_serves_and_swaps(hotswap: Path, alone: dict[str, Any], checkpoints: dict[str, Path]) -> None:
    url, log = f"http://127.0.0.1:{(port := free_port())}", alone["cwd"] / "said"
    up = [hotswap, "up", "--model", checkpoints["say-0"], "--name", "toy", "--port", str(port), *VLLM_ARGS]
    with log.open("wb") as said:
        server = subprocess.Popen([*up, "--kv-cache-gib", "0.06"], stdout=said, stderr=said, **alone)

    def ready() -> bool:
        assert server.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/readyz").status_code == 200
        return False

    def answers() -> set[int]:
        body = {"prompt_token_ids": [5, 6], "max_tokens": 4, "ignore_eos": True, "stream": False}
        return set(httpx.post(f"{url}/generate", json=body).json()["choices"][0]["token_ids"])

    try:
        wait_until(ready, 300, what=lambda: log.read_text())
        assert answers() == {100}
        push = [hotswap, "weights", "push", checkpoints["say-1"]]
        done = subprocess.run(push, capture_output=True, text=True, check=False, **alone)
        assert done.returncode == 0, done.stderr
        assert answers() == {101}
    finally:
        server.terminate()
        server.wait(60)
