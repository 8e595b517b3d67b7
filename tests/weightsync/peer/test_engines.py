"""Real vLLM instances on hosts of their own, each with an arena and a peer; etcd and the coordinator are real, too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file

from server.ports import free_port
from tests.live import VLLM_ARGS
from tests.waiting import wait_until
from tests.weightsync.fleet import running_fleet
from tests.weightsync.peer.hosts import KEYS, MODEL, Hosts, newest, path_of, serving
from weightsync import Coordinator, Store
from weightsync.control.records import ActiveRecord, InstanceRecord, VersionRecord
from weightsync.peer.slices import part_copy_key, slices_prefix

pytestmark = [pytest.mark.engine, pytest.mark.broad, pytest.mark.timeout(900)]
STORES = ["etcd"]
WAIT_S = 400.0  # a guard: an instance takes a quarter of a minute to start
PROMPT, TOKENS = [3, 4, 5, 6, 7], 12
SMALL = 8 << 10  # chunks of which some have nothing for one of the ranks


@contextlib.contextmanager
def instance(
    hosts: Hosts, model: Path, ranks: Mapping[str, tuple[str, ...]], **environment: str
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Instance i: a process on each of these hosts, with options of its own."""
    started = {}
    for host, options in ranks.items():
        command = [sys.executable, "-m", "server.cli", "instance", "--model", str(model), "--name", MODEL]
        command += ["--instance-id", "i", "--kv-cache-gib", "0.06", *options]
        started[host] = subprocess.Popen(command, env={**os.environ, **hosts.environment(host), **environment})
    try:
        yield started
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait(WAIT_S)


async def answer(record: InstanceRecord, **options: Any) -> dict[str, Any]:
    """An instance's answer to the prompt."""
    body = {"prompt_token_ids": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": False, **options}
    async with httpx.AsyncClient(timeout=WAIT_S, headers={"authorization": f"Bearer {record.key}"}) as client:
        said = (await client.post(f"{record.address}/generate", json=body)).raise_for_status().json()
    (choice,) = said["choices"]
    found: dict[str, Any] = choice
    return found


# of another host


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
    with instance(hosts, checkpoints["a"], {"b": VLLM_ARGS}):
        async with running_fleet(hosts.store_url) as fleet:
            fleet.coordinator()
            for name, token in (("say-1", 101), ("say-2", 102)):
                version = await push(hosts, "a", checkpoints[name])
                record = await serving(store, version.version, "i", WAIT_S)
                assert record.fingerprint == version.fingerprint
                assert path_of(hosts.copies(version.manifest_digest)["b"]).parent == hosts.arenas["b"]
                assert set((await answer(record))["token_ids"]) == {token}


# of two ranks on two hosts


def two_ranks() -> dict[str, tuple[str, ...]]:
    """The leader on host a and its follower on host b; in float32 no token hangs on how sums are split."""
    options = ("--max-model-len", "256", "--max-num-seqs", "4", "--dtype", "float32", "--tensor-parallel-size", "2")
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    return {
        "a": (*options, *place, "--node-rank", "0"),
        "b": (*options, *place, "--node-rank", "1", "--headless"),
    }


def expected(checkpoint: Path) -> list[int]:
    """The answer of a model of these weights, computed by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    said = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return [int(token) for token in said[0][len(PROMPT) :]]


async def publish(hosts: Hosts, host: str, checkpoint: Path) -> VersionRecord:
    """From a trainer on `host`; returns when it is active."""
    publisher = hosts.publisher(host, chunk=SMALL)
    await asyncio.to_thread(publisher.publish, load_file(checkpoint / "model.safetensors"))
    return newest(publisher)


async def tokens(store: Store, version: int) -> list[int]:
    """Of the instance, once it serves that version."""
    choice = await answer(await serving(store, version, "i", WAIT_S), ignore_eos=True)
    assert {span["version"] for span in choice["weight_versions"]} == {version}
    return list(choice["token_ids"])


async def test_ranks_on_two_hosts_swap_roll_back_and_end_together(
    hosts: Hosts, store: Store, checkpoints: dict[str, Path]
) -> None:
    hosts.start("ab")
    local = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with instance(hosts, checkpoints["a"], two_ranks(), **local) as processes:
        async with running_fleet(hosts.store_url) as fleet:
            fleet.coordinator()
            said = slices_prefix(KEYS)
            await asyncio.to_thread(wait_until, lambda: len(hosts.store.list(said)[0]) == 2, WAIT_S)
            first = await publish(hosts, "a", checkpoints["a"])
            assert await tokens(store, first.version) == expected(checkpoints["a"])
            second = await publish(hosts, "b", checkpoints["b"])
            assert await tokens(store, second.version) == expected(checkpoints["b"])
            for host, version in (("b", first), ("a", second)):  # of what the other one published
                fetched = await asyncio.to_thread(part_of_a_version, hosts, host, version)
                assert 0.3 < fetched < 0.95, f"{host} has {fetched:.0%} of version {version.version}"
            assert (await serving(store, second.version, "i", WAIT_S)).fingerprint == second.fingerprint
            report = await Coordinator(fleet.store(), MODEL).activate(first.version, deadline_s=WAIT_S)
            assert report.ok, report.reason
            assert await tokens(store, first.version) == expected(checkpoints["a"])
            for host in "ab":  # each rank has built its own layouts in the memory of its own host
                assert {path.name.split("-")[0] for path in hosts.arena(host).iterdir()} >= {"slot", "layout"}
            kill_worker(processes["b"])
            await asyncio.to_thread(wait_until, lambda: hosts.store.get(KEYS.instance("i")) is None, WAIT_S)
            statuses = [await asyncio.to_thread(process.wait, WAIT_S) for process in processes.values()]
            assert all(status != 0 for status in statuses)


def part_of_a_version(hosts: Hosts, host: str, version: VersionRecord) -> float:
    """The part of its bytes that the host has fetched; it has fetched nothing else."""
    records = hosts.store.list(part_copy_key(KEYS, version.manifest_digest, host))[0]
    assert records, f"{host} has {hosts.copies(version.manifest_digest).get(host)}"
    return hosts.received(host) / hosts.copies(version.manifest_digest)[host].nbytes


def kill_worker(follower: subprocess.Popen[bytes]) -> None:
    (worker,) = [p for p in psutil.Process(follower.pid).children(recursive=True) if "Worker" in " ".join(p.cmdline())]
    worker.kill()
