"""Where pushes put their slots, and a gateway that leads, with versions to choose from."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.gateway.harness import KEYS, RunningGateway, running_gateway
from tests.waiting import wait_until
from tests.warm import SYNC, warm
from weightsync.control.records import VersionRecord


@pytest.fixture(scope="module")
def arena() -> Iterator[Path]:
    """Where every push of a module puts its slots, also those that are ended before they ask."""
    warm(SYNC)  # imports now, and not in the time that a client waits for its push
    directory = Path(tempfile.mkdtemp(prefix="hotswap-gateway-test-", dir="/dev/shm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTSWAP_ARENA", str(directory))
        yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    """It leads; versions 1 to 3 are ready, and none is active."""
    with running_gateway(tmp_path) as running:
        wait_until(lambda: running.gateway.default.coordinator.leads)
        for version in (1, 2, 3):
            ready = VersionRecord(version, "ready", "", 0, "", None, None, "t", 1, 0.0, "", 0)
            running.store.put(KEYS.version(version), ready.to_json())
        yield running
