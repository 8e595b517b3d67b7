"""Random groups and preferences, and the batch that an algorithm makes of them, in float64 and differentiable."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch

from tests.trainer.rollouts.trajectories import answer
from trainer.algorithms import build_algorithm
from trainer.algorithms.base import ENTROPY, OLD_LOGPROBS, REFERENCE_LOGPROBS, VALUES, Algorithm, LossOutput
from trainer.batch import MASK, TOKENS, Fields, Rows, Sequence, lay_out, plan_rows, take_back
from trainer.config import AlgorithmConfig
from trainer.data.records import Record
from trainer.rewards import Score
from trainer.trajectory import TrajectoryGroup, VersionSpan

VOCAB = 11
LONGEST = 6


def groups(count: int, samples: int, seed: int) -> list[TrajectoryGroup]:
    """Answers of 1 to 6 tokens, the longest truncated; begun by the weights of step 3 and ended by those of 5, or
    all by one of them. A teacher has an opinion of every token."""
    rng, teacher = random.Random(seed), random.Random(seed + 1)
    made = []
    for _ in range(count):
        answers = []
        for _ in range(samples):
            length = rng.randint(1, LONGEST)
            cut = rng.randint(0, length)
            sample = answer(
                token_ids=tuple(rng.randrange(VOCAB) for _ in range(length)),
                logprobs=tuple(-1 - 3 * rng.random() for _ in range(length)),
                finish_reason="length" if length == LONGEST else "stop",
                versions=(VersionSpan(3, 0, cut, step=3), VersionSpan(5, cut, length, step=5)),
            )
            opinion = tuple(-1 - 3 * teacher.random() for _ in range(length))
            answers.append(replace(sample, teacher_logprobs=opinion))
        scores = tuple(Score(rng.random() if rng.random() < 0.7 else 1.0) for _ in answers)
        made.append(
            TrajectoryGroup(tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))), tuple(answers), scores)
        )
    return made


def preferences(count: int, seed: int) -> list[Record]:
    """Answers of 1 to 6 tokens."""
    rng = random.Random(seed)

    def ids() -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6)))

    return [Record(i, "", "", ids(), (), ids(), ids()) for i in range(count)]


BATCH = groups(4, 5, seed=1)
SAMPLES = [sample for group in BATCH for sample in group.trajectories]
BEHAVIOUR = [torch.tensor(s.logprobs, dtype=torch.float32).double() for s in SAMPLES]  # in a batch's precision


@dataclass
class Trial:
    """One batch through one algorithm. The log-probs are of `logits`, one [tokens, V] for each sequence; `old`,
    `reference` and `values` are one [tokens] each. `packed` lays several sequences in a row."""

    algorithm: Algorithm
    sequences: list[Sequence]
    packed: bool = False
    seed: int = 0
    logits: list[torch.Tensor] = field(init=False)
    given: dict[str, list[torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        lengths = [len(s.continuation) for s in self.sequences]
        self.logits = [torch.randn(n, VOCAB, generator=generator, dtype=torch.float64) for n in lengths]
        for logits in self.logits:
            logits.requires_grad_(True)
        noise = dict.fromkeys((OLD_LOGPROBS, REFERENCE_LOGPROBS), 0.4)
        self.given = {
            name: [
                p.detach() + scale * torch.randn(len(p), generator=generator, dtype=torch.float64)
                for p in self.logprobs
            ]
            for name, scale in noise.items()
        }
        self.given[VALUES] = [torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]

    @property
    def logprobs(self) -> list[torch.Tensor]:
        """[tokens] of each sequence, with gradient."""
        pairs = zip(self.logits, self.sequences, strict=True)
        return [logits.log_softmax(-1)[range(len(logits)), list(s.continuation)] for logits, s in pairs]

    @property
    def entropies(self) -> list[torch.Tensor]:
        """[tokens] of each sequence, of the whole distribution, with gradient."""
        return [-(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1) for logits in self.logits]

    @property
    def rows(self) -> Rows:
        if self.packed:
            return plan_rows(self.sequences, 40)
        return [[i] for i in range(len(self.sequences))]

    def fields(self) -> Fields:
        """Prepared, in float64, with what the algorithm needs and no more."""
        fields = lay_out(self.sequences, self.rows, packed=self.packed)
        fields = {k: v.double() if v.is_floating_point() else v for k, v in fields.items()}
        for name in self.algorithm.needs:
            fields[name] = self.scatter(self.given[name], fields)
        return self.algorithm.prepare(fields)

    def scatter(self, values: list[torch.Tensor], fields: Fields) -> torch.Tensor:
        """One [tokens] for each sequence, at their places in [B, T]; differentiable."""
        places = torch.arange(fields[MASK].numel()).reshape(fields[MASK].shape)
        index = torch.cat(take_back(places, self.sequences, self.rows))
        flat = torch.zeros(fields[MASK].numel(), dtype=torch.float64).index_add(0, index, torch.cat(values))
        return flat.reshape(fields[MASK].shape)

    def loss(self) -> LossOutput:
        fields = self.fields()
        assert fields[TOKENS].shape[1] == fields[MASK].shape[1] + 1
        fields[ENTROPY] = self.scatter(self.entropies, fields)
        return self.algorithm.loss(self.scatter(self.logprobs, fields), fields)

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """By all logits, flat."""
        gradients = torch.autograd.grad(loss, self.logits, retain_graph=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in gradients])

    def check(self, expected: torch.Tensor, rtol: float = 1e-9, atol: float = 1e-10) -> LossOutput:
        """The algorithm's mean loss and its gradient are `expected`'s."""
        output = self.loss()
        mine = output.total / output.denominator
        torch.testing.assert_close(mine, expected, rtol=rtol, atol=atol)
        gradient = self.gradient(mine)
        torch.testing.assert_close(gradient, self.gradient(expected), rtol=max(rtol, 1e-7), atol=atol)
        assert gradient.abs().sum() > 0
        return output


def trial(config: AlgorithmConfig, *, packed: bool = False, step: int = 5) -> Trial:
    """BATCH through the algorithm of a configuration."""
    algorithm = build_algorithm(config, LONGEST)
    return Trial(algorithm, algorithm.sequences([], BATCH, step), packed=packed)
