"""Shared fixtures: one live server for the whole session."""

from __future__ import annotations

import functools
import importlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx._transports.default
import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# oneDNN keeps 0.6 MB for each batch size that it has met: with room for 1,024, an engine seems to leak for an hour.
os.environ.setdefault("LRU_CACHE_CAPACITY", "32")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
# In this process the gateway runs from its sources, which tests may patch; the gateways that they start are compiled,
# where that was built, and server/gateway/test_compiled.py asks for it in a process like this one.
os.environ.setdefault("HOTSWAP_PURE", "1")
importlib.import_module("server.gateway.compiled")
os.environ.pop("HOTSWAP_PURE")

from loadtest.models.checkpoints import make_checkpoint, make_constant_checkpoint  # noqa: E402 - see above
from tests import starts, warm  # noqa: E402
from tests.live import LiveServer  # noqa: E402
from tests.tiers import pytest_collection_modifyitems, pytest_sessionfinish, pytest_terminal_summary  # noqa: E402

starts.install()
warm.install()


@functools.cache
def _default_context() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    return _default_context() if verify is True and not cert else httpx.create_ssl_context(verify, cert, trust_env)


# httpx makes a context for every client, also for plain HTTP: 20 ms, for some thousands of clients.
httpx._transports.default.create_ssl_context = _ssl_context  # type: ignore[attr-defined]

__all__ = ["pytest_collection_modifyitems", "pytest_sessionfinish", "pytest_terminal_summary"]

settings.register_profile("shared machine", deadline=None)  # how long an example takes says nothing of the code
settings.load_profile("shared machine")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(starts)
    if config.getoption("numprocesses", None):
        for kind in (warm.ENGINES, warm.TRAINERS):
            warm.shared(kind)  # by all workers


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`a`, `b`: random weights that answer differently; `say-0`..`say-3`: always the same token, whatever is asked."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {n: make_checkpoint(root / n, seed=i, scale=3.0) for i, n in enumerate(("a", "b"))}
    return made | {f"say-{i}": make_constant_checkpoint(root / f"say-{i}", token=100 + i) for i in range(4)}


@pytest.fixture(scope="session")
def live(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A gateway and a real vLLM instance, serving checkpoint `a` at first; tests leave it serving some version."""
    server = LiveServer(checkpoints["a"], tmp_path_factory.mktemp("state"))
    with server.running():
        yield server
