"""Every error that the gateway makes has the shape of its route's API, and ends a stream without a sign of success."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from fastapi.routing import APIRoute

from server import api
from server.gateway import Limits
from server.gateway.admin import adapters_sglang
from tests.server.gateway.harness import ADMIN, ADMIN_KEY, RunningGateway, request, running_gateway
from tests.server.gateway.upstream import cut, streaming
from tests.server.gateway.wire.test_proxy import PATIENT

# https://docs.anthropic.com/en/api/errors
ANTHROPIC = {
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large",
    "rate_limit_error", "api_error", "overloaded_error", "timeout_error",
}  # fmt: skip
KEY = "Authorization: Bearer nobody's\r\n"
WISH = {"hotswap": 5}
FAULTS: dict[str, tuple[str, str, bytes, int]] = {  # headers, method ("": its own), body, status
    "no key": ("", "", b"{}", 401),
    "an unknown key": (KEY, "", b"{}", 401),
    "too large": (ADMIN, "", b'{"a": "%b"}' % (b"x" * 3000), 413),
    "a long head": (ADMIN + f"X: {'x' * 40_000}\r\n", "", b"{}", 431),
    "wrong method": (ADMIN, "DELETE", b"", 405),
    "bad JSON": (ADMIN, "", b'{"a"', 400),
    "no object": (ADMIN, "", b"[]", 400),
    "a field of another type": (ADMIN, "", orjson.dumps(WISH), 400),
    "an unknown wish": (ADMIN + "x-hotswap-nothing: 1\r\n", "", b"{}", 400),
    "nobody serves": (ADMIN, "", b"{}", 503),
}
ROUTES = [pytest.param(route, id=f"{route.method} {route.path}") for route in api.ROUTES]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    limits, directory = Limits(max_body=2000), tmp_path_factory.mktemp("gateway")
    with running_gateway(directory, upstream=PATIENT, limits=limits, require_key=True) as running:
        yield running


def check_shape(route: api.Forwarded, body: bytes) -> None:
    told: dict[str, Any] = orjson.loads(body)
    error = told["error"]
    assert min(error["message"], error["code"]), "what the gateway's own clients read"
    if route.tag == "anthropic":
        assert told.keys() == {"type", "error"}
        assert told["type"] == "error"
        assert error["type"] in ANTHROPIC
    else:
        assert told.keys() == {"error"}
        assert error.keys() >= {"message", "type", "param", "code"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("route", ROUTES)
async def test_an_error_has_the_shape_of_its_route(gateway: RunningGateway, route: api.Forwarded, fault: str) -> None:
    headers, method, body, status = FAULTS[fault]
    if body != b"{}" and fault not in ("wrong method", "too large") and not (route.method == "POST" and route.body):
        return  # it takes no body
    sent = request(method or route.method, route.path.replace("{id}", "resp_1"), body, headers)
    answer = await gateway.ask(sent, admin=route.admin)
    assert answer.status == status
    check_shape(route, answer.body)


STREAMS = [pytest.param(route, id=route.path) for route in api.ROUTES if route.stream]


@pytest.mark.parametrize("route", STREAMS)
async def test_nothing_after_an_error_says_that_a_stream_is_complete(
    gateway: RunningGateway, route: api.Forwarded
) -> None:
    event = b'data: {"x": 1}\n\n'
    sent = request("POST", route.path, b'{"stream": true}', ADMIN)
    async with gateway.instance(streaming(event, cut=True)):
        answer = await gateway.ask(sent)
    assert (answer.status, answer.complete) == (200, False)
    assert answer.body.startswith(event + b"event: error\ndata: ")
    check_shape(route, answer.body.removeprefix(event + b"event: error\ndata: "))
    async with gateway.instance(cut):
        answer = await gateway.ask(sent)
    assert answer.status == 502
    check_shape(route, answer.body)


async def test_anthropic_s_sdk_reads_errors(gateway: RunningGateway) -> None:
    """Its error classes, the types that they carry, and an error within a stream, which it raises."""
    import anthropic  # 3,000 modules, which no other test needs

    asked: Any = {"model": "", "max_tokens": 8, "messages": [{"role": "user", "content": "?"}]}
    long = asked | {"messages": [{"role": "user", "content": "x" * 3000}]}
    start = {"id": "m", "type": "message", "role": "assistant", "model": "", "content": [], "stop_reason": None,
             "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}  # fmt: skip
    begun = b"event: message_start\ndata: %b\n\n" % orjson.dumps({"type": "message_start", "message": start})
    async with (
        anthropic.AsyncAnthropic(base_url=gateway.url, auth_token=ADMIN_KEY, max_retries=0) as known,
        anthropic.AsyncAnthropic(base_url=gateway.url, auth_token="nobody's", max_retries=0) as stranger,
    ):
        cases: list[tuple[anthropic.AsyncAnthropic, Any, type[anthropic.APIStatusError], str]] = [
            (stranger, asked, anthropic.AuthenticationError, "authentication_error"),
            (known, asked | {"extra_body": WISH}, anthropic.BadRequestError, "invalid_request_error"),
            (known, long, anthropic.RequestTooLargeError, "request_too_large"),
            (known, asked, anthropic.ServiceUnavailableError, "overloaded_error"),
        ]
        for client, sent, kind, told in cases:
            with pytest.raises(kind) as refused:
                await client.messages.create(**sent)
            assert type(refused.value) is kind
            assert refused.value.type == told
        async with gateway.instance(streaming(begun, cut=True)):
            stream = await known.messages.create(**asked, stream=True)
            assert (await anext(stream)).type == "message_start"
            with pytest.raises(anthropic.APIStatusError) as broken:
                await anext(stream)
        assert broken.value.type == "api_error"
        gateway.unregister()


def test_the_routes_of_sglang_are_known() -> None:
    assert {route.path for route in adapters_sglang.router.routes if isinstance(route, APIRoute)} == api.SGLANG


@pytest.mark.parametrize("fault", ["no key", "an unknown key", "wrong method", "too large", "bad JSON", "no object"])
@pytest.mark.parametrize("path", sorted(api.SGLANG))
async def test_refusals_of_sglang_s_routes_have_its_shape(gateway: RunningGateway, path: str, fault: str) -> None:
    headers, method, body, status = FAULTS[fault]
    if body in (b'{"a"', b"[]") and not path.startswith("/update_weight") and path != "/pause_generation":
        return  # it takes no body
    own = "GET" if path in ("/get_model_info", "/health_generate", "/model_info") else "POST"
    answer = await gateway.ask(request(method or own, path, body, headers), admin=True)
    told = orjson.loads(answer.body)
    assert told.keys() == {"success", "message", "error"}
    assert told["success"] is False
    assert answer.status == status or (path.startswith("/update_weights") and answer.status == 501)
