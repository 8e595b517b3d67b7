"""The prefix cache as clients of the gateway meet it: whose blocks are hit, of which version, and if they are right.

Only a real cache of a real model shows that a block that is found has the numbers that would be computed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.gateway.access.scope import STORE_KEY
from tests.live import LiveServer
from weightsync.store import open_store

pytestmark = pytest.mark.engine
KEYS = ("first-key-of-this-test", "second-key-of-this-test")
ENOUGH = 8  # streams that a swap has crossed
PROMPT = [(11 * j) % 400 + 5 for j in range(600)]


@pytest.fixture(scope="module")
def keyed(live: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a second gateway of the same server that asks for keys."""
    directory = tmp_path_factory.mktemp("keyed")
    file = directory / "api.keys"
    file.touch(0o600)
    file.write_text("\n".join(KEYS))
    with live.another_gateway("--api-key-file", str(file), "--no-coordinator") as url:
        yield url


class Asker:
    """A client with a key, that counts how many of its prompt tokens were found in the cache."""

    def __init__(self, live: LiveServer, url: str, key: str) -> None:
        self._live = live
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=240)

    def hits(self, prompt: list[int], **more: Any) -> float:
        before = self._live.engine_metric("vllm:prefix_cache_hits_total")
        body = {"model": self._live.name, "prompt": prompt, "max_tokens": 2} | more
        self.http.post("/v1/completions", json=body).raise_for_status()
        return self._live.engine_metric("vllm:prefix_cache_hits_total") - before


@pytest.fixture
def askers(live: LiveServer, keyed: str) -> Iterator[tuple[Asker, Asker]]:
    first, second = (Asker(live, keyed, key) for key in KEYS)
    with first.http, second.http:
        yield first, second


async def scope_of(live: LiveServer, key: str) -> str:
    """The name of a key's scope, which no client can know: it takes the store's secret."""
    store = open_store(live.processes.store)
    found = await store.get(STORE_KEY)
    await store.close()
    assert found is not None
    digest = hashlib.sha256(key.encode()).digest()
    return hmac.new(bytes.fromhex(found.value.decode()), digest, hashlib.sha256).hexdigest()[:32]


async def test_keys_share_no_blocks_whatever_salt_they_send(
    live: LiveServer, checkpoints: dict[str, Path], askers: tuple[Asker, Asker]
) -> None:
    version = live.push(checkpoints["a"])
    first, second = askers
    assert first.hits(PROMPT) == 0
    found = first.hits(PROMPT)
    assert found > 500
    assert first.hits(PROMPT, cache_salt="mine") == 0
    assert first.hits(PROMPT, cache_salt="mine") == found
    assert second.hits(PROMPT) == 0
    scope = await scope_of(live, KEYS[0])
    for salt in ("mine", f"{scope}|mine", f"{scope}|", f"32:{scope}|", f"{version}|32:{scope}|", f"|{scope}|mine"):
        assert second.hits(PROMPT, cache_salt=salt) == 0, salt
    header = second.http.post("/generate", json={}, headers={"x-hotswap-cache-scope": scope})
    assert header.status_code == 400
    assert first.hits(PROMPT) == found


def test_a_session_keeps_its_cache_over_swaps(
    live: LiveServer, checkpoints: dict[str, Path], askers: tuple[Asker, Asker]
) -> None:
    """By either name of a session, until the version that computed it is withdrawn; for no other request."""
    first, second = askers
    prompt = [(13 * j) % 400 + 5 for j in range(600)]
    named = {"hotswap": {"kv": "session"}, "prompt_cache_key": "chat-1"}
    versions = [live.push(checkpoints["a"])]
    assert first.hits(prompt, **named) == 0
    versions.append(live.push(checkpoints["b"]))
    found = first.hits([*prompt, 7], **named)
    assert found > 500
    longer = [*prompt, 7, *((7 * j) % 400 + 5 for j in range(200))]
    assert second.hits([*prompt, 7], **named) == 0
    assert first.hits([*prompt, 7], cache_salt=secrets.token_hex(4), **named) == 0
    assert first.hits([*prompt, 7], **named | {"prompt_cache_key": "chat-2"}) == 0
    assert first.hits([*prompt, 7]) == found, "chat-2 began with blocks of the version alone"

    def told(**wish: Any) -> dict[str, Any]:
        body = {"prompt_token_ids": longer, "max_tokens": 8, "temperature": 0, "stream": False, "ignore_eos": True}
        answer = first.http.post("/generate", json=body | wish, headers={"x-session-id": "chat-3"})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return dict(choice)

    session = {"hotswap": {"kv": "session"}}
    told(**session)
    versions.append(live.push(checkpoints["say-1"]))
    kept = told(**session)["prompt_weight_versions"]
    assert [part["version"] for part in kept] == versions[1:]
    assert (kept[0]["start"], kept[1]["end"]) == (0, len(longer))
    assert kept[0]["end"] > 700
    assert [part["version"] for part in told()["prompt_weight_versions"]] == versions[2:]
    assert live.rollback() == versions[1]
    back = told(**session)["prompt_weight_versions"]
    assert [part["version"] for part in back] == versions[1:2]


async def test_answers_from_the_cache_are_right_after_streams_crossed_many_swaps(
    live: LiveServer, checkpoints: dict[str, Path]
) -> None:
    """Each version continues what streams of all policies wrote through many swaps, from the cache and afresh."""
    live.push(checkpoints["a"])
    live.push(checkpoints["b"])
    stop = asyncio.Event()
    crossed: list[list[int]] = []

    async def load(policy: str) -> None:
        async with httpx.AsyncClient(base_url=live.url, timeout=240) as client:
            for number in itertools.count():
                if stop.is_set():
                    return
                prompt = PROMPT[number % 7 :][:400]
                body = {"prompt_token_ids": prompt, "max_tokens": 120, "temperature": 0, "ignore_eos": True}
                body |= {"stream": False, "hotswap": {"policy": policy}}
                answer = await client.post("/generate", json=body)
                if answer.status_code != 200:
                    assert (policy, answer.json()["error"]["code"]) == ("abort", "weights_changed"), answer.text
                    continue
                (choice,) = answer.json()["choices"]
                if len(choice["weight_versions"]) > 1:
                    crossed.append(prompt + choice["token_ids"])

    streams = [asyncio.create_task(load(policy)) for policy in ("keep", "keep", "recompute", "finish", "abort")]
    for _ in range(2000):
        await asyncio.to_thread(live.rollback)
        if len(crossed) >= ENOUGH:
            break
    stop.set()
    await asyncio.gather(*streams)
    assert len(crossed) >= ENOUGH
    before = live.engine_metric("vllm:prefix_cache_hits_total")
    for _ in range(2):
        live.rollback()
        for tokens in crossed[:ENOUGH]:
            cached, fresh = (completion(live, tokens, salt) for salt in (None, secrets.token_hex(8)))
            assert cached == fresh, f"version {live.active()}"
    assert live.engine_metric("vllm:prefix_cache_hits_total") - before > 1000


def completion(live: LiveServer, prompt: list[int], salt: str | None) -> str:
    """A greedy answer; with a salt of its own, it finds nothing in the cache."""
    body = {"model": live.name, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = live.client.post("/v1/completions", json=body | ({} if salt is None else {"cache_salt": salt}))
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])
