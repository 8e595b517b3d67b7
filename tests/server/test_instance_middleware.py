"""Apps that break off: what the client gets when a swap is why, and that other faults stay what they are."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from server.instance.inflight import VersionMismatch, WeightsChanged
from server.instance.middleware import ProvenanceMiddleware
from server.instance.provenance import current_trace

EVENT = b'event: x\ndata: {"type":"x"}\n\n'


async def broken(problem: WeightsChanged | VersionMismatch | None, *parts: bytes, fallback: bool = False) -> list[Any]:
    """What is sent for an app that streams `parts`, then raises; `fallback`: the framework answers 500 first."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        trace = current_trace.get()
        assert trace is not None
        if parts or fallback:
            kind = b"text/event-stream" if parts else b"text/plain"
            headers = [(b"content-type", kind)]
            await send({"type": "http.response.start", "status": 200 if parts else 500, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        trace.problem = problem
        if fallback:
            await send({"type": "http.response.body", "body": b"Internal Server Error"})
        raise RuntimeError("broke off")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/responses", "headers": []}
    await ProvenanceMiddleware(app, lambda: 5)(scope, None, send)
    return sent


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


@pytest.mark.parametrize("parts", [(), (EVENT,)])
async def test_other_faults_are_raised_on(parts: tuple[bytes, ...]) -> None:
    with pytest.raises(RuntimeError, match="broke off"):
        await broken(None, *parts)
