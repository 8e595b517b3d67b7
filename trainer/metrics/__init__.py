"""What a run reports: events, each with numbers, written to whoever wants them.

Imports no torch (throughput.py does). Every event has `event` and `time` (Unix seconds). Events and their keys:

    start    steps, algorithm, world_size, parameters, step (the one resumed from, 0 for a fresh run); data: records,
             held_out, and of files also tokens, bad_records, too_long, bad (the first by name), seconds
    step     step, loss, grad_norm, lr, tokens, tokens_per_s, version;
             times by phase: rollout_ms, train_ms, publish_ms (of which write_ms until the version is complete, swap_ms
             until the fleet serves it), and what a schedule adds; step_ms, their sum or less where they overlap;
             throughput: train_tokens_per_s, train_tflops (per rank), mfu (see trainer/metrics/throughput.py);
             with rollouts: reward_mean, reward_std, reward_min, reward_max, full_reward, reward/<name> for each reward,
             zero_std_groups, answer_tokens_mean, answer_tokens_max, truncated, rollout_tokens, version_lag_mean,
             version_lag_max, versions_per_sample; of each reward reward_time_ms/<name>, reward_failures/<name>;
             generate_ms_mean, score_ms_mean by sample; of the schedule filtered_groups, stale_groups, groups_ready,
             groups_in_flight; and what the algorithm adds (clip_ratio, entropy, kl, logprob_gap_mean, ...)
    eval     step, version, served_versions, prompts, accuracy, reward_mean, reward/<name>, truncated,
             answer_tokens_mean, answer_tokens_max; with eval.samples above 1: pass_any
    publish_failed  step, message
    checkpoint      step, path, ms (for which training stood still), write_ms (until it was whole on the disk)
    checkpoint_failed  step, message
    rollback        step (that went wrong), to_step, version, reason, skipped_to (records left out up to there, or null)
    restart         attempt, reason
    done     step, version, seconds
"""

from trainer.metrics.evaluation import evaluation_metrics
from trainer.metrics.rollouts import rollout_metrics
from trainer.metrics.stopwatch import Stopwatch
from trainer.metrics.writers import JsonLines, MetricsWriter, Tee, numbers

__all__ = [
    "JsonLines",
    "MetricsWriter",
    "Stopwatch",
    "Tee",
    "evaluation_metrics",
    "numbers",
    "rollout_metrics",
]
