"""Cache scopes: one per key, the same in every gateway of a store, telling nothing of the key."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from server.gateway import UpstreamSettings
from server.gateway.access.keys import ANONYMOUS, Principal
from server.gateway.access.records import INFER
from server.gateway.access.scope import STORE_KEY, CacheScopes
from tests.server.gateway.harness import ADMIN_KEY, RunningGateway, post, private, running_gateway
from weightsync.errors import StoreUnavailable
from weightsync.store import open_store

KEYS = ("first-key-of-the-tests", "second-key-of-the-tests")
SETTINGS = UpstreamSettings(scrape_interval_s=3600.0)


def principal(key: str) -> Principal:
    return Principal(key, frozenset({INFER}), hashlib.sha256(key.encode()).digest())


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    hashed = hashlib.sha256(KEYS[1].encode()).hexdigest()
    return private(tmp_path / "api.keys", f"{KEYS[0]}\nsha256:{hashed} second\n")


async def scope_of(gateway: RunningGateway, headers: str) -> str:
    async with gateway.instance() as up:
        assert (await gateway.ask(post(headers=headers))).status == 200
        return up.requests[0].headers["x-hotswap-cache-scope"]


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


async def test_each_key_has_its_own(tmp_path: Path, key_file: Path) -> None:
    settings: dict[str, Any] = {"upstream": SETTINGS, "api_key_file": key_file}
    with running_gateway(tmp_path, **settings) as gateway, running_gateway(tmp_path, **settings) as another:
        scopes = [await scope_of(gateway, bearer(key)) for key in (*KEYS, ADMIN_KEY)]
        assert len(set(scopes)) == 3
        assert all(re.fullmatch("[0-9a-f]{32}", scope) for scope in scopes)
        assert await scope_of(gateway, f"X-Api-Key: {KEYS[0]}\r\n") == scopes[0]
        for key, scope in zip(KEYS, scopes, strict=False):
            assert scope not in hashlib.sha256(key.encode()).hexdigest()
        assert [await scope_of(another, bearer(key)) for key in KEYS] == scopes[:2]


async def test_without_keys_it_is_public(tmp_path: Path) -> None:
    with running_gateway(tmp_path, upstream=SETTINGS) as gateway:
        assert await scope_of(gateway, bearer(KEYS[0])) == "public"


async def test_shared(tmp_path: Path, key_file: Path) -> None:
    with running_gateway(tmp_path, upstream=SETTINGS, api_key_file=key_file, cache_scope="shared") as gateway:
        assert {await scope_of(gateway, bearer(key)) for key in KEYS} == {"public"}


async def test_gateways_that_start_at_once_agree(tmp_path: Path) -> None:
    store = open_store(f"sqlite://{tmp_path}/store.db")
    every = [CacheScopes(shared=False) for _ in range(8)]
    await asyncio.gather(*(scopes.adopt(store) for scopes in every))
    assert len({scopes.line(principal(KEYS[0])) for scopes in every}) == 1
    found = await store.get(STORE_KEY)
    assert found is not None
    assert found.value not in every[0].line(principal(KEYS[0]))
    await store.close()


async def test_while_the_store_is_away_nothing_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.gateway.access.scope.RETRY_S", 0.01)
    store = open_store(f"sqlite://{tmp_path}/store.db")
    one, two = CacheScopes(shared=False), CacheScopes(shared=False)
    alone = one.line(principal(KEYS[0]))
    assert alone != two.line(principal(KEYS[0]))
    assert one.line(ANONYMOUS) == two.line(ANONYMOUS)

    class Away:
        asked = 0

        async def get(self, key: str) -> object:
            self.asked += 1
            if self.asked < 3:
                raise StoreUnavailable("/x/store.db", "gone", "Wait")
            return await store.get(key)

        compare_and_swap = store.compare_and_swap

    await one.keep_adopting(Away())  # type: ignore[arg-type]
    await two.keep_adopting(store)
    assert one.line(principal(KEYS[0])) == two.line(principal(KEYS[0])) != alone
    await store.close()
