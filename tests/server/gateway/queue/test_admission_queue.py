"""The queue in a running gateway, in front of a scripted upstream that answers when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest

from server.gateway import QueueSettings, UpstreamSettings
from tests.server.gateway.harness import RunningGateway, get, post, running_gateway
from tests.server.gateway.upstream import Answer, Link, Received, Upstream, read_answer, upstream
from tests.waiting import eventually

QUIET = UpstreamSettings(scrape_interval_s=3600.0)
KEYS = ("key-of-the-first-tester", "key-of-the-second-tester")


@dataclass
class Slow:
    """Answers one request for every `release`, in the order they came."""

    up: Upstream
    gates: list[asyncio.Event] = field(default_factory=list)
    answer: bytes = b'{"ok":true}'

    def release(self, count: int = 1) -> None:
        for gate in [g for g in self.gates if not g.is_set()][:count]:
            gate.set()

    @property
    def prompts(self) -> list[str]:
        """Of the requests that got here."""
        return [orjson.loads(r.body)["prompt"] for r in self.up.requests]


@contextlib.asynccontextmanager
async def slow() -> AsyncIterator[Slow]:
    async def handler(link: Link, received: Received) -> None:
        if received.method == "POST" and received.target == "/v1/completions":
            self.gates.append(gate := asyncio.Event())
            await gate.wait()
        await link.json(self.answer)

    async with upstream(handler) as up:
        self = Slow(up)
        yield self


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path, upstream=QUIET, run_coordinator=False) as g:
        yield g


@dataclass
class Asked:
    """A request on its way."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> Answer:
        found = await asyncio.wait_for(read_answer(self.reader), 20)
        self.writer.close()
        return found

    async def code(self) -> tuple[int, str]:
        found = await self.answer()
        return found.status, str(orjson.loads(found.body)["error"]["code"])


async def ask(gateway: RunningGateway, prompt: str, headers: str = "", path: str = "/v1/completions") -> Asked:
    """Returns when the gateway has it, at an instance, in line or refused. Who drops what this returns hangs up."""
    model, refused = gateway.gateway.default, gateway.gateway.stats.refused
    gate, stats = model.gate, model.stats
    before = stats.inflight + sum(refused.values())
    reader, writer = await gateway.connect()
    writer.write(post(path, body={"prompt": prompt, "max_tokens": 1}, headers=headers))
    await eventually(lambda: stats.inflight + sum(refused.values()) > before or gate.outcomes.total() > before)
    return Asked(reader, writer)


async def fill(gateway: RunningGateway, slow: Slow, count: int = 1, **fields: object) -> list[Asked]:
    """An instance that runs `count` requests, and those."""
    gateway.register(slow.up, max_num_seqs=1, **fields)
    gateway.gateway.default.fleet.instances["i0"].window.limit = count
    asked = [await ask(gateway, f"full {i}") for i in range(count)]
    await eventually(lambda: len(slow.gates) == count)
    return asked


def waiting(gateway: RunningGateway) -> int:
    return len(gateway.gateway.default.gate.queue)


async def in_line(gateway: RunningGateway, prompt: str, headers: str = "") -> Asked:
    before = waiting(gateway)
    asked = await ask(gateway, prompt, headers)
    await eventually(lambda: waiting(gateway) == before + 1)
    return asked


async def test_what_an_instance_can_run_goes_there_and_the_rest_waits(gateway: RunningGateway) -> None:
    async with slow() as s:
        gateway.register(s.up, max_num_seqs=8)
        asked = [await ask(gateway, str(i)) for i in range(12)]
        await eventually(lambda: len(s.gates) == 9)
        assert waiting(gateway) == 3
        s.release(2)
        await eventually(lambda: len(s.gates) == 11)
        s.release(9)
        await eventually(lambda: len(s.gates) == 12)
        s.release()
        for each in asked:
            assert (await each.answer()).status == 200
        assert s.prompts[9:] == ["9", "10", "11"]
        assert gateway.gateway.default.gate.outcomes == {(0, "served"): 3}


async def test_cheap_routes_pass_by(gateway: RunningGateway) -> None:
    async with slow() as s:
        _kept = await fill(gateway, s)
        _waits = await in_line(gateway, "waits")
        for request in (get("/v1/models"), post("/tokenize"), get("/healthz"), get("/metrics")):
            assert (await gateway.ask(request)).status == 200
        assert waiting(gateway) == 1
        s.release()
        await eventually(lambda: len(s.gates) == 2)
        s.release()


