"""The directory with the copies: versions are there whole or not at all, the oldest make room, the bound holds.

A `Piece` is one part of a version as an open file or files: read in chunks from a slot or from disk, and written as
safetensors.
"""

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
from typing import Any

import orjson
import xxhash

from weightsync.control.parts import ADAPTER_CONFIG, LORA
from weightsync.control.records import VersionRecord
from weightsync.errors import (
    CheckpointError,
    ManifestError,
    PersistError,
    RecordError,
    SlotBusy,
    TensorError,
    digest_mismatch,
    persist_full,
)
from weightsync.format.dtypes import ITEMSIZE, TO_SAFETENSORS
from weightsync.format.manifest import PREAMBLE, Manifest, TensorEntry, digest_of, header_nbytes, read_header
from weightsync.memory.arena import SlotLock
from weightsync.memory.receiver import SlotReader
from weightsync.peer.copies import all_parts
from weightsync.publish.checkpoint import INDEX, Checkpoint
from weightsync.publish.writer import FileTensor

MANIFEST = "manifest.json"
CHUNK = 4 << 20
SYNC_EVERY = 64 << 20  # bytes that may wait in the page cache: a sync of gigabytes would stop everybody's writes
SHARD = 5 << 30


@dataclass(frozen=True)
class Piece:
    """A base model, draft model or adapter whose files are open for as long as the context that gave it."""

    manifest: Manifest
    files: Mapping[str, FileTensor]

    def chunks(self, name: str) -> Iterator[memoryview]:
        """A tensor; each chunk is valid until the next. Raises CheckpointError, at the end TensorError."""
        entry, file = self.manifest.tensors[name], self.files[name]
        hasher, room = xxhash.xxh3_128(), memoryview(bytearray(min(CHUNK, entry.nbytes)))
        done = 0
        while done < entry.nbytes:
            count = os.preadv(file.fd, [room[: entry.nbytes - done]], file.begin + done)
            if count == 0:
                raise CheckpointError(file.path, "was cut short while it was read")
            hasher.update(room[:count])
            yield room[:count]
            done += count
        if (found := hasher.hexdigest()) != entry.digest:
            raise digest_mismatch(name, entry.digest, found)

    def verify(self) -> None:
        """Read every byte. Raises TensorError, CheckpointError."""
        for name in self.manifest.tensors:
            for _ in self.chunks(name):
                pass


@contextlib.contextmanager
def slot_piece(path: Path, digest: str) -> Iterator[Piece]:
    """The piece in a slot, held against reuse meanwhile; not mapped, so that its pages are the arena's alone.

    Raises ManifestError, SlotBusy.
    """
    lock = SlotLock.shared(path)
    try:
        manifest, found = _header(lock)
        if found != digest:
            raise ManifestError(f"{path} holds a manifest with digest {found}, not {digest}: it was reused")
        files = {n: FileTensor(e.spec, lock.fd, e.offset, str(path)) for n, e in manifest.tensors.items()}
        yield Piece(manifest, files)
    finally:
        lock.release()


def slot_header(path: Path) -> tuple[Manifest, str]:
    """The manifest in the header of a slot, and its digest. Raises ManifestError, SlotBusy."""
    lock = SlotLock.shared(path)
    try:
        return _header(lock)
    finally:
        lock.release()


def _header(lock: SlotLock) -> tuple[Manifest, str]:
    preamble = memoryview(os.pread(lock.fd, PREAMBLE, 0))
    return read_header(memoryview(os.pread(lock.fd, header_nbytes(preamble), 0)), str(lock.path))


def slot_is_whole(path: Path, digest: str) -> bool:
    """Whether the slot is there with every byte as it was published."""
    try:
        with slot_piece(path, digest) as piece:
            piece.verify()
    except (ManifestError, SlotBusy, TensorError, CheckpointError, OSError):
        return False
    return True


def slot_is_left(path: Path, digest: str) -> bool:
    """Whether the slot is there, wholly or but for chunks that other hosts have (`weightsync.publish.spread`)."""
    try:
        with SlotReader.open(path, manifest_digest=digest, populate=False, part=True) as reader:
            return reader.is_part or slot_is_whole(path, digest)
    except (ManifestError, SlotBusy):
        return False


@contextlib.contextmanager
def disk_piece(directory: Path, digest: str) -> Iterator[Piece]:
    """The piece that `write_piece` left in `directory`. Raises ManifestError, CheckpointError."""
    manifest = read_manifest(directory, digest)
    checkpoint = Checkpoint(directory, whole=True)
    if checkpoint.schema.tensors != manifest.schema.tensors:
        raise CheckpointError(str(directory), "its files have other tensors than its manifest")
    with contextlib.ExitStack() as stack:
        yield Piece(manifest, stack.enter_context(checkpoint.opened()))


def read_manifest(directory: Path, digest: str) -> Manifest:
    """Raises ManifestError when it is not the one with `digest`."""
    try:
        raw = (directory / MANIFEST).read_bytes()
    except OSError as error:
        raise ManifestError(f"{directory / MANIFEST} cannot be read ({error.strerror})") from error
    if (found := digest_of(raw)) != digest:
        raise ManifestError(f"{directory / MANIFEST} has digest {found}, not {digest}: it is damaged or another one's")
    return Manifest.from_json(raw)


