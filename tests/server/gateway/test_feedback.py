"""POST /v1/feedback, and what is kept of answers, over real connections: who may rate what, what reaches the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from server.gateway.admin.feedback import LOOK_UPS
from server.gateway.config import AnswerSettings
from tests.server import continued
from tests.server.gateway.harness import ADMIN, RunningGateway, admin, new_key, post, running_gateway
from tests.server.gateway.upstream import Answer, Link, Received, Upstream
from tests.waiting import eventually

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}], "stream": True, "temperature": 0.5}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), answers=AnswerSettings(segment_s=0.01)) as running:
        yield running


async def answer_chat(link: Link, received: Received) -> None:
    """As vLLM does: the id of the answer is made of that of the request."""
    await link.send(continued.HEAD % (continued.STAMPED % 3))
    answer_id = f"chatcmpl-{received.headers['x-request-id']}"
    await link.send(continued.framed(continued.chat([5, 6, 7], 3, answer_id=answer_id)))
    await link.send(continued.END)


@pytest.fixture
async def instance(gateway: RunningGateway) -> AsyncIterator[Upstream]:
    async with gateway.instance(answer_chat, active_version=3) as found:
        yield found
        gateway.unregister()


async def collecting(gateway: RunningGateway, **fields: Any) -> str:
    """The header line of a new key whose answers are kept."""
    return (await new_key(gateway, **{"collect": True, **fields}))[1]


async def asked(gateway: RunningGateway, key: str, **fields: Any) -> str:
    """The id of a new answer, as its client sees it."""
    answer = await gateway.ask(post("/v1/chat/completions", {**CHAT, **fields}, key))
    assert answer.status == 200, answer.body
    return str(orjson.loads(answer.body.partition(b"data: ")[2].partition(b"\n\n")[0])["id"])


async def rate(gateway: RunningGateway, key: str, body: dict[str, Any] | bytes, *, port: bool = False) -> Answer:
    return await gateway.ask(post("/v1/feedback", body, key), admin=port)


def logged(gateway: RunningGateway) -> list[dict[str, Any]]:
    directory = Path(gateway.gateway.config.answers_url)
    lines = [line for path in sorted(directory.glob("*.jsonl")) for line in path.read_bytes().splitlines()]
    return [orjson.loads(line) for line in lines]


async def records(gateway: RunningGateway, answer_id: str, count: int) -> list[dict[str, Any]]:
    """Those of one answer, once there are so many."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = [record for record in logged(gateway) if record["id"] == answer_id]
        return len(found) >= count

    await eventually(there)
    assert len(found) == count
    return found


async def test_an_answer_and_what_is_said_of_it_reach_the_log(gateway: RunningGateway, instance: Upstream) -> None:
    key = await collecting(gateway, name="ada")
    answer_id = await asked(gateway, key, metadata={"task": "7"})
    said = {"id": answer_id, "rating": "down", "correction": "Good day", "comment": "rude", "metadata": {"page": 2}}
    taken = await rate(gateway, key, said)
    assert (taken.status, orjson.loads(taken.body)) == (
        200, {"id": answer_id, "status": "accepted", "gateway": "this"},
    )  # fmt: skip
    answer, feedback = sorted(await records(gateway, answer_id, 2), key=lambda record: record["record"])
    assert answer["messages"] == CHAT["messages"]
    assert answer["parameters"] == {"temperature": 0.5}
    assert answer["metadata"] == {"task": "7"}
    (choice,) = answer["choices"]
    assert choice["text"] == "<5> é\n<6> é\n."
    assert choice["token_ids"] == [5, 6, 7]
    assert choice["weight_versions"] == [{"version": 3, "start": 0, "end": 3}]
    assert answer["about"]["key"] == "ada"
    assert answer["about"]["instance"] == "i0"
    assert (answer["about"]["first_version"], answer["about"]["last_version"]) == (3, 3)
    assert feedback["request_id"] == answer["about"]["request_id"]
    assert (feedback["score"], feedback["correction"], feedback["comment"]) == (0.0, "Good day", "rude")
    assert (feedback["key"], feedback["by"], feedback["metadata"]) == ("ada", "key", {"page": 2})
    assert (feedback["first_version"], feedback["last_version"]) == (3, 3)


