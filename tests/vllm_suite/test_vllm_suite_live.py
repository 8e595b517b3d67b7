"""Every test of vLLM's own that passes at an instance passes through the gateway too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.live import LiveServer
from tests.vllm_suite import source

pytestmark = [pytest.mark.engine, pytest.mark.broad]
AT_LEAST = 40  # tests that a tiny model passes; fewer would say that the suite does not run
TRIES = 3
FILES = [f"tests/entrypoints/{name}" for name in source.FILES]
# Test -> why the gateway answers otherwise than vLLM.
EXPLAINED: dict[str, str] = {}


@pytest.fixture(scope="module")
def suite(live: LiveServer, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    live.push(checkpoints["a"])
    root = source.tests(tmp_path_factory.mktemp("vllm"), live.name)
    (root / live.name).symlink_to(checkpoints["a"])  # where the tests look for a tokenizer by the model's name
    return root


def run(root: Path, url: str, names: Iterable[str] = FILES, key: str = "") -> dict[str, str]:
    """The outcome of each test: "passed", or how it failed. `key`: what the server at `url` asks for."""
    file = root / "outcomes.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    command += ["--timeout", "30", "-o", "asyncio_mode=auto", "--rootdir", str(root), "-c", os.devnull]
    command += names
    paths = f"{Path(__file__).parent}{os.pathsep}{root}"
    environment = os.environ | {"SUITE_URL": url, "SUITE_KEY": key, "SUITE_OUTCOMES": str(file), "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=900)
    assert file.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads(file.read_text()))


@pytest.mark.timeout(4500)  # up to five runs of it, and the download
def test_what_passes_at_the_instance_passes_through_the_gateway(live: LiveServer, suite: Path) -> None:
    instance = live.direct()[0]
    stock = run(suite, instance["base_url"], key=instance["headers"]["authorization"].removeprefix("Bearer "))
    passed = {name for name, outcome in stock.items() if outcome == "passed"}
    assert len(passed) >= AT_LEAST, {name: outcome[-300:] for name, outcome in stock.items() if outcome != "passed"}
    ours = run(suite, live.url)
    lost = {name: ours.get(name, "did not run") for name in passed if ours.get(name) != "passed"}
    for _ in range(TRIES if lost else 0):  # what is sampled from weights of no sense ends well by chance
        again = run(suite, live.url, lost)
        lost = {name: again.get(name, "did not run") for name in lost if again.get(name) != "passed"}
        if not lost:
            break
    assert lost.keys() == EXPLAINED.keys(), lost
