"""Where events go, and that none of it holds up a run."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml
from rich.console import Console

from tests.waiting import wait_until
from trainer.config import TrainerConfig, WandbConfig, load
from trainer.errors import ConfigError
from trainer.metrics import build_writers, chosen_progress
from trainer.metrics.dashboards import TensorBoard, Wandb, tag, tagged
from trainer.metrics.terminal import Bar, Lines
from trainer.metrics.throughput import Stopwatch
from trainer.metrics.writers import JsonLines, Spared

START = {"steps": 3, "algorithm": "grpo", "world_size": 1, "devices": ["cpu"], "parameters": 1000, "step": 0}
STEP = {"step": 1, "loss": 0.5, "reward_mean": 0.25, "rollout_ms": 12.0, "train_ms": 3.0, "version": 2, "mfu": 0.5}
EVAL = {"step": 1, "version": 2, "set": "held_out", "prompts": 7, "accuracy": 0.75, "reward_mean": 0.5}


def config(tmp_path: Path, **watch: Any) -> TrainerConfig:
    path = tmp_path / "config.yaml"
    values = {"model": {"path": "m"}, "data": {"kind": "arithmetic"}, "algorithm": {"name": "sft"}, "steps": 3}
    path.write_text(yaml.safe_dump(values | {"metrics": str(tmp_path / "m.jsonl"), "watch": watch}))
    return load(path)


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(e.step, round(e.value, 6)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tags_group_numbers_by_what_they_are_about() -> None:
    tags = {tag("step", name) for name in ("loss", "reward_mean", "reward/code", "rollout_ms", "mfu", "truncated")}
    assert tags == {
        "train/loss", "reward/mean", "reward/code", "time/rollout_ms", "throughput/mfu", "rollout/truncated"
    }  # fmt: skip
    assert tagged("eval", EVAL | {"served_versions": [1], "note": "x", "bad": float("nan")}) == {
        "eval/held_out/version": 2, "eval/held_out/prompts": 7,
        "eval/held_out/accuracy": 0.75, "eval/held_out/reward_mean": 0.5,
    }  # fmt: skip


def test_tensorboard_of_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    killed = TensorBoard(str(tmp_path))
    killed.write("start", START)
    for step in (1, 2, 3, 4):
        killed.write("step", STEP | {"step": step, "loss": 1.0})
    killed.close()
    resumed = TensorBoard(str(tmp_path))
    resumed.write("start", START | {"step": 2})
    for step in (3, 4):
        resumed.write("step", STEP | {"step": step, "loss": 2.0})
    for event, values in (("eval", EVAL | {"step": 4}), ("done", {"step": 4, "seconds": 2})):
        resumed.write(event, values)
    resumed.close()
    found = scalars(tmp_path)
    assert found["train/loss"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert found["eval/held_out/accuracy"] == [(4, 0.75)]


# A `.wandb` file is in LevelDB's log format: blocks of 32 KiB, each piece with checksum, length and type.
BLOCK, FILE_HEADER, PIECE_HEADER = 32768, 7, 7
FULL, LAST = 1, 4


def written(path: Path) -> list[Any]:
    """W&B's own messages of a run that has ended: another process may still write them when the run's own has done with
    it."""
    from wandb.proto import wandb_internal_pb2

    def whole() -> list[Any]:
        found = [wandb_internal_pb2.Record.FromString(data) for data in _messages(path.read_bytes())]
        return found if any(record.WhichOneof("record_type") == "exit" for record in found) else []

    return wait_until(whole, 120, "the run's end")


def _messages(content: bytes) -> Iterator[bytes]:
    assert content[:4] == b":W&B"[: len(content)]  # of a file that is being written, too
    offset, message = FILE_HEADER, b""
    while offset + PIECE_HEADER <= len(content):
        if BLOCK - offset % BLOCK < PIECE_HEADER:  # too little is left in the block for a header
            offset += BLOCK - offset % BLOCK
            continue
        length, kind = int.from_bytes(content[offset + 4 : offset + 6], "little"), content[offset + 6]
        offset += PIECE_HEADER
        if offset + length > len(content):
            return  # it is being written
        message += content[offset : offset + length]
        offset += length
        if kind in (FULL, LAST):
            yield message
            message = b""


def test_wandb_offline_writes_a_run_without_network_or_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", "200")  # seconds for its process to start
    writer = Wandb(WandbConfig(project="p", name="n", dir=str(tmp_path)), {"steps": 3, "model": {"path": "m"}})
    for event, values in (("start", START), ("step", STEP), ("eval", EVAL), ("step", STEP), ("done", {"seconds": 2})):
        writer.write(event, values)
    writer.close()
    (log,) = writer.directory.glob("*.wandb")
    found = written(log)
    rows = [
        {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in r.history.item}
        for r in found
        if r.WhichOneof("record_type") == "history"
    ]
    keys = {item.key for r in found if r.WhichOneof("record_type") == "run" for item in r.run.config.update}
    assert rows[0]["train/loss"] == 0.5
    assert rows[1]["eval/held_out/accuracy"] == 0.75
    assert [row["step"] for row in rows] == [1, 1, 1]  # a repeated step is a row of its own
    assert {"steps", "model"} <= keys


def test_wandb_online_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        WandbConfig(mode="online").check_key()
    WandbConfig().check_key()


def test_a_writer_that_fails_is_left_alone_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    class Broken:
        def write(self, event: str, values: dict[str, Any]) -> None:
            calls.append(event)
            raise OSError("disk full")

        def close(self) -> None:
            calls.append("close")

    spared = Spared("TensorBoard", Broken())
    for _ in range(3):
        spared.write("step", STEP)
    spared.close()
    assert calls == ["step"]
    (said,) = caplog.records
    assert "disk full" in said.message


def test_all_writers_of_a_configuration_get_every_event(tmp_path: Path) -> None:
    c = config(tmp_path, tensorboard=str(tmp_path / "tb"), progress="off")
    writers = build_writers(c)
    writers.write("start", START)
    writers.write("step", STEP)
    writers.close()
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "step"]
    assert scalars(tmp_path / "tb")["train/loss"] == [(1, 0.5)]


def test_what_was_opened_is_closed_when_a_later_writer_cannot_be(tmp_path: Path) -> None:
    c = config(tmp_path, tensorboard=str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="exists") as raised:
        build_writers(c)
    assert raised.traceback  # which holds the writers: no garbage collection has closed the file
    assert str(tmp_path / "m.jsonl") not in {file.path for file in psutil.Process().open_files()}


def test_progress_is_chosen_by_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", Terminal())
    assert isinstance(chosen_progress(config(tmp_path)), Bar)
    on_stdout = msgspec.structs.replace(config(tmp_path), metrics="-")
    assert chosen_progress(on_stdout) is None  # the lines are there already
    assert isinstance(chosen_progress(config(tmp_path, progress="lines")), Lines)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert chosen_progress(config(tmp_path)) is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_say_what_happened() -> None:
    out = io.StringIO()
    lines = Lines(Console(file=out, width=200))
    for event, values in (("start", START), ("step", STEP), ("eval", EVAL)):
        lines.write(event, values)
    lines.write("publish_failed", {"step": 2, "message": "refused [by x]"})
    text = out.getvalue().splitlines()
    assert text[0] == "grpo: 3 steps, 1,000 parameters, on cpu"
    assert text[1] == "step 1/3  loss +0.5000  reward 0.250  version 2  MFU 50.0%  ms: rollout 12  train 3"
    assert "accuracy 75.0%" in text[2]
    assert text[3] == "publish failed at step 2: message refused [by x]"  # brackets are text, not markup


def test_completions_are_shown_behind_their_prompts() -> None:
    out = io.StringIO()
    sample = {"prompt": "1+1=", "completion": "2\n[b]", "finish_reason": "stop", "reward": 0.5, "versions": [3, 4]}
    shown = {"step": 2, "samples": [sample | {"rewards": {"math": 1, "format": 0}}]}
    Lines(Console(file=out, width=20)).write("samples", shown)
    head = "sample at step 2: reward 0.5 (math 1  format 0)  versions 3, 4  stop"
    assert out.getvalue() == f"{head}\n1+1=>>>2\n[b]\n"


def test_the_bar_shows_the_newest_step_and_keeps_evaluations() -> None:
    out = io.StringIO()
    bar = Bar(Console(file=out, width=160, force_terminal=True))
    bar.write("start", START)
    for step in (1, 2, 3):
        bar.write("step", STEP | {"step": step})
    bar.write("eval", EVAL)
    bar.close()
    text = out.getvalue()
    assert "3/3" in text
    assert "reward 0.250" in text
    assert "accuracy 75.0%" in text


def test_json_lines_append_and_flush_each_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.jsonl"
    for step in (1, 2):
        writer = JsonLines(str(path))
        writer.write("step", {"step": step})
        assert json.loads(path.read_text().splitlines()[-1])["step"] == step  # before it is closed
        writer.close()
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("whole", [0, 1, 3])
def test_a_run_that_was_killed_while_it_wrote_leaves_no_half_line(tmp_path: Path, whole: int) -> None:
    """However long the half; the run that goes on begins a line of its own, and a report can be made."""
    path, line = tmp_path / "m.jsonl", json.dumps({"event": "step", "step": 1, "x": "y" * 100_000})
    path.write_text("".join(f"{line}\n" for _ in range(whole)) + line[:-1])
    writer = JsonLines(str(path))
    writer.write("step", {"step": 2})
    writer.close()
    assert [json.loads(found)["step"] for found in path.read_text().splitlines()] == [1] * whole + [2]


def test_the_watch_adds_up_phases_and_knows_the_whole() -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch("train"):
            sum(range(10_000))
    assert set(watch.ms) == {"train_ms"}
    assert watch.elapsed_ms >= watch.ms["train_ms"] > 0
