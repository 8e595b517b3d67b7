"""Every test here is of the contract tier. `served` is a real gateway whose instance has no engine."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import orjson
import pytest
import requests
from anyio.from_thread import start_blocking_portal
from safetensors.numpy import save

from server.instance.generate import parse
from server.instance.inflight import Problem
from server.instance.provenance import problem_body
from tests.server.gateway.admin.conftest import arena
from tests.server.gateway.admin.test_admin import SETTINGS, Toy, checkpoint, participating
from tests.server.gateway.harness import ADMIN_KEY, MODEL, RunningGateway, running_gateway
from tests.server.gateway.upstream import Link, Received, upstream
from weightsync import ensure_arena

__all__ = ["arena"]  # the fixture is used by name
HERE = Path(__file__).parent
CONFIG: dict[str, Any] = {  # of the instance
    "model_config": {"dtype": "torch.bfloat16", "logprobs_mode": "raw_logprobs", "max_model_len": 128},
    "lora_config": None,
    "parallel_config": {"data_parallel_size": 1},
}
BUCKET = save({"a": np.ones((4, 4), np.float32), "b": np.ones(8, np.float32)})  # all tensors of the model
PROMPT = [5, 6, 7]  # the token ids of every prompt
REFUSALS = (RuntimeError, requests.HTTPError, aiohttp.ClientResponseError)


def gap(*values: Any, reason: str) -> Any:
    """A call that the other project's server answers and this one refuses."""
    return pytest.param(*values, 200, marks=pytest.mark.xfail(strict=True, raises=REFUSALS, reason=reason))


def check(client: Any, name: str, given: tuple[Any, ...], status: int) -> None:
    """The outcome of a call of a client's method: 200, or the status of the error that it raises."""
    with contextlib.nullcontext() if status == 200 else pytest.raises(REFUSALS) as refused:
        told = getattr(client, name)(*given)
        if inspect.iscoroutine(told):
            asyncio.run(told)
        elif inspect.isgenerator(told):
            list(told)
    if refused is not None:
        error: Any = refused.value
        found = error.status if isinstance(error, aiohttp.ClientResponseError) else error.response.status_code
        assert found == status


def calls(kind: Any) -> set[str]:
    """The public methods that a class defines itself."""
    return {name for name, found in vars(kind).items() if inspect.isfunction(found) and not name.startswith("_")}


def named(cases: list[Any]) -> set[str]:
    return {getattr(case, "values", case)[0] for case in cases}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.contract)


@dataclass
class Served:
    """`toy` notes what is swapped in; `asked` is what reached the instance."""

    gateway: RunningGateway
    toy: Toy
    asked: list[Received]

    host = f":{ADMIN_KEY}@127.0.0.1"  # the key of clients that have no setting for it

    @property
    def port(self) -> int:
        return self.gateway.admin_port

    @property
    def admin(self) -> str:
        return f"http://{self.host}:{self.port}"


async def answer(link: Link, received: Received) -> None:
    """As an instance does, in one word. `/generate` takes what an instance takes, and `/classify` vLLM's field."""
    if received.target == "/hotswap/config":
        await link.json(orjson.dumps(CONFIG))
        return
    try:
        if received.target == "/generate":
            parse(received.body)
    except Problem as problem:
        await link.json(orjson.dumps(problem_body(problem)), b"%d Refused" % problem.status)
        return
    if received.target == "/classify" and "input" not in orjson.loads(received.body):
        await link.json(b'{"error": {"message": "input: Field required"}}', b"400 Bad Request")
        return
    asked = orjson.loads(received.body or b"{}")
    message = {"message": {"role": "assistant", "content": "4"}}
    choices = [choice(asked, i) | message for i in range(_prompts(asked) * asked.get("n", 1))]
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    whole = {"id": "1", "object": "", "created": 1, "model": MODEL, "choices": choices, "usage": usage}
    whole |= {"data": [{"id": MODEL, "max_model_len": 128, "probs": [-0.5]}], "weight_version": 1}
    if asked.get("stream") and received.target == "/v1/completions":
        await link.sse_head()
        await link.chunk(b"data: " + orjson.dumps(whole) + b"\n\n")
        await link.chunk(b"data: [DONE]\n\n")
        await link.end()
        return
    await link.json(orjson.dumps(whole))


def choice(asked: dict[str, Any], index: int) -> dict[str, Any]:
    """As /v1/completions says it, with token ids and log-probabilities where they are asked for."""
    said: dict[str, Any] = {"index": index, "text": "4", "finish_reason": "stop"}
    if asked.get("return_token_ids"):
        spans = {"weight_versions": [{"version": 1, "start": 0, "end": 1}]}
        said |= {"token_ids": [8], "prompt_token_ids": PROMPT} | spans
    if asked.get("logprobs") is not None:
        ids = [*(PROMPT if asked.get("echo") else []), 8]
        names = [f"token_id:{token}" if asked.get("return_tokens_as_token_ids") else f"<{token}>" for token in ids]
        values = [None if token == PROMPT[0] else -1.0 for token in ids]
        tops = [value and {name: value} for name, value in zip(names, values, strict=True)]
        said["logprobs"] = {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
    return said


def _prompts(asked: dict[str, Any]) -> int:
    prompt = asked.get("prompt")
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, arena: Path) -> Iterator[Served]:
    """It serves a first version; clients of other projects block while they wait, so it runs on other threads."""
    directory, toy = tmp_path_factory.mktemp("served"), Toy()
    with (
        running_gateway(directory, upstream=SETTINGS, swap_deadline_s=120.0) as gateway,
        start_blocking_portal() as loop,
    ):
        gateway.store.run(ensure_arena(gateway.store.store, arena))
        with (
            loop.wrap_async_context_manager(upstream(answer)) as up,
            loop.wrap_async_context_manager(participating(gateway, toy, address=up.address)),
        ):
            found = Served(gateway, toy, up.requests)
            first = {"path": checkpoint(directory / "first"), "activate": True}
            assert httpx.post(f"{found.admin}/admin/weights", json=first, timeout=240).status_code == 200
            yield found
