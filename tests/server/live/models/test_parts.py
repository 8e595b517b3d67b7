"""The draft model and LoRA adapters, swapped by the same transaction as the base or with it, on real engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from loadtest.models.checkpoints import make_adapter, make_checkpoint
from tests.live import VLLM_ARGS, LiveServer, events
from tests.server.live.swaps.test_crossings import samples_keep_their_terms
from tests.waiting import wait_until
from weightsync import Adapter, Publisher

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900, func_only=True)]  # a start has a limit of its own
LONG = 500  # tokens: long enough for a swap to come in the middle
THROUGH = 300  # the same of an engine that serves adapters, whose steps take longer
PROMPTS = [[(7 * i + 3 * j) % 500 + 3 for j in range(12)] for i in range(2)]
ACCEPTED, PROPOSED = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"


def push(live: LiveServer, path: Path, part: str = "", *, activate: bool = True, **parts: Path) -> httpx.Response:
    body: dict[str, Any] = {"path": str(path), "part": part, "activate": activate}
    body["parts"] = {name.replace("_", "/"): str(where) for name, where in parts.items()}
    return live.admin.post("/admin/weights", json=body)


def pushed(live: LiveServer, path: Path, part: str = "", *, activate: bool = True, **parts: Path) -> int:
    answer = push(live, path, part, activate=activate, **parts)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["version"])


def answers(live: LiveServer, model: str | None = None) -> list[list[int]]:
    more = {"model": model} if model else {}
    return [live.generate(p, 24, **more)["choices"][0]["token_ids"] for p in PROMPTS]


def record(live: LiveServer, version: int) -> dict[str, Any]:
    (found,) = [v for v in live.admin.get("/admin/weights").json()["versions"] if v["version"] == version]
    return dict(found)


async def stream(
    live: LiveServer, tokens: int, model: str | None = None, begun: asyncio.Event | None = None
) -> list[tuple[int, int]]:
    """(token, version that wrote it) of one long answer. `begun`: set with its first token."""
    body = {"prompt_token_ids": PROMPTS[0], "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"model": model} if model else {}
    seen: list[int] = []
    done: dict[str, Any] = {}
    async for event in events({"base_url": live.url}, body):
        done = event
        seen += done.get("token_ids", [])
        if begun is not None:
            begun.set()
    spans = done["choices"][0]["weight_versions"]
    versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    return list(zip(seen, versions, strict=True))


# the draft model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the shape of `a`, and it seldom says the same."""
    return make_checkpoint(tmp_path_factory.mktemp("draft") / "d", seed=9, scale=3.0)


