"""Several worker processes on one port: what they share, what a scrape shows, and what happens when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.gateway.contenders import KEY, answers, body, compiled, hotswap, running, tree
from loadtest.gateway.contenders import Place as BenchPlace
from server.gateway.__main__ import configured
from server.gateway.access.records import INFER, KEYS_PREFIX, KeyRecord, digest_of
from server.gateway.observe.pages import Pages, merged
from server.gateway.workers import MAX_DELAY_S, VARIABLE, WRONG_SETTINGS, Place, Supervisor, pause_after
from server.key_limits import KeyLimits
from server.ports import free_port
from tests.server.gateway.harness import gateway_process
from tests.waiting import eventually, wait_until
from weightsync.store import SyncStore

Sample = tuple[str, frozenset[tuple[str, str]], float]


def samples(page: bytes) -> set[Sample]:
    """Every sample, as a Prometheus parser reads the page."""
    families = text_string_to_metric_families(page.decode())
    found = (sample for family in families for sample in family.samples)
    return {(s.name, frozenset(s.labels.items()), s.value) for s in found if not s.name.endswith("_created")}


def page(value: float) -> bytes:
    registry = CollectorRegistry()
    Counter("asked", "with a label", ["route"], registry=registry).labels('/v1 {"odd"}\n').inc(value)
    Gauge("held", "without", registry=registry).set(value)
    Histogram("took", "buckets", registry=registry, buckets=(1, 2)).observe(value)
    return generate_latest(registry)


# merging


def test_every_sample_says_whose_it_is() -> None:
    together = samples(merged({0: page(1.0), 3: page(2.0)}))
    for worker, value in (("0", 1.0), ("3", 2.0)):
        own = {(n, frozenset({*labels, ("worker", worker)}), v) for n, labels, v in samples(page(value))}
        assert own <= together
    assert len(together) == 2 * len(samples(page(1.0)))


def test_a_family_is_described_once() -> None:
    lines = merged({0: page(1.0), 1: page(2.0)}).splitlines()
    described = [line for line in lines if line.startswith(b"# TYPE")]
    assert len(described) == len(set(described))
    # Samples of one family stand together, as the format asks.
    names = [line.partition(b"{")[0] for line in lines if not line.startswith(b"#")]
    assert names.count(b"held") == 2
    assert names[names.index(b"held") + 1] == b"held"


async def test_workers_give_each_other_their_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.gateway.observe.pages.TIMEOUT_S", 60.0)
    places = [Place(i, 3, 0, -1, str(tmp_path), os.getpid()) for i in range(3)]

    def made(value: float) -> Callable[[], Awaitable[bytes]]:
        async def make() -> bytes:
            return page(value)

        return make

    pages = [Pages(place, made(place.index + 1.0)) for place in places]
    tasks = [asyncio.create_task(p.serve()) for p in pages[:2]]  # the third is not up
    await eventually(lambda: all(places[i].page_socket(i).exists() for i in range(2)))
    try:
        whole = samples(merged({0: page(1.0), 1: page(2.0)}))
        for asked in pages[:2]:
            assert samples(await asked.all()) == whole
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_gateway_alone_has_no_label() -> None:
    async def make() -> bytes:
        return b"# nothing\n"

    assert await Pages(None, make).all() == b"# nothing\n"


async def test_a_page_is_made_once_for_all_who_ask_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.gateway.observe.pages.MOST_KEPT_S", 60.0)
    monkeypatch.setattr("server.gateway.observe.pages.SHARE", 1e9)
    made = 0
    go_on = asyncio.Event()

    async def make() -> bytes:
        nonlocal made
        made += 1
        await go_on.wait()
        return b"page"

    pages = Pages(None, make)
    asked = [asyncio.create_task(pages.all()) for _ in range(20)]
    while not made:  # noqa: ASYNC110
        await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*asked) == [b"page"] * 20
    assert made == 1


# what a worker is told


def test_a_place_is_passed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(1, 2, 8000, 8, "/tmp/x", 1234)
    for name, value in place.to_environment().items():
        monkeypatch.setenv(name, value)
    assert Place.taken() == place
    assert VARIABLE not in os.environ
    assert Place.taken() is None


def test_only_the_first_worker_is_a_candidate_for_coordinator() -> None:
    options = ["--store", "sqlite:///x/store.db", "--model", "toy", "--workers", "2"]
    assert [configured(options, Place(i, 2, 0, -1, "", 0)).run_coordinator for i in range(2)] == [True, False]


def test_auto_is_one_for_each_core() -> None:
    options = ["--store", "sqlite:///x/store.db", "--model", "toy", "--workers", "auto"]
    assert configured(options).workers == len(os.sched_getaffinity(0))


# the supervisor


async def test_wrong_settings_end_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as public, socket.create_server(("127.0.0.1", 0)) as admin:
        supervisor = Supervisor([], 2, public, admin)
        script = f"import os, sys, time; '\"index\":1' in os.environ['{VARIABLE}'] and sys.exit(2); time.sleep(200)"
        supervisor._command = [sys.executable, "-c", script]
        assert await asyncio.wait_for(supervisor.run(1.0), 120) == WRONG_SETTINGS


def test_a_worker_that_dies_for_days_is_started_anew_all_the_same() -> None:
    assert [pause_after(deaths) for deaths in (1, 2, 3)] == [0.1, 0.2, 0.4]
    assert pause_after(8) == pause_after(10_000) == MAX_DELAY_S


# real processes


@dataclass
class Workers:
    """A gateway of two workers in front of the benchmark's upstream."""

    directory: Path
    port: int
    admin: int
    supervisor: subprocess.Popen[bytes]

    def add_key(self, key: str, **fields: Any) -> dict[str, str]:
        """The header with a new key, known to both workers."""
        put_key(self.directory, key, **fields)
        headers, url = {"authorization": f"Bearer {key}"}, f"http://127.0.0.1:{self.port}/v1/models"
        wait_until(lambda: all(httpx.get(url, headers=headers, timeout=60).status_code == 200 for _ in range(16)), 60)
        return headers

    @property
    def pids(self) -> list[int]:
        return [pid for pid in tree(self.supervisor.pid)[1:] if is_worker(pid)]

    def metrics(self) -> set[Sample]:
        return samples(httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=60).content)

    def answered(self) -> dict[str, float]:
        """Requests each worker has answered, of all keys and routes."""
        found = defaultdict[str, float](float)
        for name, labels, value in self.metrics():
            if name == "hotswap_gateway_requests_total" and dict(labels)["status"] == "200":
                found[dict(labels)["worker"]] += value
        return found

    def scraped(self) -> dict[str, float]:
        """The workers whose samples a scrape has, and when each began."""
        began = [(labels, v) for name, labels, v in self.metrics() if name == "process_start_time_seconds"]
        return {dict(labels)["worker"]: value for labels, value in began}

    def both(self) -> dict[str, float]:
        """The same, once a scrape has both: it goes without one that is slow to answer."""
        return wait_until(lambda: found if len(found := self.scraped()) == 2 else None, 120)

    def replaced(self, former: dict[str, float]) -> bool:
        """Whether one of `former` has a successor, by the pages of both: these may be a second old."""
        found = [self.scraped() for _ in range(6)]
        return all(len(set(now.items()) - set(former.items())) == 1 and now.keys() == former.keys() for now in found)


