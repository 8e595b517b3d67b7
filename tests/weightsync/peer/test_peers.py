"""Versions that travel between hosts: peers as real processes over TCP, killed, stopped and lied to."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from tests.waiting import wait_until
from tests.weightsync.peer.hosts import CHUNK, KEYS, SLOW, Hosts, bytes_of, newest, path_of, random_model
from tests.weightsync.transport.peers import require
from weightsync import Adapter, SlotReader, open_store
from weightsync.errors import PeerError
from weightsync.peer.copies import wait_for_edition
from weightsync.peer.plan import feeders


def test_a_version_reaches_other_hosts(hosts: Hosts) -> None:
    """Bytes equal to those that were published, on every host; the one-host reader finds them by the record."""
    hosts.start("abc")
    digest = hosts.published("a")
    copies = [hosts.arrived(host, digest) for host in "bc"]
    assert path_of(copies[0]).parent == hosts.arenas["b"]
    assert [hosts.received(host) for host in "abc"] == [0, copies[0].nbytes, copies[0].nbytes]
    hosts.arrived("b", hosts.published("a", random_model(2)), like="c")


def test_a_version_travels_by_nixl(hosts: Hosts) -> None:
    require("nixl")
    hosts.start("ab", "--transport", "nixl")
    hosts.arrived("b", hosts.published("a"))


def test_a_peer_killed_in_the_middle_goes_on_where_it_was(hosts: Hosts) -> None:
    hosts.start("a")
    hosts.start("b", *SLOW)
    digest = hosts.published("a")
    hosts.wait_copy("b", digest, "fetching")
    wait_until(lambda: hosts.received("b") >= 4 * CHUNK)
    hosts.kill("b")
    hosts.start("b")
    copy = hosts.arrived("b", digest)
    resumed = hosts.metric("b", "hotswap_peer_chunks_resumed_total")
    assert resumed >= 4
    chunks = -(-copy.nbytes // CHUNK)
    assert copy.nbytes - resumed * CHUNK <= hosts.received("b") < copy.nbytes
    assert resumed < chunks


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_who_feeds_a_host_may_die_or_stall_in_the_middle(hosts: Hosts, sent: signal.Signals) -> None:
    """Of three receivers in a row one has the others below it, in the one tree or the other."""
    hosts.start("abcd", *SLOW)
    wait_until(lambda: len(hosts.store.list(KEYS.copy_hosts)[0]) == 4, 60)
    ways = {host: feeders([("", host) for host in "abcd"], "a", host) for host in "bcd"}
    fed = next(host for host in "bcd" if ways[host][0][0] != "a")
    feeder = ways[fed][0][0]
    digest = hosts.published("a")
    hosts.wait_copy(fed, digest, "fetching")
    wait_until(lambda: hosts.received(fed, holder=feeder) >= 2 * CHUNK)
    before = hosts.received(fed)
    hosts.peers[feeder].send_signal(sent)
    copy = hosts.arrived(fed, digest)
    assert before < hosts.received(fed) == copy.nbytes  # what was there was kept: nothing came twice


def test_wrong_bytes_at_one_holder_are_found_and_read_elsewhere(hosts: Hosts) -> None:
    """A bit flips in b's copy: c names b, and has the right bytes from a."""
    hosts.start("ab")
    digest = hosts.published("a")
    bad = path_of(hosts.wait_copy("b", digest))
    with bad.open("r+b") as slot:
        for offset in range(CHUNK + 100, os.fstat(slot.fileno()).st_size, CHUNK):  # in every chunk but the first
            slot.seek(offset)
            slot.write(b"\x55\xaa")
    hosts.start("c", "--reads-per-holder", 1, "--limit-gbps", 0.01)  # slow enough that b answers before all is here
    hosts.arrived("c", digest)
    assert hosts.metric("c", "hotswap_peer_chunks_refetched_total", reason="digest", holder="b") > 0
    assert hosts.metric("c", "hotswap_peer_chunks_refetched_total", reason="digest", holder="a") == 0
    assert "from host b has wrong bytes" in hosts.log("c")


def test_retired_versions_are_dropped_and_their_slots_reused(hosts: Hosts) -> None:
    hosts.start("ab")
    publisher = hosts.publisher("a", keep=0)
    digests = []
    for number in range(6):
        publisher.publish(random_model(number, 256 << 10), wait=False)
        digests.append(newest(publisher).manifest_digest)
        hosts.wait_copy("b", digests[-1])
    wait_until(lambda: not hosts.copies(digests[0]))
    assert len(list(hosts.arenas["b"].glob("slot-*"))) < 6
    assert len(list(hosts.arenas["a"].glob("slot-*"))) < 6  # the publisher's own are not held by its peer


def test_editions_of_an_adapter_reach_other_hosts_and_are_dropped_when_withdrawn(hosts: Hosts) -> None:
    hosts.start("ab")
    hosts.arrived("b", hosts.published("a"))
    publisher, adapter = hosts.publisher("a", "tuner"), Adapter(random_model(3, 256 << 10), {"r": 2})
    publisher.publish_edition("math", adapter)
    (edition,) = publisher.editions("math")
    copy = hosts.arrived("b", edition.manifest_digest)
    store = open_store(hosts.store_url)
    here = asyncio.run(wait_for_edition(store, KEYS, edition, "b", 60.0))
    assert here == replace(edition.as_part, slot=str(path_of(copy)))
    publisher.withdraw_edition("math")
    wait_until(lambda: not hosts.copies(edition.manifest_digest))
    with pytest.raises(PeerError, match="nobody wants it any more"):
        asyncio.run(wait_for_edition(open_store(hosts.store_url), KEYS, edition, "b", 60.0))


def test_a_version_retired_in_the_middle_is_let_go(hosts: Hosts) -> None:
    """Its slot takes the next version, and nothing of the fetch before arrives there late."""
    hosts.start("a")
    hosts.start("b", *SLOW)
    record = hosts.publish("a")
    slot = hosts.wait_copy("b", record.manifest_digest, "fetching").slot
    wait_until(lambda: hosts.received("b") > 0)
    hosts.store.put(KEYS.version(record.version), replace(record, state="retired").to_json())
    wait_until(lambda: "b" not in hosts.copies(record.manifest_digest))
    assert hosts.arrived("b", hosts.published("a", random_model(2))).slot == slot


def test_a_second_peer_takes_over_from_the_first(hosts: Hosts) -> None:
    hosts.start("a")
    digest = hosts.published("a")
    first = hosts.start("b")
    hosts.wait_copy("b", digest)
    hosts.start("b")
    wait_until(lambda: "standing by" in hosts.log("b"), 60)
    whole = hosts.wait_copy("b", digest)
    address, in_use = whole.address, SlotReader.open(path_of(whole))  # as an instance has it
    first.kill()
    first.wait()

    def taken_over() -> bool:
        copy = hosts.copies(digest).get("b")
        return copy is not None and copy.state == "ready" and copy.address != address

    wait_until(taken_over, 60)
    in_use.close()
    copy = hosts.wait_copy("b", digest)
    assert copy.slot == whole.slot
    assert hosts.received("b") == 0
    bytes_of(copy)
