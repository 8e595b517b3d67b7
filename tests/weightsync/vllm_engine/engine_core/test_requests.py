"""Requests at a commit: their namespaces in the prefix cache, on vLLM's own objects, and which of them it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.vllm_engine.engine_core.requests import allows, ends, enter, go_private, namespace, wish_of

pytestmark = pytest.mark.engine
BLOCK = 4


def request(version: str = "1", own: str = "1:s|", tokens: int = 12, first: int = 0) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    params, prompt = SamplingParams(max_tokens=64), list(range(first, first + tokens))
    return Request("r", prompt, params, None, cache_salt=namespace(version, own), block_hasher=hasher)


def test_same_version_and_salt_share_and_nobody_else() -> None:
    base = request().block_hashes
    assert request().block_hashes == base
    for other in (request("2"), request(own="1:t|"), request(own="1:s|x")):
        assert not set(other.block_hashes) & set(base)


def test_a_version_that_returns_finds_its_blocks() -> None:
    moved = request("1")
    enter(moved, "2")
    assert moved.block_hashes == request("2").block_hashes
    enter(moved, "1")
    assert moved.block_hashes == request("1").block_hashes


@pytest.mark.parametrize(("computed", "kept"), [(1, 0), (4, 1), (7, 1), (8, 2), (12, 3), (16, 3)])
def test_crossing_keeps_whole_blocks_and_hides_the_rest(computed: int, kept: int) -> None:
    """In the middle of a chunked prefill, after it, and with drafts ahead; blocks filled later are as hidden."""
    shared = request(tokens=32).block_hashes
    crossing = request()
    crossing.num_computed_tokens = computed
    go_private(crossing, BLOCK)
    crossing.append_output_token_ids(list(range(12, 32)))
    assert len(crossing.block_hashes) == 8
    assert crossing.block_hashes[:kept] == shared[:kept]
    for version in ("1", "2"):
        assert not set(crossing.block_hashes[kept:]) & set(request(version, tokens=32).block_hashes)


def test_two_crossing_requests_share_nothing_either() -> None:
    one, two = request(), request()
    for each in (one, two):
        each.num_computed_tokens = 4
        go_private(each, BLOCK)
    assert not set(one.block_hashes[1:]) & set(two.block_hashes[1:])


def test_a_crossing_request_that_is_preempted_moves_to_the_version_that_recomputes_it() -> None:
    crossing = request()
    crossing.num_computed_tokens = 12
    go_private(crossing, BLOCK)
    crossing.append_output_token_ids([12, 13, 14, 15])
    go_private(crossing, BLOCK)
    crossing.num_computed_tokens = 0
    enter(crossing, "3")
    assert crossing.block_hashes == request("3", tokens=16).block_hashes


def test_constraints() -> None:
    assert allows({}, "default")
    assert not allows({"min_version": 1}, "default")
    assert allows({"version": 3}, "3")
    assert not allows({"version": 3}, "4")
    assert allows({"min_version": 3}, "4")


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
    assert ends(request, "2") is ended


def test_requests_that_pool_have_a_scope_too() -> None:
    pooling = SimpleNamespace(extra_kwargs={"hotswap": {"scope": "s"}})
    assert wish_of(SimpleNamespace(sampling_params=None, pooling_params=pooling)) == {"scope": "s"}
    assert wish_of(SimpleNamespace(sampling_params=None, pooling_params=None)) == {}
