"""Blocks of the KV cache that other weights wrote are zeroed before a request gets them.

A block is given to the next request as the last one left it. Attention masks what lies behind the end of a sequence by
a weight of zero, and zero times NaN is NaN: one block that a version with overflowing activations wrote spoils the
answers of good weights, until it is overwritten. So a commit marks every block, and each is zeroed once, when it is
next allocated. vLLM zeroes new blocks itself for caches of mixed precision and for Mamba; here the same switch is on
for all, and the list of what is to be zeroed holds the marked blocks alone. A swap waits for nothing of it.

Blocks that are found by their hash are not allocated: their keys carry the version that wrote them (namespaces.py).
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    """Patch the classes once per process; until a commit vLLM zeroes what it zeroes without this."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig

    own = KVCacheConfig.needs_kv_cache_zeroing.fget
    assert own is not None
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)

    def blocks_to_zero(self: Any) -> list[int] | None:
        allocated: list[int] = self.kv_cache_manager.take_new_block_ids()
        marked: bytearray | None = getattr(self, "_hotswap_stale", None)
        if not allocated or (marked is None and not own(self.kv_cache_config)):
            return None
        if marked is None or own(self.kv_cache_config):
            return allocated
        found = [block for block in allocated if marked[block]]
        for block in found:
            marked[block] = 0
        return found or None

    Scheduler._get_new_block_ids_to_zero = blocks_to_zero


def cover(runner: Any) -> None:
    """Give vLLM's runner on CPU a method for what its own leaves out: the layers with a sliding window."""
    if runner.device.type == "cpu":
        runner._zero_block_ids = functools.partial(_zero, runner)


def _zero(self: Any, block_ids: list[int]) -> None:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    blocks, seen = torch.tensor(block_ids), set[int]()
    for group in self.kv_cache_config.kv_cache_groups:
        for name in group.layer_names if not isinstance(group.kv_cache_spec, MambaSpec) else ():
            cache = getattr(self.compilation_config.static_forward_context.get(name), "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.data_ptr() not in seen:
                seen.add(cache.data_ptr())
                cache.index_fill_(0, blocks, 0)


def mark(scheduler: Any) -> None:
    """Other weights run from now on: every block is zeroed before it is written again."""
    scheduler._hotswap_stale = bytearray(b"\1") * scheduler.kv_cache_config.num_blocks
