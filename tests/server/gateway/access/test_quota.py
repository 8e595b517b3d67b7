"""The use of a key: the window of a minute against a plain list, estimates, headers, costs, and budgets of a month."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionUserMessageParam

from loadtest.simulation.clock import Clock as StoreClock
from loadtest.simulation.store import Client, ModelStore
from server.gateway.access import limits as meters
from server.gateway.access.budgets import Budgets, SpentRecord
from server.gateway.access.costs import BYTES_PER_TOKEN, MOST, USUAL_OUTPUT, Cost, Pace, bounded, reckon
from server.gateway.access.keys import Principal
from server.gateway.access.limits import SLOTS, Limits, Month, Window, this_month
from server.gateway.wire.bodies import NONE, Usage, check_object
from server.key_limits import KeyLimits
from tests.server.gateway.harness import RunningGateway, admin, new_key, post, running_gateway
from tests.server.gateway.upstream import answering, upstream
from tests.server.refusals import refuses
from tests.waiting import eventually
from weightsync.errors import StoreUnavailable
from weightsync.store import Store, open_store

STEPS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 9), st.booleans()), max_size=60)
CHAT = "/v1/chat/completions"
BATCH = f"{CHAT}/batch"
EMBEDDINGS = "/v1/embeddings"
NESTED = "/inference/v1/generate"


@given(STEPS)
def test_the_window_against_a_list(steps: list[tuple[int, int, bool]]) -> None:
    now = 5000
    window = Window(10**6, now)
    taken: list[tuple[int, int]] = []
    for wait, units, settle in steps:
        now += wait
        window.advance(now)
        window.take(units)
        taken.append((now, units))
        if settle:  # the first that still counts turns out to have taken nothing
            at, was = taken.pop(0)
            window.correct(at, -was)
        taken = [(at, n) for at, n in taken if now - at < SLOTS]
        assert window.used == sum(n for _, n in taken)
        wants = [at + SLOTS - now for at, n in taken if n]
        assert window.seconds_until_unused() == (max(wants) if wants else 0)
        if wants:
            assert window.seconds_until(1) == min(wants)
            assert window.seconds_until(window.used) == max(wants)
        assert window.seconds_until(window.used + 1) == SLOTS


def test_an_excess_counts_from_when_it_is_known() -> None:
    window = Window(100, 1000)
    window.take(10)
    window.advance(1050)
    window.correct(1000, 25)
    window.advance(1061)
    assert window.used == 25
    window.correct(1000, -10)  # it has left the window already
    assert window.used == 25
    window.advance(1111)
    assert window.used == 0


@pytest.mark.parametrize(
    ("route", "body", "tokens"),
    [
        (CHAT, b"{}", USUAL_OUTPUT),
        (CHAT, b'{"max_tokens":7}', 7),
        (CHAT, b'{"max_tokens":7,"max_completion_tokens":9}', 9),
        (CHAT, b'{"max_tokens":7,"max_completion_tokens":null}', 7),
        (CHAT, b'{"max_tokens":7,"n":3}', 21),
        (CHAT, b'{"max_tokens":"7","n":"3.0"}', 21),
        (CHAT, b'{"max_tokens":"many","n":[1]}', USUAL_OUTPUT),
        (CHAT, b'{"max_tokens":-5,"n":0}', USUAL_OUTPUT),
        (CHAT, b'{"max_tokens":99999999999999999999,"n":9999999999999}', MOST),
        (CHAT, b'{"max_tokens":1' + b"0" * 400 + b"}", MOST),
        ("/v1/completions", b'{"prompt":["a","b","c"],"max_tokens":5,"n":2}', 30),
        ("/v1/completions", b'{"prompt":["a","b","c"],"max_tokens":5,"n":2,"best_of":4}', 60),
        ("/v1/completions", b'{"prompt":[1,2,3],"max_tokens":5}', 5),
        ("/v1/completions", b'{"prompt":[[1,2],[3],[4,5]],"max_tokens":5}', 15),
        ("/v1/completions", rb'{"prompt":["\\","a\"","[\\\"b"],"max_tokens":5}', 20),
        ("/v1/completions", b'{"prompt":"a, [\\"b\\"]","max_tokens":5}', 5),
        ("/generate", b'{"prompt_token_ids":[1,2]}', 16),
        (BATCH, b'{"messages":[[{"content":[{"text":"a"}]},{}],[{}],[]],"max_tokens":5,"n":2}', 30),
        (BATCH, rb'{"messages":[[{"content":"[\"[],[]"}]],"max_tokens":5}', 5),
        (BATCH, b'{"messages":[],"max_tokens":5}', 5),
        (BATCH, b'{"messages":"x","max_tokens":5}', 5),
        (BATCH, b'{"messages":[' + b"[]," * 2**18 + b'[]],"max_tokens":1}', 2**18 + 2),
        (CHAT, b'{"messages":[{},{}],"prompt":["a","b"],"max_tokens":5}', 5),
        ("/v1/completions", b"{}", 16),
        ("/v1/completions", b'{"max_output_tokens":5}', 16),
        ("/v1/responses", b'{"max_output_tokens":5}', 5),
        ("/v1/messages", b'{"max_tokens":5}', 5),
        ("/generate", b'{"max_tokens":5,"n":2}', 10),
        ("/v1/embeddings", b'{"max_tokens":5}', 0),
        ("/tokenize", b"{}", 0),
        (NESTED, b'{"token_ids":[1,2],"sampling_params":{"max_tokens":5,"n":3},"max_tokens":9,"n":7}', 15),
        (NESTED, b'{"token_ids":[1,2],"sampling_params":{}}', USUAL_OUTPUT),
        (NESTED, b'{"token_ids":[1,2],"sampling_params":[7]}', USUAL_OUTPUT),
        (NESTED, b'{"token_ids":[1,2]}', USUAL_OUTPUT),
    ],
)
def test_what_an_answer_is_expected_to_take(route: str, body: bytes, tokens: int) -> None:
    assert reckon(check_object(body), route, len(body)).output == tokens


def test_the_bound_of_a_key_holds_where_an_answer_is_bounded_in_a_field_of_a_field() -> None:
    good = b'{"sampling_params":{"max_tokens":50}}'
    assert bounded(check_object(good), NESTED, 50, good) is good
    for bad in (b'{"sampling_params":{"max_tokens":51}}', b'{"sampling_params":{}}', b'{"max_tokens":5}'):
        with refuses(400, match="may ask for 50 tokens an answer at most"):
            bounded(check_object(bad), NESTED, 50, bad)


def test_what_a_prompt_is_taken_for() -> None:
    def prompt(field: bytes, value: bytes, route: str) -> int:
        body = b'{"%b":%b}' % (field, value)
        return reckon(check_object(body), route, len(body)).prompt

    text = b'"' + b"x" * 400 + b'"'
    ids = b"[" + b",".join([b"7"] * 300) + b"]"
    for field, route in (
        (b"prompt", "/v1/completions"),
        (b"prompt_token_ids", "/generate"),
        (b"token_ids", NESTED),
        (b"input", EMBEDDINGS),
    ):
        assert prompt(field, text, route) == (len(text) + len(field) + 5) // BYTES_PER_TOKEN + 1
        assert prompt(field, ids, route) == 300
    assert prompt(b"input", b"[%b,%b]" % (ids, ids), EMBEDDINGS) == 600


@pytest.mark.parametrize(
    ("route", "first", "second", "one"),
    [
        ("/v1/rerank", "query", "documents", "x" * 40),
        ("/rerank", "query", "documents", "x" * 40_000),
        ("/score", "text_1", "text_2", "x" * 40_000),
        ("/score", "queries", "items", ["x" * 40_000]),
        ("/v1/score", "data_1", "data_2", "a, b, [c]" * 100),
        ("/generative_scoring", "query", "items", list(range(10_000, 10_300))),
    ],
)
def test_what_is_computed_with_each_of_many_is_charged_with_each(
    route: str, first: str, second: str, one: str | list[str] | list[int]
) -> None:
    def prompt(count: int) -> int:
        body = orjson.dumps({first: one, second: ["a, [b]", *["x" * 5000] * count]})
        return reckon(check_object(body), route, len(body)).prompt - len(body) // BYTES_PER_TOKEN

    text = one if isinstance(one, str) else one[0]
    size = len(orjson.dumps(one)) // BYTES_PER_TOKEN if isinstance(text, str) else len(one)
    assert (prompt(0), prompt(10)) == (1, 1 + 10 * size)


def test_pairs_of_texts_are_charged_once() -> None:
    body = orjson.dumps({"text_1": ["x" * 5000] * 10, "text_2": ["y" * 5000] * 10})
    assert reckon(check_object(body), "/score", len(body)).prompt == len(body) // BYTES_PER_TOKEN + 1


def test_a_keys_own_bound_is_what_an_answer_may_take() -> None:
    assert reckon(check_object(b"{}"), CHAT, 2, 50).output == 50
    assert reckon(check_object(b'{"max_tokens":7}'), CHAT, 2, 50).output == 7
    assert reckon(check_object(b"{}"), "/v1/completions", 2, 50).output == 16


def test_a_long_stream_counts_as_it_grows(clock: Clock) -> None:
    limits, p = Limits(Counter()), principal(tokens_per_min=2000)
    grant = limits.admit(p, NONE, CHAT, b"x" * 40)
    assert grant is not None
    (meter,) = limits.meters()
    quota = meter.quotas()["p/tokens"]
    for grown in (100, 256, 300, 300):
        grant.grown(grown)
    assert quota.used == 11 + 300
    clock.now += 5
    grant.grown(2000)
    with refuses(429):
        limits.admit(p, NONE, CHAT, b"{}")
    grant.settle(Usage(11, 1900), 200)
    assert quota.used == 1911
    grant.grown(5000)
    assert quota.used == 1911


def test_what_is_refused_was_asked_for(clock: Clock) -> None:
    """Other gateways hand on their part of a limit by it."""
    limits, p = Limits(Counter()), principal(requests_per_min=9, tokens_per_min=100, concurrency=1)
    body = b'{"max_tokens":45}'
    assert limits.admit(p, check_object(body), CHAT, body) is not None
    with refuses(429):
        limits.admit(p, check_object(body), CHAT, body)
    (meter,) = limits.meters()
    asked = {name.partition("/")[2]: quota.asked for name, quota in meter.quotas().items()}
    assert asked == {"requests": 2, "concurrency": 2, "tokens": 50}


def test_one_key_may_reserve_its_limit_to_the_last_token(clock: Clock) -> None:
    limits, p = Limits(Counter()), principal(requests_per_min=9, tokens_per_min=100)
    body = b'{"max_tokens":45}'  # 5 + 45
    for _ in range(2):
        assert limits.admit(p, check_object(body), CHAT, body) is not None
    with refuses(429) as caught:
        limits.admit(p, check_object(body), CHAT, body)
    assert caught.value.code == "tokens_limit"
    whole = b'{"max_tokens":95}'  # 5 + 95: as much as a minute has
    assert Limits(Counter()).admit(principal(tokens_per_min=100), check_object(whole), CHAT, whole) is not None


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10_000.0
        monkeypatch.setattr("server.gateway.access.limits.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def principal(**limits: int) -> Principal:
    return Principal("p", frozenset(), id="p", limits=KeyLimits(**limits))


def lines(head: bytes) -> dict[str, str]:
    return dict(line.split(": ") for line in head.decode().split("\r\n") if line)


def test_headers_and_retry_after(clock: Clock) -> None:
    limits, p = Limits(Counter()), principal(requests_per_min=2, tokens_per_min=1000)
    first = limits.admit(p, check_object(b'{"max_tokens":99}'), CHAT, b"x" * 400)
    assert first is not None
    assert lines(first.head) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "1m1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "800",
        "x-ratelimit-reset-tokens": "1m1s",
    }
    clock.now += 20
    assert limits.admit(p, NONE, CHAT, b"{}") is not None
    clock.now += 10.5
    with refuses(429) as caught:
        limits.admit(p, NONE, CHAT, b"{}")
    assert (caught.value.retry_after_s, caught.value.code) == (31, "requests_limit")
    assert lines(limits.head(p))["x-ratelimit-reset-requests"] == "51s"
    clock.now += 31
    assert limits.admit(p, NONE, CHAT, b"{}") is not None
    first.settle(Usage(1, 1), 200)  # too late to give anything back
    assert lines(limits.head(p))["x-ratelimit-remaining-tokens"] == str(1000 - 2 * (1 + USUAL_OUTPUT))
    clock.now += 62
    assert lines(limits.head(p))["x-ratelimit-reset-requests"] == "0s"


def test_a_wait_is_for_what_is_missing_and_no_longer(clock: Clock) -> None:
    """Not until the whole cost of the request has been given back."""
    limits, p = Limits(Counter()), principal(tokens_per_min=100)
    body = b'{"max_tokens":35}'  # 5 + 35
    for _ in range(2):
        assert limits.admit(p, check_object(body), CHAT, body) is not None
        clock.now += 10
    larger = b'{"max_tokens":55}'  # 5 + 55, of which 20 are left: the first 40 make room for it
    with refuses(429) as caught:
        limits.admit(p, check_object(larger), CHAT, larger)
    assert caught.value.retry_after_s == SLOTS - 20
    clock.now += caught.value.retry_after_s
    assert limits.admit(p, check_object(larger), CHAT, larger) is not None


def test_what_another_gateway_has_left_is_worth_another_try_at_once(clock: Clock) -> None:
    """To the last unit of the limit; beyond it the window must move on."""
    limits, p = Limits(Counter()), principal(requests_per_min=10)
    short: list[int] = []
    limits.short = lambda: short.append(1)
    assert limits.admit(p, NONE, CHAT, b"{}") is not None
    (meter,) = limits.meters()
    quota = meter.quotas()["p/requests"]
    quota.allotted = 1
    waits = []
    for quota.elsewhere in (8, 9):
        with refuses(429) as caught:
            limits.admit(p, NONE, CHAT, b"{}")
        waits.append(caught.value.retry_after_s)
    assert (waits, len(short)) == ([1, SLOTS], 1)


def test_what_is_refused_takes_nothing(clock: Clock) -> None:
    hits: Counter[str] = Counter()
    limits, p = Limits(hits), principal(requests_per_min=5, tokens_per_min=300, concurrency=1, max_output_tokens=200)
    grant = limits.admit(p, check_object(b'{"max_tokens":100}'), CHAT, b"{}")
    before = limits.head(p)
    assert grant is not None
    for body in (b'{"max_tokens":100}', b'{"max_tokens":200}', b'{"max_tokens":201}', b'{"max_tokens":200,"n":2}'):
        with refuses(429, 400):
            limits.admit(p, check_object(body), CHAT, body)
    assert limits.head(p) == before
    grant.settle(None, 499)
    grant.settle(None, 499)
    with refuses(400):
        limits.admit(p, check_object(b'{"max_tokens":200,"n":2}'), CHAT, b"{}")
    assert limits.admit(p, check_object(b'{"max_tokens":100}'), CHAT, b"{}") is not None
    assert hits == {"concurrency": 3, "max_output": 1, "tokens": 1}


@pytest.mark.parametrize(
    ("usage", "status", "tokens"),
    [
        (Usage(3, 5), 200, 8),
        (Usage(0, 5, exact=False), 499, 101 + 5),
        (Usage(0, 5, exact=False), 200, 101 + 5),
        (None, 499, 101),
        (None, 200, 101),
        (None, 503, 0),
        (None, 400, 0),
        (Usage(1000, 2000), 200, 3000),
    ],
)
def test_what_an_answer_costs_in_the_end(clock: Clock, usage: Usage | None, status: int, tokens: int) -> None:
    limits, p = Limits(Counter()), principal(tokens_per_min=1000)
    grant = limits.admit(p, check_object(b'{"max_tokens":50}'), CHAT, b"x" * 400)
    assert grant is not None
    grant.settle(usage, status)
    (meter,) = limits.meters()
    quota = meter.quotas()["p/tokens"]
    assert quota.used == tokens
    assert int(lines(limits.head(p))["x-ratelimit-remaining-tokens"]) == max(0, 1000 - tokens)


def test_an_answer_that_was_left_is_taken_for_what_was_written() -> None:
    pace, two = Pace(), Cost(10, 40, whole=2)
    assert pace.settle(two, None, 499, 1.0) == Usage(0, 40, exact=False)  # nothing is known yet
    assert pace.settle(Cost(10, 40, whole=0), None, 499, 1.0) is None  # of a stream all is known
    assert pace.settle(two, None, 502, 1.0) is None
    for told, seconds, pace_s in ((Usage(9, 1), 1.0, 0.0), (Usage(9, 20), 2.0, 0.2), (Usage(9, 200), 2.0, 0.182)):
        assert pace.settle(two, told, 200, seconds) == told
        assert pace.seconds_a_token == pytest.approx(pace_s)
    assert pace.settle(two, None, 499, 1.0) == Usage(0, 10, exact=False)
    assert pace.settle(two, None, 499, 100.0) == Usage(0, 40, exact=False)


def test_unlimited_keys_have_no_meter() -> None:
    limits = Limits(Counter())
    assert limits.admit(Principal("p", frozenset()), NONE, CHAT, b"{}") is None
    assert limits.head(Principal("p", frozenset())) == b""
    assert limits.meters() == []


def test_meters_of_idle_keys_are_forgotten(clock: Clock) -> None:
    limits = Limits(Counter())
    grants = [
        limits.admit(Principal("p", frozenset(), id=str(i), limits=KeyLimits(9)), NONE, CHAT, b"{}") for i in (1, 2)
    ]
    clock.now += 62
    limits.forget_idle()
    assert len(limits.meters()) == 2  # their requests have not ended
    assert grants[0] is not None
    grants[0].settle(None, 200)
    limits.forget_idle()
    assert [meter.key for meter in limits.meters()] == ["2"]


# budgets of a month

COSTLY = {"prompt": "a", "max_tokens": 20}
COSTS_100 = b'{"choices":[],"usage":{"prompt_tokens":60,"total_tokens":100,"completion_tokens":40}}'


async def spent(gateway: RunningGateway, key_id: str) -> int:
    shown = orjson.loads((await admin(gateway, "GET", f"/{key_id}")).body)
    assert shown["spent"]["month"] == this_month(time.time())[0]
    return int(shown["spent"]["tokens"])


async def test_a_budget_outlives_restarts_and_is_one_for_all_gateways(tmp_path: Path) -> None:
    async with upstream(answering(COSTS_100)) as up:
        with running_gateway(tmp_path, run_coordinator=False) as gateway:
            gateway.register(up)
            key_id, key = await new_key(gateway, limits={"tokens_per_month": 350})
            for used in (100, 200):
                answer = await gateway.ask(post("/v1/completions", COSTLY, key))
                assert answer.headers["x-ratelimit-limit-month-tokens"] == "350"
                assert await spent(gateway, key_id) == used
            with running_gateway(tmp_path, run_coordinator=False) as other:
                await eventually(lambda: key_id in other.gateway.keys.limits)
                await eventually(lambda: len(other.gateway.default.fleet.serving) == 1)
                place = f"gateway/spent/{this_month(time.time())[0]}/{key_id}"
                await eventually(lambda: other.gateway.budgets._saved.get(place) == 200)
                assert (await other.ask(post("/v1/completions", COSTLY, key))).status == 200
                await eventually(lambda: gateway.gateway.budgets._saved.get(place) == 300)
                used_up = await gateway.ask(post("/v1/completions", {**COSTLY, "max_tokens": 45}, key))
                assert used_up.status == 429
        with running_gateway(tmp_path, run_coordinator=False) as gateway:
            await eventually(lambda: len(gateway.gateway.default.fleet.serving) == 1)
            assert await spent(gateway, key_id) == 300
            client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key.split()[-1], max_retries=0)
            message = ChatCompletionUserMessageParam(role="user", content="a")
            asked = time.time()
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(model="toy", messages=[message], max_tokens=45)
            await client.close()
            error = refused.value
            assert (error.type, error.code) == ("insufficient_quota", "insufficient_quota")
            assert "resets at" in error.message
            until = this_month(time.time())[1]
            assert until - time.time() <= int(error.response.headers["retry-after"]) <= until - asked + 1
            listed = orjson.loads((await admin(gateway, "GET", "")).body)["keys"][0]
            told = [listed["spent"][name] for name in ("tokens", "left", "resets_at")]
            assert told == [300, 50, until]


def test_months_of_the_calendar() -> None:
    assert this_month(0.0) == ("1970-01", 31 * 86400.0)
    assert this_month(1764547199.0) == ("2025-11", 1764547200.0)
    assert this_month(1764547200.0)[0] == "2025-12"
    assert this_month(1767225599.0) == ("2025-12", 1767225600.0)


async def test_the_month_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Calendar:
        now = 1764547100.0
        time = staticmethod(lambda: Calendar.now)

    monkeypatch.setattr(meters, "time", Calendar)
    month = Month(100, "month_tokens", lambda prompt, answer: prompt + answer)
    month.take(80)
    month.end(0, 80, 90)
    month.take(10)
    assert (month.used, month.remaining(), month.unsaved) == (100, 0, {"2025-11": 90})
    Calendar.now = 1764547200.0
    month.advance(0)
    assert (month.used, month.remaining()) == (10, 90), "what runs still counts, in the month in which it ends"
    month.end(0, 10, 7)
    assert month.unsaved == {"2025-11": 90, "2025-12": 7}


@contextlib.asynccontextmanager
async def _store(directory: Path) -> AsyncIterator[Store]:
    opened = open_store(f"sqlite://{directory}/store.db")
    try:
        yield opened
    finally:
        await opened.close()


@pytest.mark.parametrize("now", [{}, {"tokens_per_month": 9_000}, {"requests_per_min": 100_000}])
async def test_a_budget_that_changes_while_requests_run_loses_nothing(tmp_path: Path, now: dict[str, int]) -> None:
    """The budget is lowered, or taken away with one answer unsaved and another request running, and set again."""
    limits = Limits({"month_tokens": 0})
    async with _store(tmp_path) as store:
        budgets = Budgets(store, limits)
        before = principal(tokens_per_month=10_000)
        ended, running = (limits.admit(before, NONE, "/v1/completions", b"{}") for _ in range(2))
        assert ended is not None
        assert running is not None
        ended.settle(Usage(30, 70), 200)
        between = limits.admit(principal(**now), NONE, "/v1/completions", b"{}")
        if between is not None:
            assert (b"month" in between.head) == ("tokens_per_month" in now)
            between.settle(None, 400)
        running.settle(Usage(200, 700), 200)
        again = limits.admit(before, NONE, "/v1/completions", b"{}")
        assert again is not None
        again.settle(None, 400)
        await budgets.save()
        assert budgets.used("p", 10_000)["tokens"] == 1000
        await budgets.save()
        found = await store.get(f"gateway/spent/{this_month(time.time())[0]}/p")
    assert found is not None
    assert SpentRecord.from_json(found.value).tokens == 1000


@pytest.mark.parametrize("seed", range(8))
async def test_no_addition_counts_twice_or_not_at_all(seed: int) -> None:
    """Two gateways add to two keys while answers go on, and a store loses calls and answers."""
    chance, store = random.Random(seed), ModelStore(StoreClock())
    gateways = [Limits({"month_tokens": 0}) for _ in range(2)]
    budgets = [Budgets(Client(store, 0.0), limits) for limits in gateways]
    used: Counter[str] = Counter()

    def answer(limits: Limits) -> None:
        key = chance.choice("pq")
        caller = Principal(key, frozenset(), id=key, limits=KeyLimits(tokens_per_month=1_000_000))
        grant = limits.admit(caller, NONE, "/v1/completions", b"{}")
        assert grant is not None
        tokens = chance.randint(1, 3)
        grant.settle(Usage(tokens, 0), 200)
        used[key] += tokens

    for _ in range(300):
        store.lose_answer, store.up = chance.random() < 0.4, chance.random() < 0.8
        saving = [asyncio.create_task(one.save()) for one in budgets if chance.random() < 0.7]
        while not all(task.done() for task in saving):
            answer(chance.choice(gateways))
            await asyncio.sleep(0)
        await asyncio.gather(*saving, return_exceptions=True)
        assert all(isinstance(task.exception(), StoreUnavailable | None) for task in saving)
    store.lose_answer, store.up = False, True
    for one in budgets:
        for _ in range(2):  # what was sent without an answer, and what came after it
            await one.save()
    found = {kv.key: kv.value for kv in store.list("gateway/spent/")[0]}
    month = this_month(time.time())[0]
    assert {key: SpentRecord.from_json(found[f"gateway/spent/{month}/{key}"]).tokens for key in "pq"} == used
    store.tick(3600.0, ())
    assert len(store.list("gateway/")[0]) == 2