async def test_the_more_urgent_go_first_as_far_as_their_key_allows(gateway: RunningGateway) -> None:
    async with slow() as s:
        asked = await fill(gateway, s)
        asked.append(await in_line(gateway, "patient", "X-Hotswap-Priority: 9\r\n"))
        asked.append(await in_line(gateway, "less", "X-Hotswap-Priority: 3\r\n"))
        asked.append(await in_line(gateway, "plain"))
        refused = await ask(gateway, "pushy", "X-Hotswap-Priority: -1\r\n")
        assert await refused.code() == (403, "priority_not_allowed")
        for done in range(len(asked)):
            await eventually(lambda n=done: len(s.gates) > n)  # type: ignore[misc]
            s.release()
        for each in asked:
            assert (await each.answer()).status == 200
        assert s.prompts == ["full 0", "plain", "less", "patient"]
        told = [r.headers.get("x-hotswap-priority") for r in s.up.requests]
        assert told == [None, None, "3", "9"]


async def test_the_wish_in_the_body(gateway: RunningGateway) -> None:
    async with slow() as s:
        gateway.register(s.up)
        body = {"prompt": "x", "hotswap": {"priority": 2, "deadline_s": 30}}
        answer = asyncio.create_task(gateway.ask(post(body=body)))
        await eventually(lambda: len(s.gates) == 1)
        s.release()
        assert (await answer).status == 200
        assert s.up.requests[0].body == b'{"prompt":"x"}'
        assert s.up.requests[0].headers["x-hotswap-priority"] == "2"
        for wrong in ({"priority": 10}, {"priority": 1.5}, {"deadline_s": 0}, {"deadline_s": -1}):
            assert (await gateway.ask(post(body={"hotswap": wrong}))).status == 400
        for line in ("X-Hotswap-Priority: x", "X-Hotswap-Priority: 10", "X-Hotswap-Deadline-S: 0"):
            assert (await gateway.ask(post(headers=line + "\r\n"))).status == 400


