"""What a rollout is: a prompt's samples, who wrote which token, and what each is worth."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.rewards.base import Score


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a sample were written by weight version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One answer. `logprobs` are the engine's, of the chosen tokens: the behaviour policy."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[VersionSpan, ...]

    @property
    def oldest(self) -> int | None:
        """The oldest version that wrote one of its tokens; None if it has none, or nobody said."""
        return min((span.version for span in self.versions if span.end > span.start), default=None)

    def version_lags(self, version: int) -> list[float]:
        """For each token, how many versions `version` is ahead of the one that wrote it. Tokens that no span covers,
        and those of a version that is ahead itself (training was rolled back), count as current."""
        lags = [0.0] * len(self.token_ids)
        for span in self.versions:
            lag = float(max(version - span.version, 0))
            lags[span.start : span.end] = [lag] * len(lags[span.start : span.end])
        return lags


@dataclass(frozen=True)
class Group:
    """All samples of one prompt with their scores."""

    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    scores: tuple[Score, ...]

    def renumbered(self, by: int) -> Group:
        """As if every version that wrote it had a number so much higher."""
        spans = [tuple(replace(span, version=span.version + by) for span in s.versions) for s in self.samples]
        samples = [replace(s, versions=found) for s, found in zip(self.samples, spans, strict=True)]
        return replace(self, samples=tuple(samples))

    @property
    def rewards(self) -> list[float]:
        return [score.total for score in self.scores]

    @property
    def oldest(self) -> int | None:
        """The oldest version that wrote a token of the group."""
        known = [sample.oldest for sample in self.samples]
        return min((version for version in known if version is not None), default=None)
