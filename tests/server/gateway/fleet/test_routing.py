"""The policy of who answers, with made-up candidates and with many random ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import pytest

from server.errors import ConfigError
from server.gateway import UpstreamSettings
from server.gateway.fleet import affinity, routing
from server.gateway.fleet.affinity import NO_HINT, Hint
from server.gateway.fleet.instance import Instance, Signals, pressure
from server.gateway.fleet.routing import C
from tests.server.gateway.harness import post, running_gateway
from weightsync.control.records import (
    ActiveRecord,
    InstanceRecord,
    InstanceState,
    ShareRecord,
    SwapPhase,
    SwapRecord,
)

OWN = __name__
PROMPT = Hint([11, 22], 512, 0)
SESSION = Hint([], 0, 7)


@dataclass
class Seen:
    """A candidate as the policy sees it."""

    state: str = "SERVING"
    load: float = 0.0
    id: str = ""
    failed_at: float = 0.0
    picked_at: int = 0
    share: float = 0.0
    turn: int = 0

    def cached(self, hint: Hint) -> float:
        assert hint is not NO_HINT
        return self.share

    def tie_break(self, hint: Hint) -> int:
        return self.turn


@pytest.mark.parametrize(
    ("candidates", "best"),
    [
        ([Seen(load=2), Seen(load=1)], 1),
        ([Seen(picked_at=5), Seen(picked_at=4)], 1),
        ([Seen("STAGING"), Seen("STAGED", load=9)], 1),
        ([Seen(failed_at=99.5), Seen(load=9)], 1),
        ([Seen(failed_at=99.5), Seen("STAGING", load=9)], 1),
        ([Seen(failed_at=98.0), Seen(load=9)], 0),
        ([Seen(failed_at=99.5)], 0),
        ([Seen("STAGING")], 0),
        ([], None),
    ],
)
def test_without_a_hint_the_least_loaded_and_best_placed(candidates: list[Seen], best: int | None) -> None:
    assert routing.pick(candidates, now=100.0) is (None if best is None else candidates[best])


@pytest.mark.parametrize(
    ("candidates", "best"),
    [
        ([Seen(load=3, share=1.0), Seen()], 0),  # 3 < 0 + 4 + 1.5 / 4
        ([Seen(load=5, share=1.0), Seen()], 1),
        ([Seen(load=3, share=0.5), Seen()], 1),  # half of the prompt is worth half of that
        ([Seen(load=110, share=1.0), Seen(load=90)], 0),  # 20 < 4 + 25
        ([Seen(load=140, share=1.0), Seen(load=90)], 1),
        ([Seen(share=0.5), Seen(share=1.0)], 1),
        ([Seen(share=1.0, load=1), Seen(share=1.0)], 1),
        ([Seen(turn=1), Seen(turn=2)], 1),
        ([Seen("STAGING", share=1.0), Seen(load=9)], 1),
        ([Seen(failed_at=99.5, share=1.0), Seen(load=3)], 1),
    ],
)
@pytest.mark.parametrize("hint", [PROMPT, SESSION])
def test_a_cached_prompt_is_worth_some_load(candidates: list[Seen], best: int, hint: Hint) -> None:
    assert routing.pick(candidates, 100.0, hint) is candidates[best]


def test_affinity_is_bounded_by_load_whatever_the_load() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        scale = rng.choice([1, 10, 200])
        seen = [Seen(load=rng.randrange(scale + 1), share=rng.random()) for _ in range(rng.randrange(2, 9))]
        best = routing.pick(seen, 100.0, PROMPT)
        mean = sum(c.load for c in seen) / len(seen)
        assert best is not None
        assert best.load <= min(c.load for c in seen) + routing.SLACK + routing.SPREAD * mean
        better = [c for c in seen if c.load <= best.load and c.share >= best.share and c != best]
        assert all(c.load == best.load and c.share == best.share for c in better), "somebody idler knows more of it"


# instances as candidates

RECORD = InstanceRecord("a", "http://127.0.0.1:9", "SERVING", active_version=1, active_epoch=1)


def instances(count: int) -> list[Instance]:
    return [Instance(replace(RECORD, id=f"i{n}"), UpstreamSettings()) for n in range(count)]


@dataclass
class Traffic:
    """Requests sent to instances by the policy; each stays `stay` requests long."""

    fleet: list[Instance]
    stay: int
    running: list[Instance] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    hits: int = 0
    most_over_mean: float = 0.0

    def send(self, body: bytes) -> None:
        hint = affinity.hint("/v1/chat/completions", body, b"", None)
        chosen = routing.pick(self.fleet, 0.0, hint)
        assert chosen is not None
        self.hits += chosen.cached(hint) >= 0.5
        chosen.prefixes.add(hint)
        chosen.inflight += 1
        self.sent[chosen.id] += 1
        self.running.append(chosen)
        if len(self.running) > self.stay:
            self.running.pop(0).inflight -= 1
        mean = sum(i.inflight for i in self.fleet) / len(self.fleet)
        self.most_over_mean = max(self.most_over_mean, max(i.inflight for i in self.fleet) - mean)


def prompt(application: int, question: int) -> bytes:
    system = f"Application {application}. " * 80
    return b'{"model": "toy", "messages": [{"role": "system", "content": "%b question %d"}]}' % (
        system.encode(),
        question,
    )


def test_skewed_prefixes_stay_together_within_the_bound() -> None:
    """Half of the requests are of one application, the rest of thirty: nearly all meet their prefix again, and the
    busiest instance has little more than its share."""
    rng = random.Random(5)
    traffic = Traffic(instances(4), stay=64)
    for n in range(6000):
        traffic.send(prompt(0 if rng.random() < 0.5 else rng.randrange(1, 31), n))
    assert traffic.hits > 0.97 * 6000
    assert traffic.most_over_mean <= routing.SLACK + routing.SPREAD * 17 + 1
    assert min(traffic.sent.values()) > 0.6 * 6000 / 4, traffic.sent


def test_few_prefixes_are_cached_once_while_there_is_room() -> None:
    """Eight applications, little load: each has one instance, so each prefix is computed once."""
    rng = random.Random(6)
    traffic = Traffic(instances(4), stay=2)
    for n in range(800):
        traffic.send(prompt(rng.randrange(8), n))
    assert traffic.hits == 800 - 8


def test_gateways_agree_on_who_takes_a_new_prompt() -> None:
    """Without a word between them: equal instances are ordered by the prompt, differently for each."""
    here, there = instances(4), list(reversed(instances(4)))
    chosen = []
    for n in range(200):
        hint = affinity.hint("/v1/chat/completions", prompt(n, 0), b"", None)
        a, b = routing.pick(here, 0.0, hint), routing.pick(there, 0.0, hint)
        assert a is not None
        assert b is not None
        assert a.id == b.id
        chosen.append(a.id)
    assert min(Counter(chosen).values()) > 25, Counter(chosen)


def test_load_is_what_was_sent_from_here_and_what_others_had_at_the_last_scrape() -> None:
    (i,) = instances(1)
    i.inflight = 3
    assert i.load == 3
    i.scraped(Signals(num_requests_running=5), inflight_then=2)  # three of others
    assert i.load == 6
    i.inflight = 10  # sent since: counted at once
    assert i.load == 13
    i.scraped(Signals(num_requests_running=4), inflight_then=10)  # it has not seen ours yet; nobody has fewer than ours
    assert i.load == 10
    i.scraped(Signals(num_requests_running=10, num_requests_waiting=2), inflight_then=10)
    assert i.load == 10 + 2 + 2  # two are others' or ours that wait: they count, and once more for waiting
    i.scraped(None, 10)
    assert i.load == 10


@pytest.mark.parametrize(("usage", "more"), [(0.0, 0.0), (0.8, 0.0), (0.9, 4.0), (1.0, 8.0)])
def test_a_cache_that_is_nearly_full_is_a_load(usage: float, more: float) -> None:
    assert pressure(Signals(kv_cache_usage=usage)) == pytest.approx(more)


# who may be asked at all

SERVING = InstanceRecord("a", "http://127.0.0.1:9", "SERVING", active_version=4, active_epoch=6, fingerprint="f4")
BEFORE = replace(SERVING, active_version=3, active_epoch=5, fingerprint="f3")
ACTIVE = ActiveRecord(version=4, epoch=6, previous=3, swap_id="s", committed_at=0.0, fingerprint="f4")


@pytest.mark.parametrize("state", get_args(InstanceState))
def test_only_serving_states_are_asked(state: InstanceState) -> None:
    assert routing.eligible(replace(SERVING, state=state), ACTIVE, None) is (state in ("SERVING", "STAGED", "STAGING"))


def test_nobody_on_trial_is_asked_whatever_its_record_says() -> None:
    """Requests of any kind, pinned, repeated or not, go to eligible instances alone."""
    swap = SwapRecord("t", 5, "canary", ("a", "b"), deadline=0.0, opened_at=0.0, mode="rolling", canary="a")
    trying = replace(ACTIVE, trial=ShareRecord(5, 0.0, ("a",), "f5"))
    tries = replace(SERVING, state="COMMITTING", active_version=5, active_epoch=7, fingerprint="f5")
    for record in (SERVING, replace(SERVING, state="STAGED"), tries, replace(tries, state="SERVING")):
        assert not routing.eligible(record, trying, swap)
    assert routing.eligible(replace(SERVING, id="b"), trying, swap)
    assert routing.eligible(SERVING, ACTIVE, replace(swap, phase="aborted")), "it has flipped back"
    assert not routing.eligible(replace(tries, state="SERVING"), ACTIVE, replace(swap, phase="aborted"))


@pytest.mark.parametrize(
    ("record", "active", "phase", "fresh"),
    [
        (SERVING, ACTIVE, None, True),
        (SERVING, None, None, True),
        (replace(SERVING, fingerprint=None), ACTIVE, None, True),
        (SERVING, replace(ACTIVE, fingerprint=""), None, True),
        (replace(SERVING, fingerprint="f3"), ACTIVE, None, False),
        (replace(SERVING, active_version=3), ACTIVE, None, False),
        (BEFORE, ACTIVE, None, False),
        (BEFORE, ACTIVE, "commit", True),
        (BEFORE, ACTIVE, "prepare", True),  # the commit record was seen, the swap's new phase not yet
        (BEFORE, ACTIVE, "done", False),
        (BEFORE, replace(ACTIVE, swap_id="another"), "prepare", False),
        (replace(BEFORE, active_epoch=4), ACTIVE, "commit", False),
        (replace(SERVING, fingerprint="f3"), ACTIVE, "commit", False),
        (replace(SERVING, active_epoch=7), ACTIVE, "done", False),
    ],
)
def test_who_is_fresh(
    record: InstanceRecord, active: ActiveRecord | None, phase: SwapPhase | None, fresh: bool
) -> None:
    swap = SwapRecord("s", 4, phase, ("a",), deadline=0.0, opened_at=0.0) if phase else None
    assert routing.fresh(record, active, swap) is fresh


# policies of a module of the user's, which is this one

NO_POLICY = "a name is none"


class Alternating:
    """By name, one after the other: it keeps state."""

    def __init__(self) -> None:
        self.turn = 0

    def __call__(self, candidates: Sequence[C], now: float, hint: Hint) -> C:
        self.turn += 1
        return sorted(candidates, key=lambda candidate: candidate.id)[self.turn % len(candidates)]


class Needy:
    """It cannot be made without arguments."""

    def __init__(self, something: int) -> None: ...


def raises(candidates: Sequence[C], now: float, hint: Hint) -> C:
    """A policy with a fault."""
    raise RuntimeError("a fault")


def invents(candidates: Sequence[C], now: float, hint: Hint) -> str:
    """A policy that names no candidate."""
    return "nobody"


def test_policies_that_look_at_no_prefix() -> None:
    seen = [Seen(load=3, picked_at=1, share=1.0), Seen(load=1, picked_at=3), Seen(load=1, picked_at=2)]
    assert routing.pick(seen, 100.0, PROMPT, routing.find("least-loaded")) is seen[2]
    assert routing.pick(seen, 100.0, PROMPT, routing.find("round-robin")) is seen[0]
    seen[0].state = "STAGING"
    assert routing.pick(seen, 100.0, PROMPT, routing.find("round-robin")) is seen[2]


@pytest.mark.parametrize(
    "name", ["afinity", "", "tests:", ":f", "no.such.module:f", f"{OWN}:nothing", f"{OWN}:NO_POLICY", f"{OWN}:Needy"]
)
def test_a_policy_that_is_none_is_named_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        routing.find(name)
    assert str(caught.value).startswith(f"--routing {name}: ")
    assert all(each in str(caught.value) for each in (*routing.POLICIES, "MODULE:NAME"))


async def test_a_gateway_asks_whom_a_policy_of_a_module_of_its_own_names(tmp_path: Path) -> None:
    settings = UpstreamSettings(routing=f"{OWN}:Alternating")
    with running_gateway(tmp_path, upstream=settings) as gateway:
        async with gateway.instance(instance_id="i1") as first, gateway.instance(instance_id="i2") as second:
            for _ in range(6):
                assert (await gateway.ask(post())).status == 200
            asked = [sum(r.target == "/v1/completions" for r in up.requests) for up in (first, second)]
    assert asked == [3, 3]


async def test_a_policy_that_fails_costs_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("raises", "invents"):
        with running_gateway(tmp_path / name, upstream=UpstreamSettings(routing=f"{OWN}:{name}")) as gateway:
            async with gateway.instance(instance_id="i1"), gateway.instance(instance_id="i2"):
                answers = [await gateway.ask(post()) for _ in range(3)]
        assert [answer.status for answer in answers] == [200] * 3
    assert sum("has failed; affinity chooses" in record.message for record in caplog.records) == 2
