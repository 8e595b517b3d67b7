"""Editions in an instance: loaded once for the requests that need them, and dropped when no request does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import ed25519

from server.gateway.fleet.instance import FAULTS
from server.instance.editions import Editions, WithEditions
from server.instance.inflight import Problem
from tests.waiting import eventually
from tests.weightsync.test_signing import pair
from weightsync import Adapter, Publisher, SyncStore, ensure_arena, open_store
from weightsync.control.editions import EditionRecord, key_of
from weightsync.control.records import CounterRecord, Keys
from weightsync.errors import EngineError, StoreUnavailable
from weightsync.signing import Trust

KEYS = Keys("demo")


class Engine:
    """An engine that notes the calls; a name that is in `refuses` cannot be loaded."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuses: set[str] = set()
        self.others: set[str] = set()  # adapters that vLLM has from elsewhere
        self.go, self.may_drop = asyncio.Event(), asyncio.Event()
        self.go.set()
        self.may_drop.set()

    hosts = ("",)

    async def load_edition(self, edition: EditionRecord, places: Mapping[str, str]) -> None:
        self.calls.append(f"load {edition.full_name}")
        await self.go.wait()
        if edition.full_name in self.refuses:
            raise EngineError("rank 99 is over --max-lora-rank", code="adapter_refused")

    async def drop_edition(self, name: str) -> None:
        self.calls.append(f"drop {name}")
        await self.may_drop.wait()

    def answers_to(self, name: str) -> bool:
        return name in self.loaded or name in self.others

    @property
    def loaded(self) -> set[str]:
        now = set[str]()
        for what, name in (call.split() for call in self.calls):
            (now.add if what == "load" else now.discard)(name)
        return now


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    url = f"sqlite://{tmp_path / 'store.db'}"
    SyncStore(url).close()
    return url


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest_asyncio.fixture
async def editions(engine: Engine, store_url: str) -> AsyncIterator[Editions]:
    """With room for two."""
    made, store = Editions(engine, "demo", Trust(), 2), open_store(store_url)
    following = asyncio.create_task(made.follow(store))
    yield made
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await store.close()


@pytest.fixture
def store(store_url: str) -> Any:
    with contextlib.closing(SyncStore(store_url)) as opened:
        yield opened


def put(store: SyncStore, *names: str) -> None:
    for name in names:
        base, _, number = name.partition("@")
        record = EditionRecord(base, int(number), "/nowhere", "", 1, "trainer", 0.0)
        store.put(key_of(KEYS, base, int(number)), record.to_json())


async def use(editions: Editions, name: str) -> None:
    async with editions.using(name):
        pass


async def test_requests_that_come_together_load_it_once(editions: Editions, engine: Engine, store: SyncStore) -> None:
    put(store, "math@7")
    engine.go.clear()
    asking = [asyncio.create_task(use(editions, "math@7")) for _ in range(5)]
    await eventually(lambda: engine.calls == ["load math@7"])
    engine.go.set()
    await asyncio.gather(*asking)
    await use(editions, "math@7")
    assert engine.calls == ["load math@7"]


async def test_the_one_asked_for_longest_ago_makes_room(editions: Editions, engine: Engine, store: SyncStore) -> None:
    put(store, "a@1", "b@2", "c@3")
    for name in ("a@1", "b@2", "a@1", "c@3"):
        await use(editions, name)
    assert engine.calls == ["load a@1", "load b@2", "load c@3", "drop b@2"]
    async with editions.using("a@1"), editions.using("c@3"), editions.using("b@2"):
        assert engine.loaded == {"a@1", "b@2", "c@3"}, "what requests run through stays, however many there are"
    assert len(engine.loaded) == 2


async def test_one_that_is_used_takes_no_room_from_the_others(
    editions: Editions, engine: Engine, store: SyncStore
) -> None:
    put(store, "a@1", "b@2", "c@3")
    async with editions.using("a@1"):
        await use(editions, "b@2")
        await use(editions, "c@3")
        assert engine.loaded == {"a@1", "c@3"}


async def test_a_request_that_comes_while_others_go_keeps_its_own(
    editions: Editions, engine: Engine, store: SyncStore
) -> None:
    put(store, "a@1", "b@2", "c@3")
    await use(editions, "a@1")
    await use(editions, "b@2")
    for name, number in (("a", 1), ("b", 2)):
        store.delete(key_of(KEYS, name, number))
    await eventually(lambda: editions._known.keys() == {"c@3"})
    engine.may_drop.clear()
    asking = asyncio.create_task(use(editions, "c@3"))
    await eventually(lambda: engine.calls[-1] == "drop a@1")
    async with editions.using("b@2"):
        engine.may_drop.set()
        await asking
        assert "b@2" in engine.loaded
    assert engine.loaded == {"c@3"}


async def test_a_withdrawn_one_goes_with_its_last_request(editions: Editions, engine: Engine, store: SyncStore) -> None:
    put(store, "math@7", "math@8")
    await use(editions, "math@8")
    async with editions.using("math@7"):
        store.delete(key_of(KEYS, "math", 7))
        await eventually(lambda: "math@7" not in editions._known)
        await use(editions, "math@8")
        assert engine.loaded == {"math@7", "math@8"}
    assert engine.loaded == {"math@8"}


async def test_one_that_the_gateway_knows_a_moment_earlier(
    editions: Editions, engine: Engine, store: SyncStore
) -> None:
    asking = asyncio.create_task(use(editions, "math@7"))
    await asyncio.sleep(0)
    put(store, "math@7")
    await asking
    assert engine.loaded == {"math@7"}


