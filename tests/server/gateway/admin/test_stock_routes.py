"""Routes of stock vLLM: what the gateway answers itself, what it forwards and from which port, and what says where."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from server.gateway import UpstreamSettings
from server.gateway.access import roles
from tests.server.gateway.harness import ADMIN, ADMIN_KEY, MODEL, RunningGateway, get, post, request, running_gateway
from tests.server.gateway.upstream import Link, Received, answering

API_KEY = "a-key-for-inference-only"
INFER = f"Authorization: Bearer {API_KEY}\r\n"
FORWARDED = [
    get("/version", INFER),
    get("/tokenizer_info", INFER),
    post("/v1/messages/count_tokens", headers=INFER),
    post("/v1/chat/completions/batch", headers=INFER),
    post("/generative_scoring", headers=INFER),
    post("/v1/completions", headers=INFER),
    post("/v1/chat/completions", headers=INFER),
    post("/generate", headers=INFER),
    get("/v1/models", INFER),
]
# Routes that TRL's VLLMClient asks besides, on the same base URL.
SCALE_OUT = ["/inference/v1/generate", "/v1/chat/completions/render", "/v1/completions/render"]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    directory = tmp_path_factory.mktemp("stock")
    keys = directory / "keys"
    keys.write_text(API_KEY)
    keys.chmod(0o600)
    settings = UpstreamSettings(scrape_interval_s=3600.0)
    with running_gateway(directory, upstream=settings, api_key_file=keys) as running:
        yield running


async def echo(link: Link, received: Received) -> None:
    await link.json(orjson.dumps({"asked": f"{received.method} {received.target}"}))


@pytest.mark.parametrize("admin", [False, True])
async def test_health_and_load_are_asked_for_without_a_key(gateway: RunningGateway, admin: bool) -> None:
    for path in ("/healthz", "/metrics"):
        assert (await gateway.ask(get(path), admin=admin)).status == 200
    for raw in (get("/health"), get("/ping"), post("/ping")):
        assert (await gateway.ask(raw, admin=admin)).status == 503  # no instance
    async with gateway.instance(echo):
        for raw in (get("/health"), get("/ping"), post("/ping")):
            answer = await gateway.ask(raw, admin=admin)
            assert (answer.status, answer.body) == (200, b"")
        assert orjson.loads((await gateway.ask(get("/load"), admin=admin)).body) == {"server_load": 0}
        gateway.unregister()


@pytest.mark.parametrize("admin", [False, True])
@pytest.mark.parametrize("raw", FORWARDED, ids=lambda raw: raw.split(b" HTTP")[0].decode())
async def test_a_route_of_vllm_reaches_an_instance_from_both_ports(
    gateway: RunningGateway, raw: bytes, admin: bool
) -> None:
    async with gateway.instance(echo):
        answer = await gateway.ask(raw, admin=admin)
        assert answer.status == 200
        assert orjson.loads(answer.body)["asked"].encode() == raw.split(b" HTTP")[0]
        unkeyed = raw.replace(INFER.encode(), b"")
        assert (await gateway.ask(unkeyed, admin=admin)).status == 401
        gateway.unregister()


@pytest.mark.parametrize("path", SCALE_OUT)
async def test_routes_between_machines_need_the_admin_port_and_its_key(gateway: RunningGateway, path: str) -> None:
    async with gateway.instance(echo):
        assert (await gateway.ask(post(path, headers=ADMIN), admin=True)).status == 200
        assert (await gateway.ask(post(path, headers=INFER), admin=True)).status == 403
        assert (await gateway.ask(post(path), admin=True)).status == 401
        assert (await gateway.ask(post(path, headers=ADMIN))).status == 404
        gateway.unregister()


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/docs", "/openapi.json"),
        ("/invocations", "/v1/chat/completions"),
        ("/pause", "admin port"),
        ("/v1/fine_tuning/jobs", "train-server"),
        ("/v1/files", "train-server"),
    ],
)
async def test_what_is_not_served_says_where_to_ask(gateway: RunningGateway, path: str, where: str) -> None:
    answer = await gateway.ask(post(path))
    assert answer.refusal == (404, "not_found")
    assert where in answer.error["message"]
    assert (await gateway.ask(post("/v1/nowhere", headers=ADMIN), admin=True)).status == 404
    assert (await gateway.ask(post("/v1/nowhere"), admin=True)).status == 401


INFO = get("/server_info?config_format=json", ADMIN)


def settings(mode: str) -> dict[str, Any]:
    """As an instance tells them."""
    return {"model_config": {"logprobs_mode": mode, "max_model_len": 128}, "lora_config": None, "parallel_config": {}}


async def test_settings_are_those_that_all_instances_have(gateway: RunningGateway) -> None:
    assert (await gateway.ask(INFO, admin=True)).refusal == (503, "no_instance")
    alike = answering(orjson.dumps(settings("raw_logprobs")))
    async with (
        gateway.instance(alike, "a", model_dir="/models/toy") as asked,
        gateway.instance(alike, "b", model_dir="/elsewhere/toy"),
        gateway.instance(answering(b"{}", b"404 Not Found"), "older"),
    ):
        told = orjson.loads((await gateway.ask(INFO, admin=True)).body)
        names = {"model": "/models/toy", "tokenizer": "/models/toy", "served_model_name": MODEL}
        expected = settings("raw_logprobs") | {"weight_transfer_config": None}  # before they join a group
        expected["model_config"] |= names
        assert told["vllm_config"] == expected
        sglang = {name: told[name] for name in ("model_path", "tokenizer_path", "served_model_name")}
        assert list(sglang.values()) == list(names.values())
        assert [received.target for received in asked.requests] == ["/hotswap/config"]
        text = orjson.loads((await gateway.ask(get("/server_info", ADMIN), admin=True)).body)["vllm_config"]
        assert "'logprobs_mode': 'raw_logprobs'" in text
        answer = await gateway.ask(get("/server_info?config_format=xml", ADMIN), admin=True)
        assert answer.refusal == (400, "invalid_parameter")
    for name in ("a", "b", "older"):
        gateway.unregister(name)


async def test_settings_that_differ_or_are_unknown_are_not_told(gateway: RunningGateway) -> None:
    for modes, refusal in ((["raw_logits", "raw_logprobs"], (409, "instances_differ")), ([], (503, "not_answering"))):
        async with contextlib.AsyncExitStack() as stack:
            for mode in modes:
                await stack.enter_async_context(gateway.instance(answering(orjson.dumps(settings(mode))), mode))
            await stack.enter_async_context(gateway.instance(answering(b"{}", b"404 Not Found"), "older"))
            answer = await gateway.ask(INFO, admin=True)
            assert answer.refusal == refusal
            assert answer.error.get("instances", {}) == {mode: settings(mode) for mode in modes}
        for name in (*modes, "older"):
            gateway.unregister(name)


NOWHERE = ("GET /admin", "GET /admin/nothing", "GET /%61dmin/weights", "GET /admin%2fweights")


@pytest.mark.parametrize("route", [*roles.NEEDED, *NOWHERE])
async def test_nothing_under_admin_without_an_admin_key(gateway: RunningGateway, route: str) -> None:
    method, path = re.sub(r"\{\w+\}", "x", route).split()
    for headers, status, expected in (
        ("", 401, "missing_api_key"),
        ("Authorization: Basic eDp5\r\n", 401, "invalid_api_key"),  # the password is the key
        ("Authorization: Basic e\r\n", 401, "missing_api_key"),
        ("Authorization: Bearer wrong-wrong-wrong-wrong\r\n", 401, "invalid_api_key"),
        (f"Authorization: Bearer {ADMIN_KEY}x\r\n", 401, "invalid_api_key"),
        (INFER, 403, "insufficient_scope"),
    ):
        answer = await gateway.ask(request(method, path, b"{", headers), admin=True)
        assert answer.refusal == (status, expected), headers
        assert ("www-authenticate" in answer.headers) == (status == 401)
