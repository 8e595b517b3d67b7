"""What instances report of their prefix caches, and where requests go by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.gateway.fleet import affinity
from server.gateway.fleet.affinity import SENT_S, Hint, PrefixTable
from server.instance.prefixes import Ledger, with_shares
from server.prefixes import PATH
from tests.server.gateway.fleet.test_fleet import CHAT, WATCHFUL, ask, asked, chat, fleet
from tests.server.gateway.harness import RunningGateway, get, running_gateway
from tests.server.gateway.upstream import Link, Received, Upstream
from tests.waiting import eventually

APPLICATIONS = range(8)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path, upstream=WATCHFUL, run_coordinator=False) as g:
        yield g


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

    def restart(self) -> None:
        self.ledger = Ledger()


def held(gateway: RunningGateway, n: int = 0) -> int:
    return gateway.gateway.default.fleet.instances[f"i{n}"].prefixes.held


async def answered_by(gateway: RunningGateway, ups: list[Upstream], question: int) -> list[int]:
    """Which instance answers a new question to each application."""
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
        for question in range(2, 5):
            assert await answered_by(gateway, ups, question) == homes
        assert [len(engine.asked) for engine in engines] == [1] * 3, "it is not asked again"


async def test_a_process_that_starts_anew_holds_nothing(gateway: RunningGateway) -> None:
    engine, spare = Engine(), Engine()
    async with fleet(gateway, engine, spare) as ups:
        engine.compute(chat(0))
        await eventually(lambda: held(gateway) > 0)
        engine.restart()
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
        await eventually(lambda: held(gateway) > 8)
        of_one = held(gateway)
        gateway.register(ups[0], "i0", active_version=2)
        await eventually(lambda: 0 < held(gateway) < of_one)
        gateway.register(ups[0], "i0", active_version=1)
        assert held(gateway) == of_one, "a rollback finds its blocks again"


# the table


def hint(body: bytes) -> Hint:
    return affinity.hint(CHAT, body, b"", None)


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
