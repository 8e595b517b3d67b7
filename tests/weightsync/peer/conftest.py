"""Hosts for the tests of peers: names, arenas and processes of their own on one machine, with one store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.weightsync.peer.hosts import Hosts


@pytest.fixture
def hosts(store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    running = Hosts(store_url, tmp_path, monkeypatch)
    yield running
    running.close()
