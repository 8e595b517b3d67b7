"""A record whose reward is wrong by orders of magnitude: back in training, and in serving through a real gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.gateway.harness import ADMIN_KEY, RunningGateway, running_gateway
from tests.trainer.data.writing import jsonl
from tests.trainer.faults.runs import events
from tests.trainer.fleet import Fleet, fleet, never_behind
from tests.trainer.zygote import Zygote
from trainer.data.records import take

pytestmark = pytest.mark.broad

BATCH, STEPS, BAD_STEP = 4, 13, 11
RECORDS = BATCH * STEPS * 2
BAD_NUMBER = BATCH * (BAD_STEP - 1) + 2


@pytest.fixture
def served(qwen2: str, tmp_path: Path) -> Iterator[tuple[Fleet, RunningGateway]]:
    """An instance, and the gateway in front of the same store."""
    with (
        fleet(qwen2, tmp_path) as running,
        running_gateway(tmp_path, model="tiny", store=running.store_url) as gateway,
        never_behind(running),
    ):
        yield running, gateway


@pytest.fixture
def run(config: dict[str, Any], served: tuple[Fleet, RunningGateway], tmp_path: Path) -> dict[str, Any]:
    """GRPO on a file, one of whose records is worth a million times the others."""
    running, gateway = served
    (bad,) = take(RECORDS, 0, BAD_NUMBER, 1)
    records = [{"prompt": f"{n}=", "answer": "", "extra": {"scale": 1e6 if n == bad else 1.0}} for n in range(RECORDS)]
    return (
        config
        | running.sections
        | {
            "data": {"kind": "jsonl", "path": str(jsonl(tmp_path / "data.jsonl", records)), "workers": 0},
            "algorithm": {"name": "grpo", "samples_per_prompt": 4, "scale_rewards": False},
            "rewards": [{"kind": "callable", "target": "tests.trainer.rewards.functions:scaled"}],
            "rollout": {"max_tokens": 4},
            "telemetry": {"admin_url": f"http://127.0.0.1:{gateway.admin_port}"},
            "faults": {"on_diverged": "rollback", "spike_sigma": 10.0},
            "optimizer": {"lr": 1e-3},
            "steps": STEPS,
            "batch": BATCH,
        }
    )


@pytest.mark.parametrize(
    ("every", "held"), [(3, True), (6, False)], ids=["version-held-by-the-gateway", "version-retired-long-ago"]
)
def test_a_leap_takes_training_and_serving_back(
    zygote: Zygote, run: dict[str, Any], served: tuple[Fleet, RunningGateway], tmp_path: Path, every: int, held: bool
) -> None:
    """The step leaps, is repeated from the checkpoint, leaps again, and is left out with all that was drawn for it."""
    running, gateway = served
    run["checkpoint"] |= {"every": every}
    zygote.train(run, tmp_path, HOTSWAP_ADMIN_KEY=ADMIN_KEY)

    good, path = (BAD_STEP - 1) // every * every, run["metrics"]
    first, second = events(path, "rollback")
    assert [(e["step"], e["to_step"]) for e in (first, second)] == [(BAD_STEP, good)] * 2
    assert (first["skipped_to"], second["skipped_to"]) == (None, BATCH * BAD_STEP)
    assert "grad_norm leapt to" in first["reason"]
    steps = events(path, "step")
    trained = [step["step"] for step in steps]
    again = [*range(good + 1, BAD_STEP)]
    assert trained == [*range(1, BAD_STEP), *again, *range(good + 1, STEPS + 1)], "the leap itself is no step"

    # Repeated steps were sampled from the checkpoint's very weights: every number is the same, to the last bit.
    once, twice = ([_numbers(step) for step in steps[first:][: len(again)]] for first in (good, BAD_STEP - 1))
    assert once == twice
    assert all(step["reward_mean"] < 10 for step in steps)

    # Serving went through the same: forwards, back to the checkpoint's version or its weights anew, and forwards.
    was_active = steps[good - 1]["version"]
    bad = steps[BAD_STEP - 2]["version"]
    assert (first["version"] == second["version"] == was_active) is held
    assert (first["version"] > bad) is not held
    after = running.versions.index(bad) + 1
    assert running.versions[after] == first["version"]
    assert running.versions.count(was_active) == (3 if held else 1)
    active = httpx.get(
        f"http://127.0.0.1:{gateway.admin_port}/admin/weights/active", headers={"authorization": f"Bearer {ADMIN_KEY}"}
    ).json()
    assert active["version"] == running.server.version == steps[-1]["version"]
    assert all(step["version_lag_max"] == 0 for step in steps)


def _numbers(step: dict[str, Any]) -> list[float]:
    return [step[key] for key in ("loss", "grad_norm", "reward_mean", "entropy", "tokens", "lr")]
