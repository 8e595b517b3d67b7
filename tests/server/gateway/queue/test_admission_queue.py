"""The queue in a running gateway, in front of a scripted upstream that answers when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest

from server.gateway import QueueSettings, UpstreamSettings
from tests.server.gateway.fleet.test_hold import metrics
from tests.server.gateway.harness import Client, RunningGateway, get, post, private, running_gateway
from tests.server.gateway.upstream import Link, Received, Upstream, upstream
from tests.waiting import eventually

QUIET = UpstreamSettings(scrape_interval_s=3600.0, hold_s=60.0)


@dataclass
class Slow:
    """Answers one request for every `release`, in the order they came, and all at once when it is told to finish."""

    up: Upstream
    gates: list[asyncio.Event] = field(default_factory=list)
    answer: bytes = b'{"ok":true}'
    waits: bool = True

    def release(self, count: int = 1) -> None:
        for gate in [g for g in self.gates if not g.is_set()][:count]:
            gate.set()

    async def finish(self, asked: list[Client]) -> None:
        """These are answered."""
        self.waits = False
        self.release(len(self.gates))
        assert [(await each.answer()).status for each in asked] == [200] * len(asked)

    @property
    def prompts(self) -> list[str]:
        """Of the requests that got here."""
        return [orjson.loads(r.body)["prompt"] for r in self.up.requests]


@contextlib.asynccontextmanager
async def slow() -> AsyncIterator[Slow]:
    async def handler(link: Link, received: Received) -> None:
        if received.method == "POST" and received.target == "/v1/completions":
            self.gates.append(gate := asyncio.Event())
            if self.waits:
                await gate.wait()
        await link.json(self.answer)

    async with upstream(handler) as up:
        self = Slow(up)
        yield self


@pytest.fixture
def gateway(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningGateway]:
    settings = getattr(request, "param", QueueSettings())
    with running_gateway(tmp_path, upstream=QUIET, run_coordinator=False, queue=settings) as g:
        yield g


async def ask(gateway: RunningGateway, prompt: str, headers: str = "") -> Client:
    """Returns when the gateway has it, at an instance, in line or refused. A test that drops the client hangs up."""
    model, refused = gateway.gateway.default, gateway.gateway.stats.refused
    gate, stats = model.gate, model.stats
    before = stats.inflight + sum(refused.values())
    client = Client(*await gateway.connect())
    client.writer.write(post(body={"prompt": prompt, "max_tokens": 1}, headers=headers))
    await eventually(lambda: stats.inflight + sum(refused.values()) > before or gate.outcomes.total() > before)
    return client


async def fill(gateway: RunningGateway, slow: Slow, count: int = 1, **fields: object) -> list[Client]:
    """An instance that runs `count` requests, and those."""
    gateway.register(slow.up, max_num_seqs=1, **fields)
    gateway.gateway.default.fleet.instances["i0"].window.limit = count
    asked = [await ask(gateway, f"full {i}") for i in range(count)]
    await eventually(lambda: len(slow.gates) == count)
    return asked


def waiting(gateway: RunningGateway) -> int:
    return len(gateway.gateway.default.gate.queue)


async def in_line(gateway: RunningGateway, prompt: str, headers: str = "") -> Client:
    before = waiting(gateway)
    asked = await ask(gateway, prompt, headers)
    await eventually(lambda: waiting(gateway) == before + 1)
    return asked


async def test_what_an_instance_can_run_goes_there_and_the_rest_waits(gateway: RunningGateway) -> None:
    async with slow() as s:
        gateway.register(s.up, max_num_seqs=8)
        asked = [await ask(gateway, str(i)) for i in range(12)]
        await eventually(lambda: (len(s.gates), waiting(gateway)) == (9, 3))
        s.release(2)
        await eventually(lambda: len(s.gates) == 11)
        await s.finish(asked)
        assert s.prompts[9:] == ["9", "10", "11"]
        assert gateway.gateway.default.gate.outcomes == {(0, "served"): 3}


async def test_cheap_routes_pass_by(gateway: RunningGateway) -> None:
    async with slow() as s:
        asked = [*await fill(gateway, s), await in_line(gateway, "waits")]
        for request in (get("/v1/models"), post("/tokenize"), get("/healthz"), get("/metrics")):
            assert (await gateway.ask(request)).status == 200
        assert waiting(gateway) == 1
        await s.finish(asked)


async def test_the_more_urgent_go_first_as_far_as_their_key_allows(gateway: RunningGateway) -> None:
    async with slow() as s:
        asked = await fill(gateway, s)
        asked.append(await in_line(gateway, "patient", "X-Hotswap-Priority: 9\r\n"))
        asked.append(await in_line(gateway, "less", "X-Hotswap-Priority: 3\r\n"))
        asked.append(await in_line(gateway, "plain"))
        refused = await ask(gateway, "pushy", "X-Hotswap-Priority: -1\r\n")
        assert (await refused.answer()).refusal == (403, "priority_not_allowed")
        await s.finish(asked)
        assert s.prompts == ["full 0", "plain", "less", "patient"]
        told = [r.headers.get("x-hotswap-priority") for r in s.up.requests]
        assert told == [None, None, "3", "9"]


async def test_the_wish_in_the_body(gateway: RunningGateway) -> None:
    async with gateway.instance() as up:
        body = {"prompt": "x", "hotswap": {"priority": 2, "deadline_s": 30}}
        assert (await gateway.ask(post(body=body))).status == 200
        assert up.requests[0].body == b'{"prompt":"x"}'
        assert up.requests[0].headers["x-hotswap-priority"] == "2"
        for wrong in ({"priority": 10}, {"priority": 1.5}, {"deadline_s": 0}, {"deadline_s": -1}):
            assert (await gateway.ask(post(body={"hotswap": wrong}))).status == 400
        for line in ("X-Hotswap-Priority: x", "X-Hotswap-Priority: 10", "X-Hotswap-Deadline-S: 0"):
            assert (await gateway.ask(post(headers=line + "\r\n"))).status == 400


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
        # "next" has paid for "dear" and itself; the one that did not wait was free
        assert flow.start == 5001 + last.cost
        await s.finish(asked)


async def test_a_client_that_hangs_up_has_had_its_prompt(tmp_path: Path) -> None:
    """The key that breaks off every answer is charged for what the instance read, and does not go first for it."""
    keys = ("key-of-the-first-tester", "key-of-the-second-tester")
    first, second = (f"Authorization: Bearer {key}\r\n" for key in keys)
    file = private(tmp_path / "keys", "\n".join(keys))
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

    async def break_off(asked: Client) -> None:
        await asked.reader.readuntil(b"data: ")
        asked.writer.close()

    with running_gateway(tmp_path, upstream=QUIET, run_coordinator=False, api_key_file=file) as keyed:
        async with keyed.instance(handler, max_num_seqs=1):
            keyed.gateway.default.fleet.instances["i0"].window.limit = 1
            reading = [await ask(keyed, "is read", second)]
            hanging = [await in_line(keyed, "hangs up" + "x" * 20_000, first) for _ in range(7)]
            reading += [await in_line(keyed, "is read", second) for _ in range(7)]
            breaking = [asyncio.create_task(break_off(each)) for each in hanging]
            begin.set()
            assert [(await each.answer()).status for each in reading] == [200] * 8
            await asyncio.gather(*breaking)
    assert "hangs up " * 3 not in " ".join(arrived[:-3]) + " ", "they take turns"


async def test_a_client_that_leaves_frees_its_place(gateway: RunningGateway) -> None:
    async with slow() as s:
        (first,) = await fill(gateway, s)
        leaving, staying = await in_line(gateway, "leaves"), await in_line(gateway, "stays")
        leaving.writer.transport.abort()
        await eventually(lambda: waiting(gateway) == 1)
        assert gateway.gateway.default.stats.disconnects["queued"] == 1
        await s.finish([first, staying])
        assert s.prompts == ["full 0", "stays"]
        assert gateway.gateway.default.gate.outcomes == {(0, "left"): 1, (0, "served"): 1}
        assert gateway.gateway.default.gate.queue.bytes == 0


async def test_a_client_that_leaves_the_engine_makes_room(gateway: RunningGateway) -> None:
    async with slow() as s:
        (first,) = await fill(gateway, s)
        next_one = await in_line(gateway, "next")
        first.writer.transport.abort()
        await eventually(lambda: len(s.gates) == 2)
        await s.finish([next_one])


@pytest.mark.parametrize("gateway", [QueueSettings(max_entries=2)], indirect=True)
async def test_a_full_line_sends_away_the_less_urgent_and_then_the_newest(gateway: RunningGateway) -> None:
    async with slow() as s:
        asked = await fill(gateway, s)
        patient = await in_line(gateway, "patient", "X-Hotswap-Priority: 1\r\n")
        asked.append(await in_line(gateway, "first"))
        asked.append(await ask(gateway, "second"))
        assert (await patient.answer()).refusal == (503, "overloaded")
        over = await (await ask(gateway, "over")).answer()
        assert over.refusal == (429, "queue_full")
        assert int(over.headers["retry-after"]) >= 1
        late = await ask(gateway, "late", "X-Hotswap-Priority: 1\r\n")
        assert (await late.answer()).refusal == (503, "overloaded")
        await s.finish(asked)


async def test_a_deadline_passes(gateway: RunningGateway) -> None:
    async with slow() as s:
        (first,) = await fill(gateway, s)
        hasty = await ask(gateway, "hasty", "X-Hotswap-Deadline-S: 0.05\r\n")
        answer = await hasty.answer()
        assert answer.refusal == (504, "queue_timeout")
        assert "retry-after" in answer.headers
        await s.finish([first])
        assert s.prompts == ["full 0"]
        assert gateway.gateway.default.stats.requests["/v1/completions", 504] == 1


async def test_a_deadline_counts_while_no_instance_serves_too(gateway: RunningGateway) -> None:
    async with slow() as s:
        gateway.register(s.up, state="STARTING")
        hasty = await ask(gateway, "hasty", "X-Hotswap-Deadline-S: 0.5\r\n")
        assert (await hasty.answer()).refusal == (503, "no_instance")
        assert gateway.gateway.default.stats.holds == {("fleet", "refused"): 1}


async def test_no_instance_any_more(gateway: RunningGateway) -> None:
    async with slow() as s:
        asked = [*await fill(gateway, s), await in_line(gateway, "x")]
        gateway.unregister()
        hasty = await ask(gateway, "hasty", "X-Hotswap-Deadline-S: 0.5\r\n")  # in line, as "x" is
        assert (await hasty.answer()).refusal == (503, "no_instance")
        gateway.register(s.up, max_num_seqs=1)
        await s.finish(asked)


async def test_room_that_comes_with_another_instance(gateway: RunningGateway) -> None:
    async with slow() as s, slow() as other:
        kept, waits = await fill(gateway, s), await in_line(gateway, "x")
        gateway.register(other.up, "i1", max_num_seqs=1)
        await eventually(lambda: len(other.gates) == 1)
        await other.finish([waits])
        await s.finish(kept)


async def test_room_that_comes_as_a_limit_grows(gateway: RunningGateway) -> None:
    async with slow() as s:
        asked = [*await fill(gateway, s), await in_line(gateway, "x")]
        gateway.gateway.default.fleet.instances["i0"].window.limit = 2
        await eventually(lambda: len(s.gates) == 2)
        await s.finish(asked)


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
        await s.finish([first, bound])
        await other.finish([second, plain])
        assert (s.prompts, other.prompts) == (["full 0", "bound"], ["second", "plain"])


async def test_a_version_nobody_serves_is_no_matter_of_room(gateway: RunningGateway) -> None:
    async with slow() as s:
        asked = [*await fill(gateway, s), await in_line(gateway, "x")]
        unmet = await ask(gateway, "y", "X-Hotswap-Version: 99\r\n")
        assert (await unmet.answer()).refusal == (409, "version_unavailable")
        await s.finish(asked)


async def test_those_held_wait_in_line_when_an_instance_comes(gateway: RunningGateway) -> None:
    async with slow() as s:
        gateway.register(s.up, state="STARTING", max_num_seqs=1)
        asked = [await ask(gateway, str(i)) for i in range(4)]
        await eventually(lambda: len(gateway.gateway.default.fleet.room) == 4)
        gateway.register(s.up, max_num_seqs=1)
        await eventually(lambda: len(s.gates) == 2)
        assert waiting(gateway) == 2
        await s.finish(asked)
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
        await s.finish([first, retried, waits])


async def test_the_line_moves_on_while_the_gateway_ends(gateway: RunningGateway) -> None:
    async with slow() as s:
        asked = [*await fill(gateway, s), await in_line(gateway, "x")]
        gateway.stop()
        await eventually(gateway.refuses)
        await s.finish(asked)


async def test_what_metrics_say(gateway: RunningGateway) -> None:
    async with slow() as s:
        asked = await fill(gateway, s)
        asked.append(await in_line(gateway, "x", "X-Hotswap-Priority: 4\r\n"))
        assert await metrics(gateway) >= {
            'hotswap_gateway_queue_depth{model="toy",priority="4"} 1.0',
            'hotswap_gateway_queue_bytes{model="toy"} 29.0',
            'hotswap_instance_in_flight_limit{instance_id="i0",model="toy"} 1.0',
        }
        await s.finish(asked)
        assert await metrics(gateway) >= {
            'hotswap_gateway_queue_depth{model="toy",priority="4"} 0.0',
            'hotswap_gateway_queue_outcomes_total{model="toy",outcome="served",priority="4"} 1.0',
            'hotswap_gateway_queue_wait_seconds_count{model="toy",priority="4"} 1.0',
            'hotswap_gateway_queue_aside{model="toy"} 0.0',
        }
