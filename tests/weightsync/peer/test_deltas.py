"""Versions that travel between hosts as differences."""

from __future__ import annotations

import numpy as np

from tests.weightsync.peer.hosts import Hosts, bytes_of, newest, random_model, until

ALWAYS = ("--deltas", "always")


def stepped(tensors: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """A few elements of each tensor changed a little."""
    rng = np.random.default_rng(seed)
    changed = {name: tensor.copy() for name, tensor in tensors.items()}
    for tensor in changed.values():
        places = rng.integers(0, len(tensor), len(tensor) // 200)
        tensor[places] *= np.float32(1.0001)
    return changed


def test_a_small_step_travels_as_a_difference(hosts: Hosts) -> None:
    """b has the version of before; c, which comes later, has none; all end with the same bytes. b is slow enough for
    a difference to pay, says so to a, and a makes one.
    """
    hosts.start("a")
    hosts.start("b", "--limit-gbps", 0.02)
    publisher = hosts.publisher("a")
    first = random_model(1)
    publisher.publish(first, wait=False)
    base = hosts.wait_copy("b", newest(publisher).manifest_digest)
    until(lambda: hosts.metric("a", "hotswap_peer_sent_bytes_total", reader="b") == base.nbytes)  # told when it leaves
    before = hosts.metric("b", "hotswap_peer_received_bytes_total")
    publisher.publish(stepped(first, 2), wait=False)
    record = newest(publisher)
    copy = hosts.wait_copy("b", record.manifest_digest)
    assert bytes_of(copy) == bytes_of(hosts.copies(record.manifest_digest)["a"])
    assert hosts.metric("b", "hotswap_peer_fetch_seconds_count", how="delta") == 1
    assert hosts.metric("b", "hotswap_peer_received_bytes_total") - before < copy.nbytes / 10
    until(lambda: hosts.copies(record.manifest_digest)["b"].delta_of == base.digest)  # and b passes it on
    hosts.start("c")
    assert bytes_of(hosts.wait_copy("c", record.manifest_digest)) == bytes_of(copy)
    assert hosts.metric("c", "hotswap_peer_fetch_seconds_count", how="delta") == 0


def test_another_model_travels_in_full(hosts: Hosts) -> None:
    """The difference would be no smaller."""
    hosts.start("a", *ALWAYS)
    hosts.start("b", *ALWAYS)
    publisher = hosts.publisher("a")
    publisher.publish(random_model(1), wait=False)
    hosts.wait_copy("b", newest(publisher).manifest_digest)
    publisher.publish(random_model(2), wait=False)
    record = newest(publisher)
    copy = hosts.wait_copy("b", record.manifest_digest)
    assert hosts.copies(record.manifest_digest)["a"].delta_of is None
    assert hosts.metric("b", "hotswap_peer_fetch_seconds_count", how="full") == 2
    assert bytes_of(copy) == bytes_of(hosts.copies(record.manifest_digest)["a"])


def test_a_damaged_difference_is_not_applied(hosts: Hosts) -> None:
    """The base at b has changed since it was fetched: the version comes in full."""
    hosts.start("a", *ALWAYS)
    hosts.start("b", *ALWAYS)
    publisher = hosts.publisher("a")
    first = random_model(1)
    publisher.publish(first, wait=False)
    base = hosts.wait_copy("b", newest(publisher).manifest_digest)
    with open(base.slot.removeprefix("//b"), "r+b") as slot:
        slot.seek(base.nbytes - 8192)
        slot.write(b"\x01\x02\x03\x04")
    publisher.publish(stepped(first, 2), wait=False)
    record = newest(publisher)
    copy = hosts.wait_copy("b", record.manifest_digest)
    assert bytes_of(copy) == bytes_of(hosts.copies(record.manifest_digest)["a"])
    assert "does not come as a delta" in hosts.log("b")
    assert hosts.metric("b", "hotswap_peer_fetch_seconds_count", how="full") == 2
