"""The fork server of `hotswap up` never has a context on a device, and each of its forks has devices of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.up import forks
from server.up.forks import Forks

CODE = """
import json, sys, torch
from tests.gpu_emulated import standin
standin.configure({"devices": 2})
before, count = torch.cuda.is_initialized(), torch.cuda.device_count()
torch.empty(8, device="cuda")
print(json.dumps([before, torch.cuda.is_initialized(), count, "vllm.v1.engine.core" in sys.modules]))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    found = forks.begin("server.instance.fork_server:prepare", tmp_path_factory.mktemp("forks") / "log")
    yield found
    found.stop()


@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("1", 1), ("0,1", 2)])
def test_forks_have_the_devices_that_they_are_given(server: Forks, tmp_path: Path, visible: str, count: int) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    process = server.start(["tests.server.up.forked", CODE], env, tmp_path / "log")
    assert process.wait(300) == 0, (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "log").read_text().splitlines()[-1]) == [False, True, count, True]
