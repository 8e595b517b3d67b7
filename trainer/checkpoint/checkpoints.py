"""A run's checkpoints: taken between two steps by all ranks together, written by a thread of each, resumed from.

Collective unless a method says otherwise. Saving blocks training while the shards are copied; a second save waits for
the first to be written.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.checkpoint import engine_state as engine_state
from trainer.checkpoint import parts as parts_of_run
from trainer.checkpoint.directory import SCORE, CheckpointDir, Retention, read_manifest, writing
from trainer.checkpoint.engine_state import StagedEngine
from trainer.checkpoint.parts import Part
from trainer.checkpoint.rank_files import Background, RankFiles, collect, put
from trainer.checkpoint.shards import Buffers
from trainer.config import CheckpointConfig, TrainerConfig
from trainer.config.datasets import identity
from trainer.errors import CheckpointError, ResumeError
from trainer.megatron.engine import Engine
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.parallel import broadcast_json, gather_json, is_rank_zero, on_rank_zero

SHARES_TIMEOUT_S = 3600.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """`ms` is how long training stood still for it, `write_ms` the time until it was whole on the disk."""

    step: int
    path: str
    ms: float
    write_ms: float


class Checkpoints:
    """Saves and restores the engine and, on rank 0, `parts`. `identity` (JSON) must be equal to be continued.
    `written`, on rank 0, is the step of the last one that is known to be whole on the disk."""

    def __init__(self, config: CheckpointConfig, engine: Engine, identity: Mapping[str, Any]) -> None:
        self.parts: dict[str, Part] = {}
        self.written: int | None = None
        self._config, self._engine = config, engine
        self._identity = json.loads(json.dumps(identity))  # as it reads back
        retention = Retention(config.keep, config.keep_every, config.keep_best)
        self._directory = CheckpointDir(config.path, retention)
        self._buffers = Buffers() if config.asynchronous else None
        self._background: Background[Saved | None] = Background("checkpoint")
        self._given_up = threading.Event()
        self._failures = 0
        self._pending_step, self._problem = 0, ""
        self._events: list[tuple[str, dict[str, Any]]] = []

    def save(self, step: int, train: Mapping[str, Any], score: float | None = None) -> None:
        """Take a checkpoint of this moment; `train` is JSON. It is written when `events` says so, or after `wait`.

        Raises CheckpointError, on every rank, when more than `max_failures` in a row could not be written.
        """
        began = time.perf_counter()
        self.wait()
        if (directory := self._stage(step)) is None:
            return
        staged = StagedEngine(self._engine, directory, self._buffers)
        state = {"train": dict(train), "identity": self._identity, SCORE: score}
        files = parts_of_run.take(self.parts) if is_rank_zero() else {}
        self._given_up.clear()
        clock = _Clock(began, time.perf_counter())
        self._background.start(lambda: self._write(step, staged, directory, state, files, clock))
        if not self._config.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the last one is written. Raises CheckpointError as `save` does."""
        others = gather_json("" if is_rank_zero() else self._settle())
        if any(others):
            self._given_up.set()
        on_rank_zero(lambda: self._count("; ".join(filter(None, [self._settle(), *others]))))

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """On rank 0, without communication: what became of checkpoints since the last call, as metrics events."""
        if is_rank_zero() and not self._background.busy:
            self._problem = self._settle()
        found, self._events = self._events, []
        return found

    def resume(self) -> dict[str, Any] | None:
        """Load the newest whole checkpoint as the configuration says; its training state, None for a fresh start.

        Raises ResumeError when it belongs to another run, when all are torn, or when there must be one and is not.
        """
        if self._config.resume == "never":
            return None
        if (found := self._newest()) is not None:
            return self._load(*found)
        if self._config.resume == "must":
            raise ResumeError(f"{self._config.path} has no checkpoint. Set checkpoint.resume to auto.")
        return None

    def restore(self, step: int | None = None) -> dict[str, Any]:
        """Go back to the newest whole checkpoint, or that of `step`, whatever `resume` says. Raises ResumeError when
        there is none."""
        self.wait()
        found = self._newest(step)
        if found is None:
            if step is not None:
                raise ResumeError(f"{self._config.path} has no checkpoint of step {step}. Name a step that was kept.")
            raise ResumeError(f"{self._config.path} has no checkpoint to go back to. Lower checkpoint.every.")
        return self._load(*found)

    def _stage(self, step: int) -> Path | None:
        """An empty directory for all; None when the disk refused and the run may go on without."""
        self._pending_step = step
        made: str = broadcast_json(on_rank_zero(lambda: self._stage_rank_zero(step)))
        return Path(made) if made else None

    def _stage_rank_zero(self, step: int) -> str:
        try:
            return str(self._directory.stage(step))
        except CheckpointError as error:
            self._failed(str(error))
            self._count(str(error))
            return ""

    def _write(
        self,
        step: int,
        staged: StagedEngine,
        directory: Path,
        state: dict[str, Any],
        files: Mapping[str, bytes],
        clock: _Clock,
    ) -> Saved | None:
        """In the thread of every rank; rank 0's waits for the others' and seals."""
        try:
            share = staged.write()
        except Exception as error:  # anything: rank 0 waits for a word
            share = RankFiles(problem=str(error) or repr(error))
        with writing(directory):
            put(directory, dist.get_rank(), share)
        if not is_rank_zero():
            return None
        shares = collect(directory, dist.get_world_size(), SHARES_TIMEOUT_S, self._given_up)
        staged.finish(shares)
        with writing(directory):
            parts_of_run.write(files, directory)
        known = {name: described for share in shares for name, described in share.files.items()}
        return clock.saved(step, self._directory.commit(step, state, known))

    def _settle(self) -> str:
        """Take this rank's outcome, if there is one; what went wrong, once."""
        problem, self._problem = self._problem, ""
        try:
            saved = self._background.take(wait=True)
        except CheckpointError as error:
            self._failed(str(error))
            return str(error)
        if saved is not None:
            self._failures, self.written = 0, saved.step
            self._events.append(("checkpoint", asdict(saved)))
        return problem

    def _failed(self, problem: str) -> None:
        log.warning("the checkpoint of step %d was not written: %s", self._pending_step, problem)
        self._events.append(("checkpoint_failed", {"step": self._pending_step, "message": problem}))

    def _count(self, problem: str) -> None:
        """Rank 0: raises CheckpointError if this is one failure too many."""
        self._failures += bool(problem)
        if problem and self._failures > self._config.max_failures:
            raise CheckpointError(problem)

    def _newest(self, step: int | None = None) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint (of `step` alone), each rank having read its share of the files."""
        problems: list[str] = []
        rank, world = dist.get_rank(), dist.get_world_size()
        candidates = broadcast_json([str(path) for path in self._directory.steps(step)] if is_rank_zero() else None)
        for candidate in map(Path, candidates):
            found = next(filter(None, gather_json(self._directory.problem(candidate, rank, world))), "")
            if not found:
                return candidate, read_manifest(candidate)[0]
            problems.append(found)
            if is_rank_zero():
                log.warning("%s Trying the one before it.", found)
        on_rank_zero(lambda: self._directory.refuse(problems))
        return None

    def _load(self, directory: Path, state: dict[str, Any]) -> dict[str, Any]:
        on_rank_zero(lambda: self._check(directory, state))
        self._load_engine(directory)
        on_rank_zero(lambda: parts_of_run.restore(self.parts, directory))
        train: dict[str, Any] = state["train"]
        return train

    def _load_engine(self, directory: Path) -> None:
        """Rank 0 says what all have found, once."""
        problem = ""
        try:
            engine_state.load(self._engine, directory)
        except ResumeError as error:
            problem = str(error)
        problems = [found for found in gather_json(problem) if found]
        on_rank_zero(lambda: _refuse(problems))

    def _check(self, directory: Path, state: dict[str, Any]) -> None:
        for key, mine in self._identity.items():
            if state["identity"].get(key) != mine:
                raise ResumeError(
                    f"{directory} was written with {key} {state['identity'].get(key)}, this run has {mine}. "
                    "Set it back, choose another checkpoint.path, or set checkpoint.resume to never."
                )


def open_checkpoints(config: TrainerConfig, shape: ModelShape, engine: Engine) -> Checkpoints | None:
    """The checkpoints of a run, if any. The identity that a continued run must share comes from its configuration."""
    if config.checkpoint is None:
        return None
    lora = config.lora
    known = {
        "seed": config.seed,
        "algorithm": config.algorithm.name,
        "data": identity(config.data),
        "model": {k: v for k, v in asdict(shape).items() if k != "max_positions"},
        "lora": lora and {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.target_modules)},
    }
    return Checkpoints(config.checkpoint, engine, known)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ResumeError(problems[0])


@dataclass(frozen=True)
class _Clock:
    began: float
    copied: float

    def saved(self, step: int, path: Path) -> Saved:
        ms, write_ms = ((end - self.began) * 1e3 for end in (self.copied, time.perf_counter()))
        return Saved(step, str(path), round(ms, 1), round(write_ms, 1))