async def test_one_that_is_nowhere_is_not_found(
    editions: Editions, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.instance.editions.KNOWN_S", 0.01)
    with pytest.raises(Problem, match="does not exist here") as found:
        await use(editions, "math@7")
    assert (found.value.status, found.value.code, engine.calls) == (404, "model_not_found", [])


async def test_one_that_a_worker_refuses_is_tried_again_after_a_while(
    editions: Editions, engine: Engine, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway takes no instance for ill by the status of such a refusal."""
    put(store, "math@7")
    engine.refuses = {"math@7"}
    for _ in range(3):
        with pytest.raises(Problem, match="cannot be served: rank 99") as found:
            await use(editions, "math@7")
        assert (found.value.status, found.value.code) == (422, "adapter_refused")
        assert found.value.status not in FAULTS
    assert engine.calls == ["load math@7"]
    engine.refuses = set()
    monkeypatch.setattr(editions, "_refused", {})  # as after ten seconds
    await use(editions, "math@7")
    assert engine.calls == ["load math@7", "load math@7"]


async def test_a_store_that_is_away_is_no_fault_of_the_edition(
    editions: Editions, engine: Engine, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another instance may have it, so the gateway is to try there."""
    put(store, "math@7")

    async def away(*_: object) -> None:
        raise StoreUnavailable("store.db", "away", "Wait")

    monkeypatch.setattr("server.instance.editions.wait_for_edition", away)
    with pytest.raises(Problem, match="math@7 cannot be served") as found:
        await use(editions, "math@7")
    assert found.value.status == 503
    assert engine.calls == []


async def test_a_client_that_goes_leaves_nothing_half_loaded(
    editions: Editions, engine: Engine, store: SyncStore
) -> None:
    put(store, "math@7", "math@8")
    engine.go.clear()
    asking = asyncio.create_task(use(editions, "math@7"))
    await eventually(lambda: engine.calls == ["load math@7"])
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    again = asyncio.create_task(use(editions, "math@7"))
    engine.go.set()
    await again
    assert engine.calls == ["load math@7"]
    store.delete(key_of(KEYS, "math", 7))
    await eventually(lambda: "math@7" not in editions._known)
    await use(editions, "math@8")
    assert engine.loaded == {"math@8"}


async def test_a_refusal_is_kept_for_the_next_client_when_the_first_has_gone(
    editions: Editions, engine: Engine, store: SyncStore
) -> None:
    put(store, "math@7")
    engine.refuses = {"math@7"}
    engine.go.clear()
    asking = asyncio.create_task(use(editions, "math@7"))
    await eventually(lambda: engine.calls == ["load math@7"])
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    engine.go.set()
    await eventually(lambda: not editions._tasks)
    with pytest.raises(Problem, match="cannot be served: rank 99"):
        await use(editions, "math@7")
    assert engine.calls == ["load math@7"]


async def test_an_adapter_with_such_a_name_from_elsewhere_is_left_alone(editions: Editions, engine: Engine) -> None:
    engine.others = {"math@9"}
    await use(editions, "math@9")
    assert engine.calls == []


async def test_names_that_are_asked_for_in_vain_leave_nothing(
    editions: Editions, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.instance.editions.KNOWN_S", 0.01)
    for number in range(20):
        with pytest.raises(Problem):
            await use(editions, f"math@{number}")
    assert (len(editions._turns), len(editions._users), len(editions._refused)) == (0, 0, 0)


async def test_a_signature_counts_where_keys_are_trusted(
    engine: Engine, store: SyncStore, store_url: str, tmp_path: Path
) -> None:
    private, public = pair(tmp_path, "k", ed25519.Ed25519PrivateKey.generate())
    adapter = Adapter({"a.lora_A.weight": np.zeros((2, 4), np.float32)}, {"r": 2})
    (slots := tmp_path / "slots").mkdir(0o700)
    store.run(ensure_arena(store.store, slots))
    store.put(KEYS.counter, CounterRecord(0).to_json())
    numbers = []
    for sign in (private, None):
        with Publisher(store_url, model="demo", sign=sign) as publisher:
            numbers.append(publisher.publish_edition("math", adapter))
    followed, editions = open_store(store_url), Editions(engine, "demo", Trust([public]), 2)
    following = asyncio.create_task(editions.follow(followed))
    await use(editions, f"math@{numbers[0]}")
    with pytest.raises(Problem, match="is not signed"):
        await use(editions, f"math@{numbers[1]}")
    assert engine.calls == [f"load math@{numbers[0]}"]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await followed.close()


async def test_the_app_waits_for_it_and_a_refusal_has_the_shape_of_the_route(
    editions: Editions, engine: Engine, store: SyncStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "math@7")
    ran: list[set[str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        ran.append(engine.loaded)

    async def call(*headers: tuple[bytes, bytes]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/v1/chat/completions", "headers": headers}
        await WithEditions(app, editions)(scope, None, send)
        return sent

    assert await call() == []
    assert await call((b"x-hotswap-edition", b"math@7")) == []
    assert ran == [set(), {"math@7"}]
    monkeypatch.setattr("server.instance.editions.KNOWN_S", 0.01)
    start, body = await call((b"x-hotswap-edition", b"math@8"))
    assert start["status"] == 404
    assert orjson.loads(body["body"])["error"]["code"] == "model_not_found"
    assert len(ran) == 2
