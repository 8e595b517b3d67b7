"""A state directory, and servers without engines that are started in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.up import server as up
from tests.server.up.restarts import Child, Up, save_checkpoint


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="hotswap-test-", dir="/dev/shm"))
    monkeypatch.setattr(up, "DEFAULT_ROOT", directory)
    monkeypatch.delenv("HOTSWAP_ARENA", raising=False)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def server(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    monkeypatch.setattr(up, "Child", Child)
    found = Up(save_checkpoint(tmp_path / "model", 1.0), tmp_path / "state")
    yield found
    if found.server is not None:
        found.server.state.release()