def write_piece(
    directory: Path,
    part: str,
    piece: Piece,
    *,
    shard_nbytes: int = SHARD,
    go_on: Callable[[], None] = lambda: None,
) -> None:
    """Write what a Hugging Face loader (of an adapter: PEFT) reads, synced; `go_on` may raise, and is called often.

    Every byte is compared with the digests of the manifest on its way. Raises TensorError, OSError.
    """
    stem = "adapter_model" if part.startswith(LORA) else "model"
    directory.mkdir(parents=True, exist_ok=True)
    shards = _shards(piece.manifest, None if part.startswith(LORA) else shard_nbytes)
    homes: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else f"{stem}.safetensors"
        _write_safetensors(directory / file, piece, names, go_on)
        homes |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": piece.manifest.nbytes}, "weight_map": homes}
        write_synced(directory / INDEX, orjson.dumps(index, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
    if part.startswith(LORA):
        write_synced(directory / "adapter_config.json", piece.manifest.metadata[ADAPTER_CONFIG].encode())
    sync_directory(directory)


def piece_directory(version: Path, part: str) -> Path:
    """Where a part is under a version's directory: an adapter `a/b` not in that of an adapter `a`."""
    kind, _, name = part.partition("/")
    return version / kind / name.replace("/", "%2F")


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Files made, renamed or removed in the directory stay so after a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_safetensors(path: Path, piece: Piece, names: list[str], go_on: Callable[[], None]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        entry = piece.manifest.tensors[name]
        header[name] = {
            "dtype": TO_SAFETENSORS[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [end, end := end + entry.nbytes],
        }
    raw = orjson.dumps(header)
    raw += b" " * (-len(raw) % 8)
    with path.open("xb", buffering=0) as file:
        fd = file.fileno()
        _write_all(fd, memoryview(len(raw).to_bytes(8, "little") + raw))
        waiting = 0
        for name in names:
            for chunk in piece.chunks(name):
                go_on()
                _write_all(fd, chunk)
                waiting += len(chunk)
                if waiting >= SYNC_EVERY:
                    _give_to_disk(fd)
                    waiting = 0
        os.fsync(fd)
        _give_to_disk(fd)


def _give_to_disk(fd: int) -> None:
    """The file is not read soon: its pages are worth more to others."""
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _shards(manifest: Manifest, shard_nbytes: int | None) -> list[list[str]]:
    """Names by file; within a file the widest elements first, as upstream writes them, so that all stay aligned."""
    shards: list[list[str]] = [[]]
    room = shard_nbytes
    for name, entry in manifest.tensors.items():
        if room is not None and shards[-1] and entry.nbytes > room:
            shards.append([])
            room = shard_nbytes
        shards[-1].append(name)
        room = room - entry.nbytes if room is not None else None

    def widest_first(name: str) -> tuple[int, str]:
        entry: TensorEntry = manifest.tensors[name]
        return -ITEMSIZE[entry.dtype], name

    return [sorted(names, key=widest_first) for names in shards]


VERSION_FILE = "version.json"
EDITIONS, ADAPTER = "editions", "adapter"
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
        """The lock of the one writer; waits for another. The halves that a killed writer has left are removed."""
        fd = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            _remove_halves(self.directory)
            yield
        finally:
            os.close(fd)

    def kept(self) -> list[OnDisk]:
        """The copies in the directory that can be read, the version written first first."""
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

    def editions(self) -> dict[str, Path]:
        """The directories of adapters' editions, by manifest digest."""
        return {path.name: path / ADAPTER for path in (self.directory / EDITIONS).glob("*") if path.name[0] != "."}

    def write_edition(self, digest: str, slot: Path, go_on: Callable[[], None] = lambda: None) -> None:
        """Copy an edition of an adapter. Raises as `write`."""
        home = self.directory / EDITIONS
        home.mkdir(mode=0o700, exist_ok=True)
        made = home / f"{NEW}{digest}"
        shutil.rmtree(made, ignore_errors=True)
        try:
            with slot_piece(slot, digest) as piece:
                if self.max_bytes is not None and self.nbytes + piece.manifest.nbytes > self.max_bytes:
                    raise PersistError(f"there is no room for {digest} within {self.max_bytes:,} bytes")
                _write_whole(made / ADAPTER, LORA, piece, go_on)
            sync_directory(made)
            made.rename(home / digest)
            sync_directory(home)
        except OSError as error:
            raise PersistError(f"an adapter cannot be written to {home} ({error})") from error
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def keep_editions(self, digests: Collection[str]) -> None:
        """Remove the others, and halves of theirs."""
        for path in (self.directory / EDITIONS).glob("*"):
            if path.name not in digests:
                shutil.rmtree(path, ignore_errors=True)

    def homes(self, digest: str) -> list[Path]:
        """The directories of all pieces with that manifest."""
        edition = self.editions().get(digest)
        return ([edition] if edition is not None else []) + [
            piece_directory(kept.path, part.name)
            for kept in self.kept()
            for part in all_parts(kept.record)
            if part.manifest_digest == digest
        ]

    @property
    def nbytes(self) -> int:
        """The bytes that all copies take; a file that several versions share counts once."""
        walks = (found for path in (*self._all(), self.directory / EDITIONS) for found in os.walk(path))
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

        Raises PersistError, TensorError, ManifestError, SlotBusy, and what `go_on` raises; what was on disk before is
        then still there, but for versions that were not protected.
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
                    raise persist_full(
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
                raise persist_full(
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
    for path in [*filter(_is_copy, directory.glob("*")), directory / EDITIONS]:
        shutil.rmtree(path, ignore_errors=True)
    _remove_halves(directory)
    (directory / LOCK).unlink(missing_ok=True)


def _is_copy(path: Path) -> bool:
    """Whether a version was written there, damaged since or not: the directory may have other things as well."""
    return path.name.isdecimal() and (path / VERSION_FILE).is_file()


def _remove_halves(directory: Path) -> None:
    """Remove the halves that a killed writer has left."""
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
