"""One instance with two data-parallel ranks: every swap reaches both."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import orjson
import pytest

from server.instance.prefixes import with_shares
from server.prefixes import PATH, decode
from tests.live import VLLM_ARGS, LiveServer
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.broad]


@pytest.fixture(scope="module")
def pair(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    args = (*VLLM_ARGS, "--data-parallel-size", "2")
    with LiveServer(checkpoints["say-0"], tmp_path_factory.mktemp("state"), args).running() as server:
        yield server


def test_both_ranks_run_what_was_committed(pair: LiveServer, checkpoints: dict[str, Path]) -> None:
    first = pair.active()
    assert said(pair) == {100}
    second = pair.push(checkpoints["say-1"])
    assert said(pair) == {101}
    assert pair.activate(first).status_code == 200
    assert said(pair) == {100}
    assert pair.activate(second).status_code == 200
    assert said(pair) == {101}


def said(server: LiveServer) -> set[int]:
    """The tokens of 16 answers asked for at once: vLLM spreads them over the ranks."""
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda i: server.generate([5, 6, 7 + i], 16), range(16)))
    return {token for answer in answers for token in answer["choices"][0]["token_ids"]}


def test_what_the_ranks_hold_comes_out_of_their_processes(pair: LiveServer) -> None:
    raw = orjson.dumps({"model": pair.name, "prompt": [(7 * n) % 400 + 5 for n in range(1000)], "max_tokens": 1})
    answer = pair.client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    sent = {prefix for prefix, _ in with_shares("/v1/completions", raw, "public")}
    (options,) = pair.direct()

    def held() -> set[int]:
        answer = httpx.get(options["base_url"] + PATH, headers=options["headers"])
        return set(decode(answer.content).held.get(pair.active(), ()))

    wait_until(lambda: len(sent & held()) >= len(sent) - 3, 60, what="the rank that computed it reports it")
