"""The benchmarks of RL steps, of partial rollouts and of learning: what both sides are given, and what is counted. And
a short run of the learning task with a tool, against a real server: a policy learns to use it from rewards alone.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from loadtest.training import partial_rollouts as partial
from loadtest.training.learning import tools as learning_tools
from loadtest.training.learning.bench import LEAST_GAIN, Bench, _kept, _server, figures
from loadtest.training.learning.pages import BEGIN, END, chart, table, update_page
from loadtest.training.learning.recipes import ENVIRONMENT, MODEL, TASKS, WAYS, Task, Way, base, recipe
from loadtest.training.partial_rollouts import SMALL, Lengths, Sizes
from loadtest.training.rl_step import bench, ours, task
from loadtest.training.rl_step.memory import PeakMemory
from loadtest.training.rl_step.ours import Step
from server.up.server import Server
from tests.waiting import wait_until
from trainer.config import PolicyConfig, TrainerConfig, strict
from trainer.data import build_dataset
from trainer.data.tokenizer import Tokenizer
from trainer.report import RunEvents, read_events
from trainer.rewards import build_scorer
from trainer.rollouts.generate import Request
from trainer.rollouts.sampling import RolloutSampler
from trainer.tiny_model import tiny_run, write_tiny_model
from trainer.trajectory import TrajectoryGroup

STARTS = ("server.gateway", "server.cli instance", "trainer.main", "weightsync.push", "weightsync.persist")
URL, STORE = "http://127.0.0.1:1", "sqlite:///unused"


@pytest.fixture(autouse=True)
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a server of its own has none."""
    if request.node.get_closest_marker("engine") is None:
        monkeypatch.setenv("HOTSWAP_STORE", STORE)


def test_seconds_are_from_one_step_to_the_next(tmp_path: Path) -> None:
    lines = [
        {"event": "step", "time": at, "step": i, "rollout_ms": 5.0, "train_ms": 7.0, "rollout_tokens": 100.0}
        for i, at in enumerate((10.0, 11.0, 13.5))
    ]
    lines.insert(1, {"event": "eval", "time": 10.5})
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    steps = ours.read_steps(path)
    assert [step.seconds for step in steps] == [1.0, 2.5]
    assert steps[0].ms == {"rollout_ms": 5.0, "train_ms": 7.0}


def test_a_row_has_medians_and_a_rate() -> None:
    steps = [Step(1.0, {"train_ms": 10.0}, 100), Step(3.0, {"train_ms": 30.0}, 300), Step(2.0, {}, 200)]
    row = bench.summary("async", "slow", steps, peak=5_000_000)
    assert (row["s_per_step"], row["ms"], row["tokens_per_s"]) == (2.0, {"train_ms": 10.0}, 100.0)
    assert row["peak_memory_mb"] == 5


def test_gains_are_over_the_faster_of_trls() -> None:
    times = {"colocated": (1.0, 1.2), "one-step-off": (0.8, 0.8), "async": (0.5, 0.5), "TRL, 1 thread": (2.0, 2.2)}
    times["TRL, 2 threads"] = (1.5, 1.7)
    rows = [
        {"contender": name, "reward": reward, "s_per_step": seconds}
        for name, both in times.items()
        for reward, seconds in zip(task.REWARDS, both, strict=True)
    ]
    found = bench.gains(rows)
    assert found["instant"]["async_over_colocated"] == 2.0
    assert found["instant"]["async_over_trl"] == 3.0
    assert found["colocated_pays_of_200_ms"] == pytest.approx(200)
    assert found["async_pays_of_200_ms"] == pytest.approx(0)


@pytest.mark.parametrize("schedule", ours.SCHEDULES)
def test_every_schedule_has_a_configuration_the_trainer_takes(schedule: str, tmp_path: Path) -> None:
    built = strict.build(TrainerConfig, ours.config(task.SMALL, tmp_path, URL, schedule, "slow", tmp_path / "m"))
    assert built.schedule.name == schedule
    assert built.batch == task.SMALL.prompts


