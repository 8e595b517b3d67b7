"""Prefixes of prompts: read out of a body, remembered, reported by instances, and where requests go by them."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from server.gateway.fleet import affinity
from server.gateway.fleet.affinity import NO_HINT, SENT_S, Hint, PrefixTable, Recent
from server.instance.prefixes import Ledger, with_shares
from server.prefixes import LOOK, PATH, SIZES
from tests.server.gateway.fleet.test_fleet import CHAT, WATCHFUL, ask, asked, chat, fleet
from tests.server.gateway.harness import RunningGateway, get, running_gateway
from tests.server.gateway.upstream import Link, Received, Upstream
from tests.waiting import eventually


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


def test_what_was_sent_counts_at_once_and_for_a_while() -> None:
    """An instance that reports confirms it by then, or has not computed it."""
    table, one = PrefixTable(1000), hint(chat(0))
    table.reported((), (), 100.0, whole=True)
    table.add(one)
    for seconds in (2.0, SENT_S - 0.1, SENT_S, 2 * SENT_S - 0.1):
        table.reported((), (), 100.0 + seconds, whole=False)
        assert table.share(one) > 0.6
    table.reported((), (), 100.0 + 2 * SENT_S, whole=False)
    assert table.share(one) == 0.0


def test_what_is_confirmed_counts_until_it_is_dropped() -> None:
    table, one = PrefixTable(1000), hint(chat(0))
    table.add(one)
    table.reported(one.prefixes, (), 0.0, whole=False)
    for n in range(10):
        table.reported((), (), n * SENT_S, whole=False)
    assert table.share(one) > 0.6
    assert table.reported((), one.prefixes[1:], 0.0, whole=False) == len(one.prefixes) - 1
    assert 0 < table.share(one) < 0.3
    assert table.reported(one.prefixes[:1], (), 0.0, whole=True) == 0
    assert table.reported((), (), 0.0, whole=True) == 1
    assert table.share(one) == 0.0


def test_what_was_sent_and_is_dropped_before_it_was_confirmed_counts_no_more() -> None:
    table, one = PrefixTable(1000), hint(chat(0))
    table.add(one)
    assert table.reported((), one.prefixes, 0.0, whole=False) == 0
    assert table.share(one) == 0.0


def test_a_table_that_is_told_of_ever_more_forgets_what_it_was_told() -> None:
    table = PrefixTable(8)
    for n in range(40):
        table.reported(range(n * 10_000, (n + 1) * 10_000), (), 0.0, whole=False)
        assert table.held <= affinity.MOST_HELD


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


# in a gateway, by what instances report

APPLICATIONS = range(8)
UPSTREAM = WATCHFUL


class Engine:
    """An instance that reports: its cache holds what it was sent, until it is told otherwise."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.offers = True
        self.asked: list[str] = []

    async def __call__(self, link: Link, received: Received) -> None:
        if received.target.startswith(PATH):
            self.asked.append(received.target)
            if self.offers:
                await link.json(self.ledger.after(received.target.partition("?after=")[2]).encode())
            else:
                await link.json(status=b"404 Not Found")
            return
        if received.method == "POST":
            self.compute(received.body)
        await link.json()

    def compute(self, body: bytes, version: str = "1") -> None:
        self.ledger.take_in([[(version, [prefix for prefix, _ in with_shares(CHAT, body, "public")], [])]])

    def drop(self, body: bytes, version: str = "1") -> None:
        self.ledger.take_in([[(version, [], [prefix for prefix, _ in with_shares(CHAT, body, "public")])]])


def held(gateway: RunningGateway, n: int = 0) -> int:
    return gateway.gateway.default.fleet.instances[f"i{n}"].prefixes.held


async def answered_by(gateway: RunningGateway, ups: list[Upstream], question: int) -> list[int]:
    """The instance that answers a new question to each application."""
    homes = []
    for application in APPLICATIONS:
        before = [len(asked(up)) for up in ups]
        assert (await ask(gateway, chat(application, question))).status == 200
        (home,) = [n for n, up in enumerate(ups) if len(asked(up)) > before[n]]
        homes.append(home)
    return homes


