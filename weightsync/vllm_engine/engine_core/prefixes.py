"""Prefixes of prompts that the KV cache holds, by vLLM's KV events.

A request brings the prefixes of its prompt: numbers that stand for the beginning of its body, and the share of the
prompt that each covers. How many tokens that is follows from the tokens of the whole prompt, and so does the last block
that the prefix fills. While that block is in the cache the prefix counts as held: vLLM frees the blocks of a prompt
from its end on. Blocks are found by hashes that carry the weights (requests.py), and a gateway knows versions. So a
prefix is held under the version that those weights ran as last, and is held again when they return.

`Holdings` is the table, which knows nothing of vLLM. `Following` stands where vLLM's scheduler publishes its events,
hands them on to the publisher that was there, and looks up in the block pool what an event says of a block that it
watches.

Everything here runs on the engine core's own thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from weightsync.vllm_engine.engine_core.requests import Weights, namespace_of, replay_of, wish_of

FIELD = "prefixes"  # of a request's wish: [[prefix, share of the prompt], ...], the shortest first
MOST = 8192  # prefixes that are watched; the one whose turn is longest ago goes first
LABELS = 256  # weights whose version is remembered beyond their last prefix

Key = tuple[str, int]  # weights, prefix
Changes = list[tuple[str, list[int], list[int]]]  # version label, prefixes held now, prefixes not held any more


class Holdings:
    """Prefixes by weights, the block that each ends with, and whether that is in the cache."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._blocks: OrderedDict[Key, Hashable] = OrderedDict()  # the last that was asked for at the end
        self._keys: dict[Hashable, dict[Key, None]] = {}  # by block
        self._held: set[Key] = set()
        self._changed: dict[Key, None] = {}  # since `take`
        self._labels: dict[str, str] = {}  # the version that weights ran as last
        self._told: dict[str, str] = {}  # the same, as of the last `take`

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: Hashable) -> bool:
        """Whether a prefix ends with it."""
        return block in self._keys

    def label(self, weights: Iterable[str], version: str) -> None:
        """These weights run, as `version`. Weights without a label are called as they are."""
        if len(self._labels) > LABELS:
            known = {weights for weights, _ in self._blocks}
            self._labels = {weights: version for weights, version in self._labels.items() if weights in known}
        self._labels |= dict.fromkeys(weights, version)

    def watch(self, weights: str, prefix: int, block: Hashable, *, held: bool) -> None:
        """A request asks for this prefix, which ends with `block`; `held`: that is in the cache already."""
        key = (weights, prefix)
        known = self._blocks.get(key)
        if known is not None and (key in self._held or known == block):
            self._blocks.move_to_end(key)
            block = known
        else:
            self._forget(key)
            self._blocks[key] = block
            self._keys.setdefault(block, {})[key] = None
        if held:
            self._hold(key)
        while len(self._blocks) > self._most:
            self._forget(next(iter(self._blocks)))

    def stored(self, block: Hashable) -> None:
        """The block is in the cache now."""
        for key in self._keys.get(block, ()):
            self._hold(key)

    def removed(self, block: Hashable) -> None:
        """It is not any more. It may come back: its prefixes are watched on."""
        for key in self._keys.get(block, ()):
            self._drop(key)

    def cleared(self) -> None:
        """The cache is empty."""
        for key in list(self._held):
            self._drop(key)

    def take(self) -> Changes:
        """The changes since the last time, or from nothing, by version."""
        moved = {weights for weights, version in self._told.items() if self._labels.get(weights, version) != version}
        if moved:
            self._changed |= {key: None for key in self._held if key[0] in moved}
        ran_as: dict[str, list[str]] = {}
        for weights, version in self._labels.items():
            ran_as.setdefault(version, []).append(weights)
        found: dict[str, dict[int, bool]] = {}
        for weights, prefix in self._changed:
            now = self._labels.get(weights, weights)
            for version in (self._told.get(weights, now), now):
                held = any((each, prefix) in self._held for each in ran_as.get(version, [version]))
                found.setdefault(version, {})[prefix] = held
        self._changed.clear()
        self._told = dict(self._labels)
        sides = ((version, sorted(of.items())) for version, of in found.items())
        return [(version, [p for p, held in of if held], [p for p, held in of if not held]) for version, of in sides]

    def _hold(self, key: Key) -> None:
        if key not in self._held:
            self._held.add(key)
            self._changed[key] = None

    def _drop(self, key: Key) -> None:
        if key in self._held:
            self._held.remove(key)
            self._changed[key] = None

    def _forget(self, key: Key) -> None:
        block = self._blocks.pop(key, None)
        if block is None:
            return
        keys = self._keys[block]
        del keys[key]
        if not keys:
            del self._keys[block]
        self._drop(key)


