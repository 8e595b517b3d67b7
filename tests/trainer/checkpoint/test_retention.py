"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.checkpoint.directory import CheckpointDir, Retention

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
        directory.stage(step)
        directory.commit(step, {"score": score})
    assert [path.name for path in directory.steps()] == ["step-00000005", "step-00000002"]


def test_one_without_a_readable_manifest_has_no_score(tmp_path: Path) -> None:
    directory = CheckpointDir(tmp_path, Retention(last=1, best=1))
    directory.stage(1)
    (directory.commit(1, {"score": 9.0}) / "MANIFEST").write_text("[]")
    for step in (2, 3):
        directory.stage(step)
        directory.commit(step, {"score": float(step)})
    assert [path.name for path in directory.steps()] == ["step-00000003"]
