"""A real vLLM instance on one host serves what was published on another: etcd, peers, coordinator, all real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.live import VLLM_ARGS
from tests.weightsync.fleet import running_fleet
from tests.weightsync.peer.hosts import KEYS, MODEL, Hosts, path_of, serving
from weightsync import Store
from weightsync.control.records import ActiveRecord, VersionRecord

pytestmark = [pytest.mark.engine, pytest.mark.broad]
STORES = ["etcd"]
WAIT_S = 120.0  # a guard: an instance takes a quarter of a minute to start


@contextlib.contextmanager
def instance_on_b(hosts: Hosts, model: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "server.cli", "instance", "--model", str(model), "--name", MODEL]
    command += ["--instance-id", "on-b", "--kv-cache-gib", "0.06", *VLLM_ARGS]
    process = subprocess.Popen(command, env={**os.environ, **hosts.environment("b")})
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


async def push(hosts: Hosts, host: str, directory: Path) -> VersionRecord:
    command = [sys.executable, "-m", "weightsync.push", "--model", MODEL, str(directory)]
    environment = {**os.environ, **hosts.environment(host)}
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
    active = hosts.store.get(KEYS.active)
    assert active is not None
    found = hosts.store.get(KEYS.version(ActiveRecord.from_json(active.value).version))
    assert found is not None
    return VersionRecord.from_json(found.value)


async def test_an_instance_stages_versions_of_another_host(
    hosts: Hosts, store: Store, checkpoints: dict[str, Path]
) -> None:
    hosts.start("ab")
    with instance_on_b(hosts, checkpoints["a"]):
        async with running_fleet(hosts.store_url) as fleet, httpx.AsyncClient(timeout=60) as client:
            fleet.coordinator()
            for name, token in (("say-1", 101), ("say-2", 102)):
                version = await push(hosts, "a", checkpoints[name])
                record = await serving(store, version.version, "on-b", WAIT_S)
                assert record.fingerprint == version.fingerprint
                assert path_of(hosts.copies(version.manifest_digest)["b"]).parent == hosts.arenas["b"]
                body = {"prompt_token_ids": [3, 4, 5], "max_tokens": 3, "temperature": 0, "stream": False}
                key = {"authorization": f"Bearer {record.key}"}
                answer = await client.post(f"{record.address}/generate", json=body, headers=key)
                assert set(answer.raise_for_status().json()["choices"][0]["token_ids"]) == {token}