async def test_a_burst_of_one_key_does_not_hold_up_another(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("".join(f"sha256:{hashlib.sha256(k.encode()).hexdigest()} {k}\n" for k in KEYS))
    file.chmod(0o600)
    with running_gateway(tmp_path, upstream=QUIET, run_coordinator=False, api_key_file=file) as gateway:
        first, second = (f"Authorization: Bearer {k}\r\n" for k in KEYS)
        async with slow() as s:
            gateway.register(s.up, max_num_seqs=1)
            gateway.gateway.default.fleet.instances["i0"].window.limit = 1
            asked = [await ask(gateway, "a0", first)]
            asked += [await in_line(gateway, f"a{i}", first) for i in range(1, 9)]
            asked += [await in_line(gateway, f"b{i}", second) for i in range(2)]
            for done in range(len(asked)):
                await eventually(lambda n=done: len(s.gates) > n)  # type: ignore[misc]
                s.release()
            for each in asked:
                assert (await each.answer()).status == 200
            assert s.prompts.index("b0") <= 2
            assert s.prompts.index("b1") <= 4
            assert [p for p in s.prompts if p[0] == "a"] == [f"a{i}" for i in range(9)]


async def test_what_an_answer_really_cost_is_charged_to_its_key(gateway: RunningGateway) -> None:
    async with slow() as s:
        s.answer = b'{"choices":[],"usage":{"prompt_tokens":5000,"total_tokens":5001,"completion_tokens":1}}'
        asked = await fill(gateway, s)
        asked += [await in_line(gateway, name) for name in ("dear", "next", "last")]
        for done in range(2):
            await eventually(lambda n=done: len(s.gates) > n)  # type: ignore[misc]
            s.release()
        await eventually(lambda: len(s.gates) == 3)
        (flow,) = gateway.gateway.default.gate.queue._classes[0]._flows.values()
        (last,) = flow.line
        assert (
            flow.start == 5001 + last.cost
        )  # "next" has paid for "dear" and itself; the one that did not wait was free
        for done in range(2, 4):
            await eventually(lambda n=done: len(s.gates) > n)  # type: ignore[misc]
            s.release()
        assert [(await a.answer()).status for a in asked] == [200] * 4


async def test_a_client_that_hangs_up_has_had_its_prompt(tmp_path: Path) -> None:
    """Whoever breaks off every answer is charged for what the instance read, and does not go first for it."""
    arrived: list[str] = []
    begin = asyncio.Event()

    async def handler(link: Link, received: Received) -> None:
        arrived.append(prompt := orjson.loads(received.body)["prompt"][:8])
        if prompt == "hangs up":
            await link.sse_head()
            await link.chunk(b'data: {"choices":[]}\n\n')
            return
        await begin.wait()
        await link.json(b'{"usage":{"prompt_tokens":5000,"total_tokens":5001,"completion_tokens":1}}')

    async def break_off(asked: Asked) -> None:
        await asked.reader.readuntil(b"data: ")
        asked.writer.close()

    file = tmp_path / "keys"
    file.write_text("".join(f"sha256:{hashlib.sha256(k.encode()).hexdigest()} {k}\n" for k in KEYS))
    file.chmod(0o600)
    with running_gateway(tmp_path, upstream=QUIET, run_coordinator=False, api_key_file=file) as gateway:
        first, second = (f"Authorization: Bearer {k}\r\n" for k in KEYS)
        async with upstream(handler) as up:
            gateway.register(up, max_num_seqs=1)
            gateway.gateway.default.fleet.instances["i0"].window.limit = 1
            reading = [await ask(gateway, "is read", second)]
            hanging = [await in_line(gateway, "hangs up" + "x" * 20_000, first) for _ in range(7)]
            reading += [await in_line(gateway, "is read", second) for _ in range(7)]
            breaking = [asyncio.create_task(break_off(each)) for each in hanging]
            begin.set()
            for each in reading:
                assert (await each.answer()).status == 200
            await asyncio.gather(*breaking)
    assert "hangs up " * 3 not in " ".join(arrived[:-3]) + " ", "they take turns"


async def test_a_client_that_leaves_frees_its_place(gateway: RunningGateway) -> None:
    async with slow() as s:
        (first,) = await fill(gateway, s)
        leaving, staying = await in_line(gateway, "leaves"), await in_line(gateway, "stays")
        leaving.writer.transport.abort()
        await eventually(lambda: waiting(gateway) == 1)
        assert gateway.gateway.default.stats.disconnects["queued"] == 1
        s.release()
        await eventually(lambda: len(s.gates) == 2)
        s.release()
        assert [(await a.answer()).status for a in (first, staying)] == [200, 200]
        assert s.prompts == ["full 0", "stays"]
        assert gateway.gateway.default.gate.outcomes == {(0, "left"): 1, (0, "served"): 1}
        assert gateway.gateway.default.gate.queue.bytes == 0


async def test_a_client_that_leaves_the_engine_makes_room(gateway: RunningGateway) -> None:
    async with slow() as s:
        (first,) = await fill(gateway, s)
        next_one = await in_line(gateway, "next")
        first.writer.transport.abort()
        await eventually(lambda: len(s.gates) == 2)
        s.release(2)
        assert (await next_one.answer()).status == 200


async def test_a_full_line(tmp_path: Path) -> None:
    settings = QueueSettings(max_entries=2)
    with running_gateway(tmp_path, upstream=QUIET, run_coordinator=False, queue=settings) as gateway:
        async with slow() as s:
            asked = await fill(gateway, s)
            asked += [await in_line(gateway, str(i)) for i in range(2)]
            over = await (await ask(gateway, "over")).answer()
            assert (over.status, orjson.loads(over.body)["error"]["code"]) == (429, "queue_full")
            assert int(over.headers["retry-after"]) >= 1
            late = await ask(gateway, "late", "X-Hotswap-Priority: 1\r\n")
            assert await late.code() == (503, "overloaded")
            for done in range(3):
                await eventually(lambda n=done: len(s.gates) > n)  # type: ignore[misc]
                s.release()
            assert [(await a.answer()).status for a in asked] == [200] * 3


async def test_the_less_urgent_is_sent_away_for_the_more_urgent(tmp_path: Path) -> None:
    settings = QueueSettings(max_entries=1)
    with running_gateway(tmp_path, upstream=QUIET, run_coordinator=False, queue=settings) as gateway:
        async with slow() as s:
            asked = await fill(gateway, s)
            patient = await in_line(gateway, "patient", "X-Hotswap-Priority: 1\r\n")
            asked.append(await ask(gateway, "plain"))
            assert await patient.code() == (503, "overloaded")
            s.release()
            await eventually(lambda: len(s.gates) == 2)
            s.release()
            assert [(await a.answer()).status for a in asked] == [200, 200]


async def test_a_deadline_passes(gateway: RunningGateway) -> None:
    async with slow() as s:
        (first,) = await fill(gateway, s)
        hasty = await in_line(gateway, "hasty", "X-Hotswap-Deadline-S: 0.05\r\n")
        answer = await hasty.answer()
        assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (504, "queue_timeout")
        assert "retry-after" in answer.headers
        s.release()
        assert (await first.answer()).status == 200
        assert s.prompts == ["full 0"]
        assert gateway.gateway.default.stats.requests["/v1/completions", 504] == 1


async def test_a_deadline_counts_while_no_instance_serves_too(gateway: RunningGateway) -> None:
    async with slow() as s:
        gateway.register(s.up, state="STARTING")
        hasty = await ask(gateway, "hasty", "X-Hotswap-Deadline-S: 0.05\r\n")
        assert await hasty.code() == (503, "no_instance")
        assert gateway.gateway.default.stats.holds == {("fleet", "refused"): 1}


async def test_the_longest_wait_is_over(tmp_path: Path) -> None:
    settings = QueueSettings(max_wait_s=0.05)
    with running_gateway(tmp_path, upstream=QUIET, run_coordinator=False, queue=settings) as gateway:
        async with slow() as s:
            _kept = await fill(gateway, s)
            waits = await ask(gateway, "x")
            assert await waits.code() == (504, "queue_timeout")


async def test_no_instance_any_more(tmp_path: Path) -> None:
    settings = QueueSettings(max_wait_s=0.3)
    with running_gateway(tmp_path, upstream=QUIET, run_coordinator=False, queue=settings) as gateway:
        async with slow() as s:
            _kept = await fill(gateway, s)
            waits = await in_line(gateway, "x")
            gateway.unregister()
            assert await waits.code() == (503, "no_instance")


async def test_room_that_comes_with_another_instance(gateway: RunningGateway) -> None:
    async with slow() as s, slow() as other:
        _kept = await fill(gateway, s)
        waits = await in_line(gateway, "x")
        gateway.register(other.up, "i1", max_num_seqs=1)
        await eventually(lambda: len(other.gates) == 1)
        other.release()
        assert (await waits.answer()).status == 200
        s.release()


async def test_room_that_comes_as_a_limit_grows(gateway: RunningGateway) -> None:
    async with slow() as s:
        _kept = await fill(gateway, s)
        _waits = await in_line(gateway, "x")
        gateway.gateway.default.fleet.instances["i0"].window.limit = 2
        await eventually(lambda: len(s.gates) == 2)
        s.release(2)


async def test_who_needs_a_busy_version_lets_others_pass(gateway: RunningGateway) -> None:
    async with slow() as s, slow() as other:
        (first,) = await fill(gateway, s, active_version=1)
        gateway.register(other.up, "i1", active_version=2, max_num_seqs=1)
        gateway.gateway.default.fleet.instances["i1"].window.limit = 1
        second = await ask(gateway, "second")
        await eventually(lambda: len(other.gates) == 1)
        bound = await in_line(gateway, "bound", "X-Hotswap-Version: 1\r\n")
        plain = await in_line(gateway, "plain")
        other.release()
        await eventually(lambda: len(other.gates) == 2)  # "plain": "bound" came first, but may not be answered here
        assert gateway.gateway.default.gate.queue.set_aside == 1
        s.release()
        await eventually(lambda: len(s.gates) == 2)
        s.release()
        other.release()
        assert [(await a.answer()).status for a in (first, second, bound, plain)] == [200] * 4
        assert (s.prompts, other.prompts) == (["full 0", "bound"], ["second", "plain"])


async def test_a_version_nobody_serves_is_no_matter_of_room(gateway: RunningGateway) -> None:
    async with slow() as s:
        _kept = await fill(gateway, s)
        _waits = await in_line(gateway, "x")
        unmet = await ask(gateway, "y", "X-Hotswap-Version: 99\r\n")
        assert await unmet.code() == (409, "version_unavailable")
        s.release()
        await eventually(lambda: len(s.gates) == 2)
        s.release()


async def test_those_held_wait_in_line_when_an_instance_comes(gateway: RunningGateway) -> None:
    async with slow() as s:
        gateway.register(s.up, state="STARTING", max_num_seqs=1)
        asked = [await ask(gateway, str(i)) for i in range(4)]
        await eventually(lambda: len(gateway.gateway.default.fleet.room) == 4)
        gateway.register(s.up, max_num_seqs=1)
        await eventually(lambda: len(s.gates) == 2)
        assert waiting(gateway) == 2
        for done in range(4):
            await eventually(lambda n=done: len(s.gates) > n)  # type: ignore[misc]
            s.release()
        assert [(await a.answer()).status for a in asked] == [200] * 4
        assert s.prompts == ["0", "1", "2", "3"]
        assert gateway.gateway.default.stats.holds == {("fleet", "served"): 2, ("fleet", "queued"): 2}


async def test_a_retry_keeps_its_place(gateway: RunningGateway) -> None:
    """Refused by an instance for its version, it goes to another that is full, past those in line."""

    async def refuse(link: Link, _: Received) -> None:
        await reached.wait()
        await link.json(status=b"409 Conflict", extra=b"x-hotswap-refused: version\r\n")

    reached = asyncio.Event()
    async with slow() as s, upstream(refuse) as refusing:
        (first,) = await fill(gateway, s)
        gateway.register(refusing, "i1", max_num_seqs=1)
        gateway.gateway.default.fleet.instances["i1"].window.limit = 1
        retried = await ask(gateway, "retried")
        await eventually(lambda: len(refusing.requests) == 1)
        waits = await in_line(gateway, "waits", "X-Hotswap-Version: 1\r\n")
        gateway.gateway.default.fleet.instances["i1"].window.limit = 0
        reached.set()
        await eventually(lambda: len(s.gates) == 2)
        assert s.prompts == ["full 0", "retried"]
        s.release(2)
        await eventually(lambda: len(s.gates) == 3)
        s.release()
        assert [(await a.answer()).status for a in (first, retried, waits)] == [200] * 3


async def test_no_limit_where_none_is_wanted(tmp_path: Path) -> None:
    settings = UpstreamSettings(scrape_interval_s=3600.0, max_in_flight=0)
    with running_gateway(tmp_path, upstream=settings, run_coordinator=False) as gateway:
        async with slow() as s:
            gateway.register(s.up, max_num_seqs=1)
            asked = [await ask(gateway, str(i)) for i in range(20)]
            await eventually(lambda: len(s.gates) == 20)
            s.release(20)
            assert [(await a.answer()).status for a in asked] == [200] * 20
            assert not gateway.gateway.default.gate.outcomes


async def test_the_line_moves_on_while_the_gateway_ends(tmp_path: Path) -> None:
    async with slow() as s:
        with running_gateway(tmp_path, upstream=QUIET, run_coordinator=False) as gateway:
            asked = await fill(gateway, s)
            asked.append(await in_line(gateway, "x"))
            gateway.stop()

            async def nobody_listens() -> bool:
                try:
                    (await gateway.connect())[1].close()
                except OSError:
                    return True
                return False

            await eventually(nobody_listens)
            s.release()
            await eventually(lambda: len(s.gates) == 2)
            s.release()
            assert [(await a.answer()).status for a in asked] == [200, 200]


async def test_what_metrics_say(gateway: RunningGateway) -> None:
    async with slow() as s:
        asked = await fill(gateway, s)
        asked.append(await in_line(gateway, "x", "X-Hotswap-Priority: 4\r\n"))
        assert await metrics(gateway) >= {
            'hotswap_gateway_queue_depth{model="toy",priority="4"} 1.0',
            'hotswap_gateway_queue_bytes{model="toy"} 29.0',
            'hotswap_instance_in_flight_limit{instance_id="i0",model="toy"} 1.0',
        }
        s.release()
        await eventually(lambda: len(s.gates) == 2)
        s.release()
        assert [(await a.answer()).status for a in asked] == [200, 200]
        assert await metrics(gateway) >= {
            'hotswap_gateway_queue_depth{model="toy",priority="4"} 0.0',
            'hotswap_gateway_queue_outcomes_total{model="toy",outcome="served",priority="4"} 1.0',
            'hotswap_gateway_queue_wait_seconds_count{model="toy",priority="4"} 1.0',
            'hotswap_gateway_queue_aside{model="toy"} 0.0',
        }


async def metrics(gateway: RunningGateway) -> set[str]:
    return set((await gateway.ask(get("/metrics"))).body.decode().splitlines())