@pytest.mark.parametrize("rank", [0, 16])
def test_both_sides_of_a_step_train_the_same_adapter(rank: int, tmp_path: Path) -> None:
    from loadtest.training.rl_step.trl_run import adapter

    asked = replace(task.SMALL, rank=rank)
    values = ours.config(asked, tmp_path, URL, "async", "instant", tmp_path / "m")
    built, theirs = strict.build(TrainerConfig, tiny_run(values)), adapter(asked)
    if not rank:
        assert built.lora is None is theirs
        return
    assert built.lora is not None
    assert (built.lora.rank, built.lora.alpha) == (theirs.r, theirs.lora_alpha) == (16, 32)
    assert set(built.lora.target_modules) == set(theirs.target_modules)


def test_the_slow_reward_waits_and_says_the_same() -> None:
    async def both() -> tuple[float, float]:
        return await task.instant("1+2=", "03", "03"), await task.slow("1+2=", "03", "03")

    began = time.monotonic()
    assert asyncio.run(both()) == (1.0, 1.0)
    assert time.monotonic() - began >= task.SLOW_S
    assert task.value("0", "03") == 0.5


def test_peak_memory_counts_a_tree_of_processes() -> None:
    grab = "import time; x = bytearray(200 << 20); print(1, flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grab!r}])"
    process = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        with PeakMemory([process.pid]) as memory:
            process.stdout.readline()
            wait_until(lambda: memory.peak > 200 << 20)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


# partial rollouts


def test_the_tail_is_as_long_as_is_said() -> None:
    found = partial.described(Sizes())
    assert found["median"] == pytest.approx(Sizes().median, rel=0.05)
    assert found["p99"] / found["median"] == pytest.approx(partial.TIMES, rel=0.1)
    assert found["most"] <= Sizes().max_tokens


def test_a_sample_has_its_length_in_one_request_and_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "body", Request.body)  # restored after the test
    lengths, prompt, most = Lengths(24, 96), (1, 2, 3, 4, 5, 6), 480
    partial.with_lengths(lengths)
    for seed in range(1000, 1400):
        whole = Request(prompt, 1, most, 1.0, seed=seed)
        assert whole.body()["max_tokens"] == lengths.of(seed)
        assert whole.body()["ignore_eos"] is True
        written = 0
        while True:
            asked = Request(prompt, 1, most, 1.0, seed=seed).after([7] * written)
            given = Request(asked.prompt_ids, 1, min(96, most - written), 1.0, seed=asked.seed).body()["max_tokens"]
            assert given > 0
            written += given
            if given < 96:
                break
        assert written == lengths.of(seed)


@pytest.mark.parametrize("schedule", partial.SCHEDULES)
@pytest.mark.parametrize("budget", [None, SMALL.budget])
def test_every_budget_has_a_configuration_the_trainer_takes(schedule: str, budget: int | None, tmp_path: Path) -> None:
    values = partial.config(SMALL, tmp_path, URL, STORE, schedule, budget)
    built = strict.build(TrainerConfig, values)
    assert built.rollout.token_budget == budget
    assert built.rollout.rounds == (1 if budget is None else -(-SMALL.max_tokens // SMALL.budget))
    other = partial.config(SMALL, tmp_path, URL, STORE, schedule, None)
    assert {k for k in values if values[k] != other[k]} <= {"rollout", "metrics"}, "they differ in the budget alone"


def test_a_row_counts_what_came_after_the_warm_up(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"rollout_ms": 5.0, "train_ms": 7.0, "rollout_tokens": 100.0, "answer_tokens_mean": 25.0}
    numbers |= {"answer_tokens_max": 90.0, "version_lag_mean": 1.5, "version_lag_max": 3.0}
    steps = [{"event": "step", "step": i, "time": t, **numbers} for i, t in enumerate((0.0, 9.0, 10.0, 13.0), 1)]
    ends = [{"event": "eval", "accuracy": accuracy} for accuracy in (0.2, 0.9)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, [ends[0], *steps, ends[1]])))
    found = partial.row("async", 12, path, Sizes(prompts=4, samples=2, steps=4, warm_up=2))
    assert (found["steps"], found["s_per_step"], found["s_per_step_mean"]) == (2, 2.0, 2.0)
    assert (found["samples_per_s"], found["tokens_per_s"]) == (2 * 8 / 4.0, 50.0)
    assert (found["accuracy_before"], found["accuracy"]) == (0.2, 0.9)


