"""Which prefixes the cache holds: the table by itself, and fed by vLLM's own cache manager."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.weightsync.vllm_engine.engine_core.test_requests import BLOCK, request
from weightsync.vllm_engine.engine_core import core, prefixes
from weightsync.vllm_engine.engine_core.prefixes import Holdings, last_blocks

pytestmark = pytest.mark.engine
ONE, TWO, THREE = b"1" * 32, b"2" * 32, b"3" * 32


def holding(*blocks: bytes, most: int = 100) -> Holdings:
    """Prefixes 1, 2, ... of version 7, each of which ends with one of the blocks."""
    found = Holdings(most)
    for prefix, block in enumerate(blocks, 1):
        found.watch("7", prefix, block, held=False)
    return found


def test_a_prefix_is_held_while_its_last_block_is() -> None:
    table = holding(ONE, TWO, TWO)
    assert table.take() == []
    table.stored(TWO)
    assert table.take() == [("7", [2, 3], [])]
    table.stored(TWO)
    table.removed(ONE)
    assert table.take() == []
    table.removed(TWO)
    assert table.take() == [("7", [], [2, 3])]
    table.stored(TWO)
    assert table.take() == [("7", [2, 3], [])]


def test_what_came_and_went_between_two_looks_is_told_as_it_is() -> None:
    table = holding(ONE)
    table.stored(ONE)
    table.removed(ONE)
    assert table.take() == [("7", [], [1])]
    table.watch("7", 1, TWO, held=True)
    table.cleared()
    table.watch("7", 1, TWO, held=True)
    assert table.take() == [("7", [1], [])]


def test_each_version_holds_its_own() -> None:
    table = holding(ONE)
    table.watch("8", 1, TWO, held=True)
    table.stored(ONE)
    assert sorted(table.take()) == [("7", [1], []), ("8", [1], [])]
    table.removed(ONE)
    assert table.take() == [("7", [], [1])]


def test_a_held_prefix_keeps_its_block_and_another_one_gets_the_last() -> None:
    """Bodies that share a prefix differ in length, so the share of the prompt may end a block earlier or later."""
    table = holding(ONE)
    table.watch("7", 1, TWO, held=False)
    table.stored(TWO)
    table.watch("7", 1, THREE, held=False)
    table.removed(THREE)
    assert table.take() == [("7", [1], [])]
    table.removed(TWO)
    assert table.take() == [("7", [], [1])]
    table.watch("7", 1, THREE, held=True)
    table.stored(TWO)
    table.removed(THREE)
    assert table.take() == [("7", [], [1])]


def test_what_is_not_asked_for_is_forgotten_and_told_as_dropped() -> None:
    table = Holdings(4)
    held, dropped = list[int](), list[int]()
    for prefix in range(1, 101):
        table.watch("7", prefix, prefix.to_bytes(32, "little"), held=True)
        table.watch("7", 1, ONE, held=True)  # asked for all the time
        assert len(table) <= 4
        ((_, more, fewer),) = table.take()
        held += more
        dropped += fewer
    assert held == list(range(1, 101))
    assert dropped == list(range(2, 98))
    assert len(table._keys) == len(table)


def test_a_prefix_ends_with_the_last_block_that_it_fills() -> None:
    wish = [[11, 0.1], [12, 0.25], [13, 0.5], [14, 1.0]]
    assert list(last_blocks(wish, 64, 16)) == [(12, 0), (13, 1), (14, 3)]
    assert list(last_blocks(wish, 15, 16)) == []


# with vLLM's cache manager

BLOCKS = 9  # one block is vLLM's own


@pytest.fixture
def scheduler() -> Any:
    """What is asked of vLLM's scheduler, around its own cache manager."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    heard: list[Any] = []
    core.install()
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
    manager = KVCacheManager(
        config, max_model_len=64, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_kv_cache_events=True
    )
    return SimpleNamespace(
        kv_cache_config=config,
        kv_cache_manager=manager,
        kv_event_publisher=SimpleNamespace(heard=heard, publish=lambda batch: heard.extend(batch.events)),
        hash_block_size=BLOCK,
        enable_kv_cache_events=True,
    )


