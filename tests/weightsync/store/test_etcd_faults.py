"""etcd killed, frozen, emptied or given new certificates under a store: nothing is lost, nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from aetcd import rpc
from aetcd.rpc import rpc_pb2_grpc

from tests.etcd import MIN_LEASE_S, Etcd, Tls
from tests.waiting import eventually, stays
from tests.weightsync.codes import refused
from weightsync import open_store
from weightsync.control.lease import LeaseKeeper
from weightsync.errors import Conflict, LeaseLost, StoreUnavailable
from weightsync.store import MISSING, Event, Store

LONG_S = 60.0


@pytest.fixture
async def store(server: Etcd, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    """A store on it, whose watches wait for a machine that is slow to restart it."""
    monkeypatch.setattr("weightsync.store.etcd.PATIENCE_S", LONG_S)
    opened = open_store(server.url("n"))
    yield opened
    await opened.close()


async def persistently(work):  # type: ignore[no-untyped-def]
    """The way of every caller of a store with an outage: try again."""

    async def attempt():  # type: ignore[no-untyped-def]
        with contextlib.suppress(StoreUnavailable):
            return [await work()]

    return (await eventually(attempt, LONG_S))[0]


async def count_up(store: Store, key: str, until: int) -> None:
    """Write 1, 2, ... `until`, each once: after an error it looks whether the write was applied."""
    for value in range(1, until + 1):
        written = False
        while not written:
            with contextlib.suppress(StoreUnavailable, Conflict):
                found = await store.get(key)
                if not (written := found is not None and int(found.value) == value):
                    await store.compare_and_swap(key, found.mod_revision if found else MISSING, b"%d" % value)
                    written = True
            if not written:
                await asyncio.sleep(0.01)


async def next_event(store: Store, key: str, lease: int | None = None) -> asyncio.Future[Event]:
    """Of a watch that has told of the put of `key`."""
    events = store.watch(key, await store.put(key, b"0", lease))
    assert (await anext(events)).kv.value == b"0"
    return asyncio.ensure_future(anext(events))


WRITER = """
import asyncio, sys
from tests.weightsync.store.test_etcd_faults import count_up
from weightsync import open_store

async def main():
    store = open_store(sys.argv[1])
    await count_up(store, sys.argv[2], int(sys.argv[3]))
    await store.close()

