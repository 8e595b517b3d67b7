"""`except PublishError` catches every way in which a publisher fails, near or far, with the code of what has failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.weightsync.publish.test_publisher import SCHEMA
from tests.weightsync.tensors import model
from weightsync import BucketPublisher, Publisher, Quantizer, RemotePublisher
from weightsync.control.records import InstanceRecord, Keys
from weightsync.errors import PublishError

CONFIG = {"model_type": "llama", "vocab_size": 32}
Way = Callable[[Publisher, Path, pytest.MonkeyPatch], object]


def failing(what: Callable[[], object], code: str) -> PublishError:
    with pytest.raises(PublishError) as caught:
        what()
    assert caught.value.code == code
    return caught.value


def another_shape(publisher: Publisher, *_: Any) -> None:
    publisher.publish(model(), activate=False)
    publisher.publish(model() | {"model.norm.weight": np.zeros(9, np.float32)})


def another_vocabulary(publisher: Publisher, *_: Any) -> None:
    publisher.publish(model(), config=CONFIG, wait=False)
    publisher.publish(model(), config=CONFIG | {"vocab_size": 33})


def store_away(publisher: Publisher, directory: Path, _: Any) -> None:
    (directory / "store.db").rename(directory / "away.db")
    publisher.publish(model())


def closed(publisher: Publisher, *_: Any) -> None:
    publisher.close()
    publisher.publish(model())


def taken_over(publisher: Publisher, *_: Any) -> None:
    publisher.publish(model(), activate=False)
    with Publisher(publisher.url, model="demo") as other:
        other.hold()
    publisher.publish(model())


def unknown_to_the_others(publisher: Publisher, *_: Any) -> None:
    publisher._store.put(f"{Keys('other').instances}i-0", InstanceRecord("i-0", "http://i-0").to_json())
    publisher.publish(model())


def twice(publisher: Publisher, *_: Any) -> None:
    with publisher.begin(SCHEMA) as draft:
        draft.abort()
        draft.commit()


def undivided(publisher: Publisher, *_: Any) -> None:
    publisher.publish(Quantizer("w4a16", group_size=7).tensors(model().items()))


def out_of_reach(publisher: Publisher, directory: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("weightsync.publish.remote.ATTEMPTS", 1)
    RemotePublisher("http://127.0.0.1:9", "key", "demo").publish(model())


def taken_bucket(publisher: Publisher, directory: Path, _: Any) -> None:
    bucket = BucketPublisher(f"file://{directory}/bucket", model="demo")
    BucketPublisher(f"file://{directory}/bucket", model="demo").publish(model())
    bucket.publish(model())


def bucket_without_a_place(publisher: Publisher, directory: Path, _: Any) -> None:
    bucket = BucketPublisher(f"file://{directory}/bucket", model="demo")
    (directory / "bucket").touch()
    bucket.publish(model())


WAYS: dict[str, Way] = {
    "shape_mismatch": another_shape,
    "unsupported_dtype": lambda p, *_: p.publish({"w": np.zeros(3, np.complex64)}),
    "config_mismatch": another_vocabulary,
    "bad_part": lambda p, *_: p.publish(model(), part="else"),
    "record_refused": lambda p, *_: p.publish(model(), timeout_s=-1.0),
    "publish_error": lambda p, *_: p.publish(model(), metadata={"a": 1}),  # type: ignore[dict-item]
    "store_unavailable": store_away,
    "store_closed": closed,
    "stale_publisher": taken_over,
    "unknown_model": unknown_to_the_others,
    "draft_closed": twice,
    "swap_timeout": lambda p, *_: p.publish(model(), timeout_s=0.1),
    "unknown_version": lambda p, *_: p.activate(7),
    "swap_aborted": lambda p, *_: p.rollback(),
    "quantization_error": undivided,
    "remote_error": out_of_reach,
    "bucket_taken": taken_bucket,
    "bucket_unavailable": bucket_without_a_place,
}


@pytest.mark.parametrize("code", WAYS)
def test_a_way_to_fail(store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    publisher = Publisher(store_url, model="demo")
    failing(lambda: WAYS[code](publisher, tmp_path, monkeypatch), code)