def asking(name: str, tokens: int, shares: list[tuple[int, float]], **more: Any) -> Any:
    """A request that says which of its prefixes are watched."""
    made = request(tokens=tokens, **more)
    made.request_id, made.sampling_params.extra_args = name, {"hotswap": {"prefixes": shares}}
    return made


def compute(scheduler: Any, one: Any) -> None:
    """As the scheduler does it with a request whose prompt is computed in one step."""
    prefixes.watch(scheduler, one)
    manager = scheduler.kv_cache_manager
    found, cached, _ = manager.get_computed_blocks(one)
    assert manager.allocate_slots(one, one.num_tokens - cached, cached, found) is not None
    manager.free(one)


def told(scheduler: Any) -> Any:
    found = prefixes.changes(SimpleNamespace(scheduler=scheduler))
    return found and sorted((version, sorted(held), sorted(dropped)) for version, held, dropped in found)


def test_what_is_computed_is_held_until_it_is_evicted(scheduler: Any) -> None:
    compute(scheduler, asking("a", 12, [(71, 0.4), (72, 0.7), (73, 1.0)]))
    assert told(scheduler) == [("1", [71, 72, 73], [])]
    compute(scheduler, asking("b", 28, [(81, 1.0)], first=100))  # seven blocks: two of `a` go, its end first
    assert told(scheduler) == [("1", [81], [72, 73])]
    compute(scheduler, asking("c", 12, [(71, 0.4), (72, 0.7)]))
    ((_, held, dropped),) = told(scheduler)
    assert (held, dropped) == ([72, 73], [81])


def test_each_version_has_its_own_and_a_reset_drops_all(scheduler: Any) -> None:
    compute(scheduler, asking("a", 8, [(71, 1.0)]))
    compute(scheduler, asking("b", 8, [(71, 1.0)], version="2"))
    assert told(scheduler) == [("1", [71], []), ("2", [71], [])]
    assert scheduler.kv_cache_manager.reset_prefix_cache()
    assert told(scheduler) == [("1", [], [71]), ("2", [], [71])]


def test_a_prefix_that_others_have_had_computed_is_held_at_once(scheduler: Any) -> None:
    compute(scheduler, asking("a", 8, []))
    prefixes.watch(scheduler, asking("b", 8, [(71, 1.0)]))
    assert told(scheduler) == [("1", [71], [])]


def test_one_of_two_equal_blocks_goes_and_the_prefix_stays(scheduler: Any) -> None:
    """Requests that come at a time each compute what they share."""
    manager = scheduler.kv_cache_manager
    one, two = (asking(name, 5, [(71, 0.8)]) for name in "ab")
    for each in (one, two):
        prefixes.watch(scheduler, each)
        assert manager.allocate_slots(each, each.num_tokens) is not None
    (first,), (second,) = (manager.get_block_ids(each.request_id)[0][:1] for each in (one, two))
    assert told(scheduler) == [("1", [71], [])]
    manager.evict_blocks({first})
    assert told(scheduler) == []
    manager.evict_blocks({second})
    assert told(scheduler) == [("1", [], [71])]


def test_whoever_listened_before_hears_everything(scheduler: Any) -> None:
    listener = scheduler.kv_event_publisher
    compute(scheduler, asking("a", 8, [(71, 1.0)]))
    told(scheduler)
    assert [type(event).__name__ for event in listener.heard] == ["BlockStored"]


def test_without_events_nothing_is_told(scheduler: Any) -> None:
    scheduler.enable_kv_cache_events = False
    compute(scheduler, asking("a", 8, [(71, 1.0)]))
    assert told(scheduler) is None


def test_tokens_of_a_replay_are_no_part_of_the_prompt(scheduler: Any) -> None:
    """An answer that goes on here has its tokens behind the prompt, and the shares are of the prompt."""
    one = asking("a", 16, [(71, 1.0)])
    one.sampling_params.extra_args["hotswap"]["replay"] = {"tokens": list(range(8)), "ended": False}
    compute(scheduler, one)
    assert told(scheduler) == [("1", [71], [])]
    assert list(scheduler._hotswap_following._hashes.values()) == [one.block_hashes[1]]
