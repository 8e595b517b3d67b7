"""Answers as the middleware changes them: spans of weight versions, and errors where an app breaks off."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
import torch
from fastapi import FastAPI, Request
from pydantic import BaseModel, model_validator
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineGenerateError

from server import api
from server.instance.grammars.trials import busy, refused
from server.instance.inflight import Inflight, Problem, Wish, version_mismatch, weights_changed
from server.instance.middleware import TRACED, ProvenanceMiddleware, answer_faults
from server.instance.provenance import MOST_SCORES, Trace, annotate, annotate_chunk, current_trace, pooled, traced
from tests.server.gateway.wire.test_error_shapes import check_shape
from tests.server.instance.asgi import head, part, sent_by

Span = namedtuple("Span", ["version", "start", "end"])
Output = namedtuple("Output", ["index", "weight_versions"])


def trace_of(*spans: Span, index: int = 0) -> Trace:
    trace = Trace()
    trace.record(trace.open(1), [Output(index, list(spans))])
    return trace


def chunk(finish: str | None = None, **delta: str) -> bytes:
    body = {"id": "x", "choices": [{"index": 0, "delta": delta or {"content": "a"}, "finish_reason": finish}]}
    return b"data: " + orjson.dumps(body) + b"\n\n"


def payload(event: bytes) -> dict[str, Any]:
    return dict(orjson.loads(event.removeprefix(b"data: ").strip()))


def test_a_chunk_names_the_version_of_its_tokens_and_lists_both_if_there_are_two() -> None:
    trace = trace_of(Span("7", 0, 3))
    body = payload(annotate_chunk(chunk(), trace))
    assert body["weight_version"] == 7
    assert "weight_versions" not in body["choices"][0]
    trace.record(0, [Output(0, [Span("7", 0, 4), Span("9", 4, 6)])])
    body = payload(annotate_chunk(chunk(), trace))
    assert body["weight_version"] == 9
    assert body["choices"][0]["weight_versions"] == [
        {"version": 7, "start": 3, "end": 4},
        {"version": 9, "start": 4, "end": 6},
    ]


def test_spans_as_vllm_has_them_stand_in_the_last_chunk_alone() -> None:
    trace = trace_of(Span("7", 0, 3))
    trace.as_vllm = True
    annotate_chunk(chunk(), trace)
    trace.record(0, [Output(0, [Span("7", 0, 4), Span("9", 4, 6)])])
    event = payload(chunk())
    event["choices"][0]["weight_versions"] = None  # as vLLM 0.33 writes it
    choice = payload(annotate_chunk(b"data: " + orjson.dumps(event) + b"\n\n", trace))["choices"][0]
    assert "weight_versions" not in choice
    assert [s["version"] for s in choice["hotswap_weight_versions"]] == [7, 9]
    last = payload(annotate_chunk(chunk("stop"), trace))
    assert last["weight_version"] == 9
    assert last["choices"][0]["weight_versions"] == [
        {"version": "7", "start": 0, "end": 4},
        {"version": "9", "start": 4, "end": 6},
    ]


def test_the_chunk_that_opens_an_answer_leaves_the_versions_to_the_one_with_the_tokens() -> None:
    trace = trace_of(Span("7", 0, 1), Span("9", 1, 3))  # a reader that lagged gets three tokens at first
    opening = payload(annotate_chunk(chunk(role="assistant", content=""), trace))
    assert "weight_versions" not in opening["choices"][0]
    body = payload(annotate_chunk(chunk(), trace))
    assert [s["version"] for s in body["choices"][0]["weight_versions"]] == [7, 9]


def test_last_chunk_has_all_spans_and_done_is_left_alone() -> None:
    trace = trace_of(Span("7", 0, 3), Span("8", 3, 5))
    annotated = annotate_chunk(chunk("stop") + b"data: [DONE]\n\n", trace)
    first, done, rest = annotated.split(b"\n\n")
    assert [s["version"] for s in payload(first)["choices"][0]["weight_versions"]] == [7, 8]
    assert done == b"data: [DONE]"
    assert rest == b""


@pytest.mark.parametrize("kind", ["completed", "incomplete", "failed"])
def test_however_a_response_ends_its_last_event_has_the_labels(kind: str) -> None:
    trace = trace_of(Span("7", 0, 3), Span("8", 3, 5))
    event = {"type": f"response.{kind}", "response": {"object": "response", "status": kind}}
    told = payload(annotate_chunk(b"data: " + orjson.dumps(event) + b"\n\n", trace))
    assert [span["version"] for span in told["response"]["weight_versions"]] == [7, 8]
    assert (told["weight_version"], told["hotswap_usage"]["completion_tokens"]) == (8, 5)


def test_a_chunk_counts_the_tokens_once_there_were_more_of_them_than_chunks() -> None:
    trace, counts = Trace(), []
    for end in (1, 2, 5, 5, 5, 6, 9):
        trace.record(0, [Output(0, [Span("7", 0, end)])], 4)
        counts.append(payload(annotate_chunk(chunk(), trace)).get("hotswap_usage"))
    assert [count and count["completion_tokens"] for count in counts] == [None, None, 5, 5, None, None, 9]
    assert counts[-1] == {"prompt_tokens": 4, "completion_tokens": 9}


def test_error_events_are_left_alone() -> None:
    event = b'data: {"error": {"message": "no"}}\n\n'
    assert annotate_chunk(event, trace_of(Span("7", 0, 3))) == event


def test_several_prompts_number_their_choices_on() -> None:
    trace = Trace()
    first, second = trace.open(2), trace.open(2)
    trace.record(first, [Output(1, [Span("3", 0, 2)])])
    trace.record(second, [Output(0, [Span("4", 0, 2)])])
    body: dict[str, Any] = {"choices": [{"index": i, "finish_reason": "stop", "text": ""} for i in range(4)]}
    annotate(body, trace, last=True)
    assert [[s["version"] for s in c["weight_versions"]] for c in body["choices"]] == [[], [3], [4], []]


async def run(
    body: bytes, kind: bytes, path: str = "/v1/completions", spans: tuple[Span, ...] = ()
) -> list[dict[str, Any]]:
    """Messages that the middleware sends for an application that answers `body`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        trace = current_trace.get()
        assert trace is not None
        trace.record(trace.open(1), [Output(0, list(spans))])
        await send(head(kind, content_length=b"%d" % len(body)))
        await send(part(body, more=False))

    return await sent_by(ProvenanceMiddleware(app, lambda: 5), path)


