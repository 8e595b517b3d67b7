"""The field `routed_experts` of requests and answers, on recorded engine outputs."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from server.instance.generate import GenerateRequest, Run
from server.instance.inflight import Inflight, Problem
from server.instance.middleware import wants
from server.instance.provenance import Trace, annotate, current_trace, traced
from server.instance.routed_experts import FIELD, Recording, encoded, routing_lost

pytestmark = pytest.mark.engine
EXPERTS = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
PROMPT = {"prompt_token_ids": [5, 6, 7]}


def recording(*, on: bool = True, mixture: bool = True) -> Recording:
    return Recording(
        SimpleNamespace(aux_output_config=SimpleNamespace(enabled=on), model_config=SimpleNamespace(is_moe=mixture))
    )


def decoded(text: str) -> np.ndarray:
    found: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)))
    return found


def choice_of(finish_reason: str | None, experts: np.ndarray | None) -> SimpleNamespace:
    """An output of the engine that says one token."""
    span = SimpleNamespace(version="3", start=0, end=1)
    said = {"index": 0, "text": "a", "token_ids": [9], "logprobs": None, "weight_versions": [span]}
    return SimpleNamespace(**said, finish_reason=finish_reason, routed_experts=experts)


async def told(
    wanted: bool | None, *, on: bool = True, rows: int = 3, start: int = 0, of: Recording | None = None
) -> tuple[Trace, Any, Any]:
    """The trace after an answer; its last output, and the parameters that the engine got."""
    params = SimpleNamespace(n=1, extra_args=None, prompt_logprobs=None, routed_experts_prompt_start=start)
    params.skip_reading_prefix_cache = None
    output = choice_of("stop", EXPERTS[:rows])

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[output], finished=True, **PROMPT)

    trace = Trace()
    trace.wants_routing = wanted
    current_trace.set(trace)
    with contextlib.suppress(Problem):  # the trace has it
        async for _ in traced(generate, Inflight(), of or recording(on=on))(PROMPT, params, "r"):
            pass
    return trace, output, params


@pytest.mark.parametrize("wanted", [True, None])
async def test_a_prompt_whose_routing_is_lost_is_an_error_and_computed_anew_the_next_time(wanted: bool | None) -> None:
    found = recording()
    trace, _, params = await told(wanted, rows=2, of=found)
    assert trace.problem is not None
    assert (trace.problem.status, trace.problem.code, trace.problem.param) == (503, "routing_lost", FIELD)
    assert params.skip_reading_prefix_cache is None
    for expected in (True, None):
        trace, _, params = await told(wanted, of=found)
        assert trace.problem is None
        assert params.skip_reading_prefix_cache is expected
    trace, _, _ = await told(wanted, rows=1, start=2, of=found)
    assert trace.problem is None, "the rows from the start on are there"
    trace, _, _ = await told(False, rows=1, of=found)
    assert trace.problem is None


async def test_what_was_asked_for_is_told_where_an_answer_ends() -> None:
    trace, _, params = await told(True)
    assert params.routed_experts_prompt_start == 0
    middle: dict[str, Any] = {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}
    end: dict[str, Any] = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    message: dict[str, Any] = {"type": "message_delta", "delta": {}}
    response: dict[str, Any] = {"type": "response.completed", "response": {"object": "response"}}
    for payload, last in ((middle, False), (end, True), (message, True), (response, True)):
        annotate(payload, trace, last=last)
    assert FIELD not in middle["choices"][0]
    for place in (end["choices"][0], message, response["response"]):
        assert np.array_equal(decoded(place[FIELD]), EXPERTS)
        assert decoded(place[FIELD]).dtype == np.uint8
    own: dict[str, Any] = {"choices": [{"index": 0, "message": {}, "finish_reason": "stop", FIELD: "vLLM's"}]}
    annotate(own, trace, last=True)
    assert own["choices"][0][FIELD] == "vLLM's"


async def test_nobody_gets_what_was_not_asked_for() -> None:
    trace, output, params = await told(False)
    assert output.routed_experts is None
    assert params.routed_experts_prompt_start == 3, "the engine need not look the prompt's up"
    end: dict[str, Any] = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    annotate(end, trace, last=True)
    assert FIELD not in end["choices"][0]


async def test_routes_of_vllm_that_are_not_rewritten_say_what_vllm_says() -> None:
    _, output, params = await told(None)
    assert np.array_equal(output.routed_experts, EXPERTS)
    assert params.routed_experts_prompt_start == 0
    await told(None, on=False)


@pytest.mark.parametrize(("mixture", "said"), [(True, "--enable-return-routed-experts"), (False, "no experts")])
def test_what_cannot_be_recorded_is_refused(mixture: bool, said: str) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=said) as refused:
        recording(on=False, mixture=mixture).prepare(PROMPT, SimpleNamespace(), wanted=True)
    assert refused.value.parameter == FIELD
    recording(on=False, mixture=mixture).prepare(PROMPT, SimpleNamespace(), wanted=False)


@pytest.mark.parametrize(
    "body", [b'{"routed_experts_prompt_start": 4}', b'["routed_experts"]', b'{"routed_experts": tru']
)
def test_who_asks_for_no_routing(body: bytes) -> None:
    """The last one is refused by vLLM. Values that a field may have are in test_provenance.py."""
    assert wants(body, FIELD) is False


def test_many_experts_take_two_bytes() -> None:
    wide = np.full((1, 1, 2), 300, dtype=np.uint16)
    assert decoded(encoded(wide)).tolist() == wide.tolist()


def run_of(outputs: list[Any], **asked: Any) -> Run:
    """A request to /generate, of an engine that gives these outputs, or raises them."""

    async def rendered(_: Any) -> list[Any]:
        return [PROMPT]

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        for output in outputs:
            if isinstance(output, Exception):
                raise output
            yield output

    client = SimpleNamespace(renderer=SimpleNamespace(render_cmpl_async=rendered), generate=generate)
    adapters = SimpleNamespace(find=lambda _: None)
    state = SimpleNamespace(engine_client=client, hotswap_adapters=adapters, hotswap_models=["m"])
    return Run(GenerateRequest(prompt_token_ids=[5, 6, 7], **asked), "g", state, {})


async def test_generate_tells_it_with_the_last_token_of_a_choice() -> None:
    outputs = [SimpleNamespace(outputs=[o], **PROMPT) for o in (choice_of(None, None), choice_of("stop", EXPERTS))]
    for wanted in (True, False):
        run = run_of(outputs, routed_experts=wanted)
        await run.start()
        events = [orjson.loads(str(event.data)) async for event in run.events()]
        assert [FIELD in event for event in events] == [False, wanted, False]
        run = run_of(outputs, routed_experts=wanted)
        await run.start()
        (choice,) = (await run.whole())["choices"]
        assert (FIELD in choice) is wanted
        if wanted:
            assert events[1][FIELD] == choice[FIELD]
            assert np.array_equal(decoded(choice[FIELD]), EXPERTS)


async def test_generate_tells_what_is_lost() -> None:
    run = run_of([SimpleNamespace(outputs=[choice_of(None, None)], **PROMPT), routing_lost()], routed_experts=True)
    await run.start()
    *_, (name, told_last) = [(event.event, orjson.loads(str(event.data))) async for event in run.events()]
    assert (name, told_last["error"]["code"]) == ("error", "routing_lost")


async def test_generate_names_the_field_that_is_refused() -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(Problem) as refused:
        await run_of([VLLMValidationError("no", parameter=FIELD)], routed_experts=True).start()
    assert refused.value.param == FIELD
