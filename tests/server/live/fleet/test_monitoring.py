"""The engine's series that the dashboard reads are on a real instance's own page, and the gateway's on a real one's."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.live import LiveServer
from tests.monitoring import Page, faults
from tests.waiting import wait_until

pytestmark = pytest.mark.engine


def test_every_series_of_vllm_exists(live: LiveServer) -> None:
    with live.client.stream(
        "POST", "/generate", json={"prompt": "3+4=", "max_tokens": 4, "ignore_eos": True}
    ) as answer:
        answer.read()
    page = Page.of(httpx.get(live.instance()["address"] + "/metrics").text)
    assert faults(page, "vllm:") == []


TEXT = {"prompt": "3+4=", "max_tokens": 7, "ignore_eos": True}
SAY = [{"role": "user", "content": "hi"}]
CHAT = {"messages": SAY, "max_tokens": 5, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", TEXT | {"n": 3}),
    ("/generate", TEXT | {"stream": False}),
    ("/v1/completions", TEXT),
    ("/v1/completions", TEXT | {"stream": True, "n": 2, "prompt": ["3+4=", "1+1="]}),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/chat/completions", CHAT | {"stream": True, "n": 3}),
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT | {"return_token_ids": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 5}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 5, "stream": True}),
    ("/v1/messages", {"messages": SAY, "max_tokens": 5}),
    ("/v1/messages", {"messages": SAY, "max_tokens": 5, "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_gateway_and_engine_count_the_same_tokens(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    def ours() -> tuple[float, ...]:
        kinds = ("prompt", "completion", "estimated_completion")
        return tuple(live.gateway_metric(f"hotswap_gateway_{kind}_tokens_total") for kind in kinds)

    def theirs() -> tuple[float, ...]:
        return tuple(live.engine_metric(f"vllm:{kind}_tokens_total") for kind in ("prompt", "generation"))

    def agree() -> bool:
        prompt, completion, estimated = (now - then for now, then in zip(ours(), before[0], strict=True))
        taken, generated = (now - then for now, then in zip(theirs(), before[1], strict=True))
        # Samples share a prompt, which the engine counts once for each.
        return generated > 0 and (completion, estimated, prompt * body.get("n", 1)) == (generated, 0, taken)

    def rest() -> bool:
        """Both count an answer a moment after its client has it."""
        forwarded = live.gateway_metric("hotswap_gateway_requests_in_flight")
        return forwarded == live.engine_metric("vllm:num_requests_running") == 0

    wait_until(rest)
    before = ours(), theirs()
    model = {} if path == "/generate" else {"model": live.name}
    with live.client.stream("POST", path, json=body | model) as answer:
        answer.read()
    assert answer.status_code == 200, answer.text
    wait_until(agree, what=lambda: (before, ours(), theirs()))
