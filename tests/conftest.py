"""Shared fixtures: servers for the whole session, one alone and a fleet."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx._config
import httpx._transports.default
import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# oneDNN keeps 0.6 MB for each batch size that it has met: with room for 1,024, an engine seems to leak for an hour.
os.environ.setdefault("LRU_CACHE_CAPACITY", "32")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
# SQLite waits for the disk with each commit. All directories of a run have some 1.5 GB.
if shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
# In this process the gateway runs from its sources, which tests may patch; the gateways that they start are compiled,
# where that was built, and server/gateway/test_compiled.py asks for it in a process like this one.
os.environ.setdefault("HOTSWAP_PURE", "1")
importlib.import_module("server.gateway.compiled")
os.environ.pop("HOTSWAP_PURE")
importlib.import_module("tests.started.sitecustomize")  # before torch

from loadtest.models.checkpoints import make_checkpoint, make_constant_checkpoint  # noqa: E402 - see above
from tests import cpu, starts, warm  # noqa: E402
from tests import fleet as fleets  # noqa: E402
from tests.live import VLLM_ARGS, LiveServer  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

starts.install()
warm.install()


@functools.cache
def _default_context() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    return _default_context() if verify is True and not cert else httpx.create_ssl_context(verify, cert, trust_env)


# httpx makes a context for every client, also for plain HTTP: 20 ms, for some thousands of clients.
httpx._transports.default.create_ssl_context = _ssl_context  # type: ignore[attr-defined]

# httpx gives up after 5 seconds where it is told nothing else, and a busy machine may answer later.
httpx._config.DEFAULT_TIMEOUT_CONFIG.read = 120.0

pytest_plugins = ("tests.tiers", "tests.report")

settings.register_profile("shared machine", deadline=None)  # how long an example takes says nothing of the code
settings.load_profile("shared machine")


def pytest_configure(config: pytest.Config) -> None:
    for plugin in (cpu, starts):  # imported above
        config.pluginmanager.register(plugin)
    if config.getoption("numprocesses", None):
        for kind in (warm.ENGINES, warm.GATEWAYS, warm.TRAINERS, warm.SYNC):
            warm.shared(kind)  # by all workers


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Each collection of garbage looks at all modules and tests again: for seconds while they come, and afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`a`, `b`: random weights that answer differently; `say-0`..`say-3`: always the same token, whatever is asked."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {n: make_checkpoint(root / n, seed=i, scale=3.0) for i, n in enumerate(("a", "b"))}
    return made | {f"say-{i}": make_constant_checkpoint(root / f"say-{i}", token=100 + i) for i in range(4)}


@pytest.fixture(scope="session")
def live(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A gateway and a real vLLM instance, serving checkpoint `a` at first; tests leave it serving some version."""
    in_chunks = ("--max-num-batched-tokens", "256")  # so that a swap can fall into a prompt
    server = LiveServer(checkpoints["a"], tmp_path_factory.mktemp("state"), (*VLLM_ARGS, *in_chunks))
    with server.running():
        yield server


# Questions for a canary. Models say-0, say-1 and say-3 answer these words: the tokenizer is
# loadtest/models/checkpoints.py's.
PROBES = """
- {name: words, prompt: [3, 4, 5], max_tokens: 4, expect: {regex: "^(w100|w101|w103)+$"}, min_mean_logprob: -5}
- {name: text, prompt: "abc", max_tokens: 2}
"""


@pytest.fixture(scope="session")
def pair(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[fleets.Fleet]:
    """Two instances, two gateways and an etcd. Tests publish what they ask for, and may have killed any of it."""
    root = tmp_path_factory.mktemp("pair")
    (root / "probes.yaml").write_text(PROBES)
    # In bf16 the kernels of some processors (AMX) round a position that is decoded and one of a prompt differently, and
    # weights that are not finite show what they leave in the KV cache.
    engine = (*VLLM_ARGS, "--dtype", "float32", "--allow-non-finite")
    gateway = ("--probes", str(root / "probes.yaml"))
    with fleets.running(checkpoints, root, vllm_args=engine, gateway_args=gateway) as found:
        yield found


@pytest.fixture
def fleet(pair: fleets.Fleet) -> fleets.Fleet:
    """`pair`, whole again."""
    wait_until(pair.mended, 280)
    return pair
