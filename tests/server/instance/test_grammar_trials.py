"""Grammars within the bounds are compiled in a process apart, with limits, and vLLM gets only those that passed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import runpy
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import pytest_asyncio
import xgrammar
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from server.errors import ConfigError
from server.instance.grammars import bounds
from server.instance.grammars.guard import Backend, bounded_parser, tried
from server.instance.grammars.trials import HELPER, Grammar, Limits, Trials, Turns
from server.instance.inflight import Problem, Wish
from server.instance.provenance import Trace, current_trace
from tests.server.instance.test_bounds import USUAL
from tests.waiting import eventually, wait_until

SLOW = "|".join(f"(.*{'abcdefgh'[n % 8]}.{{{1000 + n}}})" for n in range(400))
WIDE = ".*".join("abc"[n % 3] for n in range(20_000))  # takes about 150 MiB
BAD: list[dict[str, Any]] = [
    {"grammar": 'root ::= nobody "a'},
    {"regex": "(a"},
    {"json": {"type": "nothing"}},
    {"json": '{"type": "string", "pattern": "(a"}'},
    {"json": "no JSON"},
    {"structural_tag": '{"structures": [], "triggers": 5}'},
    {"json": {"type": "object", "patternProperties": {"^a": {}}, "properties": {"b": {}}}},
]


@pytest.fixture(scope="module", autouse=True)
def _a_busy_machine_has_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For the imports of the helper; and for a trial to use up its processor time, behind everything else."""
    helper = tmp_path_factory.mktemp("helper") / HELPER.name
    patient = HELPER.read_text().replace("STARVED = 20 ", "STARVED = 900 ")
    assert patient != HELPER.read_text()
    helper.write_text(patient)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.instance.grammars.trials.HELPER", helper)
        patch.setattr("server.instance.grammars.trials.START_S", 280.0)
        yield


@pytest.fixture(scope="module")
def backend(checkpoints: dict[str, Path]) -> Backend:
    args = EngineArgs(model=str(checkpoints["a"]), load_format="dummy", enforce_eager=True)
    return Backend(args.create_engine_config())


@pytest.fixture(scope="module")
def kit(backend: Backend) -> dict[str, Any]:
    return backend.kit() | {"threads": 1}


def trials_of(kit: dict[str, Any], **limits: Any) -> Trials:
    return Trials(Limits(**limits), lambda: dict(kit))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trials(kit: dict[str, Any]) -> AsyncIterator[Trials]:
    """Shared, as a helper imports torch. After a test that ends it, the next test starts another."""
    made = trials_of(kit, seconds=60)
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def many_words(kit: dict[str, Any]) -> AsyncIterator[Trials]:
    """Shared: those of a model with 50,000 tokens, whose tokenizer llguidance does not know."""
    chance = random.Random(0)
    characters = "abcdefghij {}:,01234567"
    words = ["".join(chance.choices(characters, k=chance.randint(2, 8))) for _ in range(50_000)]
    words = ["#", *words, *characters, "<eos>"]
    info = xgrammar.TokenizerInfo(words, stop_token_ids=[len(words) - 1])
    unknown = orjson.loads(kit["guidance"]["tokenizer"]) | {"decoder": {"type": "Fuse"}}
    guidance = kit["guidance"] | {"tokenizer": orjson.dumps(unknown).decode()}
    made = trials_of(kit | {"xgrammar": info.serialize_json(), "guidance": guidance})
    yield made
    await made.close()


def regex(text: str) -> Grammar:
    return Grammar((("xgrammar", "regex", text),), frozenset({0}))


def helper_of(trials: Trials) -> psutil.Process:
    assert trials._helper is not None
    return psutil.Process(trials._helper._process.pid)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("asked", [a for a in USUAL if a.get("json") != "not JSON, which vLLM says"])
async def test_what_people_send_passes(backend: Backend, trials: Trials, asked: dict[str, Any]) -> None:
    grammar = backend.grammar(StructuredOutputsParams(**asked))
    if grammar is not None:
        await trials.check(grammar)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("asked", BAD)