def put_key(directory: Path, key: str, **fields: Any) -> None:
    record = KeyRecord(key, key, digest_of(key), (INFER,), time.time(), **fields)
    with contextlib.closing(SyncStore(f"sqlite://{directory}/store.db")) as store:
        store.put(KEYS_PREFIX + record.id, record.to_json())


def is_worker(pid: int) -> bool:
    try:
        return b"server.gateway" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@contextlib.contextmanager
def two_workers(directory: Path) -> Iterator[Workers]:
    upstream, port, admin = free_port(), free_port(), free_port()
    command = [*hotswap(BenchPlace(port, upstream, directory)), "--workers", "2", "--admin-port", str(admin)]
    put_key(directory, KEY)
    mock = running([str(compiled("upstream")), str(upstream)], directory / "upstream.log")
    with mock, running(command, directory / "log") as supervisor:
        found = Workers(directory, port, admin, supervisor)
        wait_until(lambda: answers(port), 180, process=supervisor)
        assert found.both().keys() == {"0", "1"}
        yield found


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """For tests that leave two workers behind; a new one in the place of a killed one will do."""
    with two_workers(tmp_path_factory.mktemp("workers")) as found:
        yield found


def test_a_scrape_of_any_worker_shows_all(workers: Workers) -> None:
    before = sum(workers.answered().values())
    for _ in range(20):
        assert answers(workers.port)  # on a connection of its own, so that either may get it

    def all_is_shown() -> bool:
        counts = [workers.answered() for _ in range(6)]
        return sum(counts[0].values()) >= before + 20 and all(count == counts[0] for count in counts)

    wait_until(all_is_shown, 60)  # a page may be a second old


