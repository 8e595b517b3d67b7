"""Whole runs under each schedule: a real trainer process, real swaps, a real model behind `/generate`.

All start from the same fine-tuned model, which answers one too many, and learn from rewards alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.faults.runs import SUMS, events
from tests.trainer.fleet import Fleet, exported, fleet, same_tensors
from tests.trainer.zygote import Zygote


@pytest.fixture(scope="module")
def mistaken(zygote: Zygote, tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has learned the mistake."""
    directory = tmp_path_factory.mktemp("mistaken") / "model"
    return zygote.taught(tiny_model, directory, mistake="off_by_one", noise=0.8)


@pytest.fixture(scope="module")
def served(mistaken: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(mistaken, tmp_path_factory.mktemp("fleet")) as running:
        yield running


def reinforced(model: str, served: Fleet, **changes: Any) -> dict[str, Any]:
    return {
        **served.sections,
        "model": {"path": model},
        "data": SUMS,
        "algorithm": {"name": "grpo", "samples_per_prompt": 8},
        "steps": 30,
        "batch": 15,  # every problem there is, so that a step's rewards do not depend on which it got
        "optimizer": {"lr": 5e-4},
        "rollout": {"max_tokens": 4, "request": "group"},
        "eval": [{"every": 100, "prompts": 10}],
    } | changes


@pytest.mark.sample(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("schedule", "oldest"),
    [
        ({"name": "one-step-off"}, 1),
        ({"name": "colocated"}, 1),  # the commit is written a moment before the instance flips
        ({"name": "async", "max_lag": 2}, 2),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_a_run_learns_from_samples_within_its_bound(
    zygote: Zygote, mistaken: str, served: Fleet, tmp_path: Path, schedule: dict[str, Any], oldest: int
) -> None:
    watch = {"samples": 2, "samples_every": 15}
    run = zygote.train(reinforced(mistaken, served, schedule=schedule, watch=watch), tmp_path)
    trained, shown = events(run, "step"), events(run, "samples")
    assert [event["step"] for event in shown] == [15, 30]
    for sample in (sample for event in shown for sample in event["samples"]):
        assert set(sample["prompt"]) <= set("0123456789+=")
        assert sample["completion"]
        assert sample["rewards"] == {"exact_match": sample["reward"]}
        assert set(sample["versions"]) <= {step["version"] for step in trained} | {trained[0]["version"] - 1}
    assert {len(event["samples"]) for event in shown} == {2}
    rewards = [step["reward_mean"] for step in trained]
    # The first step is sampled from the mistaken weights, by seeds: about 0.2, give or take 0.04 of luck. Half of the
    # steps is enough for the luck of asynchronous ones to even out: they come to 0.65 and more.
    assert sum(rewards[15:]) / 15 > rewards[0] + 0.25, rewards
    assert max(step["version_lag_max"] for step in trained) <= oldest
    if schedule["name"] != "colocated":  # it did overlap; by how much depends on who is faster
        assert max(step["version_lag_max"] for step in trained) >= 1
    assert sum(step["stale_groups"] for step in trained) == 0
    assert [step["version"] for step in trained] == sorted({step["version"] for step in trained})


@pytest.mark.broad
@pytest.mark.timeout(300)
@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2}], ids=["1 rank", "2 stages"])
def test_models_look_at_rollouts_as_they_come_and_all_is_counted(
    zygote: Zygote, mistaken: str, served: Fleet, tmp_path: Path, parallel: dict[str, int]
) -> None:
    """A KL term wants the reference's log-probs; DAPO's filter wants other groups; packing has its own layout."""
    algorithm = {"name": "grpo", "samples_per_prompt": 4, "kl_coef": 0.05, "drop_zero_std": True}
    packing = {"max_tokens": 64}
    changes = {"algorithm": algorithm, "steps": 4, "micro_batch": 8, "packing": packing, "parallel": parallel}
    trained = events(zygote.train(reinforced(mistaken, served, **changes), tmp_path), "step")
    assert all(step["inference_ms"] > 0 for step in trained)
    assert trained[0]["kl"] == pytest.approx(0, abs=1e-6)  # the first step's weights are the reference's
    assert max(step["kl"] for step in trained) > 1e-6
    assert all(step["zero_std_groups"] == 0 for step in trained if step["filtered_groups"] < 3 * 15)
    assert sum(step["filtered_groups"] for step in trained) > 0


@pytest.mark.timeout(300)
def test_sets_are_evaluated_each_in_its_own_way_and_the_best_weights_stay(
    zygote: Zygote, mistaken: str, served: Fleet, tmp_path: Path
) -> None:
    off_by_one = {"data": SUMS | {"mistake": "off_by_one", "noise": 1.0, "held_out": 0, "largest": 2}}
    sets = [
        {"name": "sampled", "every": 1, "prompts": 10, "samples": 4, "temperature": 0.7, "pass_at": [1, 2]},
        {
            "name": "digits",
            "every": 2,
            "prompts": 5,
            "rewards": [{"kind": "regex", "pattern": "^[0-9]*$"}],
            **off_by_one,
        },
    ]
    config = reinforced(mistaken, served, eval=sets, steps=5, batch=5) | {
        "best": "sampled/pass_at_2",
        "checkpoint": {"path": str(tmp_path / "checkpoints"), "every": 1, "keep": 1, "keep_best": 1},
        "save_to": str(tmp_path / "final"),
        "save_every": 2,
        "save_best": True,
    }
    evals = events(zygote.train(config, tmp_path), "eval")
    assert [event["step"] for event in evals if event["set"] == "sampled"] == [0, 1, 2, 3, 4, 5]
    digits = [event for event in evals if event["set"] == "digits"]
    assert [event["step"] for event in digits] == [0, 2, 4, 5]
    assert [event["prompts"] for event in digits] == [5] * 4
    assert {key for key in digits[0] if key.startswith("reward/")} == {"reward/regex"}
    assert digits[0]["accuracy"] == 1.0  # wrong sums are digits too
    sampled = {event["step"]: event for event in evals if event["set"] == "sampled"}
    assert all(event["pass_at_1"] == pytest.approx(event["accuracy"]) for event in sampled.values())

    scores = {step: event["pass_at_2"] for step, event in sampled.items() if step}
    best = max(scores, key=lambda step: (scores[step], -step))
    final = tmp_path / "final"
    record = json.loads((final / "best/best.json").read_text())
    assert record == {"step": best, "by": "sampled/pass_at_2", "value": scores[best]}
    assert {path.name for path in final.iterdir() if path.is_dir()} == {"best", "step-2", "step-4"}
    assert not same_tensors(exported(final / "step-2"), exported(final / "step-4"))
    kept = {int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*")}
    assert kept == {best, 5}

    path = tmp_path / "config.yaml"
    for which, expected in (([], final), (["--step", str(best)], final / "best")):
        directory = tmp_path / f"exported-{expected.name}"
        status, said, errors = zygote.run(["--config", str(path), "--export", str(directory), *which], tmp_path)
        assert status == 0, errors
        assert f"the weights of step {best if which else 5}" in said
        assert same_tensors(exported(directory), exported(expected))
    status, _, errors = zygote.run(["--config", str(path), "--export", str(tmp_path / "no"), "--step", "99"], tmp_path)
    assert status == 2
    assert "has no checkpoint of step 99. Name a step that was kept." in errors

    # A run that goes on knows how good its best was.
    (final / "best/best.json").write_text(json.dumps(record | {"value": 2.0}))
    zygote.train(config | {"steps": 6}, tmp_path)
    assert json.loads((final / "best/best.json").read_text())["value"] == 2.0