async def test_what_does_not_compile_is_the_client_s(backend: Backend, trials: Trials, asked: dict[str, Any]) -> None:
    async def check() -> None:
        grammar = backend.grammar(StructuredOutputsParams(**asked))
        assert grammar is not None
        await trials.check(grammar)

    with pytest.raises(Problem, match="correct it") as refused:
        await check()
    assert (refused.value.status, refused.value.code) == (400, "invalid_grammar")


@pytest.mark.parametrize("asked", [*USUAL[1:4], *USUAL[5:], *BAD[:4]])
def test_the_trial_is_what_vllm_does(backend: Backend, kit: dict[str, Any], asked: dict[str, Any]) -> None:
    """The same compiled grammar of xgrammar, the same acceptance by llguidance."""

    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.structured_output.request import get_structured_output_key

    config = backend._config
    tokenizer = cached_tokenizer_from_config(model_config=config.model_config)
    vocabulary = config.model_config.get_vocab_size()
    params = StructuredOutputsParams(**asked)
    grammar = backend.grammar(params)
    assert grammar is not None
    compilers = runpy.run_path(str(HELPER))["Compilers"](kit)
    kind, text = get_structured_output_key(params)
    in_vllm = {
        "xgrammar": XgrammarBackend(config, tokenizer=tokenizer, vocab_size=vocabulary),
        "guidance": GuidanceBackend(config, tokenizer=tokenizer, vocab_size=vocabulary),
    }
    for library, name, text_there in grammar.attempts:
        theirs = (
            (StructuredOutputOptions.GRAMMAR, text_there)
            if "choice" in asked and library == "xgrammar"
            else (kind, text)
        )
        try:
            compiled = in_vllm[library].compile_grammar(*theirs)
            if library == "guidance" and (error := compiled.ll_matcher.get_error()):
                raise ValueError(error)
        except (RuntimeError, ValueError):
            with pytest.raises((RuntimeError, ValueError)):
                compilers.try_out(library, name, text_there)
        else:
            compilers.try_out(library, name, text_there)
            if library == "xgrammar":
                assert compilers.xgrammar(name, text_there).serialize_json() == compiled.ctx.serialize_json()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "limits", "says"),
    [(SLOW, {"seconds": 0.3}, "more than 0.3 s"), (WIDE, {"mib": 32}, "more than 32 MiB")],
    ids=["time", "memory"],
)
async def test_what_takes_too_much_is_refused_and_the_next_one_is_tried(
    kit: dict[str, Any], text: str, limits: dict[str, Any], says: str
) -> None:
    bounds.check_pattern(text)
    trials = trials_of(kit, **limits)
    for _ in range(2):  # the second time from memory
        with pytest.raises(Problem, match=says) as refused:
            await trials.check(regex(text))
        assert refused.value.code == "grammar_too_costly"
    await trials.check(regex("[a-z]+"))
    await trials.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("before", ["", "#{200}|01230123"], ids=["at once", "on another branch"])
async def test_a_mask_that_takes_too_long_is_refused(many_words: Trials, before: str) -> None:
    """It compiles at once; the engine would then take that long for each token, and its other streams with it.

    The first token that is allowed leads away from the slow branch.
    """
    slow = "(" + "|".join(f"(a|b|c|[d-z]){{{n}}}" for n in range(1, 90)) + ")*x"
    with pytest.raises(Problem, match="each token"):
        await many_words.check(regex(before + slow))
    await many_words.check(regex("#{200}|01230123x"))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tokenizer_that_llguidance_does_not_know_leaves_xgrammar(many_words: Trials) -> None:
    await many_words.check(regex("[a-z]+"))
    with pytest.raises(Problem, match="llguidance cannot work with the tokenizer of this model"):
        await many_words.check(Grammar((("guidance", "grammar", "{}"),), frozenset({0})))


@pytest.mark.asyncio(loop_scope="module")
async def test_one_slow_grammar_holds_up_no_other_and_may_be_killed_with_the_helper(trials: Trials) -> None:
    await trials.check(regex("a"))
    slow = asyncio.create_task(trials.check(regex(SLOW)))
    same = asyncio.create_task(trials.check(regex(SLOW)))
    for n in range(5):
        await trials.check(regex(f"b{n}"))
    assert not slow.done()
    helper = helper_of(trials)
    children = helper.children()
    assert len(children) == 1  # the same grammar is one trial
    helper.kill()
    for task in (slow, same):
        with pytest.raises(Problem, match="send the request again"):
            await task
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() for child in children)
    await trials.check(regex("begun anew"))


