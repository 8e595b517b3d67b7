"""One part of a version as an open file or files: read in chunks from a slot or from disk, written as safetensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import xxhash

from weightsync.arena import SlotLock
from weightsync.checkpoint import INDEX, Checkpoint
from weightsync.dtypes import ITEMSIZE, TO_SAFETENSORS
from weightsync.errors import CheckpointError, DigestMismatch, ManifestError, SlotBusy
from weightsync.manifest import PREAMBLE, Manifest, TensorEntry, digest_of
from weightsync.parts import ADAPTER_CONFIG, LORA
from weightsync.slot import header_nbytes, read_header
from weightsync.sources import FileTensor

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
        """A tensor; each chunk is valid until the next. Raises CheckpointError, at the end DigestMismatch."""
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
            raise DigestMismatch(name, entry.digest, found)

    def verify(self) -> None:
        """Read every byte. Raises DigestMismatch, CheckpointError."""
        for name in self.manifest.tensors:
            for _ in self.chunks(name):
                pass


@contextlib.contextmanager
def slot_piece(path: Path, digest: str) -> Iterator[Piece]:
    """What lies in a slot, held against reuse meanwhile; not mapped, so that its pages are nobody's but the arena's.

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
    """What a slot says that it holds, and the digest of that. Raises ManifestError, SlotBusy."""
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
    except (ManifestError, SlotBusy, DigestMismatch, CheckpointError, OSError):
        return False
    return True


@contextlib.contextmanager
def disk_piece(directory: Path, digest: str) -> Iterator[Piece]:
    """What `write_piece` left in `directory`. Raises ManifestError, CheckpointError."""
    manifest = read_manifest(directory, digest)
    checkpoint = Checkpoint(directory)
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

    Every byte is compared with the digests of the manifest on its way. Raises DigestMismatch, OSError.
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
    """Where a part is under a version's directory."""
    return version / part if part else version


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """What was made, renamed or removed in it is so after a power loss, too."""
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
    """Nobody reads it soon: its pages are worth more to others."""
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