def last_blocks(wish: Iterable[Any], tokens: int, block_size: int) -> Iterator[tuple[int, int]]:
    """(prefix, index of the block that it ends with) of each prefix of a prompt of so many tokens that fills one."""
    for prefix, share in wish:
        blocks = int(share * tokens) // block_size
        if blocks:
            yield prefix, blocks - 1


class Following:
    """A scheduler's publisher of KV events, in front of the one that it had."""

    def __init__(self, scheduler: Any) -> None:
        self.holdings = Holdings()
        self._hashes: dict[Any, Any] = {}  # by the number that events have in their place, of blocks that are watched
        self._publisher = scheduler.kv_event_publisher
        self._manager = scheduler.kv_cache_manager
        self._pool = scheduler.kv_cache_manager.block_pool
        self._hash_block_size = scheduler.hash_block_size
        self._group = _deciding_group(scheduler.kv_cache_config)
        self._block_size = self._manager.coordinator.single_type_managers[self._group].block_size

    def watch(self, request: Any) -> None:
        """A request has come, or has got other block hashes: its prefixes are watched, under its weights."""
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_block_hashes

        wish = wish_of(request).get(FIELD)
        if not wish or not request.block_hashes:
            return
        hashes = resolve_block_hashes(request.block_hashes, self._hash_block_size, self._block_size)
        weights = namespace_of(request)
        tokens = request.num_prompt_tokens - len(replay_of(request).get("tokens", ()))
        for prefix, last in last_blocks(wish, tokens, self._block_size):
            if last < len(hashes):
                block = maybe_convert_block_hash(hashes[last])
                self._hashes[block] = hashes[last]
                self.holdings.watch(weights, prefix, block, held=self._holds(block))
        if len(self._hashes) > 2 * MOST:
            self._hashes = {block: whole for block, whole in self._hashes.items() if block in self.holdings}

    def publish(self, events: Any) -> None:
        """vLLM's: the events of a step."""
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

        for event in events.events:
            if isinstance(event, AllBlocksCleared):
                self.holdings.cleared()
            elif event.medium != self._pool.medium or event.group_idx not in (None, self._group):
                continue  # of an offloaded copy, or of layers that do not decide
            elif isinstance(event, BlockStored):
                for block in event.block_hashes:
                    self.holdings.stored(block)
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    if block in self.holdings and not self._holds(block):  # of two equal ones the other may be left
                        self.holdings.removed(block)
        self._publisher.publish(events)

    def take(self) -> Changes:
        """`Holdings.take`, with the events that no step has published yet."""
        from vllm.distributed.kv_events import KVEventBatch

        if events := self._manager.take_events():
            self.publish(KVEventBatch(ts=time.time(), events=events))
        return self.holdings.take()

    def shutdown(self) -> None:
        """vLLM's."""
        self._publisher.shutdown()

    def get_publisher_config(self) -> Any:
        """vLLM's: where others may listen."""
        return self._publisher.get_publisher_config()

    def _holds(self, block: Any) -> bool:
        return self._pool.get_cached_block(self._hashes[block], [self._group]) is not None


def _deciding_group(config: Any) -> int:
    """The group of layers whose blocks decide what is hit: of full attention, if there is one."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return next((n for n, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)), 0)


def following(scheduler: Any) -> Following | None:
    """The scheduler's, from the first time it is asked for; None where vLLM records no events, or caches nothing."""
    found: Following | None = getattr(scheduler, "_hotswap_following", None)
    events = getattr(scheduler, "enable_kv_cache_events", False) and scheduler.kv_cache_manager.enable_caching
    if found is None and events and scheduler.kv_cache_config.kv_cache_groups:
        found = scheduler._hotswap_following = scheduler.kv_event_publisher = Following(scheduler)
    return found


def watch(scheduler: Any, request: Any) -> None:
    """A request has come to the scheduler, or has got other block hashes."""
    if (found := following(scheduler)) is not None:
        found.watch(request)


def relabel(scheduler: Any, runs: Weights) -> None:
    """A commit has put these weights into the workers."""
    if (found := following(scheduler)) is not None:
        found.holdings.label(runs.all(), runs.version)


def changes(core: Any) -> Changes | None:
    """`EngineCore.hotswap_prefixes`: what the cache has come to hold, or holds no more, since it was last asked.

    None where vLLM records no events, or caches no prefixes.
    """
    found = following(core.scheduler)
    return found.take() if found is not None else None