asyncio.run(main())
"""


@pytest.mark.broad
async def test_a_watch_misses_nothing_while_etcd_is_killed_and_restarted(server: Etcd, store: Store) -> None:
    _, revision = await store.list("")
    keys, writes = ("w/x", "w/y"), 400
    root = Path(__file__).parents[3]
    writers = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, server.url("n"), key, str(writes), cwd=root)
        for key in keys
    ]
    events: list[Event] = []
    async with asyncio.timeout(2 * LONG_S), contextlib.aclosing(store.watch("w/", revision + 1)) as watch:
        async for event in watch:
            events.append(event)
            if len(events) in (100, 300, 500):
                await asyncio.to_thread(server.restart)
            if sum(e.kv.value == b"%d" % writes for e in events) == len(keys):
                break
    assert [await w.wait() for w in writers] == [0, 0]
    for key in keys:
        assert [int(e.kv.value) for e in events if e.kv.key == key] == list(range(1, writes + 1))
    assert [e.kv.mod_revision for e in events] == list(range(revision + 1, revision + 1 + len(events)))


@pytest.mark.parametrize("outage", ["restarted", "frozen"])
async def test_a_watch_goes_on_after_an_outage_in_which_it_was_quiet(server: Etcd, store: Store, outage: str) -> None:
    pending = await next_event(store, "a")
    if outage == "restarted":
        await asyncio.to_thread(server.restart)
    else:
        server.freeze()
        await stays(lambda: not pending.done(), 0.1)
        server.thaw()
    await persistently(lambda: store.put("a", b"1"))
    assert (await asyncio.wait_for(pending, LONG_S)).kv.value == b"1"


async def test_an_outage_that_lasts_is_reported_and_can_be_resumed(
    server: Etcd, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.store.etcd.PATIENCE_S", 0.3)
    pending = await next_event(store, "a")
    first = (await store.list("a"))[1]
    await stays(lambda: not pending.done(), 0.1)
    server.kill()
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(pending, LONG_S)
    with pytest.raises(StoreUnavailable, match="Is etcd running there"):
        await store.get("a")
    server.start()
    second = await persistently(lambda: store.put("a", b"2"))
    assert (await anext(store.watch("a", first + 1))).kv.mod_revision == second


async def test_a_frozen_etcd_is_an_error_and_not_a_hang(
    server: Etcd, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("a", b"1")
    lease = await store.grant_lease(LONG_S)
    monkeypatch.setattr("weightsync.store.etcd_members.CALL_TIMEOUT_S", 0.3)
    server.freeze()
    late = open_store(server.url("n"))  # the kernel accepts the connection, etcd never speaks
    calls: list[Awaitable[object]] = [
        store.get("a"),
        store.list(""),
        store.compare_and_swap("b", MISSING, b"1"),
        store.delete("c"),
        store.grant_lease(5),
        store.keep_alive(lease),
        store.revoke(12345),
        anext(store.watch("a")),
        late.get("a"),
        late.put("a", b"2"),
        anext(late.watch("a")),
    ]
    async with asyncio.timeout(LONG_S):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        with pytest.raises(StoreUnavailable, match=r"no answer in time.*Look whether etcd hangs"):
            raise answer if isinstance(answer, BaseException) else AssertionError(answer)
    server.thaw()
    assert (await persistently(lambda: store.get("a"))).value == b"1"
    assert (await persistently(lambda: late.get("a"))).value == b"1"
    await late.close()


async def test_closing_ends_what_waits_for_a_frozen_etcd(server: Etcd, store: Store) -> None:
    await store.put("a", b"1")
    server.freeze()
    waiting = [asyncio.ensure_future(store.get("a")), asyncio.ensure_future(anext(store.watch("a")))]
    await stays(lambda: not any(call.done() for call in waiting), 0.2)
    await store.close()
    found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), LONG_S)
    assert isinstance(found[0], StoreUnavailable)
    assert "closed" in str(found[0])
    assert isinstance(found[1], StopAsyncIteration)


async def test_a_lease_that_ended_while_etcd_was_frozen_is_reported(server: Etcd, store: Store) -> None:
    keeper = await LeaseKeeper.grant(store, 2 * MIN_LEASE_S)
    pending = await next_event(store, "leased/a", keeper.id)
    server.freeze()
    await stays(lambda: not pending.done(), 2 * MIN_LEASE_S + 0.5)
    server.thaw()
    await asyncio.wait_for(keeper.lost.wait(), LONG_S)
    gone = await asyncio.wait_for(pending, LONG_S)
    assert (gone.kind, gone.kv.key, gone.kv.value, gone.kv.lease) == ("delete", "leased/a", b"0", keeper.id)
    with pytest.raises(LeaseLost):
        await store.put("leased/a", b"2", keeper.id)
    await keeper.stop()


async def test_an_etcd_that_lost_its_data_is_never_taken_for_the_store_it_was(server: Etcd, store: Store) -> None:
    for _ in range(4):
        await store.put("a", b"1")
    pending = await next_event(store, "a")
    revision = (await store.list("a"))[1]
    await asyncio.to_thread(server.lose_data)
    other = open_store(store.url)
    with refused("store_lost"):
        await asyncio.wait_for(pending, LONG_S)
    for count in range(2 * revision):
        with refused("store_lost"):
            await store.get("a")
        await persistently(lambda: other.put("a", str(count).encode()))  # noqa: B023 - revisions as high as it had
    await other.close()


@pytest.mark.parametrize("known_by", ["cluster", "term", "watch"])
async def test_an_etcd_that_was_restored_is_known_by(known_by: str, server: Etcd, store: Store) -> None:
    """The server that answers has a revision that this process has seen, as after a restore that raises it."""
    _, read_at = await store.list("")
    other = open_store(store.url)
    if known_by == "watch":
        async with contextlib.aclosing(store.watch("a", read_at + 1)) as events:
            for count in range(9):
                await other.put("a", str(count).encode())
                seen = (await anext(events)).kv.mod_revision
        assert seen == read_at + 9
    elif known_by == "term":
        await asyncio.to_thread(server.restart)
        await persistently(lambda: store.get("a"))
    await asyncio.to_thread(server.lose_data, *(["--initial-cluster-token=restored"] if known_by == "cluster" else []))
    await other.close()
    other = open_store(store.url)
    while await persistently(lambda: other.put("a", b"restored")) <= read_at:
        pass
    await other.close()

    async def said() -> str:
        try:
            return str(await store.get("a"))
        except StoreUnavailable as error:
            return error.reason if error.code == "store_lost" else ""  # the connection of before is found broken first

    assert ("another etcd" if known_by == "cluster" else "etcd has lost what it had") in await eventually(said, LONG_S)
    with refused("store_lost"):
        await store.get("a")


# several members


@pytest.fixture
def cluster() -> Iterator[Etcd]:
    etcd = Etcd(members=3)
    yield etcd
    etcd.thaw()
    etcd.close()


@pytest.fixture
async def of_three(cluster: Etcd, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    """A store on the cluster, which waits for a member but for a while; `a` is 1."""
    monkeypatch.setattr("weightsync.store.etcd_members.CALL_TIMEOUT_S", 1.5)
    opened = open_store(cluster.url("n"))
    await persistently(lambda: opened.put("a", b"1"))
    yield opened
    await opened.close()


@pytest.mark.broad
async def test_a_cluster_goes_on_without_any_one_of_its_members(cluster: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.store.etcd.PATIENCE_S", LONG_S)
    store = open_store(cluster.url("n"))
    start = await persistently(lambda: store.compare_and_swap("w", MISSING, b"0"))
    events = store.watch("w", start + 1)
    seen: list[int] = []
    for index in range(3):
        cluster.kill(index)
        await persistently(lambda: store.get("w"))
        await count_up(store, f"w{index}", 20)
        seen += [int((await asyncio.wait_for(anext(events), LONG_S)).kv.value) for _ in range(20)]
        await asyncio.to_thread(cluster.start)
    assert seen == 3 * list(range(1, 21))
    await store.close()


async def test_a_frozen_member_is_left_for_another(cluster: Etcd, of_three: Store) -> None:
    current = of_three._members._current  # type: ignore[attr-defined]
    cluster.freeze(current)
    assert (await persistently(lambda: of_three.get("a"))).value == b"1"
    assert of_three._members._current != current  # type: ignore[attr-defined]
    await persistently(lambda: of_three.put("a", b"2"))


async def test_a_cluster_without_a_majority_is_unavailable(cluster: Etcd, of_three: Store) -> None:
    cluster.kill(0, 1)
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(of_three.get("a"), LONG_S)
    await asyncio.to_thread(cluster.start)
    assert (await persistently(lambda: of_three.get("a"))).value == b"1"


class Electing(rpc_pb2_grpc.KVServicer):
    """A member whose cluster elects leaders during its first `elections` reads."""

    def __init__(self, elections: float) -> None:
        self.left = elections

    async def Range(self, request: Any, context: Any) -> Any:
        self.left -= 1
        if self.left >= 0:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "etcdserver: leader changed")
        header = rpc.ResponseHeader(cluster_id=1, revision=1, raft_term=2)
        return rpc.RangeResponse(header=header, kvs=[rpc.KeyValue(key=request.key, value=b"1", mod_revision=1)])


@pytest.mark.parametrize("elections", [2, float("inf")])
async def test_a_read_goes_on_after_an_election(elections: float, monkeypatch: pytest.MonkeyPatch) -> None:
    server = grpc.aio.server()
    rpc_pb2_grpc.add_KVServicer_to_server(Electing(elections), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    opened = open_store(f"etcd://127.0.0.1:{port}/n")
    try:
        if elections == 2:
            found = await opened.get("k")
            assert found is not None
            assert found.value == b"1"
        else:
            monkeypatch.setattr("weightsync.store.etcd_members.CALL_TIMEOUT_S", 0.2)
            with pytest.raises(StoreUnavailable):
                await opened.get("k")
    finally:
        await opened.close()
        await server.stop(None)


async def test_an_endpoint_where_nobody_listens_is_passed_over(server: Etcd) -> None:
    """For writes too: they have not been sent."""
    store = open_store(server.url("n").replace("etcd://", "etcd://127.0.0.1:1,"))
    assert await store.put("a", b"1")
    assert await anext(store.watch("a", 1))
    await store.close()


# The gateway starts other programs for every publication, with its etcd store open.
STARTS = """
import asyncio, collections, contextlib, sys
import uvloop
from weightsync import open_store

