"""Versions that lie on several hosts when a trainer, a peer, or an answer of the store is lost: what stands of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from tests.warm import SYNC, warm
from tests.weightsync.codes import refused
from tests.weightsync.peer.hosts import KEYS, MODEL, Hosts, bytes_of, is_free, newest
from tests.weightsync.peer.spreading import accepted, model, spread
from weightsync import Publisher, SlotReader, open_store
from weightsync.control.chain import ENTRIES
from weightsync.control.records import ActiveRecord, CopyRecord, VersionRecord
from weightsync.errors import StoreUnavailable
from weightsync.memory.arena import Arena
from weightsync.peer.chunks import Bitmap
from weightsync.peer.shelf import Journal, Regions, Shelf
from weightsync.persist import restore
from weightsync.transport import Transport


def publish(hosts: Hosts, publisher: Publisher, transport: Transport, seed: int) -> int:
    """The version `model(seed=seed)`, which hosts a and b have written."""
    version, _, share = spread(publisher, transport, hosts.arena("b"), model(seed=seed))
    share.close()
    return version


def slots(hosts: Hosts, host: str) -> list[Path]:
    return sorted(hosts.arena(host).glob("slot-*"))


def require_whole(hosts: Hosts, publisher: Publisher, version: int, names: str, seed: int) -> None:
    """Each of these hosts gets all of the version once it is asked for."""
    record = next(v for v in publisher.versions() if v.version == version)
    assert record.state == "ready"
    publisher.activate(version, wait=False)
    images = [bytes_of(hosts.wait_copy(host, record.manifest_digest)) for host in names]
    assert len(set(images)) == 1
    with SlotReader.open(record.slot.removeprefix("//a"), manifest_digest=record.manifest_digest) as reader:
        assert all(bytes(reader.buffer(n)) == tensor.tobytes() for n, tensor in model(seed=seed).items())


def restart(hosts: Hosts, names: str) -> None:
    """Kill the peers of these hosts and start them again; return when each has looked at all records."""
    taker = f"{KEYS.copies}takers/"
    for host in names:
        hosts.kill(host)
    before = {host: hosts.store.get(f"{taker}{host}") for host in names}
    for host in names:
        hosts.start(host)
    for host, was in before.items():
        wait_until(lambda: (is_ := hosts.store.get(f"{taker}{host}")) is not None and is_ != was, 60)  # noqa: B023


def require_standing(hosts: Hosts, transport: Transport, *records: VersionRecord) -> None:
    """Peers that start on both hosts now offer every chunk of the versions, with the bytes that were published."""
    for record in records:
        assert record.state == "ready"
        key, found = record.manifest_digest, []
        for host in "ab":
            shelf = Shelf(Arena(hosts.arena(host)), MODEL, Regions(transport))
            shelf.adopt()
            assert shelf.take_share(key), f"{host} has nothing of version {record.version}"
            copy = shelf.copies[key]
            assert all(copy.shape.is_right(copy.mapped.view, chunk, copy.head) for chunk in copy.journal.done)
            found.append(copy.journal.done)
            shelf.close()
        assert found[0].bits | found[1].bits == Bitmap.full(found[0].chunks).bits


@pytest.mark.parametrize("written", ["accepted", "some"])
def test_what_a_killed_trainer_left_is_the_next_ones_to_use(hosts: Hosts, transport: Transport, written: str) -> None:
    """It is killed while ranks write, or right before the commit; the next one goes on in the same slots."""
    first = publish(hosts, hosts.publisher("a"), transport, 0)
    about = ["tests.weightsync.peer.spreading", str(hosts.arena("b")), written]
    killed = warm(SYNC).start(about, {**os.environ, **hosts.environment("a")}, Path(os.devnull), {2: 2})
    assert killed.wait(240) == -9
    publisher = hosts.publisher("a")
    wait_until(lambda: [v.version for v in publisher.versions()] == [first])  # the lease of the killed one has ended
    there = [slots(hosts, host) for host in "ab"]
    assert [len(found) for found in there] == [2, 2]
    version = publish(hosts, publisher, transport, 1)
    assert version == first + 2
    assert [slots(hosts, host) for host in "ab"] == there
    require_standing(hosts, transport, *publisher.versions())


def test_the_next_version_leaves_a_share_that_a_record_names(hosts: Hosts, transport: Transport) -> None:
    """No peer holds it now. When the version is retired, its slots are the next one's."""
    first = publish(hosts, hosts.publisher("a"), transport, 0)
    publisher = hosts.publisher("a")
    second = publish(hosts, publisher, transport, 1)
    assert second == first + 1
    require_standing(hosts, transport, *publisher.versions())
    there = [slots(hosts, host) for host in "ab"]
    hosts.store.put(KEYS.version(first), replace(publisher.versions()[0], state="retired").to_json())
    publish(hosts, publisher, transport, 2)
    assert [slots(hosts, host) for host in "ab"] == there
    require_standing(hosts, transport, *publisher.versions()[1:])


