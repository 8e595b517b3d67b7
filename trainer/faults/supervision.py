"""Everything that watches over one rank for as long as it runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from trainer.config import FaultsConfig
from trainer.errors import Preempted, RankFailed, TrainerError
from trainer.faults.heartbeat import Beat, Board, Heartbeat, LocalBoard, StoreBoard, here
from trainer.launch import RunDir, Stopping, attempt
from trainer.megatron.parallel import control


class Faults:
    """Heartbeat, watchdog and SIGTERM of this rank. Build it when the process group exists; use it as a context."""

    def __init__(self, config: FaultsConfig, give_up: Callable[[], bool] | None = None) -> None:
        """`give_up` says at SIGTERM whether to leave at once (default: when the launcher ends what is left)."""
        self.attempt = attempt()
        self._world = dist.get_world_size()
        alone = self._world == 1 and "MASTER_ADDR" not in os.environ
        self._board: Board = LocalBoard() if alone else StoreBoard(self.attempt)
        self._heartbeat = Heartbeat(config, self._board, dist.get_rank(), self._world)
        self._stopping: Stopping | None = None
        if threading.current_thread() is threading.main_thread():  # the only one that may handle signals
            self._stopping = Stopping(config.grace_s, give_up or RunDir.of_environment().being_torn_down)

    @property
    def restarted_because(self) -> str:
        """Why the attempt before this one ended; empty for the first."""
        if self.attempt == 0:
            return ""
        return self._board.fault(self.attempt - 1) or "a rank ended without a word"

    def leaving(self) -> bool:
        """Whether any rank was sent SIGTERM. Collective, so that all leave after the same step."""
        asked = torch.tensor([int(self._stopping is not None and self._stopping.requested)])
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=control())
        return bool(asked)

    def __enter__(self) -> Faults:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # RankFailed was said elsewhere; Preempted is every rank's, and the others must not be ended while they close.
        if error is None or isinstance(error, RankFailed | Preempted):
            self._close()
            return
        lost = isinstance(error, RuntimeError) and is_lost_contact(error)
        said: Any = TrainerError(f"{self._lost()} during {here()} ({_first_line(error)}).") if lost else error
        self._close(f"{type(said).__name__}: {said}")
        if lost:
            raise said from None

    def _close(self, fault: str = "") -> None:
        self._heartbeat.stop(fault)
        if self._stopping is not None:
            self._stopping.close()

    def _lost(self) -> str:
        """The ranks of this machine that have died."""
        try:
            beats = [self._board.last_beat(rank) for rank in range(self._world)]
        except (OSError, RuntimeError):
            beats = []
        dead = [f"rank {beat.rank} (process {beat.pid})" for beat in beats if beat is not None and _is_dead(beat)]
        return f"lost {', '.join(dead)}" if dead else "lost contact with another rank"


def is_lost_contact(error: RuntimeError) -> bool:
    """Whether a collective failed because of a peer or the network. gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _is_dead(beat: Beat) -> bool:
    if beat.host != os.uname().nodename:
        return False
    try:
        return bool(psutil.Process(beat.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
