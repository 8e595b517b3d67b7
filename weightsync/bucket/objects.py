"""The objects of a bucket: records of versions, the parts of their blocks, and which of both are kept."""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from weightsync.errors import BucketDamaged, BucketError, PublishError, VersionGone, version_needed
from weightsync.format.manifest import digest_of
from weightsync.publish.delta import DeltaHeader

log = logging.getLogger("weightsync.bucket")

T = TypeVar("T")
FORMAT = 1
_NUMBER = re.compile(r"(\d{12})(?:\.json|-[0-9a-f]{32})")
_UPLOAD = re.compile(r"[0-9a-f]{32}")
_USER = re.compile(r"(://)[^/?#@\s]*@")
_QUERY = re.compile(r"(://[^?\s]*)\?[^\s'\"),]*")


def redacted(text: str) -> str:
    """Without the user, the password and the query of each URL in it."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


@dataclass(frozen=True)
class StoredPart:
    """One object of a version's blocks, by its path below the prefix. `digest` is xxh3_128."""

    path: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class StoredVersion:
    """A version as its record has it: one part of a model, and which versions have the `others`, by part.

    `upload` is unique for each; `header` names the version of the part before it as its base, by number and contents
    (`DeltaHeader.target_digest`), or none if it is in full."""

    number: int
    upload: str
    header: DeltaHeader
    parts: tuple[StoredPart, ...]
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def part(self) -> str:
        """ "" for the base model, "draft" or "lora/NAME"."""
        return self.header.part

    @property
    def newest(self) -> dict[str, int]:
        """The versions that have each part, as of this one."""
        return {**self.others, self.part: self.number}

    @property
    def base(self) -> int | None:
        return self.header.base.version if self.header.base is not None else None

    @property
    def nbytes(self) -> int:
        """The bytes that the version takes in the bucket."""
        return sum(part.nbytes for part in self.parts)

    def to_bytes(self) -> bytes:
        parts = [[part.path, part.nbytes, part.digest] for part in self.parts]
        document: dict[str, Any] = {"format": FORMAT, "number": self.number, "upload": self.upload, "parts": parts}
        document |= {"others": dict(self.others)} if self.others else {}
        raw = orjson.dumps({**document, "header": self.header.to_json().decode()}, option=orjson.OPT_SORT_KEYS)
        return digest_of(raw).encode() + b"\n" + raw

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> StoredVersion:
        """Raises BucketDamaged."""
        digest, _, raw = data.partition(b"\n")
        if digest_of(raw).encode() != digest:
            raise BucketDamaged(where, "its digest is another one")
        try:
            found: Mapping[str, Any] = orjson.loads(raw)
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}, this release reads {FORMAT}: update the older side")
            parts = tuple(_part(*row) for row in found["parts"])
            header = DeltaHeader.from_json(found["header"].encode())
            number, others = int(found["number"]), {str(k): int(v) for k, v in found.get("others", {}).items()}
            if header.part in others or any(not 0 < other < number for other in others.values()):
                raise ValueError(f"versions {others} cannot have its other parts")
            if header.base is not None and header.base.version >= number:
                raise ValueError(f"version {number} cannot build on version {header.base.version}")
            if not _UPLOAD.fullmatch(upload := found["upload"]):
                raise ValueError(f"{upload!r} is no upload")
            return cls(number, upload, header, parts, others)
        except (ValueError, TypeError, KeyError, AttributeError, PublishError) as error:
            raise BucketDamaged(where, f"it cannot be read ({error})") from error


def _part(path: str, nbytes: int, digest: str) -> StoredPart:
    if not re.fullmatch(r"data/\d{12}-[0-9a-f]{32}/\d{5}", path) or type(nbytes) is not int or nbytes < 0:
        raise ValueError(f"{path!r} is no part of a version")
    return StoredPart(path, nbytes, str(digest))


