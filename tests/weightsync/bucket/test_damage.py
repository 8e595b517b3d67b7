"""Damage to one object of a bucket: every version that does not need it is served, the others are refused, and neither
pruning nor removing takes anything that a record which cannot be read may name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.weightsync.bucket.test_bucket import adapter, files, newest, nudged, publisher, weights
from weightsync.bucket import reader
from weightsync.bucket.objects import Bucket
from weightsync.errors import BucketDamaged, BucketError, VersionGone
from weightsync.format.manifest import digest_of

# number: those that it is made of. Versions of the base model in full are 1 and 5; those of the adapter are 3 and 6.
CLOSURES = {1: {1}, 2: {1, 2}, 3: {1, 2, 3}, 4: {1, 2, 3, 4}, 5: {3, 5}, 6: {3, 5, 6}, 7: {3, 5, 6, 7}}
NEWEST = max(CLOSURES)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a bucket with CLOSURES."""
    root = tmp_path_factory.mktemp("damage") / "bucket"
    pub, tensors = publisher(f"file://{root}", keep=9, full_every=3, part_nbytes=8_000), weights(rows=60)
    lora = adapter(1.0)
    for number in CLOSURES:
        if number in (3, 6):
            dict(lora.tensors)["layers.0.lora_A.weight"][0, number] = 2.0
            assert pub.publish(lora, part="lora/a") == number
        else:
            assert pub.publish(tensors := nudged(tensors, number)) == number
    assert [pub.bucket.read(number).base for number in CLOSURES] == [None, 1, None, 2, None, 3, 5]
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "bucket"))


def served(root: Path, number: int, directory: Path) -> list[bytes]:
    """The blocks that a fleet without any version is sent. Raises VersionGone, BucketDamaged."""
    bucket, sent = Bucket(f"file://{root}"), []
    for version in reader.needed(bucket, bucket.read(number), lambda _: False):
        kept = reader.fetch(bucket, version, directory / version.upload)
        sent.append(b"".join(reader.stream(version, kept, version.header.base)))
    return sent


@pytest.fixture(scope="module")
def right(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[bytes]]:
    """The blocks of each version out of the undamaged bucket."""
    return {number: served(whole, number, tmp_path_factory.mktemp("right")) for number in CLOSURES}


def sealed(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """A record whose fields were changed, of which the header, with a digest that is right."""

    def changed(data: bytes) -> bytes:
        document = orjson.loads(data.partition(b"\n")[2])
        header = orjson.loads(document["header"])
        change(document, header)
        text = orjson.dumps(header, option=orjson.OPT_SORT_KEYS).decode()
        raw = orjson.dumps({**document, "header": text}, option=orjson.OPT_SORT_KEYS)
        return digest_of(raw).encode() + b"\n" + raw

    return changed


def based(far: int) -> Callable[[bytes], bytes]:
    """A record that builds on a version so much later."""
    return sealed(lambda document, header: header.update(base=[document["number"] + far, "0" * 32]))


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "first byte": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "middle byte": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "truncated": lambda data: data[:-1],
    "empty": lambda _: b"",
}
RECORDS: dict[str, Callable[[bytes], bytes]] = BYTES | {
    "newer format": sealed(lambda document, _: document.update(format=2)),
    "newer header": sealed(lambda _, header: header.update(format=2)),
    "unknown field in the header": sealed(lambda _, header: header.update(new=1)),
    "base is itself": based(0),
    "base is later": based(1),
    "base is another": sealed(lambda document, header: header.update(base=[document["number"] - 1, "0" * 32])),
    "other part is itself": sealed(lambda document, _: document.update(others={"draft": document["number"]})),
    "upload leaves the bucket": sealed(lambda document, _: document.update(upload="../../" + document["upload"])),
    "another number": sealed(lambda document, _: document.update(number=document["number"] + 1)),
}


def record(root: Path, number: int) -> Path:
    return root / "versions" / f"{number:012}.json"


def check(root: Path, damaged: int, right: dict[int, list[bytes]], directory: Path) -> None:
    for number, closure in CLOSURES.items():
        if damaged in closure:
            with pytest.raises((BucketDamaged, VersionGone)):
                served(root, number, directory / str(number))
        else:
            assert served(root, number, directory / str(number)) == right[number]


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("damaged", CLOSURES)
def test_a_record_costs_the_versions_that_need_it(
    root: Path, tmp_path: Path, right: dict[int, list[bytes]], damaged: int, kind: str
) -> None:
    path = record(root, damaged)
    path.write_bytes(RECORDS[kind](path.read_bytes()))
    check(root, damaged, right, tmp_path / "served")
    bucket, before = Bucket(f"file://{root}"), set(files(f"file://{root}"))
    try:
        bucket.read(damaged)
    except BucketDamaged:
        for number in CLOSURES:
            if number <= damaged:
                with pytest.raises(BucketError) as caught:
                    bucket.remove(number)
                assert caught.value.code in ("bucket_damaged", "version_needed")
        assert set(files(f"file://{root}")) == before
        for keep in range(len(CLOSURES), 0, -1):
            gone = bucket.prune(keep)
            stay = set().union(*(CLOSURES[n] for n in CLOSURES if n > NEWEST - keep))
            assert set(gone).isdisjoint(stay | set(range(damaged + 1)))
            assert {name for name in before - set(files(f"file://{root}")) if owner(name) <= damaged} == set()


def owner(name: str) -> int:
    """The version of an object, by its path."""
    match = re.search(r"\d{12}", name)
    assert match is not None
    return int(match[0])


@pytest.mark.parametrize("kind", [*BYTES, "missing"])
@pytest.mark.parametrize("damaged", CLOSURES)
def test_an_object_of_data_costs_the_versions_that_need_it(
    root: Path, tmp_path: Path, right: dict[int, list[bytes]], damaged: int, kind: str
) -> None:
    version = Bucket(f"file://{root}").read(damaged)
    for index, part in enumerate(version.parts):
        path = root / part.path
        data = path.read_bytes()
        path.unlink() if kind == "missing" else path.write_bytes(BYTES[kind](data))
        check(root, damaged, right, tmp_path / f"served-{index}")
        path.write_bytes(data)


def test_what_is_older_than_a_record_of_another_format_stays_and_what_is_newer_goes(root: Path) -> None:
    """A publisher of this release goes on in a bucket of a newer one, and its own versions do not pile up."""
    path = record(root, 4)
    path.write_bytes(RECORDS["newer format"](path.read_bytes()))
    before = {name for name in files(f"file://{root}") if owner(name) <= 4}
    pub, tensors = publisher(f"file://{root}", keep=1, full_every=1, part_nbytes=8_000), weights(rows=60)
    for _ in range(3):
        pub.publish(tensors)
    assert pub.bucket.numbers() == [1, 2, 3, 4, 6, 10]  # 6 has the adapter of the newest
    assert before <= set(files(f"file://{root}"))
    assert reader.verify(pub.bucket, newest(pub.bucket))
