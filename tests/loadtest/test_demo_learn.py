"""`make demo-learn`: corrections of users train a version that a policy releases; a misled one is taken back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.demo.learn import POLICY, SUMS, Seen, main
from server.gateway.release.policy import parse

STARTS = ("server.gateway", "server.cli instance", "trainer.main", "weightsync.push", "weightsync.persist")


def test_its_policy_is_one() -> None:
    assert [step.traffic for step in parse(POLICY).steps] == [0, 20, 50]
    assert len(parse(POLICY).of_step(2)) == 3


def test_accuracy_is_of_the_answers_that_users_got() -> None:
    seen = Seen()
    assert seen.accuracy(1) == 0.0
    seen.answers[1], seen.right[1] = 8, 2
    assert seen.accuracy(1) == 0.25
    assert len(SUMS) == 216


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.broad
@pytest.mark.timeout(900)
def test_it_learns_and_is_not_misled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    status = main(["--dir", str(tmp_path / "run"), "--json", str(figures)])
    said = capsys.readouterr().out
    assert status == 0, said
    found = json.loads(figures.read_text())
    assert found["releases"]["2"]["state"] == "done"
    assert found["releases"]["3"]["state"] == "rolled_back"
    assert "reward/correct max decrease 0.1" in found["releases"]["3"]["reason"]
    assert found["versions"]["2"]["right"] > found["versions"]["1"]["right"]
    assert found["lost"] == 0
