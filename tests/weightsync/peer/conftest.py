"""Hosts for the tests of peers: names, arenas and processes of their own on one machine, with one store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.weightsync.peer.hosts import Hosts
from tests.weightsync.peer.served import Reader, Served, slot_served
from weightsync.transport import Transport, open_transport


@pytest.fixture
def hosts(store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    running = Hosts(store_url, tmp_path, monkeypatch)
    yield running
    running.close()


@pytest.fixture
async def served(store_url: str, arena_directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    async with slot_served(store_url, arena_directory, monkeypatch) as found:
        yield found


@pytest.fixture
def transport() -> Iterator[Transport]:
    with open_transport("tcp", listen="127.0.0.1", tls=None) as opened:
        yield opened


@pytest.fixture
def reader(served: Served, transport: Transport, tmp_path: Path) -> Reader:
    return Reader(served, transport, tmp_path / "arena")