async def test_who_finds_the_queue_full_is_told_to_come_again(kit: dict[str, Any]) -> None:
    trials = trials_of(kit, at_once=1, waiting=1, seconds=60)
    running = asyncio.create_task(trials.check(regex(SLOW)))
    waiting = asyncio.create_task(trials.check(regex("a")))
    await asyncio.sleep(0)
    with pytest.raises(Problem, match="send the request again") as busy:
        await trials.check(regex("b"))
    assert (busy.value.status, busy.value.retry_after_s) == (429, 2)
    await trials.close()
    for task in (running, waiting):
        with pytest.raises(Problem, match="send the request again"):
            await task


async def test_one_key_cannot_take_the_trials_of_others(backend: Backend, kit: dict[str, Any]) -> None:
    """The guard tells the cache scope of each request, which is a name of its key."""

    async def generate(prompt: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        yield prompt

    trials = trials_of(kit, at_once=1, waiting=2, seconds=60)
    guarded = tried(generate, backend, trials)

    async def ask(scope: str, text: str) -> list[Any]:
        current_trace.set(Trace(Wish(scope=scope)))
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=text))
        return [output async for output in guarded("p", params, "r")]

    slow = asyncio.create_task(trials.check(regex(SLOW), "greedy"))
    await asyncio.sleep(0)
    greedy = [asyncio.create_task(ask("greedy", text)) for text in ("a", "b", "c")]
    await eventually(lambda: greedy[2].done())
    other = asyncio.create_task(ask("modest", "d"))
    await eventually(lambda: greedy[1].done())
    for refused in greedy[1:]:
        with pytest.raises(VLLMValidationError, match="in some seconds"):
            await refused
    assert not greedy[0].done()
    assert not other.done()
    await trials.close()
    await asyncio.gather(slow, greedy[0], other, return_exceptions=True)


@pytest.mark.parametrize("seed", range(20))
async def test_turns_are_shared(seed: int) -> None:
    """No turn is lost or given twice, whatever owners ask for and give up. An owner that asks for one at a time waits
    for no more turns than there are owners."""
    chance = random.Random(seed)
    at_once, waiting = chance.randint(1, 3), chance.randint(0, 6)
    turns = Turns(at_once, waiting)
    running: list[asyncio.Future[None]] = []
    queued: list[tuple[str, asyncio.Future[None]]] = []
    modest: asyncio.Future[None] | None = None
    ended = 0

    def settle() -> None:
        nonlocal queued
        running.extend(turn for _, turn in queued if turn.done() and not turn.cancelled() and not turn.exception())
        queued = [(owner, turn) for owner, turn in queued if not turn.done()]
        assert len(running) <= at_once
        assert len(queued) <= waiting
        assert len(running) == at_once or not queued

    for _ in range(300):
        owner, deed = chance.choice("abc"), chance.random()
        if deed < 0.6:
            with contextlib.suppress(asyncio.QueueFull):
                queued.append((owner, turns.ask(owner)))
        elif deed < 0.7 and queued:
            chance.choice(queued)[1].cancel()
        elif running:
            running.pop(chance.randrange(len(running)))
            turns.end()
            ended += 1
        settle()
        if modest is None and waiting > 3:  # enough places for one owner to have two more than another
            modest, ended = turns.ask("modest"), 0
            queued.append(("modest", modest))
            settle()
        elif modest is not None and modest.done():
            assert ended <= 4
            modest = None
    while running:
        running.pop()
        turns.end()
        settle()
    assert not queued
    assert turns._free == at_once


@pytest.mark.broad
async def test_verdicts_are_kept_up_to_their_number(kit: dict[str, Any]) -> None:
    trials = trials_of(kit, verdicts=2)
    for text in ("a", "b", "c", "b"):
        await trials.check(regex(text))
    assert list(trials._verdicts) == [regex("c").digest, regex("b").digest]
    await trials.close()


