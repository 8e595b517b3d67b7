"""A thread of every rank that tells the others it is alive, watches the next one, and ends the process when the run
cannot go on: a peer stopped beating, all hang, or a peer has reported a fault.

A rank in a collective waits for ever for one that was stopped; its main thread can do nothing about it. This thread
says who is missing, kills that process if it is on this machine, and leaves with the main thread, so that the launcher
can start all of them anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

from trainer.config import FaultsConfig

STATUS = 1  # of a process that the heartbeat ends
UNANSWERED = 3
"""Beats that the board may miss before the run is given up; each waits for it as long as the store's patience."""
DONE = "done"
"""The phase of a rank's last beat, after which none is missed."""
PREFIX = "hotswap"
PATIENCE_S = 10.0


class Heartbeat:
    """This rank's thread, which starts beating when it is built."""

    def __init__(self, config: FaultsConfig, board: Board, rank: int, world: int) -> None:
        self._config, self._board, self._rank, self._world = config, board, rank, world
        self._number, self._unanswered = 0, 0
        self._host = socket.gethostname()
        self._stopped = threading.Event()
        peer = watched_by(rank, world)
        progress(here().phase)  # counted from now, however long this process has been there
        self._peer = Watched(peer, time.monotonic()) if peer != rank else None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self, fault: str = "") -> None:
        """No more beats, and none are to be missed: the run is at its end, or `fault` is why this rank leaves it. (Told
        last: the thread would end this process for it.)"""
        self._stopped.set()
        self._thread.join()
        if fault:
            self.failed(fault)
        with contextlib.suppress(OSError, RuntimeError):
            self._board.beat(replace(self._beat(time.monotonic()), phase=DONE))

    def failed(self, fault: str) -> None:
        """Tell the other ranks why this one leaves."""
        with contextlib.suppress(OSError, RuntimeError):
            self._board.report(fault)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._once(time.monotonic())
                self._unanswered = 0
            except (OSError, RuntimeError) as error:  # torch's store raises RuntimeError
                self._unanswered += 1
                if self._unanswered > UNANSWERED and not self._stopped.is_set():
                    self._leave(f"the ranks' store does not answer: {error}", say=True)
            self._stopped.wait(self._config.heartbeat_s)

    def _once(self, now: float) -> None:
        mine = self._beat(now)
        self._board.beat(mine)
        if fault := self._board.fault():
            self._leave(fault, say=False)
        if self._peer is not None:
            silent_s = self._peer.see(self._board.last_beat(self._peer.rank), now)
            if silent_s > self._config.heartbeat_timeout_s and not self._stopped.is_set():
                self._end_peer(silence(self._peer, silent_s))
        if 0 < self._config.hang_s <= mine.still_s:
            self._check_all(mine)

    def _beat(self, now: float) -> Beat:
        self._number += 1
        place, who = here(), (self._rank, os.getpid(), self._host)
        return Beat(*who, self._number, place.phase, place.step, round(now - place.since, 3))

    def _check_all(self, mine: Beat) -> None:
        found = [mine if rank == self._rank else self._board.last_beat(rank) for rank in range(self._world)]
        beats = [beat for beat in found if beat is not None]
        if len(beats) == self._world and (fault := hang(beats, self._config.hang_s)):
            faulthandler.dump_traceback(all_threads=True)
            self._leave(fault, say=True)

    def _end_peer(self, fault: str) -> None:
        assert self._peer is not None
        last = self._peer.last
        print(f"error: {fault}", file=sys.stderr, flush=True)
        self.failed(fault)
        if last is not None and last.host == self._host:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(last.pid, signal.SIGKILL)  # SIGTERM does not end a stopped process
        os._exit(STATUS)

    def _leave(self, fault: str, *, say: bool) -> None:
        if say:
            print(f"error: rank {self._rank}: {fault}", file=sys.stderr, flush=True)
            self.failed(fault)
        os._exit(STATUS)


