"""What a key uses: the sliding window against a plain list of what was taken, estimates, headers, and what it costs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import BadRequest
from server.gateway.access.keys import Principal
from server.gateway.access.limits import BYTES_PER_TOKEN, MOST, SLOTS, USUAL_OUTPUT, Limits, RateLimited, Window, reckon
from server.gateway.wire.bodies import NONE, Usage, check_object
from server.key_limits import KeyLimits

STEPS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 9), st.booleans()), max_size=60)
CHAT = "/v1/chat/completions"
BATCH = f"{CHAT}/batch"
EMBEDDINGS = "/v1/embeddings"


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


@given(st.integers(1, 50), st.lists(st.integers(0, 20), min_size=1, max_size=100))
def test_no_minute_holds_more_than_the_limit(limit: int, waits: list[int]) -> None:
    now, admitted = 0, []
    window = Window(limit, now)
    for wait in waits:
        now += wait
        window.advance(now)
        for _ in range(limit):
            if window.used < window.allotted:
                window.take(1)
                admitted.append(now)
    for start in admitted:
        assert sum(start <= at < start + 60 for at in admitted) <= limit


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
    ],
)
def test_what_an_answer_is_expected_to_take(route: str, body: bytes, tokens: int) -> None:
    assert reckon(check_object(body), route, len(body)).output == tokens


def test_what_a_prompt_is_taken_for() -> None:
    def prompt(field: bytes, value: bytes, route: str) -> int:
        body = b'{"%b":%b}' % (field, value)
        return reckon(check_object(body), route, len(body)).prompt

    text = b'"' + b"x" * 400 + b'"'
    ids = b"[" + b",".join([b"7"] * 300) + b"]"
    for field, route in ((b"prompt", "/v1/completions"), (b"prompt_token_ids", "/generate"), (b"input", EMBEDDINGS)):
        assert prompt(field, text, route) == (len(text) + len(field) + 5) // BYTES_PER_TOKEN + 1
        assert prompt(field, ids, route) == 300
    assert prompt(b"input", b"[%b,%b]" % (ids, ids), EMBEDDINGS) == 600


def test_a_keys_own_bound_is_what_an_answer_may_take() -> None:
    assert reckon(check_object(b"{}"), CHAT, 2, 50).output == 50
    assert reckon(check_object(b'{"max_tokens":7}'), CHAT, 2, 50).output == 7
    assert reckon(check_object(b"{}"), "/v1/completions", 2, 50).output == 16


def test_a_request_of_many_prompts_takes_what_all_of_them_may_cost(clock: Clock) -> None:
    limits, p = Limits(Counter()), principal(tokens_per_min=400)
    body = b'{"prompt":[' + b",".join([b"[5]"] * 60) + b'],"max_tokens":200}'
    with pytest.raises(BadRequest) as caught:
        limits.admit(p, check_object(body), "/v1/completions", body)
    assert caught.value.code == "request_over_limit"


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
    with pytest.raises(RateLimited):
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
    with pytest.raises(RateLimited):
        limits.admit(p, check_object(body), CHAT, body)
    (meter,) = limits.meters()
    asked = {name.partition("/")[2]: quota.asked for name, quota in meter.quotas().items()}
    assert asked == {"requests": 2, "concurrency": 2, "tokens": 50}


def test_one_key_may_reserve_its_limit_to_the_last_token(clock: Clock) -> None:
    limits, p = Limits(Counter()), principal(requests_per_min=9, tokens_per_min=100)
    body = b'{"max_tokens":45}'  # 5 + 45
    for _ in range(2):
        assert limits.admit(p, check_object(body), CHAT, body) is not None
    with pytest.raises(RateLimited) as caught:
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
    with pytest.raises(RateLimited) as caught:
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
    with pytest.raises(RateLimited) as caught:
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
        with pytest.raises(RateLimited) as caught:
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
        with pytest.raises((RateLimited, BadRequest)):
            limits.admit(p, check_object(body), CHAT, body)
    assert limits.head(p) == before
    grant.settle(None, 499)
    grant.settle(None, 499)
    with pytest.raises(BadRequest):
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
