"""Checkpoint directories that are whole or are not used.

    PATH/step-00000040/           one checkpoint: whatever the writer put there, and
    PATH/step-00000040/MANIFEST   JSON: the training state and every file's size and digest, written last
    PATH/latest                   the name of the newest one
    PATH/.writing-...             one being written; left behind by a killed run, removed by the next

A checkpoint is written under a temporary name, flushed to disk, and renamed. On reading, every file is compared with
the manifest; one that does not match is named in the log and the one before it is used. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from trainer.errors import CheckpointError, ResumeError

MANIFEST = "MANIFEST"
log = logging.getLogger(__name__)


class CheckpointDir:
    """The checkpoints below `path`, of which the newest `keep` are kept."""

    def __init__(self, path: str | Path, keep: int = 2) -> None:
        self.path, self.keep = Path(path), keep

    def stage(self, step: int) -> Path:
        """An empty directory to write the checkpoint of `step` into, then `commit` it."""
        staged = self._staged(step)
        with writing(self.path):
            for leftover in self.path.glob(".writing-*"):
                shutil.rmtree(leftover)
            staged.mkdir(parents=True)
        return staged

    def commit(self, step: int, state: dict[str, Any]) -> Path:
        """Seal what is staged for `step` together with `state` (JSON), make it the newest, drop the oldest.

        Raises CheckpointError, here and in `stage`, when the disk does not take it.
        """
        with writing(self.path):
            return self._commit(step, state)

    def _commit(self, step: int, state: dict[str, Any]) -> Path:
        staged, final = self._staged(step), self.path / f"step-{step:08d}"
        files = sorted(f for f in staged.rglob("*") if f.is_file())
        for file in files:
            _flush(file)
        listing = {str(f.relative_to(staged)): [f.stat().st_size, _digest(f)] for f in files}
        _write_flushed(staged / MANIFEST, json.dumps({"state": state, "files": listing}))
        if final.exists():  # a torn one, or one of a run that is being repeated
            shutil.rmtree(final)
        staged.rename(final)
        _write_flushed(self.path / ".latest", final.name)
        (self.path / ".latest").replace(self.path / "latest")
        _flush(self.path)
        for old in self.steps()[self.keep :]:
            shutil.rmtree(old)
        return final

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """(directory, state) of the newest whole checkpoint; None if there are none at all.

        Raises ResumeError when there are some but every one is torn.
        """
        candidates = self.steps()
        problems = []
        for candidate in candidates:
            try:
                return candidate, self.verify(candidate)
            except ResumeError as error:
                log.warning("%s Trying the one before it.", error)
                problems.append(str(error))
        if problems:
            raise ResumeError(f"no whole checkpoint in {self.path}: {problems[0]} Set checkpoint.resume to never.")
        return None

    def verify(self, directory: Path) -> dict[str, Any]:
        """The state stored in a checkpoint whose files all match. Raises ResumeError naming the first that does not."""
        try:
            manifest = json.loads((directory / MANIFEST).read_text())
            state: dict[str, Any] = manifest["state"]
            for name, (size, digest) in manifest["files"].items():
                file = directory / name
                if not file.exists():
                    raise ResumeError(f"{file} is missing.")
                if file.stat().st_size != size:
                    raise ResumeError(f"{file} has {file.stat().st_size} bytes instead of {size}.")
                if _digest(file) != digest:
                    raise ResumeError(f"{file} has changed since it was written.")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ResumeError(f"{directory} has no readable {MANIFEST} ({error}).") from None
        return state

    def steps(self) -> list[Path]:
        """Checkpoint directories, newest first: the one `latest` names, then by falling step."""
        found = sorted(self.path.glob("step-*"), reverse=True)
        pointer = self.path / "latest"
        named = pointer.read_text().strip() if pointer.exists() else ""
        return sorted(found, key=lambda p: p.name != named)

    def _staged(self, step: int) -> Path:
        return self.path / f".writing-step-{step:08d}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """The operating system's refusals become CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path} ({error}). Free space, or set checkpoint.path elsewhere."
        ) from error


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _write_flushed(path: Path, text: str) -> None:
    path.write_text(text)
    _flush(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
