"""The evidence of a release, through a gateway: each request counts for the version that was drawn for it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from server.gateway import UpstreamSettings
from server.gateway.admission import Request
from server.gateway.config import NamedSettings
from server.gateway.fleet.instance import Instance
from server.gateway.fleet.shadow import Shadows
from server.gateway.observe.stats import Finished
from server.gateway.release.answers import AnswerReader
from server.gateway.release.evidence import Observer, Watched, summed
from server.gateway.release.judge import LOAD, Evidence, examine, key_of, rule
from server.gateway.release.policy import Condition, parse
from server.gateway.release.statistics import Tally
from server.gateway.routes import find
from server.gateway.wire.head import RequestHead
from tests.server.gateway.harness import KEYS, RunningGateway, post, running_gateway
from tests.server.gateway.upstream import Handler, Link, Received, answering, cut, never_answer, sending, upstream
from tests.waiting import eventually
from weightsync.control.records import ActiveRecord, InstanceRecord, ShareRecord, SplitRecord

ANSWER = {
    "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}
REFUSED = b"x-hotswap-refused: %b\r\n"
CANDIDATE, STABLE = 13, 12


def writes(version: int) -> Handler:
    return answering(orjson.dumps(ANSWER), extra=b"x-hotswap-weight-version: %d\r\n" % version)


async def breaks_off(link: Link, received: Received) -> None:
    await link.send(b"HTTP/1.1 200 OK\r\nx-hotswap-weight-version: 13\r\ncontent-length: 50\r\n\r\n{")
    await cut(link, received)


FAILURES: dict[str, Handler] = {
    "its engine dies of it": answering(b"{}", b"503 Service Unavailable", REFUSED % b"lost"),
    "its connection ends": cut,
    "it answers with 500": answering(b"{}", b"500 Internal Server Error"),
    "its answer breaks off": breaks_off,
    "it answers no HTTP": sending(b"no HTTP\r\n\r\n" * 100),
}


def every(count: int, bad: Handler, good: Handler) -> Handler:
    """The first request of so many gets `bad`, however often it is sent."""
    seen: list[str] = []

    async def answer(link: Link, received: Received) -> None:
        if received.method != "POST":
            await good(link, received)
            return
        name = received.headers["x-request-id"]
        if name not in seen:
            seen.append(name)
        await (good if seen.index(name) % count else bad)(link, received)

    return answer


def evidence(observer: Observer, *conditions: Condition) -> list[Evidence]:
    _, record = observer.taken() or (None, None)
    assert record is not None
    found = summed([record], conditions, CANDIDATE, STABLE)
    return [found[key_of(condition)] for condition in conditions]


async def divided(gateway: RunningGateway) -> Observer:
    """Each version has half of the requests, and is counted."""
    fleet, stats = gateway.gateway.default.fleet, gateway.gateway.default.stats
    active = ActiveRecord(STABLE, 1, None, "s", 0.0, split=SplitRecord((ShareRecord(CANDIDATE, 50.0, ("i13",)),)))
    gateway.store.put(KEYS.active, active.to_json())
    await eventually(lambda: fleet.active == active and len(fleet.serving) == 2)
    observer = Observer(stats.watchers)
    observer.watch(Watched("r", 0, frozenset({CANDIDATE, STABLE})))
    return observer


class Ended:
    """Counts requests that are over, after the watchers before it were told of them."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self, head: RequestHead) -> None:
        return None

    def end(self, finished: Finished) -> None:
        self.count += 1


@contextlib.asynccontextmanager
async def over(gateway: RunningGateway, count: int) -> AsyncIterator[None]:
    """So many requests: a client has its answer a moment before the gateway counts it."""
    ended = Ended()
    gateway.gateway.default.stats.watchers.append(ended)
    yield
    await eventually(lambda: ended.count == count)


async def asked(gateway: RunningGateway, count: int, headers: str = "") -> Counter[int]:
    """Requests one after the other: how many got which status, 0 for an answer that broke off."""
    found: Counter[int] = Counter()
    async with over(gateway, count):
        for _ in range(count):
            found[await status(gateway, headers)] += 1
    return found


async def status(gateway: RunningGateway, headers: str = "") -> int:
    """0 for an answer that broke off."""
    try:
        return (await gateway.ask(post(body={"prompt": "x"}, headers=headers))).status
    except asyncio.IncompleteReadError:
        return 0


ERRORS = Condition("errors", max_increase=0.05)


