"""The trainer: Megatron-Core fine-tuning and reinforcement learning that publishes weights into a running server.

Importing this package imports neither torch nor Megatron; `python -m trainer.main --config FILE` runs it.
"""

from trainer.config import TrainerConfig, load
from trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Diverged,
    GatewayUnreachable,
    ModelError,
    PublishError,
    RankFailed,
    ResumeError,
    RewardError,
    RolloutError,
    TrainerError,
    UnsupportedModel,
    WeightsError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Diverged",
    "GatewayUnreachable",
    "ModelError",
    "PublishError",
    "RankFailed",
    "ResumeError",
    "RewardError",
    "RolloutError",
    "TrainerConfig",
    "TrainerError",
    "UnsupportedModel",
    "WeightsError",
    "load",
]