@pytest.fixture(scope="module")
def drafting(
    checkpoints: dict[str, Path], draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Serves `a` with speculation by `draft`, which comes with the first version."""
    config = json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3})
    args = (*VLLM_ARGS, "--speculative-config", config)
    with LiveServer(checkpoints["a"], tmp_path_factory.mktemp("drafting"), args, name="drafting").running() as server:
        first = record(server, 1)
        assert ([part["name"] for part in first["parts"]], first["base_version"]) == (["draft"], None)
        yield server


def acceptance(live: LiveServer) -> tuple[float, list[list[int]]]:
    """(share of proposed tokens that the target took, the answers) over one round of the prompts."""
    before = live.engine_metric(ACCEPTED), live.engine_metric(PROPOSED)
    found = answers(live)
    accepted, proposed = live.engine_metric(ACCEPTED) - before[0], live.engine_metric(PROPOSED) - before[1]
    assert proposed > 0
    return accepted / proposed, found


def test_draft_swaps_change_speed_and_never_an_answer(
    drafting: LiveServer, checkpoints: dict[str, Path], draft: Path
) -> None:
    start = pushed(drafting, checkpoints["a"], draft=draft)
    poor, expected = acceptance(drafting)
    version = pushed(drafting, checkpoints["a"], "draft")
    good, same = acceptance(drafting)
    assert same == expected
    assert poor < 0.3 < 0.9 < good
    carried = record(drafting, version)
    assert (carried["slot"], carried["base_version"]) == (record(drafting, start)["slot"], start)
    drafting.rollback()
    back, same = acceptance(drafting)
    assert same == expected
    assert back < 0.3
    assert drafting.activate(version).status_code == 200


async def test_base_and_draft_in_one_version(drafting: LiveServer, checkpoints: dict[str, Path]) -> None:
    """Constant-answer weights and a draft model that knows their answer: all of it changes at one token."""
    first = await asyncio.to_thread(pushed, drafting, checkpoints["say-0"], draft=checkpoints["say-0"])
    say_1 = checkpoints["say-1"]
    second = await asyncio.to_thread(pushed, drafting, say_1, draft=say_1, activate=False)
    token = {first: 100, second: 101}
    for version in (second, first) * 4:  # a stream may be through before the commit
        begun = asyncio.Event()
        task = asyncio.create_task(stream(drafting, LONG, begun=begun))
        await begun.wait()
        assert (await asyncio.to_thread(drafting.activate, version)).status_code == 200
        written = await task
        assert [(t, v) for t, v in written if t != token[v]] == []
        if crossed := {v for _, v in written} == {first, second}:
            break
    assert crossed, "no stream crossed a swap"
    assert acceptance(drafting)[0] > 0.9
    assert record(drafting, second)["parts"][0]["version"] == second


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["keep", "recompute", "finish", "abort"])
async def test_speculation_keeps_to_what_requests_ask_of_swaps(
    drafting: LiveServer, checkpoints: dict[str, Path], policy: str
) -> None:
    """The draft model knows one answer and the weights give two: drafts are taken and refused while swaps go on."""
    await asyncio.to_thread(pushed, drafting, checkpoints["say-0"], draft=checkpoints["say-0"])
    await samples_keep_their_terms(drafting, checkpoints, policy, samples=1)


def test_a_bad_draft_model_aborts_the_whole_swap(
    drafting: LiveServer, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    before = drafting.active(), acceptance(drafting)
    wide = make_checkpoint(tmp_path / "wide", intermediate_size=512)
    refused = push(drafting, checkpoints["b"], draft=wide)
    assert refused.status_code == 422, refused.text
    assert refused.json()["error"]["tensor"].startswith("model.layers.0.mlp")
    adapter = make_adapter(tmp_path / "x", seed=1)
    aborted = push(drafting, checkpoints["b"], draft=checkpoints["b"], lora_x=adapter)
    assert aborted.status_code == 409, aborted.text
    assert "--enable-lora" in aborted.json()["error"]["message"]
    assert (drafting.active(), acceptance(drafting)) == before


# LoRA adapters -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    made = {name: make_adapter(root / name, seed=i, rank=4 * i) for i, name in enumerate(("one", "two"), 1)}
    return made | {"bad": make_adapter(root / "bad", seed=3, intermediate_size=248)}


@pytest.fixture(scope="module")
def lora(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    args = (*VLLM_ARGS, "--enable-lora", "--max-loras", "2", "--max-lora-rank", "16")
    with LiveServer(checkpoints["a"], tmp_path_factory.mktemp("lora"), args, name="lora").running() as server:
        yield server


def test_an_adapter_is_served_from_its_commit_on(lora: LiveServer, adapters: dict[str, Path]) -> None:
    before, base = lora.active(), answers(lora)
    asked = {"model": "org/new@v2", "prompt": PROMPTS[0], "max_tokens": 4}
    assert lora.client.post("/v1/completions", json=asked).status_code == 404
    first = pushed(lora, adapters["one"], "lora/org/new@v2")
    one = answers(lora, "org/new@v2")
    assert one != base
    completion = lora.client.post("/v1/completions", json=asked | {"temperature": 0, "return_token_ids": True})
    assert completion.status_code == 200, completion.text
    assert completion.json()["choices"][0]["token_ids"] == one[0][:4]
    assert completion.json()["weight_version"] == first
    assert "org/new@v2" in [card["id"] for card in lora.client.get("/v1/models").json()["data"]]
    second = pushed(lora, adapters["two"], "lora/org/new@v2")
    two = answers(lora, "org/new@v2")
    assert two not in (one, base)
    assert answers(lora) == base, "an adapter's swap changed the base model"
    lora.rollback()
    assert answers(lora, "org/new@v2") == one
    assert answers(lora) == base
    assert lora.activate(second).status_code == 200
    assert answers(lora, "org/new@v2") == two
    assert record(lora, second)["base_version"] == (record(lora, before)["base_version"] or before)


def test_adapters_come_and_are_rolled_back_again_and_again(lora: LiveServer, adapters: dict[str, Path]) -> None:
    """The version before has no such adapter, each time as the first time."""
    before = lora.active(), answers(lora)
    for name in ("one", "two", "one"):
        pushed(lora, adapters[name], "lora/guest")
        assert answers(lora, "guest") != before[1]
        lora.rollback()
        assert (lora.active(), answers(lora)) == before
        assert lora.client.post("/generate", json={"model": "guest", "prompt": "a"}).status_code == 404


def test_an_adapter_comes_and_goes_by_the_routes_of_stock(lora: LiveServer, adapters: dict[str, Path]) -> None:
    base, guest = answers(lora), []
    for name in ("one", "two"):  # the second replaces the first, which vLLM does with `load_inplace` alone
        body = {"lora_name": "guest", "lora_path": str(adapters[name])}
        loaded = lora.admin.post("/v1/load_lora_adapter", json=body)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'guest' added successfully.")
        guest.append(answers(lora, "guest"))
    assert guest[0] != guest[1]
    assert base not in guest
    refused = lora.admin.post("/v1/load_lora_adapter", json={"lora_name": "guest", "lora_path": str(adapters["bad"])})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "shape_mismatch"), refused.text
    assert answers(lora, "guest") == guest[1], "no request meets the one that the engine refuses"
    unloaded = lora.admin.post("/v1/unload_lora_adapter", json={"lora_name": "guest"})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'guest' removed successfully.")
    assert lora.client.post("/generate", json={"model": "guest", "prompt": "a"}).status_code == 404
    assert answers(lora) == base


@pytest.mark.parametrize("policy", ["keep", "recompute", "abort", "finish"])
async def test_an_answer_through_an_adapter_ends_where_no_version_has_it(
    lora: LiveServer, adapters: dict[str, Path], policy: str
) -> None:
    """The base would go on under a label that is true of it, and the adapter under one that is not."""
    body = {"model": "guest", "prompt_token_ids": PROMPTS[0], "max_tokens": THROUGH, "ignore_eos": True, "stream": True}
    for _ in range(8):  # on a busy machine the swap may come when everything is said
        version = await asyncio.to_thread(pushed, lora, adapters["one"], "lora/guest")
        swap: asyncio.Task[None] | None = None
        labels = set()
        async for event in events({"base_url": lora.url}, body, headers={"x-hotswap-policy": policy}):
            labels |= {event["weight_version"]} if "weight_version" in event else set()
            swap = swap or asyncio.create_task(asyncio.to_thread(lora.rollback))
        assert swap is not None
        await swap
        assert labels == {version}
        if policy == "finish" or "error" in event:
            break
    if policy == "finish":
        assert event["choices"][0]["weight_versions"] == [{"version": version, "start": 0, "end": THROUGH}]
    else:
        assert event["error"]["code"] == "weights_changed"
    assert lora.client.get("/readyz").status_code == 200


async def test_streams_through_an_adapter_go_on_with_its_new_weights(
    lora: LiveServer, adapters: dict[str, Path]
) -> None:
    """Tokens before the swap are those of the old adapter, and labelled so; then the other's."""
    first = await asyncio.to_thread(pushed, lora, adapters["one"], "lora/x")
    alone = [token for token, _ in await stream(lora, THROUGH, "x")]
    base = [token for token, _ in await stream(lora, THROUGH)]
    second = await asyncio.to_thread(pushed, lora, adapters["two"], "lora/x", activate=False)
    for attempt in range(8):  # on a busy machine the swap may come when everything is said
        if attempt:
            await asyncio.to_thread(lora.rollback)
        begun = {model: asyncio.Event() for model in ("x", None)}
        tasks = [asyncio.create_task(stream(lora, THROUGH, model, event)) for model, event in begun.items()]
        await asyncio.gather(*(event.wait() for event in begun.values()))
        assert (await asyncio.to_thread(lora.activate, second)).status_code == 200
        adapted, plain = await asyncio.gather(*tasks)
        if adapted[THROUGH - 100][1] == second:
            break
    assert {v for _, v in adapted} == {first, second}, "the stream did not cross the swap"
    crossed = next(i for i, (_, v) in enumerate(adapted) if v == second)
    assert [t for t, _ in adapted[:crossed]] == alone[:crossed]
    assert [t for t, _ in adapted] != alone
    assert [t for t, _ in plain] == base


def test_a_bad_adapter_takes_the_base_of_its_version_with_it(
    lora: LiveServer, adapters: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    pushed(lora, adapters["one"], "lora/x")
    before = lora.active(), answers(lora), answers(lora, "x")
    answer = push(lora, checkpoints["b"], lora_x=adapters["bad"])
    assert answer.status_code == 409, answer.text
    assert "lora/x" in answer.json()["error"]["message"]
    assert (lora.active(), answers(lora), answers(lora, "x")) == before


def test_base_and_adapters_swap_together(
    lora: LiveServer, adapters: dict[str, Path], checkpoints: dict[str, Path]
) -> None:
    """More adapters than the engine has places for: each is found again when it is wanted."""
    parts = {"lora_x": adapters["two"], "lora_y": adapters["one"], "lora_z": adapters["two"]}
    pushed(lora, checkpoints["a"], lora_x=adapters["one"])
    before = answers(lora), answers(lora, "x")
    version = pushed(lora, checkpoints["b"], **parts)
    base, x, y, z = (answers(lora, model) for model in (None, "x", "y", "z"))
    assert base != before[0]
    assert x == z != y
    assert [answers(lora, model) for model in ("y", "z", "x")] == [y, z, x]
    made = {part["name"]: part["version"] for part in record(lora, version)["parts"]}
    assert {made[name.replace("_", "/")] for name in parts} == {version}
    lora.rollback()
    assert (answers(lora), answers(lora, "x")) == before
    assert lora.client.post("/generate", json={"model": "y", "prompt": "a"}).status_code == 404


def test_adapters_and_versions_have_prefix_caches_of_their_own(lora: LiveServer, adapters: dict[str, Path]) -> None:
    prompt = [(11 * j) % 400 + 5 for j in range(400)]

    def hits(model: str) -> float:
        before = lora.engine_metric("vllm:prefix_cache_hits_total")
        lora.generate(prompt, 2, model=model)
        return lora.engine_metric("vllm:prefix_cache_hits_total") - before

    pushed(lora, adapters["one"], "lora/x")
    assert hits("x") == 0
    assert hits("x") > 0
    assert hits("lora") == 0, "the base model hit what an adapter computed"
    second = pushed(lora, adapters["two"], "lora/x")
    assert hits("x") == 0
    assert hits("x") > 0
    assert hits("lora") > 0, "another adapter's version took the base model's blocks"
    lora.rollback()
    assert hits("x") > 0
    assert hits("lora") > 0
    assert lora.activate(second).status_code == 200
    assert hits("x") > 0


async def test_what_a_request_has_computed_stays_when_another_one_s_adapter_goes(
    lora: LiveServer, adapters: dict[str, Path]
) -> None:
    """A withdrawal has answers computed again, and a swap those that ask for it: not those whose weights stay."""
    expected = [token for token, _ in await stream(lora, THROUGH)]
    for _ in range(8):  # on a busy machine the swaps may come when everything is said
        version = await asyncio.to_thread(pushed, lora, adapters["one"], "lora/guest")
        before = lora.engine_metric("vllm:num_preemptions_total")
        begun = asyncio.Event()
        task = asyncio.create_task(stream(lora, THROUGH, begun=begun))
        await begun.wait()
        await asyncio.to_thread(lora.rollback)
        seen = await task
        if len({v for _, v in seen}) == 2:
            break
    assert {v for _, v in seen} == {version, lora.active()}, "the stream did not cross the swap"
    assert [token for token, _ in seen] == expected
    assert lora.engine_metric("vllm:num_preemptions_total") == before


@pytest.mark.broad
def test_an_instance_that_was_killed_comes_back_with_its_adapters(lora: LiveServer, adapters: dict[str, Path]) -> None:
    version = pushed(lora, adapters["one"], "lora/x")
    expected = answers(lora), answers(lora, "x")
    former = lora.instance()["pid"]
    lora.processes.children["instance-0"].process.kill()

    def back() -> bool:
        lora.processes.restart_ended()
        return any(i["eligible"] and i["pid"] != former for i in lora.instances())

    wait_until(back, 150)
    assert lora.instance()["active_version"] == version
    assert (answers(lora), answers(lora, "x")) == expected


# editions of an adapter ----------------------------------------------------------------------------------------------


@pytest.fixture
def tuner(lora: LiveServer) -> Iterator[Publisher]:
    with Publisher(lora.processes.store, model="lora", lineage="tuner") as publisher:
        yield publisher
        publisher.withdraw_edition("tuned")


def saved(path: Path) -> Adapter:
    config = json.loads((path / "adapter_config.json").read_text())
    return Adapter(load_file(path / "adapter_model.safetensors"), config)


def edition(live: LiveServer, publisher: Publisher, path: Path, **more: Any) -> int:
    """Published, and known to the gateway."""
    number = publisher.publish_edition("tuned", saved(path), **more)
    wait_until(lambda: number in editions(live), 60)
    return number


def editions(live: LiveServer) -> list[int]:
    listed = live.client.get("/v1/models").json()["data"]
    return next((card["hotswap"]["editions"] for card in listed if card["id"] == "tuned"), [])


def test_editions_of_an_adapter_are_served_side_by_side_without_a_swap(
    lora: LiveServer, adapters: dict[str, Path], checkpoints: dict[str, Path], tuner: Publisher
) -> None:
    wanted = {}
    for name in ("one", "two"):
        pushed(lora, adapters[name], "lora/reference")
        wanted[name] = answers(lora, "reference")
    active, base = lora.active(), answers(lora)
    first = edition(lora, tuner, adapters["one"], keep=2)
    second = edition(lora, tuner, adapters["two"], keep=2)
    assert answers(lora, f"tuned@{first}") == wanted["one"]
    assert answers(lora, "tuned") == answers(lora, f"tuned@{second}") == wanted["two"]
    assert answers(lora, f"tuned@{first}") == wanted["one"]
    said = lora.client.post("/v1/completions", json={"model": "tuned", "prompt": PROMPTS[0], "max_tokens": 2}).json()
    assert (said["model"], said["weight_version"]) == (f"tuned@{second}", active)
    assert (lora.active(), answers(lora)) == (active, base)
    third = tuner.publish_edition("tuned", saved(adapters["one"]), keep=2)
    assert answers(lora, f"tuned@{third}") == wanted["one"], "by its number at once, whatever the gateway knows"
    wait_until(lambda: editions(lora) == [third, second], 60)
    gone = lora.client.post("/v1/completions", json={"model": f"tuned@{first}", "prompt": PROMPTS[0]})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    pushed(lora, checkpoints["b"], lora_reference=adapters["one"])
    assert answers(lora, "tuned") == answers(lora, "reference") != wanted["one"], "on the base that runs now"
    lora.rollback()
    assert answers(lora, "tuned") == wanted["one"]


async def test_a_stream_through_an_edition_is_through_it_to_its_end(
    lora: LiveServer, adapters: dict[str, Path], tuner: Publisher
) -> None:
    await asyncio.to_thread(edition, lora, tuner, adapters["one"])
    alone = [token for token, _ in await stream(lora, THROUGH, "tuned")]
    begun = asyncio.Event()
    task = asyncio.create_task(stream(lora, THROUGH, "tuned", begun))
    await begun.wait()
    await asyncio.to_thread(edition, lora, tuner, adapters["two"], keep=1)
    await asyncio.to_thread(pushed, lora, adapters["two"], "lora/reference")
    assert [token for token, _ in await task] == alone
    assert [token for token, _ in await stream(lora, THROUGH, "tuned")] != alone


def test_a_bad_edition_is_refused_and_the_others_are_served(
    lora: LiveServer, adapters: dict[str, Path], tuner: Publisher
) -> None:
    good = edition(lora, tuner, adapters["one"])
    before = answers(lora, "tuned")
    bad = edition(lora, tuner, adapters["bad"])
    for _ in range(5):  # no circuit opens
        refused = lora.client.post("/v1/completions", json={"model": "tuned", "prompt": PROMPTS[0]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "shape_mismatch"), refused.text
        assert f"tuned@{bad} cannot be served" in refused.json()["error"]["message"]
    assert answers(lora, f"tuned@{good}") == before
    assert tuner.withdraw_edition("tuned", bad) == [bad]
    wait_until(lambda: editions(lora) == [good], 60)
    assert answers(lora, "tuned") == before
