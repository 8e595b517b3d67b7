"""The benchmarks of transfers and of deltas, on a few bytes and a tiny model: they measure what they say they do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import orjson
import pytest

from loadtest.hosts.links import LinkUnavailable, shaped_link
from loadtest.hosts.namespaces import obstacle
from loadtest.models.checkpoints import TINY_SHAPE
from loadtest.transfer import bench as transfer
from loadtest.transfer.delta import codec, through
from loadtest.transfer.delta_trainer import random_weights, step
from loadtest.transfer.delta_training import Phase, Taken, _figures
from loadtest.transfer.peer import RAW
from tests.lacking import unable
from weightsync.format.manifest import TensorSpec, digest_of
from weightsync.transport import available


@pytest.mark.broad
def test_it_measures_every_transport_that_is_there(tmp_path: Path) -> None:
    report = transfer.run(tmp_path / "transfer.json", small=True, parts=["reads"])
    assert report == orjson.loads((tmp_path / "transfer.json").read_bytes())
    there = {name for name, reason in available().items() if not reason}
    assert set(report["by_transport"]) == there | {RAW, transfer.TLS}
    assert set(report["by_receivers"]) == set(report["by_hosts"]) == {"1", "2"}
    assert report["by_hosts"]["1"]["from_source"] == 1.0
    assert all(found["best_gbps"] >= found["median_gbps"] > 0 for found in report["by_transport"].values())


@pytest.mark.broad
def test_a_version_comes_to_hosts_behind_links(tmp_path: Path) -> None:
    if reason := obstacle():
        unable(reason)
    report = transfer.run(tmp_path / "links.json", small=True, parts=["links"])
    found = report["by_links"]
    assert {key for key in found if key[0].isdigit()} == {"1", "2", "2 of 2 places", "2 from 2 writers"}
    assert 0.45 < found["2 of 2 places"]["read_by_each"] < 0.8  # chunks are large here
    assert min(found["1"]["of_a_link"], found["2"]["of_a_link"]) > 0.9  # nothing is faster than its link
    assert found["1"]["copies_from_source"] == 1.0
    assert found["2 from 2 writers"]["read_by_each"] < 0.95  # what it wrote it need not read


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