@pytest.mark.broad
async def test_nothing_runs_before_the_first_grammar_or_after_the_end(kit: dict[str, Any]) -> None:
    trials = trials_of(kit)
    assert trials._helper is None
    await trials.check(regex("a"))
    helper = helper_of(trials)
    assert helper.is_running()
    await trials.close()
    assert not helper.is_running()


PARENT = """
import asyncio, sys, orjson
from server.instance.grammars import trials
from server.instance.grammars.trials import Grammar, Limits, Trials
trials.START_S = 280.0  # for its imports
async def main():
    kit = orjson.loads(sys.stdin.buffer.read())
    trials = Trials(Limits(seconds=60), lambda: kit)
    await trials.check(Grammar((("xgrammar", "regex", "a"),), frozenset({0})))
    print(trials._helper._process.pid, flush=True)
    await trials.check(Grammar((("xgrammar", "regex", sys.argv[1]),), frozenset({0})))
asyncio.run(main())
"""


def test_the_helper_and_its_trials_die_with_the_instance(kit: dict[str, Any]) -> None:
    command = [sys.executable, "-c", PARENT, SLOW]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(orjson.dumps(kit))
        parent.stdin.close()
        helper = psutil.Process(int(parent.stdout.readline()))
        wait_until(helper.children, 60)
        trial = helper.children()
        parent.kill()
    gone, alive = psutil.wait_procs([helper, *trial], timeout=60)
    assert len(gone) == 2, alive


@pytest.mark.broad
def test_the_helper_imports_neither_vllm_nor_this_project(kit: dict[str, Any]) -> None:
    code = (
        "import json, runpy, sys; made = runpy.run_path(sys.argv[1])['Compilers'](json.load(sys.stdin)); "
        "made.try_out('xgrammar', 'regex', 'a'); "
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'server')])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(HELPER)], input=orjson.dumps(kit), capture_output=True, check=True
    )
    assert done.stdout.strip() == b"[]"


async def test_a_model_for_which_there_is_no_library_says_so() -> None:
    def kit() -> dict[str, Any]:
        raise ValueError("unknown tokenizer")

    for _ in range(2):
        with pytest.raises(Problem, match="unknown tokenizer") as refused:
            await Trials(Limits(), kit).check(regex("a"))
        assert refused.value.code == "grammars_unavailable"


def test_limits_that_cannot_work_are_refused() -> None:
    for wrong in ({"seconds": 0}, {"mib": 0}, {"at_once": 0}, {"waiting": -1}, {"verdicts": 0}):
        with pytest.raises(ConfigError, match="--grammar-"):
            Limits(**wrong)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_engine_gets_nothing_that_was_refused(backend: Backend, trials: Trials) -> None:
    begun = []

    async def generate(prompt: Any, params: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        begun.append(params)
        yield prompt

    guarded = tried(generate, backend, trials)
    good = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    assert [o async for o in guarded("p", good, "r")] == ["p"]
    assert [o async for o in guarded("p", SamplingParams(), "r")] == ["p"]
    assert len(begun) == 2
    trace = Trace()
    current_trace.set(trace)
    with pytest.raises(VLLMValidationError, match="does not compile"):
        await anext(guarded("p", bad, "r"))
    assert trace.problem is not None
    assert trace.problem.status == 400
    assert len(begun) == 2


def test_parsers_of_tool_calls_read_no_schema_beyond_the_bounds() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    class Parser:
        def adjust_request(self, request: Any) -> str:
            return "read"

    parser = bounded_parser(Parser)()
    usual = {"messages": [], "model": "m"}
    huge = {"type": "array", "minItems": 10**9}
    tool = {"type": "function", "function": {"name": "f", "parameters": huge}}
    assert parser.adjust_request(ChatCompletionRequest(**usual)) == "read"
    for more in (
        {"structured_outputs": {"json": huge}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": huge}}},
        {"tools": [tool]},
    ):
        with pytest.raises(VLLMValidationError, match="repeated 1000000000 times"):
            parser.adjust_request(ChatCompletionRequest(**usual, **more))
    assert bounded_parser(None) is None
