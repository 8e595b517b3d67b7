"""Cases of publishing into a bucket."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy

from tests.trainer.batches import random_batch
from tests.trainer.cases import engine
from tests.trainer.cases.lora import write_adapter
from trainer.megatron.engine import Engine
from trainer.megatron.hf_files import write_shards
from trainer.publish import WeightPublisher
from weightsync.bucket.publisher import BucketPublisher

__all__ = ["bucket_metrics", "publish_beside_another", "publish_to_bucket"]


@contextlib.contextmanager
def opened(
    path: str, parallel: dict[str, int], bucket: dict[str, Any], store: str = "", lora: dict[str, Any] | None = None
) -> Iterator[tuple[Engine, WeightPublisher]]:
    """An engine and its publisher; without a store, to the bucket alone."""
    section = {"model": "tiny" if store else "toy", "dtype": "float32", "timeout_s": 100, "bucket": bucket}
    section |= {"store": store} if store else {}
    more = {"lora": lora} if lora else {}
    with engine({"model": {"path": path}, "parallel": parallel, "publish": section, **more}) as built:
        assert built.config.publish is not None
        with contextlib.closing(WeightPublisher(built.config.publish, built)) as publisher:
            yield built, publisher


def publish_to_bucket(
    path: str,
    parallel: dict[str, int],
    url: str,
    steps: int,
    directory: str,
    store: str = "",
    lora: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The initial weights, then those after each of `steps` steps, each once the bucket has the one before; the last as
    a checkpoint in `directory`. What became of each."""
    outcomes: list[dict[str, Any]] = []
    with opened(path, parallel, {"url": url}, store, lora) as (built, publisher):
        for step in range(steps + 1):
            if step:
                built.step(random_batch(built.shape.vocab, seed=step))
            outcomes += publisher.publish(step).carried
            outcomes += publisher.finish()
        if lora:
            write_adapter(built, directory)
        else:
            write_shards(directory, built.export("float32"), built.part)
    return outcomes


def publish_beside_another(path: str, url: str) -> list[Any]:
    """What a publisher is told once another one has published there."""
    with opened(path, {}, {"url": url}) as (_, publisher):
        BucketPublisher(url, model="toy").publish({"x": numpy.zeros(3, "float32")})
        publisher.publish(0)
        (outcome,) = publisher.finish()
        return [outcome["error"], outcome["code"]]


def bucket_metrics(path: str, url: str, listen: str) -> str:
    """What Prometheus reads when a version has been carried."""
    with opened(path, {}, {"url": url, "metrics": listen}) as (_, publisher):
        publisher.publish(0)
        publisher.finish()
        with urllib.request.urlopen(f"http://{listen}/metrics", timeout=30) as page:
            text: str = page.read().decode()
            return text
