"""The client's view of an app that breaks off, by a swap or by a body that vLLM's code cannot take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel, model_validator
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from server.instance.grammars.trials import GrammarRefused, GrammarsBusy
from server.instance.inflight import Problem, VersionMismatch, WeightsChanged
from server.instance.middleware import ProvenanceMiddleware, answer_faults
from server.instance.provenance import current_trace
from tests.server.instance.asgi import head, part, sent_by

EVENT = b'event: x\ndata: {"type":"x"}\n\n'


async def broken(
    problem: Problem | None, *parts: bytes, fallback: bool = False, begun: bool = True
) -> list[dict[str, Any]]:
    """What is sent for an app that streams `parts`, then raises; `fallback`: the framework answers 500 first.

    `begun`: the engine has answered before the first part.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        trace = current_trace.get()
        assert trace is not None
        trace.begun = begun
        if parts or fallback:
            await send(head() if parts else head(b"text/plain", 500))
        for body in parts:
            await send(part(body))
        trace.problem = problem
        if fallback:
            await send(part(b"Internal Server Error", more=False))
        raise RuntimeError("broke off")

    return await answered(app)


async def answered(app: Any) -> list[dict[str, Any]]:
    return await sent_by(ProvenanceMiddleware(app, lambda: 5), "/v1/responses")


async def test_a_stream_that_a_swap_broke_ends_in_order_with_the_error_as_an_event() -> None:
    start, first, last = await broken(WeightsChanged(), EVENT)
    assert start["status"] == 200
    assert first["more_body"]
    assert not last.get("more_body")
    name, data = last["body"].decode().strip().split("\n")
    assert name == "event: error"
    told = orjson.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["code"]) == ("error", "weights_changed")


async def test_before_the_first_byte_it_is_a_whole_answer() -> None:
    start, body = await broken(VersionMismatch(4), fallback=True)
    assert start["status"] == 409
    assert dict(start["headers"])[b"x-hotswap-refused"] == b"version"
    assert orjson.loads(body["body"])["error"]["code"] == "version_mismatch"


@pytest.mark.parametrize(("problem", "status"), [(GrammarRefused("x"), 400), (GrammarsBusy("y"), 429)])
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
