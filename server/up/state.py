"""The state directory of `hotswap up`: who uses it, which store is in it, and how it is begun anew.

lock          held by the one `up` that uses the directory
children      open in every process that this `up` started: what is left of one that was killed is found by it
state.json    which store this is, so that one that vanished is missed; and whether a discard is under way
store.db      the store           admin.key     server.json   of the running server
logs/         of this run and, as *.log.1, of the one before
versions/     copies of committed versions (weightsync/persist), unless they go elsewhere
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from server.errors import CliError
from server.files import write_file
from weightsync.persist.disk import remove_copies

STORE_FILES = ("store.db", "store.db-wal", "store.db-shm", "store.db-notify")
TRAINER = "trainer.main"
OWNER = ".owner"  # in the directory of the copies: which store's they are
POLL_S = 0.05
GONE_S = 30.0  # after SIGKILL: what is still there then hangs in the kernel


@dataclass(frozen=True)
class _Known:
    """The content of state.json. `copies`: the directories of the copies of versions that go with what is discarded."""

    store_id: str
    discarding: bool = False
    copies: tuple[str, ...] = ()


class StateDir:
    """One state directory. All but `claim` is for who has claimed it."""

    def __init__(self, path: Path) -> None:
        self.path, self.store = path, path / "store.db"
        self._lock = self._children = -1

    def copies_of(self, tag: str) -> Path:
        """Where copies of a model's versions are, unless they go elsewhere; the first model's tag is ""."""
        return self.path / "versions" / tag

    @property
    def held(self) -> bool:
        """Whether this process has claimed it."""
        return self._lock >= 0

    @property
    def claimed(self) -> bool:
        """Whether it is still this process's: nobody has put another directory in its place."""
        if not self.held:
            return False
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._lock), os.stat(self.path / "lock"))
        return True

    def claim(self) -> None:
        """Be the one who uses it, for as long as this process lives. Raises CliError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            self.release()
            who = f" (process {holder})" if holder else ""
            raise CliError(
                f"a server already runs with its state in {self.path}{who}; stop it, or pass another --state-dir"
            ) from None
        except OSError as error:
            self.release()
            raise CliError(f"the state directory {self.path} cannot be used ({error}): name another one") from error
        self.path.chmod(0o700)
        os.pwrite(self._lock, f"{os.getpid():<31}\n".encode(), 0)

    def release(self) -> None:
        """Let others use it."""
        for fd in (self._lock, self._children):
            if fd >= 0:
                os.close(fd)
        self._lock = self._children = -1

    # what another `up` has left

    @property
    def inherited(self) -> int:
        """The descriptor that every child must have open."""
        if self._children < 0:
            self._children = os.open(self.path / "children", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._children

    def end_leftovers(self, leaves_s: float, trainer_leaves_s: float, say: Callable[[str], None]) -> None:
        """Return when no process of an `up` that was killed is left. Raises CliError.

        The kernel has told them to end. Each gets the time that it would have had if `up` had been stopped.
        """
        began, told = time.monotonic(), False
        while left := list(self._leftovers()):
            if not told:
                told = True
                say(f"waiting for processes of the run before to end: {', '.join(str(pid) for pid, _ in left)}")
            waited = time.monotonic() - began
            for pid, command in left:
                if waited > (trainer_leaves_s if TRAINER in command else leaves_s):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)  # each leads a group of its own
            if waited > trainer_leaves_s + GONE_S:
                raise CliError(f"process {left[0][0]} of the run before in {self.path} does not end; end it")
            time.sleep(POLL_S)

    def _leftovers(self) -> Iterator[tuple[int, str]]:
        """(process id, command line) of every other process with an inherited descriptor."""
        ours = str(self.path / "children")
        for process in Path("/proc").glob("[0-9]*"):
            if process.name == str(os.getpid()):
                continue
            with contextlib.suppress(OSError):
                if any(os.readlink(link) == ours for link in (process / "fd").iterdir()):
                    yield int(process.name), (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()

    # the store

    @property
    def store_id(self) -> str:
        """Of the store that belongs here; "" when there was none yet. Raises CliError."""
        known = self._known()
        return known.store_id if known is not None else ""

    def require_store(self) -> str | None:
        """The id of the store that belongs here; None when there was none yet. Raises CliError.

        A store that is gone is not made anew by itself: with it would go its keys, and with them that any is asked for.
        """
        known = self._known()
        if known is not None and not self.store.exists():
            raise CliError(
                f"the store of {self.path} is gone ({self.store}): put the file back, or begin anew with --fresh, "
                "without its keys, versions and history"
            )
        return known.store_id if known is not None else None

    def remember(self, store_id: str) -> None:
        """This store belongs here from now on."""
        if self._known() != (known := _Known(store_id)):
            self._write(known)

    def discard(self, copies: Iterable[Path], arena: Path) -> None:
        """Remove the store, what is in `arena`, and the copies of its versions. The admin key and the logs stay.

        `copies`: where some may be besides the state directory; another store's stay. Once begun it comes to its end,
        by whichever `up` is next: nobody finds half of it.
        """
        ours = {str(place) for place in copies if owner(place) == self.store_id}
        self._write(_Known(self.store_id, True, tuple(sorted(ours | {str(self.copies_of(""))}, reverse=True))))
        self.finish_discard(arena)

    def finish_discard(self, arena: Path) -> None:
        """Go on with a discard in which an `up` was killed."""
        known = self._known()
        if known is None or not known.discarding:
            return
        shutil.rmtree(arena, ignore_errors=True)
        for place in map(Path, known.copies):
            remove_copies(place)
            (place / OWNER).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # there are other things in it
                place.rmdir()
        shutil.rmtree(self.path / "ledger", ignore_errors=True)  # older entries of a ledger that goes with the store
        for name in STORE_FILES:
            (self.path / name).unlink(missing_ok=True)
        (self.path / "state.json").unlink(missing_ok=True)

    def _known(self) -> _Known | None:
        """Raises CliError."""
        try:
            return _Known(**json.loads((self.path / "state.json").read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise CliError(
                f"{self.path / 'state.json'} cannot be read ({error}): put it back; or remove it, if you are sure that "
                f"{self.store} is the store that belongs here"
            ) from error

    def _write(self, known: _Known) -> None:
        write_file(self.path / "state.json", json.dumps(asdict(known)))

    # logs

    def rotate_logs(self) -> Path:
        """The directory of the logs, where those of the run before now have names of their own."""
        logs = self.path / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        for log in logs.glob("*.log"):
            log.replace(log.with_name(f"{log.name}.1"))
        return logs


def owner(copies: Path) -> str | None:
    """The store that the copies belong to: its id, or its URL; None if no copy says so. Raises CliError."""
    try:
        return (copies / OWNER).read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(copies, error) from error


def require_own(copies: Path, store: str) -> None:
    """Raises CliError when the copies in a directory are another store's."""
    if owner(copies) not in (None, store):
        raise CliError(f"{copies} has the copies of another store's versions; name another directory: --persist DIR")


def own(copies: Path, store: str) -> None:
    """Make the copies in a directory those of `store`. Raises CliError."""
    try:
        copies.mkdir(mode=0o700, parents=True, exist_ok=True)
        if owner(copies) is None:
            write_file(copies / OWNER, store)
    except OSError as error:
        raise _unusable(copies, error) from error


def _unusable(copies: Path, error: OSError) -> CliError:
    return CliError(f"--persist {copies}: cannot be used ({error}); name another directory, or `off`")