def test_a_peer_that_starts_before_the_commit_keeps_the_share(hosts: Hosts, transport: Transport) -> None:
    """It gives up what no record names; the ranks have left their shares on both hosts."""
    publisher = hosts.publisher("a")
    draft, _, share = accepted(publisher, transport, hosts.arena("b"), model())
    for host in "ab":
        shelf = Shelf(Arena(hosts.arena(host)), MODEL, Regions(transport))
        shelf.adopt()
        for key in list(shelf.copies):
            shelf.drop(key)
        shelf.forget([])
        shelf.close()
    draft.commit()
    share.close()
    require_standing(hosts, transport, newest(publisher))


def test_an_older_version_comes_back_after_all_peers_were_restarted(hosts: Hosts, transport: Transport) -> None:
    """No host has all of the version, as none has asked for it before."""
    hosts.start("abc")
    publisher = hosts.publisher("a")
    wait_until(lambda: set(publisher.share_hosts()) == {"b", "c"}, 60)
    versions = [publish(hosts, publisher, transport, seed) for seed in range(3)]
    require_whole(hosts, publisher, versions[2], "abc", seed=2)
    restart(hosts, "abc")
    require_whole(hosts, publisher, versions[0], "abc", seed=0)
    restart(hosts, "bc")
    require_whole(hosts, publisher, versions[2], "abc", seed=2)
    require_whole(hosts, publisher, versions[1], "abc", seed=1)


def test_a_retired_version_gives_back_the_slots_of_all_hosts(hosts: Hosts, transport: Transport) -> None:
    """One that all have, one that lies where it was written."""
    hosts.start("abc")
    publisher = hosts.publisher("a", keep=0)
    wait_until(lambda: set(publisher.share_hosts()) == {"b", "c"}, 60)
    for seed in range(2):
        version = publish(hosts, publisher, transport, seed)
        if not seed:
            require_whole(hosts, publisher, version, "abc", seed=0)
    for record in publisher.versions():
        for host in "ab":
            hosts.wait_copy(host, record.manifest_digest, "ready" if record.version == 1 else "fetching")
        hosts.store.put(KEYS.version(record.version), replace(record, state="retired").to_json())
    for host in "abc":
        wait_until(lambda: all(is_free(path) for path in slots(hosts, host)))  # noqa: B023
        wait_until(lambda: not list(Journal.all_in(hosts.arena(host), MODEL)))  # noqa: B023
    there = [slots(hosts, host) for host in "ab"]
    version = publish(hosts, publisher, transport, 2)
    assert [slots(hosts, host) for host in "ab"] == there
    require_whole(hosts, publisher, version, "abc", seed=2)


class Answers:
    """The answers that a publisher gets of its store. `lose` the one to the commit of its next version."""

    def __init__(self, publisher: Publisher) -> None:
        self._store: Any = publisher._store.store
        self._txn, self._get = self._store.txn, self._store.get

    def lose(self, *, applied: bool, away: bool) -> None:
        """`applied`: the store has done it all the same; `away`: nor does it answer afterwards, until `come`."""

        async def lost(compares: Mapping[str, int], puts: Mapping[str, bytes | None], *leases: Any) -> int:
            if not any(key.startswith(KEYS.versions) and value and b'"ready"' in value for key, value in puts.items()):
                found: int = await self._txn(compares, puts, *leases)
                return found
            if applied:
                await self._txn(compares, puts, *leases)
            self.come()
            if away:
                self._store.txn = self._store.get = silent
            return await silent()

        async def silent(*_: Any) -> Any:
            raise StoreUnavailable("test", "made not to answer", "Wait")

        self._store.txn = lost

    def come(self) -> None:
        self._store.txn, self._store.get = self._txn, self._get


