from __future__ import annotations

import orjson
import pytest

from weightsync.control.records import (
    ActiveRecord,
    CopyHostRecord,
    ErrorInfo,
    InstanceRecord,
    Keys,
    ShareRecord,
    SplitRecord,
    SwapRecord,
    VersionRecord,
)
from weightsync.control.strict_json import Record
from weightsync.errors import RecordError

VERSION = VersionRecord(7, "ready", "/dev/shm/x/slot-0", 10, "ab", None, 3, "trainer", 1, 1.5, "", 2)
SWAP = SwapRecord("id", 7, "prepare", ("a", "b"), deadline=2.0, opened_at=1.0)
INSTANCE = InstanceRecord("a", "http://127.0.0.1:1", error=ErrorInfo("code", "message", "tensor"))


def raw_of(record: Record, **changes: object) -> bytes:
    return orjson.dumps(orjson.loads(record.to_json()) | changes)


@pytest.mark.parametrize(
    ("kind", "raw", "problem"),
    [
        *((ActiveRecord, raw, "not JSON") for raw in (b"", b"{")),
        *((ActiveRecord, raw, "expected an object") for raw in (b"[]", b"3", b"null")),
        (VersionRecord, raw_of(VERSION, surprise=1), "unknown field 'surprise'"),
        (VersionRecord, raw_of(VERSION, version="7"), "'version' cannot be '7'"),
        (VersionRecord, raw_of(VERSION, version=True), "'version' cannot be True"),
        (VersionRecord, raw_of(VERSION, state="perfect"), "'state' cannot be 'perfect'"),
        (VersionRecord, raw_of(VERSION, step=1.5), "'step' cannot be 1.5"),
        (SwapRecord, raw_of(SWAP, participants=[1]), "participants"),
        (InstanceRecord, b'{"id":"a"}', "'address' is missing"),
        (InstanceRecord, raw_of(INSTANCE, error={"code": "c"}), "ErrorInfo: field 'message' is missing"),
    ],
)
def test_what_does_not_fit_is_refused(kind: type[Record], raw: bytes, problem: str) -> None:
    with pytest.raises(RecordError, match=problem):
        kind.from_json(raw)


def test_fields_with_a_default_may_be_left_out_and_are_not_written() -> None:
    """So an older release reads what a newer one writes, until a new field is used."""
    raw = b'{"id":"a","address":"x"}'
    assert (InstanceRecord("a", "x").to_json(), InstanceRecord.from_json(raw)) == (raw, InstanceRecord("a", "x"))
    assert CopyHostRecord.from_json(b'{"host":"b","rack":"r"}') == CopyHostRecord("b", "r")
    assert CopyHostRecord("b", "r").to_json() == b'{"host":"b","rack":"r"}'
    split = SplitRecord((ShareRecord(2, 10.0, ("a",)),))
    written = ActiveRecord(7, 1, None, "id", 1.0, split=split).to_json()
    assert orjson.loads(written)["split"] == {"shares": [{"version": 2, "percent": 10.0, "instances": ["a"]}]}


def test_a_record_that_cannot_be_read_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    raw = VERSION.to_json().replace(b'"step":3', b'"step":"3"')
    assert [VersionRecord.readable("versions/7", raw) for _ in range(3)] == [None] * 3
    (said,) = caplog.messages
    assert said.startswith("ignoring versions/7: VersionRecord: field 'step' cannot be '3'")
    assert VersionRecord.readable("versions/7", VERSION.to_json()) == VERSION


def test_versions_sort_as_numbers() -> None:
    keys = Keys("Qwen/Qwen3-0.6B")
    assert keys.version(9) < keys.version(10) < keys.version(99_999_999)
    assert keys.version(9).startswith(keys.versions)


@pytest.mark.parametrize("model", ["", "a\nb", "\0"])
def test_a_model_name_that_cannot_be_a_key(model: str) -> None:
    with pytest.raises(RecordError):
        Keys(model)
