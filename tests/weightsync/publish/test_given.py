"""What a trainer may hand to a publisher: named tensors, an adapter of PEFT's; and what is said of anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from weightsync import BucketPublisher, Publisher, RemotePublisher
from weightsync.errors import PublishError

MODEL = torch.nn.Sequential(torch.nn.Linear(2, 2))
NO_PAIRS = [
    (torch.nn.Linear(2, 2), "a Linear"),
    (MODEL, "a Linear"),
    (list(MODEL.parameters()), "a Parameter"),
    (torch.ones(2, 2), "a Tensor"),
    (("a.weight", np.ones(2)), "a str"),
    ({7: np.ones(2)}, "a tuple"),
    (7, "a int"),
]


@pytest.mark.parametrize(("given", "kind"), NO_PAIRS, ids=range(len(NO_PAIRS)))
@pytest.mark.parametrize("kind_of_publisher", ["local", "remote", "bucket"])
def test_what_is_no_named_tensor_is_refused_with_the_remedy(
    request: pytest.FixtureRequest, given: Any, kind: str, kind_of_publisher: str
) -> None:
    publish = request.getfixturevalue(kind_of_publisher)
    with pytest.raises(PublishError, match=rf"{kind}, not a .name, tensor.: pass model.named_parameters\(\)"):
        publish(given)


@pytest.fixture
def local(publisher: Publisher) -> Callable[..., Any]:
    publisher.publish({"a.weight": np.ones(2, np.float32)}, activate=False)
    return lambda given: publisher.publish(given, activate=False)


@pytest.fixture
def remote() -> Callable[..., Any]:
    return RemotePublisher("http://127.0.0.1:9", "a-key", "demo").publish


@pytest.fixture
def bucket(tmp_path: Any) -> Callable[..., Any]:
    return BucketPublisher(f"file://{tmp_path}/bucket", model="demo").publish
