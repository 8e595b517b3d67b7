"""A thread of every rank that tells the others it is alive, watches the next one, and ends the process when the run
cannot go on: a peer stopped beating, all hang, or a peer has reported a fault.

A rank in a collective waits for ever for one that was stopped; its main thread can do nothing about it. This thread
says who is missing, kills that process if it is on this machine, and leaves with the main thread, so that the launcher
can start all of them anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace

from trainer.config import FaultsConfig
from trainer.faults.board import Beat, Board
from trainer.faults.progress import here
from trainer.faults.watch import DONE, Watched, hang, silence, watched_by

STATUS = 1
UNANSWERED = 3
"""Beats that the board may miss before the run is given up; each waits for it as long as the store's patience."""


class Heartbeat:
    """Starts beating when built."""

    def __init__(self, config: FaultsConfig, board: Board, rank: int, world: int) -> None:
        self._config, self._board, self._rank, self._world = config, board, rank, world
        self._number, self._unanswered = 0, 0
        self._host = socket.gethostname()
        self._stopped = threading.Event()
        peer = watched_by(rank, world)
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
