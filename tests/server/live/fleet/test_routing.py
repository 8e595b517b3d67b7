"""Two real engines: prompts that share a beginning meet its blocks again, and a stop breaks no stream."""

from __future__ import annotations

import contextlib
import re
import signal
from typing import Any

import httpx
import pytest

from tests.fleet import Fleet
from tests.live import LiveServer
from tests.open_answers import Asked
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.broad]

APPLICATIONS, ROUNDS = 7, 4  # an odd number, so that taking turns brings each prompt to both instances
TOKENS = 600
PREFIX = 512  # tokens, whole blocks of vLLM's prefix cache (16 on a GPU, 128 on a CPU)


def cached_tokens(live: LiveServer) -> float:
    """Prompt tokens that were found in a prefix cache so far, over both engines."""
    pages = [httpx.get(i["address"] + "/metrics").text for i in live.instances()]
    return sum(
        float(v)
        for page in pages
        for v in re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", page, re.MULTILINE)
    )


def prompt(application: int, question: int) -> dict[str, Any]:
    shared = [(7 * n + 31 * application) % 400 + 5 for n in range(PREFIX)]
    asked = [(question * 13 + n) % 400 + 5 for n in range(8)]
    return {"prompt_token_ids": shared + asked, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": False}


def ask_all(servers: list[dict[str, Any]], first: int) -> None:
    """Every application asks ROUNDS questions, the applications in turn; request n goes to the n-th server in turn."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(**options, timeout=60)) for options in servers]
        for n in range(APPLICATIONS * ROUNDS):
            question, application = divmod(n, APPLICATIONS)
            answer = clients[n % len(clients)].post("/generate", json=prompt(first + application, question))
            assert answer.status_code == 200, answer.text


def test_a_shared_beginning_is_computed_once_and_not_once_per_instance(fleet: Fleet) -> None:
    pair = fleet.live
    start = cached_tokens(pair)
    ask_all(pair.direct(), first=100)
    in_turn = cached_tokens(pair) - start
    ask_all([{"base_url": pair.url}], first=0)
    by_affinity = cached_tokens(pair) - start - in_turn
    assert in_turn == APPLICATIONS * (ROUNDS - 2) * PREFIX  # computed by both
    assert by_affinity == APPLICATIONS * (ROUNDS - 1) * PREFIX  # computed by one
    picks = dict(
        re.findall(
            r'^hotswap_gateway_picks_total\{.*by="(\w+)".*\} (\S+)$', pair.client.get("/metrics").text, re.MULTILINE
        )
    )
    assert float(picks["prefix"]) >= APPLICATIONS * (ROUNDS - 1)


def counters(live: LiveServer, *names: str) -> list[str]:
    """Lines of the gateway's metrics of these names that are not zero."""
    lines = live.client.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith(names) and not line.endswith(" 0.0")]


def test_an_instance_that_is_told_to_stop_ends_its_streams_first(fleet: Fleet) -> None:
    """Its own streams, that is: none is gone on with elsewhere."""
    pair = fleet.live
    gone_on = counters(pair, "hotswap_gateway_failovers_total")
    leaving = pair.processes.children["instance-0"].process

    def record() -> dict[str, Any]:
        return next((i for i in pair.instances() if i["id"] == pair.processes.instance_id(0)), {})

    before = [Asked(pair.url, TOKENS) for _ in range(8)]
    wait_until(lambda: record()["in_flight"] >= 2, 60)
    leaving.send_signal(signal.SIGTERM)
    wait_until(lambda: record().get("state", "DRAINING") == "DRAINING")
    assert leaving.poll() is None, "it has streams to end"
    after = [Asked(pair.url, TOKENS) for _ in range(4)]
    wait_until(lambda: not record(), 60, what="and then it leaves at once")
    assert [len(answer.finish()) for answer in before + after] == [TOKENS] * 12
    assert leaving.wait(60) == 0
    assert counters(pair, "hotswap_gateway_failovers_total") == gone_on
    assert [i["id"] for i in pair.instances()] == [pair.processes.instance_id(1)]
    assert len(Asked(pair.url, TOKENS).finish()) == TOKENS
