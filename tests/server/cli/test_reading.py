"""Commands that only read: quick to start, and readable on a terminal of 80 columns."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from server.key_limits import KeyLimits
from tests.server.asking import answering

# What takes a second or more to import, or is not there where only the command line is installed.
HEAVY = {"torch", "transformers", "vllm", "megatron", "numpy", "fastapi", "uvicorn", "grpc", "huggingface_hub"}
RUN = """
import runpy, sys
try:
    runpy.run_module("server.cli", run_name="__main__")
finally:
    print("modules:", *{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""
INSTANCE = {
    "id": "gpu-host-17-8000-instance-0", "state": "SERVING", "eligible": True, "draining": False, "active_version": 12,
    "active_epoch": 31, "fingerprint": "0123456789abcdef", "load": 3.0, "circuit": "closed", "answering": True,
    "stage_ms": 1758.31, "commit_ms": 53.07, "error": None,
}  # fmt: skip
VERSION = {
    "version": 12, "state": "ready", "step": 1200, "nbytes": 16_060_522_496, "created_at": 1.8e9,
    "source": "/var/lib/checkpoints/a-run-with-a-long-name/step-1200",
}  # fmt: skip
KEY = {
    "id": "k-0123456789abcdef", "name": "evaluation-team", "scopes": ["infer", "admin"], "state": "active",
    "models": [], "expires_at": 1.9e9, "limits": asdict(KeyLimits(requests_per_min=600, tokens_per_min=4_000_000)),
}  # fmt: skip


ANSWERS: dict[str, Any] = {
    "/admin/instances": {"instances": [INSTANCE, INSTANCE | {"id": "b", "answering": False, "eligible": False}]},
    "/admin/weights": {"active": {"version": 12}, "versions": [VERSION]},
    "/admin/weights/active": {"version": 12, "epoch": 31, "previous": 11, "split": None},
    "/admin/keys": {"inference": "keys", "keys": [KEY]},
}


@pytest.fixture(scope="module")
def admin_url() -> Iterator[str]:
    """An admin port with one of everything."""
    with answering(lambda path, _: (200, json.dumps(ANSWERS[path]).encode())) as url:
        yield url


def run(*words: str, **more: str) -> str:
    """The output of a command, which imports little and cuts nothing off."""
    environment = {"HOTSWAP_ADMIN_KEY": "any", "COLUMNS": "80", "PATH": "", **more}
    command = [sys.executable, "-c", RUN, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    modules = set(done.stderr.rpartition("modules:")[2].split())
    assert "typer" in modules
    assert not HEAVY & modules
    assert "…" not in done.stdout
    return done.stdout


COMMANDS = {
    "--help": [],
    "instances list": ["gpu-host-17-8000-instance-0", "SERVING", "1758.31", "53.07", "b: does not answer"],
    "weights list": ["16.061", "active", "2027"],
    "keys list": ["k-0123456789abcdef", "evaluation", "600", "4000000"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_it_imports_little_and_cuts_nothing_off(command: str, admin_url: str) -> None:
    said = run(*command.split(), HOTSWAP_ADMIN_URL=admin_url)
    assert [shown for shown in COMMANDS[command] if shown not in said] == [], said


def test_status_is_the_list_of_instances(admin_url: str, tmp_path: Any) -> None:
    info = {"url": admin_url, "admin_url": admin_url, "model": "m", "store": "", "admin_key_file": "", "pid": 1}
    (tmp_path / "server.json").write_text(json.dumps(info))
    run("status", "--state-dir", str(tmp_path))
