"""The learning benchmark around its runs: configurations that are valid, figures that say what the curves say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.learning import LEAST_GAIN, figures
from loadtest.learning_pages import BEGIN, END, chart, table, update_page
from loadtest.learning_recipes import TASKS, WAYS, Task, Way, base, recipe
from trainer.config import PolicyConfig, TrainerConfig, strict
from trainer.report import RunEvents


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
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
