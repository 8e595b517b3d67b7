"""Rules, users' functions, weighted sums, rewards that see all samples of a prompt; what becomes of one that fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.trainer.faults.runs import is_gone
from tests.trainer.rollouts.client import client
from tests.trainer.rollouts.generate_server import GenerateServer
from tests.waiting import eventually, wait_until
from trainer.config import (
    CallableReward,
    EvalConfig,
    ExactMatchReward,
    FormatReward,
    GroupReward,
    RegexReward,
    RewardConfig,
)
from trainer.data.records import Record
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigError, RewardError
from trainer.metrics.rollouts import rollout_metrics
from trainer.rewards import ComparingReward, Reward, RewardRequest, SampleGroup, Score, Scorer, Weighted, build_scorer
from trainer.rewards.pool import WorkerPool
from trainer.rewards.rules import Format
from trainer.rewards.worker import _batches
from trainer.rollouts.sampling import RolloutSampler
from trainer.worker_process import WorkerProcess, start_worker

HERE = "tests.trainer.rewards.functions"


def ask(scorer: Scorer, *answers: str) -> list[Score]:
    """The scores of one prompt's answers; the last one was cut off."""

    async def asked() -> list[Score]:
        requests = [
            RewardRequest(
                "3+4=", answer, "07", {"bonus": 0.5}, ({"role": "assistant", "content": answer},), len(answer),
                truncated=answer == answers[-1],
            )
            for answer in answers
        ]  # fmt: skip
        return await scorer.compared(requests, await asyncio.gather(*(scorer(request) for request in requests)))

    return asyncio.run(asked())


def scoring(*configs: RewardConfig) -> contextlib.closing[Scorer]:
    return contextlib.closing(build_scorer(configs))


def misbehaving(**options: Any) -> contextlib.closing[Scorer]:
    """Of one worker unless told otherwise, which does what the answer says."""
    return scoring(CallableReward(**{"target": f"{HERE}:misbehaves", "workers": 1, **options}))


def test_exact_match() -> None:
    with scoring(ExactMatchReward()) as scorer:
        assert [s.total for s in ask(scorer, "07", " 07\n", "7", "", "077")] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_regex() -> None:
    tagged = RegexReward(pattern=r"<a>(?P<answer>.*)</a>", name="a", workers=1)
    with scoring(RegexReward(pattern=r"^\d\d$", workers=1), tagged) as scorer:
        scores = ask(scorer, "99", "9", "so <a> 07 </a>", "so <a>08</a>")
    assert [s.parts for s in scores] == [
        {"regex": 1, "a": 0}, {"regex": 0, "a": 0}, {"regex": 0, "a": 1}, {"regex": 0, "a": 0},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("<think>x</think><answer>y</answer>", 1.0),
        ("  <think>x\nz</think>\n\n<answer>y</answer>\n", 1.0),
        ("<think>x</think><answer>y</answer> and more", 0.0),
        ("<answer>y</answer><think>x</think>", 0.0),
        ("<think></think><answer>y</answer>", 0.0),
        ("<think>x<think>y</think></think><answer>y</answer>", 0.0),
        ("<think>x</think><answer>y", 0.0),
        ("<think>" * 50_000, 0.0),
        ("", 0.0),
    ],
)
def test_format(answer: str, value: float) -> None:
    with scoring(FormatReward()) as scorer:
        assert ask(scorer, answer)[0].total == value


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("x\n</think>\n\n<answer>y</answer>", 1.0),
        ("<think>x</think><answer>y</answer>", 1.0),
        ("</think><answer>y</answer>", 0.0),
        ("<answer>y</answer>", 0.0),
    ],
)
def test_a_prompt_may_open_the_first_tag(answer: str, value: float) -> None:
    """As the templates of R1 and Qwen3's thinking models do."""
    request = RewardRequest("<｜User｜>2+2=<｜Assistant｜><think>\n", answer, "4")
    assert asyncio.run(Format(FormatReward())(request)) == value


