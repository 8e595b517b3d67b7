"""Requests that vLLM's code fails over are typed 400s, as long as the engine has not answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, model_validator
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from server.instance.middleware import ProvenanceMiddleware, answer_faults
from server.instance.provenance import current_trace


class Body(BaseModel):
    number: int = 0
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def look(cls, data: dict[str, Any]) -> dict[str, Any]:
        data.get("text", {}).get("key")  # as vLLM's validators do
        return data


def app() -> Any:
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
    transport = httpx.ASGITransport(app=app(), raise_app_exceptions=False)
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
