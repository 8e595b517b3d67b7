"""What is read out of a body about its prompt, and what is remembered of it."""

from __future__ import annotations

import random
import subprocess
import sys

import orjson
import pytest

from server.gateway.fleet import affinity
from server.gateway.fleet.affinity import NO_HINT, Hint, PrefixTable, Recent
from server.prefixes import LOOK, SIZES

CHAT = "/v1/chat/completions"


def hint(body: bytes, route: str = CHAT, scope: bytes = b"", session: bytes | None = None) -> Hint:
    return affinity.hint(route, body, scope, session)


def common(a: Hint, b: Hint) -> int:
    """Bytes of prompt that both share, as far as the hashes tell."""
    return max((SIZES[k] for k, (x, y) in enumerate(zip(a.prefixes, b.prefixes, strict=False)) if x == y), default=0)


def conversation(turns: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": f"turn {n} " * 40} for n in range(turns)]


@pytest.mark.parametrize("shared", [300, 1000, 5000, 40000, 200_000])
def test_at_least_two_thirds_of_a_shared_prefix_are_seen(shared: int) -> None:
    text = random.Random(shared).randbytes(shared).hex()[:shared].encode()
    a, b = (hint(b'{"messages":"' + text + tail) for tail in (b"one" * 500 + b'"}', b"other" * 500 + b'"}'))
    assert min(shared, SIZES[-1]) * 2 / 3 <= common(a, b) <= shared + len(b'"messages":"')


def test_a_prefix_is_found_wherever_the_field_stands() -> None:
    messages = conversation(6)
    bodies = [
        {"model": "toy", "messages": messages},
        {"max_tokens": 7, "stream": True, "messages": messages, "temperature": 0.5},
        {"messages": messages, "metadata": {"user": "x" * 3000}},
    ]
    hints = [hint(orjson.dumps(body)) for body in bodies]
    assert common(hints[0], hints[1]) == common(hints[0], hints[2]) > 0.6 * len(orjson.dumps(messages))


def test_the_next_turn_of_a_conversation_knows_the_last_one() -> None:
    before, after = (hint(orjson.dumps({"messages": conversation(n), "model": "toy"})) for n in (8, 10))
    assert common(before, after) == SIZES[len(before.prefixes) - 1]


def test_a_name_inside_a_text_is_not_the_field() -> None:
    a = hint(orjson.dumps({"user": 'say "messages"', "messages": conversation(4)}))
    b = hint(orjson.dumps({"messages": conversation(4)}))
    assert a.prefixes == b.prefixes


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 1000}),
        ("/generate", {"prompt": "x" * 1000}),
        ("/generate", {"prompt_token_ids": list(range(1000))}),
        ("/v1/responses", {"model": "toy", "instructions": "x" * 1000, "input": "hi"}),
        ("/v1/messages", {"max_tokens": 5, "system": "x" * 1000, "messages": []}),
    ],
)
def test_every_route_that_generates_has_its_field(route: str, body: dict[str, object]) -> None:
    plain = hint(orjson.dumps(body), route)
    assert plain.prefixes
    assert hint(orjson.dumps({"temperature": 0.25, **body}), route).prefixes == plain.prefixes


@pytest.mark.parametrize("route", ["/v1/models", "/tokenize", "/v1/embeddings"])
def test_other_routes_have_no_prompt(route: str) -> None:
    assert hint(b'{"messages": "' + b"x" * 1000, route) is NO_HINT


def test_scopes_share_nothing() -> None:
    body = orjson.dumps({"messages": conversation(4)})
    assert common(hint(body, scope=b"a"), hint(body, scope=b"b")) == 0
    assert hint(body, scope=b"a", session=b"s").session != hint(body, scope=b"b", session=b"s").session != 0
    assert hint(body).session == 0


def test_the_hashes_are_the_same_in_every_process() -> None:
    """Or several gateways could not agree; Python's own hash of bytes differs."""
    code = "from server.gateway.fleet.affinity import hint; print(hint('/generate', b'x' * 256, b'scope', b's'))"
    told = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    assert told == {f"{hint(b'x' * 256, '/generate', b'scope', b's')}\n".encode()}


@pytest.mark.parametrize("body", [b"", b"{}", b'"messages"', b"x" * 255])
def test_short_bodies_have_no_prefix(body: bytes) -> None:
    found = hint(body)
    assert (found.prefixes, found.key) == ([], 0)
    assert PrefixTable(8).share(found) == 0.0


def test_a_field_far_in_is_looked_for_no_further() -> None:
    """Then the body counts from its start, and what it shares with others from there."""
    far = [hint(b'{"tools":"' + b"t" * LOOK + b'","messages":"' + bytes([65 + n]) * 999) for n in range(2)]
    assert common(*far) >= LOOK * 2 // 3


def test_any_bytes_give_a_hint_of_bounded_size() -> None:
    rng = random.Random(9)
    for _ in range(500):
        body = rng.randbytes(rng.choice([0, 10, 300, 5000, 70_000]))
        cut = rng.randrange(len(body) + 1)
        found = hint(body[:cut] + b'"messages"' + body[cut:], session=rng.randbytes(3))
        assert len(found.prefixes) <= len(SIZES)
        assert all(0 <= p < 2**64 for p in (*found.prefixes, found.session))
        assert found.size <= SIZES[-1]


# memory


def test_a_table_knows_the_longest_prefix_it_was_sent() -> None:
    table = PrefixTable(1000)
    short, long = (hint(orjson.dumps({"messages": conversation(n), "model": "toy"})) for n in (6, 12))
    assert table.share(long) == 0.0
    table.add(short)
    assert 0.3 < table.share(long) < 0.6
    assert table.share(short) > 0.66
    table.add(long)
    assert table.share(long) > 0.66


def test_what_is_not_used_is_forgotten_and_memory_is_bounded() -> None:
    recent: Recent[int] = Recent(100)
    for n in range(10_000):
        recent.put(n, n)
        if n >= 5000 and n % 50 == 0:
            recent.put(-1, n)  # used all the time from here on; all keys were new before
        assert len(recent) <= 200
    assert recent.get(-1) == 9950
    assert [recent.get(n) for n in range(9950, 10_000)] == list(range(9950, 10_000))
    assert recent.get(0) is None


def test_tie_breaks_spread_and_move_only_what_they_must() -> None:
    """Rendezvous: when an instance goes, the keys of the others stay where they are."""
    seeds = [101, 202, 303, 404]
    homes = {key: max(seeds, key=lambda s: affinity.tie_break(key, s)) for key in range(1, 2001)}
    for key, home in homes.items():
        left = max(seeds[1:], key=lambda s: affinity.tie_break(key, s))
        assert left == home or home == seeds[0]
    assert all(400 < sum(home == seed for home in homes.values()) < 600 for seed in seeds)