async def test_a_key_opts_in_and_out_while_the_gateway_runs(gateway: RunningGateway, instance: Upstream) -> None:
    """Of the answers of other keys nothing is kept."""
    key_id, key = await new_key(gateway)
    silent = []
    for collect in (False, True, False):
        changed = await admin(gateway, "PATCH", f"/{key_id}", collect=collect)
        assert orjson.loads(changed.body)["collect"] is collect
        answer_id = await asked(gateway, key)
        rated = await rate(gateway, key, {"id": answer_id, "score": 0.5})
        if collect:
            assert rated.status == 200
        else:
            assert rated.refusal == (404, "unknown_answer")
            silent.append(answer_id)
    last = await asked(gateway, await collecting(gateway))  # what is later in the log than the others would be
    await records(gateway, last, 1)
    assert not {*silent} & {record["id"] for record in logged(gateway)}


async def test_only_the_key_that_asked_and_admins_may_rate(gateway: RunningGateway, instance: Upstream) -> None:
    mine, other = await collecting(gateway), await collecting(gateway)
    answer_id = await asked(gateway, mine)
    assert (await rate(gateway, other, {"id": answer_id, "rating": "up"})).refusal == (404, "unknown_answer")
    assert (await rate(gateway, "", {"id": answer_id, "rating": "up"})).refusal == (401, "missing_api_key")
    assert (await rate(gateway, ADMIN, {"id": answer_id, "rating": "up"})).status == 200
    assert (await rate(gateway, ADMIN, {"id": answer_id, "rating": "up"}, port=True)).status == 200
    found = await records(gateway, answer_id, 3)
    assert {record["by"] for record in found if record["record"] == "feedback"} == {"admin"}


async def test_a_later_one_replaces_and_says_what(gateway: RunningGateway, instance: Upstream) -> None:
    key = await collecting(gateway)
    answer_id = await asked(gateway, key)
    for said in ({"rating": "up"}, {"score": 0.25}, {"correction": {"content": "x"}}):
        assert (await rate(gateway, key, {"id": answer_id, **said})).status == 200
    found = [record for record in await records(gateway, answer_id, 4) if record["record"] == "feedback"]
    found.sort(key=lambda record: record["time"])
    assert [(record["replaced"], record["score"]) for record in found] == [(None, 1.0), (1.0, 0.25), (0.25, None)]


async def test_the_id_of_the_request_is_an_id_of_the_answer(gateway: RunningGateway, instance: Upstream) -> None:
    key = await collecting(gateway)
    answer = await gateway.ask(post("/v1/chat/completions", CHAT, f"{key}x-request-id: mine.1\r\n"))
    assert answer.headers["x-request-id"] == "mine.1"
    assert (await rate(gateway, key, {"id": "mine.1", "rating": "up"})).status == 200
    assert len(await records(gateway, "chatcmpl-mine.1", 2)) == 2


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{", (400, "invalid_json")),
        (b"[]", (400, "invalid_parameter")),
        ({"id": "a"}, (400, "invalid_parameter")),
        ({"rating": "up"}, (400, "invalid_parameter")),
        ({"id": "a", "rating": "sideways"}, (400, "invalid_parameter")),
        ({"id": "a", "score": 1.5}, (400, "invalid_parameter")),
        ({"id": "a", "rating": "up", "score": 1}, (400, "invalid_parameter")),
        ({"id": "a", "correction": ""}, (400, "invalid_parameter")),
        ({"id": "a", "correction": {"role": "user", "content": "x"}}, (400, "invalid_parameter")),
        ({"id": "a", "correction": {}}, (400, "invalid_parameter")),
        ({"id": "a", "rating": "up", "stars": 5}, (400, "invalid_parameter")),
        ({"id": "a", "rating": "up", "comment": "x" * 300_000}, (413, "feedback_too_large")),
        ({"id": "nobody's", "rating": "up"}, (404, "unknown_answer")),
    ],
)
async def test_what_cannot_be_taken_says_why(
    gateway: RunningGateway, body: dict[str, Any] | bytes, expected: tuple[int, str]
) -> None:
    assert (await rate(gateway, await collecting(gateway), body)).refusal == expected


