"""Prefix-cache namespaces on vLLM's own Request objects, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.vllm_engine.engine_core.requests import enter, go_private, namespace

pytestmark = pytest.mark.engine
BLOCK = 4


def request(version: str = "1", own: str = "1:s|", tokens: int = 12) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    params = SamplingParams(max_tokens=64)
    name = namespace(version, own)
    return Request("r", list(range(tokens)), params, None, cache_salt=name, block_hasher=hasher)


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
