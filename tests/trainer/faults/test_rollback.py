"""Numbers that go wrong: which those are, and back to the last good version, in training and in serving."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.faults.runs import arguments, curve, events
from tests.trainer.fleet import fleet
from tests.trainer.test_connection import serving
from tests.trainer.zygote import Zygote
from trainer.config import FaultsConfig
from trainer.connection import ROLLBACK_ROUTE
from trainer.faults.guard import Guard


def guard(**options: object) -> Guard:
    return Guard(FaultsConfig(**{"spike_sigma": 6.0, **options}))  # type: ignore[arg-type]


def after(watching: Guard, count: int, level: float = 2.0) -> Guard:
    noise = random.Random(0)
    for _ in range(count):
        assert watching.problem(loss=level + noise.uniform(-0.1, 0.1), grad_norm=1.0) == ""
    return watching


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named_at_once(value: float) -> None:
    assert "loss is" in Guard(FaultsConfig()).problem(loss=value, grad_norm=1.0)
    assert "grad_norm is" in guard().problem(loss=1.0, grad_norm=value)


def test_a_leap_of_either_number() -> None:
    assert "loss leapt to 9" in after(guard(), 20).problem(loss=9.0, grad_norm=1.0)
    assert "grad_norm leapt to 9" in after(guard(), 20).problem(loss=2.0, grad_norm=9.0)


def test_what_is_no_leap() -> None:
    assert after(guard(), 7).problem(loss=9.0, grad_norm=1.0) == ""  # too little seen
    assert after(guard(), 20).problem(loss=-9.0, grad_norm=1.0) == ""  # downwards
    assert after(guard(spike_sigma=0.0), 20).problem(loss=9.0, grad_norm=1.0) == ""  # not watched
    steady = guard()
    for step in range(100):  # a slow drift takes the window with it
        assert steady.problem(loss=1 + step / 100, grad_norm=1.0) == ""


def test_patience_and_suspicion() -> None:
    watching = after(guard(spike_patience=2), 20)
    assert watching.problem(loss=9.0, grad_norm=1.0) == ""
    assert watching.suspicious
    assert "leapt" in watching.problem(loss=9.0, grad_norm=1.0)
    watching = after(guard(spike_patience=2), 20)
    watching.problem(loss=9.0, grad_norm=1.0)
    watching.problem(loss=2.0, grad_norm=1.0)
    assert not watching.suspicious, "one alone is forgotten"


def test_leaps_do_not_become_usual() -> None:
    watching = after(guard(spike_patience=50), 20)
    for _ in range(49):
        assert watching.problem(loss=9.0, grad_norm=1.0) == ""
    assert "leapt" in watching.problem(loss=9.0, grad_norm=1.0)


def test_its_state_survives_a_checkpoint() -> None:
    state = json.loads(json.dumps(after(guard(), 20).state_dict()))
    restored = guard()
    restored.load_state_dict(state)
    assert "leapt" in restored.problem(loss=9.0, grad_norm=1.0)


Training = Callable[..., tuple[int, str]]


@pytest.fixture
def train(zygote: Zygote, config: dict[str, Any], tmp_path: Path) -> Training:
    """A run whose weights become NaN before a step's pass, as often as it says there."""

    def run(poison: str = "", **changes: Any) -> tuple[int, str]:
        asked, said = arguments(config | changes, tmp_path), tmp_path / "said"
        started = zygote.start(asked, said, HOTSWAP_TEST_POISON=poison, HOTSWAP_ADMIN_KEY="secret")
        return zygote.wait(started), said.read_text()

    return run


def test_a_transient_fault_leaves_no_trace(train: Training, config: dict[str, Any], tmp_path: Path) -> None:
    """A step that was NaN once is computed again from the checkpoint: the curve is that of a run without a fault."""
    assert train(metrics=str(tmp_path / "through"), checkpoint=None)[0] == 0
    status, said = train("8x1", faults={"on_diverged": "rollback"})
    assert status == 0, said
    (event,) = events(config["metrics"], "rollback")
    assert (event["step"], event["to_step"], event["skipped_to"]) == (8, 6, None)
    assert "loss nan" in event["reason"]
    assert curve(config["metrics"]) == curve(tmp_path / "through")
    assert len(curve(config["metrics"])) == 12


def test_a_batch_that_does_it_again_is_left_out(train: Training, config: dict[str, Any]) -> None:
    status, said = train("8x2", faults={"on_diverged": "rollback"})
    assert status == 0, said
    first, second = events(config["metrics"], "rollback")
    assert (first["skipped_to"], second["skipped_to"]) == (None, 48), "6 records a step, 8 steps"
    assert max(curve(config["metrics"])) == 12


def test_there_is_an_end_to_it(train: Training, config: dict[str, Any]) -> None:
    status, said = train("8x9", faults={"on_diverged": "rollback", "max_rollbacks": 2})
    assert status == 1
    assert "after 2 rollbacks too" in said
    config["checkpoint"]["resume"] = "never"
    status, said = train("8x1")
    assert status == 1
    assert said.count("error: ") == 2
    assert "Traceback" not in said


@pytest.mark.parametrize("held", [True, False], ids=["version-held", "version-gone"])
def test_serving_follows(train: Training, config: dict[str, Any], qwen2: str, tmp_path: Path, held: bool) -> None:
    """Versions published since the checkpoint are bad too. The gateway is asked for the checkpoint's; one that no
    longer has it gets the same weights as a new version."""
    with fleet(qwen2, tmp_path) as running, serving() as admin:
        admin.statuses[ROLLBACK_ROUTE] = [] if held else [404]
        config["publish"] = running.sections["publish"]
        config["telemetry"] = {"admin_url": admin.url}
        status, said = train("8x1", faults={"on_diverged": "rollback"}, steps=9)
    assert status == 0, said
    (event,) = events(config["metrics"], "rollback")
    versions = {e["step"]: e["version"] for e in events(config["metrics"], "step")[:7]}
    asked = [request for request in admin.asked if request[0] == ROLLBACK_ROUTE]
    assert asked == [(ROLLBACK_ROUTE, "Bearer secret", {"version": versions[6]})]
    assert event["version"] == (versions[6] if held else versions[7] + 1)
