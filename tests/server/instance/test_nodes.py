"""An instance on several hosts, without an engine: what it refuses, needs and looks for there, and who has ended."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import ssl
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from server.errors import ConfigError
from server.instance.hosts import Reads, Saying, Tethers, check_hosts, check_nodes, joined_reads, located, placed
from tests.cluster_tls import Authority
from tests.server.instance.engines import Core, engine_of
from tests.waiting import eventually
from tests.weightsync.codes import refused
from weightsync import Store
from weightsync.control.records import CopyRecord, ErrorInfo, Keys, PartRecord, VersionRecord
from weightsync.format.manifest import schema_of
from weightsync.format.slices import Slices
from weightsync.peer.slices import SlicesRecord, slices_prefix
from weightsync.tls import ClusterTls
from weightsync.vllm_engine.tether import HELD, PROBES, watch_for_loss

KEYS = Keys("demo")
DIGEST = "0123456789abcdef0123456789abcdef"
ADAPTER = "fedcba9876543210fedcba9876543210"
PART = PartRecord("lora/x", 1, "//a/arena/adapter", ADAPTER, 1, "")
VERSION = VersionRecord(2, "ready", "//a/arena/base", 1, DIGEST, None, None, "p", 1, 0.0, "", 1, parts=(PART,))
WAIT_S = 60.0
WORKER = """
import json, sys
from weightsync.vllm_engine.tether import Tether, hold
hold(Tether(**json.loads(sys.argv[1])), 1, "b")
print("held", flush=True)
sys.stdin.read()
"""


# options -------------------------------------------------------------------------------------------------------------


def vllm(**options: Any) -> Namespace:
    return Namespace(**{"nnodes": 1, "node_rank": 0, "data_parallel_size": 1} | options)


def test_options_of_leader_and_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTSWAP_HOST", raising=False)
    check_nodes(vllm(), headless=False)
    with pytest.raises(ConfigError, match="set HOTSWAP_HOST on each host"):
        check_nodes(vllm(nnodes=2), headless=False)
    monkeypatch.setenv("HOTSWAP_HOST", "a")
    check_nodes(vllm(nnodes=2), headless=False)
    check_nodes(vllm(nnodes=2, node_rank=1), headless=True)


@pytest.mark.parametrize(
    ("options", "headless", "says"),
    [
        ({}, True, "--node-rank R from 1 on"),
        ({"nnodes": 2}, True, "--node-rank R from 1 on"),
        ({"nnodes": 2, "node_rank": 1}, False, "--node-rank 1: .* give --headless"),
        ({"nnodes": 2, "data_parallel_size": 2}, False, "run an instance for each"),
    ],
)
def test_options_that_make_no_instance(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], headless: bool, says: str
) -> None:
    monkeypatch.setenv("HOTSWAP_HOST", "a")
    with pytest.raises(ConfigError, match=says):
        check_nodes(vllm(**options), headless=headless)


@pytest.mark.parametrize(
    ("hosts", "nodes"), [(["", ""], 1), (["a"], 1), (["a", "a"], 1), (["a", "b"], 2), (["a", "a", "b", "b"], 2),
                         (["a", "b"], 1)],
)  # fmt: skip
def test_hosts_that_can_be_told_apart(hosts: list[str], nodes: int) -> None:
    check_hosts(hosts, nodes)


@pytest.mark.parametrize(("hosts", "nodes"), [(["", ""], 2), (["a", "a"], 2), (["a", ""], 2), (["a", ""], 1)])
def test_hosts_that_cannot(hosts: list[str], nodes: int) -> None:
    with pytest.raises(ConfigError, match=rf"rank 1: {hosts[1] or '.no name.'}.*set HOTSWAP_HOST on each"):
        check_hosts(hosts, nodes)


# where versions are --------------------------------------------------------------------------------------------------


@pytest.fixture
async def published(store: Store) -> Store:
    await store.put(KEYS.version(2), VERSION.to_json())
    return store


async def say(store: Store, host: str, state: str = "ready", error: ErrorInfo | None = None) -> None:
    for digest, name in ((DIGEST, "base"), (ADAPTER, "adapter")):
        slot = f"//{host}/on-{host}/{name}"
        copy = CopyRecord(host, slot, digest, 1, state, "x:1", 1.0, error)  # type: ignore[arg-type]
        await store.put(KEYS.copy(digest, host), copy.to_json())


async def test_a_version_is_waited_for_on_every_host_that_has_workers(published: Store) -> None:
    await say(published, "a")
    await say(published, "b", "fetching")
    waiting = asyncio.create_task(located(published, KEYS, VERSION, ("a", "b", "b"), WAIT_S))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    await say(published, "b")
    places = await asyncio.wait_for(waiting, WAIT_S)
    order = placed({"version": 2, "slot": "/on-a/base", "parts": [{"name": "lora/x", "slot": "/on-a/adapter"}]}, places)
    assert order["places"] == {"a": "/on-a/base", "b": "/on-b/base"}
    (part,) = order["parts"]
    assert part == {
        "name": "lora/x", "slot": "/on-a/adapter", "places": {"a": "/on-a/adapter", "b": "/on-b/adapter"}
    }  # fmt: skip


async def test_the_host_whose_peer_cannot_fetch_it_is_named_at_once(published: Store) -> None:
    await say(published, "a", "fetching")
    await say(published, "b", "failed", ErrorInfo("arena_full", "a slot needs more than there is"))
    with refused("copy_unavailable", match=r"version 2 is not on host b: .* a slot needs more"):
        await asyncio.wait_for(located(published, KEYS, VERSION, ("a", "b"), 10 * WAIT_S), WAIT_S)


async def test_a_host_without_a_peer_is_named_when_the_time_is_up(published: Store) -> None:
    await say(published, "a")
    with refused("copy_unavailable", match=r"not on host b: .* is `hotswap peer` running there\?"):
        await located(published, KEYS, VERSION, ("a", "b"), 3.0)  # enough to read what a says


# the tether ----------------------------------------------------------------------------------------------------------


def worker(end: dict[str, object], **environment: str) -> subprocess.Popen[str]:
    """A process that holds the other end, as vLLM's worker of rank 1 on host b does."""
    command = [sys.executable, "-c", WORKER, json.dumps(end)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment or None)


