"""Prefixes that the cache holds: the table by itself, and fed by vLLM's own cache manager.

After a commit each block is zeroed once, when it is next allocated, in the layers of every kind of attention; and an
image is encoded anew.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from tests.weightsync.vllm_engine.engine_core.test_requests import BLOCK, request
from weightsync.vllm_engine.engine_core import core, prefixes
from weightsync.vllm_engine.engine_core.prefixes import Holdings, last_blocks

pytestmark = pytest.mark.engine
core.install()  # as the plug-in does it
SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}
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


def test_weights_that_stay_are_held_under_the_version_that_runs() -> None:
    """A version of another adapter: a gateway looks under the new number. Adapters may share a prefix's number."""
    table = Holdings()
    table.label(["base", "base and x 1"], "7")
    for prefix, block in ((1, ONE), (2, TWO)):
        table.watch("base", prefix, block, held=True)
    table.watch("base and x 1", 1, THREE, held=True)
    assert table.take() == [("7", [1, 2], [])]
    table.removed(ONE)
    assert table.take() == [("7", [1], [])], "through the adapter it is held"
    table.label(["base", "base and x 2"], "8")
    assert sorted(table.take()) == [("7", [], [2]), ("8", [2], [])]
    table.label(["base", "base and x 1"], "7")
    assert sorted(table.take()) == [("7", [2], []), ("8", [], [2])]
    table.removed(THREE)
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


# with vLLM's cache manager --------------------------------------------------------------------------------------------

BLOCKS = 9  # one block is vLLM's own


@pytest.fixture
def scheduler() -> Any:
    """The parts of vLLM's scheduler that are asked, around its own cache manager."""
    heard: list[Any] = []
    init_none_hash(sha256)
    spec = FullAttentionSpec(**SIZES | {"block_size": BLOCK})
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


# what is stale after a commit -----------------------------------------------------------------------------------------


def zeroing(blocks: int, *, has_mamba_layers: bool = False) -> Any:
    config = SimpleNamespace(num_blocks=blocks, has_mamba_layers=has_mamba_layers, has_mixed_precision_kv_cache=False)
    manager = SimpleNamespace(new=list[int]())
    manager.take_new_block_ids = lambda: [manager.new.pop(0) for _ in range(len(manager.new))]
    return SimpleNamespace(kv_cache_config=config, kv_cache_manager=manager)


def allocated(on: Any, *blocks: int) -> list[int] | None:
    on.kv_cache_manager.new += blocks
    found: list[int] | None = Scheduler._get_new_block_ids_to_zero(on)
    return found


def test_each_block_is_zeroed_once_after_a_commit() -> None:
    one = zeroing(8)
    assert allocated(one, 1, 2) is None, "what was never written is not zeroed"
    core.mark_stale(one)
    assert allocated(one, 2, 3) == [2, 3]
    assert allocated(one, 3, 4) == [4]
    assert allocated(one) is None
    core.mark_stale(one)
    assert allocated(one, 3) == [3]


def test_what_vllm_zeroes_itself_is_zeroed_always() -> None:
    one = zeroing(8, has_mamba_layers=True)
    assert allocated(one, 1) == [1]
    core.mark_stale(one)
    assert allocated(one, 1) == [1]
    assert allocated(one, 1) == [1]


def test_the_managers_record_what_they_allocate() -> None:
    assert KVCacheConfig.needs_kv_cache_zeroing.fget(SimpleNamespace()) is True


@pytest.mark.parametrize(
    ("spec", "zeroed"),
    [
        (FullAttentionSpec(**SIZES), True),
        (SlidingWindowSpec(**SIZES, sliding_window=32), True),
        (MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,)), False),
    ],
    ids=["full", "sliding window", "mamba"],
)
def test_layers_of_every_kind_of_attention(spec: Any, zeroed: bool) -> None:
    caches = [torch.full((6, 2, 16, 4), torch.nan) for _ in range(2)]
    layers = {"a": SimpleNamespace(kv_cache=caches[0]), "b": SimpleNamespace(kv_cache=caches[1])}
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b", "gone"])
    runner: Any = SimpleNamespace(
        device=torch.device("cpu"),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    core.zero_sliding_windows(runner)
    runner._zero_block_ids([1, 4])
    for cache in caches:
        assert cache[[1, 4]].eq(0).all() == zeroed
        assert cache[[0, 2, 3, 5]].isnan().all()


def with_image(name: str, image: str) -> Any:
    features = [SimpleNamespace(identifier=image)]
    return SimpleNamespace(request_id=name, mm_features=features, get_num_encoder_embeds=lambda _: 4)


def test_an_image_is_encoded_anew_after_a_commit() -> None:
    """Whether a request still holds it or not; and the workers free what is not encoded in the next batch."""
    manager = EncoderCacheManager(cache_size=12)
    held, left, later = with_image("held", "a"), with_image("left", "b"), with_image("later", "a")
    for one in (held, left):
        assert manager.can_allocate(one, 0, 12, 0)
        manager.allocate(one, 0)
    manager.free(left)
    assert manager.check_and_update_cache(later, 0)
    core.forget_encoded(manager)
    assert not manager.check_and_update_cache(later, 0)
    assert manager.can_allocate(later, 0, 12, 8), "all of its room is free again"
    manager.allocate(later, 0)
    assert manager.get_freed_mm_hashes() == ["b"]
    manager.free(held)
    assert manager.check_and_update_cache(with_image("last", "a"), 0)


def test_what_an_encoder_decoder_model_holds_stays() -> None:
    """Its requests share nothing, and those in flight still need theirs."""
    manager = EncoderDecoderCacheManager(cache_size=4)
    manager.allocate(with_image("one", "a"), 0)
    core.forget_encoded(manager)
    assert manager.num_free_slots == 0