def test_a_gain_is_in_samples_per_second() -> None:
    rates = {("one-step-off", None): 10.0, ("one-step-off", 96): 25.0, ("async", 96): 18.0, ("async", None): 12.0}
    rows = [{"schedule": s, "budget": b, "samples_per_s": rate} for (s, b), rate in rates.items()]
    assert partial.gains(rows) == {"target": 1.5, "one-step-off": 2.5, "async": 1.5}


def test_the_reward_looks_at_the_beginning() -> None:
    assert asyncio.run(partial.begins_right("1+2=", "03 and more", "03")) == 1.0
    assert asyncio.run(partial.begins_right("1+2=", "30", "03")) == 0.0


# learning

RUNS = [(task, way) for task in TASKS for way in WAYS if way.name in task.ways]


@pytest.mark.parametrize(("task", "way"), RUNS, ids=[f"{task.name}-{way.name}" for task, way in RUNS])
def test_every_recipe_is_a_valid_configuration(task: Task, way: Way, tmp_path: Path) -> None:
    config = strict.build(TrainerConfig, recipe(task, way, tmp_path, URL, seed=3))
    learned = strict.build(TrainerConfig, base(task, tmp_path, seed=3))
    assert config.seed == learned.seed == 3
    (held_out,) = config.eval
    assert config.publish is not None
    assert config.steps % held_out.every == 0
    assert held_out.every % config.publish.every == 0  # what is evaluated has been published
    assert (config.publish.every == 1) == isinstance(config.algorithm, PolicyConfig)
    assert held_out.prompts == task.held_out
    assert config.model.path == (learned.save_to if way.start == "base" else learned.model.path)


def test_demonstrations_are_what_the_environment_plays(tmp_path: Path) -> None:
    """Calls are read by the tool, and its answers stand where the trainer puts them; nothing held out is shown."""
    learning_tools.write_records(tmp_path, seed=1)
    write_tiny_model(tmp_path / "model", characters=learning_tools.CHARACTERS)
    tokenizer = Tokenizer(tmp_path / "model")
    read = {
        name: [json.loads(line) for line in (tmp_path / f"calculator-{name}.jsonl").read_text().splitlines()]
        for name in ("demonstrations", "problems", "held-out")
    }
    held_out = {row["prompt"] for row in read["held-out"]}
    assert len(held_out) == learning_tools.HELD_OUT
    assert not held_out & {row["prompt"] for rows in ("demonstrations", "problems") for row in read[rows]}
    asking = [row for row in read["demonstrations"] if row["target"].startswith("<")]
    shown = {row["prompt"]: row["target"] for row in read["demonstrations"] if "<eos>" in row["prompt"]}
    assert abs(len(asking) / learning_tools.DEMONSTRATIONS - learning_tools.CALLS) < 0.02
    for row in asking[:20]:
        found = json.loads(row["target"].strip("<>"))
        said = learning_tools.calc(**found["arguments"])
        a, b = row["prompt"].strip("=").split("*")
        assert (found["name"], said) == ("calc", str(int(a) * int(b)))
        call = tokenizer.continuation(row["target"])
        played = tokenizer.prompt(row["prompt"]) + call + tokenizer.reply([{"role": "tool", "content": said}], call)
        assert tokenizer.prompt(f"{row['prompt']}{row['target']}<eos>{said}") == played
        assert shown[f"{row['prompt']}{row['target']}<eos>{said}"] == said
    with pytest.raises(ValueError, match="two numbers"):
        learning_tools.calc("1+1")


def test_a_run_of_one_task_keeps_the_figures_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert _kept(path, 3) == {}
    path.write_text(json.dumps({"seed": 3, "tasks": {"code": {"runs": {}}}}))
    assert _kept(path, 3) == {"code": {"runs": {}}}
    assert _kept(path, 4) == {}, "of another seed"


def events(*accuracies: float) -> RunEvents:
    run = RunEvents("r")
    for step, accuracy in enumerate(accuracies):
        run.add({"event": "eval", "set": "held_out", "step": step, "accuracy": accuracy})
        run.add({"event": "step", "step": step + 1, "reward_mean": 0.5, "step_ms": 10.0})
    return run