async def test_whole_body_keeps_a_true_length_and_gets_the_header() -> None:
    body = orjson.dumps({"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]})
    start, answer = await run(body, b"application/json", spans=(Span("6", 0, 2), Span("7", 2, 4)))
    headers = dict(start["headers"])
    assert headers[b"content-length"] == b"%d" % len(answer["body"])
    assert headers[b"x-hotswap-weight-version"] == b"6"
    assert orjson.loads(answer["body"])["weight_version"] == 7


async def test_other_routes_are_passed_through_with_the_active_version() -> None:
    start, answer = await run(b'{"object":"list"}', b"application/json", path="/v1/models")
    assert answer["body"] == b'{"object":"list"}'
    assert dict(start["headers"])[b"x-hotswap-weight-version"] == b"5"


async def embed(
    wish: Wish, *, swapped_to: int = 1, active: int = 1, numbers: int = 4
) -> tuple[list[str], dict[str, Any]]:
    """The answer to one embedding request under `wish`, and what the engine is told; a swap may come while it runs."""
    inflight, told = Inflight(), SimpleNamespace(extra_kwargs={"hotswap": {"scope": "a client's own"}, "other": 1})
    inflight.active = active

    async def encode(prompt: str, params: Any, request_id: str, priority: int = 0) -> AsyncIterator[Any]:
        inflight.active = swapped_to
        yield SimpleNamespace(told=prompt + request_id, outputs=SimpleNamespace(data=torch.zeros(numbers)), error=None)

    current_trace.set(Trace(wish))
    found = [output.told async for output in pooled(encode, inflight)("vector of ", told, "r")]
    return found, told.extra_kwargs


async def test_embeddings_are_computed_in_the_callers_cache_scope() -> None:
    found, told = await embed(Wish(scope="s", policy="keep"), swapped_to=2)
    assert found == ["vector of r"]
    assert told == {"hotswap": {"scope": "s"}, "other": 1}


@pytest.mark.parametrize("wish", [Wish(policy="abort"), Wish(policy="finish"), Wish(version=1)])
async def test_embeddings_that_must_not_cross_a_swap_do_not(wish: Wish) -> None:
    assert (await embed(wish))[0]
    with pytest.raises(Problem, match="the weights changed"):
        await embed(wish, swapped_to=2)


async def test_an_embedding_that_the_engine_ended_is_no_answer() -> None:
    with pytest.raises(Problem, match="the weights changed"):
        await embed(Wish(), swapped_to=2, numbers=0)


@pytest.mark.parametrize(("own", "engine"), [({}, 3000), ({"priority": 7}, 3007), ({"priority": -7}, 3000)])
async def test_the_engine_is_told_the_class_whatever_the_body_says(own: dict[str, int], engine: int) -> None:
    told: list[int] = []

    async def run(prompt: str, params: Any, request_id: str, priority: int = 0) -> AsyncIterator[Any]:
        told.append(priority)
        return
        yield

    current_trace.set(Trace(Wish(priority=3)))
    params = SimpleNamespace(n=1, extra_args=None, extra_kwargs=None)
    assert [output async for output in traced(run, Inflight())("p", params, "r", **own)] == []
    assert [output async for output in pooled(run, Inflight())("p", params, "r", **own)] == []
    assert told == [engine, engine]


async def test_embeddings_of_a_version_that_is_not_here_are_refused() -> None:
    with pytest.raises(Problem, match="this instance runs version"):
        await embed(Wish(min_version=3))


@pytest.mark.parametrize(
    ("cause", "after", "told"),
    [
        (AttributeError("'str' object has no attribute 'get'"), 0, VLLMValidationError),
        (AttributeError("'str' object has no attribute 'get'"), 1, EngineGenerateError),  # it had been taken
        (OverflowError("top_k"), 0, VLLMValidationError),
        (MemoryError(), 0, EngineGenerateError),
    ],
)
@pytest.mark.parametrize("wrapped", [traced, pooled])
async def test_what_vllm_fails_over_before_it_has_the_request_is_the_client_s(
    wrapped: Any, cause: Exception, after: int, told: type[Exception]
) -> None:
    async def fails(*_: Any, **__: Any) -> AsyncIterator[Any]:
        for _ in range(after):
            yield vectors if wrapped is pooled else SimpleNamespace(outputs=[], prompt_token_ids=[])
        raise EngineGenerateError from cause

    vectors = SimpleNamespace(outputs=SimpleNamespace(data=torch.zeros(4)), error=None)
    params = SimpleNamespace(n=1, extra_args=None, extra_kwargs=None)
    with pytest.raises(told):
        async for _ in wrapped(fails, Inflight())("prompt", params, "id"):
            pass


def test_the_scores_of_all_prompts_of_a_request_are_bounded() -> None:
    """At the bound it is taken; one token more is not, whichever prompt it is in."""

    def asks(tokens: int, each: int | None) -> tuple[Any, Any]:
        return {"prompt_token_ids": [1] * tokens}, SimpleNamespace(n=1, extra_args=None, prompt_logprobs=each)

    trace = Trace()
    for _ in range(4):
        trace.open_for(*asks(MOST_SCORES // 16, 3))
    trace.open_for(*asks(1000, None))
    with pytest.raises(VLLMValidationError, match="fewer prompts"):
        trace.open_for(*asks(1, 0))


# an app that breaks off, by a swap or by a body that vLLM's code cannot take

EVENT = b'event: x\ndata: {"type":"x"}\n\n'


async def broken(
    problem: Problem | None, *parts: bytes, fallback: bool = False, begun: bool = True, path: str = "/v1/responses"
) -> list[dict[str, Any]]:
    """Messages for an app that streams `parts`, then raises; `fallback`: the framework answers 500 first.

    `begun`: the engine has answered before the first part.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        trace = current_trace.get()
        assert trace is not None
        trace.begun = begun
        if parts or fallback:
            await send(head() if parts else head(b"text/plain", 500))
        for body in parts:
            trace.problem = problem if b"error" in body else None  # vLLM's event for it
            await send(part(body))
        trace.problem = problem
        if fallback:
            await send(part(b"Internal Server Error", more=False))
        raise RuntimeError("broke off")

    return await answered(app, path)


async def answered(app: Any, path: str = "/v1/responses") -> list[dict[str, Any]]:
    return await sent_by(ProvenanceMiddleware(app, lambda: 5), path)


@pytest.mark.parametrize("problem", [version_mismatch(4), weights_changed(), refused("x"), busy("y")])
@pytest.mark.parametrize("route", [pytest.param(r, id=r.path) for r in api.ROUTES if r.path in TRACED])
async def test_each_error_has_the_shape_of_its_route_s_api(route: api.Forwarded, problem: Problem) -> None:
    """Before the first byte, as an event of its own, and in place of vLLM's event."""
    _, whole = await broken(problem, fallback=True, path=route.path)
    check_shape(route, whole["body"])
    _, _, own = await broken(problem, EVENT, path=route.path)
    theirs = b'event: error\ndata: {"error": {"message": "x"}}\n\n'
    *_, inside = await broken(problem, EVENT, theirs, path=route.path)
    for event in (own, inside):
        told = orjson.loads(event["body"].rpartition(b"event: error\ndata: ")[2])
        check_shape(route, orjson.dumps(told if route.tag == "anthropic" else {"error": told["error"]}))


@pytest.mark.parametrize("problem", [None, weights_changed()])
@pytest.mark.parametrize(
    "error", [b'data: {"error":{"message":"x"}}', b'event: error\ndata: {"type":"error","code":"x"}']
)
@pytest.mark.parametrize("path", [route.path for route in api.ROUTES if route.works == "generate"])
async def test_nothing_follows_an_error_in_a_stream(path: str, error: bytes, problem: Problem | None) -> None:
    """vLLM sends [DONE] after it, in an event of its own or in the same part."""
    done = b"data: [DONE]\n\n"
    for parts in ([EVENT, error + b"\n\n", done], [EVENT, error + b"\n\n" + done]):

        async def app(scope: Any, receive: Any, send: Any, parts: list[bytes] = parts) -> None:
            trace = current_trace.get()
            assert trace is not None
            trace.begun, trace.problem = True, None
            await send(head())
            for body in parts:
                if body != EVENT:
                    trace.problem = problem
                await send(part(body))
            await send(part(more=False))

        _, *sent = await answered(app, path)
        events = b"".join(message["body"] for message in sent).split(b"\n\n")
        assert (len(events), events[-1], b"error" in events[-2]) == (3, b"", True)
        assert [message["more_body"] for message in sent] == [True] * (len(sent) - 1) + [False]


async def test_a_stream_that_a_swap_broke_ends_in_order_with_the_error_as_an_event() -> None:
    start, first, last = await broken(weights_changed(), EVENT)
    assert start["status"] == 200
    assert first["more_body"]
    assert not last.get("more_body")
    name, data = last["body"].decode().strip().split("\n")
    assert name == "event: error"
    told = orjson.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["code"]) == ("error", "weights_changed")


async def test_before_the_first_byte_it_is_a_whole_answer() -> None:
    start, body = await broken(version_mismatch(4), fallback=True)
    assert start["status"] == 409
    assert dict(start["headers"])[b"x-hotswap-refused"] == b"version"
    assert orjson.loads(body["body"])["error"]["code"] == "version_mismatch"


@pytest.mark.parametrize(("problem", "status"), [(refused("x"), 400), (busy("y"), 429)])
async def test_what_is_refused_before_the_engine_answers_has_its_own_status_in_streams_too(
    problem: Problem, status: int
) -> None:
    """/v1/responses sends events of its own before it asks the engine."""
    start, body = await broken(problem, EVENT, EVENT, begun=False)
    assert start["status"] == status
    assert orjson.loads(body["body"])["error"]["code"] == problem.code
    assert (b"retry-after", b"2") in start["headers"] or status == 400


async def test_what_came_before_the_engine_answered_is_sent_once() -> None:
    events = [b'event: x\ndata: {"type":"x%d"}\n\n' % number for number in range(4)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        trace = current_trace.get()
        assert trace is not None
        await send(head())
        for number, event in enumerate(events):
            trace.begun = number >= 2
            await send(part(event))
        await send(part(more=False))

    assert b"".join(message.get("body", b"") for message in await answered(app)) == b"".join(events)


async def test_a_stream_without_the_engine_is_sent_whole() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in (head(), part(EVENT), part(EVENT), part(more=False)):
            await send(message)

    start, body = await answered(app)
    assert (start["type"], body["type"]) == ("http.response.start", "http.response.body")
    assert body["body"].count(b"event: x") == 2


@pytest.mark.parametrize("parts", [(), (EVENT,)])
async def test_other_faults_are_raised_on(parts: tuple[bytes, ...]) -> None:
    with pytest.raises(RuntimeError, match="broke off"):
        await broken(None, *parts)


@pytest.mark.parametrize(
    ("field", "told"),
    [("true", True), ('"yes"', True), ("1", True), ("false", False), (None, False), ("null", None), ('"so"', None)],
)
async def test_the_body_says_whether_spans_are_wanted_as_vllm_has_them(field: str | None, told: bool | None) -> None:
    """Cut anywhere; None: refused."""
    body = b'{"prompt": "return_weight_versions"%b}' % (
        b"" if field is None else b', "return_weight_versions": %b' % field.encode()
    )
    parts = [body[at : at + 7] for at in range(0, len(body), 7)]
    seen: list[bool] = []
    app = FastAPI()

    @app.post("/v1/completions")
    async def route(request: Request) -> None:
        await request.json()
        trace = current_trace.get()
        assert trace is not None
        seen.append(trace.as_vllm)

    start, answer = await sent_by(ProvenanceMiddleware(app, lambda: 5), "/v1/completions", *parts)
    if told is not None:
        assert (start["status"], seen) == (200, [told])
        return
    assert (start["status"], seen) == (400, [])
    error = orjson.loads(answer["body"])["error"]
    assert (error["code"], error["param"]) == ("invalid_parameter", "return_weight_versions")


# what vLLM's code fails over, as long as the engine has not answered


class Body(BaseModel):
    number: int = 0
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def look(cls, data: dict[str, Any]) -> dict[str, Any]:
        data.get("text", {}).get("key")  # as vLLM's validators do
        return data


def failing() -> Any:
    made = FastAPI()
    made.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(made)
    made.middleware_stack = made.build_middleware_stack()  # as sagemaker_standards_bootstrap does in vLLM's build_app
    answer_faults(made)

    @made.post("/v1/completions")
    async def completions(body: Body) -> dict[str, Any]:
        trace = current_trace.get()
        assert trace is not None
        trace.begun = body.number > 0
        raise {0: KeyError("x"), 1: KeyError("y"), -1: OverflowError(), -2: RecursionError("deep")}[body.number]

    return ProvenanceMiddleware(made, lambda: 1)


async def post(body: bytes, path: str = "/v1/completions") -> httpx.Response:
    transport = httpx.ASGITransport(app=failing(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.post(path, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"text": "x"}', 400, "'str' object has no attribute 'get'"),
        (b'{"number": 0}', 400, "KeyError: 'x'"),
        (b'{"number": -1}', 400, ""),  # vLLM's own
        (b'{"number": -2}', 400, "deep"),
        (b'{"number": 1}', 500, "y"),  # the engine had answered: no fault of the request's
        (b'{"number": ' + b"9" * 5000 + b"}", 400, "parsing the body"),
    ],
)
async def test_the_fault_has_its_type(body: bytes, status: int, says: str) -> None:
    answer = await post(body)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}  # nothing of an answer's is written into it
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["type"]


async def test_a_route_that_is_not_there_is_typed_too() -> None:
    answer = await post(b"{}", "/nowhere")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
