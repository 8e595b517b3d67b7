"""Checkpoint directories: whole, or not used."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.checkpoint.directory import CheckpointDir, Retention
from trainer.errors import CheckpointError, ResumeError


def write(directory: CheckpointDir, step: int, **more: float | None) -> Path:
    staged = directory.stage(step)
    (staged / "tensors").mkdir()
    (staged / "tensors" / "0.bin").write_bytes(bytes([step]) * 1000)
    (staged / "rank.json").write_text(f'{{"step": {step}}}')
    return directory.commit(step, {"step": step, **more})


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDir:
    made = CheckpointDir(tmp_path / "checkpoints", keep=3)
    for step in (1, 2, 3):
        write(made, step)
    return made


def newest_step(directory: CheckpointDir) -> int:
    found = directory.newest()
    assert found is not None
    return int(found[1]["step"])


def test_the_newest_is_found_and_the_oldest_dropped(directory: CheckpointDir) -> None:
    assert newest_step(directory) == 3
    write(directory, 4)
    assert [path.name for path in directory.steps()] == ["step-00000004", "step-00000003", "step-00000002"]


def test_what_lies_after_the_newest_goes_first_and_is_used_last(directory: CheckpointDir) -> None:
    """A run that had to go back, or another one in the same place, must not lose its own for those it left behind."""
    for step in (7, 9):
        write(directory, step)
    (directory.path / "latest").write_text("step-00000003")  # as if 7 and 9 had been torn, and the run resumed from 3
    assert [int(path.name[5:]) for path in directory.steps()] == [3, 9, 7]
    write(directory, 4)
    assert [int(path.name[5:]) for path in directory.steps()] == [4, 3, 9]
    assert newest_step(directory) == 4


def test_one_that_is_written_again_is_there_until_the_new_one_is(
    directory: CheckpointDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGTERM at the very step of a checkpoint: removing gigabytes takes long enough to be killed in."""

    def killed(path: Path) -> None:
        next(file for file in path.rglob("*") if file.is_file()).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(directory, 3)
    monkeypatch.undo()
    assert newest_step(directory) == 3
    write(directory, 3)
    assert sorted(path.name for path in directory.path.iterdir()) == [
        "latest",
        *(f"step-{step:08d}" for step in (1, 2, 3)),
    ]


def test_what_has_another_name_is_left_alone(directory: CheckpointDir) -> None:
    (directory.path / "step-best").mkdir()
    write(directory, 4)
    assert (directory.path / "step-best").is_dir()


def test_nothing_there_is_not_an_error(tmp_path: Path) -> None:
    assert CheckpointDir(tmp_path / "none").newest() is None


Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "a file is cut short": lambda path: os.truncate(path / "tensors" / "0.bin", 5),
    "a byte is another": lambda path: (path / "tensors" / "0.bin").write_bytes(bytes(1000)),
    "a file is missing": lambda path: (path / "rank.json").unlink(),
    "the manifest is missing": lambda path: (path / "MANIFEST").unlink(),
    "the manifest is cut short": lambda path: os.truncate(path / "MANIFEST", 40),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_torn_checkpoint_is_named_and_the_one_before_used_if_there_is_one(
    directory: CheckpointDir, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    damage(directory.path / "step-00000003")
    with caplog.at_level(logging.WARNING):
        assert newest_step(directory) == 2
    assert "step-00000003" in caplog.text
    for path in directory.steps()[1:]:
        damage(path)
    with pytest.raises(ResumeError, match="step-00000003"):
        directory.newest()


def test_a_disk_that_refuses_is_reported_and_the_rest_stays_whole(directory: CheckpointDir) -> None:
    directory.stage(4).rmdir()
    with pytest.raises(CheckpointError, match="Free space"):
        directory.commit(4, {})
    assert newest_step(directory) == 3


def test_one_being_written_is_never_seen_and_cleaned_up(directory: CheckpointDir) -> None:
    (directory.stage(4) / "half").write_bytes(b"half")
    assert newest_step(directory) == 3
    write(directory, 5)
    assert not list(directory.path.glob(".writing-*"))


def test_a_lost_or_stale_pointer_does_no_harm(directory: CheckpointDir) -> None:
    (directory.path / "latest").unlink()
    assert newest_step(directory) == 3
    (directory.path / "latest").write_text("step-00000099")
    assert newest_step(directory) == 3


def test_the_pointer_decides_after_a_run_was_restarted_from_scratch(directory: CheckpointDir) -> None:
    write(directory, 1)
    assert newest_step(directory) == 1


NEWEST_FIRST = [60, 50, 40, 30, 20, 10]
SCORES = {10: 0.5, 20: 0.9, 30: 0.7, 40: 0.9, 50: 0.1}


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), {60, 50}),
        (Retention(last=1, every=20), {60, 40, 20}),
        (Retention(last=1, best=1), {60, 20}),
        (Retention(last=1, best=3), {60, 20, 40, 30}),
        (Retention(last=2, every=30, best=2), {60, 50, 30, 20, 40}),
        (Retention(last=9), set(NEWEST_FIRST)),
    ],
)
def test_the_policy(retention: Retention, kept: set[int]) -> None:
    assert retention.kept(NEWEST_FIRST, SCORES) == kept


def test_scores_are_read_from_the_checkpoints(tmp_path: Path) -> None:
    directory = CheckpointDir(tmp_path, Retention(last=1, best=1))
    for step, score in ((1, 0.2), (2, 0.8), (3, None), (4, 0.8), (5, 0.1)):
        write(directory, step, score=score)
    assert [path.name for path in directory.steps()] == ["step-00000005", "step-00000002"]


def test_one_without_a_readable_manifest_has_no_score(tmp_path: Path) -> None:
    directory = CheckpointDir(tmp_path, Retention(last=1, best=1))
    (write(directory, 1, score=9.0) / "MANIFEST").write_text("[]")
    for step in (2, 3):
        write(directory, step, score=float(step))
    assert [path.name for path in directory.steps()] == ["step-00000003"]
