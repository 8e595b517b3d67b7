"""Reads a version out of its slot: mapped, never copied, held against reuse for as long as anything maps it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from pathlib import Path
from types import TracebackType

from weightsync.arena import prefault
from weightsync.errors import DigestMismatch, ManifestError, MissingTensor, SlotBusy
from weightsync.manifest import Manifest, Schema, TensorEntry, digest_of, require_same_schema
from weightsync.slot import read_header

LOCK_PATIENCE_S = 1.0  # a publisher that looks for a free slot may hold this one for a moment


class SlotReader:
    """A version, read-only. The slot stays locked until the reader is closed and the last view of it is gone."""

    def __init__(self, path: Path, mapping: mmap.mmap, manifest: Manifest, manifest_digest: str) -> None:
        self.path, self.manifest, self.manifest_digest = path, manifest, manifest_digest
        self._mapping: mmap.mmap | None = mapping
        self._view = memoryview(mapping)

    @classmethod
    def open(
        cls, path: str | Path, *, manifest_digest: str | None = None, version: int | None = None, populate: bool = True
    ) -> SlotReader:
        """Lock and map the slot at `path`; `populate` faults its pages in now.

        Raises ManifestError when it is not a slot or holds another version, SlotBusy when it is being reused.
        """
        path = Path(path)
        mapping = _map_shared(path)
        reader = None
        try:
            with memoryview(mapping) as view:
                manifest, found = read_header(view, str(path))
            _check_identity(path, manifest, found, manifest_digest, version)
            if populate:
                prefault(mapping, write=False)
            reader = cls(path, mapping, manifest, found)
            reader._check_bounds()
            return reader
        except BaseException:
            if reader is not None:
                reader.close()
            else:
                mapping.close()
            raise

    @property
    def nbytes(self) -> int:
        return self.manifest.nbytes

    def entry(self, name: str) -> TensorEntry:
        """Raises MissingTensor."""
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise MissingTensor(name) from None

    def buffer(self, name: str) -> memoryview:
        """The bytes of a tensor, in the slot itself, uint8 [nbytes]. Raises MissingTensor."""
        entry = self.entry(name)
        return self._view[entry.offset : entry.offset + entry.nbytes]

    def verify(self, name: str) -> None:
        """Raises DigestMismatch when the bytes of the tensor are not those that were published."""
        expected = self.entry(name).digest
        with self.buffer(name) as view:
            if (found := digest_of(view)) != expected:
                raise DigestMismatch(name, expected, found)

    def verify_all(self, schema: Schema | None = None) -> None:
        """Names, shapes and dtypes against `schema`, then every digest. Raises TensorMismatch, DigestMismatch."""
        if schema is not None:
            require_same_schema(schema, self.manifest.schema)
        for name in self.manifest.tensors:
            self.verify(name)

    def close(self) -> None:
        """Let go. Views that others still hold stay valid, and keep the slot locked until they are dropped."""
        if self._mapping is None:
            return
        mapping, self._mapping = self._mapping, None
        self._view.release()
        with contextlib.suppress(BufferError):  # somebody's view: the map, and with it the lock, goes with that
            mapping.close()

    def __enter__(self) -> SlotReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_bounds(self) -> None:
        for name, entry in self.manifest.tensors.items():
            if entry.nbytes != entry.spec.nbytes or entry.offset < 0 or entry.offset + entry.nbytes > len(self._view):
                raise ManifestError(f"{self.path}: tensor {name!r} lies outside the slot: publish the version again")


def _map_shared(path: Path) -> mmap.mmap:
    """Map read-only under LOCK_SH. The map keeps the file description, and with it the lock, until it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ManifestError(f"slot {path}: {error.strerror}; the version is gone, choose another") from error
    try:
        _lock_shared(fd, path)
        if os.fstat(fd).st_size == 0:
            raise ManifestError(f"{path} is empty: publish the version again")
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _lock_shared(fd: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise SlotBusy(
                    f"slot {path} is being reused for another version; choose a version that is ready"
                ) from None
            time.sleep(0.002)


def _check_identity(path: Path, manifest: Manifest, found: str, digest: str | None, version: int | None) -> None:
    if version is not None and manifest.version != version:
        raise ManifestError(f"{path} holds version {manifest.version}, not {version}: it was retired and reused")
    if digest is not None and found != digest:
        raise ManifestError(f"{path} holds a manifest with digest {found}, not {digest}: it was retired and reused")