@pytest.mark.parametrize("way", FAILURES)
async def test_each_failure_counts_for_the_version_that_was_drawn(tmp_path: Path, way: str) -> None:
    """Also where another version answers in its place: the clients see nothing, and the judge sees all of it."""
    with running_gateway(tmp_path, run_coordinator=False, upstream=UpstreamSettings(scrape_interval_s=3600)) as gateway:
        bad = gateway.instance(every(3, FAILURES[way], writes(CANDIDATE)), "i13", active_version=CANDIDATE)
        async with gateway.instance(writes(STABLE), "i12", active_version=STABLE), bad as candidate:
            observer = await divided(gateway)
            statuses = await asked(gateway, 300)
            (errors,) = evidence(observer, ERRORS)
            wrote = len({r.headers["x-request-id"] for r in candidate.requests if r.method == "POST"}) * 2 // 3
            assert (errors.stable.count, errors.stable.total) == (150, 0), "no other version's failure is its own"
            assert errors.candidate.count == 150, "each request that was drawn for it is there"
            assert abs(errors.candidate.total - (150 - wrote)) <= 1, "and it failed all that it did not write"
            assert examine(ERRORS, errors, 0.01).state == "harmed"
            if way in ("its engine dies of it", "its connection ends"):
                assert statuses == {200: 300}


async def test_clients_that_give_up_count(tmp_path: Path) -> None:
    """The candidate hangs on one request in three: its answers are the fast ones, and the others are evidence too."""
    with running_gateway(tmp_path, run_coordinator=False, upstream=UpstreamSettings(scrape_interval_s=3600)) as gateway:
        hangs = asyncio.Event()

        async def hang(link: Link, received: Received) -> None:
            hangs.set()
            await never_answer(link, received)

        bad = gateway.instance(every(3, hang, writes(CANDIDATE)), "i13", active_version=CANDIDATE)
        async with gateway.instance(writes(STABLE), "i12", active_version=STABLE), bad:
            observer = await divided(gateway)
            for _ in range(60):
                hangs.clear()
                async with gateway.client(post(body={"prompt": "x"})) as client:
                    waiting = [asyncio.create_task(client.answer()), asyncio.create_task(hangs.wait())]
                    _, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in rest:
                        task.cancel()

            def found() -> list[Evidence]:
                observer.again()
                return evidence(observer, Condition("left", max_increase=0.05), ERRORS)

            await eventually(lambda: found()[0].candidate.count == 30)
            left, errors = found()
            assert (left.candidate.total, left.stable) == (10, Tally(30, 0, 0))
            assert (errors.candidate.total, errors.stable.total) == (0, 0)


async def test_requests_that_are_passed_on_leave_nothing_to_compare(tmp_path: Path) -> None:
    """The candidate refuses one request in three, and the stable version answers it."""
    with running_gateway(tmp_path, run_coordinator=False, upstream=UpstreamSettings(scrape_interval_s=3600)) as gateway:
        refuses = every(3, answering(b"{}", b"409 Conflict", REFUSED % b"version"), writes(CANDIDATE))
        bad = gateway.instance(refuses, "i13", active_version=CANDIDATE)
        async with gateway.instance(writes(STABLE), "i12", active_version=STABLE), bad:
            observer = await divided(gateway)
            assert await asked(gateway, 300) == {200: 300}
            policy = parse("steps: [{traffic: 50, for: 1}]")
            left, arrived = evidence(observer, *policy.of_step(0))
            assert (arrived.candidate, arrived.stable) == (Tally(150, 100, 100), Tally(150, 150, 150))
            assert (left.candidate.total, left.stable.total) == (0, 0)
            ruling = rule(policy, 0, {"arrived": arrived, "left": left}, lasted_s=1.0)
            assert (ruling.kind, "is not valid" in ruling.reason) == ("hold", True)


async def test_the_load_of_each_version_is_counted(tmp_path: Path) -> None:
    """Four requests are there at once, and each version has half of them."""
    with running_gateway(tmp_path, run_coordinator=False) as gateway:
        go_on = asyncio.Event()

        def slowly(version: int) -> Handler:
            async def answer(link: Link, received: Received) -> None:
                if received.method == "POST":
                    await go_on.wait()
                await writes(version)(link, received)

            return answer

        second = gateway.instance(slowly(CANDIDATE), "i13", active_version=CANDIDATE)
        async with gateway.instance(slowly(STABLE), "i12", active_version=STABLE) as first, second:
            observer = await divided(gateway)
            async with over(gateway, 4):
                asking = [asyncio.create_task(status(gateway)) for _ in range(4)]
                await eventually(lambda: sum(each.method == "POST" for each in first.requests) == 2)
                await eventually(lambda: gateway.gateway.default.fleet.instances["i13"].working == 2)
                go_on.set()
                assert await asyncio.gather(*asking) == [200] * 4
            _, record = observer.taken() or (None, None)
            assert record is not None
            load = summed([record], (), CANDIDATE, STABLE)[LOAD]
            assert (load.candidate, load.stable) == (Tally(2, 3.0, 5.0), Tally(2, 3.0, 5.0))


