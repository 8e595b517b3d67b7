"""After a commit each block is zeroed once, when it is next allocated, in the layers of every kind of attention.

And what was made of an image is made anew.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec, SlidingWindowSpec

from weightsync.vllm_engine.engine_core import core

core.install()  # as the plug-in does it
SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}


def scheduler(blocks: int, *, has_mamba_layers: bool = False) -> Any:
    config = SimpleNamespace(num_blocks=blocks, has_mamba_layers=has_mamba_layers, has_mixed_precision_kv_cache=False)
    manager = SimpleNamespace(new=list[int]())
    manager.take_new_block_ids = lambda: [manager.new.pop(0) for _ in range(len(manager.new))]
    return SimpleNamespace(kv_cache_config=config, kv_cache_manager=manager)


def allocated(on: Any, *blocks: int) -> list[int] | None:
    on.kv_cache_manager.new += blocks
    found: list[int] | None = Scheduler._get_new_block_ids_to_zero(on)
    return found


def test_each_block_is_zeroed_once_after_a_commit() -> None:
    one = scheduler(8)
    assert allocated(one, 1, 2) is None, "what was never written is not zeroed"
    core.mark_stale(one)
    assert allocated(one, 2, 3) == [2, 3]
    assert allocated(one, 3, 4) == [4]
    assert allocated(one) is None
    core.mark_stale(one)
    assert allocated(one, 3) == [3]


def test_what_vllm_zeroes_itself_is_zeroed_always() -> None:
    one = scheduler(8, has_mamba_layers=True)
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
    return SimpleNamespace(
        request_id=name,
        mm_features=[SimpleNamespace(identifier=image)],
        get_num_encoder_embeds=lambda _: 4,
    )


def test_an_image_is_encoded_anew_after_a_commit() -> None:
    """Whether a request still holds it or not; and the workers free what nobody encodes in the next batch."""
    manager = EncoderCacheManager(cache_size=12)
    held, left, later = with_image("held", "a"), with_image("left", "b"), with_image("later", "a")
    for request in (held, left):
        assert manager.can_allocate(request, 0, 12, 0)
        manager.allocate(request, 0)
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
    manager, request = EncoderDecoderCacheManager(cache_size=4), with_image("one", "a")
    manager.allocate(request, 0)
    core.forget_encoded(manager)
    assert manager.num_free_slots == 0
