"""Trajectories for tests."""

from __future__ import annotations

from trainer.trajectory import Trajectory, Turn, VersionSpan


def answer(
    token_ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    finish_reason: str = "stop",
    versions: tuple[VersionSpan, ...] = (),
) -> Trajectory:
    """One turn of the policy."""
    return Trajectory((Turn(token_ids, logprobs, versions),), finish_reason)
