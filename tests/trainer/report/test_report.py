"""A run's report: what is counted, what is said, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.errors import DataError
from trainer.report import read_events, write_report
from trainer.report.__main__ import main as report_main
from trainer.report.events import findings
from trainer.report.plots import smooth


def start(step: int = 0) -> dict[str, Any]:
    return {"event": "start", "steps": 8, "algorithm": "grpo", "world_size": 1, "parameters": 1234567, "step": step}


def step(number: int, **changes: Any) -> dict[str, Any]:
    values = {"event": "step", "step": number, "time": 100.0 + number, "loss": 1.0 / number, "grad_norm": 1.0}
    rollout = {"reward_mean": number / 10, "reward/math": number / 10, "zero_std_groups": 0.1, "truncated": 0.0}
    times = {"rollout_ms": 30.0, "train_ms": 10.0, "publish_ms": 10.0, "write_ms": 4.0, "swap_ms": 6.0}
    return values | rollout | times | {"tokens": 64, "version": number} | changes


def evaluation(number: int, accuracy: float) -> dict[str, Any]:
    about = {"event": "eval", "step": number, "version": number, "set": "held_out", "prompts": 40}
    return about | {"accuracy": accuracy, "pass_at_4": accuracy, "reward_mean": 0.5}


def written(path: Path, *events: dict[str, Any], tail: str = "") -> Path:
    path.write_text("".join(json.dumps({"time": 100.0} | event) + "\n" for event in events) + tail)
    return path


def run(path: Path, **changes: Any) -> Path:
    steps = [step(number, **changes) for number in range(1, 9)]
    return written(path, start(), evaluation(0, 0.1), *steps, evaluation(8, 0.9), {"event": "done", "time": 110.0})


def test_a_report_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    page = write_report([run(tmp_path / "m.jsonl")])
    assert page == tmp_path / "m-report" / "report.md"
    text = page.read_text()
    assert "| steps | 8 of 8, done |" in text
    assert "| parameters | 1,234,567 |" in text
    assert "| wall time | 10.0 s |" in text
    assert "| trained tokens | 512 |" in text
    assert "| accuracy, held_out | 10.0% first, 90.0% best, 90.0% last |" in text
    assert "| rollout | 30.0 | 30.0 | 30.0 | 30.0 | 60% |" in text
    assert "| swap | 6.0 | 6.0 | 6.0 | 6.0 |  |" in text  # a part of publishing, not a phase beside it
    assert "| `reward/math` | 0.75 |" in text  # the last quarter: steps 7 and 8
    assert "Worth a look" not in text


def test_a_run_that_was_done_and_goes_on_to_more_steps_is_not_done(tmp_path: Path) -> None:
    metrics = run(tmp_path / "m.jsonl")
    more = [start(8) | {"steps": 16}, step(9)]
    written(tmp_path / "more.jsonl", *(json.loads(line) for line in metrics.read_text().splitlines()), *more)
    text = write_report([tmp_path / "more.jsonl"]).read_text()
    assert "| steps | 9 of 16, not done when this was written |" in text


def test_plots_are_named_in_the_page_and_drawn_the_same_twice(tmp_path: Path) -> None:
    pages = [write_report([run(tmp_path / "m.jsonl")], tmp_path / name) for name in ("a", "b")]
    names = [line.split("(")[1].rstrip(")") for line in pages[0].read_text().splitlines() if line.startswith("![")]
    assert {"accuracy.svg", "reward.svg", "loss.svg", "time.svg"} <= set(names)
    assert "mfu.svg" not in names  # the run has no such numbers
    for name in names:
        assert (tmp_path / "a" / name).read_text().startswith("<?xml")
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_several_runs_are_compared_under_names_that_differ(tmp_path: Path) -> None:
    for name in ("sync", "async"):
        (tmp_path / name).mkdir()
    paths = [run(tmp_path / "sync" / "m.jsonl"), run(tmp_path / "async" / "m.jsonl", loss=3.0)]
    text = write_report(paths, tmp_path / "both").read_text()
    assert "# Runs compared" in text
    assert "## sync/m\n" in text
    assert "## async/m\n" in text
    assert "| `loss` | 3 |" in text


def test_a_resumed_run_counts_each_step_as_it_went_the_last_time(tmp_path: Path) -> None:
    first = [step(number) for number in range(1, 6)]
    again = [step(number, reward_mean=0.0) for number in range(4, 9)]
    path = written(tmp_path / "m.jsonl", start(), *first, evaluation(5, 0.2), start(3), *again, evaluation(8, 0.3))
    found = read_events(path)
    assert found.series("step") == (list(range(1, 9)), [float(n) for n in range(1, 9)])
    assert found.series("reward_mean")[1] == [0.1, 0.2, 0.3, 0, 0, 0, 0, 0]
    assert found.series("eval/held_out/accuracy") == ([8], [0.3])  # the one at step 5 was of weights that are gone
    text = write_report([path]).read_text()
    assert "| resumed | 1 times, 2 steps trained again |" in text
    assert "not done when this was written" in text


def test_a_torn_last_line_is_left_out_and_any_other_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", start(), step(1), tail='{"event": "step", "st')
    assert list(read_events(path).steps) == [1]
    for events, line, told in (([start()], "not json", "line 2"), ([], '{"a": 1}', "line 1")):
        with pytest.raises(DataError, match=told):
            read_events(written(tmp_path / "b.jsonl", *events, tail=f"{line}\n{json.dumps(step(1))}\n"))


def test_nothing_to_report_on_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_events(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="no step yet"):
        read_events(written(tmp_path / "m.jsonl", start()))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot write"):
        write_report([run(tmp_path / "m2.jsonl")], tmp_path / "file")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zero_std_groups": 0.9}, "equal rewards"),
        ({"truncated": 0.5}, "max_tokens"),
        ({"clip_ratio": 0.6}, "clipped"),
        ({"logprob_gap_mean": 0.4}, "disagree"),
        ({"entropy": 0.001}, "explores little"),
    ],
)
def test_what_is_worth_a_look_is_said(tmp_path: Path, changes: dict[str, float], said: str) -> None:
    (text,) = findings(read_events(run(tmp_path / "m.jsonl", **changes)))
    assert said in text


def test_spikes_falls_and_failed_publishes_are_said(tmp_path: Path) -> None:
    steps = [step(number, grad_norm=50.0 if number == 5 else 1.0) for number in range(1, 9)]
    failed = {"event": "publish_failed", "step": 4, "message": "no slot"}
    path = written(tmp_path / "m.jsonl", start(), evaluation(4, 0.9), *steps, failed, evaluation(8, 0.5))
    fell, spiked, refused = findings(read_events(path))
    assert "90.0% at step 4 and is 50.0% now" in fell
    assert "at 1 steps: 5." in spiked
    assert "no slot" in refused


def test_a_rollback_is_said_and_what_it_undid_counts_as_trained_again(tmp_path: Path) -> None:
    undone = {"event": "rollback", "step": 5, "to_step": 2, "version": 3, "reason": "loss is nan", "skipped_to": None}
    first, again = [step(n) for n in range(1, 5)], [step(n, reward_mean=0.0) for n in range(3, 9)]
    found = read_events(written(tmp_path / "m.jsonl", start(), *first, undone, *again))
    assert found.repeated == 2
    assert found.series("reward_mean")[1][:4] == [0.1, 0.2, 0, 0]
    (text,) = findings(found)
    assert text == "1 rollbacks to an earlier step; the last: loss is nan"


def test_rewards_that_gave_no_value_are_counted(tmp_path: Path) -> None:
    path = run(tmp_path / "m.jsonl", **{"reward_failures/code": 2.0, "reward_failures/math": 0.0})
    (text,) = findings(read_events(path))
    assert text.startswith("Reward code gave no value for 16 samples")


def test_smoothing_keeps_the_mean_of_a_constant_and_the_length() -> None:
    assert smooth([2.0] * 7, 3) == [2.0] * 7
    assert smooth([0.0, 3.0, 0.0], 1) == [1.5, 1.0, 1.5]


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_main([str(run(tmp_path / "m.jsonl")), "--to", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "report.md")
    assert report_main([str(tmp_path / "none.jsonl")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_hotswap_train_report(tmp_path: Path) -> None:
    """Through the command itself; no model is needed, and nothing is trained."""
    config = {"model": {"path": "m"}, "data": {"kind": "arithmetic"}, "algorithm": {"name": "sft"}, "steps": 8}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config | {"metrics": str(run(tmp_path / "m.jsonl"))}))
    command = [sys.executable, "-m", "server.cli", "train", "--config", str(path), "--report"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "m-report" / "report.md")
    to_stdout = [*command[:-1], "--set", "metrics='-'", "--report"]
    refused = subprocess.run(to_stdout, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "nothing to report on" in refused.stderr
