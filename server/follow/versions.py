"""Versions that a `BucketPublisher` has put into an object store (weightsync/bucket): versions+s3://BUCKET/RUN.

The gateway gets each as the delta or the full version that it is, by the route of a `RemotePublisher`, and publishes it
under a number of its fleet's. A fleet that has not got the version that a delta builds on, or those that have the other
parts (adapters, the draft model), gets these first. A record of the fleet names the version of
the bucket that it came from: the name of the upload.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.errors import RequestFailed
from server.follow.sources import Admin, Candidate, File, FollowError, Wish, bad_checkpoint, no_room, only_home
from weightsync.bucket import reader
from weightsync.bucket.objects import Bucket, StoredVersion
from weightsync.control.parts import own_digest
from weightsync.errors import BucketDamaged, BucketError
from weightsync.publish.delta import Base

SCHEME = "versions+"


class Versions:
    """Follows the newest version of one bucket."""

    def __init__(self, url: str) -> None:
        """Raises BucketError."""
        self._bucket = Bucket(url.removeprefix(SCHEME))
        self.told = f"{SCHEME}{self._bucket.told}"

    def candidates(self) -> Iterator[Candidate]:
        try:
            numbers = self._bucket.numbers()
        except BucketError as error:
            raise FollowError(str(error)) from error
        for number in numbers[-1:]:
            try:
                found = self._bucket.read(number)
            except BucketDamaged as error:
                yield Candidate(self.told, f"version {number}", {}, lacks=str(error))
                continue
            except BucketError as error:
                raise FollowError(str(error)) from error
            files = {part.path: File(part.path, part.nbytes, part.digest) for part in found.parts}
            yield Candidate(self.told, f"version {number}", files)

    def fetch(self, candidate: Candidate, cache: Path, admin: Admin) -> Path:
        try:
            with only_home(candidate, cache) as home:
                wanted = self._needed(candidate, _held(admin))
                if not reader.has_room(wanted, home):
                    raise FollowError(no_room(sum(version.nbytes for version in wanted), cache), "CacheFull")
                for version in wanted:
                    reader.fetch(self._bucket, version, home / version.upload)
        except BucketDamaged as error:
            raise bad_checkpoint(str(error)) from error
        except BucketError as error:
            raise FollowError(str(error)) from error
        return home

    def publish(self, candidate: Candidate, home: Path, admin: Admin, wish: Wish) -> int:
        """Each version that is not there yet, in order; the number of the last one in this fleet."""
        held, number = _held(admin), 0
        active = admin.call("GET", "/admin/weights/active")["version"] or 0
        try:
            wanted = self._needed(candidate, held)
        except BucketError as error:
            raise FollowError(str(error)) from error
        for version in wanted:
            files = [home / version.upload / part.path.rpartition("/")[2] for part in version.parts]
            if not all(file.exists() for file in files):
                raise FollowError(f"{candidate.name} builds on a version that this fleet has retired meanwhile")
            base = None if version.base is None else held[self._bucket.read(version.base).upload].base
            query = {"upload_id": f"{_mark(version)}{wish.attempt}"}
            query |= {"with_config": "true"} if version.header.config else {}
            query |= {"part": version.part} if version.part else {}
            # A version that has not become active yet carries the parts that came before; else the active version does.
            before = max((found.version for found in held.values()), default=0)
            query |= {"onto": str(before)} if before > active else {}
            blocks = reader.stream(version, files, base)
            try:
                made = admin.upload("/admin/weights/upload", query, blocks, wish.reason)
            except RequestFailed as error:
                if error.code == "unknown_base":
                    raise FollowError(f"{candidate.name}: {error}") from error
                raise
            number = int(made["version"])
            held[version.upload] = Held(number, Base(number, own_digest(made)))
        return number

    def _needed(self, candidate: Candidate, held: dict[str, Held]) -> list[StoredVersion]:
        """Raises BucketError."""
        newest = self._bucket.read(int(candidate.name.removeprefix("version ")))
        return reader.needed(self._bucket, newest, lambda version: version.upload in held)


def _mark(version: StoredVersion) -> str:
    return f"bucket-{version.upload}-"


@dataclass(frozen=True)
class Held:
    """A bucket's version in a fleet: the newest ready `version` that carries it, and the version as a delta's base."""

    version: int
    base: Base


def _held(admin: Admin) -> dict[str, Held]:
    """The versions of a bucket that a ready version of the fleet carries, by their uploads."""
    listed: list[dict[str, Any]] = admin.call("GET", "/admin/weights")["versions"]
    ready = {
        digest: int(version["version"])
        for version in listed
        if version["state"] == "ready"
        for digest in (version["manifest_digest"], *(part["manifest_digest"] for part in version["parts"]))
    }
    found: dict[str, Held] = {}
    for version in listed:
        head, _, rest = str(version["source"]).partition(" bucket-")
        if head == "upload" and (digest := own_digest(version)) in ready:
            found[rest[:32]] = Held(ready[digest], Base(int(version["version"]), digest))
    return found
