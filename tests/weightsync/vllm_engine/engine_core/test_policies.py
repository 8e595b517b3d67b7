"""Which requests a commit ends, and which it does not let in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.vllm_engine.engine_core import requests


def test_constraints() -> None:
    assert requests.allows({}, "default")
    assert not requests.allows({"min_version": 1}, "default")
    assert requests.allows({"version": 3}, "3")
    assert not requests.allows({"version": 3}, "4")
    assert requests.allows({"min_version": 3}, "4")


@pytest.mark.parametrize(
    ("wish", "begun", "ended"),
    [
        ({"policy": "keep"}, 5, False),
        ({"policy": "recompute"}, 5, False),
        ({"policy": "abort"}, 5, True),
        ({"policy": "finish"}, 5, True),
        ({"policy": "abort"}, 0, False),
        ({"version": 1}, 0, True),
        ({"min_version": 1}, 5, False),
    ],
)
def test_who_is_ended_at_a_commit(wish: dict[str, Any], begun: int, ended: bool) -> None:
    params = SimpleNamespace(extra_args={"hotswap": wish})
    request = SimpleNamespace(sampling_params=params, num_computed_tokens=begun, num_output_tokens=0)
    assert requests.ends(request, "2") is ended


def test_requests_that_pool_have_a_scope_too() -> None:
    pooling = SimpleNamespace(extra_kwargs={"hotswap": {"scope": "s"}})
    assert requests.wish_of(SimpleNamespace(sampling_params=None, pooling_params=pooling)) == {"scope": "s"}
    assert requests.wish_of(SimpleNamespace(sampling_params=None, pooling_params=None)) == {}
