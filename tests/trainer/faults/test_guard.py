"""Numbers that are sane, and those that are not."""

from __future__ import annotations

import json
import math
import random

import pytest

from trainer.config import FaultsConfig
from trainer.errors import ConfigError
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


def test_a_timeout_shorter_than_the_beat_is_refused() -> None:
    with pytest.raises(ConfigError, match="heartbeat_timeout_s"):
        FaultsConfig(heartbeat_s=5.0, heartbeat_timeout_s=6.0)
