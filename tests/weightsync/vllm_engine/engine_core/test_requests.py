"""Requests at a commit: their namespaces in the prefix cache, on vLLM's own objects, and which of them it ends.

And answers gone on with at another engine, in vLLM's own output processor: text, stop strings, positions, spans.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request
from vllm.v1.sample.ops.topk_topp_sampler import random_sample

from weightsync.vllm_engine.engine_core import core, requests
from weightsync.vllm_engine.engine_core.requests import (
    PRIVATE,
    Weights,
    allows,
    ends,
    enter,
    go_private,
    namespace,
    namespace_of,
    wish_of,
)

pytestmark = pytest.mark.engine
core.install()
BLOCK = 4
TEXT = "a né漢字 \U0001f600x字 end\U0001f680.\n"
PROMPT = list("né ".encode())


def request(version: str = "1", own: str = "1:s|", tokens: int = 12, first: int = 0) -> Any:
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


def through(adapter: str | None, of: Any = None) -> Any:
    """A request through a published adapter, or through none."""
    found = of or request()
    found.lora_request = LoRARequest(adapter, 1, f"hotswap:lora/{adapter}") if adapter else None
    return found


BEFORE = {"": "base", "draft": "d", "lora/x": "x 1", "lora/y": "y"}


@pytest.mark.parametrize(
    ("after", "changed"),
    [
        (BEFORE | {"": "other"}, {None, "x", "y"}),
        (BEFORE | {"draft": "other"}, {None, "x", "y"}),
        (BEFORE | {"lora/x": "x 2"}, {"x"}),
        (BEFORE | {"lora/z": "z"}, set()),
        ({"": "base", "draft": "d", "lora/x": "x 1"}, set()),
        (dict(reversed(BEFORE.items())), set()),
    ],
)
def test_a_request_belongs_to_the_weights_that_compute_it(after: dict[str, str], changed: set[str | None]) -> None:
    """Not to a version: what it never reads may change."""
    here, there = Weights("1", BEFORE), Weights("2", after)
    adapters = [name for name in (None, "x", "y") if name is None or f"lora/{name}" in after]
    assert {name for name in adapters if here.of(through(name)) != there.of(through(name))} == changed
    assert {there.of(through(name)) for name in adapters} <= there.all()
    assert len({here.of(through(name)) for name in (None, "x", "y")}) == 3


def test_a_number_that_comes_again_with_other_bytes_finds_nothing() -> None:
    """As versions do in a store that was restored from a backup."""
    assert Weights("7", {"": "one"}).of(through(None)) != Weights("7", {"": "two"}).of(through(None))
    assert Weights("default").of(through(None)) == "default"


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_commit_moves_the_requests_whose_weights_change(
    monkeypatch: pytest.MonkeyPatch, policy: str, withdrawn: bool
) -> None:
    """To another version, and to one in whose place nothing of the one before is to go on."""
    before, after = Weights("3", BEFORE), Weights("4", BEFORE | {"lora/x": "x 2"})
    running = {
        name: through(
            name,
            Request(
                str(name),
                list(range(40)),
                SamplingParams(extra_args={"hotswap": {"policy": policy}}),
                None,
                cache_salt=namespace(before.of(through(name)), "1:s|"),
                block_hasher=get_request_block_hasher(BLOCK, sha256),
            ),
        )
        for name in (None, "x")
    }
    waiting = {name: through(name) for name in (None, "x")}
    arriving = {name: through(name) for name in (None, "x")}  # the blocks come from elsewhere
    for each in (*running.values(), *arriving.values()):
        each.num_computed_tokens = 8
    for each in waiting.values():
        enter(each, before.of(each))
    kept = running[None].block_hashes[:], waiting[None].block_hashes[:]
    again: list[str] = []
    monkeypatch.setattr(core, "_start_over", lambda _, request: again.append(request.request_id))
    monkeypatch.setattr(core, "mark_stale", lambda _: None)
    scheduler = SimpleNamespace(
        encoder_cache_manager=None,
        kv_cache_manager=SimpleNamespace(),
        running=list(running.values()),
        waiting=list(waiting.values()),
        kv_holding_waiting=list(arriving.values()),
        hash_block_size=BLOCK,
    )
    crossed = core._move_requests(scheduler, before, after, withdrawn=withdrawn, rescaled=False)
    assert (running[None].block_hashes, waiting[None].block_hashes) == kept
    assert namespace_of(waiting["x"]) == after.of(waiting["x"])
    assert [namespace_of(each) == PRIVATE for each in arriving.values()] == [False, True]
    assert again == (["x"] if withdrawn or policy == "recompute" else [])
    assert crossed == {name: 8 for name in ("None", "x") if name not in again}
    assert again or namespace_of(running["x"]) == PRIVATE
    again.clear()
    core._move_requests(scheduler, before, after, withdrawn=withdrawn, rescaled=True)
    assert sorted(again) == ["None", "x"], "the scales of the cache have changed"


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
    fields = {"num_computed_tokens": begun, "num_output_tokens": 0}
    request = SimpleNamespace(sampling_params=params, lora_request=None, **fields)
    assert ends(request, "2") is ended
    request.lora_request = LoRARequest("x", 1, "hotswap:lora/x")
    assert ends(request, "2", {"", "lora/x"}) is ended
    assert ends(request, "2", {"", "lora/y"})


@pytest.mark.parametrize("part", ["lora/x", "lora/gone"])
def test_a_commit_between_the_threads_of_the_engine_lets_no_adapter_in_that_is_gone(part: str) -> None:
    ended: list[str] = []
    entered: list[str] = []
    engine = SimpleNamespace(_hotswap_weights=Weights("2", {"": "b", "lora/x": "x"}))
    engine._send_abort_outputs_to_client = lambda ids, client: ended.extend(ids)
    add = core._resalted(lambda self, request, wave: entered.append(request.request_id))
    late = request("1")
    late.lora_request, late.client_index = LoRARequest("x", 1, f"hotswap:{part}"), 0
    add(engine, late)
    assert (entered, ended) == ((["r"], []) if part == "lora/x" else ([], ["r"]))


def test_a_request_that_pools_ends_without_its_engine() -> None:
    """vLLM's processor knows no end of such a request that comes from the engine core."""
    processor = OutputProcessor(None, log_stats=False)
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "p")
    asked = EngineCoreRequest("p", [1, 2], None, None, PoolingParams(task="embed"), 0.0, None, None, None)
    asked.external_req_id = "p"
    processor.add_request(asked, None, None, 0, queue)
    processor.process_outputs([EngineCoreOutput("p", [], finish_reason=FinishReason.ABORT)])
    told = queue.get_nowait()
    assert told is not None
    assert told.finished
    assert not told.outputs.data.numel()