def test_a_weighted_sum_keeps_its_parts() -> None:
    configs = [
        ExactMatchReward(weight=2.0),
        RegexReward(pattern=r"^\d\d$", weight=0.5, workers=1),
        RegexReward(pattern="7", workers=1),
        CallableReward(target=f"{HERE}:length", weight=0.1, workers=1),
        CallableReward(target=f"{HERE}:asynchronous", name="mine", workers=1),
        CallableReward(target=f"{HERE}:of_extra", name="extra", workers=1),
    ]
    with scoring(*configs) as scorer:
        result, wrong = ask(scorer, "07", "08")
        stats = scorer.stats()
    assert result.parts == {"exact_match": 1, "regex": 1, "regex_2": 1, "callable": 2, "mine": 1, "extra": 0.5}
    assert result.total == pytest.approx(2 + 0.5 + 1 + 0.2 + 1 + 0.5)
    assert wrong.parts["exact_match"] == 0
    assert stats["reward_failures/callable"] == 0
    assert stats["reward_time_ms/callable"] > 0


def test_a_reward_that_does_not_apply_is_left_out_of_the_sum() -> None:
    rewards = [ExactMatchReward(weight=0.5), CallableReward(target=f"{HERE}:of_some", workers=1, on_failure=-1.0)]
    ranked = GroupReward(target=f"{HERE}:ranked", workers=1)
    with scoring(*rewards, ranked) as scorer:
        one, two = ask(scorer, "nothing", "07")
        stats = scorer.stats()
    assert (one.parts, one.failures, one.total) == ({"exact_match": 0.0}, {}, 0.0)
    assert (two.parts, two.total) == ({"exact_match": 1.0, "callable": 1.0, "group": 2.0}, 3.5)
    assert (one.missing, two.full) == ([], True)
    assert (stats["reward_failures/callable"], stats["reward_failures/group"]) == (0, 0)
    assert (stats["reward_applied/callable"], stats["reward_applied/group"]) == (0.5, 0.5)
    assert "reward_applied/exact_match" not in stats


def test_a_column_says_which_records_a_reward_is_meant_for() -> None:
    mine = ExactMatchReward(where={"bonus": [0.25, 0.5]}, name="mine")
    other = RegexReward(pattern="0", where={"bonus": 2}, workers=1)
    ranked = GroupReward(target=f"{HERE}:ranked", workers=1, where={"bonus": 0.25})
    typo = ExactMatchReward(where={"bonus.of": 1}, name="typo", on_failure=0.0)
    with scoring(mine, other, ranked, typo) as scorer:
        (score,) = ask(scorer, "07")
    assert score.parts == {"mine": 1.0, "typo": 0.0}
    assert score.failures == {"typo": "the record has no column 'bonus.of' (where). Name it in data.extra_keys."}


def test_each_of_several_answers_is_right() -> None:
    async def asked() -> list[Score]:
        requests = [RewardRequest("2+2=", said, "4", alternatives=("four", "IV")) for said in ("4", "IV", "5")]
        return await asyncio.gather(*map(scorer, requests))

    tagged = RegexReward(pattern=r"(?P<answer>\w+)", workers=1)
    with scoring(ExactMatchReward(), tagged, CallableReward(target=f"{HERE}:length", workers=1)) as scorer:
        scores = asyncio.run(asked())
    assert [s.parts["exact_match"] for s in scores] == [1.0, 1.0, 0.0]
    assert [s.parts["regex"] for s in scores] == [1.0, 1.0, 0.0]
    assert [s.parts["callable"] for s in scores] == [1.0, 2.0, 1.0], "it is asked once"


def test_a_record_without_an_answer_is_a_failure() -> None:
    """No answer equals nothing, and each would be wrong in silence."""

    async def asked() -> Score:
        return await scorer(RewardRequest("3+4=", "<a></a>", " "))

    with scoring(ExactMatchReward(), RegexReward(pattern="<a>(?P<answer>.*)</a>", workers=1)) as scorer:
        score = asyncio.run(asked())
    assert score.missing == ["exact_match", "regex"]
    assert all("the record has no answer" in why for why in score.failures.values())


