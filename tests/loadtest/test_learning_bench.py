"""The learning benchmark around its runs: configurations that are valid, figures that say what the curves say. And a
short run of its task with a tool, against a real server: a policy learns to use it from rewards alone.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadtest.training.learning import tools as learning_tools
from loadtest.training.learning.bench import LEAST_GAIN, Bench, _kept, _server, figures
from loadtest.training.learning.pages import BEGIN, END, chart, table, update_page
from loadtest.training.learning.recipes import ENVIRONMENT, MODEL, TASKS, WAYS, Task, Way, base, recipe
from server.up.server import Server
from trainer.config import PolicyConfig, TrainerConfig, strict
from trainer.data import build_dataset
from trainer.data.tokenizer import Tokenizer
from trainer.report import RunEvents, read_events
from trainer.rewards import build_scorer
from trainer.rollouts.sampling import RolloutSampler
from trainer.tiny_model import write_tiny_model
from trainer.trajectory import TrajectoryGroup

STARTS = ("server.gateway", "server.cli instance", "trainer.main", "weightsync.push", "weightsync.persist")
RUNS = [(task, way) for task in TASKS for way in WAYS if way.name in task.ways]


@pytest.mark.parametrize(("task", "way"), RUNS, ids=[f"{task.name}-{way.name}" for task, way in RUNS])
def test_every_recipe_is_a_valid_configuration(
    task: Task, way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSWAP_STORE", "sqlite:///x")
    config = strict.build(TrainerConfig, recipe(task, way, tmp_path, "http://127.0.0.1:1", seed=3))
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