def published(hosts: Hosts) -> int:
    """How often the ledger says that somebody published."""
    return sum(b'"publish"' in kv.value for kv in hosts.store.list(ENTRIES)[0])


@pytest.mark.parametrize("store_url", ["sqlite", "etcd"], indirect=True)
def test_a_commit_whose_answer_is_lost_is_one(hosts: Hosts, transport: Transport) -> None:
    publisher = hosts.publisher("a")
    draft, _, share = accepted(publisher, transport, hosts.arena("b"), model(seed=0))
    Answers(publisher).lose(applied=True, away=False)
    version = draft.commit(activate=True)
    share.close()
    target = hosts.store.get(KEYS.target)
    assert target is not None
    assert publisher._asked[version].to_json() == target.value
    assert [(v.version, v.state) for v in publisher.versions()] == [(version, "ready")]
    assert published(hosts) == 1
    require_standing(hosts, transport, newest(publisher))


@pytest.mark.parametrize("later", [False, True])
def test_a_commit_that_did_not_come_about_never_does(hosts: Hosts, transport: Transport, later: bool) -> None:
    """The store answers again, and is asked; or the lease ends first."""
    publisher = hosts.publisher("a", ttl_s=4.0)
    draft, _, share = accepted(publisher, transport, hosts.arena("b"), model(seed=0))
    answers = Answers(publisher)
    answers.lose(applied=False, away=later)
    with refused("store_unavailable"):
        draft.commit(activate=True)
    share.close()
    answers.come()
    wait_until(lambda: publisher.versions() == [])
    assert (published(hosts), hosts.store.get(KEYS.target)) == (0, None)
    there = [slots(hosts, host) for host in "ab"]
    version = publish(hosts, publisher, transport, 1)
    assert [slots(hosts, host) for host in "ab"] == there
    require_standing(hosts, transport, newest(publisher))
    assert newest(publisher).version == version == draft.version + 1


def test_a_commit_that_may_have_come_about_keeps_its_slots(hosts: Hosts, transport: Transport) -> None:
    """The store applies it and then answers nobody for a while; the next version goes beside it."""
    publisher = hosts.publisher("a")
    draft, _, share = accepted(publisher, transport, hosts.arena("b"), model(seed=0))
    answers = Answers(publisher)
    answers.lose(applied=True, away=True)
    with refused("store_unavailable"):
        draft.commit()
    share.close()
    answers.come()
    second = publish(hosts, publisher, transport, 1)
    assert [(v.version, v.state) for v in publisher.versions()] == [(second - 1, "ready"), (second, "ready")]
    assert published(hosts) == 2
    require_standing(hosts, transport, *publisher.versions())


@pytest.mark.parametrize("peers", ["ab", "b"])
async def test_a_server_that_starts_keeps_versions_that_are_whole_nowhere(
    hosts: Hosts, transport: Transport, peers: str
) -> None:
    """The one before the active version lies on two hosts, the peer of one of which may not run yet."""
    publisher = hosts.publisher("a")
    versions = [publish(hosts, publisher, transport, seed) for seed in range(2)]
    whole = publisher.publish(model(seed=2), activate=False)
    active = ActiveRecord(whole, 1, versions[1], "swap", 0.0)
    for record in publisher.versions()[:2]:
        for host, slot in {"a": record.slot, "b": "//b/slot"}.items():
            if host in peers:
                copy = CopyRecord(host, slot, record.manifest_digest, 1, "fetching", "127.0.0.1:1", 0.0)
                hosts.store.put(KEYS.copy(copy.digest, host), copy.to_json())
    hosts.store.put(KEYS.active, active.to_json())
    async with contextlib.AsyncExitStack() as stack:
        store = open_store(hosts.store_url, create=False)
        stack.push_async_callback(store.close)
        restored = await restore(store, model=MODEL, directories=[], arena=Arena(hosts.arena("a")))
    assert restored is not None
    assert (restored.version, restored.retired) == (whole, ())
    assert restored.previous == (versions[1] if peers == "ab" else None)
