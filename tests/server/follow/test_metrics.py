"""What a follower counts for Prometheus, and how far behind it says its fleet is."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from server.cli.follow import run_follow
from server.errors import ConfigError
from server.follow.config import FollowConfig
from server.follow.metrics import FollowMetrics
from tests.server.follow.checkpoints import write
from tests.server.follow.following import AT_ONCE, Follow
from weightsync.bucket.metrics import serve


def value(page: str, name: str) -> float:
    (found,) = (line.removeprefix(f"{name} ") for line in page.splitlines() if line.startswith(f"{name} "))
    return float(found)


def test_a_release_is_counted_with_its_bytes_and_seconds(follow: Follow) -> None:
    follow.store_policy(AT_ONCE)
    write(follow.runs / "step-1", 1.0)
    (follow.runs / "step-2").mkdir()
    (follow.runs / "step-2" / "config.json").write_text("{}")
    (follow.runs / "step-2" / "model.safetensors").write_bytes(b"no checkpoint")
    follow.until_tried("step-2", "refused")
    write(follow.runs / "step-3", 3.0)
    follow.until_tried("step-3", "released")
    port = serve(follow.follower.metrics.registry, "127.0.0.1:0")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    assert value(page, 'hotswap_follow_candidates_total{outcome="released"}') == 1
    assert value(page, 'hotswap_follow_candidates_total{outcome="refused"}') == 1
    assert value(page, "hotswap_follow_released_version") == follow.active
    assert value(page, "hotswap_follow_fetched_bytes_total") > 0
    assert value(page, 'hotswap_follow_seconds_count{phase="publish"}') == 1
    assert (value(page, "hotswap_follow_lag_candidates"), value(page, "hotswap_follow_lag_seconds")) == (0, 0)


def test_the_lag_is_that_of_the_oldest_candidate_that_is_not_over() -> None:
    now = [100.0]
    metrics = FollowMetrics(lambda: now[0])

    def lag() -> tuple[float, float]:
        page = generate_latest(metrics.registry).decode()
        return value(page, "hotswap_follow_lag_candidates"), value(page, "hotswap_follow_lag_seconds")

    assert lag() == (0, 0)
    for at, identity in ((100.0, "a"), (105.0, "b"), (107.0, "a"), (110.0, "c")):
        now[0] = at
        metrics.seen(identity)
    assert lag() == (3, 10)
    metrics.over("a", "superseded", None)
    assert lag() == (2, 5)
    metrics.over("b", "released", 7)
    assert lag() == (1, 0)
    metrics.over("c", "released", 8)
    assert lag() == (0, 0)
    metrics.seen("d")
    metrics.seen("e")
    metrics.over("e", "released", 9)
    assert lag() == (0, 0), "what was seen before is older, and is not taken any more"


def test_an_address_that_cannot_be_served_is_said_at_the_start(tmp_path: Path) -> None:
    config = FollowConfig(source=f"dir://{tmp_path}", cache_dir=tmp_path / "cache", metrics="127.0.0.1:x")
    with pytest.raises(ConfigError, match=r"--metrics 127\.0\.0\.1:x"):
        run_follow(config)
