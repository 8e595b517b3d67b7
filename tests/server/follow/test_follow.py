"""A follower and a gateway that publishes and releases, whose instances are agents' records; the follower is killed."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

from server.cli.admin import AdminClient
from server.cli.follow import open_source, run_follow
from server.errors import ConfigError, RequestFailed
from server.follow import loop
from server.follow.config import FollowConfig
from server.follow.loop import Follower, FollowMetrics
from server.follow.sources import FollowError
from server.follow.state import StateFile
from tests.server.follow.checkpoints import write
from tests.server.follow.following import AT_ONCE, Follow, Killed
from tests.server.gateway.admin.test_releases import POLICY, until
from tests.server.gateway.harness import KEYS, RunningGateway
from tests.waiting import wait_until
from weightsync.bucket.metrics import serve
from weightsync.control.records import VersionRecord


def test_checkpoints_in_another_dtype_are_converted_on_request(follow: Follow) -> None:
    follow.store_policy(AT_ONCE)
    write(follow.runs / "step-1", 1.0, dtype=np.float64)
    follow.until_tried("step-1", "refused")
    follow.plan = replace(follow.plan, cast=True)
    follow.again()
    write(follow.runs / "step-2", 2.0, dtype=np.float64)
    follow.until_tried("step-2", "released")


def test_each_new_checkpoint_is_released_by_the_policy(follow: Follow) -> None:
    follow.store_policy(AT_ONCE)
    follow.follower.step()
    assert follow.file.state.current is None
    write(follow.runs / "step-9", 1.0, shards=2, sums=True)
    follow.until_tried("step-9", "released")
    assert follow.active == 2
    write(follow.runs / "step-10", 2.0)
    follow.until_tried("step-10", "released")
    assert (follow.active, follow.sources()) == (3, ["base", "step-9", "step-10"])
    assert [entry.reason for entry in follow.deeds("release")] == [
        f"{name} of dir://{follow.runs}" for name in ("step-9", "step-10")
    ]
    shutil.rmtree(follow.runs / "step-10")  # an older one is no reason to go back
    write(follow.runs / "step-9", 3.0)
    follow.steps()
    assert (follow.active, follow.file.state.current, follow.file.state.tried[-1].name) == (3, None, "step-10")


def test_what_was_taken_back_is_not_tried_again_until_it_changes(follow: Follow) -> None:
    follow.store_policy(POLICY)
    write(follow.runs / "step-1", 1.0)
    follow.until(lambda s: s.current and s.current.release)
    until(follow.running, "held")
    follow.admin.call("POST", "/admin/releases/cancel", {}, "wrong data")
    assert follow.until_tried("step-1", "refused") == "rolled back: cancelled by admin key: wrong data"
    follow.again()
    follow.steps()
    assert (follow.file.state.current, len(follow.deeds("release"))) == (None, 1)
    follow.store_policy(AT_ONCE)
    write(follow.runs / "step-1", 2.0)
    follow.until_tried("step-1", "released")
    assert follow.active == 3


def test_checkpoints_that_are_none_are_refused_with_the_reason(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    follow.store_policy(AT_ONCE)
    cut = write(follow.runs / "step-1") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    assert "cut off inside tensor" in follow.until_tried("step-1", "refused")
    write(follow.runs / "step-2", width=16)
    assert "shape" in follow.until_tried("step-2", "refused")
    (write(follow.runs / "step-3") / "config.json").unlink()
    follow.steps()
    assert follow.file.state.current is None
    refuse_pushes(follow, monkeypatch, RequestFailed("tensor 'x' is missing", 422, "missing_tensor"))
    write(follow.runs / "step-4")
    assert follow.until_tried("step-4", "refused") == "tensor 'x' is missing"
    assert follow.sources() == ["base", "step-2"]


@pytest.mark.parametrize("after", ["POST /admin/weights", "POST /admin/releases"])
def test_killed_before_it_could_note_what_it_did(follow: Follow, after: str) -> None:
    follow.store_policy(AT_ONCE)
    write(follow.runs / "step-1")
    follow.dies_and_begins_again(after)
    follow.until_tried("step-1", "released")
    assert (follow.active, follow.sources(), len(follow.deeds("release"))) == (2, ["base", "step-1"], 1)


def test_a_release_that_ended_while_the_follower_was_dead(follow: Follow) -> None:
    follow.store_policy(POLICY)
    write(follow.runs / "step-1")
    follow.dies_and_begins_again("POST /admin/releases")
    until(follow.running, "held")
    follow.admin.call("POST", "/admin/releases/cancel", {}, "no good")
    until(follow.running, "rolled_back")
    assert follow.until_tried("step-1", "refused") == "rolled back: cancelled by admin key: no good"
    assert len(follow.deeds("release")) == 1


def test_a_version_that_was_retired_before_its_release_is_published_again(follow: Follow) -> None:
    follow.plan = replace(follow.plan, policy="mine")
    follow.again()
    write(follow.runs / "step-1")
    with pytest.raises(RequestFailed, match="No policy"):
        follow.until(lambda _: False)
    found = follow.running.store.get(KEYS.version(2))
    assert found is not None
    retired = replace(VersionRecord.from_json(found.value), state="retired")
    follow.running.store.put(KEYS.version(2), retired.to_json())
    follow.store_policy(AT_ONCE, "mine")
    follow.until_tried("step-1", "released")
    assert follow.active == 3


def test_a_lost_state_publishes_nothing_twice(follow: Follow) -> None:
    follow.store_policy(AT_ONCE)
    write(follow.runs / "step-1")
    follow.until_tried("step-1", "released")
    (follow.root / "cache" / "state.json").unlink()
    follow.again()
    follow.until_tried("step-1", "released")
    assert (follow.active, follow.sources(), len(follow.deeds("release"))) == (2, ["base", "step-1"], 1)


def test_newer_checkpoints_wait_for_a_release_and_the_newest_goes_on(follow: Follow) -> None:
    follow.store_policy(POLICY)
    write(follow.runs / "step-1", 1.0)
    follow.until(lambda s: s.current and s.current.release)
    until(follow.running, "held")
    for number in (2, 3):
        write(follow.runs / f"step-{number}", float(number))
    follow.steps()
    assert follow.file.state.current is not None
    assert follow.file.state.current.name == "step-1"
    follow.store_policy(AT_ONCE)
    follow.admin.call("POST", "/admin/releases/cancel", {})
    follow.until_tried("step-3", "released")
    assert follow.sources() == ["base", "step-1", "step-3"]


def somebody_releases(follow: Follow) -> None:
    push = {"path": str(write(follow.root / "other", 7.0)), "activate": False}
    version = follow.admin.call("POST", "/admin/weights", push)["version"]
    follow.store_policy(POLICY, "slow")
    follow.admin.call("POST", "/admin/releases", {"version": version, "policy": "slow"})
    follow.store_policy(AT_ONCE)


def test_somebody_else_s_release_comes_first(follow: Follow) -> None:
    """A candidate that waits for it makes way for a newer one, unpublished."""
    somebody_releases(follow)
    until(follow.running, "held")
    write(follow.runs / "step-1", 1.0)
    follow.until(lambda s: s.current and s.current.name == "step-1")
    follow.follower.step()
    write(follow.runs / "step-2", 2.0)
    follow.until(lambda s: s.current and s.current.name == "step-2")
    assert follow.file.state.tried[-1].outcome == "superseded"
    assert follow.sources() == ["base", "other"]
    follow.admin.call("POST", "/admin/releases/cancel", {})
    follow.until_tried("step-2", "released")
    assert follow.sources() == ["base", "other", "step-2"]


def test_what_was_gone_before_it_was_published_may_come_back(follow: Follow) -> None:
    somebody_releases(follow)
    write(follow.runs / "step-1", 1.0)
    follow.until(lambda s: s.current)
    (follow.runs / "step-1").rename(follow.root / "away")
    assert follow.until_tried("step-1", "superseded") == "it is gone from the source"
    (follow.root / "away").rename(follow.runs / "step-1")
    until(follow.running, "held")
    follow.admin.call("POST", "/admin/releases/cancel", {})
    follow.until_tried("step-1", "released")


def test_what_is_out_of_reach_is_tried_again(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    follow.store_policy(AT_ONCE)
    write(follow.runs / "step-1")
    follow.runs.rename(follow.root / "away")
    with pytest.raises(FollowError, match="No such file"):
        follow.follower.step()
    (follow.root / "away").rename(follow.runs)
    good, follow.admin = follow.admin, AdminClient(None, "http://127.0.0.1:1", follow.place[1])
    with pytest.raises(RequestFailed, match="no answer from"):
        follow.follower.step()
    follow.admin = good
    with monkeypatch.context() as patch:
        refuse_pushes(follow, patch, RequestFailed("The arena has no room", 507, "arena_full"))
        with pytest.raises(RequestFailed, match="no room"):
            follow.follower.step()
    follow.until_tried("step-1", "released")
    assert follow.sources() == ["base", "step-1"]


def refuse_pushes(follow: Follow, monkeypatch: pytest.MonkeyPatch, error: RequestFailed) -> None:
    def call(method: str, path: str, *rest: Any) -> Any:
        if (method, path) == ("POST", "/admin/weights"):
            raise error
        return AdminClient.call(follow.admin, method, path, *rest)

    monkeypatch.setattr(follow, "call", call)


def test_a_gateway_that_does_not_see_the_directory_is_told_so(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    write(follow.runs / "step-1")
    refuse_pushes(follow, monkeypatch, RequestFailed("no such file or directory", 400, "checkpoint_error"))
    with pytest.raises(RequestFailed, match=r"the gateway's host must see .*step-1 as well: no such file"):
        follow.follower.step()
    assert follow.file.state.tried == ()


def test_a_checkpoint_must_stay_as_it_is(follow: Follow) -> None:
    now = 100.0
    follow.plan = FollowConfig("", interval_s=0.01, settle_s=5.0)
    follow.again()
    follow.follower._clock = lambda: now
    follow.store_policy(AT_ONCE)
    write(follow.runs / "step-1", 1.0)
    for value in (2.0, 3.0):
        follow.follower.step()
        assert follow.file.state.current is None
        now += 4.0
        write(follow.runs / "step-1", value)
    follow.follower.step()
    now += 5.0
    follow.until_tried("step-1", "released")
    assert follow.sources() == ["base", "step-1"]


def test_a_checkpoint_that_changes_while_it_is_published_is_not_released(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow.store_policy(AT_ONCE)
    write(follow.runs / "step-1", 1.0)

    def call(method: str, path: str, *rest: Any) -> Any:
        answer = AdminClient.call(follow.admin, method, path, *rest)
        if (method, path) == ("POST", "/admin/weights") and answer["version"] == 2:
            write(follow.runs / "step-1", 2.0)
        return answer

    monkeypatch.setattr(follow, "call", call)
    assert follow.until_tried("step-1", "superseded") == "it was changed while it was published"
    follow.until_tried("step-1", "released")
    assert (follow.active, len(follow.deeds("release"))) == (3, 1)


def test_activated_at_once_and_with_the_approval_of_somebody_else(follow: Follow) -> None:
    follow.plan = FollowConfig("", interval_s=0.01, settle_s=0.0, activate=True)
    follow.again()
    write(follow.runs / "step-1", 1.0)
    follow.until_tried("step-1", "released")
    assert (follow.active, follow.deeds("release")) == (2, [])
    follow.admin.call("PUT", "/admin/policy", {"approvals": ["activate"]})
    write(follow.runs / "step-2", 2.0)
    waiting = follow.until(lambda s: s.current and s.current.pending).current
    assert waiting is not None
    follow.again()
    follow.admin.call("DELETE", f"/admin/approvals/{waiting.pending}", None)
    assert "approval was refused" in follow.until_tried("step-2", "refused")
    assert follow.active == 2


@pytest.mark.parametrize("dies", [False, True])
def test_a_release_waits_for_the_approval_of_somebody_else(follow: Follow, dies: bool) -> None:
    follow.store_policy(AT_ONCE)
    follow.admin.call("PUT", "/admin/policy", {"approvals": ["release"]})
    write(follow.runs / "step-1")
    if dies:
        follow.dies_and_begins_again("POST /admin/releases")
    waiting = follow.until(lambda s: s.current and s.current.pending).current
    assert waiting is not None
    (asked,) = follow.admin.call("GET", "/admin/approvals")["pending"]
    assert asked["id"] == waiting.pending
    follow.follower.step()
    made = follow.admin.call("POST", "/admin/keys", {"name": "second", "scopes": ["operator"]})["key"]
    (second := follow.root / "second.key").write_text(made)
    AdminClient(None, str(follow.place[0]), second).call("POST", f"/admin/approvals/{waiting.pending}")
    follow.until_tried("step-1", "released")
    assert (follow.active, len(follow.deeds("release"))) == (2, 1)


def test_where_no_version_is_active_the_first_one_is_activated(gateway: RunningGateway, tmp_path: Path) -> None:
    follow = Follow(gateway, tmp_path)
    write(follow.runs / "step-1", 1.0)
    follow.until_tried("step-1", "released")
    assert follow.active == 1
    follow.file.close()


def test_the_process_is_killed_between_publication_and_release(follow: Follow) -> None:
    """It waits for a policy that is not stored, is killed, and goes on."""
    source = f"dir://{follow.runs}"
    write(follow.runs / "step-1")
    with follow.process(source, subprocess.PIPE, policy="mine") as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "No policy" in line)
        assert "WARNING" in said
    follow.store_policy(AT_ONCE, "mine")
    with follow.process(source, policy="mine") as process:
        wait_until(lambda: follow.active == 2, 120, process=process)
        state = follow.root / "process" / "state.json"
        wait_until(lambda: "released" in state.read_text(), 60, process=process)
        process.terminate()
        assert process.wait(60) == 0
    assert (follow.sources(), len(follow.deeds("release"))) == (["base", "step-1"], 1)


def test_a_fault_is_told_once_and_tried_again_later_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    source, file = open_source(FollowConfig(source=str(tmp_path))), StateFile(tmp_path / "cache", "dir:///x")
    follower = Follower(source, AdminClient(None, None, None), file, tmp_path, FollowConfig(""))

    def step() -> float:
        if len(waits) < 8:
            raise FollowError("nobody answers")
        if len(waits) == 8:
            return 3.0
        raise Killed

    monkeypatch.setattr(follower, "step", step)
    monkeypatch.setattr(loop, "time", SimpleNamespace(sleep=waits.append))
    with caplog.at_level("INFO", "hotswap.follow"), pytest.raises(Killed):
        follower.run()
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 3.0]
    assert caplog.messages == ["nobody answers"]


# what it counts for Prometheus, and how far behind it says its fleet is


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