def test_a_run_learned_when_its_last_accuracy_says_so() -> None:
    assert figures(events(0.1, 0.5, 0.9))["learned"]
    fell = figures(events(0.1, 0.9, 0.1 + LEAST_GAIN / 2))
    assert not fell["learned"]  # its best does not count
    assert (fell["first"], fell["best"]) == (0.1, 0.9)
    assert fell["curve"][1] == [1, 0.9]
    assert fell["step_ms"] == 10


def found() -> dict[str, Any]:
    good = figures(events(0.0, 1.0)) | {"seconds": 30.0}
    bad = figures(events(0.3, 0.3)) | {"seconds": 30.0}
    runs = {"sft": good, "dpo": bad, "ppo": {"failed": "trace\nerror: the reason"}}
    return {"tasks": {"code": {"title": "t", "held_out": 60, "runs": runs}}}


def test_the_table_says_what_did_not_learn_and_what_failed(tmp_path: Path) -> None:
    """The page keeps what is around it."""
    rows = table(found()).splitlines()[2:]
    assert rows[0] == "| code (60 held out) | sft | 0.0% | 100.0% | 100.0% | 2 | 30 | learned |"
    assert "**did not learn**" in rows[1]
    assert "**failed**: error: the reason" in rows[2]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        update_page(page, found())
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n| task |")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    chart(found(), tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").read_text().startswith("<?xml")


STEPS = 20
TASK = replace(next(task for task in TASKS if task.name == "calculator"), rl_steps=STEPS)
GRPO = next(way for way in WAYS if way.name == "grpo")


@pytest.mark.broad
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_grpo_teaches_a_model_to_ask_the_calculator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token that the policy wrote has the weights that wrote it; the tool's have none and are not trained on
    (tests/trainer/megatron/test_tool_tokens.py says what that means for the gradient)."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    learning_tools.write_records(tmp_path, seed=1)
    write_tiny_model(tmp_path / f"{TASK.name}-random", characters=TASK.characters, seed=1)
    with _server(TASK, tmp_path) as server:
        bench = Bench(tmp_path, 1, server, Console())
        bench.base(TASK)
        found = bench.run(TASK, GRPO)
        groups = play(server, tmp_path)
    assert "failed" not in found, found

    print(f"held-out accuracy {found['curve']}, reward {found['reward']}, turns {found['turns']}")
    assert found["first"] < 0.05, "the base guesses"
    assert found["last"] > 0.6
    rewards = [value for _, value in found["reward"]]
    assert sum(rewards[-5:]) / 5 > rewards[0] + 0.3, "rewards alone raised it"
    asked = [value - 1 for _, value in found["turns"]]
    assert sum(asked[-5:]) / 5 > 0.8 > 0.6 > asked[0], "by asking"
    steps = list(read_events(str(tmp_path / f"{TASK.name}-grpo.jsonl")).steps.values())
    assert len(steps) == STEPS
    assert max(step["logprob_gap_max"] for step in steps if step["version_lag_max"] == 0) < 1e-3

    played = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in played:
        covered = [0.0] * len(trajectory.token_ids)
        for span in trajectory.versions:
            covered[span.start : span.end] = [1.0] * (span.end - span.start)
        assert tuple(covered) == trajectory.mask, "every token of the policy has a version, and none of the tool's has"
        assert {span.version for span in trajectory.versions} == {steps[-1]["version"]}, "the last one"
    with_tool = [t for t in played if [turn.of_policy for turn in t.turns] == [True, False, True]]
    assert len(with_tool) > 0.8 * len(played)


def play(server: Server, work: Path) -> list[TrajectoryGroup]:
    """Held-out problems, with the weights that the server has at the end."""
    written = recipe(TASK, GRPO, work, server.url, 1)
    config = strict.build(TrainerConfig, written | {"publish": written["publish"] | {"store": server.store}})
    tokenizer = Tokenizer(work / f"{TASK.name}-random")
    records = build_dataset(config.data, tokenizer, 1).held_out[:16]
    assert config.gateway is not None
    scorer = build_scorer(config.rewards, config.gateway)
    with RolloutSampler(config.gateway, config.rollout, scorer, tokenizer, 1, config.environment, MODEL) as rollouts:
        running = [rollouts.submit(record, 4, number) for number, record in enumerate(records)]
        return [future.result(timeout=120) for future in running]
