"""A transport of every kind and two peers for each, once per module: `healthy`, and one that tests may freeze."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.weightsync.transport.peers import LISTEN, Peer, require
from weightsync.transport import NAMES, Transport, open_transport


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    require(chosen)
    return chosen


@pytest.fixture(scope="module")
def transport(name: str) -> Iterator[Transport]:
    with open_transport(name, listen=LISTEN, tls=None) as opened:
        yield opened


@pytest.fixture(scope="module")
def healthy(name: str) -> Iterator[Peer]:
    with Peer(name, seed=7) as peer:
        yield peer


@pytest.fixture(scope="module")
def second(name: str) -> Iterator[Peer]:
    with Peer(name, seed=8) as peer:
        yield peer


@pytest.fixture
def other(second: Peer) -> Iterator[Peer]:
    yield second
    second.thaw()
