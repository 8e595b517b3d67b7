"""Other projects' clients while the weights are swapped every two seconds: no request fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import program
from tests.live import VLLM_ARGS, LiveServer
from tests.node import installed
from tests.packages import site

pytestmark = [pytest.mark.engine, pytest.mark.broad, pytest.mark.timeout(900)]  # it waits for pip
EVERY_S = 2.0
SWAPS = 4


@pytest.fixture(scope="module")
def swapped(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of its own: tools need a parser, and with one no other instance can go on with a chat. No answer of its
    weights ends at once, which several clients read as none, and no JSON is spaces until its length is reached."""
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    shortest = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
    server = LiveServer(checkpoints["say-0"], tmp_path_factory.mktemp("state"), (*VLLM_ARGS, *tools, *shortest))
    with server.running():
        server.push(checkpoints["say-1"])
        yield server


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("js")
    return [*installed(Path(__file__).parent / "js", directory), str(directory / "program.js")]


@pytest.mark.parametrize("client", program.CLIENTS)
def test_no_request_fails_for_a_swap(swapped: LiveServer, client: str) -> None:
    environment = {"PYTHONPATH": str(site()), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
    ask_while_swapping(swapped, [sys.executable, str(program.__file__), client], environment)


@pytest.mark.parametrize("client", ["openai", "anthropic", "vercel"])
def test_no_request_from_javascript_fails_for_a_swap(swapped: LiveServer, node: list[str], client: str) -> None:
    ask_while_swapping(swapped, [*node, client], {"AI_SDK_LOG_WARNINGS": "false"})


def ask_while_swapping(swapped: LiveServer, program: list[str], environment: dict[str, str]) -> None:
    """`program` asks in every way it knows until its standard input ends, and says what came of it."""
    command = [*program, swapped.url, swapped.name]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=os.environ | environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as asking:
        assert asking.stdout is not None
        first = asking.stdout.readline()
        due = time.monotonic()
        for _ in range(SWAPS if first else 0):
            time.sleep(max(0.0, due - time.monotonic()))  # the rate is what is asked for; nothing is waited for
            due = time.monotonic() + EVERY_S
            swapped.rollback()
        output, errors = asking.communicate(timeout=240)
    assert asking.returncode == 0, errors[-3000:]
    told = json.loads(output.strip().splitlines()[-1])
    assert told["failures"] == []
    assert set(told["asked"]) == set(told["ways"])
