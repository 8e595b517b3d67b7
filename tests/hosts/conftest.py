"""Three hosts for the session, good links for each test. Tests are skipped where no hosts can be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.hosts import namespaces
from loadtest.hosts.etcd import Etcd
from loadtest.hosts.namespaces import NO_IP, CannotShape, Program
from tests.etcd import require
from tests.lacking import lacking, unable

COUNT = 3


class Hosts(namespaces.Hosts):
    """Hosts whose links cannot be shaped skip the test that would have it."""

    def shape(self, host: int, **how: Any) -> None:
        try:
            super().shape(host, **how)
        except CannotShape as error:
            unable(str(error))


@pytest.fixture(scope="session")
def _hosts() -> Iterator[Hosts]:
    """That the tools are missing is a failure in CI."""
    if (said := namespaces.obstacle()) is not None:
        (lacking if said == NO_IP else unable)(f"network namespaces: {said}")
    with Hosts(COUNT, shaped=True) as hosts:
        yield hosts


@pytest.fixture
def hosts(_hosts: Hosts) -> Iterator[Hosts]:
    """Changes that the last test made to the links are undone."""
    yield _hosts
    for host in range(COUNT):
        _hosts.heal(host)
        if _hosts.can_shape:
            _hosts.shape(host)


@pytest.fixture(scope="session")
def _etcd(_hosts: Hosts) -> Iterator[Etcd]:
    etcd = Etcd(_hosts, require())
    yield etcd
    etcd.close()


@pytest.fixture
def etcd(_etcd: Etcd, hosts: Hosts) -> Etcd:
    """A member on each host, all of them agreed. Each test has a namespace of its own in it."""
    _etcd.settle()
    return _etcd


@pytest.fixture
def start(hosts: Hosts) -> Iterator[Callable[..., Program]]:
    """Starts programs on hosts, and ends them with the test."""
    started: list[Program] = []

    def run(host: int, module: str, *arguments: object) -> Program:
        started.append(Program(hosts, host, module, *arguments))
        return started[-1]

    yield run
    for program in started:
        program.close()


@pytest.fixture
def arena_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One arena for all hosts, which share this machine's memory."""
    monkeypatch.setenv("HOTSWAP_ARENA", str(tmp_path / "arena"))
