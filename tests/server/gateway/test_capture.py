"""Whole answers for whoever reads them, over real connections: what is captured, for whom, and within which bounds."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from server.answers.feedback import Feedback
from server.answers.measures import measure
from server.answers.parse import Answer, Span
from server.gateway.access.keys import Principal
from server.gateway.config import AnswerSettings, UpstreamSettings
from tests.server import continued
from tests.server.gateway.fleet.test_failover import HARDY
from tests.server.gateway.harness import RunningGateway, new_key, post, private, running_gateway
from tests.server.gateway.upstream import Link, Received, answering, streaming
from tests.waiting import eventually

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
TOKENS = [11, 12, 13, 14]


class Reader:
    """A consumer that keeps what it gets."""

    def __init__(self, name: str, *, share: float = 1.0, most: int = 64, all_keys: bool = True) -> None:
        self.name, self.share, self.most, self.all_keys = name, share, most, all_keys
        self.answers: list[Answer] = []
        self.said: list[Feedback] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.fails = False

    def wants(self, principal: Principal) -> bool:
        return self.all_keys or principal.collect

    def take(self, answer: Answer) -> None:
        self.go_on.wait(120)
        if self.fails:
            raise RuntimeError("it fails")
        self.answers.append(answer)

    def rate(self, feedback: Feedback) -> None:
        self.said.append(feedback)

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    hardy = UpstreamSettings(scrape_interval_s=3600.0, health=HARDY)
    answers = AnswerSettings(segment_s=0.01)
    with running_gateway(tmp_path_factory.mktemp("gateway"), upstream=hardy, answers=answers) as running:
        yield running


@pytest.fixture(autouse=True)
async def nothing_is_left(gateway: RunningGateway) -> Any:
    yield
    for instance_id in list(gateway.gateway.default.fleet.instances):
        gateway.unregister(instance_id)
    await eventually(lambda: gateway.gateway.stats.captured.used == 0)


@contextlib.contextmanager
def reading(gateway: RunningGateway, name: str) -> Iterator[Reader]:
    found = Reader(name)
    gateway.gateway.desk.add(found)
    yield found
    found.go_on.set()
    gateway.gateway.desk.remove(found)


@pytest.fixture
def reader(gateway: RunningGateway, request: pytest.FixtureRequest) -> Iterator[Reader]:
    with reading(gateway, request.node.name) as found:
        yield found
    assert not gateway.gateway.stats.collects_all


@pytest.fixture
def other(gateway: RunningGateway, reader: Reader) -> Iterator[Reader]:
    with reading(gateway, f"other of {reader.name}") as found:
        yield found


def dropped(gateway: RunningGateway, reader: Reader) -> dict[str, int]:
    counts = gateway.gateway.stats.answers_dropped
    return {cause: n for (name, cause), n in counts.items() if name == reader.name and n}


async def complete(gateway: RunningGateway, prompt: str, headers: str = "") -> None:
    assert (await gateway.ask(post("/v1/completions", {"prompt": prompt}, headers))).status == 200


async def test_an_answer_that_two_instances_gave_is_one_record(gateway: RunningGateway, reader: Reader) -> None:
    fleet = continued.Fleet(continued.chat(TOKENS))
    wire = continued.framed(fleet.events)
    async with gateway.instance(fleet.handle), gateway.instance(fleet.handle, "i1"):
        for cut in range(0, len(wire), 40):
            fleet.cuts = [cut]
            answer = await gateway.ask(post("/v1/chat/completions", CHAT))
            assert answer.complete
    await eventually(lambda: len(reader.answers) == len(range(0, len(wire), 40)))
    for answer in reader.answers:
        (choice,) = answer.choices
        assert (choice.token_ids, choice.weight_versions) == (TOKENS, [Span(1, 0, 4)])
        assert answer.whole
        assert answer.version == 1


async def test_what_a_refused_request_got_is_no_part_of_it(gateway: RunningGateway, reader: Reader) -> None:
    asked = 0

    async def refuse_first(link: Link, _: Received) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            await link.json(b'{"error":{}}', b"409 Conflict", b"x-hotswap-refused: version\r\n")
        else:
            await link.json(b'{"id":"c","choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}')

    async with gateway.instance(refuse_first), gateway.instance(refuse_first, "i1"):
        assert (await gateway.ask(post("/v1/chat/completions", CHAT | {"stream": False}))).status == 200
    await eventually(lambda: len(reader.answers) == 1)
    assert (asked, reader.answers[0].error, reader.answers[0].choices[0].text) == (2, None, "x")


async def test_a_judge_reads_what_no_key_has_opted_in_to_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    with running_gateway(tmp_path) as gateway:
        reader = Reader("judge")
        gateway.gateway.desk.add(reader)
        _, silent = await new_key(gateway)
        fleet = continued.Fleet(continued.chat(TOKENS))
        async with gateway.instance(fleet.handle):
            answer = await gateway.ask(post("/v1/chat/completions", CHAT, f"{silent}x-request-id: j1\r\n"))
            assert answer.status == 200
            said = await gateway.ask(post("/v1/feedback", {"id": "j1", "rating": "down"}, silent))
            assert said.status == 200
        await eventually(lambda: bool(reader.answers and reader.said))
        found = measure(reader.answers[0])
        assert (found["errors"], found["tokens"], found["cut"]) == (0.0, 4.0, 0.0)
        assert 0 < found["first_token_s"] <= found["duration_s"]
        assert (reader.said[0].score, reader.said[0].version, reader.said[0].replaced) == (0.0, 1, None)
        assert gateway.gateway.stats.answers_written == {"answer": 0, "feedback": 0}
    assert not (tmp_path / "answers").exists()


async def test_failures_are_told_too(gateway: RunningGateway, reader: Reader) -> None:
    fails = answering(b'{"error":{"message":"no"}}', b"500 Internal Server Error")
    for handler in (fails, streaming(continued.chat(TOKENS)[0], cut=True)):
        async with gateway.instance(handler):
            await gateway.ask(post("/v1/chat/completions", CHAT, "x-hotswap-failover: off\r\n"))
        gateway.unregister()
    await eventually(lambda: len(reader.answers) == 2)
    assert [measure(answer) for answer in reader.answers] == [{"errors": 1.0}] * 2


async def test_a_client_that_leaves_has_the_beginning(gateway: RunningGateway, reader: Reader) -> None:
    begins = streaming(b"".join(continued.chat(TOKENS)[:2]), asyncio.Event())
    async with gateway.instance(begins), gateway.client(post("/v1/chat/completions", CHAT)) as client:
        await client.reader.readuntil(b"<11>")
        client.writer.transport.abort()
        await eventually(lambda: len(reader.answers) == 1)
    (answer,) = reader.answers
    assert (answer.about.status, answer.choices[0].token_ids, answer.whole) == (499, [11], False)
    assert measure(answer) == {}


async def test_other_routes_and_shares_of_nothing_are_not_captured(gateway: RunningGateway, reader: Reader) -> None:
    async with gateway.instance():
        assert (await gateway.ask(post("/tokenize", {"prompt": "x"}))).status == 200
        reader.share = 0.0
        await complete(gateway, "x", "x-request-id: s0\r\n")
        # It may be rated all the same: what is said is no sample.
        assert (await gateway.ask(post("/v1/feedback", {"id": "s0", "score": 0.5}))).status == 200
        reader.share = 1.0
        await complete(gateway, "y")
    await eventually(lambda: bool(reader.answers and reader.said))
    assert [answer.prompt for answer in reader.answers] == ["y"]
    assert dropped(gateway, reader) == {}


async def test_each_consumer_has_a_bound_of_its_own(gateway: RunningGateway, reader: Reader, other: Reader) -> None:
    reader.most = 2
    reader.go_on.clear()
    async with gateway.instance():
        for number in range(5):
            await complete(gateway, str(number))
    await eventually(lambda: dropped(gateway, reader) == {"busy": 3})
    reader.go_on.set()
    await eventually(lambda: len(other.answers) == 5)
    assert [answer.prompt for answer in reader.answers] == ["0", "1"]
    assert dropped(gateway, other) == {}


async def test_what_is_too_large_is_dropped_and_the_answer_goes_on(gateway: RunningGateway, reader: Reader) -> None:
    memory = gateway.gateway.stats.captured
    fleet = continued.Fleet(continued.chat(list(range(100))))
    async with gateway.instance(fleet.handle):
        for bound, limit in ((500, memory.limit), (memory.per_answer, 500)):
            before = memory.per_answer, memory.limit
            memory.per_answer, memory.limit = bound, limit
            try:
                answer = await gateway.ask(post("/v1/chat/completions", CHAT, "x-request-id: large\r\n"))
            finally:
                memory.per_answer, memory.limit = before
            assert answer.body == b"".join(fleet.events)
            assert memory.used == 0
        said = await gateway.ask(post("/v1/feedback", {"id": "chatcmpl-large", "rating": "up"}))
        assert said.status == 200
    assert (dropped(gateway, reader), reader.answers) == ({"memory": 2}, [])


async def test_a_consumer_that_fails_holds_up_nobody(gateway: RunningGateway, reader: Reader, other: Reader) -> None:
    reader.fails = True
    async with gateway.instance():
        await complete(gateway, "x")
    await eventually(lambda: len(other.answers) == 1)
    await eventually(lambda: dropped(gateway, reader) == {"failed": 1})


async def test_what_cannot_be_read_is_counted(gateway: RunningGateway, reader: Reader) -> None:
    async with gateway.instance(answering(b"[1]")):
        await complete(gateway, "x")
    await eventually(lambda: dropped(gateway, reader) == {"unreadable": 1})


async def test_an_answer_that_names_itself_can_be_rated_at_once(gateway: RunningGateway, reader: Reader) -> None:
    """Its id is known when it has been read, which a request for it waits for."""
    named = b'{"id":"gen-77","choices":[{"index":0,"text":"x","token_ids":[1],"finish_reason":"stop"}]}'
    async with gateway.instance(answering(named)):
        assert (await gateway.ask(post("/generate", {"prompt": "x", "stream": False}))).status == 200
        said = await gateway.ask(post("/v1/feedback", {"id": "gen-77", "rating": "up"}))
        assert (said.status, orjson.loads(said.body)["id"]) == (200, "gen-77")
    await eventually(lambda: len(reader.said) == 1)
    assert reader.said[0].id == "gen-77"


async def test_a_key_in_a_file_opts_in_at_the_end_of_its_line(tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"a-key-that-is-hashed").hexdigest()
    keys = f"a-key-in-the-clear --collect\nsha256:{hashed} its owner --collect\na-key-that-does-not owner\n"
    file = private(tmp_path / "api.keys", keys)
    fleet = continued.Fleet(continued.chat(TOKENS))
    settings = {"upstream": UpstreamSettings(scrape_interval_s=3600.0), "api_key_file": file}
    with running_gateway(tmp_path, **settings) as gateway:
        async with gateway.instance(fleet.handle):
            gateway.gateway.desk.add(reader := Reader("reader", all_keys=False))
            for key in ("a-key-that-does-not", "a-key-in-the-clear", "a-key-that-is-hashed"):
                answer = await gateway.ask(post("/v1/chat/completions", CHAT, f"authorization: Bearer {key}\r\n"))
                assert answer.status == 200, answer.body
            await eventually(lambda: len(reader.answers) == 2)
            assert [answer.about.key for answer in reader.answers] == ["key-1", "its owner"]
            gateway.gateway.desk.remove(reader)
