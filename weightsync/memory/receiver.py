"""Reads a version out of its slot: mapped, never copied, held against reuse for as long as anybody may read it.

The map itself is kept for the life of the process (`READ_MAPPINGS`). The slot is held by a lock of each reader's
own, which ends with the reader and the last view that was taken through it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import time
import weakref
from pathlib import Path

from weightsync.errors import ManifestError, SlotBusy, digest_mismatch, missing_tensor
from weightsync.format.manifest import (
    Layout,
    Manifest,
    Schema,
    TensorEntry,
    content_sha256,
    digest_of,
    is_part,
    read_header,
    require_same_schema,
)
from weightsync.memory.arena import READ_MAPPINGS, address_of

LOCK_PATIENCE_S = 1.0  # a publisher that looks for a free slot may hold this one for a moment


class SlotReader:
    """A version, read-only. The slot stays locked until the reader is closed and the last view of it is gone."""

    def __init__(self, path: Path, fd: int, mapping: mmap.mmap) -> None:
        """`fd` holds the shared lock, and goes with the last view. `mapping` is this process's, for its whole life."""
        self.path = path
        self.manifest: Manifest
        self._fd = fd
        self.mapping = mapping
        window = _window(mapping)
        weakref.finalize(window, _unlock, fd, os.getpid()).atexit = False
        self._view: memoryview | None = memoryview(window).cast("B").toreadonly()
        self.manifest_digest = ""
        self.is_part = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        manifest_digest: str | None = None,
        version: int | None = None,
        populate: bool = True,
        part: bool = False,
    ) -> SlotReader:
        """Lock and map the slot at `path`; `populate` faults its pages in, if this process has not done so before.

        With `part` also a file that has slices of a slot (`is_part`), for who checks all it reads by the digests of the
        parts (`manifest.parts_of`). Raises ManifestError when it is not a slot or holds another version, SlotBusy when
        it is being reused.
        """
        path = Path(path)
        fd = _open_shared(path)
        try:
            mapping = READ_MAPPINGS.get(path, fd, populate=False)
        except BaseException:
            os.close(fd)
            raise
        reader = cls(path, fd, mapping)
        try:
            assert reader._view is not None
            reader.is_part = part and is_part(reader._view)
            reader.manifest, reader.manifest_digest = read_header(reader._view, str(path), part=reader.is_part)
            _check_identity(path, reader.manifest, reader.manifest_digest, manifest_digest, version)
            reader._check_bounds()
            if populate:
                reader.populate()
            return reader
        except BaseException:
            reader.close()
            raise

    def populate(self) -> None:
        """Fault in every page, unless this process has done so before."""
        READ_MAPPINGS.get(self.path, self._fd)

    @property
    def nbytes(self) -> int:
        return self.manifest.nbytes

    def entry(self, name: str) -> TensorEntry:
        """Raises TensorError."""
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise missing_tensor(name) from None

    def buffer(self, name: str) -> memoryview:
        """The bytes of a tensor, in the slot itself, uint8 [nbytes]. Raises TensorError."""
        entry = self.entry(name)
        assert self._view is not None, "the reader is closed"
        return self._view[entry.offset : entry.offset + entry.nbytes]

    def sha256(self) -> str:
        """Of what the slot holds now, as signatures have it: see `content_sha256`."""
        return content_sha256(self.manifest.schema, self.manifest.metadata, self.buffer)

    def whole_sha256(self) -> str:
        """Of the whole slot, manifest and tensors, as older releases have signed it."""
        assert self._view is not None, "the reader is closed"
        with self._view[: Layout.of(self.manifest.schema).total_nbytes] as data:
            return hashlib.sha256(data).hexdigest()

    def verify(self, name: str) -> None:
        """Raises TensorError when the bytes of the tensor are not those that were published."""
        expected = self.entry(name).digest
        with self.buffer(name) as view:
            if (found := digest_of(view)) != expected:
                raise digest_mismatch(name, expected, found)

    def verify_all(self, schema: Schema | None = None) -> None:
        """Names, shapes and dtypes against `schema`, then every digest. Raises TensorError."""
        if schema is not None:
            require_same_schema(schema, self.manifest.schema)
        for name in self.manifest.tensors:
            self.verify(name)

    def close(self) -> None:
        """Let go. Views that others still hold stay valid, and keep the slot locked until they are dropped."""
        if self._view is not None:
            view, self._view = self._view, None
            with contextlib.suppress(BufferError):  # somebody's view: the lock goes with that
                view.release()

    def __enter__(self) -> SlotReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_bounds(self) -> None:
        assert self._view is not None
        size = len(self._view)
        for name, entry in self.manifest.tensors.items():
            if entry.nbytes != entry.spec.nbytes or entry.offset < 0 or entry.offset + entry.nbytes > size:
                raise ManifestError(f"{self.path}: tensor {name!r} lies outside the slot: publish the version again")


def _open_shared(path: Path) -> int:
    """Open under LOCK_SH."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ManifestError(f"slot {path}: {error.strerror}; the version is gone, choose another") from error
    try:
        _lock_shared(fd, path)
        if os.fstat(fd).st_size == 0:
            raise ManifestError(f"{path} is empty: publish the version again")
        return fd
    except BaseException:
        os.close(fd)
        raise


def _window(mapping: mmap.mmap) -> ctypes.Array[ctypes.c_uint8]:
    """The bytes of a map as an object of this reader's own, whose end can be waited for. It keeps the map."""
    with memoryview(mapping) as view:
        window = (ctypes.c_uint8 * len(mapping)).from_address(address_of(view))
    window.mapping = mapping  # type: ignore[attr-defined]
    return window


def _unlock(fd: int, owner: int) -> None:
    if os.getpid() == owner:
        fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that was forked and has not closed its copy yet
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
