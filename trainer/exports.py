"""Hugging Face checkpoints of a run's weights: of the last step, of any step, of the best one, of a saved checkpoint.

    SAVE_TO/             the final weights
    SAVE_TO/step-40/     those of every `save_every` steps
    SAVE_TO/best/        those of the best evaluation so far; best.json beside the weights says which

A directory is written under a temporary name beside it and renamed when it is whole. Collective: every rank writes what
it holds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from trainer.checkpoint.checkpoints import open_checkpoints
from trainer.config import TrainerConfig
from trainer.errors import CheckpointError, ConfigError
from trainer.megatron.engine import Engine
from trainer.megatron.hf_config import ModelShape
from trainer.megatron.hf_files import finish_adapter, finish_checkpoint, write_shards
from trainer.megatron.lora import adapter_config
from trainer.megatron.parallel import broadcast_json, gather_json, on_rank_zero

BEST, RECORD = "best", "best.json"


class Exports:
    """The checkpoints that a run with `save_to` writes there."""

    def __init__(self, config: TrainerConfig, shape: ModelShape, engine: Engine) -> None:
        assert config.save_to is not None
        self._config, self._shape, self._engine = config, shape, engine
        self._target = Path(config.save_to)
        self._best: float | None = None

    def start(self, *, resumed: bool) -> None:
        """A run that goes on has its best one already; a fresh run has none, whatever is in the directory."""
        record = on_rank_zero(lambda: self._recorded()) if resumed and self._config.save_best else None
        self._best = broadcast_json(record)

    def due(self, step: int, score: float | None) -> bool:
        """Whether `save` would write something."""
        return self._regular(step) or self._better(score)

    def save(self, step: int, score: float | None) -> None:
        """The weights of this step, if it is one of `save_every`, and as the best ones, if they are."""
        if self._regular(step):
            self._write(self._target / f"step-{step}")
        if self._better(score):
            self._best = score
            self._write(self._target / BEST, {"step": step, "by": "/".join(self._config.best_by), "value": score})

    def finish(self) -> None:
        """The final weights. They are written in place: `step-N` and `best` are in the same directory."""
        write_hf(self._config, self._shape, self._engine, self._target)

    def _regular(self, step: int) -> bool:
        return bool(self._config.save_every) and step % self._config.save_every == 0

    def _better(self, score: float | None) -> bool:
        return self._config.save_best and score is not None and (self._best is None or score > self._best)

    def _recorded(self) -> float | None:
        try:
            record = json.loads((self._target / BEST / RECORD).read_text())
        except (OSError, ValueError):
            return None
        return float(record["value"]) if record.get("by") == "/".join(self._config.best_by) else None

    def _write(self, directory: Path, record: dict[str, Any] | None = None) -> None:
        unfinished = directory.with_name(f".writing-{directory.name}")
        on_rank_zero(lambda: shutil.rmtree(unfinished, ignore_errors=True))
        write_hf(self._config, self._shape, self._engine, unfinished)
        on_rank_zero(lambda: _put(unfinished, directory, record))


def _put(made: Path, directory: Path, record: dict[str, Any] | None) -> None:
    try:
        if record is not None:
            (made / RECORD).write_text(json.dumps(record))
        if directory.exists():
            shutil.rmtree(directory)
        made.rename(directory)
    except OSError as error:
        raise _refused(directory, error) from None


def write_hf(config: TrainerConfig, shape: ModelShape, engine: Engine, directory: Path) -> None:
    """The engine's weights as a Hugging Face checkpoint directory, or its adapter as PEFT's. Raises CheckpointError."""
    model, lora = config.model, config.lora
    merged = lora is not None and lora.save == "merged"
    on_rank_zero(lambda: _make(directory))
    tensors = engine.export_merged(model.dtype) if merged else engine.export(model.dtype)
    files = write_parts(directory, tensors, engine.part)
    if lora is None or merged:
        on_rank_zero(lambda: finish_checkpoint(directory, files, model.path, model.dtype))
    else:
        on_rank_zero(lambda: finish_adapter(directory, files, adapter_config(shape, lora, model.path)))


def write_parts(directory: Path, tensors: Iterator[tuple[str, Tensor]], part: int) -> list[tuple[str, str, int]]:
    """Each rank writes what it exports into `directory`, which is there; `part` is its number. (tensor, file, bytes) of
    all ranks. Raises CheckpointError on every rank when one could not write."""
    written, problem = [], ""
    try:
        written = write_shards(directory, tensors, part)
    except (OSError, SafetensorError) as error:
        problem = str(_refused(directory, error))
        for _ in tensors:  # the other ranks need this one for the tensors that they share
            pass
    shares = gather_json([written, problem])
    if problems := [problem for _, problem in shares if problem]:
        raise CheckpointError(problems[0])
    return [(name, file, size) for share, _ in shares for name, file, size in share]


def export_saved(config: TrainerConfig, shape: ModelShape, engine: Engine, directory: str, step: int | None) -> int:
    """Write the weights of a saved checkpoint (the newest whole one, or that of `step`) to `directory`; returns its
    step. Raises ConfigError, ResumeError, CheckpointError."""
    checkpoints = open_checkpoints(config, shape, engine)
    if checkpoints is None:
        raise ConfigError("checkpoint", "missing, so there is nothing to export", "Add checkpoint: {path: ...}")
    state = checkpoints.restore(step)
    write_hf(config, shape, engine, Path(directory))
    return int(state["step"])


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(directory, error) from None


def _refused(directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"cannot write {directory} ({error}). Free space, or choose another directory.")
