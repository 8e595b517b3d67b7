"""Token budgets of a calendar month: over restarts, in several gateways, and when the month ends."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import orjson
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from server.gateway.access import limits as meters
from server.gateway.access.budgets import Budgets, SpentRecord
from server.gateway.access.keys import Principal
from server.gateway.access.limits import Limits, Month, this_month
from server.gateway.wire.bodies import NONE, Usage
from server.key_limits import KeyLimits
from tests.server.gateway.harness import RunningGateway, admin, new_key, post, running_gateway
from tests.server.gateway.upstream import Link, Received, upstream
from tests.waiting import eventually
from weightsync.store import open_store

BODY = {"prompt": "a", "max_tokens": 20}


async def costs_100(link: Link, _: Received) -> None:
    await link.json(b'{"choices":[],"usage":{"prompt_tokens":60,"total_tokens":100,"completion_tokens":40}}')


async def spent(gateway: RunningGateway, key_id: str) -> int:
    shown = orjson.loads((await admin(gateway, "GET", f"/{key_id}")).body)
    assert shown["spent"]["month"] == this_month(time.time())[0]
    return int(shown["spent"]["tokens"])


async def test_a_budget_outlives_restarts_and_is_one_for_all_gateways(tmp_path: Path) -> None:
    async with upstream(costs_100) as up:
        with running_gateway(tmp_path, run_coordinator=False) as gateway:
            gateway.register(up)
            key_id, key = await new_key(gateway, limits={"tokens_per_month": 350})
            for used in (100, 200):
                answer = await gateway.ask(post("/v1/completions", BODY, key))
                assert answer.headers["x-ratelimit-limit-month-tokens"] == "350"
                assert await spent(gateway, key_id) == used
            with running_gateway(tmp_path, run_coordinator=False) as other:
                await eventually(lambda: key_id in other.gateway.keys.limits)
                await eventually(lambda: len(other.gateway.default.fleet.serving) == 1)
                place = f"gateway/spent/{this_month(time.time())[0]}/{key_id}"
                await eventually(lambda: other.gateway.budgets._saved.get(place) == 200)
                assert (await other.ask(post("/v1/completions", BODY, key))).status == 200
                await eventually(lambda: gateway.gateway.budgets._saved.get(place) == 300)
                used_up = await gateway.ask(post("/v1/completions", {**BODY, "max_tokens": 45}, key))
                assert used_up.status == 429
        with running_gateway(tmp_path, run_coordinator=False) as gateway:
            await eventually(lambda: len(gateway.gateway.default.fleet.serving) == 1)
            assert await spent(gateway, key_id) == 300
            client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key.split()[-1], max_retries=0)
            message = ChatCompletionUserMessageParam(role="user", content="a")
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(model="toy", messages=[message], max_tokens=45)
            await client.close()
            error = refused.value
            assert (error.type, error.code) == ("insufficient_quota", "insufficient_quota")
            assert "resets at" in error.message
            until = this_month(time.time())[1]
            assert 0 <= int(error.response.headers["retry-after"]) - (until - time.time()) < 5
            listed = orjson.loads((await admin(gateway, "GET", "")).body)["keys"][0]
            assert (listed["spent"]["tokens"], listed["spent"]["left"], listed["spent"]["resets_at"]) == (
                300,
                50,
                until,
            )


def test_months_of_the_calendar() -> None:
    assert this_month(0.0) == ("1970-01", 31 * 86400.0)
    assert this_month(1764547199.0) == ("2025-11", 1764547200.0)
    assert this_month(1764547200.0)[0] == "2025-12"
    assert this_month(1767225599.0) == ("2025-12", 1767225600.0)


async def test_the_month_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 1764547100.0
        time = staticmethod(lambda: Clock.now)

    monkeypatch.setattr(meters, "time", Clock)
    month = Month(100, "month_tokens", lambda prompt, answer: prompt + answer)
    month.take(80)
    month.end(0, 80, 90)
    month.take(10)
    assert (month.used, month.remaining(), month.unsaved) == (100, 0, {"2025-11": 90})
    Clock.now = 1764547200.0
    month.advance(0)
    assert (month.used, month.remaining()) == (10, 90), "what runs still counts, in the month in which it ends"
    month.end(0, 10, 7)
    assert month.unsaved == {"2025-11": 90, "2025-12": 7}


async def test_two_gateways_add_to_one_record(tmp_path: Path) -> None:
    store = open_store(f"sqlite://{tmp_path}/store.db")
    limits = KeyLimits(tokens_per_month=10_000)
    budgets = []
    for _ in range(2):
        gateway = Limits({"month_tokens": 0})
        budgets.append(Budgets(store, gateway))

        principal = Principal("p", frozenset(), id="k", limits=limits)
        for _ in range(3):
            grant = gateway.admit(principal, NONE, "/v1/completions", b"{}")
            assert grant is not None
            grant.settle(Usage(10, 5), 200)
    await budgets[0].save()
    await budgets[1].save()
    await budgets[0].save()
    found = await store.get(f"gateway/spent/{this_month(time.time())[0]}/k")
    assert found is not None
    assert SpentRecord.from_json(found.value).tokens == 90
    await store.close()
