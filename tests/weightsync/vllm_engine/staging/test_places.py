"""Which slot a worker opens when the workers of its instance are on several hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.weightsync.tensors import model
from weightsync import Publisher
from weightsync.control.records import VersionRecord
from weightsync.errors import CopyUnavailable
from weightsync.vllm_engine.staging.bundle import PartOrder, on_this_host


@pytest.fixture(autouse=True)
def this_host(record: VersionRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena of the published version is now that of a worker on host b."""
    monkeypatch.setenv("HOTSWAP_HOST", "b")


def order(record: VersionRecord, **places: Path | str) -> PartOrder:
    """As the leader on host a gives it."""
    there = {host: str(path) for host, path in places.items()}
    return PartOrder("", record.version, "/leaders/own", record.manifest_digest, places=there)


def test_on_the_one_host_the_order_says_where_the_slot_is(record: VersionRecord) -> None:
    plain = order(record)
    assert on_this_host(plain) is plain


def test_of_several_hosts_a_worker_takes_the_slot_of_its_own(record: VersionRecord) -> None:
    assert on_this_host(order(record, a="/a/slot", b=record.slot)).slot == record.slot


def test_a_copy_that_has_moved_in_the_arena_is_found_by_its_digest(record: VersionRecord) -> None:
    moved = Path(record.slot).rename(Path(record.slot).with_name("slot-elsewhere-007"))
    assert on_this_host(order(record, b=record.slot)).slot == str(moved)


def test_a_slot_with_other_bytes_is_not_taken(publisher: Publisher, record: VersionRecord) -> None:
    publisher.publish(model(2.0), wait=False)
    other = publisher.versions()[-1]
    assert on_this_host(order(record, b=other.slot)).slot == record.slot


def test_what_is_not_here_any_more_is_refused_with_the_name_of_the_host(record: VersionRecord) -> None:
    Path(record.slot).unlink()
    with pytest.raises(CopyUnavailable, match=r"not on host b: no slot in .* activate the version again"):
        on_this_host(order(record, b=record.slot))


def test_a_worker_on_a_host_that_the_leader_does_not_know(record: VersionRecord) -> None:
    with pytest.raises(CopyUnavailable, match="not on host b: its leader knows a, c alone: set HOTSWAP_HOST"):
        on_this_host(order(record, a="/a/slot", c="/c/slot"))
