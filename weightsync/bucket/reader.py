"""Brings versions out of a bucket: which ones are needed, their parts, and the stream that a gateway takes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from weightsync.bucket.objects import Bucket, StoredVersion
from weightsync.bucket.publisher import AT_ONCE
from weightsync.errors import BucketDamaged
from weightsync.publish.delta import Base, framed


def needed(bucket: Bucket, newest: StoredVersion, held: Callable[[StoredVersion], bool]) -> list[StoredVersion]:
    """The versions that make up `newest`, oldest first: it, those that have its other parts, and what each builds on,
    down to one in full or one that is `held`. `newest` is always among them, the others only if they are not held.
    Raises VersionGone, BucketDamaged, BucketError."""
    found = {version.number: version for version in chain(bucket, newest, held)}
    for part, number in newest.others.items():
        other = bucket.read(number)
        if other.part != part:
            raise BucketDamaged(f"{bucket.told}, version {newest.number}", f"version {number} has no {part}")
        if not held(other):
            found |= {version.number: version for version in chain(bucket, other, held)}
    return [found[number] for number in sorted(found)]


def chain(bucket: Bucket, newest: StoredVersion, held: Callable[[StoredVersion], bool]) -> list[StoredVersion]:
    """The versions of one part that lead to `newest`, oldest first: each is in full, or builds on the one before it, or
    on one that is `held`. Raises VersionGone, BucketDamaged, BucketError."""
    found = [newest]
    while (number := found[0].base) is not None:
        before = bucket.read(number)
        based = found[0].header.base
        assert based is not None
        if before.part != newest.part or before.header.target_digest != based.manifest_digest:
            raise BucketDamaged(f"{bucket.told}, version {found[0].number}", f"it builds on another version {number}")
        if held(before):
            break
        found.insert(0, before)
    return found


def verify(bucket: Bucket, newest: StoredVersion) -> tuple[list[StoredVersion], int]:
    """Reads every byte of the versions that make up `newest`, and compares it with the records; the versions and the
    bytes read. Raises VersionGone, BucketDamaged, BucketError."""
    versions = needed(bucket, newest, lambda _: False)
    for version in versions:
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="bucket") as pool:
            for _ in pool.map(lambda part, version=version: len(bucket.read_part(version, part)), version.parts):
                pass
    return versions, sum(version.nbytes for version in versions)


def fetch(bucket: Bucket, version: StoredVersion, directory: Path) -> list[Path]:
    """Its parts as files in `directory`, verified; those that are there already are not fetched again. Raises
    VersionGone, BucketDamaged, BucketError, OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / part.path.rpartition("/")[2] for part in version.parts]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="bucket") as pool:
        tasks = [pool.submit(bucket.fetch_part, version, p, f) for p, f in zip(version.parts, files, strict=True)]
        try:
            for task in tasks:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
    return files


def has_room(versions: list[StoredVersion], directory: Path) -> bool:
    """Whether all of it would fit where `directory` is."""
    return sum(version.nbytes for version in versions) <= shutil.disk_usage(directory).free


def stream(version: StoredVersion, files: list[Path], base: Base | None) -> Iterator[bytes]:
    """The version as a delta from `base`, the version before it as this fleet's store has it (publish/delta.py)."""
    return framed(replace(version.header, base=base), (path.read_bytes() for path in files))