def test_a_killed_worker_comes_back_and_the_others_go_on(workers: Workers, tmp_path: Path) -> None:
    before, scraped = workers.pids, workers.both()
    assert len(before) == 2
    (tmp_path / "body").write_bytes(body())
    # 8 connections for 2 s; a connection that is refused would end the client with an error.
    options = [workers.port, 8, 0, 2, 0, tmp_path / "body", KEY]
    client = subprocess.Popen([compiled("client"), *map(str, options)], stdout=subprocess.PIPE)
    wait_until(lambda: sum(workers.answered().values()) > 20, 60)
    os.kill(before[0], signal.SIGKILL)
    output, _ = client.communicate(timeout=120)
    assert client.returncode == 0
    seen = orjson.loads(output)
    # Those the killed one had in hand; asked again, they may have met its listener as that was closing.
    assert seen["errors"] <= 3 * 8
    assert seen["all_requests"] > 20 + seen["errors"]
    wait_until(lambda: len(workers.pids) == 2 and before[0] not in workers.pids, 60)
    assert before[1] in workers.pids
    wait_until(lambda: workers.replaced(scraped), 120)


async def test_the_sdks_own_retries_are_enough_when_a_worker_is_killed(workers: Workers) -> None:
    """Its connections end, and one that was just made may be reset; asked again, the client comes to the others."""
    before, scraped = workers.pids, workers.both()
    sdk = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{workers.port}/v1", api_key=KEY)
    killed = asyncio.Event()
    after = 0

    async def converse() -> None:
        nonlocal after
        while after < 200:
            made = await sdk.chat.completions.create(model="mock", messages=[{"role": "user", "content": "x"}])
            assert made.choices
            after += killed.is_set()

    async with sdk:
        asking = [asyncio.create_task(converse()) for _ in range(16)]
        await asyncio.to_thread(wait_until, lambda: sum(workers.answered().values()) > 40, 60)
        os.kill(before[0], signal.SIGKILL)
        killed.set()
        await asyncio.gather(*asking)
    wait_until(lambda: workers.replaced(scraped), 120)


def test_workers_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    with two_workers(tmp_path) as workers:
        pids = workers.pids
        workers.supervisor.kill()
        wait_until(lambda: not any(is_worker(pid) for pid in pids))


def test_the_admin_port_is_one_workers_own(workers: Workers) -> None:
    headers = {"authorization": f"Bearer {(workers.directory / 'admin.key').read_text().strip()}"}
    for _ in range(6):
        answer = httpx.get(f"http://127.0.0.1:{workers.admin}/admin/weights", headers=headers, timeout=60)
        assert answer.json()["model"] == "mock"
    refused = httpx.get(f"http://127.0.0.1:{workers.port}/admin/weights", headers=headers, timeout=60)
    assert refused.status_code == 404


def test_a_limit_holds_over_all_workers(workers: Workers) -> None:
    """No minute has more than the limit, and all of it is used, whichever worker is asked."""
    headers = workers.add_key("a-key-with-a-limit", limits=KeyLimits(requests_per_min=30))
    url = f"http://127.0.0.1:{workers.port}/v1/chat/completions"
    statuses: set[int] = set()
    passed: list[tuple[float, float]] = []  # asked and answered at

    def all_is_used() -> bool:
        """Asks once more, on a connection of its own."""
        begun = time.monotonic()
        status = httpx.post(url, content=body(), headers=headers, timeout=60).status_code
        statuses.add(status)
        if status == 200:
            passed.append((begun, time.monotonic()))
        return len(passed) >= 30

    wait_until(all_is_used, 120)  # a worker that was killed holds its part until its lease ends
    for _ in range(90):
        all_is_used()
    assert statuses == {200, 429}
    for _, end in passed:
        assert sum(end - 60 < begun and answered <= end for begun, answered in passed) <= 30


