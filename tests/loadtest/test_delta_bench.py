"""The delta benchmark's parts, on a tiny model: they measure what they say they do."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest

from loadtest.hosts.links import LinkUnavailable, shaped_link
from loadtest.models.checkpoints import TINY_SHAPE
from loadtest.transfer.delta import codec, through
from loadtest.transfer.delta_trainer import random_weights, step
from loadtest.transfer.delta_training import Phase, Taken, _figures
from tests.lacking import unable
from weightsync.format.manifest import TensorSpec, digest_of


def test_a_step_changes_the_share_it_is_told() -> None:
    weights = random_weights(TINY_SHAPE)
    before = {name: tensor.copy() for name, tensor in weights.items()}
    step(weights, 0.03, seed=0)
    changed = sum(int((weights[name] != before[name]).sum()) for name in weights)
    assert changed / sum(t.size for t in weights.values()) == pytest.approx(0.03, rel=0.1)


def test_a_delta_of_a_hundredth_is_about_a_hundredth_of_the_bytes() -> None:
    found = codec(0.01, 1, small=True)
    assert 0.003 < found["delta_of_raw"] < 0.02
    assert min(found["encode_gbps_1"], found["encode_gbps_2"], found["apply_gbps"]) > 0


def taken(version: int, words: np.ndarray) -> Taken:  # type: ignore[type-arg]
    data = words.view(np.uint8)
    row = (TensorSpec("bfloat16", words.shape), digest_of(data.data))
    return Taken(version, f"{version:032x}", {"w": row}, {"w": data})


def test_only_versions_that_follow_each_other_are_compared() -> None:
    words = np.full(1000, 0x3F80, np.uint16)
    second, third = words.copy(), words.copy()
    second[:10] += 1
    third[:500] += 1
    versions = [taken(1, words), taken(2, second), taken(4, third)]
    found = _figures(Phase("x", "grpo", 1e-6, 3, "model"), versions)
    assert (found["steps_compared"], found["elements"], found["raw_bytes"]) == (1, 1000, 2000)
    assert found["changed_share"]["median"] == 0.01


@pytest.mark.broad
def test_versions_travel_between_namespaces() -> None:
    try:
        with shaped_link(None):
            pass
    except LinkUnavailable as error:
        unable(str(error))
    found = through(1.0, 0.01, 1, small=True)
    assert found["delta"]["as_meant"]
    assert found["full"]["as_meant"]
    assert found["delta"]["sent_bytes"] < found["full"]["sent_bytes"] / 5
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"hs{os.getpid()}" not in namespaces
