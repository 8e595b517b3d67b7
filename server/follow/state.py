"""A follower's memory across restarts: FollowState in `state.json`, whole or not at all, beside the fetched files.

A lost file costs nothing that matters: the same checkpoint becomes the same version (`upload_id`), and a release of it
that is under way is recognised.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from server.errors import CliError
from server.files import write_file
from weightsync.control.strict_json import Record
from weightsync.errors import RecordError

Outcome = Literal["released", "refused", "superseded"]
KEPT = 1000


@dataclass(frozen=True)
class Tried(Record):
    """A candidate and what became of it. Times are unix seconds; `modified` is 0 where the source does not say."""

    name: str
    identity: str
    outcome: Outcome
    at: float
    modified: float = 0.0
    version: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Current(Record):
    """The candidate that is being published or released.

    `attempt` counts the publications whose version was retired before its release. `release` is the id of its release,
    `before` that of the last one before it ("-": none). `pending` is the id of the approval that it waits for,
    `aborted` counts swaps that did not come about.
    """

    name: str
    identity: str
    modified: float = 0.0
    attempt: int = 0
    version: int | None = None
    before: str = ""
    release: str = ""
    pending: str = ""
    aborted: int = 0

    @property
    def upload_id(self) -> str:
        return f"follow-{self.identity}-{self.attempt}"


@dataclass(frozen=True)
class FollowState(Record):
    """`tried`: the last candidates, oldest first."""

    source: str
    current: Current | None = None
    tried: tuple[Tried, ...] = ()

    @property
    def refused(self) -> frozenset[str]:
        """Identities that are not tried again."""
        return frozenset(one.identity for one in self.tried if one.outcome == "refused")

    def ended(self, outcome: Outcome, reason: str = "") -> FollowState:
        """The same, when that has become of the current candidate."""
        now = self.current
        assert now is not None
        tried = Tried(now.name, now.identity, outcome, time.time(), now.modified, now.version, reason)
        others = tuple(one for one in self.tried if one.identity != now.identity)
        return replace(self, current=None, tried=(*others, tried)[-KEPT:])


class StateFile:
    """The file of one follower, held against a second one. Raises CliError."""

    def __init__(self, directory: Path, source: str) -> None:
        self._path = directory / "state.json"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise CliError(
                f"another follower works in {directory}; stop it, or name another directory with --cache-dir"
            ) from None
        except OSError as error:
            raise CliError(f"{directory} cannot be used ({error}): name another one with --cache-dir") from error
        try:
            self.state = self._read(source)
        except BaseException:
            self.close()
            raise

    def write(self, state: FollowState) -> None:
        """Raises CliError; then the file is as before."""
        if state == self.state:
            return
        try:
            write_file(self._path, state.to_json().decode())
        except OSError as error:
            raise CliError(f"{self._path} cannot be written ({error}): make room there") from error
        self.state = state

    def close(self) -> None:
        """Lets another follower have it."""
        os.close(self._lock)

    def _read(self, source: str) -> FollowState:
        try:
            found = FollowState.from_json(self._path.read_bytes())
        except FileNotFoundError:
            return FollowState(source)
        except (OSError, RecordError) as error:
            advice = "move it away, and what it knew is forgotten"
            raise CliError(f"{self._path} cannot be read ({error}): {advice}") from error
        if found.source != source:
            raise CliError(f"{self._path.parent} belongs to {found.source}; name another directory with --cache-dir")
        return found