class Watched:
    """One peer, seen through its beats. Clocks of other machines are not trusted: what counts is when a new beat was
    seen here."""

    def __init__(self, rank: int, now: float) -> None:
        self.rank, self._seen = rank, now
        self.last: Beat | None = None

    def see(self, beat: Beat | None, now: float) -> float:
        """Take a look; seconds since the last new beat."""
        if beat is not None and (self.last is None or beat.number != self.last.number):
            self.last, self._seen = beat, now
        return now - self._seen if self.last is None or self.last.phase != DONE else 0.0


def watched_by(rank: int, world: int) -> int:
    """Each watches the next one, in a ring: of any ranks that stop, the first has a live one before it."""
    return (rank + 1) % world


def silence(peer: Watched, silent_s: float) -> str:
    """The message about a peer that no longer beats."""
    who = str(peer.last) if peer.last is not None else f"rank {peer.rank}, which has sent none"
    return f"no heartbeat for {silent_s:.1f} s from {who}: stopped, or its machine is gone."


def hang(beats: list[Beat], hang_s: float) -> str:
    """The message when no rank has got on for `hang_s`; empty while one has. The others wait for the rank that is
    somewhere else than most. Ranks that are done beat no more: they neither hang nor get on."""
    beats = [beat for beat in beats if beat.phase != DONE]
    if not beats or min(beat.still_s for beat in beats) < hang_s:
        return ""
    places = [(beat.step, beat.phase) for beat in beats]
    common = max(places, key=places.count)
    odd = [f"rank {beat.rank}" for beat in beats if (beat.step, beat.phase) != common]
    suspects = f" They seem to wait for {', '.join(odd)}." if odd and places.count(common) > 1 else ""
    return f"no rank got on for {hang_s:g} s: {'; '.join(map(str, beats))}.{suspects}"


@dataclass(frozen=True)
class Beat:
    """One heartbeat. `number` counts them; `still_s` is how long the rank has been at this place."""

    rank: int
    pid: int
    host: str
    number: int
    phase: str
    step: int
    still_s: float

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host}), {self.phase} of step {self.step}"


class Board(Protocol):
    """Raises OSError or RuntimeError when the store does not answer."""

    def beat(self, beat: Beat) -> None: ...

    def last_beat(self, rank: int) -> Beat | None: ...

    def report(self, fault: str) -> None: ...

    def fault(self, attempt: int | None = None) -> str: ...


class StoreBoard:
    """On torch's TCPStore, at the address in torchrun's environment variables."""

    def __init__(self, attempt: int) -> None:
        from torch.distributed import TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store: Any = TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S)
        )
        self._attempt = attempt

    def beat(self, beat: Beat) -> None:
        self._store.set(self._key(f"beat/{beat.rank}"), json.dumps(asdict(beat)))

    def last_beat(self, rank: int) -> Beat | None:
        text = self._read(self._key(f"beat/{rank}"))
        return Beat(**json.loads(text)) if text else None

    def report(self, fault: str) -> None:
        self._store.set(self._key("fault"), fault)

    def fault(self, attempt: int | None = None) -> str:
        """The fault that ended this attempt, or an earlier one; empty when none was reported."""
        return self._read(self._key("fault", attempt))

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _key(self, name: str, attempt: int | None = None) -> str:
        return f"{PREFIX}/{self._attempt if attempt is None else attempt}/{name}"


class LocalBoard:
    """The board of a run of one process, where nobody listens."""

    def __init__(self) -> None:
        self._beats: dict[int, Beat] = {}
        self._fault = ""

    def beat(self, beat: Beat) -> None:
        self._beats[beat.rank] = beat

    def last_beat(self, rank: int) -> Beat | None:
        return self._beats.get(rank)

    def report(self, fault: str) -> None:
        self._fault = fault

    def fault(self, attempt: int | None = None) -> str:
        return self._fault if attempt is None else ""


@dataclass(frozen=True)
class Place:
    """A phase of a step, entered at `since` (monotonic seconds)."""

    phase: str
    step: int
    since: float

    def __str__(self) -> str:
        return f"{self.phase} of step {self.step}"


_here = Place("start", 0, time.monotonic())


def progress(phase: str, step: int | None = None) -> None:
    """The run gets on: call it when a phase begins and whenever a long one has got further."""
    global _here
    _here = Place(phase, _here.step if step is None else step, time.monotonic())


def here() -> Place:
    return _here