def test_feedback_reaches_the_worker_that_answered_and_stopping_drains_both(tmp_path: Path) -> None:
    with two_workers(tmp_path) as workers, contextlib.ExitStack() as stack:
        headers, url = workers.add_key("a-key-to-collect", collect=True), f"http://127.0.0.1:{workers.port}/v1"
        taken = []
        for number in range(16):  # each request on a connection of its own, so that either worker may get it
            named = headers | {"x-request-id": f"r{number}"}
            httpx.post(f"{url}/chat/completions", content=body(), headers=named, timeout=60).raise_for_status()
            rating = {"id": f"r{number}", "rating": "up"}

            def said(rating: dict[str, str] = rating) -> Any:
                """404, and nothing is taken, where the worker that answered does not look within two seconds."""
                found = httpx.post(f"{url}/feedback", json=rating, headers=headers, timeout=60)
                assert found.status_code in (200, 404), found.text
                return found.json() if found.status_code == 200 else None

            taken.append(wait_until(said, 60)["gateway"])
        assert set(taken) == {"this", "another"}
        rating = {"id": "nobody's", "rating": "up"}
        missing = httpx.post(f"{url}/feedback", json=rating, headers=headers, timeout=60)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_answer")

        ask = body(stream=True, max_tokens=40, seed=20)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\nauthorization: {headers['authorization']}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(ask)}\r\n"
        links = [stack.enter_context(socket.create_connection(("127.0.0.1", workers.port), 60)) for _ in range(8)]
        streams = [link.makefile("rb") for link in links]
        for number, (link, stream) in enumerate(zip(links, streams, strict=True)):
            link.sendall(f"{head}x-request-id: s{number}\r\n\r\n".encode() + ask)
            while not stream.readline().startswith(b"data: "):
                pass
        pids = workers.pids
        workers.supervisor.send_signal(signal.SIGTERM)
        assert all(stream.read().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for stream in streams)
        assert workers.supervisor.wait(120) == 0  # and closes its segments
        assert not any(is_worker(pid) for pid in pids)
    lines = [line for path in (tmp_path / "answers").glob("*.jsonl") for line in path.read_bytes().splitlines()]
    kept = [orjson.loads(line) for line in lines]
    rated = {f"r{number}" for number in range(16)}
    answered = sorted(one["about"]["request_id"] for one in kept if one["record"] == "answer")
    assert answered == sorted(rated | {f"s{number}" for number in range(8)})
    assert sorted(one["request_id"] for one in kept if one["record"] == "feedback") == sorted(rated)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.broad)])
def test_a_hang_up_has_every_worker_read_the_models_anew(tmp_path: Path, count: int) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: [{name: small}]\naliases: {fast: small}\n")

    def listed() -> list[str]:
        """As whichever worker the kernel chooses tells it."""
        answer = httpx.get(f"{gateway.url}/v1/models", timeout=60).json()
        return [each["id"] for each in answer["data"]]

    def workers() -> set[str]:
        page = samples(httpx.get(f"{gateway.url}/metrics", timeout=60).content)
        return {dict(labels).get("worker", "0") for name, labels, _ in page if name == "process_start_time_seconds"}

    with gateway_process(tmp_path, "--models", str(file), "--workers", str(count), model="") as gateway:
        wait_until(lambda: len(workers()) == count, 120)
        assert listed() == ["small", "fast"]
        for text, names in (
            ("models: [{name: small}, {name: big}]\naliases: {fast: [big, small]}\n", ["small", "big", "fast"]),
            ("models: [{name: small}]\naliases: {slow: small}\n", ["small", "slow"]),
        ):
            file.write_text(text)
            gateway.process.send_signal(signal.SIGHUP)
            wait_until(lambda: all(listed() == names for _ in range(16)), 60)  # noqa: B023
        file.write_text("models: [{name: small}, {nam: big}]\n")
        gateway.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "line 1" in gateway.log.read_text())
        assert all(listed() == ["small", "slow"] for _ in range(16))
        assert gateway.process.poll() is None