class Bucket:
    """The prefix at `url`. Credentials are those of fsspec's file system, from the environment. All methods raise
    BucketError."""

    def __init__(self, url: str) -> None:
        """Raises BucketError for what names no bucket."""
        from fsspec.core import url_to_fs

        self.told = redacted(url).rstrip("/")
        try:
            self._files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            advice = "name a URL of fsspec's, and install what it needs (for s3:// the package s3fs)"
            raise BucketError(f"{self.told} cannot be opened ({redacted(str(error))}): {advice}") from None
        self._root = root.rstrip("/")

    def numbers(self) -> list[int]:
        """Of all versions, in order."""
        found = (_NUMBER.fullmatch(name) for name in self._names("versions"))
        return sorted(int(match[1]) for match in found if match is not None)

    def read(self, number: int) -> StoredVersion:
        """Raises VersionGone, BucketDamaged."""
        where = f"{self.told}/{_record(number)}"

        def parsed(data: bytes) -> StoredVersion:
            found = StoredVersion.from_bytes(data, where)
            if found.number != number:
                raise BucketDamaged(where, f"it is that of version {found.number}")
            return found

        return self._good(_record(number), number, parsed)

    def newest_parts(self) -> dict[str, int]:
        """The versions that have each part of the model, by the newest record that can be read."""
        for number in reversed(self.numbers()):
            with contextlib.suppress(VersionGone, BucketDamaged):
                return self.read(number).newest
        return {}

    def begin(self, version: StoredVersion) -> None:
        """Makes its directories, where there are such."""
        with self._told():
            for directory in ("versions", directory_of(version)):
                self._files.makedirs(self._at(directory), exist_ok=True)

    def write_part(self, version: str, index: int, data: bytes) -> StoredPart:
        """`version` is its directory, see `directory_of`."""
        part = StoredPart(f"{version}/{index:05}", len(data), digest_of(memoryview(data)))
        with self._told():
            self._files.pipe_file(self._at(part.path), data)
        return part

    def read_part(self, version: StoredVersion, part: StoredPart) -> bytes:
        """Verified. Raises VersionGone, BucketDamaged."""

        def verified(data: bytes) -> bytes:
            if len(data) != part.nbytes or digest_of(data) != part.digest:
                raise BucketDamaged(f"{self.told}/{part.path}", f"it is not what version {version.number} has there")
            return data

        return self._good(part.path, version.number, verified)

    def fetch_part(self, version: StoredVersion, part: StoredPart, target: Path) -> None:
        """Brings it, unless it is there. Raises VersionGone, BucketDamaged, and OSError where `target` cannot be
        written."""
        if _holds(target, part):
            return
        data = self.read_part(version, part)
        half = target.with_name(f".{target.name}.part")
        half.write_bytes(data)
        half.rename(target)

    def claim(self, version: StoredVersion) -> str:
        """Writes the record, unless that number is taken; the upload whose number it is now, "" if that cannot be
        read."""
        path = self._at(_record(version.number))
        try:
            with self._told():
                self._files.pipe_file(path, version.to_bytes(), mode="create")
        except FileExistsError:
            with contextlib.suppress(VersionGone, BucketDamaged):
                return self.read(version.number).upload
            return ""
        return version.upload

    def prune(self, keep: int) -> list[int]:
        """Removes all but the newest `keep` versions, those that have their other parts and those that they build on,
        then what no version names up to the newest number; returns the numbers that went. A record that cannot be read,
        of a newer release perhaps, may name whatever is older: neither that version nor an older one is removed."""
        numbers, found, floor = self.numbers(), dict[int, StoredVersion](), 0
        for number in numbers:
            try:
                found[number] = self.read(number)
            except VersionGone:
                continue
            except BucketDamaged as error:
                floor = number
                log.warning("nothing up to version %d is removed from %s: %s", number, self.told, error)
        newest, needed = numbers[-keep:], set[int]()
        waiting = [at for number in newest if number in found for at in found[number].newest.values()]
        while waiting:
            if (at := waiting.pop()) in found and at not in needed:
                needed.add(at)
                waiting += [base] if (base := found[at].base) is not None else []
        uploads = {directory_of(found[number]).rpartition("/")[2] for number in needed}
        gone = [number for number in found if number > floor and number not in needed]
        for number in gone:  # the record first: what has one is whole
            self._remove(_record(number))
        for name in self._names("data"):
            match = _NUMBER.fullmatch(name)
            if match is not None and floor < int(match[1]) <= numbers[-1] and name not in uploads:
                self._remove(f"data/{name}", recursive=True)
        return gone

    def remove(self, number: int) -> None:
        """Removes one version. Raises VersionGone, BucketDamaged also for a later record that cannot be read and may
        name this one, and BucketError for one that another builds on, for the newest, which followers take, and for
        those that have its other parts."""
        numbers = self.numbers()
        found, users = self.read(number), list[int]()
        for user in numbers[bisect(numbers, number) :]:
            with contextlib.suppress(VersionGone):
                version = self.read(user)
                if version.base == number or (user == numbers[-1] and number in version.others.values()):
                    users.append(user)
        if users or number == numbers[-1]:
            raise version_needed(self.told, number, users)
        self._remove(_record(number))
        self._remove(directory_of(found), recursive=True)

    def try_out(self) -> None:
        """Writes an object, claims it a second time, reads and removes it. Raises BucketError where a claim would not
        keep two publishers apart."""
        path, text = f"trials/{uuid.uuid4().hex}", b"a trial of hotswap"
        with self._told():
            self._files.makedirs(self._at("trials"), exist_ok=True)
            self._files.pipe_file(self._at(path), text, mode="create")
        try:
            with self._told():
                self._files.pipe_file(self._at(path), b"another", mode="create")
            problem = "it lets two publishers create one object, so that one would overwrite the other's versions"
        except FileExistsError:
            with self._told():
                problem = (
                    "" if self._files.cat_file(self._at(path)) == text else "it gives other bytes than it was given"
                )
        finally:
            self._remove(path)
        if problem:
            raise BucketError(f"{self.told} cannot be published to ({problem}): use a store with conditional writes")

    def _good(self, path: str, number: int, checked: Callable[[bytes], T]) -> T:
        """`checked` of an object. If it raises BucketDamaged, the object is read once more: what came damaged over the
        network may be good where it lies."""
        with contextlib.suppress(BucketDamaged):
            return checked(self._read(path, number))
        return checked(self._read(path, number))

    def _read(self, path: str, number: int) -> bytes:
        with self._told(number):
            data: bytes = self._files.cat_file(self._at(path))
        return data

    def _names(self, directory: str) -> list[str]:
        self._files.invalidate_cache()
        with contextlib.suppress(VersionGone), self._told(0):
            return [
                str(name).rstrip("/").rpartition("/")[2] for name in self._files.ls(self._at(directory), detail=False)
            ]
        return []

    def _remove(self, path: str, recursive: bool = False) -> None:
        with contextlib.suppress(VersionGone), self._told(0):
            self._files.rm(self._at(path), recursive=recursive)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    @contextlib.contextmanager
    def _told(self, number: int | None = None) -> Iterator[None]:
        """Each file system has exceptions of its own; with `number`, what is missing is a version that has gone."""
        try:
            yield
        except FileExistsError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and number is not None:
                raise VersionGone(self.told, number) from None
            what = redacted(str(error) or type(error).__name__)
            raise BucketError(
                f"{self.told} cannot be used ({what}): is it there, and may these credentials?",
                code="bucket_unavailable",
            ) from None


def _record(number: int) -> str:
    return f"versions/{number:012}.json"


def directory_of(version: StoredVersion) -> str:
    """Where its parts are."""
    return f"data/{version.number:012}-{version.upload}"


def _holds(target: Path, part: StoredPart) -> bool:
    with contextlib.suppress(OSError):
        return target.stat().st_size == part.nbytes and digest_of(target.read_bytes()) == part.digest
    return False
