"""The trainer: Megatron-Core fine-tuning and reinforcement learning that publishes weights into a running server.

Importing this package imports neither torch nor Megatron; `python -m trainer.main --config FILE` runs it. Imports run
downward in this list:

main.py        the command line
api/           the training API, for the tinker SDK
plan/          which layout fits, before a run
long2short.py  shorter answers: merged weights, data of short answers
report/        what a run was like, after it
loop.py        the training loop, on one screen
run.py         one run's components on one rank, and the way back to a checkpoint
rollouts/      records to the samples of a step: scheduled, generated, scored, laid out
evaluation.py  the sets of prompts that a run is judged by
exports.py     Hugging Face checkpoints of a run's weights
publish.py     weights into a running server
checkpoint/    what a resumed run goes on from
memory/        who holds the device in which phase
metrics/       events, and where they are shown
faults/        ranks that die or hang, numbers that leap
megatron/      models, parallel layouts, the training engine
algorithms/    what is learned
environments/  episodes of several turns, with tools or without
trajectory.py  turns, trajectories and groups, and how old a token is
routing.py     the experts that their tokens went to
rewards/       what an answer is worth
data/          records, their files and their order
worker_process.py  processes that run other people's code and can be killed
batch.py       sequences to tensors, packed or not
launch.py      starts the ranks, starts them anew, passes SIGTERM on
connection.py  keys and certificates
config/        one frozen struct per component
errors.py      one tree of exceptions
"""

from trainer.config import TrainerConfig, load
from trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Diverged,
    EnvironmentFailed,
    MemoryPlanError,
    ModelError,
    Preempted,
    PublishError,
    RankFailed,
    ResumeError,
    RewardError,
    RolloutError,
    TrainerError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Diverged",
    "EnvironmentFailed",
    "MemoryPlanError",
    "ModelError",
    "Preempted",
    "PublishError",
    "RankFailed",
    "ResumeError",
    "RewardError",
    "RolloutError",
    "TrainerConfig",
    "TrainerError",
    "load",
]
