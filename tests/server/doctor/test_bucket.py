"""Buckets that are there, away, closed to these credentials, or no bucket."""

from __future__ import annotations

from pathlib import Path

from server.doctor.world import World
from tests.server.doctor.worlds import findings, only
from tests.weightsync.bucket.test_bucket import publisher, weights


def test_a_bucket_is_tried_out(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket/run"
    assert "pass --bucket" in only(findings("bucket", World(environ={})), "skip").found
    assert "no version yet" in only(findings("bucket", World(bucket=url)), "ok").found
    publisher(url).publish(weights())
    assert "the newest of its 1 versions is 1" in only(findings("bucket", World(bucket=url)), "ok").found


def test_one_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    away = only(findings("bucket", World(bucket=f"file://{tmp_path}/file/run")), "fail")
    assert "cannot be used" in away.found
    assert "AWS_ACCESS_KEY_ID" in away.mend
    found = only(findings("bucket", World(bucket="nothing://somebody:secret@x/run?token=secret")), "fail")
    assert "cannot be opened" in found.found
    assert "secret" not in found.found + found.mend