async def test_a_gateway_goes_where_another_one_has_sent_a_prompt(gateway: RunningGateway, tmp_path: Path) -> None:
    with running_gateway(tmp_path / "two", upstream=WATCHFUL, run_coordinator=False) as other:
        async with fleet(other, Engine(), Engine(), Engine()) as ups:
            for application in APPLICATIONS:
                await ask(other, chat(application))
            homes = await answered_by(other, ups, 1)
            assert len(set(homes)) > 1
            for n, up in enumerate(ups):  # to this gateway each goes by another name, so its tie-breaks are others
                gateway.register(up, f"again-{n}")
            instances = gateway.gateway.default.fleet.instances
            await eventually(lambda: all(instances[f"again-{n}"].cursor for n in range(3)))
            assert await answered_by(gateway, ups, 2) == homes
            picks = gateway.gateway.default.fleet.picks
            assert (picks["prefix"], picks["load"]) == (8, 0)


async def test_what_an_instance_holds_draws_and_what_it_has_evicted_does_not(gateway: RunningGateway) -> None:
    engines = [Engine(), Engine(), Engine()]
    async with fleet(gateway, *engines) as ups:
        view = gateway.gateway.default.fleet
        for application in APPLICATIONS:
            engines[1].compute(chat(application))
        await eventually(lambda: held(gateway, 1) > len(APPLICATIONS))
        assert await answered_by(gateway, ups, 1) == [1] * 8
        assert view.cached_bytes > 0.5 * view.prompt_bytes > 0
        for application in APPLICATIONS:
            for question in (0, 1):
                engines[1].drop(chat(application, question))
        await eventually(lambda: held(gateway, 1) == 0)
        view.picks.clear()
        assert len(set(await answered_by(gateway, ups, 2))) > 1, "also what it was sent from here counts no more"
        assert view.picks["prefix"] == 0
        page = (await gateway.ask(get("/metrics"))).body.decode()
        assert 'hotswap_instance_prefixes{instance_id="i1",model="toy"}' in page
        (line,) = [
            line
            for line in page.splitlines()
            if line.startswith("hotswap_instance_prefixes_dropped_total{") and "i1" in line
        ]
        assert float(line.split()[-1]) >= 8
        assert 'hotswap_gateway_routed_prompt_bytes_total{cached="likely",model="toy"}' in page


async def test_an_instance_that_reports_nothing_is_known_by_what_it_was_sent(gateway: RunningGateway) -> None:
    engines = [Engine(), Engine(), Engine()]
    for engine in engines:
        engine.offers = False
    async with fleet(gateway, *engines) as ups:
        instances = gateway.gateway.default.fleet.instances
        await eventually(lambda: not any(instance.reports for instance in instances.values()))
        homes = await answered_by(gateway, ups, 1)
        assert len(set(homes)) > 1
        for question in range(2, 5):
            assert await answered_by(gateway, ups, question) == homes
        picks = gateway.gateway.default.fleet.picks
        assert (picks["load"], picks["prefix"]) == (8, 24)
        assert [len(engine.asked) for engine in engines] == [1] * 3, "it is not asked again"


async def test_a_process_that_starts_anew_holds_nothing(gateway: RunningGateway) -> None:
    engine, spare = Engine(), Engine()
    async with fleet(gateway, engine, spare) as ups:
        engine.compute(chat(0))
        await eventually(lambda: held(gateway) > 0)
        engine.ledger = Ledger()
        await eventually(lambda: held(gateway) == 0)
        engine.compute(chat(1))
        await eventually(lambda: held(gateway) > 0)
        engine.offers = False  # an older release at the same address
        gateway.register(ups[0], "i0", key="another-process")
        instance = gateway.gateway.default.fleet.instances["i0"]
        await eventually(lambda: not instance.reports)
        assert (held(gateway), len(instance.prefixes), instance.cursor) == (0, 0, "")


async def test_each_version_of_the_weights_has_its_own(gateway: RunningGateway) -> None:
    engine, spare = Engine(), Engine()
    async with fleet(gateway, engine, spare) as ups:
        for application in APPLICATIONS:
            engine.compute(chat(application), "1")
        engine.compute(chat(0), "2")
        of_one = len({prefix for each in APPLICATIONS for prefix, _ in with_shares(CHAT, chat(each), "public")})
        await eventually(lambda: held(gateway) == of_one > 8)
        gateway.register(ups[0], "i0", active_version=2)
        await eventually(lambda: 0 < held(gateway) < of_one)
        gateway.register(ups[0], "i0", active_version=1)
        assert held(gateway) == of_one, "a rollback finds its blocks again"