async def test_a_request_that_chose_its_version_is_no_evidence(tmp_path: Path) -> None:
    """A comparison is of what chance has assigned: clients that pin the candidate may ask otherwise than others."""
    with running_gateway(tmp_path, run_coordinator=False) as gateway:
        good = gateway.instance(writes(CANDIDATE), "i13", active_version=CANDIDATE)
        async with gateway.instance(writes(STABLE), "i12", active_version=STABLE), good:
            observer = await divided(gateway)
            for pin in ("x-hotswap-version: 13\r\n", "x-hotswap-min-version: 13\r\n"):
                assert await asked(gateway, 5, pin) == {200: 5}
            assert observer.taken() is None
            assert await asked(gateway, 10, "x-hotswap-min-version: 12\r\n") == {200: 10}
            (errors,) = evidence(observer, ERRORS)
            assert (errors.candidate.count, errors.stable.count) == (5, 5)


class NoDesk:
    """Answers of clients are none of these tests' concern."""

    def add(self, _: object) -> None:
        pass

    remove = add


@contextlib.asynccontextmanager
async def shadowing(handler: Handler) -> AsyncIterator[tuple[Shadows, AnswerReader, Observer, Callable[[], None]]]:
    """Repetitions on a version whose instance answers by `handler`, their judge, and what repeats one request."""
    async with upstream(handler) as at:
        record = InstanceRecord("i13", at.address, "SERVING", CANDIDATE, 1, max_num_seqs=64)
        tried = Instance(record, UpstreamSettings())
        shadows, observer = Shadows(SimpleNamespace(serving=[tried])), Observer()
        split = SplitRecord((ShareRecord(CANDIDATE, 0.0, ("i13",), shadow=100.0),))
        shadows.follow(ActiveRecord(STABLE, 1, None, "s", 0.0, split=split))
        live = Instance(replace(record, id="i12", active_version=STABLE), UpstreamSettings())
        reader = AnswerReader("toy", NoDesk(), shadows, observer, NamedSettings())  # type: ignore[arg-type]
        names = itertools.count()

        def repeat() -> None:
            head = RequestHead(b"r%d" % next(names), b"")
            shadows.sample(
                Request(find(b"/v1/completions")[0], head, b'{"prompt":"x"}', None, (), False, True), live, 0
            )

        try:
            yield shadows, reader, observer, repeat
        finally:
            shadows.close()
            await reader.stop()


SHADOWED = parse(
    "steps: [{traffic: 0, shadow: 100, for: 1, conditions: [{metric: errors, max: 0.1, answers: shadow}]}]"
)


@pytest.mark.parametrize("way", FAILURES)
async def test_each_failure_of_a_shadow_answer_counts(way: str) -> None:
    async with shadowing(every(3, FAILURES[way], writes(CANDIDATE))) as (shadows, reader, observer, repeat):
        observer.watch(Watched("r", 0, frozenset({CANDIDATE, STABLE})))
        await reader.watch(SHADOWED, 0)
        await asyncio.sleep(0)  # it listens
        for count in range(1, 61):
            repeat()
            await eventually(lambda: not shadows.running)
            assert shadows.outcomes.total() == count
        condition = SHADOWED.steps[0].conditions[0]

        def found() -> Evidence:
            observer.again()
            return evidence(observer, condition)[0]

        await eventually(lambda: shadows.memory.used == 0 and found().candidate.count == 60)
        assert found().candidate.total == 20
        assert found().stable.count == 0


async def test_what_says_nothing_of_the_version_is_no_failure() -> None:
    """A request that was wrong, another version in the engine by now, and a repetition that gave way."""
    wrong = answering(b"{}", b"400 Bad Request")
    moved = answering(b"{}", b"409 Conflict", REFUSED % b"version")
    async with shadowing(every(2, wrong, every(2, moved, never_answer))) as (shadows, reader, observer, repeat):
        observer.watch(Watched("r", 0, frozenset({CANDIDATE, STABLE})))
        await reader.watch(SHADOWED, 0)
        await asyncio.sleep(0)  # it listens
        for _ in range(4):
            repeat()
        await eventually(lambda: shadows.outcomes[CANDIDATE, "failed"] == 3)
        shadows.close()
        assert shadows.outcomes == {(CANDIDATE, "failed"): 3, (CANDIDATE, "cut"): 1}
        assert observer.taken() is None


async def test_answers_that_no_judge_takes_give_their_memory_back() -> None:
    async with shadowing(writes(CANDIDATE)) as (shadows, _, _, repeat):
        shadows.listen()
        for _ in range(5):
            repeat()
        await eventually(lambda: shadows.outcomes[CANDIDATE, "answered"] == 5)
        assert shadows.memory.used > 0
        shadows.ignore()
        assert shadows.memory.used == 0