def test_requests_that_pool_have_a_scope_too() -> None:
    pooling = SimpleNamespace(extra_kwargs={"hotswap": {"scope": "s"}})
    assert wish_of(SimpleNamespace(sampling_params=None, pooling_params=pooling)) == {"scope": "s"}
    assert wish_of(SimpleNamespace(sampling_params=None, pooling_params=None)) == {}


# answers gone on with -------------------------------------------------------------------------------------------------


def byte_level() -> PreTrainedTokenizerFast:
    """A token for every byte: most characters here take several."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: b for b, letter in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Bytes as SentencePiece spells them, with the space it puts before a text."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@dataclass
class Told:
    """The part of an answer that a client has."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    decoded: list[Any] = field(default_factory=list)  # as log-probabilities have them
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    end: tuple[Any, Any] = (None, None)
    replayed: Any = None

    def take(self, output: Any) -> None:
        (choice,) = output.outputs
        self.replayed = choice.hotswap_replay or self.replayed
        self.texts.append(choice.text)
        self.ids += choice.token_ids
        self.decoded += [p[t].decoded_token for p, t in zip(choice.logprobs or (), choice.token_ids, strict=False)]
        self.spans = [(s.version, s.start, s.end) for s in choice.weight_versions or ()]
        self.end = choice.finish_reason, choice.stop_reason


