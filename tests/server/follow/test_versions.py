"""Versions out of a bucket: a fleet gets each as it was published, by deltas, whoever is killed, and refuses damage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from server.cli.follow import open_source
from server.errors import ConfigError
from server.follow.config import FollowConfig
from server.follow.sources import FollowError, Source
from tests.server.follow.following import AT_ONCE, Follow
from tests.server.gateway.harness import KEYS
from tests.servers import s3_server, s3_variables
from tests.waiting import wait_until
from tests.weightsync.tensors import model
from weightsync import Adapter, BucketPublisher, SlotReader
from weightsync.bucket.objects import Bucket
from weightsync.control.parts import ADAPTER_CONFIG, part_of
from weightsync.control.records import VersionRecord

Tensors = dict[str, np.ndarray[Any, Any]]


def step(value: float) -> Tensors:
    """Tensors of the model that the fleet serves; most of each is the same in all steps."""
    tensors: Tensors = {name: np.array(tensor) for name, tensor in model(1.0, width=8).items()}
    for tensor in tensors.values():
        tensor.flat[0] = value
    return tensors


def source(url: str) -> Source:
    return open_source(FollowConfig(source=f"versions+{url}"))


def follows(follow: Follow, url: str) -> None:
    follow.store_policy(AT_ONCE)
    follow.again(source(url))


def record(follow: Follow, version: int) -> VersionRecord:
    found = follow.running.store.get(KEYS.version(version))
    assert found is not None
    return VersionRecord.from_json(found.value)


def assert_holds(follow: Follow, version: int, tensors: Tensors) -> None:
    """Bit for bit."""
    found = record(follow, version)
    with SlotReader.open(found.slot, manifest_digest=found.manifest_digest) as slot:
        slot.verify_all()
        held = {name: bytes(slot.buffer(name)) for name in slot.manifest.tensors}
    assert held == as_bytes(tensors)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run"


def publisher(url: str, **more: Any) -> BucketPublisher:
    return BucketPublisher(url, model=KEYS.model, **more)


def brings_each(follow: Follow, url: str) -> None:
    pub = publisher(url)
    follows(follow, url)
    for number in (1, 2, 3):
        pub.publish(step(float(number)), step=10 * number)
        assert pub.last["full"] is (number == 1)
        follow.until_tried(f"version {number}", "released")
        assert follow.active == number + 1
        assert_holds(follow, number + 1, step(float(number)))
    assert [record(follow, version).base for version in (2, 3, 4)] == [None, 2, 3]
    assert record(follow, 4).step == 30


def test_a_fleet_gets_each_version_as_it_was_published(follow: Follow, url: str) -> None:
    brings_each(follow, url)
    publisher(url).publish(step(9.0))  # a trainer that has begun anew
    follow.until_tried("version 4", "released")
    assert_holds(follow, 5, step(9.0))


def test_who_comes_late_begins_at_the_last_full_version(follow: Follow, url: str) -> None:
    pub = publisher(url)
    for number in (1, 2, 3):
        pub.publish(step(float(number)))
    follows(follow, url)
    follow.until_tried("version 3", "released")
    assert follow.active == 4  # 2 and 3 are what it builds on, and get no requests
    assert_holds(follow, 4, step(3.0))
    assert len(follow.deeds("release")) == 1


def test_a_flipped_byte_is_refused_by_name_and_the_next_full_version_is_taken(follow: Follow, url: str) -> None:
    publisher(url).publish(step(1.0))
    found = Bucket(url).read(1)
    path = Path(url.removeprefix("file://")) / found.parts[0].path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    follows(follow, url)
    assert found.parts[0].path in follow.until_tried("version 1", "refused")
    assert follow.active == 1
    publisher(url).publish(step(2.0))
    follow.until_tried("version 2", "released")
    assert_holds(follow, 2, step(2.0))


def test_a_version_that_goes_while_it_is_fetched_makes_way_for_the_next(follow: Follow, url: str) -> None:
    pub = publisher(url, keep=1, full_every=1)
    pub.publish(step(1.0))
    found = Bucket(url).read(1)
    lost = Path(url.removeprefix("file://")) / found.parts[0].path
    lost.rename(lost.with_name("away"))
    follows(follow, url)
    with pytest.raises(FollowError, match="version 1 is no longer in"):
        follow.until(lambda _: False)
    pub.publish(step(2.0))
    follow.until_tried("version 2", "released")
    assert_holds(follow, 2, step(2.0))
    assert Bucket(url).numbers() == [2]


def is_killed_after_an_upload(follow: Follow, url: str) -> None:
    """And started again."""
    follows(follow, url)
    follow.dies_and_begins_again("/admin/weights/upload", source(url))


def test_a_follower_killed_after_an_upload_sends_nothing_twice(follow: Follow, url: str) -> None:
    pub = publisher(url)
    for number in (1, 2):
        pub.publish(step(float(number)))
    is_killed_after_an_upload(follow, url)
    follow.until_tried("version 2", "released")
    assert_holds(follow, 3, step(2.0))
    assert len(follow.deeds("publish")) == 3  # with the one of the fixture


def adapter(value: float) -> Adapter:
    tensors = {f"base.layers.0.mlp.lora_{side}.weight": np.full((4, 8), value, np.float32) for side in "AB"}
    return Adapter(tensors, {"r": 4, "peft_type": "LORA"})


def part_bytes(follow: Follow, version: int, name: str) -> dict[str, bytes]:
    part = part_of(record(follow, version), name)
    assert part is not None, record(follow, version)
    with SlotReader.open(part.slot, manifest_digest=part.manifest_digest) as slot:
        slot.verify_all()
        assert (ADAPTER_CONFIG in slot.manifest.metadata) is name.startswith("lora/")
        return {name: bytes(slot.buffer(name)) for name in slot.manifest.tensors}


def as_bytes(tensors: Any) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def test_adapters_and_a_draft_model_go_with_the_base_and_on_their_own(follow: Follow, url: str) -> None:
    pub = publisher(url, keep=1)
    pub.publish(step(1.0))
    pub.publish(adapter(1.0), part="lora/math")
    draft = {"model.norm.weight": np.full(700, 0.5, np.float16)}
    pub.publish(draft, part="draft")
    pub.publish(step(2.0))
    follows(follow, url)
    follow.until_tried("version 4", "released")  # one that comes late gets the newest of each part
    last = follow.active
    assert last is not None
    assert_holds(follow, last, step(2.0))
    assert part_bytes(follow, last, "lora/math") == as_bytes(adapter(1.0).tensors)
    assert part_bytes(follow, last, "draft") == as_bytes(draft)
    pub.publish(adapter(2.0), part="lora/math")
    follow.until_tried("version 5", "released")
    assert follow.active == last + 1
    assert_holds(follow, last + 1, step(2.0))
    assert part_bytes(follow, last + 1, "lora/math") == as_bytes(adapter(2.0).tensors)
    assert part_bytes(follow, last + 1, "draft") == as_bytes(draft)
    fresh = publisher(url)  # a trainer that has begun anew knows what the bucket has
    fresh.publish(step(3.0))
    follow.until_tried("version 6", "released")
    assert part_bytes(follow, last + 2, "lora/math") == as_bytes(adapter(2.0).tensors)


def test_a_follower_killed_between_parts_ends_with_all_of_them(follow: Follow, url: str) -> None:
    pub = publisher(url)
    pub.publish(step(1.0))
    pub.publish(adapter(1.0), part="lora/math")
    is_killed_after_an_upload(follow, url)
    follow.until_tried("version 2", "released")
    assert_holds(follow, 3, step(1.0))
    assert part_bytes(follow, 3, "lora/math") == as_bytes(adapter(1.0).tensors)


def test_options_that_mean_nothing_for_versions() -> None:
    for more in ({"part": "draft"}, {"sign_key": Path("/key")}, {"cast": True}):
        with pytest.raises(ConfigError, match="--"):
            open_source(FollowConfig(source="versions+memory://x", **more))
    with pytest.raises(ConfigError, match="cannot be opened"):
        source("nothing://x")


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server(tmp_path) as server:
        for name, value in s3_variables(server).items():
            monkeypatch.setenv(name, value)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("trainer")
        fsspec.filesystem("s3").clear_instance_cache()
        yield "s3://trainer/run"


@pytest.mark.broad
@pytest.mark.timeout(900)
def test_through_s3_with_conditional_puts_and_a_killed_follower(follow: Follow, s3: str) -> None:
    brings_each(follow, s3)
    one, two = publisher(s3), publisher(s3)
    assert one.publish(step(4.0)) == 4
    with pytest.raises(Exception, match="another publisher has published version 4"):
        two.publish(step(5.0))
    follow.until_tried("version 4", "released")
    assert_holds(follow, 5, step(4.0))
    one.publish(step(6.0))
    with follow.process(f"versions+{s3}") as process:
        fetched = follow.root / "process" / "fetched"
        wait_until(lambda: list(fetched.glob("*/*/*")) if fetched.exists() else None, 120.0, process=process)
    with follow.process(f"versions+{s3}") as process:
        wait_until(lambda: follow.active == 6, 120.0, process=process)
    assert_holds(follow, 6, step(6.0))
    shutil.rmtree(follow.root / "process")
