"""Several models behind one gateway: names, aliases and fallbacks, keys of certain models, and the file read anew."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from server.errors import CliError
from server.gateway.config import QueueSettings, UpstreamSettings
from tests.server.gateway.commands import command
from tests.server.gateway.harness import ADMIN, RunningGateway, get, new_key, post, running_gateway
from tests.server.gateway.harness import ask as control
from tests.server.gateway.upstream import Answer, Handler, Link, Received, answering, upstream
from tests.waiting import eventually
from tests.weightsync.codes import refused
from weightsync import Adapter, Publisher
from weightsync.control.records import Keys, PartRecord, VersionRecord

TWO = """\
models:
  - name: small
  - name: big
aliases:
  fast: [small, big]
"""
QUIET = UpstreamSettings(scrape_interval_s=3600.0)  # instances get the requests of the tests alone


def answers(name: str, *, models: tuple[str, ...] = (), after: asyncio.Event | None = None) -> Handler:
    """An instance that says which model it was asked for, once `after` is set."""

    async def handle(link: Link, asked: Received) -> None:
        if after is not None:
            await after.wait()
        if asked.target == "/v1/models":
            data = [{"id": each, "object": "model", "owned_by": "vllm"} for each in (name, *models)]
            await link.json(orjson.dumps({"object": "list", "data": data}))
            return
        body = orjson.loads(asked.body)
        usage = {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5}
        head = b"x-hotswap-weight-version: 1\r\n"
        await link.json(orjson.dumps({"by": name, "model": body.get("model"), "usage": usage}), extra=head)

    return handle


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(TWO)
    return path


@pytest.fixture
def gateway(file: Path) -> Iterator[RunningGateway]:
    with running_gateway(file.parent, model="", models=file, run_coordinator=False, upstream=QUIET) as g:
        yield g


@contextlib.asynccontextmanager
async def both(gateway: RunningGateway) -> Any:
    """An instance of each model."""
    first, second = answers("small", models=("tuned",)), answers("big")
    async with (
        gateway.instance(first, "s", model="small") as small,
        gateway.instance(second, "b", model="big") as big,
    ):
        yield small, big


async def ask(gateway: RunningGateway, headers: str = "", **fields: Any) -> tuple[Answer, dict[str, Any]]:
    answer = await gateway.ask(post("/v1/completions", {"prompt": "a", "max_tokens": 2, **fields}, headers))
    return answer, orjson.loads(answer.body)


async def listed(gateway: RunningGateway, headers: str = "") -> list[str]:
    answer = await gateway.ask(get("/v1/models", headers))
    assert answer.status == 200, answer.body
    return [each["id"] for each in orjson.loads(answer.body)["data"]]


async def test_the_name_in_the_body_chooses_the_model(gateway: RunningGateway) -> None:
    async with both(gateway):
        for name, by in (("small", "small"), ("big", "big"), (None, "small")):
            answer, body = await ask(gateway, **({} if name is None else {"model": name}))
            assert (answer.status, body["by"], body["model"]) == (200, by, name)
        answer, body = await ask(gateway, model="other")
        assert (answer.status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
        assert "small" not in body["error"]["message"]
        answer = await gateway.ask(post("/generate", {"prompt": "a"}))
        assert orjson.loads(answer.body)["by"] == "small", "the first model of the file"
        page = (await gateway.ask(get("/metrics"))).body.decode()
        assert 'hotswap_gateway_requests_total{model="big",route="/v1/completions",status="200"} 1.0' in page


async def test_the_list_has_every_name(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.gateway.admin.listing.TIMEOUT_S", 60.0)
    async with both(gateway):
        assert await listed(gateway) == ["small", "tuned", "big", "fast"]
    gateway.store.delete(Keys("small").instance("s"))
    await eventually(lambda: not gateway.gateway.models["small"].fleet.instances)
    assert await listed(gateway) == ["small", "big", "fast"], "a model without an instance is there, and is said to be"


async def test_an_alias_has_the_length_that_all_its_models_take(gateway: RunningGateway) -> None:
    def tells(name: str, length: int) -> Handler:
        entry = {"id": name, "object": "model", "root": f"/models/{name}", "max_model_len": length}
        return answering(orjson.dumps({"object": "list", "data": [entry]}))

    async def alias(headers: str = "") -> dict[str, Any]:
        data = orjson.loads((await gateway.ask(get("/v1/models", headers))).body)["data"]
        return dict(next(entry for entry in data if entry["id"] == "fast"))

    assert not {"root", "max_model_len"} & (await alias()).keys(), "no instance tells them"
    async with (
        gateway.instance(tells("small", 4096), "s", model="small"),
        gateway.instance(tells("big", 2048), "b", model="big"),
    ):
        found = await alias()
        assert (found["max_model_len"], found["root"]) == (2048, "/models/small")
        _, key = await new_key(gateway, models=["fast"])
        found = await alias(key)
        assert (found["max_model_len"], "root" in found) == (2048, False), "the key may not see its models"


async def test_an_adapter_is_asked_of_its_model(gateway: RunningGateway) -> None:
    part = PartRecord("lora/tuned", 1, "slot", "0" * 32, 8)
    record = VersionRecord(1, "ready", "slot", 8, "0" * 32, None, None, "p", 1, 0.0, "", 1, parts=(part,))
    async with both(gateway) as (_, big):
        gateway.store.put(Keys("big").versions + "1", record.to_json())
        await eventually(lambda: gateway.gateway.models["big"].fleet.adapters == {"tuned"})
        _, body = await ask(gateway, model="tuned")
        assert (body["by"], body["model"]) == ("big", "tuned")
        assert len(big.requests) == 1


def test_an_adapter_is_not_called_as_a_model_or_an_alias_is(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSWAP_ARENA", str(tmp_path / "arena"))
    adapter = Adapter({"x.lora_A.weight": np.ones((2, 8), np.float32)}, {"r": 2})
    with (
        running_gateway(tmp_path, model="", models=file),
        Publisher(f"sqlite://{tmp_path / 'store.db'}", model="small") as publisher,
    ):
        publisher.publish({"x.weight": np.ones((8, 8), np.float32)}.items())
        with refused("bad_part", match="'lora/small' would take the requests for the model 'small'"):
            publisher.publish(adapter, part="lora/small")
        assert [version.version for version in publisher.versions()] == [1], "it was published"
        for name, there in (("big", "a model 'big'"), ("fast", "an alias 'fast'")):
            with refused("swap_aborted", match=f"there is {there} already"):
                publisher.publish(adapter, part=f"lora/{name}")
        version = publisher.publish(adapter, part="lora/tuned")
        assert (active := publisher.active()) is not None
        assert active.version == version
        assert [part.name for part in publisher.versions()[-1].parts] == ["lora/tuned"]


async def test_an_alias_is_answered_by_its_first_model_and_else_by_the_next(gateway: RunningGateway) -> None:
    async with gateway.instance(answers("big"), "b", model="big"):
        answer, body = await ask(gateway, model="fast")
        assert (body["by"], body["model"]) == ("big", "big")
        assert answer.headers["x-hotswap-fallback"] == "from=small; reason=no_instance"
        async with gateway.instance(answers("small"), "s", model="small"):
            answer, body = await ask(gateway, model="fast")
            assert (body["by"], body["model"], answer.headers.get("x-hotswap-fallback")) == ("small", "small", None)
        answer, body = await ask(gateway, model="fast")  # it is on record still, and takes no connection
        assert (body["by"], answer.headers["x-hotswap-fallback"]) == ("big", "from=small; reason=instance_unreachable")
        assert gateway.gateway.models["small"].stats.fallbacks["big", "no_instance"] == 1
        assert gateway.gateway.models["small"].stats.inflight == gateway.gateway.models["big"].stats.inflight == 0


async def test_a_full_queue_falls_back_and_a_lost_answer_does_not(file: Path) -> None:
    release = asyncio.Event()

    async def slow(link: Link, asked: Received) -> None:
        if b"die" in asked.body:
            link.cut()
        else:
            await answers("small", after=release)(link, asked)

    settings = {"model": "", "models": file, "run_coordinator": False, "queue": QueueSettings(max_entries=0)}
    with running_gateway(file.parent, **settings, upstream=replace(QUIET, max_in_flight=1)) as gateway:
        big = gateway.instance(answers("big"), "b", model="big")
        async with gateway.instance(slow, "s", model="small") as small, big:
            first = asyncio.create_task(ask(gateway, model="fast"))
            await eventually(lambda: len(small.requests) == 1)
            answer, body = await ask(gateway, model="fast")
            assert (body["by"], answer.headers["x-hotswap-fallback"]) == ("big", "from=small; reason=overloaded")
            release.set()
            assert (await first)[1]["by"] == "small"
            answer, body = await ask(gateway, model="fast", prompt="die")
            assert (answer.status, body["error"]["code"]) == (502, "upstream_died"), "it may be what killed it"


async def test_limits_are_counted_once(gateway: RunningGateway) -> None:
    async with gateway.instance(answers("big"), "b", model="big"):
        _, key = await new_key(gateway, limits={"requests_per_min": 10, "tokens_per_min": 1000})
        answer, body = await ask(gateway, key, model="fast")
        assert body["by"] == "big"
        answer, _ = await ask(gateway, key, model="big")
        left = answer.headers["x-ratelimit-remaining-requests"], answer.headers["x-ratelimit-remaining-tokens"]
        assert left == ("8", str(1000 - 8 - (2 + len(b'{"prompt":"a","max_tokens":2,"model":"big"}') // 4 + 1)))


async def test_a_key_of_certain_models_sees_no_other(gateway: RunningGateway) -> None:
    async with both(gateway):
        _, key = await new_key(gateway, models=["big", "fast"])
        assert await listed(gateway, key) == ["big", "fast"]
        answer, body = await ask(gateway, key, model="small")
        assert (answer.status, body["error"]["code"]) == (404, "model_not_found")
        answer, same = await ask(gateway, key, model="nothing")
        assert same["error"]["message"].replace("nothing", "small") == body["error"]["message"]
        assert (await ask(gateway, key, model="big"))[1]["by"] == "big"
        assert (await ask(gateway, key, model="fast"))[1]["by"] == "small", "an alias leads where it leads"
        assert (await ask(gateway, key))[0].status == 404, "the default model is not the key's"


async def reload(gateway: RunningGateway, text: str) -> Answer:
    """The answer to a file of models with this text."""
    file = gateway.gateway.config.models
    assert file is not None
    file.write_text(text)
    return await gateway.ask(post("/admin/models/reload", b"", ADMIN), admin=True)


async def test_control_routes_say_which_model(gateway: RunningGateway) -> None:
    status, body = await control(gateway, "GET", "/weights")
    assert (status, body["code"]) == (400, "model_needed")
    status, body = await control(gateway, "GET", "/weights?model=big")
    assert (status, body["model"]) == (200, "big")
    assert (await control(gateway, "GET", "/instances?model=fast"))[0] == 404
    _, body = await control(gateway, "GET", "/models")
    assert [(row["name"], row["default"]) for row in body["models"]] == [("small", True), ("big", False)]
    assert body["aliases"] == {"fast": ["small", "big"]}


async def test_the_file_is_read_anew_without_losing_a_request(gateway: RunningGateway) -> None:
    done = asyncio.Event()
    statuses: list[int] = []

    async def asking() -> None:
        while not done.is_set():
            answer, _ = await ask(gateway, model="big")
            statuses.append(answer.status)

    finish = asyncio.Event()
    async with (
        gateway.instance(answers("small", after=finish), "s", model="small") as small,
        gateway.instance(answers("big"), "b", model="big") as big,
        upstream(answers("third")) as third,
    ):
        tasks = [asyncio.create_task(asking()) for _ in range(4)]
        held = asyncio.create_task(ask(gateway, model="small"))
        await eventually(lambda: len(small.requests) == 1)
        refused = await reload(gateway, "models: [{name: big}, {name: third}]\naliases: {fast: third}\n")
        assert refused.status == 422, "what stands for the gateway cannot go while it runs"
        assert "small" in refused.error["message"]
        three = "models: [{name: big}, {name: small}, {name: third}]\naliases: {fast: third}\n"
        assert (await reload(gateway, three)).status == 200
        gateway.register(third, "t", model="third")
        assert (await ask(gateway, model="fast"))[1]["by"] == "third"
        assert (await ask(gateway))[1]["by"] == "big", "the first of the file as it is now"
        for wrong in ("models: []\n", "models: [{name: big}, {name: big}]\n", "models: [{nam: big}]\n", "models: [\n"):
            assert (await reload(gateway, wrong)).refusal == (422, "bad_models_file")
        assert (await ask(gateway, model="third"))[1]["by"] == "third", "the one before stays"
        waiting = asyncio.create_task(ask(gateway, model="small"))
        await eventually(lambda: len(small.requests) == 2)
        assert (await reload(gateway, "models: [{name: big}, {name: small}]\n")).status == 200
        assert (await ask(gateway, model="third"))[0].status == 404
        finish.set()
        assert (await held)[1]["by"] == (await waiting)[1]["by"] == "small"
        done.set()
        await asyncio.gather(*tasks)
        assert set(statuses) == {200}
        assert len(big.requests) > len(tasks)


async def test_a_model_that_goes_answers_what_it_has(gateway: RunningGateway) -> None:
    finish = asyncio.Event()
    async with gateway.instance(answers("big", after=finish), "b", model="big") as big:
        going = asyncio.create_task(ask(gateway, model="big"))
        await eventually(lambda: len(big.requests) == 1)
        assert (await reload(gateway, "models: [{name: small}]\n")).status == 200
        assert gateway.gateway._retiring
        finish.set()
        assert (await going)[1]["by"] == "big"
        await eventually(lambda: not gateway.gateway._retiring)


def test_commands_say_which_model(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["weights", "list"], ["instances", "list"], ["release", "status"]):
        with pytest.raises(CliError, match="Say which model"):
            command(gateway, *words)
        command(gateway, *words, "--model", "big")
        with monkeypatch.context() as patch:
            patch.setenv("HOTSWAP_MODEL", "small")
            command(gateway, *words)
    command(gateway, "keys", "create", "me", "--model", "big", "--tokens-per-month", "9")
    (key,) = orjson.loads(command(gateway, "keys", "list", "--json"))["keys"]
    assert (key["models"], key["spent"]["tokens"], key["spent"]["left"]) == (["big"], 0, 9)
    shown = " ".join(command(gateway, "keys", "list").split())
    assert all(word in shown for word in ("big", "tokens/month", "used;", "resets"))
