"""The teacher of a distillation: what it is asked, what becomes of its answers, and of a teacher that is of no use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.rollouts.client import client
from tests.trainer.rollouts.generate_server import GenerateServer, serve_app
from tests.trainer.rollouts.teacher_server import TeacherServer
from trainer.config import CallableEnvironment, EvalConfig, TeacherConfig
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError, RolloutError
from trainer.rollouts.sampling import RolloutSampler
from trainer.tiny_model import write_tiny_model
from trainer.trajectory import Trajectory, TrajectoryGroup

Make = Callable[..., RolloutSampler]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the student's vocabulary, with other weights."""
    path = tmp_path_factory.mktemp("teacher") / "model"
    write_tiny_model(path, seed=7)
    return path


@pytest.fixture(scope="module")
def running_teacher(other_model: Path) -> Iterator[TeacherServer]:
    server = TeacherServer(other_model)
    with serve_app(server.app) as server.url:
        yield server


@pytest.fixture
def teacher(running_teacher: TeacherServer) -> Iterator[TeacherServer]:
    yield running_teacher
    running_teacher.failures, running_teacher.longest, running_teacher.broken = [], 1000, None
    running_teacher.tokenizes, running_teacher.requests, running_teacher.headers = True, [], []


@pytest.fixture
def taught(server: GenerateServer, tokenizer: Tokenizer, teacher: TeacherServer) -> Make:
    """Makes the student's client, which asks the teacher."""

    def made(environment: Any = None, **config: Any) -> RolloutSampler:
        asked = TeacherConfig(**{"url": teacher.url, "model": "wise", "retry_s": 60.0} | config)
        return client(server.url, tokenizer, None, environment, teacher=asked, max_tokens=24)

    return made


def opinion(teacher: TeacherServer, record: Record, trajectory: Trajectory) -> list[float]:
    """The log-probabilities that the teacher's model gives the tokens after the prompt."""
    prompt = record.prompt_ids
    return teacher.logprobs([*prompt, *trajectory.token_ids])[len(prompt) - 1 :]


def sampled(running: RolloutSampler, record: Record, n: int = 3, *, taught: bool = True) -> TrajectoryGroup:
    group = (running.round if taught else running.submit)(record, n, 0).result(timeout=60)
    assert isinstance(group, TrajectoryGroup)
    return group


@pytest.mark.parametrize("form", ["prompt_logprobs", "echo"])
def test_every_sampled_token_has_the_teachers_logprob(
    taught: Make, teacher: TeacherServer, record: Record, form: Any
) -> None:
    with taught(form=form) as running:
        group = sampled(running, record)
        asked = len(teacher.requests)
        assert sampled(running, record, 1, taught=False).trajectories[0].teacher_logprobs is None
        running.evaluate([record], EvalConfig())
    assert len(teacher.requests) == asked == 1 + 3, "a trial, and once a trajectory; evaluations do not ask"
    for trajectory in group.trajectories:
        assert trajectory.teacher_logprobs == pytest.approx(opinion(teacher, record, trajectory))
        assert trajectory.teacher_logprobs != trajectory.logprobs
    assert TrajectoryGroup.from_json(json.loads(json.dumps(group.to_json()))) == group


def test_what_the_environment_wrote_is_not_the_teachers_to_judge(
    taught: Make, teacher: TeacherServer, record: Record
) -> None:
    environment = CallableEnvironment(target="tests.trainer.environments.functions:Countdown", workers=1)
    with taught(environment) as running:
        (trajectory,) = sampled(running, record, 1).trajectories
    assert 0.0 in trajectory.mask
    expected = opinion(teacher, record, trajectory)
    assert trajectory.teacher_logprobs == pytest.approx([p * m for p, m in zip(expected, trajectory.mask, strict=True)])