async def held(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "held\n", await asyncio.to_thread(process.communicate)


@pytest.fixture(autouse=True)
def leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSWAP_HOST", "a")
    monkeypatch.setattr("server.instance.hosts.own_address", lambda: "127.0.0.1")


@pytest.mark.parametrize("call", ["flip", "stage"])
async def test_a_worker_that_ends_is_named_in_the_error_of_each_call(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    core, tethers = Core(hosts=("a", "b")), Tethers()
    monkeypatch.setattr(core, "call", lambda *_: asyncio.Event().wait())
    engine = engine_of(core, tethers=tethers)
    async with tethers.listening(2, None) as end:
        process = worker(end)
        await held(process)
        flip = call == "flip"
        waiting = asyncio.create_task(engine.commit(2, 2, False) if flip else engine.drop(2, previous=True))
        process.kill()
        with refused("engine_died", match="rank 1 on host b has ended"):
            await asyncio.wait_for(waiting, WAIT_S)
        assert engine.dead
        await asyncio.wait_for(engine.died(), WAIT_S)
    process.communicate()


async def test_a_worker_ends_with_its_leader_and_over_mutual_tls_as_well(tmp_path: Path) -> None:
    directory = Authority(tmp_path / "authority").mount(tmp_path / "tls")
    for tls, environment in ((None, {}), (ClusterTls(directory), {"HOTSWAP_CLUSTER_TLS": str(directory)})):
        tethers = Tethers()
        async with tethers.listening(2, tls) as end:
            process = worker(end, **environment)
            await held(process)
        assert await asyncio.to_thread(process.wait, WAIT_S) != 0
        assert tethers.lost is None
        process.communicate()


STRANGERS = (
    b"", b"GET / HTTP/1.1\r\n", b"[]\n", b'{"token": "guessed", "rank": 1, "host": "b"}\n',
    '{"token": "gu\u00e9ssed"}\n'.encode(), b"[" * 60_000 + b"\n",
)  # fmt: skip


async def test_nobody_else_gets_hold_of_the_leader(tmp_path: Path) -> None:
    tethers, faults = Tethers(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    async with tethers.listening(2, None) as end:
        for said in STRANGERS:
            reader, writer = await asyncio.open_connection(str(end["address"]), int(str(end["port"])))
            writer.write(said)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()
    gc.collect()
    assert not faults
    assert not tethers.held
    assert tethers.lost is None
    directory = Authority(tmp_path / "authority").mount(tmp_path / "tls")
    async with tethers.listening(2, ClusterTls(directory)) as end:
        assert end["tls"]
        stranger = ssl.create_default_context(cafile=str(directory / "ca.crt"))
        assert await asyncio.to_thread(say_hello, end, stranger) == b""
    assert tethers.lost is None


def say_hello(end: dict[str, object], context: ssl.SSLContext) -> bytes:
    """The leader's answer to one who has the token, and no certificate; b"" if it hangs up, as it may by an alert."""
    said = json.dumps({"token": end["token"], "rank": 1, "host": "b"}).encode() + b"\n"
    with socket.create_connection((str(end["address"]), int(str(end["port"]))), timeout=WAIT_S) as plain:
        try:
            connection = context.wrap_socket(plain, server_hostname=ClusterTls.NAME)
            connection.sendall(said)
            return connection.recv(len(HELD))
        except OSError:
            return b""


async def test_beyond_loopback_it_listens_to_members_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.instance.hosts.own_address", lambda: "10.0.0.7")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7, beyond loopback: give --cluster-tls"):
        async with Tethers().listening(2, None):
            pass
    async with Tethers().listening(1, None) as end:
        assert end == {}


async def test_an_address_of_another_host_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("server.instance.hosts.own_address", lambda: "192.0.2.1")
    tls = ClusterTls(Authority(tmp_path / "authority").mount(tmp_path / "tls"))
    with pytest.raises(ConfigError, match=r"at 192\.0\.2\.1 .*: set VLLM_HOST_IP"):
        async with Tethers().listening(2, tls):
            pass


def test_the_kernel_notices_a_host_that_is_gone() -> None:
    with socket.socket() as found:
        watch_for_loss(found)
        for name, value in PROBES.items():
            assert found.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


# what it needs on each host, and what peers make of it ---------------------------------------------------------------


ROWS = [["a", "float32", [1 << 14]], ["b", "float32", [1 << 14]], ["c", "float32", [1 << 14]]]
SCHEMA = schema_of((n, d, s) for n, d, s in ROWS)


def slices(*names: str) -> Slices:
    return Slices.of(SCHEMA, [(name, 0, 4 << 14) for name in names])


async def said(store: Store) -> dict[str, str]:
    """By host."""
    records = [SlicesRecord.from_json(kv.value) for kv in (await store.list(slices_prefix(KEYS)))[0]]
    assert {record.instance for record in records} <= {"i"}
    return {record.host: record.slices for record in records}


async def is_said(store: Store, expected: dict[str, str]) -> bool:
    return await said(store) == expected


def test_the_ranks_of_a_host_are_joined_and_rank_0_has_what_nobody_reads() -> None:
    answers = [(slices("a").to_text(), "6"), (slices("b").to_text(), "5"), (slices("a").to_text(), "6")]
    found = joined_reads(ROWS, ["x", "y", "y"], answers)
    assert found == Reads({"x": slices("a", "c"), "y": slices("a", "b")}, ("c",))
    assert joined_reads(ROWS, ["x", "y", "y"], [*answers[:2], None]) is None


async def test_it_is_said_under_a_lease_and_again_when_it_changes(store: Store) -> None:
    saying = Saying(KEYS, "i")
    reads = Reads({"x": slices("a"), "y": slices("b")}, ("c",))
    saying.say(("x", "y", "y"), reads)
    assert saying.digests == {"x": slices("a").digest, "y": slices("b").digest}
    assert saying.unread == ("c",)
    running = asyncio.create_task(saying.run(store))

    await eventually(lambda: is_said(store, {"x": slices("a").to_text(), "y": slices("b").to_text()}))
    saying.say(("x", "y"), reads, everything="x")  # a signature is checked there
    await eventually(lambda: is_said(store, {"x": "", "y": slices("b").to_text()}))
    assert saying.digests == {"y": slices("b").digest}
    saying.say(("x", "y"), None)
    await eventually(lambda: is_said(store, {"x": "", "y": ""}))
    assert saying.digests == {}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await said(store) == {}


@pytest.mark.parametrize(("hosts", "expected"), [(("x", "x"), {"x": ""}), (("", ""), {})])
async def test_an_instance_on_one_host_needs_everything_there(
    hosts: tuple[str, ...], expected: dict[str, str], store: Store
) -> None:
    saying = Saying(KEYS, "i")
    saying.say(hosts, Reads({"x": slices("a")}, ()))
    assert saying.digests == {}
    running = asyncio.create_task(saying.run(store))
    await eventually(lambda: is_said(store, expected))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
