"""A loss of one's own in place of the clipped one (policy.py): a function returns the loss of each token, [B, T]. With
w, the correction's weight, a token adds to the step's loss

    w loss(tensors) + kl_coef KL - entropy_coef H

It may return (loss, {name: values [B, T]}): the step's metrics have the means over all trained tokens, as
`custom/NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.algorithms.advantages import group_normalized, leave_one_out, sequence_mean
from trainer.algorithms.base import ADVANTAGES, BEHAVIOUR_LOGPROBS, ENTROPY, REFERENCE_LOGPROBS
from trainer.algorithms.correction import Correction
from trainer.algorithms.policy import PolicyGradient
from trainer.batch import MASK, Fields, sequence_sum, to_tokens
from trainer.config import CustomConfig
from trainer.config.strict import load_target
from trainer.errors import ConfigError

KEY = "algorithm.loss"


@dataclass(frozen=True)
class PolicyTensors:
    """The inputs of a loss. All tensors are float [B, T] about the token at t + 1, and mean something only
    where `mask` is 1. Rows may hold several answers, packed, so sums over an answer are taken with `over_answer`.

    Under tensor, context and pipeline parallelism the function sees whole sequences, as without; under data parallelism
    each rank sees its rows alone, and one call sees one micro-batch.
    """

    logprobs: torch.Tensor  # of the current policy, with gradient
    old_logprobs: torch.Tensor  # of the trainer's policy at the start of the step
    behaviour_logprobs: torch.Tensor  # of the engine, when it sampled
    reference_logprobs: torch.Tensor | None  # of the initial weights; only with `kl_coef` above 0
    advantages: torch.Tensor
    entropy: torch.Tensor  # of the current policy over the whole vocabulary, with gradient
    weights: torch.Tensor  # the correction's, which the loss will be multiplied by
    mask: torch.Tensor  # 1 on trained tokens
    options: Mapping[str, Any]  # `algorithm.options`
    fields: Fields

    def over_answer(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over each answer's trained tokens, at each of them. Differentiable."""
        return to_tokens(sequence_sum(values, self.fields), self.fields)

    def mean_over_answer(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over each answer's trained tokens, at each of them. Differentiable."""
        return to_tokens(sequence_mean(values, self.fields)[0], self.fields)


class Custom(PolicyGradient[CustomConfig]):
    """The loss that the configuration names. The proximal policy is the trainer's at the start of the step, so that
    `old_logprobs` are there whenever a step has several updates."""

    kl_in_loss = True
    own_proximal = True

    def __init__(self, config: CustomConfig, max_tokens: int | None = None) -> None:
        """Raises ConfigError for a function that cannot be imported."""
        super().__init__(config, max_tokens)
        self._function = load_target(config.loss, KEY)
        if not callable(self._function):
            raise ConfigError(KEY, f"{config.loss} is a {type(self._function).__name__}", "Name a function")

    def credit(self, rewards: list[float]) -> list[float]:
        if self.config.advantages == "reward":
            return rewards
        if self.config.advantages == "leave_one_out":
            return leave_one_out(rewards)
        return group_normalized(rewards, scale=self.config.advantages == "normalized")

    def _surrogate(
        self, logprobs_BT: torch.Tensor, old_BT: torch.Tensor, correction: Correction, fields: Fields
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        tensors = PolicyTensors(
            logprobs=logprobs_BT,
            old_logprobs=old_BT,
            behaviour_logprobs=fields[BEHAVIOUR_LOGPROBS],
            reference_logprobs=fields.get(REFERENCE_LOGPROBS),
            advantages=fields[ADVANTAGES],
            entropy=fields[ENTROPY],
            weights=correction.weights,
            mask=fields[MASK],
            options=self.config.options,
            fields=fields,
        )
        found = self._function(tensors)
        loss, said = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        self._check("its loss", loss, logprobs_BT)
        if not loss.requires_grad and logprobs_BT.requires_grad:
            raise self._wrong("its loss has no gradient", "Compute it from `logprobs`, without detaching all of them")
        if not isinstance(said, Mapping):
            raise self._wrong(f"it returned a {type(said).__name__} to report", "Return (loss, {name: values})")
        for name, values in said.items():
            self._check(f"{name}, which it reports,", values, logprobs_BT)
        return loss, {f"custom/{name}": (values.detach() * fields[MASK]).sum() for name, values in sorted(said.items())}

    def _check(self, what: str, values: Any, like: torch.Tensor) -> None:
        if not isinstance(values, torch.Tensor) or values.shape != like.shape:
            shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            problem = f"{what} is {shape}, not a tensor of {tuple(like.shape)}"
            raise self._wrong(problem, "Return a value for each token, not their mean")

    def _wrong(self, problem: str, advice: str) -> ConfigError:
        return ConfigError(KEY, f"{self.config.loss}: {problem}", advice)