def test_a_teacher_that_is_busy_or_away_for_a_moment_is_asked_again(
    taught: Make, teacher: TeacherServer, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as error:
        taught(api_key_env="TEACHER_KEY")
    assert error.value.key == "algorithm.teacher.api_key_env"
    monkeypatch.setenv("TEACHER_KEY", "secret")
    with taught(api_key_env="TEACHER_KEY") as running:
        teacher.failures = [503, 429, 500]
        assert len(sampled(running, record, 1).trajectories) == 1
    assert teacher.failures == []
    assert {headers["authorization"] for headers in teacher.headers} == {"Bearer secret"}


def test_a_trajectory_that_it_cannot_take_is_left_out(taught: Make, teacher: TeacherServer, record: Record) -> None:
    with taught() as running:
        lengths = [len(t.token_ids) for t in sampled(running, record, 6).trajectories]
        teacher.longest = len(record.prompt_ids) + max(lengths) - 1
        running.stats()
        group = sampled(running, record, 6)
        left_out = lengths.count(max(lengths))
        assert [len(t.token_ids) for t in group.trajectories] == [n for n in lengths if n < max(lengths)]
        assert running.stats()["trajectories_without_teacher"] == left_out
        assert len(group.scores) == 6 - left_out


def test_one_that_stays_away_ends_the_run_by_name(taught: Make, teacher: TeacherServer, record: Record) -> None:
    with taught(retry_s=0.3) as running:
        teacher.failures = [503] * 50
        with pytest.raises(RolloutError, match=r"within 0.3 s; last: HTTP 503.*algorithm.teacher.url"):
            sampled(running, record, 1)
    with pytest.raises(RolloutError, match="Start it"):
        taught(url="http://127.0.0.1:9", retry_s=0.3)


def test_a_key_that_is_taken_back_ends_the_run(taught: Make, teacher: TeacherServer, record: Record) -> None:
    with taught() as running:
        teacher.failures = [401]
        with pytest.raises(RolloutError, match="refused \\(HTTP 401") as error:
            sampled(running, record, 1)
    assert error.value.status == 401


NONSENSE: dict[str, dict[str, Any]] = {
    "none": {"text": "7"},
    "too few": {"prompt_logprobs": [None, {"3": {"logprob": -1.0}}]},
    "of other tokens": {"prompt_logprobs": [None, *([{"9999": {"logprob": -1.0}}] * 7)]},
    "not a number": {"prompt_logprobs": [None, *([{str(i): {"logprob": float("nan")} for i in range(20)}] * 7)]},
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
def test_what_is_no_logprob_is_never_trained_on(
    taught: Make, teacher: TeacherServer, record: Record, answer: dict[str, Any]
) -> None:
    with taught() as running:
        teacher.broken = json.loads(json.dumps(answer).replace("NaN", '"nan"'))
        with pytest.raises(RolloutError, match=r"something else than log-probs.*algorithm.teacher.form"):
            sampled(running, record, 1)
    with pytest.raises(ConfigError, match="gives no log-probs of a prompt"):
        taught()


def test_a_token_that_the_teacher_rules_out_counts_as_the_least_there_is(
    taught: Make, teacher: TeacherServer, record: Record
) -> None:
    """Servers write -9999 for a probability of 0."""
    with taught(min_logprob=-2.0) as running:
        (trajectory,) = sampled(running, record, 1).trajectories
    expected = opinion(teacher, record, trajectory)
    assert trajectory.teacher_logprobs == pytest.approx([max(p, -2.0) for p in expected])
    assert min(expected) < -2.0


def test_another_tokenizer_is_refused(taught: Make, teacher: TeacherServer, other_model: Path, tmp_path: Path) -> None:
    """By what the server makes of texts, or by the teacher's own files where the server does not say."""
    write_tiny_model(tmp_path / "permuted", characters="0123456789-=+", hidden_size=32)
    teacher.tokenizer = Tokenizer(tmp_path / "permuted")
    try:
        with pytest.raises(ConfigError, match="wise has another tokenizer"):
            taught()
    finally:
        teacher.tokenizer = Tokenizer(other_model)
    with pytest.raises(ConfigError, match=r"2 of the student's tokens are others there, such as '\+'") as error:
        taught(tokenizer=str(tmp_path / "permuted"))
    assert error.value.key == "algorithm.teacher.tokenizer"
    teacher.tokenizes = False
    with pytest.raises(ConfigError, match="does not say how it tokenises") as error:
        taught()
    assert error.value.key == "algorithm.teacher.tokenizer"
    taught(tokenizer=str(other_model)).close()


def test_the_texts_that_tokenizers_are_compared_by_need_the_whole_vocabulary(tokenizer: Tokenizer) -> None:
    found = {token for text in tokenizer.texts() for token in tokenizer.plain(text)}
    assert found == set(range(tokenizer.size))
