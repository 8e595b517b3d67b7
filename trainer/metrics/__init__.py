"""The metrics of a run: events, each with numbers, for any number of writers.

writers.py     JSON lines, and several writers at once    rollouts.py    rewards, lengths, ages of tokens
terminal.py    a progress bar, or lines                   throughput.py  tokens per second, MFU, time by phase
dashboards.py  the console, TensorBoard, W&B

Only throughput.py imports torch. Every event has `event` and `time` (Unix seconds). Events and their keys:

    start    steps, algorithm, world_size, devices (of each rank: "cpu", or a GPU's number, name, UUID), parameters,
             step (the one resumed from, 0 for a fresh run); data: records, held_out, and of files also tokens,
             bad_records, too_long, bad (the first by name), seconds
    step     step, loss, grad_norm, lr, tokens, tokens_per_s, version;
             times by phase: rollout_ms, train_ms, publish_ms (of which write_ms until the version is complete, swap_ms
             until the fleet serves it), and what a schedule adds; step_ms, their sum or less where they overlap;
             throughput: train_tokens_per_s, train_tflops (per rank), mfu (see trainer/metrics/throughput.py);
             with rollouts: reward_mean, reward_std, reward_min, reward_max, full_reward, reward/<name> for each reward,
             zero_std_groups, answer_tokens_mean, answer_tokens_max, truncated, rollout_tokens, version_lag_mean,
             version_lag_max, versions_per_sample; of each reward reward_time_ms/<name>, reward_failures/<name>,
             reward_applied/<name> (the share of samples, if it does not apply to all); generate_ms_mean,
             score_ms_mean by sample; of the schedule filtered_groups, stale_groups, groups_ready, groups_in_flight;
             and what the algorithm adds (clip_ratio, entropy, kl, logprob_gap_mean, ...)
    eval     step, version, set (its name), served_versions, prompts, accuracy, reward_mean, reward/<name>, truncated,
             answer_tokens_mean, answer_tokens_max; pass_at_<k> for each k of the set's pass_at
    samples  step, samples: of each prompt, completion (texts with special tokens), finish_reason, reward (the weighted
             sum), rewards (by name), versions (that wrote it)
    publish_failed  step, message
    carried         step (at which it was told), number (in the bucket), sent (bytes), full, seconds; or skipped, as a
                    newer version took its place
    checkpoint      step, path, ms (for which training stood still), write_ms (until it was whole on the disk)
    checkpoint_failed  step, message
    rollback        step (that went wrong), to_step, version, reason, skipped_to (records left out up to there, or null)
    restart         attempt, reason
    done     step, version, seconds
"""

from __future__ import annotations

import os
import sys

import msgspec

from trainer.config import TrainerConfig
from trainer.metrics.dashboards import HttpMetrics, TensorBoard, Wandb
from trainer.metrics.terminal import Bar, Lines
from trainer.metrics.writers import JsonLines, MetricsWriter, Spared, Tee


def build_writers(config: TrainerConfig) -> MetricsWriter:
    """The writers of rank 0's events. The JSON lines are the record of the run: writing them must work; the others are
    for looking at, and training goes on without one that fails.

    Raises ConfigError for a telemetry or W&B key that is missing. The writers opened before that are closed.
    """
    writers: list[MetricsWriter] = []
    try:
        writers.append(JsonLines(config.metrics))
        if (progress := chosen_progress(config)) is not None:
            writers.append(Spared("the progress display", progress))
        if config.telemetry is not None:
            writers.append(HttpMetrics(config.telemetry))
        if config.watch.tensorboard is not None:
            writers.append(Spared("TensorBoard", TensorBoard(config.watch.tensorboard)))
        if config.watch.wandb is not None:
            writers.append(Spared("W&B", Wandb(config.watch.wandb, msgspec.to_builtins(config))))
    except BaseException:
        Tee(*writers).close()
        raise
    return Tee(*writers)


def silent() -> MetricsWriter:
    """A writer for the ranks that report nothing."""
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
