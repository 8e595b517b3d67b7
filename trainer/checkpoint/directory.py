"""Checkpoint directories that are whole or are not used.

    PATH/step-00000040/           one checkpoint: whatever the writer put there, and
    PATH/step-00000040/MANIFEST   JSON: the training state and every file's size and digest, written last
    PATH/latest                   the name of the newest one
    PATH/.writing-...             one being written, or replaced; left behind by a killed run, removed by the next

A checkpoint is written under a temporary name, flushed to disk, and renamed. On reading, every file is compared with
the manifest; one that does not match is named in the log and the one before it is used. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from trainer.errors import CheckpointError, ResumeError

MANIFEST, UNFINISHED = "MANIFEST", ".writing-"
SCORE = "score"
"""Key of the state under which the evaluation's score is, if there is one."""
log = logging.getLogger(__name__)


class CheckpointDir:
    """The checkpoints below `path`; `keep` says how many of them stay (a number: the newest)."""

    def __init__(self, path: str | Path, keep: int | Retention = 2) -> None:
        self.path = Path(path)
        self.retention = Retention(keep) if isinstance(keep, int) else keep

    def stage(self, step: int) -> Path:
        """An empty directory to write the checkpoint of `step` into, then `commit` it."""
        staged = self._staged(step)
        with writing(self.path):
            for leftover in self.path.glob(f"{UNFINISHED}*"):
                shutil.rmtree(leftover)
            staged.mkdir(parents=True)
        return staged

    def commit(self, step: int, state: dict[str, Any], known: Listing | None = None) -> Path:
        """Seal what is staged for `step` together with `state` (JSON), make it the newest, drop what is not kept.

        `known` lists files, by their path below the staged directory, that whoever wrote them has flushed and digested
        already. Raises CheckpointError, here and in `stage`, when the disk does not take it.
        """
        with writing(self.path):
            return self._commit(step, state, known or {})

    def _commit(self, step: int, state: dict[str, Any], known: Listing) -> Path:
        staged, final = self._staged(step), self.path / f"step-{step:08d}"
        files = {str(f.relative_to(staged)): f for f in sorted(staged.rglob("*")) if f.is_file()}
        listing: Listing = {}
        for name, file in files.items():
            if name not in known:
                flush(file)
            listing[name] = known[name] if name in known else describe(file)
        # A file that was reported but is not there must be found missing by every reader.
        write_flushed(staged / MANIFEST, json.dumps({"state": state, "files": known | listing}))
        replaced = self.path / f"{UNFINISHED}replaced-{final.name}"
        if final.exists():  # a torn one, or one of this step: it goes when the new one is there, removing takes long
            final.rename(replaced)
        staged.rename(final)
        write_flushed(self.path / ".latest", final.name)
        (self.path / ".latest").replace(self.path / "latest")
        flush(self.path)
        if replaced.exists():
            shutil.rmtree(replaced)
        self._drop_old()
        return final

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """(directory, state) of the newest whole checkpoint; None if there are none at all.

        Raises ResumeError when there are some but every one is torn.
        """
        problems = []
        for candidate in self.steps():
            try:
                return candidate, self.verify(candidate)
            except ResumeError as error:
                log.warning("%s Trying the one before it.", error)
                problems.append(str(error))
        self.refuse(problems)
        return None

    def refuse(self, problems: Sequence[str]) -> None:
        """Raises ResumeError if there are problems: of all checkpoints, none was whole."""
        if problems:
            raise ResumeError(f"no whole checkpoint in {self.path}: {problems[0]} Set checkpoint.resume to never.")

    def verify(self, directory: Path) -> dict[str, Any]:
        """The state stored in a checkpoint whose files all match. Raises ResumeError naming the first that does not."""
        state, _ = read_manifest(directory)
        if problem := self.problem(directory):
            raise ResumeError(problem)
        return state

    def problem(self, directory: Path, part: int = 0, parts: int = 1) -> str:
        """The problem with the `part`-th of `parts` shares of a checkpoint's files, by name; empty when there is none.
        The ranks divide the reading between them this way."""
        try:
            _, files = read_manifest(directory)
            problems = (problem_with(directory / name, *files[name]) for name in sorted(files)[part::parts])
            return next(filter(None, problems), "")
        except (OSError, ResumeError) as error:
            return str(error)

    def steps(self, only: int | None = None) -> list[Path]:
        """Checkpoint directories (of step `only`), newest first: the one `latest` names, those before it by falling
        step, and last those after it: the run has been there and had to go back, or it was another one's."""
        found = [path for path in self.path.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
        found = [path for path in found if only in (None, int(path.name.removeprefix("step-")))]
        pointer = self.path / "latest"
        named = pointer.read_text().strip() if pointer.exists() else ""
        falling = sorted(found, reverse=True)
        return sorted(falling, key=lambda path: (path.name != named, path.name > named))

    def _drop_old(self) -> None:
        found = {int(path.name.removeprefix("step-")): path for path in self.steps()}
        scores = {step: score for step, path in found.items() if (score := _score(path)) is not None}
        kept = self.retention.kept(list(found), scores)
        for step, path in found.items():
            if step not in kept:
                shutil.rmtree(path)

    def _staged(self, step: int) -> Path:
        return self.path / f"{UNFINISHED}step-{step:08d}"


def read_manifest(directory: Path) -> tuple[dict[str, Any], Listing]:
    """(state, files) of a checkpoint, its files unread. Raises ResumeError when there is no such manifest."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        state: dict[str, Any] = manifest["state"]
        return state, {name: (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResumeError(f"{directory} has no readable {MANIFEST} ({error}).") from None


def _score(directory: Path) -> float | None:
    try:
        score = read_manifest(directory)[0].get(SCORE)
    except ResumeError:
        return None
    return float(score) if isinstance(score, int | float) else None


@dataclass(frozen=True)
class Retention:
    """Keep the newest `last`, every one whose step is a multiple of `every` (0: none for that), and the `best` with
    the highest score (0: none for that; the older of two equals)."""

    last: int = 2
    every: int = 0
    best: int = 0

    def kept(self, newest_first: list[int], scores: Mapping[int, float]) -> set[int]:
        """The steps to keep, out of those that exist; `scores` has the ones that were evaluated."""
        ranked = sorted(scores, key=lambda step: (-scores[step], step))
        regular = [step for step in newest_first if self.every and step % self.every == 0]
        return {*newest_first[: self.last], *regular, *ranked[: self.best]}


Listing = dict[str, tuple[int, str]]
"""File name -> (bytes, xxh3-128 digest)."""


def digest(file: Path) -> str:
    """xxh3-128 of a file's bytes, as hexadecimal."""
    running = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            running.update(block)
    return running.hexdigest()


def describe(file: Path) -> tuple[int, str]:
    """(bytes, digest) of a file."""
    return file.stat().st_size, digest(file)


def problem_with(file: Path, size: int, expected: str) -> str:
    """The problem with a file that should have `size` bytes and this digest; empty when there is none."""
    if not file.exists():
        return f"{file} is missing."
    if file.stat().st_size != size:
        return f"{file} has {file.stat().st_size} bytes instead of {size}."
    return "" if digest(file) == expected else f"{file} has changed since it was written."


def flush(path: Path) -> None:
    """Force a file's bytes, or a directory's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_flushed(path: Path, text: str) -> None:
    path.write_text(text)
    flush(path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the operating system's refusals into CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path} ({error}). Free space, or set checkpoint.path elsewhere."
        ) from error