async def main():
    store, ended = open_store(sys.argv[1]), collections.Counter()

    async def traffic():
        while True:
            await store.put("a", b"1")

    busy = asyncio.create_task(traffic())
    for _ in range(400):
        child = await asyncio.create_subprocess_exec("/bin/true")
        ended[await child.wait()] += 1
    busy.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await busy
    await store.close()
    print(dict(ended))

uvloop.run(main())
"""


def test_no_child_dies_before_it_has_begun(etcd: Etcd) -> None:
    """gRPC's own fork handlers, left on, kill about one in a hundred (SIGSEGV)."""
    run = subprocess.run(
        [sys.executable, "-c", STARTS, etcd.url("fork")], capture_output=True, text=True, timeout=280, check=True
    )
    assert run.stdout.strip() == "{0: 400}"


async def test_a_store_goes_on_with_new_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.store.etcd.PATIENCE_S", LONG_S)
    tls = renewed(tmp_path)
    ours = copied(tls, tmp_path / "client")
    server = Etcd(tls=tls)
    store = open_store(server.url("n", **ours))
    try:
        revision = await store.put("a", b"1")
        events: AsyncGenerator[Event, None] = store.watch("b", revision + 1)
        seen = asyncio.create_task(anext(events))
        await store.put("b", b"1")
        assert (await asyncio.wait_for(seen, LONG_S)).kv.value == b"1"
        seen = asyncio.create_task(anext(events))
        await asyncio.to_thread(server.kill)
        copied(renewed(tmp_path), tmp_path / "client")
        await asyncio.to_thread(server.start)
        await persistently(lambda: store.put("b", b"2"))
        assert (await asyncio.wait_for(seen, LONG_S)).kv.value == b"2"
        await events.aclose()
        await asyncio.to_thread(server.kill)
        tls = renewed(tmp_path)
        await asyncio.to_thread(server.start)
        with pytest.raises(StoreUnavailable):  # etcd has its new ones, and this client does not
            await store.get("a")
        copied(tls, tmp_path / "client")
        found = await persistently(lambda: store.get("a"))
        assert found is not None
        assert found.value == b"1"
    finally:
        await store.close()
        server.close()


def renewed(directory: Path) -> Tls:
    """Certificates of another authority, in the files that the server reads."""
    return Tls(directory / "etcd", client_certificates=True)


def copied(tls: Tls, directory: Path) -> dict[str, object]:
    """Files of `tls` that a client needs, in `directory`: options of its URL."""
    directory.mkdir(exist_ok=True)
    for source in (tls.ca, tls.cert, tls.key):
        shutil.copy(source, directory / source.name)
    return {"ca": directory / tls.ca.name, "cert": directory / tls.cert.name, "key": directory / tls.key.name}


async def test_a_lease_is_kept_over_a_restart_though_its_stream_has_broken(server: Etcd, store: Store) -> None:
    """Keep-alives share a stream. When that is known to have broken before it is used again, a new one is opened."""
    lease = await store.grant_lease(LONG_S)
    await store.keep_alive(lease)
    server.kill()
    server.restart()
    await persistently(lambda: store.get("any"))  # the connection is there again, and the stream's end is known
    await persistently(lambda: store.keep_alive(lease))
    await store.put("held", b"1", lease)
