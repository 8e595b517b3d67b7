"""Rollouts through the gateway: prompts in; samples, log-probs, weight versions and scores out. On rank 0 only."""

from trainer.rollout.client import GenerateClient, Request
from trainer.rollout.samples import Group, Sample, VersionSpan
from trainer.rollout.service import Rollouts

__all__ = ["GenerateClient", "Group", "Request", "Rollouts", "Sample", "VersionSpan"]
