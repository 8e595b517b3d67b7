"""The trainer's client of `/generate`, as tests have it."""

from __future__ import annotations

from typing import Any

from trainer.config import ExactMatchReward, GatewayConfig, RolloutConfig, TeacherConfig
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.rewards import Scorer, build_scorer
from trainer.rollouts.sampling import RolloutSampler


def client(
    url: str,
    tokenizer: Tokenizer,
    scorer: Scorer | None = None,
    environment: Any = None,
    *,
    retry_s: float = 60.0,
    model: str | None = None,
    teacher: TeacherConfig | None = None,
    **rollout: Any,
) -> RolloutSampler:
    """One that scores exact matches, unless another scorer is given."""
    about = (GatewayConfig(url=url, retry_s=retry_s), RolloutConfig(**{"max_tokens": 16, **rollout}))
    scorer = scorer or build_scorer([ExactMatchReward()])
    return RolloutSampler(*about, scorer, tokenizer, 3, environment, model, teacher)


def records(tokenizer: Tokenizer, *prompts: str) -> list[Record]:
    return [Record(i, prompt, "03", tokenizer.prompt(prompt), ()) for i, prompt in enumerate(prompts)]
