"""Training runs publish into a bucket, and fleets that know only the bucket get every byte of what was trained."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from safetensors.numpy import load_file

from server.cli.follow import open_source
from server.follow.config import FollowConfig
from server.ports import free_port
from tests import stock
from tests.live import LiveServer
from tests.server.follow.conftest import gateway  # noqa: F401 - a fixture
from tests.server.follow.following import AT_ONCE, Follow
from tests.server.follow.test_versions import assert_holds, part_bytes, s3  # noqa: F401 - a fixture
from tests.server.gateway.admin.test_admin import two_participants
from tests.server.gateway.harness import KEYS, RunningGateway
from tests.trainer.faults.runs import arguments, fine_tuning
from tests.trainer.fleet import exported, fleet, keep, same_tensors
from tests.trainer.ranks import Ranks
from tests.trainer.test_mixture import ENGINE, PROMPTS
from tests.trainer.zygote import Zygote
from tests.waiting import wait_until
from trainer.tiny_model import write_tiny_model
from weightsync.bucket.objects import Bucket
from weightsync.control.parts import ADAPTER_CONFIG

LORA: dict[str, Any] = {"name": "math", "rank": 4}


@pytest.fixture
def followed(gateway: RunningGateway, tmp_path: Path) -> Iterator[Follow]:  # noqa: F811
    """A fleet without a version, and its follower."""
    made = Follow(gateway, tmp_path)
    made.store_policy(AT_ONCE)
    with two_participants(gateway):
        yield made
    made.file.close()


def configured(root: Path, model: str, url: str, **more: Any) -> list[str]:
    """The arguments of a run of fine-tuning with a bucket and no store."""
    publish = {"model": KEYS.model, "dtype": "float32", "bucket": {"url": url}} | more.pop("publish", {})
    settings: dict[str, Any] = {"steps": 3, "publish": publish} | more
    return arguments(fine_tuning(model, **settings), root)


def told(said: str, event: str) -> list[dict[str, Any]]:
    return [found for line in said.splitlines() if (found := json.loads(line))["event"] == event]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run"


def released(followed: Follow, url: str, number: int) -> int:
    """The follower's version of the bucket's, when the fleet has it."""
    followed.again(open_source(FollowConfig(source=f"versions+{url}")))
    followed.until_tried(f"version {number}", "released")
    assert followed.active is not None
    return followed.active


def scratch() -> set[Path]:
    return set(Path("/dev/shm").glob("hotswap-bucket-*"))


def nothing_left_since(before: set[Path]) -> None:
    """Other runs on this machine have such directories too, until they end."""
    there = scratch() - before
    wait_until(lambda: not there & scratch(), 120)


@pytest.fixture(autouse=True)
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTSWAP_STORE", raising=False)


@pytest.mark.parametrize("kind", ["url", pytest.param("s3", marks=pytest.mark.broad)])
def test_a_run_without_a_store_reaches_a_fleet_that_follows_its_bucket(
    zygote: Zygote, qwen2: str, tmp_path: Path, kind: str, request: pytest.FixtureRequest, followed: Follow
) -> None:
    before, saved, url = scratch(), tmp_path / "saved", request.getfixturevalue(kind)
    status, said, errors = zygote.run(configured(tmp_path, qwen2, url, save_to=str(saved)), tmp_path)
    assert (status, errors) == (0, "")
    outcomes = told(said, "carried")
    assert len(outcomes) == 3
    arrived = [outcome for outcome in outcomes if not outcome["skipped"]]
    bucket = Bucket(url)
    versions = [bucket.read(number) for number in bucket.numbers()]
    assert [version.number for version in versions] == [outcome["number"] for outcome in arrived]
    assert [version.nbytes for version in versions] == [outcome["sent"] for outcome in arrived]
    assert (versions[0].base, versions[-1].header.step) == (None, 3)
    nothing_left_since(before)
    assert "a-secret-of-the-tests" not in said
    active = released(followed, url, versions[-1].number)
    assert_holds(followed, active, load_file(saved / "model.safetensors"))


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}], ids=["one", "tensor"])
def test_every_layout_puts_the_same_versions_there_and_later_ones_are_differences(
    one_rank: Ranks, qwen2: str, tmp_path: Path, url: str, parallel: dict[str, int], followed: Follow
) -> None:
    about = {"path": qwen2, "parallel": parallel, "url": url, "directory": str(tmp_path)}
    outcomes = one_rank.spread(parallel).call("publish_to_bucket", steps=2, **about)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert [outcome["number"] for outcome in outcomes[0]] == [1, 2, 3]
    assert outcomes[0][0]["full"] is True
    assert_holds(followed, released(followed, url, 3), {n: t.numpy() for n, t in exported(tmp_path).items()})


def test_a_store_and_a_bucket_get_the_same_version(one_rank: Ranks, qwen2: str, tmp_path: Path, url: str) -> None:
    with fleet(qwen2, tmp_path) as running:
        received = keep(running)
        about = {"url": url, "steps": 1, "directory": str(tmp_path), "store": running.store_url}
        (outcomes,) = one_rank.call("publish_to_bucket", path=qwen2, parallel={}, **about)
        assert [outcome["number"] for outcome in outcomes] == [1, 2]
        assert len(running.versions) == len(received) == 2
    trained = exported(tmp_path)
    assert same_tensors(received[-1], trained)
    assert Bucket(url).read(2).header.schema.tensors.keys() == trained.keys()


def test_an_adapter_goes_alone_and_is_served_over_the_base_that_is_there(
    one_rank: Ranks, small_models: dict[str, str], tmp_path: Path, url: str, followed: Follow
) -> None:
    path = small_models["qwen3"]
    followed.admin.call("POST", "/admin/weights", {"path": path, "activate": True})
    about = {"url": url, "steps": 1, "directory": str(tmp_path), "lora": LORA}
    (outcomes,) = one_rank.call("publish_to_bucket", path=path, parallel={}, **about)
    versions = [Bucket(url).read(outcome["number"]) for outcome in outcomes]
    assert [version.part for version in versions] == ["lora/math", "lora/math"]
    assert ADAPTER_CONFIG in versions[0].header.metadata
    active = released(followed, url, 2)
    assert_holds(followed, active, load_file(Path(path) / "model.safetensors"))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert part_bytes(followed, active, "lora/math") == {n: t.tobytes() for n, t in saved.items()}


def test_a_bucket_that_cannot_be_written_ends_a_run_before_it_trains(
    zygote: Zygote, qwen2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = {"ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", "ACCESS_KEY_ID": "tester", "MAX_ATTEMPTS": "1"}
    for name, value in (account | {"SECRET_ACCESS_KEY": "hidden"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    before = scratch()
    status, said, errors = zygote.run(configured(tmp_path, qwen2, "s3://away/run"), tmp_path)
    assert status == 2
    assert errors.startswith("error: publish.bucket: s3://away/run cannot be used")
    assert "hotswap doctor --bucket" in errors
    assert "hidden" not in said + errors
    assert told(said, "step") == []
    nothing_left_since(before)


@pytest.mark.parametrize("allowed", [0, 5])
def test_a_bucket_that_fails_on_the_way_counts_as_a_failed_publish(
    zygote: Zygote, qwen2: str, tmp_path: Path, url: str, allowed: int
) -> None:
    """A file is where its blocks would go."""
    (tmp_path / "bucket" / "run").mkdir(parents=True)
    (tmp_path / "bucket" / "run" / "data").write_text("in the way of the blocks")
    publish = {"bucket": {"url": url}, "max_failures": allowed}
    status, said, errors = zygote.run(configured(tmp_path, qwen2, url, publish=publish), tmp_path)
    if allowed:
        assert (status, errors) == (0, "")
        assert len(told(said, "step")) == 3
        failed = [event["message"] for event in told(said, "publish_failed")]
        assert failed
        assert all("cannot be used" in message for message in failed)
    else:
        assert status == 1
        assert "cannot be used" in errors
    # A step that comes while another is being carried is left out, and said so.
    assert [event for event in told(said, "carried") if not event["skipped"]] == []


def test_a_second_trainer_in_one_bucket_ends_the_first(one_rank: Ranks, qwen2: str, url: str) -> None:
    ((error, code),) = one_rank.call("publish_beside_another", path=qwen2, url=url)
    assert "another publisher has published version 1" in error
    assert code == "bucket_taken"


def test_prometheus_finds_what_was_carried(one_rank: Ranks, qwen2: str, url: str) -> None:
    port = free_port()
    (page,) = one_rank.call("bucket_metrics", path=qwen2, url=url, listen=f"127.0.0.1:{port}")
    assert 'hotswap_bucket_versions_total{kind="full"} 1.0' in page
    assert "hotswap_bucket_newest_version 1.0" in page
    assert "hotswap_bucket_lag_seconds 0.0" in page


@pytest.mark.broad
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quiet_engines")
def test_vllm_answers_with_what_was_trained_elsewhere(zygote: Zygote, tmp_path: Path, s3: str) -> None:  # noqa: F811
    """`hotswap up`, `hotswap follow` and a training run that share nothing but a bucket."""
    model, saved, port = tmp_path / "random", tmp_path / "saved", free_port()
    write_tiny_model(model, max_position_embeddings=1024)  # as the stock engine expects
    live = LiveServer(model, tmp_path / "state", ENGINE, name=KEYS.model)
    with live.running():
        key = tmp_path / "admin.key"
        key.write_text(live.processes.admin_key)
        command = [sys.executable, "-m", "server.cli", "follow", f"versions+{s3}", "--activate", "--settle", "0"]
        command += ["--interval", "0.1", "--url", live.processes.admin_url, "--admin-key-file", str(key)]
        command += ["--cache-dir", str(tmp_path / "cache"), "--metrics", f"127.0.0.1:{port}"]
        with (tmp_path / "follow.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as follower:
            try:
                about = configured(tmp_path, str(model), s3, save_to=str(saved), steps=4, optimizer={"lr": 1e-2})
                status, said, errors = zygote.run(about, tmp_path)
                assert (status, errors) == (0, "")
                newest = f'"version {max(outcome["number"] for outcome in told(said, "carried"))}"'
                state = tmp_path / "cache" / "state.json"
                released = f'"name":{newest}'
                wait_until(lambda: state.exists() and released in state.read_text(), 120.0, process=follower)
                wait_until(lambda: '"current":' not in state.read_text(), 120.0, process=follower)
                answers = [live.generate(prompt, 4)["choices"][0]["token_ids"] for prompt in PROMPTS]
                page = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
            finally:
                follower.kill()
        active = live.active()
    assert f"hotswap_follow_released_version {active}.0" in page
    assert answers == stock.answers(saved, PROMPTS, 4, dtype="float32")
    assert answers != stock.answers(model, PROMPTS, 4, dtype="float32")
