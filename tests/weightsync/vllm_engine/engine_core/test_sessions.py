"""Conversations that keep their KV cache over swaps, in vLLM's own cache manager: which weights computed a hit."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from tests.weightsync.vllm_engine.engine_core.test_prefixes import SIZES
from tests.weightsync.vllm_engine.engine_core.test_requests import BLOCK
from weightsync.vllm_engine.engine_core import core, sessions
from weightsync.vllm_engine.engine_core.requests import Weights, namespace

pytestmark = pytest.mark.engine
core.install()
LONGEST = 120


class Engine:
    """The steps of vLLM's scheduler, on its cache manager. `wrote` says of each slot of each block which token lies
    there, the weights that computed it, and for which session."""

    def __init__(self, blocks: int = 200) -> None:
        init_none_hash(sha256)
        spec = FullAttentionSpec(**SIZES | {"block_size": BLOCK})
        config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
        self.manager = KVCacheManager(
            config, max_model_len=4 * LONGEST, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.weights = Weights("1", {"": "bytes 1"})
        self.bytes_of = {"1": "bytes 1"}  # by version
        self.wrote: dict[tuple[int, int], tuple[int, str, str | None]] = {}
        self.requests: list[Any] = []  # that run
        self.scheduler: Any = SimpleNamespace(
            kv_cache_config=config,
            kv_cache_manager=self.manager,
            hash_block_size=BLOCK,
            enable_kv_cache_events=False,
            encoder_cache_manager=None,
            running=self.requests,
            waiting=[],
            kv_holding_waiting=[],
            prev_step_scheduled_req_ids=set(),
        )
        preempt = core._started_over(self._preempted)
        self.scheduler._preempt_request = lambda *args, **kwargs: preempt(self.scheduler, *args, **kwargs)
        self._count = 0

    def ask(self, tokens: list[int], session: str | None = None, *, compute: int | None = None, **wish: Any) -> Any:
        """A request whose prompt is computed, or so many tokens of it. `session`: None for one that shares no KV of
        other weights."""
        self._count += 1
        bounds = {"versions": 9, "age_s": 900.0} | wish.pop("kv", {})
        if session is not None:
            wish["kv"] = {"session": session} | bounds
        params = SamplingParams(max_tokens=LONGEST, extra_args={"hotswap": wish})
        salt = namespace(self.weights.of(SimpleNamespace(lora_request=None)), "1:s|")
        one = Request(str(self._count), tokens, params, None, cache_salt=salt, block_hasher=self.hasher)
        if sessions.kv_of(one):
            sessions.of(self.scheduler, self.weights)
        self.requests.append(one)
        one.session = session
        self.schedule(one, compute)
        return one

    def schedule(self, one: Any, compute: int | None = None) -> None:
        """Its first step, or the first one after it was preempted."""
        found, one.hit, _ = self.manager.get_computed_blocks(one)
        self.check(one, found)
        count = min(compute or one.num_tokens, one.num_tokens - one.hit)
        if self.manager.allocate_slots(one, count, one.hit, found) is None:
            self.finish(one)
            return
        one.num_computed_tokens = one.hit
        self._write(one, count)

    def check(self, one: Any, found: Any) -> None:
        """The hit is of these very tokens, by the weights that the request tells of. Tokens that other
        weights than those that run had a part in are of its own session."""
        begin, told = 0, list[str]()
        for end, version in getattr(one, "_hotswap_prompt", []):
            told += [self.bytes_of[version]] * (end - begin)
            begin = end
        first, mixed = self.wrote[found.blocks[0][0].block_id, 0][1] if one.hit else "", False
        for at in range(one.hit):
            token, computed, session = self.wrote[found.blocks[0][at // BLOCK].block_id, at % BLOCK]
            assert token == one.all_token_ids[at]
            if at < one.num_prompt_tokens:  # of an answer that is computed again nothing is told
                assert computed == (told[at] if at < len(told) else self.weights.parts[""])
            mixed = mixed or computed != first
            assert not mixed or session == one.session
            assert one.session is not None or computed == self.weights.parts[""]

    def step(self, one: Any, count: int = 1) -> None:
        """The next chunk of its prompt, or tokens of its answer."""
        if one.num_computed_tokens >= one.num_tokens:
            one.append_output_token_ids([random.Random(repr(one.all_token_ids[:])).randrange(3)])
        count = min(count, one.num_tokens - one.num_computed_tokens)
        if self.manager.allocate_slots(one, count) is None:
            self.finish(one)
        else:
            self._write(one, count)

    def answer(self, one: Any, tokens: int) -> list[int]:
        """All of it, after so many tokens more: what the next turn begins with."""
        for _ in range(tokens):
            self.step(one)
        self.finish(one)
        return list(one.all_token_ids)

    def finish(self, one: Any) -> None:
        self.requests.remove(one)
        self.manager.free(one)

    def commit(self, name: str, version: str, *, withdrawn: bool = False, rescaled: bool = False) -> None:
        before, self.weights, self.bytes_of[version] = self.weights, Weights(version, {"": name}), name
        core._move_requests(self.scheduler, before, self.weights, withdrawn=withdrawn, rescaled=rescaled)
        for one in self.scheduler.waiting:
            self.requests.append(one)
            self.schedule(one)
        self.scheduler.waiting.clear()

    def _write(self, one: Any, count: int) -> None:
        (blocks,) = self.manager.get_block_ids(one.request_id)
        for at in range(one.num_computed_tokens, one.num_computed_tokens + count):
            self.wrote[blocks[at // BLOCK], at % BLOCK] = (one.all_token_ids[at], self.weights.parts[""], one.session)
        one.num_computed_tokens += count

    def _preempted(self, scheduler: Any, one: Any, *_: Any, **__: Any) -> None:
        self.manager.free(one)
        one.num_computed_tokens = 0
        scheduler.waiting.append(one)


def talk(engine: Engine, session: str | None, **wish: Any) -> list[int]:
    """A first turn of ten blocks."""
    return engine.answer(engine.ask(list(range(8 * BLOCK)), session, **wish), 2 * BLOCK)


def test_a_session_keeps_what_the_version_before_has_computed() -> None:
    engine = Engine()
    said = talk(engine, "s")
    engine.commit("bytes 2", "2")
    second = engine.ask([*said, *range(BLOCK)], "s")
    assert second.hit == len(said)
    assert second._hotswap_prompt == [(len(said), "1")]
    said = engine.answer(second, 2 * BLOCK)
    engine.commit("bytes 3", "3")
    third = engine.ask([*said, 1], "s")
    assert third.hit == len(said)
    assert third._hotswap_prompt == [(10 * BLOCK, "1"), (len(said), "2")]


@pytest.mark.parametrize(("session", "more"), [("t", {}), (None, {}), ("s", {"policy": "x", "min_version": 2})])
def test_no_other_request_finds_it(session: str | None, more: dict[str, Any]) -> None:
    """Of another session, of none, or of the session with a version that is too old for it."""
    engine = Engine()
    said = talk(engine, "s")
    engine.commit("bytes 2", "2")
    assert engine.ask([*said, *range(BLOCK)], session, **more).hit == 0
    engine.finish(engine.requests[0])
    assert engine.ask([*said, *range(BLOCK)], "s").hit > 0


def test_any_request_of_the_scope_finds_it_where_it_says_any() -> None:
    engine = Engine()
    said = talk(engine, "")
    engine.commit("bytes 2", "2")
    assert engine.ask([*said, 1], "").hit == len(said)
    assert engine.ask([7, *said, 1], "").hit == 0


def test_a_session_begins_with_the_blocks_that_all_share_and_gives_them() -> None:
    engine = Engine()
    said = talk(engine, None)
    assert engine.ask([*said, 1], "s").hit == len(said)
    engine.commit("bytes 2", "2")
    fresh = engine.ask([*range(50, 50 + 4 * BLOCK), 1], "s")
    engine.finish(fresh)
    assert engine.ask([*range(50, 50 + 4 * BLOCK), 1]).hit == 4 * BLOCK


def test_a_request_in_flight_goes_on_in_its_session() -> None:
    """Its blocks after the swap are found by the next turn, and by no request that wants one version."""
    engine = Engine()
    one = engine.ask(list(range(6 * BLOCK)), "s", compute=2 * BLOCK + 1)
    engine.commit("bytes 2", "2")
    engine.step(one, 4 * BLOCK)
    said = engine.answer(one, 2 * BLOCK)
    again = engine.ask([*said, 1], "s")
    assert again.hit == len(said) // BLOCK * BLOCK
    assert again._hotswap_prompt == [(2 * BLOCK + 1, "1")]
    assert engine.ask([*said, 1]).hit == 0


def test_a_withdrawn_version_takes_along_what_it_computed() -> None:
    engine = Engine()
    said = talk(engine, "s")
    first = len(said)
    engine.commit("bytes 2", "2")
    said = engine.answer(engine.ask([*said, *range(BLOCK)], "s"), 2 * BLOCK)
    engine.commit("bytes 1", "3", withdrawn=True)
    again = engine.ask([*said, 1], "s")
    assert again.hit == first
    assert again._hotswap_prompt == [], "of the very weights that run"


def test_a_request_in_flight_is_computed_again_where_its_version_is_withdrawn() -> None:
    engine = Engine()
    said = talk(engine, "s")
    engine.commit("bytes 2", "2")
    running = engine.ask([*said, *range(BLOCK)], "s")
    assert running.hit == len(said)
    engine.commit("bytes 3", "3", withdrawn=True)
    assert (running.hit, running._hotswap_prompt) == (0, [])


def test_other_scales_of_the_cache_take_all() -> None:
    engine = Engine()
    said = talk(engine, "s")
    engine.commit("bytes 2", "2", rescaled=True)
    assert engine.ask([*said, 1], "s").hit == 0


def test_recompute_computes_again_also_what_the_session_has() -> None:
    engine = Engine()
    said = talk(engine, "s")
    one = engine.ask([*said, 1], "s", policy="recompute")
    assert one.hit == len(said)
    engine.commit("bytes 2", "2")
    assert (one.hit, one._hotswap_prompt) == (0, [])


@pytest.mark.parametrize(("bound", "kept"), [({"versions": 2}, 0), ({"versions": 3}, 1), ({"age_s": -1.0}, 0)])
def test_it_is_bounded_in_versions_and_in_age(bound: dict[str, Any], kept: int) -> None:
    engine = Engine()
    said = talk(engine, "s", kv=bound)
    engine.commit("bytes 2", "2")
    said = engine.answer(engine.ask([*said, *range(BLOCK)], "s", kv=bound), 2 * BLOCK)
    engine.commit("bytes 3", "3")
    assert (engine.ask([*said, 1], "s", kv=bound).hit > 0) == kept


def test_a_conversation_may_branch() -> None:
    engine = Engine()
    said = talk(engine, "s")
    engine.commit("bytes 2", "2")
    left = engine.answer(engine.ask([*said, *[1] * BLOCK], "s"), BLOCK)
    right = engine.answer(engine.ask([*said[: 5 * BLOCK], *[2] * BLOCK], "s"), BLOCK)
    engine.commit("bytes 3", "3")
    for branch, computed in ((left, len(said)), (right, 5 * BLOCK)):
        again = engine.ask([*branch, 1], "s")
        assert again.hit == len(branch)
        assert again._hotswap_prompt == [(computed, "1"), (len(branch), "2")]


def test_so_many_sessions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SESSIONS", 3)
    engine = Engine()
    said = {name: engine.answer(engine.ask([n] * (4 * BLOCK), name), 1) for n, name in enumerate("abcd")}
    engine.commit("bytes 2", "2")
    assert len(sessions.of(engine.scheduler, engine.weights)) == 3
    hits = {name: engine.ask([*said[name], 1], name).hit > 0 for name in "bcda"}
    assert hits == {"a": False, "b": True, "c": True, "d": True}


@pytest.mark.parametrize("seed", range(30))
def test_a_hit_is_what_it_is_said_to_be(seed: int) -> None:
    """Conversations that branch, requests with and without a session, chunks, swaps there and back, in a cache that is
    too small: `Engine.check` compares each hit with what was written."""
    chance = random.Random(seed)
    engine, version, hits = Engine(blocks=chance.choice([40, 60, 200])), 1, 0
    said: dict[str | None, list[list[int]]] = {name: [[0] * BLOCK] for name in ("a", "b", "", None)}
    for _ in range(400):
        match chance.choice(["ask"] * 4 + ["step"] * 6 + ["finish"] * 3 + ["commit"]):
            case "ask" if len(engine.requests) < 4:
                session = chance.choice(list(said))
                begun = chance.choice(said[session])
                begun = begun[: chance.choice([len(begun), len(begun), chance.randrange(len(begun) + 1)])]
                prompt = [*begun, *(chance.randrange(2) for _ in range(chance.randrange(1, 2 * BLOCK)))][:LONGEST]
                wish: dict[str, Any] = {"policy": chance.choice(["keep", "keep", "recompute"])}
                wish |= {"min_version": version - 1} if chance.random() < 0.1 else {}
                one = engine.ask(prompt, session, compute=chance.choice([None, 3]), kv={"versions": 4}, **wish)
                hits += bool(one._hotswap_prompt) if session is not None else 0
            case "step" if engine.requests:
                engine.step(chance.choice(engine.requests), chance.randrange(1, 9))
            case "finish" if engine.requests:
                one = chance.choice(engine.requests)
                engine.finish(one)
                said[one.session] = [*said[one.session], list(one.all_token_ids)][-4:]
            case "commit":
                version += 1
                name = f"bytes {chance.randrange(4)}"
                withdrawn = chance.random() < 0.2
                engine.commit(name, str(version), withdrawn=withdrawn, rescaled=chance.random() < 0.05)
    assert hits, "sessions found what other weights had computed"


@pytest.mark.parametrize("session", [None, "s"])
def test_the_bound_that_a_release_sets_to_a_hit_is_handed_on(session: str | None) -> None:
    """vLLM 0.32 sets none, and 0.33 one."""
    engine, bounds = Engine(), list[Any]()
    one = engine.ask([1, 2, 3], session)

    def lookup(manager: Any, request: Any, *bound: int) -> tuple[None, int, int]:
        bounds.append(bound)
        return None, 0, 0

    for bound in ((), (7,)):
        sessions.placed(lookup)(engine.manager, one, *bound)
    assert set(bounds) == {(), (7,)}
