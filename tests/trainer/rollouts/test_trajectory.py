"""Turns end to end: what belongs to which token, and what learns from it."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest
import torch

from tests.trainer.algorithms import reference as plain
from tests.trainer.rollouts.generate_server import routed
from trainer.algorithms.advantages import gae
from trainer.algorithms.base import ADVANTAGES, BEHAVIOUR_LOGPROBS, ENTROPY, REWARDS
from trainer.algorithms.policy import Grpo, Reinforce
from trainer.batch import MASK, TOKENS, Sequence, collate, lay_out
from trainer.config import GrpoConfig, ReinforceConfig
from trainer.rewards import Score
from trainer.routing import joined, of_trajectory, tokens
from trainer.trajectory import StepsOfVersions, Trajectory, TrajectoryGroup, Turn, VersionSpan

CALL = Turn((11, 12, 13), (-0.1, -0.2, -0.3), (VersionSpan(4, 0, 2, 4), VersionSpan(5, 2, 3, 5)), reward=0.25)
TOOL = Turn((21, 22))
ANSWER = Turn((31, 32), (-0.4, -0.5), (VersionSpan(6, 0, 2, 6),), reward=0.5)
PLAYED = Trajectory((CALL, TOOL, ANSWER), "stop")


def test_every_token_has_its_own() -> None:
    assert PLAYED.token_ids == (11, 12, 13, 21, 22, 31, 32)
    assert PLAYED.mask == (1, 1, 1, 0, 0, 1, 1)
    assert PLAYED.logprobs == (-0.1, -0.2, -0.3, 0, 0, -0.4, -0.5)
    assert PLAYED.versions == (VersionSpan(4, 0, 2, 4), VersionSpan(5, 2, 3, 5), VersionSpan(6, 5, 7, 6))
    assert PLAYED.policy_tokens == 5
    assert PLAYED.oldest == 4
    assert PLAYED.lags(6) == [2, 2, 1, 0, 0, 0, 0]


def test_turns_have_their_own_rewards_and_the_rest_is_at_the_end() -> None:
    assert PLAYED.rewards(2.0) == [0, 0, 0.25, 0, 0, 0, 1.75]
    assert replace(PLAYED, turns=(CALL, TOOL)).rewards(1.0) == [0, 0, 1.0, 0, 0], "a tool's tokens get no reward"


def test_it_survives_a_file() -> None:
    group = TrajectoryGroup(
        (1, 2), (PLAYED, replace(PLAYED, finish_reason="length")), (Score(1.0, {"a": 1.0}), Score(0.1))
    )
    assert TrajectoryGroup.from_json(json.loads(json.dumps(group.to_json()))) == group
    steps = StepsOfVersions()
    steps.published(1, 0)
    steps.published(5, 30)
    assert [span.step for span in group.dated(steps).trajectories[0].versions] == [0, 30, 30]


@pytest.mark.parametrize("packed", [False, True])
def test_credit_goes_over_gaps_and_ends_with_the_sequence(packed: bool) -> None:
    """Advantages are those of the trained tokens alone, as if nothing lay between them: also where sequences share a
    row, and where a gap stands at either end."""
    masks = [(1, 1, 0, 0, 1), (0, 1, 0, 1, 1, 1), (1, 0), (1,)]
    sequences = [
        Sequence((1, 2), (3,) * len(mask), {"reward": [0.0] * len(mask)}, mask=tuple(map(float, mask)))
        for mask in masks
    ]
    rows = [[0, 1], [2, 3]] if packed else [[0], [1], [2], [3]]
    fields = lay_out(sequences, rows, packed=packed)
    generator = torch.Generator().manual_seed(5)
    shape = fields[MASK].shape
    rewards, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages, returns = gae(rewards * fields[MASK], values, fields, 0.9, 0.8)
    for number, row in enumerate(rows):
        start = 0
        for index in row:
            end = start + sequences[index].length - 1
            trained = [t for t in range(start, end) if fields[MASK][number, t] > 0]
            r, v = ([x[number, t].item() for t in trained] for x in (rewards, values))
            expected = plain.gae(r, v, 0.9, 0.8)
            assert advantages[number, trained].tolist() == pytest.approx(expected)
            assert returns[number, trained].tolist() == pytest.approx([a + b for a, b in zip(expected, v, strict=True)])
            start += sequences[index].length
    assert not advantages[fields[MASK] == 0].any()
    assert not returns[fields[MASK] == 0].any()


def test_what_a_tool_wrote_gets_no_gradient() -> None:
    group = TrajectoryGroup((1,), (PLAYED, replace(PLAYED, turns=(CALL,))), (Score(1.0), Score(0.0)))
    algorithm = Grpo(GrpoConfig())
    sequences = algorithm.sequences([], [group])
    fields = algorithm.prepare(collate(sequences))
    logprobs = fields[BEHAVIOUR_LOGPROBS].clone().requires_grad_(True)
    output = algorithm.loss(logprobs, fields | {ENTROPY: torch.zeros_like(logprobs)})
    output.total.backward()
    assert fields[MASK].tolist() == [[1, 1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0, 0]]
    assert (logprobs.grad != 0).tolist() == [[True] * 3 + [False] * 2 + [True] * 2, [True] * 3 + [False] * 4]
    assert output.tokens.item() == 8
    assert fields[BEHAVIOUR_LOGPROBS][0].tolist() == pytest.approx(PLAYED.logprobs)
    assert fields[ADVANTAGES][0].unique().numel() == 1


def test_rewards_by_turn_reach_the_algorithm() -> None:
    group = TrajectoryGroup((1,), (PLAYED,), (Score(2.0),))
    algorithm = Reinforce(ReinforceConfig(samples_per_prompt=1, baseline=False))
    (sequence,) = algorithm.sequences([], [group])
    assert sequence.per_token[REWARDS] == [0, 0, 0.25, 0, 0, 0, 1.75]
    fields = collate([sequence])
    assert fields[TOKENS].tolist() == [[1, 11, 12, 13, 21, 22, 31, 32]]


def rows(*experts: int) -> str:
    """The routing of as many tokens: one layer, two experts each."""
    return routed([[[e, e + 1]] for e in experts])


def test_turns_have_the_routing_of_what_none_before_had() -> None:
    """A prompt of two tokens; the last token of the last turn has none."""
    turns = (replace(CALL, routing=rows(0, 1, 2, 3)), TOOL, replace(ANSWER, routing=rows(4, 5, 6, 7)))
    played = replace(PLAYED, turns=turns)
    routing = of_trajectory(2, played)
    assert routing is not None
    assert routing[:, 0, 0].tolist() == list(range(8))
    group = TrajectoryGroup((1, 2), (played,), (Score(1.0),))
    assert TrajectoryGroup.from_json(json.loads(json.dumps(group.to_json()))) == group
    unrecorded = of_trajectory(2, replace(played, turns=(turns[0], TOOL, ANSWER)))
    assert unrecorded is not None
    assert unrecorded[:, 0].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4], *[[-1, -1]] * 4]
    assert of_trajectory(2, PLAYED) is None
    (sequence,) = Grpo(GrpoConfig(samples_per_prompt=2)).sequences([], [replace(group, scores=(Score(1.0),))])
    assert sequence.routing is not None
    assert sequence.routing.equal(routing)


def test_routing_of_an_answer_that_came_in_parts() -> None:
    assert joined(None, None) is None
    assert joined(rows(1), None) == rows(1)
    assert joined(None, rows(2)) == rows(2)
    whole = joined(rows(1, 2), rows(3))
    assert whole == rows(1, 2, 3)
    assert tokens(whole) == 3
    assert tokens(None) == 0


@pytest.mark.parametrize("text", ["no base64!", base64.b64encode(b"no array").decode(), ""])
def test_what_is_no_routing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="routing that is no array"):
        joined(None, text)
