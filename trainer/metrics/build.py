"""The writers that a configuration names."""

from __future__ import annotations

import dataclasses
import os
import sys

from trainer.config import TrainerConfig
from trainer.metrics.progress import Bar, Lines
from trainer.metrics.writers import JsonLines, MetricsWriter, Spared, Tee


def build_writers(config: TrainerConfig) -> MetricsWriter:
    """Where rank 0's events go. The JSON lines are the record of the run, so writing them must work; the others are
    for looking at, and training goes on without one that fails.

    Raises ConfigError for a telemetry or W&B key that is missing. What was opened before that is closed.
    """
    writers: list[MetricsWriter] = []
    try:
        writers.append(JsonLines(config.metrics))
        if (progress := chosen_progress(config)) is not None:
            writers.append(Spared("the progress display", progress))
        if config.telemetry is not None:
            from trainer.telemetry import HttpMetrics

            writers.append(HttpMetrics(config.telemetry))
        if config.watch.tensorboard is not None:
            from trainer.metrics.tensorboard import TensorBoard

            writers.append(Spared("TensorBoard", TensorBoard(config.watch.tensorboard)))
        if config.watch.wandb is not None:
            from trainer.metrics.wandb import Wandb

            writers.append(Spared("W&B", Wandb(config.watch.wandb, dataclasses.asdict(config))))
    except BaseException:
        Tee(*writers).close()
        raise
    return Tee(*writers)


def silent() -> MetricsWriter:
    """For the ranks that report nothing."""
    return JsonLines(os.devnull)


def chosen_progress(config: TrainerConfig) -> MetricsWriter | None:
    """`auto` draws a bar on a terminal, unless the JSON lines go to the same one."""
    wanted = config.watch.progress
    if wanted == "auto":
        crowded = config.metrics == "-" and sys.stdout.isatty()
        wanted = "bar" if sys.stderr.isatty() and not crowded else "off"
    if wanted == "off":
        return None
    return Bar() if wanted == "bar" else Lines()