async def test_feedback_counts_against_the_limit_of_requests(gateway: RunningGateway, instance: Upstream) -> None:
    key = await collecting(gateway, limits={"requests_per_min": 2})
    answer_id = await asked(gateway, key)
    assert (await rate(gateway, key, {"id": answer_id, "rating": "up"})).status == 200
    assert (await rate(gateway, key, {"id": answer_id, "rating": "up"})).refusal == (429, "requests_limit")


async def test_an_answer_is_too_old_at_last(tmp_path: Path) -> None:
    settings = AnswerSettings(feedback_s=1e-6)
    with running_gateway(tmp_path, answers=settings) as gateway:
        async with gateway.instance(answer_chat, active_version=3):
            key = await collecting(gateway)
            answer_id = await asked(gateway, key)
            assert (await rate(gateway, key, {"id": answer_id, "rating": "up"})).refusal == (404, "answer_expired")


async def test_requests_without_a_key_are_kept_where_the_gateway_is_told_so(tmp_path: Path) -> None:
    settings = AnswerSettings(anonymous=True, segment_s=0.01)
    with running_gateway(tmp_path, answers=settings) as gateway:
        async with gateway.instance(answer_chat, active_version=3):
            answer_id = await asked(gateway, "")
            foreign = await rate(gateway, "Origin: http://elsewhere\r\n", {"id": answer_id, "rating": "up"})
            assert foreign.refusal == (403, "origin_not_allowed")
            assert (await rate(gateway, "", {"id": answer_id, "rating": "up"})).status == 200
            assert (await rate(gateway, ADMIN, {"id": answer_id, "rating": "down"})).status == 200
            found = await records(gateway, answer_id, 3)
            assert {record.get("by") for record in found} == {None, "key", "admin"}


async def test_feedback_finds_the_gateway_that_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.answers.feedback.PASS_ON_S", 60.0)
    settings = AnswerSettings(segment_s=0.01)
    with running_gateway(tmp_path, answers=settings) as one, running_gateway(tmp_path, answers=settings) as other:
        async with one.instance(answer_chat, active_version=3):
            key_id, key = await new_key(one, collect=True)
            await eventually(lambda: key_id in other.gateway.keys.limits)
            answer_id = await asked(one, key)
            taken = await rate(other, key, {"id": answer_id, "rating": "up"})
            assert (taken.status, orjson.loads(taken.body)["gateway"]) == (200, "another")
            monkeypatch.setattr("server.answers.feedback.PASS_ON_S", 0.2)
            assert (await rate(other, key, {"id": "nobody's", "rating": "up"})).refusal == (404, "unknown_answer")
            stranger = await collecting(other)
            assert (await rate(other, stranger, {"id": answer_id, "rating": "up"})).refusal == (404, "unknown_answer")
            assert len(await records(one, answer_id, 2)) == 2
            assert one.store.list("gateway/feedback/")[0] == []


async def test_one_key_cannot_fill_the_store_with_look_ups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.answers.feedback.PASS_ON_S", 60.0)
    with running_gateway(tmp_path) as one, running_gateway(tmp_path) as other:
        greedy, modest = await collecting(one), await collecting(one)

        async def counted() -> int:
            return len(one.store.list("gateway/feedback/")[0])

        unknown = [{"id": f"unknown-{n}", "rating": "up"} for n in range(LOOK_UPS + 2)]
        asking = [asyncio.create_task(rate(one, greedy, said)) for said in unknown[:LOOK_UPS]]
        await eventually(lambda: sum(one.gateway.look_ups.values()) == LOOK_UPS)
        busy = await rate(one, greedy, unknown[LOOK_UPS])
        assert (busy.refusal, busy.headers["retry-after"]) == ((429, "feedback_busy"), "2")
        asking.append(asyncio.create_task(rate(one, modest, unknown[LOOK_UPS + 1])))

        async def all_ask() -> bool:
            return await counted() == LOOK_UPS + 1

        await eventually(all_ask)
        for kv in one.store.list("gateway/feedback/")[0]:
            other.store.delete(kv.key)
        await asyncio.gather(*asking)
        assert not one.gateway.look_ups
