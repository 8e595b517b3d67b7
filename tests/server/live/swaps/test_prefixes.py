"""Reports of a real instance on its prefix cache: what it computed, under which version, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson
import pytest

from loadtest.models.checkpoints import make_checkpoint
from server.instance.prefixes import with_shares
from server.prefixes import PATH, Report, decode
from tests.live import LiveServer
from tests.waiting import wait_until

pytestmark = pytest.mark.engine
ROUTE = "/v1/completions"
TOKENS = 1000


def prompt(number: int) -> list[int]:
    """No two have a block in common."""
    return [number % 400 + 5, number // 400 + 5, *((7 * n) % 400 + 5 for n in range(TOKENS - 2))]


def body(number: int, model: str) -> bytes:
    return orjson.dumps({"model": model, "prompt": prompt(number), "max_tokens": 1})


class Watcher:
    """Asks the instance as a gateway does."""

    def __init__(self, live: LiveServer) -> None:
        self.live = live
        (options,) = live.direct()
        self.http = httpx.Client(**options, timeout=60)
        self.cursor = ""
        self.held: dict[int, set[int]] = {}

    def ask(self) -> Report:
        answer = self.http.get(PATH, params={"after": self.cursor})
        assert answer.status_code == 200, answer.text
        report = decode(answer.content)
        self.cursor = report.cursor
        if report.whole:
            self.held.clear()
        for version, prefixes in report.held.items():
            self.held.setdefault(version, set()).update(prefixes)
        for version, prefixes in report.dropped.items():
            self.held.setdefault(version, set()).difference_update(prefixes)
        return report

    def complete(self, raw: bytes) -> set[int]:
        """The prefixes of a prompt that the gateway was sent."""
        answer = self.live.client.post(ROUTE, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        return {prefix for prefix, _ in with_shares(ROUTE, raw, "public")}

    def holds(self, version: int, prefixes: set[int], *, most: int | None = None) -> bool:
        """Whether so many of them are held; None: those that fill a block, which is all but the shortest."""
        self.ask()
        found = len(prefixes & self.held.get(version, set()))
        return found >= len(prefixes) - 3 if most is None else found <= most


@pytest.fixture
def watcher(live: LiveServer) -> Iterator[Watcher]:
    found = Watcher(live)
    with found.http:
        yield found


def test_what_was_computed_is_reported_until_it_is_evicted(watcher: Watcher, live: LiveServer) -> None:
    version = live.active()
    prefixes = watcher.complete(body(100_001, live.name))
    assert len(prefixes) >= 5
    wait_until(lambda: watcher.holds(version, prefixes), 60, what="a prompt that was computed is reported")
    more = iter(range(10_000))

    def evicted() -> bool:
        others = [prompt(next(more)) for _ in range(24)]
        answer = live.client.post(ROUTE, json={"model": live.name, "prompt": others, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        return watcher.holds(version, prefixes, most=0)

    wait_until(evicted, 250, what="others have taken its blocks")


def test_a_swap_keeps_what_each_version_has_computed_apart(
    watcher: Watcher, live: LiveServer, checkpoints: dict[str, Path]
) -> None:
    one = live.push(checkpoints["a"])
    prefixes = watcher.complete(body(100_002, live.name))
    wait_until(lambda: watcher.holds(one, prefixes), 60)
    two = live.push(checkpoints["b"])
    assert watcher.holds(two, prefixes, most=0)
    assert watcher.holds(one, prefixes), "it is found again if that version returns"
    watcher.complete(body(100_002, live.name))
    wait_until(lambda: watcher.holds(two, prefixes), 60)
    assert watcher.holds(one, prefixes)


def test_the_gateway_knows_what_it_has_not_sent(watcher: Watcher, live: LiveServer, tmp_path: Path) -> None:
    """A prompt that came to the instance by another way. Under weights that never ran no prefix is held, so each that
    the gateway counts is of this prompt: in a full cache of other weights, a prompt displaces as many as it adds."""
    version = live.push(make_checkpoint(tmp_path / "new", seed=100_003, scale=3.0))
    wait_until(lambda: live.gateway_metric("hotswap_instance_prefixes") == 0, 60)
    raw = body(100_003, live.name)
    answer = watcher.http.post(ROUTE, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    prefixes = {prefix for prefix, _ in with_shares(ROUTE, raw, "public")}
    wait_until(lambda: watcher.holds(version, prefixes), 60)
    wait_until(lambda: live.gateway_metric("hotswap_instance_prefixes") == len(watcher.held[version]), 60)
