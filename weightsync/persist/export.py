"""Writes a version that is held, in memory or on disk, as a directory that Hugging Face's loaders (or PEFT's) read."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weightsync.control.hosts import this_host
from weightsync.control.parts import BASE, LORA, check_name
from weightsync.control.records import DiskRecord, FormRecord, InstanceRecord, Keys, PartRecord, VersionRecord
from weightsync.errors import (
    CheckpointError,
    ManifestError,
    PersistError,
    PublishError,
    RecordError,
    SlotBusy,
    unknown_version,
)
from weightsync.peer.copies import all_parts, local_slot, own_copies
from weightsync.persist.disk import SHARD, Disk, Piece, disk_piece, slot_piece, sync_directory, write_piece
from weightsync.publish.checkpoint import open_inside, write_config
from weightsync.store import SyncStore

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json", ".ckpt")
CONFIG = "config.json"


@dataclass(frozen=True)
class Exported:
    """An exported version. `nbytes` counts the tensors' bytes."""

    version: int
    part: str
    directory: Path
    tensors: int
    nbytes: int


def export(
    store_url: str,
    model: str,
    version: int,
    directory: Path,
    *,
    part: str = BASE,
    model_dir: Path | None = None,
    shard_nbytes: int = SHARD,
) -> Exported:
    """Write one part of a version to `directory`, which must be empty or not there; whole or not at all.

    The configuration is the version's. Tokenizer and all else that is not weights is copied from `model_dir` (default:
    the directory that an instance was started with, or the one that was pushed), and the configuration too where the
    version was published without one; of an adapter, its configuration comes from the manifest.

    Raises SwapError, PublishError, TensorError, CheckpointError, PersistError, StoreUnavailable.
    """
    directory = directory.absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise PersistError(f"{directory} is not an empty directory: name another one")
    source = _Source(store_url, model, version, check_name(part))
    home = None if part.startswith(LORA) else model_dir or source.model_dir()
    made = directory.parent / f".{directory.name}.export-{os.getpid()}"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        made.mkdir()
        if home is not None:
            _copy_companions(home, made)
        if home is not None and source.config:
            write_config(source.config, made)
        with source.opened() as piece:
            write_piece(made, part, piece, shard_nbytes=shard_nbytes)
            done = Exported(version, part, directory, len(piece.manifest.tensors), piece.manifest.nbytes)
        made.rename(directory)  # over an empty directory, but over no other
        sync_directory(directory.parent)
        return done
    except OSError as error:
        raise PersistError(f"{directory} cannot be written ({error.strerror}): name another directory") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


class _Source:
    """Where a part of a version is on this host."""

    def __init__(self, store_url: str, model: str, version: int, part: str) -> None:
        keys, self._host = Keys(model), this_host()
        with contextlib.closing(SyncStore(store_url, create=False)) as store:
            known, told = store.get(keys.version(version)), store.get(keys.disk(self._host))
            forms = {kv.key: kv.value for kv in store.list(keys.forms)[0]}
            self._own = store.run(own_copies(store.store, keys, self._host))
            instances = [InstanceRecord.from_json(kv.value) for kv in store.list(keys.instances)[0]]
        record = VersionRecord.from_json(known.value) if known is not None else None
        self._disk = Disk(Path(DiskRecord.from_json(told.value).directory)) if told is not None else None
        if record is None or not record.manifest_digest:
            kept = self._disk.kept() if self._disk is not None else []
            record = next((found.record for found in kept if found.version == version), None)
        if record is None:
            raise unknown_version(version, None)
        form = forms.get(keys.form(record.form)) if record.form and part == BASE else None
        self.record, self.config = record, FormRecord.from_json(form).config if form is not None else ""
        found = {piece.name: piece for piece in all_parts(record)}
        if part not in found:
            raise PublishError(
                f"version {version} has no part {part!r}; it has {', '.join(sorted(found)[1:]) or 'none'}",
                code="bad_part",
            )
        self.piece: PartRecord = found[part]
        self._directories = [instance.model_dir for instance in instances] if part == BASE else []
        self._directories += [record.source] if self.piece.version == record.version else []

    @contextlib.contextmanager
    def opened(self) -> Iterator[Piece]:
        """Raises SwapError when it is neither in shared memory nor on disk."""
        digest, path = self.piece.manifest_digest, local_slot(self.piece, self._host, self._own)
        with contextlib.ExitStack() as stack:
            found = None
            with contextlib.suppress(ManifestError, SlotBusy, RecordError):
                found = stack.enter_context(slot_piece(path, digest)) if path is not None else None
            for home in self._disk.homes(digest) if self._disk is not None and found is None else ():
                with contextlib.suppress(ManifestError, CheckpointError):
                    found = stack.enter_context(disk_piece(home, digest))
                    break
            if found is None:
                raise unknown_version(self.record.version, f"{self.record.state}, and not on this host or its disk")
            yield found

    def model_dir(self) -> Path:
        """Raises PersistError."""
        for directory in self._directories:
            if directory and (Path(directory) / CONFIG).is_file():
                return Path(directory)
        raise PersistError("no directory with this model's config.json and tokenizer is known: name it (--model-dir)")


def _copy_companions(source: Path, target: Path) -> None:
    """All files of a checkpoint but its weights. Raises PersistError, CheckpointError."""
    if not (source / CONFIG).is_file():
        raise PersistError(f"{source} holds no {CONFIG}: name the model's own directory (--model-dir)")
    for path in sorted(source.iterdir()):
        if path.is_dir() or path.name.startswith(".") or path.name.endswith(WEIGHTS):
            continue
        with open(open_inside(path), "rb") as file, (target / path.name).open("xb") as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            os.fsync(copy.fileno())