def test_full_needs_the_best_of_every_reward() -> None:
    with scoring(ExactMatchReward(), RegexReward(pattern=r"^\d\d$", workers=1)) as scorer:
        assert [score.full for score in ask(scorer, "07", "08")] == [True, False]


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([RegexReward(pattern="(")], "Correct the expression"),
        ([CallableReward(target="no.such.module:f")], "cannot import"),
        ([CallableReward(target=f"{HERE}:nothing")], "cannot import"),
        ([GroupReward(target="no.such.module:f")], "cannot import"),
        ([GroupReward(target=f"{HERE}:nothing")], "cannot import"),
        ([ExactMatchReward(name="a"), FormatReward(name="a")], "given twice"),
    ],
)
def test_what_the_user_can_correct_is_said_before_the_run(configs: list[RewardConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_scorer(configs)


def test_a_reward_that_fails_gives_its_configured_value_and_the_next_is_served(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    with misbehaving(timeout_s=3.0, on_failure=-1.0, workers=2) as scorer:
        bad = ["raise", "hang", "loop", "die", "no number", f"leave {left}"]
        scores = ask(scorer, *bad, "fine")
        assert [s.total for s in scores] == [-1.0] * 6 + [1.0]
        told = ["KeyError('missing')", "took over 3 s", "took over 3 s", "status 3", "finite", "took over 3 s"]
        assert [reason for s, reason in zip(scores, told, strict=False) if reason not in s.failures["callable"]] == []
        wait_until(lambda: is_gone(int(left.read_text())))
        assert scorer.stats()["reward_failures/callable"] == 6
        ask(scorer, "close")
        assert [s.total for s in ask(scorer, *["fine"] * 8)] == [1.0] * 8


def test_answers_that_wait_are_valued_together() -> None:
    """Those that have come while the first one was valued."""
    come = threading.Event()

    def requests() -> Iterator[bytes]:
        yield from (b"%d" % number for number in range(20))
        come.set()

    batches = _batches(requests(), 4)  # type: ignore[arg-type]  # only its lines are read
    first = next(batches)
    assert come.wait(60)
    rest = list(batches)
    assert [*first, *itertools.chain.from_iterable(rest)] == list(requests())
    assert max(map(len, rest)) == 4, "a batch at most"
    assert all(len(batch) == 4 for batch in rest[:-1])


@pytest.mark.parametrize(
    ("target", "fault"),
    [("blocks_the_loop", "block"), ("together", "raise"), ("together", "hang"), ("together", "die")],
)
def test_an_answer_that_spoils_those_beside_it_costs_them_nothing(target: str, fault: str) -> None:
    """Coroutines share a worker, and so do the answers of a batch."""
    with misbehaving(target=f"{HERE}:{target}", timeout_s=3.0 if fault in ("block", "hang") else 60.0) as scorer:
        spoilt = ask(scorer, *["fine"] * 6, fault, *["fine"] * 6)
    assert [bool(s.failures) for s in spoilt] == [False] * 6 + [True] + [False] * 6
    assert all(s.total >= 1.0 for s in spoilt if not s.failures)


def test_a_coroutine_that_is_late_is_cancelled_without_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.rewards.pool.GRACE_S", 60.0)  # a slow worker says it later
    before = psutil.Process().children()
    with misbehaving(target=f"{HERE}:sleeps", timeout_s=0.3) as scorer:
        started = [child for child in psutil.Process().children() if child not in before]
        assert "cancelled" in ask(scorer, "x")[0].failures["callable"]
        assert [child.is_running() for child in started] == [True]


def test_who_gives_up_waiting_leaves_the_next_one_a_worker_that_is_free() -> None:
    """The deadline ends a sample's wait, before its evaluation or in the middle; the worker is busy for longer."""
    with misbehaving(timeout_s=1.0, deadline_s=0.5) as scorer:
        for score in ask(scorer, "hang", "fine", "fine"):
            assert score.total == 0.0
            assert "within 0.5 s" in score.failures["callable"]

        # A second later the worker is killed; a sample that was sent there meanwhile would be taken for the culprit.
        def is_fine() -> bool:
            why = ask(scorer, "fine")[0].failures.get("callable", "")
            assert "took over" not in why
            return not why

        wait_until(is_fine, 120)


def test_workers_that_died_at_rest_are_replaced() -> None:
    before = {p.pid for p in psutil.Process().children()}
    with misbehaving(target=f"{HERE}:length") as scorer:
        for worker in psutil.Process().children():
            if worker.pid not in before:
                worker.kill()
        scores = ask(scorer, *["four"] * 3)
        assert [s.total for s in scores[1:]] == [4.0] * 2  # the news of the death may come after the first request


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    """One worker, which does what the answer says."""
    made = WorkerPool({"job": "callable", "target": f"{HERE}:misbehaves"}, 1, 60.0)
    await made.open()
    yield made
    await made.close()


FINE, DIE = ({"prompt": "", "answer": answer, "expected": "", "extra": {}} for answer in ("fine", "die"))


async def test_a_worker_is_replaced_even_when_the_one_who_found_it_dead_has_left(
    monkeypatch: pytest.MonkeyPatch, pool: WorkerPool
) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(module: str, job: Mapping[str, Any]) -> WorkerProcess:
        began.set()
        await go_on.wait()
        return await start_worker(module, job)

    monkeypatch.setattr("trainer.rewards.pool.start_worker", slowly)
    asking = asyncio.create_task(pool.ask(DIE))
    await asyncio.wait_for(began.wait(), 120)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    go_on.set()
    assert await asyncio.wait_for(pool.ask(FINE), 120) == 1.0


async def test_a_worker_that_is_replaced_when_its_pool_is_closed_is_ended_too(
    monkeypatch: pytest.MonkeyPatch, pool: WorkerPool
) -> None:
    """Its process would be left to the garbage collector, which has no event loop to close the pipes in."""
    go_on, end, ended = asyncio.Event(), WorkerProcess.end, list[int | None]()

    async def slowly(self: WorkerProcess) -> None:
        await go_on.wait()
        await end(self)
        ended.append(self.process.returncode)

    monkeypatch.setattr(WorkerProcess, "end", slowly)
    with pytest.raises(RewardError, match="status 3"):
        await pool.ask(DIE)
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    assert ended == [3]


async def test_without_workers_a_reward_fails_at_once_and_says_why(
    monkeypatch: pytest.MonkeyPatch, pool: WorkerPool
) -> None:

    async def refused(*_: object) -> WorkerProcess:
        raise OSError("no more processes")

    with monkeypatch.context() as patched:
        patched.setattr("trainer.rewards.pool.start_worker", refused)
        with pytest.raises(RewardError, match="status 3"):
            await pool.ask(DIE)
        with pytest.raises(RewardError, match="no more processes"):
            await asyncio.wait_for(pool.ask(FINE), 120)

    async def answers() -> bool:
        with contextlib.suppress(RewardError):
            return await pool.ask(FINE) == 1.0
        return False

    await eventually(answers, 120)  # it is tried again and again
    await pool.close()
    with pytest.raises(RewardError, match="closed"):
        await pool.ask(FINE)


def test_nothing_is_left_when_it_is_closed() -> None:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    scorer = build_scorer([CallableReward(target=f"{HERE}:length", workers=3)])
    started = {p.pid for p in psutil.Process().children(recursive=True)} - before
    assert len(started) == 3
    scorer.close()
    scorer.close()
    assert not any(psutil.pid_exists(pid) for pid in started)
    with pytest.raises(RewardError, match="closed"):
        ask(scorer, "x")


def compare(configs: Sequence[RewardConfig], *answers: str) -> list[Score]:
    with scoring(*configs) as scorer:
        return ask(scorer, *answers)


def test_a_group_reward_is_one_more_part_of_each_score() -> None:
    ranked = GroupReward(target=f"{HERE}:ranked", weight=-0.5, name="length", workers=1)
    scores = compare([ranked, ExactMatchReward(weight=2.0)], "07", "0000007", "7")
    assert [score.parts for score in scores] == [
        {"exact_match": 1, "length": 1}, {"exact_match": 0, "length": 2}, {"exact_match": 0, "length": 0},
    ]  # fmt: skip
    assert [score.total for score in scores] == [1.5, -1.0, 0.0]
    assert [score.full for score in scores] == [True, False, False], "right is right, whatever its siblings are"


def test_it_sees_every_sample_and_may_be_a_coroutine() -> None:
    scores = compare([ExactMatchReward(weight=2.0), GroupReward(target=f"{HERE}:seen", workers=1)], "07", "8")
    assert [score.failures for score in scores] == [{}, {}]
    assert [score.total for score in scores] == [3.0, 1.0]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raise", "KeyError"),
        ("hang", "took over 1 s"),
        ("die", "status 3"),
        ("one number", "a list with a number for each sample"),
        ("too few", "1 numbers for 2 samples"),
        ("infinite", "finite"),
    ],
)
def test_one_that_fails_has_no_value_for_any_sample(fault: str, why: str) -> None:
    reward = GroupReward(target=f"{HERE}:ranked", timeout_s=1.0 if fault == "hang" else 60.0, workers=1)
    scores = compare(
        [ExactMatchReward(), reward, msgspec.structs.replace(reward, on_failure=-1.0, name="instead")], fault, "07"
    )
    for score in scores:
        assert score.missing == ["group"]
        assert why in score.failures["group"]
    assert [score.total for score in scores] == [-1.0, 0.0]


class Away(ComparingReward):
    """Fails until it was asked so often."""

    def __init__(self, until: int) -> None:
        self.asked, self.until = 0, until

    async def __call__(self, group: SampleGroup, /) -> list[float]:
        self.asked += 1
        if self.asked <= self.until:
            raise ConnectionError("nobody there")
        return [float(sample.tokens) for sample in group.samples]


Rollouts = Callable[[ComparingReward], RolloutSampler]


@pytest.fixture
def rollouts(server: GenerateServer, tokenizer: Tokenizer) -> Rollouts:
    return lambda reward: client(server.url, tokenizer, Scorer({"length": Weighted(reward)}), max_tokens=8)


def test_it_is_asked_again_and_an_outage_leaves_the_group_out(rollouts: Rollouts, record: Record) -> None:
    with rollouts(Away(1)) as running:
        group = running.submit(record, 4, 0).result(timeout=60)
        assert group.rewards == [float(trajectory.policy_tokens) for trajectory in group.trajectories]
        assert "trajectories_without_reward" not in running.stats()
    assert rollout_metrics([group], 0)["reward/length"] == sum(group.rewards) / 4
    assert type(group).from_json(json.loads(json.dumps(group.to_json()))) == group, "a checkpoint keeps it"
    with rollouts(Away(1000)) as running:
        assert running.submit(record, 4, 0).result(timeout=60).trajectories == (), "never trained on as 0"
        stats = running.stats()
    assert stats["trajectories_without_reward"] == 4
    assert stats["reward_failures/length"] == 2


def test_a_trajectory_that_no_reward_applies_to_is_left_out_and_said(
    server: GenerateServer, tokenizer: Tokenizer, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    class Never(Reward):
        async def __call__(self, request: RewardRequest, /) -> None:
            return None

    with client(server.url, tokenizer, Scorer({"never": Weighted(Never())}), max_tokens=8) as running:
        assert running.submit(record, 4, 0).result(timeout=60).trajectories == ()
        stats = running.stats()
    assert (stats["trajectories_no_reward_applies_to"], stats["reward_applied/never"]) == (4, 0)
    assert [m for m in caplog.messages if "no reward applies" in m] == [
        f"no reward applies to record {record.index} (counted from now on): it is left out"
    ]


@pytest.mark.parametrize("samples", [1, 3])
def test_an_evaluation_compares_nothing(rollouts: Rollouts, record: Record, samples: int) -> None:
    reward = Away(0)
    with rollouts(reward) as running:
        (group,) = running.evaluate([record], EvalConfig(samples=samples))
    assert group.scores == (Score(0),) * samples
    assert reward.asked == 0
