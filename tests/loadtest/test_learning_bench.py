"""The learning benchmark around its runs: configurations that are valid, figures that say what the curves say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.training.learning import tools as learning_tools
from loadtest.training.learning.bench import LEAST_GAIN, _kept, figures
from loadtest.training.learning.pages import BEGIN, END, chart, table, update_page
from loadtest.training.learning.recipes import TASKS, WAYS, Task, Way, base, recipe
from trainer.config import PolicyConfig, TrainerConfig, strict
from trainer.data.tokenizer import Tokenizer
from trainer.report import RunEvents
from trainer.tiny_model import write_tiny_model

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
    if way.start == "base":
        assert config.model.path == learned.save_to
    else:
        assert config.model.path == learned.model.path


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


def test_the_table_says_what_did_not_learn_and_what_failed() -> None:
    rows = table(found()).splitlines()[2:]
    assert rows[0] == "| code (60 held out) | sft | 0.0% | 100.0% | 100.0% | 2 | 30 | learned |"
    assert "**did not learn**" in rows[1]
    assert "**failed**: error: the reason" in rows[2]


def test_the_page_keeps_what_is_around_the_table(tmp_path: Path) -> None:
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
