"""Versions are carried out of slots by a process of its own, whoever is killed; the newest goes first."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from tests.waiting import wait_until
from tests.weightsync.bucket.test_bucket import nudged, weights
from weightsync import Publisher, SlotReader
from weightsync.bucket import reader
from weightsync.bucket.carrier import Carrier, Desk, Order
from weightsync.bucket.metrics import PublisherMetrics
from weightsync.bucket.objects import Bucket
from weightsync.errors import BucketError, BucketUnavailable


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run"


def ready(publisher: Publisher, tensors: Any, step: int) -> tuple[str, str]:
    """Slot and manifest digest of a version of these tensors."""
    version = publisher.publish(tensors, step=step, activate=False)
    record = next(v for v in publisher.versions() if v.version == version)
    return record.slot, record.manifest_digest


def test_slots_become_versions_and_differences(publisher: Publisher, url: str) -> None:
    first = weights()
    with closing(Carrier(url, model="demo")) as carrier:
        carrier.hand(*ready(publisher, first, 1), source="a test")
        (one,) = carrier.finish(120.0)
        carrier.hand(*ready(publisher, nudged(first), 2))
        (two,) = carrier.finish(120.0)
    versions = [Bucket(url).read(number) for number in (1, 2)]
    assert [(one.number, one.full, one.error), (two.number, two.full, two.error)] == [(1, True, ""), (2, False, "")]
    assert [version.base for version in versions] == [None, 1]
    assert [version.nbytes for version in versions] == [one.sent, two.sent]
    assert [(v.header.step, v.header.source) for v in versions] == [(1, "a test"), (2, "")]
    assert len(reader.verify(Bucket(url), versions[1])[0]) == 2


def test_a_slot_that_is_another_by_now_is_refused(publisher: Publisher, url: str) -> None:
    with closing(Carrier(url, model="demo")) as carrier:
        slot, _ = ready(publisher, weights(), 1)
        with pytest.raises(BucketError, match="slot"):
            carrier.hand(slot, "0" * 32)
        assert carrier.finish(0.0) == []


def test_what_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(BucketUnavailable, match="cannot be used"):
        Carrier(f"file://{tmp_path}/file/run", model="demo")
    with pytest.raises(BucketError, match="metrics cannot be served at nowhere"):
        Carrier(f"file://{tmp_path}/run", model="demo", metrics="nowhere:x")


def test_a_carrier_that_was_killed_is_told_and_started_anew(publisher: Publisher, url: str) -> None:
    first = weights()
    with closing(Carrier(url, model="demo")) as carrier:
        carrier.hand(*ready(publisher, first, 1))
        assert [outcome.error for outcome in carrier.finish(120.0)] == [""]
        carrier._process.kill()
        carrier._process.wait()
        carrier.hand(*ready(publisher, nudged(first), 2))
        (outcome,) = carrier.finish(120.0)
    assert (outcome.number, outcome.full, outcome.error) == (2, True, "")


LEFT_ALONE = """
import os, signal, sys
from weightsync.bucket.carrier import Carrier
print(Carrier(sys.argv[1], model="demo")._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_carrier_ends_with_whoever_started_it(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_ALONE, url], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not Path(f"/proc/{int(done.stdout)}/fd/0").exists(), 60.0)


class Held:
    """A BucketPublisher that puts nothing there before it may."""

    def __init__(self) -> None:
        self.metrics, self.last = PublisherMetrics(), dict[str, Any]()
        self.begun, self.may = threading.Event(), threading.Event()
        self.slots: list[SlotReader] = []

    def publish_slot(self, slot: SlotReader, *, part: str, source: str) -> int:
        self.begun.set()
        assert self.may.wait(60.0)
        self.slots.append(slot)
        self.last = {"number": len(self.slots), "sent": 1, "full": True, "seconds": 0.5}
        return len(self.slots)


def test_a_newer_version_takes_the_place_of_one_that_waits() -> None:
    publisher, answers, closed = Held(), io.BytesIO(), list[int]()
    desk = Desk(publisher, answers)  # type: ignore[arg-type]
    threading.Thread(target=desk.work, daemon=True).start()

    def order(number: int, part: str = "") -> Order:
        slot: Any = SimpleNamespace(number=number, close=lambda: closed.append(number))
        return Order(slot, part, "", 0.0)

    desk.take(order(1))
    assert publisher.begun.wait(60.0)
    for number, part in ((2, ""), (3, "lora/x"), (4, "")):
        desk.take(order(number, part))
    assert closed == [2]
    publisher.may.set()
    wait_until(lambda: len(publisher.slots) == 3 and answers.getvalue().count(b"\n") == 4, 60.0)
    assert [slot.number for slot in publisher.slots] == [1, 3, 4]  # type: ignore[attr-defined]
    outcomes = [orjson.loads(line)["outcome"] for line in answers.getvalue().splitlines()]
    assert [(outcome["number"], outcome["skipped"]) for outcome in outcomes] == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
    ]