def generate(tokenizer: Any, params: dict[str, Any], tokens: list[int], versions: list[str], done: Told | None) -> Told:
    """An engine that answers `tokens`, by `versions`; after what `done` has, if anything."""
    told = Told()
    extra: dict[str, Any] = {}
    if done is not None:
        spans = [(int(v), start) for v, start, _ in done.spans]
        extra = {"tokens": done.ids, "spans": spans, "prompt": [(2, 5), (len(PROMPT), 6)], "ended": False}
    sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=500, **params)
    sampling.extra_args = {"hotswap": {"replay": extra}}
    processor = OutputProcessor(tokenizer, log_stats=False)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    request = EngineCoreRequest("r", list(PROMPT), None, sampling, None, 0.0, None, None, None, external_req_id="r")
    processor.add_request(request, None, None, 0, queue)
    for token, version in zip(tokens, versions, strict=True):
        scores = LogprobsLists(np.array([[token, 7]]), np.array([[-1.0, -2.0]]), np.array([1]))
        output = EngineCoreOutput("r", [token])
        output.new_logprobs = scores if params.get("logprobs") is not None else None
        processor.process_outputs([output], weight_version=version)
        if (made := queue.get_nowait()) is not None:
            told.take(made)
        if told.end[0] is not None:
            break
    return told


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"stop": ["x字 e"]},
        {"stop": ["x字 e", "\U0001f600"], "include_stop_str_in_output": True},
        {"stop": ["né", "\n"], "min_tokens": 9},
        {"stop": ["never found in here"]},
        {"logprobs": 1},
        {"logprobs": 1, "stop": ["\U0001f680"]},
        {"stream_interval": 3},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
        {"detokenize": False},
    ],
)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_cut_after_any_token_the_answer_is_what_it_would_have_been(make: Any, params: dict[str, Any]) -> None:
    tokenizer, tokens = make(), list(TEXT.encode())
    versions = ["5"] * 7 + ["6"] * (len(tokens) - 7)
    whole = generate(tokenizer, params, tokens, versions, None)
    for cut in range(1, len(whole.ids)):
        first = generate(tokenizer, params, tokens[:cut], versions[:cut], None)
        have = len(first.ids)
        rest = generate(tokenizer, params, tokens[have:], versions[have:], first)
        assert rest.replayed.text == "".join(first.texts)
        assert list(rest.replayed.token_ids) == first.ids
        assert "".join(first.texts + rest.texts) == "".join(whole.texts)
        assert first.ids + rest.ids == whole.ids
        assert first.decoded + rest.decoded == whole.decoded
        assert rest.spans == whole.spans
        assert rest.end == whole.end
        assert rest.replayed.hotswap_prompt == [(2, "5"), (len(PROMPT), "6")]


@pytest.mark.parametrize(("ended", "written", "left"), [(False, [7, 8, 9], 7), (True, [7, 8], 1)])
def test_the_engine_gets_the_tokens_behind_the_prompt(ended: bool, written: list[int], left: int) -> None:
    params = SamplingParams(max_tokens=10, min_tokens=2)
    params.extra_args = {"hotswap": {"replay": {"tokens": [7, 8, 9], "ended": ended}}}
    request = SimpleNamespace(prompt_token_ids=[1, 2], sampling_params=params, pooling_params=None)
    requests.extend(request, requests.replay_of(request))
    assert request.prompt_token_ids == [1, 2, *written]
    assert (request.sampling_params.max_tokens, request.sampling_params.min_tokens) == (left, 0)
    assert params.max_tokens == 10


def test_seeded_continuations_are_from_the_model_s_distribution() -> None:
    """2,000 answers with vLLM's sampler: each token is as likely after a seam as before, whatever came before."""
    likely = torch.softmax(torch.linspace(0, 3, 20), 0)

    def sampled(seed: int) -> int:
        noise = torch.Generator().manual_seed(seed)
        return int(random_sample(likely[None].clone(), {0: noise})[0])

    def continued(seed: int, tokens: list[int]) -> int:
        params = SamplingParams(max_tokens=10, seed=seed)
        params.extra_args = {"hotswap": {"replay": {"tokens": tokens, "ended": False}}}
        request = SimpleNamespace(prompt_token_ids=[1, 2], sampling_params=params, pooling_params=None)
        requests.extend(request, requests.replay_of(request))
        assert params.seed == seed
        return sampled(request.sampling_params.seed)

    answers = []
    for seed in range(2000):
        tokens = [sampled(seed)]
        for _ in range(2):  # two seams
            tokens.append(continued(seed, tokens))
        answers.append(tokens)
    for place in range(3):
        counts = Counter(tokens[place] for tokens in answers)
        square = sum((counts[t] - 2000 * p) ** 2 / (2000 * p) for t, p in enumerate(likely.tolist()))
        assert square < 19 + 5 * (2 * 19) ** 0.5, "as a chi-square of 19 degrees of freedom"
    alike = float((likely**2).sum())
    for one, other in ((0, 1), (1, 2), (0, 2)):
        same = sum(tokens[one] == tokens[other] for tokens in answers) / 2000
        assert abs(same - alike) < 5 * (alike * (1 - alike) / 2000) ** 0.5


def test_others_are_left_alone() -> None:
    request = SimpleNamespace(
        sampling_params=SamplingParams(extra_args={"hotswap": {"scope": "s"}}), pooling_params=None
    )
    assert not requests.replay_of(request)
