"""`hotswap weights --bucket`: what is listed, verified, removed and refused."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from server.cli.weights import app
from tests.weightsync.bucket.test_bucket import adapter, files, nudged, publisher, weights
from weightsync.bucket.objects import Bucket


def asked(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output + str(done.exception or "")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Two versions of the base and one of an adapter."""
    url = f"file://{tmp_path}/bucket/run"
    pub, tensors = publisher(url), weights()
    pub.publish(tensors, step=3)
    pub.publish(nudged(tensors), step=4)
    pub.publish(adapter(1.0), part="lora/math")
    return url


def test_the_list_says_what_each_version_is(url: str) -> None:
    status, out = asked("list", "--bucket", url)
    assert status == 0
    one, two, three = (line.split() for line in out.splitlines() if line.strip()[:1].isdigit())
    assert (one[:3], two[:4], three[:3]) == (
        ["1", "base", "full"],
        ["2", "base", "delta", "1"],
        ["3", "lora/math", "full"],
    )
    rows = orjson.loads(asked("list", "--bucket", url, "--json")[1])
    versions = [Bucket(url).read(number) for number in (1, 2, 3)]
    assert [row["nbytes"] for row in rows] == [version.nbytes for version in versions]
    assert [row["digest"] for row in rows] == [version.header.target_digest for version in versions]
    assert (rows[1]["step"], rows[2]["others"], rows[2]["objects"]) == (4, {"": 2}, 1)


def test_verify_reads_every_byte_and_names_what_is_damaged(url: str) -> None:
    status, out = asked("verify", "--bucket", url)
    assert (status, "version 3 is as published" in out, "versions 1, 2, 3" in out) == (0, True, True)
    part = Bucket(url).read(1).parts[0].path
    path = Path(url.removeprefix("file://")) / part
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    status, out = asked("verify", 2, "--bucket", url)
    assert status == 1
    assert part in out
    status, out = asked("verify", 9, "--bucket", url)
    assert (status, "version 9 is no longer in" in out) == (1, True)
    status, out = asked("verify", "--bucket", f"{url}-empty")
    assert (status, "has no version yet" in out) == (1, True)
    assert asked("verify", "--bucket", url, "--trust", "key.pem")[0] == 1


def test_a_record_that_cannot_be_read_is_listed_as_damaged(url: str) -> None:
    path = Path(url.removeprefix("file://")) / "versions" / f"{2:012}.json"
    path.write_bytes(path.read_bytes()[:-3])
    status, out = asked("list", "--bucket", url)
    assert status == 1
    assert "damaged" in out
    assert f"{2:012}.json" in out


def test_remove_keeps_what_others_need(url: str) -> None:
    status, out = asked("remove", 1, "--bucket", url)
    assert (status, "versions 2 need it" in out) == (1, True)
    publisher(url, keep=9).publish(weights(5))
    before = files(url)
    assert asked("remove", 3, "--bucket", url)[0] == 1  # the newest version has its adapter
    assert files(url) == before
    assert asked("remove", 2, "--bucket", url) == (0, "version 2 is removed\n")
    assert Bucket(url).numbers() == [1, 3, 4]
