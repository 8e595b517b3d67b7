"""Experience that a step learns from: whose samples, in which order, in parts of which size."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.rollouts.sampler import Records, group
from trainer.batch import TOKENS, Sequence
from trainer.config import PackingConfig
from trainer.data.records import Record
from trainer.errors import DataError, RolloutError
from trainer.rollouts.experience import Experience
from trainer.rollouts.feed import Draw
from trainer.rollouts.schedules import Rollout
from trainer.trajectory import TrajectoryGroup

LONGEST = 6


class Algorithm:
    """One sequence for each group: the record's number, and `length` - 1 tokens after it."""

    minibatches = 1

    def __init__(self, *needs: str, length: int = 2) -> None:
        self.needs, self.length = frozenset(needs), length

    def keep_group(self, group: TrajectoryGroup) -> bool:
        return True

    def sequences(self, records: Seq[Record], groups: Seq[TrajectoryGroup], step: int = 0) -> list[Sequence]:
        tokens = (7,) * (self.length - 1)
        return [Sequence((g.prompt_ids[0],), tokens, {"lag": [float(step)] * len(tokens)}) for g in groups]


class Schedule:
    """Hands out what it is given; notes what it is told to do ahead."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers
        self.told: list[tuple[int, int]] = []

    def take(self, step: int, steps_left: int) -> Any:
        record = Records()[0]
        return iter([Rollout(Draw(number, record), group(number, step)) for number in self._numbers])

    def ahead(self, step: int, steps_left: int) -> None:
        self.told.append((step, steps_left))


def experience(algorithm: Algorithm, schedule: Schedule | None, **config: Any) -> Experience:
    settings = {
        "seed": 0,
        "order": None,
        "batch": 4,
        "micro_batch": 2,
        "packing": None,
        "parallel": SimpleNamespace(data=1),
    } | config
    algorithm.samples_per_prompt = 0  # so that it builds no schedule of its own
    built = Experience(SimpleNamespace(**settings), algorithm, Records(), None, LONGEST)  # type: ignore[arg-type]
    built.schedule = schedule  # type: ignore[assignment]
    return built


def parts(step: Experience) -> list[int]:
    """How many sequences each forward pass has; the passes say nothing."""
    sizes = []
    while (fields := step.part()) is not None:
        sizes.append(fields[TOKENS].shape[0])
        step.fill({})
    return sizes


def test_records_that_were_drawn_ahead_are_not_drawn_again() -> None:
    step = experience(Algorithm(), Schedule(0))
    for drawn, consumed, expected in ((9, 4, 9), (4, 9, 9), (9, 9, 9)):
        step.feed.drawn = drawn
        step.begin(1, consumed, 5)
        assert step.feed.drawn == expected


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_which_answer_was_faster_does_not_count(order: tuple[int, ...]) -> None:
    schedule = Schedule(*order)
    step = experience(Algorithm(), schedule)
    step.begin(3, 0, 5)
    assert step.part() is None
    assert step.batch()[TOKENS][:, 0].tolist() == [0, 1, 2, 3]
    assert schedule.told == [(3, 4)], "the steps after this one sample once all of its rollouts are there"


@pytest.mark.parametrize(
    ("micro_batch", "ranks", "expected"), [(2, 1, [2, 2, 1]), (2, 2, [4, 1]), (1, 1, [1] * 5), (5, 1, [5]), (6, 1, [5])]
)
def test_a_part_fills_a_forward_pass_of_every_rank(micro_batch: int, ranks: int, expected: list[int]) -> None:
    algorithm = Algorithm("old_logprobs")
    step = experience(algorithm, Schedule(*range(5)), micro_batch=micro_batch, parallel=SimpleNamespace(data=ranks))
    step.begin(1, 0, 1)
    assert parts(step) == expected


def test_a_packed_part_is_full_at_the_tokens_of_every_rank() -> None:
    packing = PackingConfig(max_tokens=4)
    step = experience(Algorithm("x"), Schedule(*range(5)), packing=packing, parallel=SimpleNamespace(data=1))
    step.begin(1, 0, 1)
    sizes = []
    while step.part() is not None:
        sizes.append(len(step._part))
        step.fill({})
    assert sizes == [2, 2, 1]


def test_what_the_models_said_goes_to_its_tokens() -> None:
    step = experience(Algorithm("old_logprobs"), Schedule(0, 1))
    step.begin(1, 0, 1)
    fields = step.part()
    assert fields is not None
    step.fill({"old_logprobs": fields[TOKENS].float() * 10})
    assert step.part() is None
    assert [s.per_token["old_logprobs"] for s in step._sequences] == [[0.0], [10.0]]


@pytest.mark.parametrize(("length", "fits"), [(LONGEST, True), (LONGEST + 1, False)])
def test_a_sequence_may_be_as_long_as_the_model_takes(length: int, fits: bool) -> None:
    step = experience(Algorithm(length=length), Schedule(0))
    step.begin(1, 0, 1)
    step.part()
    if fits:
        assert torch.count_nonzero(step.batch()[TOKENS]) == length - 1
    else:
        with pytest.raises(DataError, match=f"{length} tokens, the model takes {LONGEST}"):
            step.batch()


def test_a_step_without_a_sequence_is_refused() -> None:
    step = experience(Algorithm(), Schedule())
    step.begin(1, 0, 1)
    step.part()
    with pytest.raises(RolloutError, match="stop_token_ids"):
        step.batch()
