from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest

from weightsync.control.records import (
    ActiveRecord,
    ErrorInfo,
    InstanceRecord,
    Keys,
    Record,
    ShareRecord,
    SplitRecord,
    SwapRecord,
    TargetRecord,
    VersionRecord,
)
from weightsync.errors import RecordError

VERSION = VersionRecord(7, "ready", "/dev/shm/x/slot-0", 10, "ab", None, 3, "trainer", 1, 1.5, "", 2)
SWAP = SwapRecord("id", 7, "prepare", ("a", "b"), deadline=2.0, opened_at=1.0)
TARGET = TargetRecord(7, "id", "trainer", 60.0)
INSTANCE = InstanceRecord("a", "http://127.0.0.1:1", error=ErrorInfo("code", "message", "tensor"))


@pytest.mark.parametrize("record", [VERSION, SWAP, INSTANCE, ActiveRecord(7, 1, None, "id", 1.0)])
def test_round_trip(record: VersionRecord | SwapRecord | InstanceRecord | ActiveRecord) -> None:
    assert type(record).from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"version": "7"}, "'version' cannot be '7'"),
        ({"version": True}, "'version' cannot be True"),
        ({"state": "perfect"}, "'state' cannot be 'perfect'"),
        ({"step": 1.5}, "'step' cannot be 1.5"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(RecordError, match=problem):
        VersionRecord.from_json(orjson.dumps(orjson.loads(VERSION.to_json()) | change))


def test_a_missing_field_is_named() -> None:
    data = orjson.loads(VERSION.to_json())
    del data["slot"]
    with pytest.raises(RecordError, match="'slot' is missing"):
        VersionRecord.from_json(orjson.dumps(data))


def test_fields_with_a_default_may_be_left_out() -> None:
    found = InstanceRecord.from_json(b'{"id":"a","address":"x"}')
    assert found == InstanceRecord("a", "x")


def test_fields_with_a_default_are_not_written() -> None:
    """So an older release reads what a newer one writes, until a new field is used."""
    assert InstanceRecord("a", "x").to_json() == b'{"id":"a","address":"x"}'
    split = SplitRecord((ShareRecord(2, 10.0, ("a",)),))
    written = ActiveRecord(7, 1, None, "id", 1.0, split=split).to_json()
    assert orjson.loads(written)["split"] == {"shares": [{"version": 2, "percent": 10.0, "instances": ["a"]}]}


@pytest.mark.parametrize(
    ("record", "change"),
    [
        *((VERSION, {"step": step}) for step in ("8", 8.0, True, np.int64(8))),
        *((VERSION, {"source": source}) for source in (None, 3, Path("/a"))),
        (VERSION, {"publisher": 4}),
        (VERSION, {"created_at": float("nan")}),
        *((TARGET, change) for change in ({"mode": "Together"}, {"deadline_s": "9"}, {"requested_by": 4})),
    ],
)
def test_nothing_is_written_that_cannot_be_read(record: Record, change: dict[str, object]) -> None:
    changed = copy(record)
    for name, value in change.items():
        object.__setattr__(changed, name, value)
    with pytest.raises(RecordError, match="Nothing was written"):
        changed.to_json()


def test_a_record_that_cannot_be_read_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    raw = VERSION.to_json().replace(b'"step":3', b'"step":"3"')
    assert [VersionRecord.readable("versions/7", raw) for _ in range(3)] == [None] * 3
    (said,) = caplog.messages
    assert said.startswith("ignoring versions/7: VersionRecord: field 'step' cannot be '3'")
    assert VersionRecord.readable("versions/7", VERSION.to_json()) == VERSION


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b"null"])
def test_what_is_not_an_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RecordError):
        ActiveRecord.from_json(raw)


def test_a_nested_record_is_checked_too() -> None:
    with pytest.raises(RecordError, match="ErrorInfo: field 'message' is missing"):
        InstanceRecord.from_json(b'{"id":"a","address":"x","error":{"code":"c"}}')


def test_participants_are_names() -> None:
    raw = replace(SWAP, participants=("a",)).to_json().replace(b'["a"]', b"[1]")
    with pytest.raises(RecordError, match="participants"):
        SwapRecord.from_json(raw)


def test_versions_sort_as_numbers() -> None:
    keys = Keys("Qwen/Qwen3-0.6B")
    assert keys.version(9) < keys.version(10) < keys.version(99_999_999)
    assert keys.version(9).startswith(keys.versions)


@pytest.mark.parametrize("model", ["", "a\nb", "\0"])
def test_a_model_name_that_cannot_be_a_key(model: str) -> None:
    with pytest.raises(RecordError):
        Keys(model)
