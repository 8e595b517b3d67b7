"""The directory with the copies: versions are there whole or not at all, the oldest make room, the bound holds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from weightsync.errors import ManifestError, PersistError, PersistFull, RecordError
from weightsync.peer.copies import all_parts
from weightsync.persist.pieces import (
    MANIFEST,
    Piece,
    disk_piece,
    piece_directory,
    read_manifest,
    slot_piece,
    sync_directory,
    write_piece,
    write_synced,
)
from weightsync.records import VersionRecord

VERSION_FILE = "version.json"
FORMAT = 1
NEW, OLD = ".new-", ".old-"  # what the names of versions begin with that are being written, or removed
LOCK = ".lock"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class OnDisk:
    """A version in the directory. `written_at` is unix seconds."""

    record: VersionRecord
    written_at: float
    path: Path

    @property
    def version(self) -> int:
        return self.record.version

    def is_copy_of(self, record: VersionRecord) -> bool:
        """Whether it holds the same bytes: another store may have given the number to others."""
        return self.record.version == record.version and _digests(self.record) == _digests(record)

    def verify(self) -> None:
        """Read every byte. Raises WeightSyncError."""
        for part in all_parts(self.record):
            with disk_piece(piece_directory(self.path, part.name), part.manifest_digest) as piece:
                piece.verify()


class Disk:
    """Reading needs no lock: what is there is whole. Raises PersistError when there can be no such directory."""

    def __init__(self, directory: Path, *, keep: int = 2, max_bytes: int | None = None) -> None:
        self.directory, self.keep, self.max_bytes = directory, keep, max_bytes
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise PersistError(f"{directory} cannot be used ({error.strerror}): name a directory of yours") from error

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """To be the one who writes; waits for another. What a writer that was killed has left is removed."""
        fd = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            _remove_halves(self.directory)
            yield
        finally:
            os.close(fd)

    def kept(self) -> list[OnDisk]:
        """What can be read of the directory, the version written first first."""
        found = []
        for path in self.directory.iterdir():
            if _is_copy(path):
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecordError):
                    found.append(_read(path))
        return sorted(found, key=lambda kept: (kept.written_at, kept.version))

    def find(self, record: VersionRecord) -> OnDisk | None:
        """The copy of that very version."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecordError):
            kept = _read(self.directory / str(record.version))
            return kept if kept.is_copy_of(record) else None
        return None

    def homes(self, digest: str) -> list[Path]:
        """The directories of all pieces with that manifest."""
        return [
            piece_directory(kept.path, part.name)
            for kept in self.kept()
            for part in all_parts(kept.record)
            if part.manifest_digest == digest
        ]

    @property
    def nbytes(self) -> int:
        """What all of it takes; a file that several versions share counts once."""
        walks = (found for path in self._all() for found in os.walk(path))
        found = (os.lstat(Path(at, name)) for at, _, names in walks for name in names)
        return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in found}.values())

    def write(
        self,
        record: VersionRecord,
        slots: Mapping[str, Path],
        protected: Collection[VersionRecord],
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy a version from its `slots` (by part); others than the `protected` ones make room for it, if need be.

        Raises PersistFull, DigestMismatch, ManifestError, SlotBusy, PersistError, and what `go_on` raises; what was on
        disk before is then still there, but for versions that were not protected.
        """
        if (place := self.directory / str(record.version)).exists() and not _is_copy(place):
            raise PersistError(f"{place} holds something else than a copy: move it away, or name another directory")
        missing = [
            slots[p.name] for p in all_parts(record) if p.name in slots and self._shared(p.manifest_digest) is None
        ]
        self._make_room(record, sum(os.stat(slot).st_size for slot in missing if slot.exists()), protected)
        while True:
            try:
                self._write(record, slots, go_on)
                break
            except OSError as error:
                if error.errno not in FULL:
                    raise PersistError(
                        f"version {record.version} cannot be written to {self.directory} ({error})"
                    ) from error
                if not self._remove_oldest(protected):
                    raise PersistFull(
                        record.version,
                        f"the disk of {self.directory} is full; free some of it, or name another directory",
                    ) from error
        while len(self._all()) > self.keep and self._remove_oldest([*protected, record]):
            pass

    def _remove(self, path: Path) -> None:
        """First out of sight, so that nobody ever finds half of it."""
        aside = self.directory / f"{OLD}{path.name}"
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        sync_directory(self.directory)
        shutil.rmtree(aside, ignore_errors=True)

    def _write(self, record: VersionRecord, slots: Mapping[str, Path], go_on: Callable[[], None]) -> None:
        made = self.directory / f"{NEW}{record.version}"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(mode=0o700)
        try:
            for part in all_parts(record):
                directory = piece_directory(made, part.name)
                if not self._link(part.manifest_digest, directory):
                    if part.name not in slots:
                        raise PersistError(f"version {record.version} is not on this host yet")
                    with slot_piece(slots[part.name], part.manifest_digest) as piece:
                        _write_whole(directory, part.name, piece, go_on)
                sync_directory(directory)
            about = {"format": FORMAT, "written_at": time.time(), "record": record}
            write_synced(made / VERSION_FILE, orjson.dumps(about))
            for at, _, _ in os.walk(made):
                sync_directory(Path(at))
            place = self.directory / str(record.version)
            if place.exists():  # another history's, or a damaged one
                self._remove(place)
            made.rename(place)
            sync_directory(self.directory)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _shared(self, digest: str) -> Path | None:
        """Where the files of a piece are already."""
        for home in self.homes(digest):
            with contextlib.suppress(ManifestError):
                read_manifest(home, digest)
                return home
        return None

    def _link(self, digest: str, directory: Path) -> bool:
        """Take the files of another version that has the same piece; False where there is none, or no links are."""
        home = self._shared(digest)
        if home is None:
            return False
        directory.mkdir(parents=True, exist_ok=True)
        linked = []
        try:
            for file in home.iterdir():
                if file.is_file() and file.name != VERSION_FILE:
                    os.link(file, directory / file.name)
                    linked.append(directory / file.name)
        except OSError:
            for path in linked:
                path.unlink()
            return False
        return True

    def _make_room(self, record: VersionRecord, nbytes: int, protected: Collection[VersionRecord]) -> None:
        while self.max_bytes is not None and self.nbytes + nbytes > self.max_bytes:
            if not self._remove_oldest(protected):
                raise PersistFull(
                    record.version,
                    f"{nbytes:,} bytes more than the {self.nbytes:,} that must stay are over the bound of "
                    f"{self.max_bytes:,} bytes; raise --max-bytes to twice what a version takes, or more",
                )

    def _all(self) -> list[Path]:
        """Every version's directory, the oldest first; those that cannot be read are older than any other."""
        kept = [k.path for k in self.kept()]
        named = [path for path in self.directory.iterdir() if _is_copy(path)]
        return [path for path in named if path not in kept] + kept

    def _remove_oldest(self, protected: Collection[VersionRecord]) -> bool:
        """False when only copies of the protected versions are left."""
        stay = {found.path for record in protected if (found := self.find(record)) is not None}
        victim = next((path for path in self._all() if path not in stay), None)
        if victim is not None:
            self._remove(victim)
        return victim is not None


def remove_copies(directory: Path) -> None:
    """Every version that was copied to `directory`, and what its writers need; nothing of anybody else's."""
    for path in filter(_is_copy, directory.glob("*")):
        shutil.rmtree(path, ignore_errors=True)
    _remove_halves(directory)
    (directory / LOCK).unlink(missing_ok=True)


def _is_copy(path: Path) -> bool:
    """Whether a version was written there, damaged since or not: the directory may have other things as well."""
    return path.name.isdecimal() and (path / VERSION_FILE).is_file()


def _remove_halves(directory: Path) -> None:
    """What a writer that was killed has left."""
    for path in directory.glob(".*"):
        if path.name.startswith((NEW, OLD)) and path.name[len(NEW) :].isdecimal():
            shutil.rmtree(path, ignore_errors=True)


def _write_whole(directory: Path, part: str, piece: Piece, go_on: Callable[[], None]) -> None:
    write_piece(directory, part, piece, go_on=go_on)
    write_synced(directory / MANIFEST, piece.manifest.to_json())


def _read(path: Path) -> OnDisk:
    about = orjson.loads((path / VERSION_FILE).read_bytes())
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']}")
    record = VersionRecord.from_json(orjson.dumps(about["record"]))
    if str(record.version) != path.name:
        raise ValueError(f"{path} is of version {record.version}")
    return OnDisk(record, float(about["written_at"]), path)


def _digests(record: VersionRecord) -> dict[str, str]:
    return {part.name: part.manifest_digest for part in all_parts(record)}
