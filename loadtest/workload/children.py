"""The processes of a benchmark that stand for other people's: a trainer that publishes, clients that stream."""

from __future__ import annotations

import contextlib
import json as jsonlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from server.errors import CliError


@contextlib.contextmanager
def publishing(
    store: str, model: str, checkpoints: list[Path], environment: Mapping[str, str] | None = None
) -> Iterator[Callable[[int], dict[str, Any]]]:
    """A process that holds the weights, as a trainer does; call it with the number of those to publish. `environment`
    is set beside that of this process."""
    command = [sys.executable, "-m", "loadtest.workload.publisher", store, model, *map(str, checkpoints)]
    env = {**os.environ, **(environment or {})}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def publish(number: int) -> dict[str, Any]:
            requests.write(f"{number}\n")
            requests.flush()
            return dict(jsonlib.loads(answers.readline()))

        try:
            yield publish
        finally:
            process.kill()


@contextlib.contextmanager
def streaming(url: str, model: str, streams: int, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Clients that ask and ask again for `seconds`, running when this is entered; their last line is what they saw."""
    command = [sys.executable, "-m", "loadtest.workload.streams", url, model, str(streams), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            client.stdout.readline()
            time.sleep(1.0)
            yield client
        finally:
            client.kill()


def last_line(client: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    """The report of a client of `streaming`, once it has ended. Raises CliError if it ended otherwise."""
    output, _ = client.communicate(timeout=timeout_s)
    lines = output.strip().splitlines()
    if client.returncode != 0 or not lines:
        raise CliError(f"the streaming client ended with status {client.returncode} and {len(output)} bytes of report.")
    return dict(jsonlib.loads(lines[-1]))
