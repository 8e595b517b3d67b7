"""A gateway without an active version, and a follower of one that has one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.follow.checkpoints import write
from tests.server.follow.following import Follow
from tests.server.gateway.admin.test_admin import two_participants
from tests.server.gateway.harness import KEYS, RunningGateway, running_gateway
from tests.waiting import wait_until
from weightsync.control.records import ActiveRecord


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningGateway]:
    """No version is active. A canary that has flipped is good enough."""
    monkeypatch.setattr("server.gateway.models.model.build_probe", lambda *_: None)
    arena = tempfile.mkdtemp(prefix="hotswap-follow-test-", dir="/dev/shm")
    monkeypatch.setenv("HOTSWAP_ARENA", arena)
    with running_gateway(tmp_path) as running:
        wait_until(lambda: running.gateway.default.coordinator.leads, 60)
        yield running
    shutil.rmtree(arena)


@pytest.fixture
def follow(gateway: RunningGateway, tmp_path: Path) -> Iterator[Follow]:
    """Version 1 is active on two instances."""
    made = Follow(gateway, tmp_path)
    made.admin.call("POST", "/admin/weights", {"path": str(write(tmp_path / "base", 0.5)), "activate": False})
    gateway.store.put(KEYS.active, ActiveRecord(1, 1, None, "first", 0.0).to_json())
    with two_participants(gateway):
        yield made
    made.file.close()
